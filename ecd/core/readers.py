"""Readers: leases on entries, and waits for keys that are written or expected."""

from __future__ import annotations

from collections.abc import Iterable

from ecd.core.counters import Counters
from ecd.core.entries import Entries
from ecd.core.leases import Leases
from ecd.core.model.entry import Entry
from ecd.core.model.outcomes import Expired, Leased, LimitReached, Missing, Stored, Waiting, Wakeup
from ecd.core.model.types import (
    NO_LEASE,
    UNCOUNTED,
    Answer,
    Key,
    LeaseId,
    Limits,
    SessionId,
    WaitFor,
)
from ecd.core.pins import Pins
from ecd.core.waits import Wait, Waits

DUE_AT_A_TIME = 256
"""Most leases or waits ended by one call: those of a stopped client are due together."""


class Readers:
    """The leases and waits of all sessions, and the keys that fetches are expected to bring."""

    def __init__(
        self, entries: Entries, pins: Pins, counters: Counters, limits: Limits, lease_ttl_s: float
    ) -> None:
        self._entries, self._pins = entries, pins
        self._counters, self._limits = counters, limits
        self.leases = Leases(lease_ttl_s)
        self.waits = Waits()
        self._expected: set[Key] = set()

    # -- leases --------------------------------------------------------------------------------

    def lease(
        self, session: SessionId, entry: Entry, now_s: float, answer: Answer
    ) -> Leased | LimitReached:
        limit = self._limits.leases_per_session
        if self.leases.count(session) >= limit:
            return self._counters.refuse("leases", limit)
        self._entries.pool_of(entry).hold(entry)
        is_handover = answer is not Answer.LOOK_LEASE and self._entries.use(entry, now_s)
        counters, content = self._counters.of(entry.namespace), entry.content
        if answer is Answer.PEER:
            counters.peer_leases += 1
        elif answer is not Answer.LOOK_LEASE:
            counters.hit(entry.namespace, content.nbytes, is_handover, entry.saves_s)
        lease, expires_s = self.leases.grant(session, entry, now_s)
        where, checksum = entry.extent, entry.checksum
        return Leased(lease, entry.key, content, where, expires_s, entry.id, checksum, is_handover)

    def count_miss(self, key: Key, answer: Answer) -> None:
        """Count a lookup or wait of a reader of this node that has ended without an entry."""
        if answer not in UNCOUNTED:
            self._counters.of(key.namespace).miss(key.namespace)

    def renew(
        self, session: SessionId, leases: Iterable[LeaseId], now_s: float
    ) -> tuple[float, list[LeaseId]]:
        """Postpone the expiry of leases; returns the new expiry, and the leases already over."""
        lost = [lease for lease in leases if not self.leases.renew(session, lease, now_s)]
        return now_s + self.leases.ttl_s, lost

    # -- waits ---------------------------------------------------------------------------------

    def wait(
        self, session: SessionId, key: Key, due_s: float, wait_for: WaitFor, answer: Answer
    ) -> Waiting | LimitReached:
        limit = self._limits.waits_per_session
        if self.waits.count(session) >= limit:
            return self._counters.refuse("waits", limit)
        return Waiting(self.waits.add(session, key, due_s, wait_for, answer))

    def wake(self, entry: Entry, now_s: float) -> tuple[Wakeup, ...]:
        """End the waits for the key of a committed entry."""
        return tuple(self._woken(w, entry, now_s) for w in self.waits.take_for_key(entry.key))

    def writer_lost(self, key: Key) -> tuple[Wakeup, ...]:
        """End the waits for a writer of the key, unless one is left or the key is expected."""
        if key in self._expected or self._entries.writing(key) is not None:
            return ()
        given_up = self.waits.take_writer_lost(key)
        for wait in given_up:
            self.count_miss(key, wait.answer)
        return tuple(Wakeup(wait.session, wait.ticket, Missing()) for wait in given_up)

    # -- expected keys -------------------------------------------------------------------------

    def wants(self, key: Key) -> bool:
        """Whether the key is not stored, not being written and not expected."""
        return (
            key not in self._expected
            and self._entries.stored(key) is None
            and self._entries.writing(key) is None
        )

    def expect(self, key: Key) -> None:
        self._expected.add(key)

    def stop_expecting(self, key: Key) -> tuple[Wakeup, ...]:
        self._expected.discard(key)
        return self.writer_lost(key)

    # -- ends ----------------------------------------------------------------------------------

    def expire(self, now_s: float) -> tuple[list[Expired], list[Wakeup]]:
        """End leases and waits that are due; `next_deadline_s` is past if some are left."""
        due = self.leases.take_due(now_s, DUE_AT_A_TIME)
        for lease in due:
            self._pins.end_lease(lease.entry)
            self._counters.of(lease.entry.namespace).leases_expired += 1
        overdue = self.waits.take_due(now_s, DUE_AT_A_TIME)
        for wait in overdue:
            self._counters.of(wait.key.namespace).waits_expired += 1
            self.count_miss(wait.key, wait.answer)
        return (
            [Expired(lease.session, lease.id) for lease in due],
            [Wakeup(wait.session, wait.ticket, Missing()) for wait in overdue],
        )

    def next_deadline_s(self) -> float | None:
        """The earliest time at which `expire` may have something to end, never too late."""
        deadlines = [s for s in (self.leases.next_s, self.waits.next_s) if s is not None]
        return min(deadlines, default=None)

    def end_leases(self, session: SessionId) -> bool:
        """End some of the session's leases; returns whether none is left."""
        for lease in self.leases.take_session(session, DUE_AT_A_TIME):
            self._pins.let_go(lease.entry)
        return not self.leases.count(session)

    def _woken(self, wait: Wait, entry: Entry, now_s: float) -> Wakeup:
        if wait.answer in NO_LEASE:
            return Wakeup(wait.session, wait.ticket, Stored())
        leased = self.lease(wait.session, entry, now_s, wait.answer)
        return Wakeup(wait.session, wait.ticket, leased)

    def check(self) -> None:
        """Raise AssertionError unless every entry is held by its leases and pins. O(n)."""
        self.leases.check()
        self.waits.check()
        held = self.leases.counts()
        for pinned in self._pins.held:
            held[pinned] = held.get(pinned, 0) + 1
        for entry in self._entries:
            assert entry.leases == held.pop(entry.id, 0)
        assert not held, "a lease on nothing"
