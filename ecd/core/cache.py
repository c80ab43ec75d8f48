"""The cache: the life of entries over one or more pools.

It puts the core's parts together (writers, readers, the evictor, pins) and is all that the daemon
calls; the parts call each other only downwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from math import inf

from ecd.core.costs import Costs
from ecd.core.counters import Counters
from ecd.core.entries import Entries
from ecd.core.evictor import Evictor
from ecd.core.model.board import Board, NoBoard
from ecd.core.model.outcomes import (
    Aborted,
    Abortion,
    Acquisition,
    AlreadyStored,
    BeingWritten,
    Commitment,
    Committed,
    EntryTooLarge,
    Expired,
    Keeping,
    Kept,
    KeptTooMuch,
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
    Answer,
    Content,
    EntryId,
    EntryInfo,
    EvictionReport,
    Extent,
    Key,
    LeaseId,
    Limits,
    NamespaceSum,
    Selection,
    SessionId,
    Ticket,
    WaitFor,
)
from ecd.core.pins import Pins
from ecd.core.pool.pool import FOR_ROOM, Pool
from ecd.core.readers import Readers
from ecd.core.sessions import Sessions
from ecd.core.terms import Book
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
        self._pins = Pins(self._board, self._entries)
        self._book = Book(self._entries, rules)
        self._evictor = Evictor(self._entries, self._pins, self._board, self.counters, self._book)
        self._readers = Readers(self._entries, self._pins, self.counters, limits, lease_ttl_s)
        self._writers = Writers(
            self._entries,
            self._sessions,
            self._evictor,
            self._board,
            self.counters,
            self._costs,
            self._book,
        )
        self.use_rules(rules)

    # -- sessions ------------------------------------------------------------------------------

    def open_session(self) -> SessionId | LimitReached:
        if len(self._sessions) >= self.limits.sessions:
            return self.counters.refuse("sessions", self.limits.sessions)
        return self._sessions.open().id

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
        self._readers.waits.drop_session(session)
        keys = self._writers.orphan_all(leaving)
        return tuple(wakeup for key in keys for wakeup in self._readers.writer_lost(key))

    def close_session(self, session: SessionId) -> bool:
        """Take back all that a leaving session had: its process can touch the memory no more.

        Returns False if that was only some of it: go on in the next turn.
        """
        leaving = self._sessions.leaving(session)
        if leaving is None:
            return True
        has_leases = not self._readers.end_leases(session)
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
        self._end_late(key, now_s)
        refusal = self._taken(key, pool)
        if refusal is not None:
            return refusal
        if len(owner.reservations) >= self.limits.reservations_per_session:
            return self.counters.refuse("reservations", self.limits.reservations_per_session)
        if content.nbytes > pool.nbytes:
            self.counters.refused["entry_too_large"] += 1
            return EntryTooLarge(content.nbytes, pool.nbytes)
        return self._writers.reserve(pool, owner, key, content, now_s)

    def reserve_copy(
        self, session: SessionId, key: Key, original: EntryId, pool: Pool, now_s: float
    ) -> Reservation | Missing:
        """Allocate an extent for a copy of a stored entry, in a pool that holds copies.

        Missing: the key's entry is another one, or none. Evicts some other copies of the pool.
        """
        owner = self._sessions.get(session)
        if owner is None:
            return SessionEnded()
        if len(owner.reservations) >= self.limits.reservations_per_session:
            return self.counters.refuse("reservations", self.limits.reservations_per_session)
        return self._writers.reserve_copy(pool, owner, key, original, now_s)

    def has_spare(self, namespace: str, nbytes: int) -> bool:
        """Whether `reserve` finds room in the first pool for which nothing is ever evicted."""
        pool = self.pools[0]
        is_within = self._book.excess_bytes(namespace, pool.rounded_bytes(nbytes)) <= 0
        return is_within and pool.has_spare(nbytes)

    def no_room(self, nbytes: int, pool: Pool | None = None) -> PoolFull:
        """Refuse a reservation: no room can be made, or the caller stops trying."""
        return self._writers.no_room(pool or self.pools[0], nbytes)

    def commit(
        self,
        session: SessionId,
        reservation: EntryId,
        now_s: float,
        checksum: int | None = None,
        content: Content | None = None,
        refetch_s: float = inf,
        age_s: float = 0.0,
    ) -> Commitment:
        """Make the entry visible, and lease it to everyone who waited for its key.

        `content` replaces the reserved one, of the same size, if the writer learned it since.
        `refetch_s` is what another fetch of the entry would take, as long as its holder has it.
        `age_s` is how long ago the entry was put elsewhere: its TTL counts from then.
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
        self._writers.publish(owner, entry, now_s, checksum, refetch_s, age_s)
        return Committed(() if entry.copy_in else self._readers.wake(entry, now_s))

    def abort(self, session: SessionId, reservation: EntryId) -> Abortion:
        """Give a reservation back: its writer touches the extent no more."""
        found = self._writers.find(session, reservation)
        if found is None:
            return NotReserved()
        owner, entry = found
        self._writers.abort(owner, entry)
        return Aborted(() if entry.copy_in else self._readers.writer_lost(entry.key))

    def abandon(self, session: SessionId, reservation: EntryId) -> Abortion:
        """Give a reservation up, but keep its extent until `reclaim`: it may still be written."""
        found = self._writers.find(session, reservation)
        if found is None:
            return NotReserved()
        _, entry = found
        self._writers.orphan(entry)
        return Aborted(self._readers.writer_lost(entry.key))

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

    # -- writing in granted memory -------------------------------------------------------------

    def grant(
        self,
        session: SessionId,
        nbytes: int,
        least: int,
        most: int,
        now_s: float,
        pool: Pool | None = None,
    ) -> bool:
        """Grant memory for up to `most` entries of `nbytes`, in place of the session's last grant.

        Takes free memory, and evicts a few entries for the first `least`. The memory goes back
        when the session ends, or when room is needed. Returns False, and changes nothing, if
        there is none, or if room is being made for a reservation.
        """
        return self._writers.grant(pool or self.pools[0], session, nbytes, least, most, now_s)

    def put(
        self, session: SessionId, key: Key, content: Content, extent: Extent, now_s: float
    ) -> Commitment | AlreadyStored | BeingWritten:
        """Make an entry of an extent that the session, open or leaving, wrote in its grants."""
        pool = self._entries.pool(extent.pool)
        block = None if pool is None else pool.grants.take(session, extent)
        if pool is None or block is None:
            return NotReserved()
        self._end_late(key, now_s)
        refusal = self._taken(key, pool)
        if refusal is not None:
            self._pins.retire(self._writers.discard_granted(session, key, content, block))
            return refusal
        entry = self._writers.publish_granted(session, key, content, block, now_s)
        self._pins.take(entry)
        return Committed(self._readers.wake(entry, now_s))

    def refuse_put(self, session: SessionId, key: Key, content: Content, extent: Extent) -> None:
        """Retire an extent that the session wrote in its grants: somebody may read it already."""
        pool = self._entries.pool(extent.pool)
        block = None if pool is None else pool.grants.take(session, extent)
        if block is not None:
            self._pins.retire(self._writers.discard_granted(session, key, content, block))

    def puts_left(self, session: SessionId, nbytes: int, pool: Pool | None = None) -> int:
        """How many entries of `nbytes` the session's grants in the pool can hold."""
        pool = pool or self.pools[0]
        return pool.grants.room(session, pool.rounded_bytes(nbytes))

    # -- entries expected from elsewhere -------------------------------------------------------

    def wants(self, key: Key) -> bool:
        """Whether the key is not stored, not being written and not expected."""
        return self._readers.wants(key)

    def expect(self, key: Key) -> None:
        """Note that a fetch may bring the key: readers may wait for it as for a writer."""
        self._readers.expect(key)

    def stop_expecting(self, key: Key) -> tuple[Wakeup, ...]:
        """Note that the fetch is over, however it ended."""
        return self._readers.stop_expecting(key)

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
        self._end_late(key, now_s)
        entry = self._entries.stored(key)
        if entry is not None:
            if answer is Answer.PIN:
                return Stored()
            return self._readers.lease(session, entry, now_s, answer)
        if wait_s <= 0.0 or (
            wait_for is WaitFor.WRITER and self.wants(key) and not self._board.is_claimed(key)
        ):
            self._readers.count_miss(key, answer)
            return Missing()
        return self._readers.wait(session, key, now_s + wait_s, wait_for, answer)

    def cancel_wait(self, session: SessionId, ticket: Ticket) -> bool:
        """End a wait; False if it was over, and its answer is on the way."""
        return self._readers.waits.cancel(session, ticket)

    def renew(
        self, session: SessionId, leases: Iterable[LeaseId], now_s: float
    ) -> tuple[float, list[LeaseId]]:
        """Postpone the expiry of leases; returns the new expiry, and the leases already over."""
        return self._readers.renew(session, leases, now_s)

    def release(self, session: SessionId, lease: LeaseId) -> bool:
        """End a lease; False if it had ended before."""
        taken = self._readers.leases.take(session, lease)
        if taken is None:
            return False
        self._pins.end_lease(taken.entry)
        return True

    def contains(self, key: Key) -> bool:
        return self._entries.stored(key) is not None

    def info(self, key: Key) -> EntryInfo | None:
        """The key's nearest copy, if it is stored. Does not count as a use."""
        entry = self._entries.stored(key)
        return None if entry is None else entry.info()

    def encode_s(self, key: Key, content: Content) -> float | None:
        """The seconds that the content takes to encode, by the fit; None where nobody told any."""
        seconds, is_known = self._costs.of(key.namespace, content)
        return seconds if is_known else None

    def cost_s(self, key: Key, content: Content) -> float:
        """The same; as reported where nobody told any since the start, else a guess."""
        seconds, is_known = self._costs.of(key.namespace, content)
        return seconds if is_known else content.cost_s or seconds

    def extent(self, key: Key) -> Extent | None:
        """The extent of the key's nearest copy, if it is stored."""
        entry = self._entries.stored(key)
        return None if entry is None else entry.extent

    def is_being_written(self, key: Key) -> bool:
        """Whether the key is reserved or, as `scan_claims` has seen, claimed."""
        return self._entries.writing(key) is not None or self._board.is_claimed(key)

    def scan_claims(self) -> Iterator[None]:
        """Learn, once for many keys, which are claimed in granted memory; some with each step."""
        return self._board.scan_claims()

    def note_checksum(self, entry: EntryId, checksum: int) -> None:
        """Record the checksum of the entry's bytes; no effect if the entry has gone."""
        found = self._entries.get(entry)
        if found is not None:
            found.checksum = checksum
            self._board.note_checksum(entry, found.key, checksum)

    # -- reads without a call ------------------------------------------------------------------

    def scan(self, now_s: float) -> bool:
        """Drain the uses, then `scan_pins`."""
        return self._evictor.scan(now_s)

    def count_uses(self, now_s: float) -> bool:
        """Drain some of the uses; returns whether all are counted that there were."""
        return self._evictor.drain_uses(now_s)

    def scan_pins(self) -> bool:
        """Take one step of a scan of the pins: a pin holds an entry as a lease does.

        Returns whether the scan is over and every evicted, unread entry is free; if not, go on in
        the next turn.
        """
        return self._pins.step()

    @property
    def is_settled(self) -> bool:
        """Whether every evicted entry that nobody reads is free."""
        return self._pins.is_settled

    # -- time ----------------------------------------------------------------------------------

    def expire(self, now_s: float) -> tuple[list[Expired], list[Wakeup]]:
        """End leases, waits and entries that are due; `next_deadline_s` is past if some are left.

        An entry's end is an eviction.
        """
        if self._book.is_timed:
            self._evictor.expire(now_s)
        return self._readers.expire(now_s)

    def next_deadline_s(self) -> float | None:
        """The earliest time at which `expire` may have something to end, never too late."""
        next_s = self._readers.next_deadline_s()
        if not self._book.is_timed:
            return next_s
        return min((s for s in (next_s, self._book.next_s()) if s is not None), default=None)

    # -- operators' rules ----------------------------------------------------------------------

    @property
    def rules(self) -> Rules:
        return self._book.rules

    @property
    def is_over_quota(self) -> bool:
        """Whether a namespace is above its quota until the next `trim`."""
        return bool(self._book.over)

    def use_rules(self, rules: Rules) -> None:
        """Take these rules over; entries that are stored follow them after `reapply_rules`."""
        self._book.use(rules)
        for pool in self.pools:
            pool.piece_bytes = min(pool.nbytes, rules.least_quota_bytes or pool.nbytes)

    def reapply_rules(self, after: EntryId | None, limit: int) -> EntryId | None:
        """Apply the rules to the next `limit` entries; where to go on, None at the end."""
        entries, next_after = self._entries.page(after, limit)
        for entry in entries:
            if not entry.copy_in:
                self._book.readmit(entry)
        return next_after

    def is_expired(self, namespace: str, age_s: float) -> bool:
        """Whether an entry of the namespace, put so long ago, is not to be served any more."""
        ttl_s = self.rules.ttl_s(namespace) if self.rules.has_ttls else None
        return ttl_s is not None and age_s >= ttl_s

    def put_age_s(self, entry: EntryId, now_s: float) -> float:
        """How long ago the entry was put, on whichever node; 0 if it has gone."""
        found = self._entries.get(entry)
        if found is None:
            return 0.0
        return now_s - (found.created_s if found.terms is None else found.terms.put_s)

    def keep(self, key: Key, until_s: float) -> Keeping:
        """Evict the key's entry for no room until then; its age and a request evict it still.

        Counts a refusal, where more of the pool would be kept than may be.
        """
        entry = self._entries.stored(key)
        if entry is None:
            return Missing()
        pool, nbytes = self._entries.pool_of(entry), entry.block.nbytes
        if not entry.is_kept and pool.kept_bytes + nbytes > pool.kept_most_bytes:
            self.counters.refused["kept"] += 1
            return KeptTooMuch(nbytes, pool.kept_bytes, pool.kept_most_bytes)
        self._book.keep(entry, until_s)
        return Kept()

    def unkeep(self, key: Key) -> bool:
        """Let room be made of the key's entry again; False if it was not kept."""
        entry = self._entries.stored(key)
        return entry is not None and self._book.unkeep(entry)

    # -- eviction and inspection ---------------------------------------------------------------

    def evict(
        self,
        selection: Selection,
        now_s: float,
        limit: int,
        after: EntryId | None = None,
        dry_run: bool = False,
    ) -> EvictionReport:
        """Evict the selected among the next `limit` entries; a held one is freed when let go.

        The extents of the others are free after a scan of the pins, which is the caller's.
        """
        return self._evictor.evict_selected(selection, now_s, limit, after, dry_run)

    def needs_trim(self) -> bool:
        """Whether any pool is filled above its high watermark, or a namespace above its quota."""
        return bool(self._book.over) or any(pool.needs_trim() for pool in self.pools)

    def trim(self, limit: int, now_s: float) -> bool:
        """Evict up to `limit` entries where `needs_trim` has found a need. True: go on."""
        return self._evictor.trim(limit, now_s)

    def next_victims(self, limit: int) -> list[EntryInfo]:
        """Up to `limit` entries that eviction for room takes next, copies apart."""
        own = (pool for pool in self.pools if not pool.holds_copies)
        victims = chain.from_iterable(pool.next_victims() for pool in own)
        return [entry.info() for entry in islice(victims, limit)]

    def page(self, after: EntryId | None, limit: int) -> tuple[list[EntryInfo], EntryId | None]:
        """Up to `limit` committed entries in order of commit, and where the next page starts.

        Copies are left out.
        """
        entries, next_after = self._entries.page(after, limit)
        return [entry.info() for entry in entries if not entry.copy_in], next_after

    def take_changes(self) -> dict[Key, bool]:
        """The keys stored (True) or evicted since the last call; the first call starts the log."""
        return self._entries.take_changes()

    @property
    def is_reserving(self) -> bool:
        """Whether a key is, or is about to be, reserved: puts wait for their answers meanwhile."""
        return self._writers.are_announced or self._entries.being_written > 0

    def namespaces(self, most: int) -> tuple[dict[str, NamespaceSum], NamespaceSum]:
        """Up to `most` of the largest namespaces, the largest first, and the sum of the others.

        Of more than LOOKED_AT namespaces some are not considered.
        """
        return self._entries.namespaces(most)

    @property
    def evicted_for_room(self) -> int:
        """Entries evicted since the start, those on request and by age left out."""
        each = (self.counters.evictions, self.bench.evictions)
        return sum(counts[reason] for counts in each for reason in FOR_ROOM)

    @property
    def entries(self) -> int:
        return len(self._entries)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def leases(self) -> int:
        """Leases and the pins that scans have found."""
        return len(self._readers.leases) + len(self._pins.held)

    @property
    def waits(self) -> int:
        return len(self._readers.waits)

    @property
    def lease_ttl_s(self) -> float:
        return self._readers.leases.ttl_s

    def check(self) -> None:
        """Raise AssertionError unless every part agrees with every other. O(n log n)."""
        for part in (self._entries, self._writers, self._readers, self._book):
            part.check()
        for pool in self.pools:
            pool.check(entry for entry in self._entries if entry.pool == pool.number)
        for entry in self._entries:
            if entry.state is EntryState.DOOMED:
                assert entry.leases > 0 or self._pins.keeps(entry.id), "kept for nobody"
            assert entry.state is not EntryState.GONE
        counted, apart = self.counters, self.bench
        for reason, count in counted.evictions.items():
            own = (pool for pool in self.pools if not pool.holds_copies)
            assert count + apart.evictions[reason] == sum(pool.evictions[reason] for pool in own)
        for each in (counted, apart):
            for_room = sum(each.evictions[reason] for reason in FOR_ROOM)
            assert for_room == sum(each.idle_evictions)
            assert each.idle_evictions_s >= 0.0
            assert sum(each.put_sizes) == each.puts
        stored = sum(each.puts + each.recovered for each in (counted, apart))
        gone = sum(sum(each.evictions.values()) for each in (counted, apart))
        assert stored - gone == self.entries, "an entry was not counted, or counted twice"

    # -- steps ---------------------------------------------------------------------------------

    def _end_late(self, key: Key, now_s: float) -> None:
        """Evict the key's entries whose time is over: the timer is late."""
        for entry in list(self._entries.copies(key)) if self._book.is_timed else ():
            if entry.terms is not None and entry.terms.expires_s <= now_s:
                self._evictor.evict(entry, "ttl")

    def _taken(self, key: Key, pool: Pool) -> AlreadyStored | BeingWritten | None:
        if self._entries.stored_in(pool, key) is not None:
            self.counters.of(key.namespace).duplicates += 1
            return AlreadyStored()
        return None if self._entries.writing_in(pool, key) is None else BeingWritten()
