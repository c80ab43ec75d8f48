"""Waits: clients wait for a key and are woken by its commit, without polling."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from ecd.core.model.deadlines import Deadlines
from ecd.core.model.types import Answer, Key, SessionId, Ticket, WaitFor

Name = TypeVar("Name")


class Wait(NamedTuple):
    ticket: Ticket
    session: SessionId
    key: Key
    wait_for: WaitFor
    answer: Answer


class Waits:
    """Waits by key, by session and by deadline."""

    def __init__(self) -> None:
        self._waits: dict[Ticket, Wait] = {}
        self._by_key: dict[Key, dict[Ticket, None]] = {}
        self._by_session: dict[SessionId, dict[Ticket, None]] = {}
        self._deadlines: Deadlines[Ticket] = Deadlines()
        self._last = 0

    def __len__(self) -> int:
        return len(self._waits)

    def count(self, session: SessionId) -> int:
        return len(self._by_session.get(session, ()))

    def add(
        self, session: SessionId, key: Key, due_s: float, wait_for: WaitFor, answer: Answer
    ) -> Ticket:
        """Begin a wait that ends at `due_s` at the latest."""
        self._last += 1
        ticket = Ticket(self._last)
        self._waits[ticket] = Wait(ticket, session, key, wait_for, answer)
        self._by_key.setdefault(key, {})[ticket] = None
        self._by_session.setdefault(session, {})[ticket] = None
        self._deadlines.add(ticket, due_s)
        return ticket

    def take_for_key(self, key: Key) -> list[Wait]:
        """End all waits for `key`, the oldest first."""
        tickets = self._by_key.get(key)
        return [self._drop(self._waits[ticket]) for ticket in list(tickets)] if tickets else []

    def take_writer_lost(self, key: Key) -> list[Wait]:
        """End the waits for a writer of `key`, the oldest first: no client writes it any more."""
        return [
            self._drop(wait)
            for ticket in list(self._by_key.get(key, ()))
            if (wait := self._waits[ticket]).wait_for is WaitFor.WRITER
        ]

    def take_due(self, now_s: float, most: int) -> list[Wait]:
        """End waits that are due, after `most` steps in the heap (see `Deadlines.take_due`)."""
        return [
            self._unlink(self._waits[ticket]) for ticket in self._deadlines.take_due(now_s, most)
        ]

    def drop_session(self, session: SessionId) -> None:
        """End all waits of the session."""
        for ticket in list(self._by_session.get(session, ())):
            self._drop(self._waits[ticket])

    def cancel(self, session: SessionId, ticket: Ticket) -> bool:
        """End one wait of the session; False if the session has no such wait any more."""
        wait = self._waits.get(ticket)
        if wait is None or wait.session != session:
            return False
        self._drop(wait)
        return True

    @property
    def next_s(self) -> float | None:
        return self._deadlines.next_s

    def _drop(self, wait: Wait) -> Wait:
        self._deadlines.remove(wait.ticket)
        return self._unlink(wait)

    def _unlink(self, wait: Wait) -> Wait:
        del self._waits[wait.ticket]
        _discard(self._by_key, wait.key, wait.ticket)
        _discard(self._by_session, wait.session, wait.ticket)
        return wait

    def check(self) -> None:
        """Raise AssertionError unless all views of the waits agree. O(n)."""
        self._deadlines.check()
        assert len(self._deadlines) == len(self._waits)
        for view in (self._by_key, self._by_session):
            assert all(view.values()), "an empty group was kept"
        for wait in self._waits.values():
            assert wait.ticket in self._by_key[wait.key]
            assert wait.ticket in self._by_session[wait.session]


def _discard(groups: dict[Name, dict[Ticket, None]], name: Name, ticket: Ticket) -> None:
    group = groups[name]
    del group[ticket]
    if not group:
        del groups[name]
