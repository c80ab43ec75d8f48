"""Settings that a running daemon can change."""

from __future__ import annotations

import logging

from ecd.settings.config import RELOADABLE, Config

logger = logging.getLogger(__name__)

PRICE = {"host_pool_bytes": "; if the pool is smaller than it was, that start is cold"}
"""The end of the line about a changed setting, where the restart loses something."""


def taken_over(old: Config, new: Config) -> tuple[list[str], Config]:
    """The names of the settings that differ, and `old` with those of `new` that can change now.

    Logs each, and which have to wait for the next start.
    """
    changed = [name for name in type(new).model_fields if getattr(new, name) != getattr(old, name)]
    at_once = [name for name in changed if name in RELOADABLE]
    if new.directory_kind != old.directory_kind:
        at_once = [name for name in at_once if name != "peers"]
    for name in changed:
        if name in at_once:
            logger.info("%s is %s now", name, getattr(new, name))
        else:
            logger.warning("%s changed: the next start takes it over%s", name, PRICE.get(name, ""))
    if not changed:
        logger.info("no setting has changed")
    return changed, old.model_copy(update={name: getattr(new, name) for name in at_once})
