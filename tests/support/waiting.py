"""How tests wait: for a state, with one bound that says nothing of speed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

HANG_S = 60.0
"""After this, what must come counts as hung. A success ends the wait: the bound costs nothing."""
LOOK_S = 0.01


def eventually(holds: Callable[[], object], what: str = "") -> None:
    """Wait until `holds()` is true, and look once more after HANG_S."""
    value_of(holds, what)


def value_of(look: Callable[[], T], what: str = "") -> T:
    """Wait until `look()` returns something true, and return that."""
    until_s = time.monotonic() + HANG_S
    while True:
        is_last = time.monotonic() > until_s
        if found := look():
            return found
        assert not is_last, f"not within {HANG_S:.0f} s: {what or look}"
        time.sleep(LOOK_S)


async def eventually_async(holds: Callable[[], object], what: str = "") -> None:
    """As `eventually`, on the event loop, which goes on meanwhile."""
    until_s = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < until_s, f"not within {HANG_S:.0f} s: {what or holds}"
        await asyncio.sleep(LOOK_S / 10)


async def within_hang(awaitable: Awaitable[T]) -> T:
    """Await what must come."""
    return await asyncio.wait_for(awaitable, HANG_S)


# -- processes that stand still ----------------------------------------------------------------


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread of the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    await_stopped(pid)


def await_stopped(pid: int) -> None:
    """Wait until a process that was sent SIGSTOP, or stops itself, stands still."""
    try:
        flags = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
        value_of(lambda: os.waitid(os.P_PID, pid, flags), f"process {pid} stands still")
    except ChildProcessError:  # it is another's child

        def is_stopped() -> bool:
            threads = Path(f"/proc/{pid}/task").glob("*/stat")
            return all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in threads)

        eventually(is_stopped, f"process {pid} stands still")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still within the block."""
    stop(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGCONT)
