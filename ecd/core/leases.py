"""Leases: promises that an extent keeps its bytes until release, expiry or the session's end."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from ecd.core.model.deadlines import Deadlines
from ecd.core.model.entry import Entry
from ecd.core.model.types import EntryId, LeaseId, SessionId


class Lease(NamedTuple):
    id: LeaseId
    session: SessionId
    entry: Entry


class Leases:
    """Leases by id, by session and by deadline."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._leases: dict[LeaseId, Lease] = {}
        self._by_session: dict[SessionId, dict[LeaseId, None]] = {}
        self._deadlines: Deadlines[LeaseId] = Deadlines()
        self._last = 0

    def __len__(self) -> int:
        return len(self._leases)

    def count(self, session: SessionId) -> int:
        return len(self._by_session.get(session, ()))

    def of(self, session: SessionId) -> list[LeaseId]:
        return list(self._by_session.get(session, ()))

    def get(self, lease: LeaseId) -> Lease | None:
        return self._leases.get(lease)

    def grant(self, session: SessionId, entry: Entry, now_s: float) -> tuple[LeaseId, float]:
        """A new lease, and the time when it expires unless renewed."""
        self._last += 1
        lease = Lease(LeaseId(self._last), session, entry)
        self._leases[lease.id] = lease
        self._by_session.setdefault(session, {})[lease.id] = None
        self._deadlines.add(lease.id, now_s + self.ttl_s)
        return lease.id, now_s + self.ttl_s

    def renew(self, session: SessionId, lease: LeaseId, now_s: float) -> bool:
        """Postpone the expiry; False if the session has no such lease any more."""
        held = self._leases.get(lease)
        if held is None or held.session != session or self._deadlines.due_s(lease) <= now_s:
            return False
        self._deadlines.postpone(lease, now_s + self.ttl_s)
        return True

    def take(self, session: SessionId, lease: LeaseId) -> Lease | None:
        """End one lease of the session; None if the session has no such lease any more."""
        held = self._leases.get(lease)
        if held is None or held.session != session:
            return None
        self._deadlines.remove(lease)
        return self._unlink(held)

    def take_session(self, session: SessionId, most: int) -> list[Lease]:
        """End up to `most` leases of the session, the oldest first."""
        some = islice(self._by_session.get(session, ()), most)
        taken = [self._leases[lease] for lease in some]
        for lease in taken:
            self._deadlines.remove(lease.id)
            self._unlink(lease)
        return taken

    def take_due(self, now_s: float, most: int) -> list[Lease]:
        """End leases that are due, after `most` steps in the heap (see `Deadlines.take_due`)."""
        return [
            self._unlink(self._leases[lease]) for lease in self._deadlines.take_due(now_s, most)
        ]

    @property
    def next_s(self) -> float | None:
        return self._deadlines.next_s

    def _unlink(self, lease: Lease) -> Lease:
        del self._leases[lease.id]
        group = self._by_session[lease.session]
        del group[lease.id]
        if not group:
            del self._by_session[lease.session]
        return lease

    def counts(self) -> dict[EntryId, int]:
        """The number of leases of each leased entry. O(n), for `check`."""
        counts: dict[EntryId, int] = {}
        for lease in self._leases.values():
            counts[lease.entry.id] = counts.get(lease.entry.id, 0) + 1
        return counts

    def check(self) -> None:
        """Raise AssertionError unless all views of the leases agree. O(n)."""
        self._deadlines.check()
        assert len(self._deadlines) == len(self._leases)
        assert sum(map(len, self._by_session.values())) == len(self._leases)
        for session, leases in self._by_session.items():
            assert leases, "an empty group was kept"
            assert all(self._leases[lease].session == session for lease in leases)
