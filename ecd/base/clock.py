"""The clock of a daemon: no other module of `ecd` reads the time, waits, or draws random numbers.

`Daemon` makes one and hands it down; a simulation hands down its own.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time


class Clock:
    """Time and randomness, as the machine has them."""

    now_s = staticmethod(time.monotonic)  # which costs no more than the function itself
    """Seconds since some moment, for durations and deadlines; never set back."""

    def unix_s(self) -> float:
        """Seconds since 1970, to show to people and to compare with other machines."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Let other tasks of the event loop run for this long, or for one turn (0)."""
        await asyncio.sleep(seconds)

    def block(self, seconds: float) -> None:
        """Keep this thread waiting."""
        time.sleep(seconds)

    def uniform(self, least: float, most: float) -> float:
        """A random number between these two."""
        return random.uniform(least, most)

    def secret(self, nbytes: int) -> bytes:
        """Random bytes that cannot be guessed."""
        return secrets.token_bytes(nbytes)


REAL = Clock()
"""The machine's clock, the default of parts that no simulation runs, such as files and locks."""
