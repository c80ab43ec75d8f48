"""Places that callers share: nobody gets all of them, and who waits gets the next one in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque


class Places:
    """So many places, of which one caller has a share at most. Used from one event loop."""

    def __init__(self, count: int, share: int) -> None:
        self._free, self._share = count, share
        self._held: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    def take(self, caller: str) -> bool:
        """Take a place now. False: there is none for this caller, or others wait for it."""
        is_due = all(
            self._held[other] >= self._share or turn.done() for other, turn in self._waiting
        )
        if not self._free or self._held[caller] >= self._share or not is_due:
            return False
        self._take(caller)
        return True

    async def wait(self, caller: str) -> None:
        """Take a place as soon as it is this caller's turn."""
        if self.take(caller):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((caller, turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give(caller)
            raise
        finally:
            with contextlib.suppress(ValueError):  # its turn came
                self._waiting.remove((caller, turn))

    def give(self, caller: str) -> None:
        """Give a place back: to the first that waits and has not its share."""
        self._free += 1
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        for each in self._waiting:
            other, turn = each
            if self._held[other] < self._share and not turn.done():  # else it leaves
                self._waiting.remove(each)
                self._take(other)
                turn.set_result(None)
                return

    def _take(self, caller: str) -> None:
        self._free -= 1
        self._held[caller] += 1
