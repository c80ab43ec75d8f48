"""Puts that the daemon refuses, in its log."""

from __future__ import annotations

import logging

from ecd.base.clock import Clock
from ecd.base.log_limit import LogLimit
from ecd.core.model.outcomes import EntryTooLarge, PoolFull, Reservation
from ecd_proto.contract import pool_full, shown, size_text, too_large

logger = logging.getLogger(__name__)


class RefusedPuts:
    """Logs refused puts, at most one a minute for each cause and namespace."""

    def __init__(self, clock: Clock) -> None:
        self._lines = LogLimit(clock)

    def note(self, namespace: str, outcome: Reservation) -> None:
        if not isinstance(outcome, EntryTooLarge | PoolFull):
            return
        more = self._lines.take((type(outcome), outcome.quota_bytes > 0, namespace))
        if more is not None:
            about = {"namespace": namespace, "nbytes": outcome.nbytes}
            size, where, why = size_text(outcome.nbytes), shown(namespace), _why(namespace, outcome)
            logger.warning(
                "a put of %s in namespace %s is refused: %s%s", size, where, why, more, extra=about
            )


def _why(namespace: str, outcome: EntryTooLarge | PoolFull) -> str:
    match outcome:
        case EntryTooLarge():
            return too_large(namespace, outcome.pool_bytes, outcome.quota_bytes)
        case PoolFull():
            held = outcome.held_bytes, outcome.largest_free_bytes, outcome.quota_bytes
            return pool_full(namespace, *held)
