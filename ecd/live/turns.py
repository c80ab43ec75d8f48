"""The event loop's turns, shared among calls that take longer than one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ecd.base.clock import Clock

A = TypeVar("A")
B = TypeVar("B")

PIECE = 32
"""Items of a batch done in one turn: most take some 10 us, those that evict up to 1 ms."""
PIECE_S = 0.001
"""How long a piece may take before it ends early."""


class Turns:
    """In each turn of the loop one piece of one call, in order, however many calls there are."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def any(self) -> None:
        """Wait for a turn, unless no call has the present one: before a first piece."""
        if self._taken or self._waiting:
            await self.next()
        else:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._over)

    def _over(self) -> None:
        self._taken = False

    async def next(self) -> None:
        """Wait for a turn: before each piece of a call except the first."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._give)
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _give(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its call was cancelled
                turn.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._give)

    def pace(self) -> Pace:
        return Pace(self)


class Pace:
    """One call's work, in pieces."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._begin()

    def _begin(self) -> None:
        self._left, self._started_s = PIECE, self._turns.clock.now_s()

    async def step(self) -> None:
        """Before each item: wait for a turn if the piece is done. The state may change then."""
        if not self._left or self._turns.clock.now_s() - self._started_s > PIECE_S:
            await self.turn()
        self._left -= 1

    async def turn(self) -> None:
        """End the piece."""
        await self._turns.next()
        self._begin()

    async def each(self, do: Callable[[A], B], items: Iterable[A]) -> list[B]:
        done: list[B] = []
        for item in items:
            await self.step()
            done.append(do(item))
        return done

    async def through(self, scan: Iterator[None]) -> None:
        """Take all steps of a scan, one a turn."""
        for _ in scan:
            await self.turn()
