"""Clients waiting for a key to be committed: woken by the commit, never polling."""

from __future__ import annotations

from dataclasses import dataclass

from ecd.core.deadlines import Deadlines
from ecd.core.types import Key, SessionId, Ticket


@dataclass(frozen=True)
class Wait:
    ticket: Ticket
    session: SessionId
    key: Key
    only_if_written: bool  # give up when the reservation that was waited for is given up
    to_pin: bool  # wants to know, not to lease


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
        self, session: SessionId, key: Key, due_s: float, only_if_written: bool, to_pin: bool
    ) -> Ticket:
        self._last += 1
        ticket = Ticket(self._last)
        self._waits[ticket] = Wait(ticket, session, key, only_if_written, to_pin)
        self._by_key.setdefault(key, {})[ticket] = None
        self._by_session.setdefault(session, {})[ticket] = None
        self._deadlines.add(ticket, due_s)
        return ticket

    def take_for_key(self, key: Key, only_if_written: bool = False) -> list[Wait]:
        """End the waits for `key`, oldest first; only those that wait for a writer, if so asked."""
        return [
            self._drop(self._waits[ticket])
            for ticket in list(self._by_key.get(key, ()))
            if not only_if_written or self._waits[ticket].only_if_written
        ]

    def take_due(self, now_s: float, most: int) -> list[Wait]:
        """End waits whose time is over, as `Deadlines.take_due`."""
        return [
            self._unlink(self._waits[ticket]) for ticket in self._deadlines.take_due(now_s, most)
        ]

    def drop_session(self, session: SessionId) -> None:
        for ticket in list(self._by_session.get(session, ())):
            self._drop(self._waits[ticket])

    def cancel(self, session: SessionId, ticket: Ticket) -> bool:
        """False if this session has no such wait, because it has ended for example."""
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


def _discard(groups: dict, name: object, ticket: Ticket) -> None:  # type: ignore[type-arg]
    group = groups[name]
    del group[ticket]
    if not group:
        del groups[name]
