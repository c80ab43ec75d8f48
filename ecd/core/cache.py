"""The cache: the life of entries over one or more pools.

It puts the core's parts together and does what spans them. Some parts are shown: what is asked
(`views`), operators' rules (`retention`), puts in granted memory (`granted`), what readers wait for
(`readers`), and the room and time of entries (`evictor`, `pins`). Parts call each other only
downwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from ecd.core.costs import Costs
from ecd.core.counters import Counters
from ecd.core.entries import Entries
from ecd.core.evictor import Evictor
from ecd.core.granted import Granted
from ecd.core.model.board import Board, NoBoard
from ecd.core.model.outcomes import (
    Aborted,
    Abortion,
    Acquisition,
    Commitment,
    Committed,
    EntryTooLarge,
    Expired,
    LimitReached,
    MakingRoom,
    Missing,
    NotReserved,
    PoolFull,
    Reservation,
    SessionEnded,
    Stored,
    Wakeup,
)
from ecd.core.model.rules import Rules
from ecd.core.model.states import EntryState
from ecd.core.model.types import (
    NO_LEASE,
    Answer,
    Content,
    EntryId,
    Extent,
    Key,
    LeaseId,
    Limits,
    SessionId,
    Ticket,
    WaitFor,
)
from ecd.core.pins import Pins
from ecd.core.pool.pool import Pool
from ecd.core.readers import Readers
from ecd.core.retention import Book, Retention
from ecd.core.sessions import Sessions
from ecd.core.views import Views
from ecd.core.writers import Writers

DEFAULT_LIMITS = Limits()
NO_RULES = Rules()


class Cache:
    """Entries in pools, with every operation on them.

    Not thread-safe; never blocks; time comes in as `now_s`, on one monotonic clock. An operation
    that answers anything but success has changed nothing, but that a namespace at its quota may
    have lost entries. Where an operation takes a pool, the default is the first.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        lease_ttl_s: float = 30.0,
        limits: Limits = DEFAULT_LIMITS,
        board: Board | None = None,
        rules: Rules = NO_RULES,
    ) -> None:
        """`pools` are at least one, the nearest to readers first, their numbers distinct."""
        self.pools = tuple(pools)
        self.limits = limits
        self.bench = Counters()
        self.counters = Counters(bench=self.bench)
        self._board: Board = NoBoard() if board is None else board
        self._costs = Costs(self.counters)
        self._entries = Entries(self.pools)
        self._sessions = Sessions()
        self.pins = Pins(self._board, self._entries)
        self._book = Book(self._entries, rules)
        self.evictor = Evictor(self._entries, self.pins, self._board, self.counters, self._book)
        self.readers = Readers(self._entries, self.pins, self.counters, limits, lease_ttl_s)
        self._writers = Writers(
            self._entries,
            self._sessions,
            self.evictor,
            self._board,
            self.counters,
            self._costs,
            self._book,
        )
        self.granted = Granted(self._entries, self.pins, self.evictor, self.readers, self._writers)
        self.retention = Retention(self._entries, self._book, self.counters)
        self.views = Views(
            self._entries,
            self._sessions,
            self.pins,
            self.readers,
            self._writers,
            self._board,
            self._book,
            self._costs,
            self.counters,
        )

    # -- sessions ------------------------------------------------------------------------------

    def open_session(self, *, hands_over: bool = False) -> SessionId | LimitReached:
        """`hands_over`: another client is to use first what this one puts."""
        if len(self._sessions) >= self.limits.sessions:
            return self.counters.refuse("sessions", self.limits.sessions)
        return self._sessions.open(hands_over=hands_over).id

    def is_open(self, session: SessionId) -> bool:
        return self._sessions.get(session) is not None

    def leave_session(self, session: SessionId) -> tuple[Wakeup, ...]:
        """End the session's waits and free its keys for other writers: its stream ended.

        Its process may still read and write: its extents stay untouched until `close_session`,
        those that it only reads until its leases run out.
        """
        leaving = self._sessions.leave(session)
        if leaving is None:
            return ()
        self.readers.waits.drop_session(session)
        keys = self._writers.orphan_all(leaving)
        return tuple(wakeup for key in keys for wakeup in self.readers.writer_lost(key))

    def close_session(self, session: SessionId) -> bool:
        """Reclaim the memory of a leaving session, whose process can no longer touch it.

        Returns False if some is left: call again in the next turn.
        """
        leaving = self._sessions.leaving(session)
        if leaving is None:
            return True
        has_leases = not self.readers.end_leases(session)
        if not self._writers.reclaim_some(leaving) or has_leases:
            return False
        self._sessions.close(session)
        self._board.forget(session)
        self._writers.give_back(session, [])
        return True

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def reserving(self) -> Iterator[Iterator[None]]:
        """Scan the claims once for many reservations: take all steps, then `reserve`.

        Publishes the count of reservations, then scans the claims (Dekker): a client that claims
        a key too late for the scan sees the count, and asks how its put ended.
        """
        self._writers.announce()
        try:
            yield self._board.scan_claims()
        finally:
            self._writers.settle()

    def reserve(
        self,
        session: SessionId,
        key: Key,
        content: Content,
        now_s: float,
        pool: Pool | None = None,
    ) -> Reservation | MakingRoom:
        """Allocate an extent for a writer, invisible until committed; may evict to make room.

        Within `reserving`, after all steps of its scan.
        """
        assert self._writers.are_announced, "not within `reserving`"
        pool = pool or self.pools[0]
        owner = self._sessions.get(session)
        if owner is None:
            return SessionEnded()
        self.evictor.end_late(key, now_s)
        refusal = self._writers.taken(key, pool)
        if refusal is not None:
            return refusal
        if len(owner.reservations) >= self.limits.reservations_per_session:
            return self.counters.refuse("reservations", self.limits.reservations_per_session)
        if content.nbytes > pool.nbytes:
            self.counters.refuse_put(key.namespace, "entry_too_large")
            return EntryTooLarge(content.nbytes, pool.nbytes)
        return self._writers.reserve(pool, owner, key, content, now_s)

    def reserve_replica(
        self, session: SessionId, key: Key, original: EntryId, pool: Pool, now_s: float
    ) -> Reservation | Missing:
        """Allocate an extent for a replica of a stored entry, in a pool that holds replicas.

        Missing: the key's entry is another one, or none. Evicts some other copies of the pool.
        """
        owner = self._sessions.get(session)
        if owner is None:
            return SessionEnded()
        if len(owner.reservations) >= self.limits.reservations_per_session:
            return self.counters.refuse("reservations", self.limits.reservations_per_session)
        return self._writers.reserve_replica(pool, owner, key, original, now_s)

    def no_room(self, namespace: str, nbytes: int, pool: Pool | None = None) -> PoolFull:
        """Refuse a reservation, because no room can be made or the caller stops trying."""
        return self._writers.no_room(pool or self.pools[0], namespace, nbytes)

    def commit(
        self,
        session: SessionId,
        reservation: EntryId,
        now_s: float,
        checksum: int | None = None,
        content: Content | None = None,
        refetch_s: float = inf,
        age_s: float = 0.0,
        is_handover: bool = False,
    ) -> Commitment:
        """Make the entry visible, and lease it to everyone who waited for its key.

        `content` replaces the reserved one, of the same size, if the writer learned it since.
        `refetch_s` is what another fetch of the entry would take, as long as its holder has it.
        `age_s` is how long ago the entry was put elsewhere: its TTL counts from then.
        `is_handover`: the next hit is of the engine for which it was encoded elsewhere.
        """
        found = self._writers.find(session, reservation)
        if found is None:
            return NotReserved()
        owner, entry = found
        if entry.original is not None and entry.original.state is not EntryState.COMMITTED:
            self._writers.abort(owner, entry)  # the next entry of the key may have other bytes
            return NotReserved()
        if content is not None:
            assert content.nbytes == entry.content.nbytes
            entry.content = content
        entry.handovers = int(is_handover)
        self._writers.publish(owner, entry, now_s, checksum, refetch_s, age_s)
        return Committed(() if entry.replica_in else self.readers.wake(entry, now_s))

    def abort(self, session: SessionId, reservation: EntryId) -> Abortion:
        """Give a reservation back: its writer no longer touches the extent."""
        found = self._writers.find(session, reservation)
        if found is None:
            return NotReserved()
        owner, entry = found
        self._writers.abort(owner, entry)
        return Aborted(() if entry.replica_in else self.readers.writer_lost(entry.key))

    def abandon(self, session: SessionId, reservation: EntryId) -> Abortion:
        """Give a reservation up, but keep its extent until `reclaim`: it may still be written."""
        found = self._writers.find(session, reservation)
        if found is None:
            return NotReserved()
        _, entry = found
        self._writers.orphan(entry)
        return Aborted(self.readers.writer_lost(entry.key))

    def reclaim(self, session: SessionId, reservation: EntryId) -> None:
        """Free an abandoned extent, unless it went with its session: nothing can write it now."""
        owner = self._sessions.get(session)
        if owner is not None and reservation in owner.reservations:
            self._writers.reclaim(owner, reservation)

    def recover(
        self,
        session: SessionId,
        key: Key,
        content: Content,
        extent: Extent,
        is_put: bool = False,
    ) -> EntryId | None:
        """Reserve an entry that an earlier incarnation had stored, until its bytes are verified.

        `is_put`: that one ended before it stored the put, so this one counts it. Must come before
        anything else is stored, in order of extents. Returns None if the extent or the key is
        taken.
        """
        owner = self._sessions.get(session)
        assert owner is not None
        entry = self._writers.recover(owner, key, content, extent, is_put)
        return None if entry is None else entry.id

    # -- reading -------------------------------------------------------------------------------

    def acquire(
        self,
        session: SessionId,
        key: Key,
        now_s: float,
        wait_s: float = 0.0,
        wait_for: WaitFor = WaitFor.ANY,
        answer: Answer = Answer.LEASE,
    ) -> Acquisition:
        """Lease the key's nearest copy, or wait up to `wait_s` for a commit.

        With `WaitFor.WRITER`, after all steps of `scan_claims`, a key that nobody writes, and
        that is not expected, is Missing at once.
        """
        if self._sessions.get(session) is None:
            return SessionEnded()
        self.evictor.end_late(key, now_s)
        entry = self._entries.stored(key)
        if entry is not None:
            if answer in NO_LEASE:
                return Stored()
            return self.readers.lease(session, entry, now_s, answer)
        if wait_s <= 0.0 or (
            wait_for is WaitFor.WRITER
            and self.readers.wants(key)
            and not self._board.is_claimed(key)
        ):
            self.readers.count_miss(key, answer)
            return Missing()
        return self.readers.wait(session, key, now_s + wait_s, wait_for, answer)

    def cancel_wait(self, session: SessionId, ticket: Ticket) -> bool:
        """End a wait; False if it was over, and its answer is on the way."""
        return self.readers.waits.cancel(session, ticket)

    def renew(
        self, session: SessionId, leases: Iterable[LeaseId], now_s: float
    ) -> tuple[float, list[LeaseId]]:
        """Postpone the expiry of leases; returns the new expiry, and the leases already over."""
        return self.readers.renew(session, leases, now_s)

    def release(self, session: SessionId, lease: LeaseId) -> bool:
        """End a lease; False if it had ended before."""
        taken = self.readers.leases.take(session, lease)
        if taken is None:
            return False
        self.pins.end_lease(taken.entry)
        return True

    def scan_claims(self) -> Iterator[None]:
        """Learn, once for many keys, which are claimed in granted memory; some with each step."""
        return self._board.scan_claims()

    def note_checksum(self, entry: EntryId, checksum: int) -> None:
        """Record the checksum of the entry's bytes; no effect if the entry has gone."""
        found = self._entries.get(entry)
        if found is not None:
            found.checksum = checksum
            self._board.note_checksum(entry, found.key, checksum)

    # -- time ----------------------------------------------------------------------------------

    def expire(self, now_s: float) -> tuple[list[Expired], list[Wakeup]]:
        """End leases, waits and entries that are due; `next_deadline_s` is past if some are left.

        An entry's end is an eviction.
        """
        if self._book.is_timed:
            self.evictor.expire(now_s)
        return self.readers.expire(now_s)

    def next_deadline_s(self) -> float | None:
        """The earliest time at which `expire` may have something to end, never too late."""
        next_s = self.readers.next_deadline_s()
        if not self._book.is_timed:
            return next_s
        return min((s for s in (next_s, self._book.next_s()) if s is not None), default=None)

    def take_changes(self) -> dict[Key, bool]:
        """The keys stored (True) or evicted since the last call; the first call starts the log."""
        return self._entries.take_changes()

    def check(self) -> None:
        """Raise AssertionError unless every part agrees with every other. O(n log n)."""
        for part in (self._entries, self._writers, self.readers, self._book):
            part.check()
        for pool in self.pools:
            pool.check(entry for entry in self._entries if entry.pool == pool.number)
        for entry in self._entries:
            if entry.state is EntryState.DOOMED:
                assert entry.leases > 0 or self.pins.keeps(entry.id), "kept for nobody"
            assert entry.state is not EntryState.GONE
        counted, apart = self.counters, self.bench
        for reason, count in counted.evictions.items():
            own = (pool for pool in self.pools if not pool.holds_replicas)
            assert count == sum(pool.evictions[reason] for pool in own)
        for each in (counted, apart):
            each.check()
        stored = sum(each.puts + each.recovered for each in (counted, apart))
        gone = sum(sum(each.evictions.values()) for each in (counted, apart))
        assert stored - gone == len(self._entries), "an entry was not counted, or counted twice"
