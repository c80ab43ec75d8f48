"""Places that requests share: no caller, and no large request, keeps others from them.

Behind a gateway all users are one caller. So every other place that comes free goes to the waiting
request with the fewest media, which then does not wait for all media of large ones. The rest
go to the oldest, so that large requests get on beside any number of small ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Asker:
    """One request of a caller. `media` counts its media that have a place or wait for one."""

    caller: str
    media: int = 0
    turns: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def turn(self) -> asyncio.Future[None] | None:
        """The first waiting medium that was not withdrawn meanwhile."""
        return next((turn for turn in self.turns if not turn.done()), None)


class Places:
    """A limited number of places, of which one caller has a share. Used from one event loop.

    A request waits only while all places are taken, or its caller has its share.
    """

    def __init__(self, count: int, share: int) -> None:
        self._free, self._share = count, share
        self._held: Counter[str] = Counter()
        self._waiting: dict[Asker, None] = {}  # the oldest first
        self._goes_by_age = False

    def take(self, asker: Asker) -> bool:
        """Take a place now. False: there is none for this caller."""
        if not self._free or self._held[asker.caller] >= self._share:
            return False
        asker.media += 1
        self._take(asker)
        return True

    async def wait(self, asker: Asker) -> None:
        """Take a place as soon as it is this request's turn."""
        if self.take(asker):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asker.media += 1
        asker.turns.append(turn)
        self._waiting.setdefault(asker)
        try:
            await turn
        except BaseException:
            if turn.cancelled():
                asker.media -= 1
                self._leave(asker, turn)
            else:  # its turn came meanwhile
                self.give(asker)
            raise

    def give(self, asker: Asker) -> None:
        """Give a place back: to a waiting request whose caller does not have its share."""
        asker.media -= 1
        self._free += 1
        self._held[asker.caller] -= 1
        if not self._held[asker.caller]:
            del self._held[asker.caller]
        after = self._next()
        if after is not None and (turn := after.turn):
            self._goes_by_age = not self._goes_by_age
            self._leave(after, turn)
            self._take(after)
            turn.set_result(None)

    def _next(self) -> Asker | None:
        """The request that is due: the oldest one, or the oldest of the smallest ones."""
        chosen: Asker | None = None
        for asker in self._waiting:
            if chosen is not None and asker.media >= chosen.media:
                continue
            if self._held[asker.caller] < self._share and asker.turn:
                chosen = asker
                if self._goes_by_age or asker.media == 1:
                    break
        return chosen

    def _take(self, asker: Asker) -> None:
        self._free -= 1
        self._held[asker.caller] += 1

    def _leave(self, asker: Asker, turn: asyncio.Future[None]) -> None:
        asker.turns.remove(turn)
        if not asker.turns:
            del self._waiting[asker]
