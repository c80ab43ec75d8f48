"""Puts that clients make without a call, as the core on the event loop takes them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ecd.core.model.outcomes import Wakeup
from ecd.core.model.types import SessionId


class Taken(NamedTuple):
    """How many puts were stored or refused, and the waits that this ended."""

    puts: int = 0
    woken: Sequence[Wakeup] = ()


class Intake(Protocol):
    """Puts that clients make without a call, stored in the core a few at a time."""

    @property
    def is_pending(self) -> bool:
        """Whether `step` or `grant_next` has work to do."""

    @property
    def taken(self) -> int:
        """How many session pages have been emptied since the start."""

    @property
    def collected(self) -> int:
        """The count that `taken` reaches when all pages collected so far are emptied."""

    def listen(self, rung: Callable[[], None]) -> None:
        """Have `rung` called on the event loop whenever a client has finished a put."""

    def collect(self) -> None:
        """Queue the pages whose clients have rung since the last call."""

    def hurry(self) -> None:
        """Store puts at once while a caller waits for one, or may."""

    def step(self, now_s: float) -> Taken:
        """Store the puts of some queued pages."""

    def grant_next(self, now_s: float) -> None:
        """Grant memory to one session that has put; this may evict."""

    def take_last(self, session: SessionId, now_s: float) -> Taken:
        """Store all finished puts of one session."""

    def welcome(self, session: SessionId, now_s: float) -> None:
        """Give a new session memory for its first puts, if much is free: it may never put."""

    def grant(self, session: SessionId, nbytes: int, now_s: float) -> None:
        """Give the session memory for some puts of this size, if it has less."""


class NoPuts:
    """The intake of a daemon in which every put is a call."""

    is_pending = False
    taken = collected = 0

    def listen(self, rung: Callable[[], None]) -> None:
        pass

    def collect(self) -> None:
        pass

    def hurry(self) -> None:
        pass

    def step(self, now_s: float) -> Taken:
        return Taken()

    def grant_next(self, now_s: float) -> None:
        pass

    def take_last(self, session: SessionId, now_s: float) -> Taken:
        return Taken()

    def welcome(self, session: SessionId, now_s: float) -> None:
        pass

    def grant(self, session: SessionId, nbytes: int, now_s: float) -> None:
        pass
