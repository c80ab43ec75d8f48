"""Processes that still map the pool of an earlier daemon, so that its memory is not free."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ecd_proto.leftovers import user
from ecd_proto.shm.files import POOL_SUFFIX


def advice(directory: Path) -> str:
    """A sentence that names the processes that have to end, as far as this user can see them."""
    if found := processes(directory):
        return (
            f"The pool of an earlier daemon is still mapped by {', '.join(found)}. End them, or "
            "let a stopped one go on (kill -CONT). "
        )
    if os.geteuid() == 0:
        return ""
    find = f"grep -ls '/{directory.name}/.*{POOL_SUFFIX}' /proc/[0-9]*/maps"
    return (
        "Another user's process may still map the pool of an earlier daemon: as root "
        f"`{find}` finds it. "
    )


def processes(directory: Path) -> list[str]:
    """Name, number and owner of each process that this user can see."""
    pool = re.compile(rf"/{re.escape(directory.name)}/[0-9a-f]+{re.escape(POOL_SUFFIX)}\b")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not this user's to see
            if pool.search((process / "maps").read_text(errors="replace")):
                found.append(_describe(process))
    return found


def _describe(process: Path) -> str:
    """A description of the process, for people. Raises OSError: it has ended."""
    status = dict(
        line.split(":\t", 1)
        for line in (process / "status").read_text().splitlines()
        if ":\t" in line
    )
    stopped = ", stopped" if status["State"].startswith("T") else ""
    return f"{status['Name']} (pid {process.name}{stopped}, of {user(process.stat().st_uid)})"
