"""Short waits for another process, which is about to store a word in shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def spin(look: Callable[[], Found], within_s: float) -> Found | None:
    """Call `look` until it finds something, letting others run in between. None: not in time."""
    deadline_s = time.perf_counter() + within_s
    while not (found := look()):
        if time.perf_counter() > deadline_s:
            return None
        os.sched_yield()
    return found
