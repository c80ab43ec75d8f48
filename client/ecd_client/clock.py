"""The client's clock: nothing else in `ecd_client` reads the time, sleeps or draws lots.

A module, as the client's threads, its hooks in an engine and its command line have one process.
"""

from __future__ import annotations

import secrets
import time
from datetime import datetime

now_s = time.monotonic
"""Seconds since some moment that all processes of the node share, for durations and deadlines."""
unix_s = time.time
"""Seconds since 1970, to show to people and to compare with files and other machines."""
sleep = time.sleep
"""Keep this thread waiting for so many seconds."""
secret = secrets.token_hex
"""So many bytes that nobody can guess, as hexadecimal text."""


def booted_s() -> float:
    """When the machine started, in seconds since 1970."""
    return unix_s() - time.clock_gettime(time.CLOCK_BOOTTIME)


def local(at_unix_s: float) -> datetime:
    """A moment as people here write it."""
    return datetime.fromtimestamp(at_unix_s)
