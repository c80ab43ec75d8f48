"""Makings: keys that sessions have said they will make, so that others wait instead of making them.

A making promises nothing. It ends with the commit of its key, with its session, or in time.
"""

from __future__ import annotations

from ecd.core.deadlines import Deadlines
from ecd.core.types import Key, SessionId


class Makings:
    """Makings by key, by session and by deadline. A key has one at a time: the last one said."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._makings: dict[int, tuple[Key, SessionId]] = {}
        self._by_session: dict[SessionId, set[Key]] = {}
        self._deadlines: Deadlines[int] = Deadlines()
        self._last = 0

    def __len__(self) -> int:
        return len(self._makings)

    def count(self, session: SessionId) -> int:
        return len(self._by_session.get(session, ()))

    def maker(self, key: Key) -> SessionId | None:
        """The session that makes the key."""
        number = self._numbers.get(key)
        return None if number is None else self._makings[number][1]

    def add(self, session: SessionId, key: Key, due_s: float) -> None:
        """Begin a making that ends at `due_s` at the latest."""
        self.end(key)
        self._last += 1
        self._numbers[key] = self._last
        self._makings[self._last] = key, session
        self._by_session.setdefault(session, set()).add(key)
        self._deadlines.add(self._last, due_s)

    def end(self, key: Key) -> None:
        """End the key's making, if it has one."""
        number = self._numbers.get(key)
        if number is not None:
            self._deadlines.remove(number)
            self._unlink(number)

    def take_session(self, session: SessionId) -> list[Key]:
        """End all makings of the session."""
        keys = list(self._by_session.get(session, ()))
        for key in keys:
            self.end(key)
        return keys

    def take_due(self, now_s: float, most: int) -> list[Key]:
        """End makings that are due, after `most` steps in the heap (see `Deadlines.take_due`)."""
        return [self._unlink(number) for number in self._deadlines.take_due(now_s, most)]

    @property
    def next_s(self) -> float | None:
        return self._deadlines.next_s

    def _unlink(self, number: int) -> Key:
        key, session = self._makings.pop(number)
        del self._numbers[key]
        keys = self._by_session[session]
        keys.remove(key)
        if not keys:
            del self._by_session[session]
        return key

    def check(self) -> None:
        """Raise AssertionError unless all views of the makings agree. O(n)."""
        self._deadlines.check()
        assert len(self._deadlines) == len(self._makings) == len(self._numbers)
        for number, (key, session) in self._makings.items():
            assert self._numbers[key] == number
            assert key in self._by_session[session]
        assert sum(map(len, self._by_session.values())) == len(self._makings)
        assert all(self._by_session.values()), "an empty group was kept"
