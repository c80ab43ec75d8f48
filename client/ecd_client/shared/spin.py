"""Short waits for another process, which is about to store a word in shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from ecd_client import clock

Found = TypeVar("Found")


def spin(look: Callable[[], Found], within_s: float) -> Found | None:
    """Call `look` until it finds something, and let others run in between. None: not in time."""
    deadline_s = clock.now_s() + within_s
    while not (found := look()):
        if clock.now_s() > deadline_s:
            return None
        os.sched_yield()
    return found
