"""Answers that are held back briefly while they could only say "wait"."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ecd.core.model.outcomes import (
    Acquisition,
    Leased,
    LimitReached,
    Missing,
    Stored,
    Waiting,
    Wakeup,
)
from ecd.core.model.types import SessionId, Ticket
from ecd.live.live import LiveCache

HOLD_S = 0.005
"""How long an answer with only waits is held back: most fetches take less."""


@dataclass(eq=False)
class _Held:
    """The waits of one call without an answer yet."""

    waiting: set[Ticket]
    over: asyncio.Future[None]
    ended: dict[Ticket, Leased | Stored | Missing | LimitReached] = field(default_factory=dict)

    def end(self, wakeup: Wakeup) -> None:
        self.ended[wakeup.ticket] = wakeup.outcome
        if len(self.ended) == len(self.waiting):
            self.let_go()

    def let_go(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class HeldAnswers:
    """All answers that are held back now, by the tickets of their waits."""

    def __init__(self, live: LiveCache) -> None:
        self._live = live
        self._answers: dict[Ticket, _Held] = {}

    def take(self, wakeup: Wakeup) -> bool:
        """Add the end of a wait to the held answer. False: there is none."""
        answer = self._answers.pop(wakeup.ticket, None)
        if answer is not None:
            answer.end(wakeup)
        return answer is not None

    async def hold(self, session: SessionId, outcomes: list[Acquisition]) -> list[Acquisition]:
        """Hold back an answer of waits alone, for HOLD_S at most, and put in those that end.

        One delayed answer is cheaper than "wait" and an event after it.
        """
        waiting = {outcome.ticket for outcome in outcomes if isinstance(outcome, Waiting)}
        if not waiting or any(isinstance(outcome, Leased | Stored) for outcome in outcomes):
            return outcomes
        loop = asyncio.get_running_loop()
        answer = _Held(waiting, loop.create_future())
        self._answers |= dict.fromkeys(waiting, answer)
        late = loop.call_later(HOLD_S, answer.let_go)
        try:
            await answer.over
        except BaseException:
            for ended in answer.ended.values():
                self._live.drop(session, ended)
            raise
        finally:
            late.cancel()
            for ticket in waiting:
                self._answers.pop(ticket, None)
        return [
            answer.ended.get(outcome.ticket, outcome) if isinstance(outcome, Waiting) else outcome
            for outcome in outcomes
        ]
