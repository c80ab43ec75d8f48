"""The client's clock: no other module of `ecd_client` reads the time, sleeps or draws random bytes.

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
"""Block this thread for this many seconds."""
random_bytes = secrets.token_bytes
"""Random bytes that cannot be guessed, this many."""
secret = secrets.token_hex
"""Random bytes that cannot be guessed, this many, as hexadecimal text."""


def booted_s() -> float:
    """When the machine started, in seconds since 1970."""
    return unix_s() - time.clock_gettime(time.CLOCK_BOOTTIME)


def now_text() -> str:
    """The time as RFC 3339 writes it, with this machine's zone."""
    return local(unix_s()).astimezone().isoformat(timespec="milliseconds")


def local(at_unix_s: float) -> datetime:
    """The time in the local form."""
    return datetime.fromtimestamp(at_unix_s)
