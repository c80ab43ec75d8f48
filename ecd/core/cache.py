"""The cache of one pool: the only caller of the allocator, the index, leases, waits and policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from ecd.core.allocator import Allocator, Block
from ecd.core.clients import MAX_PIECES, Clients, NoClients
from ecd.core.eviction import Lru, Policy, plan
from ecd.core.grants import Grants
from ecd.core.index import Entry, Index
from ecd.core.leases import Leases
from ecd.core.pins import Pins
from ecd.core.sessions import Session, Sessions
from ecd.core.states import EntryEvent, EntryState
from ecd.core.types import (
    Aborted,
    Abortion,
    Acquisition,
    AlreadyStored,
    BeingWritten,
    Commitment,
    Committed,
    Content,
    EntryId,
    EntryInfo,
    EntryTooLarge,
    EvictionReport,
    Expired,
    Extent,
    Key,
    Leased,
    LeaseId,
    LimitReached,
    Limits,
    MakingRoom,
    Missing,
    NotReserved,
    PoolFull,
    Reservation,
    Reserved,
    Selection,
    SessionEnded,
    SessionId,
    Stored,
    Ticket,
    Waiting,
    Wakeup,
)
from ecd.core.waits import Waits

DEFAULT_LIMITS = Limits()

PLANS = 3
"""How often room is sought again because somebody pinned what was to go."""
MAX_VICTIMS = 64
"""Of the room made for one put ahead of need: more would hold up what else there is to do."""
GRANTS_AT_A_TIME = 32
"""Taken back with one call: each takes some 20 us, and there may be one for each session."""
DUE_AT_A_TIME = 256
"""Leases and waits ended with one call: those of a client that was stopped are due together."""


@dataclass
class Counters:
    """What happened since the start. Only ever grows."""

    hits: int = 0
    misses: int = 0
    puts: int = 0
    duplicates: int = 0
    aborts: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    saved_s: float = 0.0  # what the hits had cost to encode
    leases_expired: int = 0
    waits_expired: int = 0
    evictions: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("capacity", "watermark", "requested"), 0)
    )
    refused: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("pool_full", "entry_too_large", "sessions", "reservations", "leases", "waits"), 0
        )
    )


class Cache:
    """Entries in one pool and everything that may be asked of them.

    Not thread-safe; never blocks; time comes in as `now_s`, on one monotonic clock. An operation
    that answers anything but success has changed nothing.
    """

    def __init__(
        self,
        pool_bytes: int,
        lease_ttl_s: float = 30.0,
        limits: Limits = DEFAULT_LIMITS,
        policy: Policy | None = None,
        clients: Clients | None = None,
    ) -> None:
        self.limits = limits
        self.counters = Counters()
        self.reserved_bytes = 0
        self.leased_bytes = 0
        self._allocator = Allocator(pool_bytes)
        self._index = Index()
        self._grants = Grants(self._allocator)
        self._granted: dict[SessionId, None] = {}  # who may begin to write there
        self._leases = Leases(lease_ttl_s)
        self._waits = Waits()
        self._sessions = Sessions()
        self._policy: Policy = Lru() if policy is None else policy
        self._clients: Clients = NoClients() if clients is None else clients
        self._pins = Pins(self._clients, self._index)
        self._reserving = 0  # how many look at claims, to reserve then
        self._making_room = False  # for one of them
        self._expected: set[Key] = set()
        self._changes: dict[Key, bool] | None = None

    # -- sessions ------------------------------------------------------------------------------

    def open_session(self) -> SessionId | LimitReached:
        if len(self._sessions) >= self.limits.sessions:
            return self._refuse("sessions", self.limits.sessions)
        return self._sessions.open().id

    def leave_session(self, session: SessionId) -> tuple[Wakeup, ...]:
        """The session's stream ended, but its process may still read and write what it was given.

        Its waits end and its keys are free for other writers; its extents stay untouched until
        `close_session`, or, where it only reads, until its leases run out.
        """
        leaving = self._sessions.leave(session)
        if leaving is None:
            return ()
        self._waits.drop_session(session)
        woken: tuple[Wakeup, ...] = ()
        for reservation in leaving.reservations:
            entry = self._entry(reservation)
            if entry.state is EntryState.RESERVED:
                entry.step(EntryEvent.WRITER_LOST)
                woken += self._stop_writing(entry)
        return woken

    def close_session(self, session: SessionId) -> bool:
        """The process of a session that left can touch the memory no more: take back all it had.

        False: that was only some of it, go on in the next turn.
        """
        leaving = self._sessions.leaving(session)
        if leaving is None:
            return True
        for lease in self._leases.take_session(session, DUE_AT_A_TIME):
            self._unhold(self._entry(lease.entry))
        for reservation in list(islice(leaving.reservations, DUE_AT_A_TIME)):
            leaving.reservations.remove(reservation)
            entry = self._entry(reservation)
            entry.step(EntryEvent.WRITER_GONE)
            self._give_back_reservation(entry)
        if leaving.reservations or self._leases.count(session):
            return False
        self._sessions.close(session)
        self._clients.forget(session)
        self._granted.pop(session, None)
        self._grants.give_back(session)
        return True

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def reserving(self) -> Iterator[Iterator[None]]:
        """Look at the claims once for many reservations: take its steps, then `reserve`, `looked`.

        The count of reservations stays above 0 from before the look until after the last of them:
        whoever claims a key that the look did not see asks how its put ended (Dekker).
        """
        self._reserving += 1
        self._note_reservations()
        try:
            yield self._clients.look_at_claims()
        finally:
            self._reserving -= 1
            self._making_room &= self._reserving > 0
            self._note_reservations()

    def reserve(
        self, session: SessionId, key: Key, content: Content, now_s: float, looked: bool = False
    ) -> Reservation | MakingRoom:
        """Space for a writer, invisible until committed. Evicts what it must to make room.

        `looked`: within `reserving`, after the last step of its look.
        """
        owner = self._sessions.get(session)
        if owner is None:
            return SessionEnded()
        refusal = self._taken(key)
        if refusal is not None:
            return refusal
        if len(owner.reservations) >= self.limits.reservations_per_session:
            return self._refuse("reservations", self.limits.reservations_per_session)
        if content.nbytes > self._allocator.pool_bytes:
            self.counters.refused["entry_too_large"] += 1
            return EntryTooLarge(content.nbytes, self._allocator.pool_bytes)
        if looked:
            assert self._reserving, "looked, but not within `reserving`"
            return self._reserve(owner, key, content, now_s)
        with self.reserving() as look:
            for _ in look:
                pass
            return self._reserve(owner, key, content, now_s)

    def _reserve(
        self, owner: Session, key: Key, content: Content, now_s: float
    ) -> Reservation | MakingRoom:
        if self._clients.is_putting(key):
            return BeingWritten()
        nbytes = content.nbytes
        block = self._allocator.allocate(nbytes) or self._make_room(nbytes, now_s)
        self._making_room = block is None and bool(self._granted or not self._pins.is_settled)
        if self._making_room:
            return MakingRoom()
        if block is not None:
            entry = self._open(owner, key, content, block, now_s)
            return Reserved(entry.id, entry.extent)
        return self.no_room(nbytes)

    def no_room(self, nbytes: int) -> PoolFull:
        """None can be made, or its caller makes it no longer: others may take what becomes free."""
        self.counters.refused["pool_full"] += 1
        held_bytes = self.leased_bytes + self.reserved_bytes
        return PoolFull(nbytes, self._allocator.largest_free_bytes, held_bytes)

    def commit(
        self,
        session: SessionId,
        reservation: EntryId,
        now_s: float,
        checksum: int | None = None,
        content: Content | None = None,
    ) -> Commitment:
        """Make the entry visible, and lease it to everyone who waited for its key.

        `content` is for who reserved by the number of bytes alone, before knowing what they are.
        """
        entry = self._reservation(session, reservation)
        if entry is None:
            return NotReserved()
        if content is not None:
            assert content.nbytes == entry.content.nbytes
            entry.content = content
        self.reserved_bytes -= entry.block.nbytes
        return self._publish(entry, now_s, checksum)

    def abort(self, session: SessionId, reservation: EntryId) -> Abortion:
        """Give a reservation back: the writer touches its extent no more."""
        entry = self._reservation(session, reservation)
        if entry is None:
            return NotReserved()
        entry.step(EntryEvent.ABORT)
        woken = self._stop_writing(entry)
        self._give_back_reservation(entry)
        return Aborted(woken)

    def abandon(self, session: SessionId, reservation: EntryId) -> Abortion:
        """Give a reservation up while something may still write to its extent: until `reclaim`."""
        owner = self._sessions.get(session)
        entry = self._reservation(session, reservation)
        if owner is None or entry is None:
            return NotReserved()
        owner.reservations.add(entry.id)
        entry.step(EntryEvent.WRITER_LOST)
        return Aborted(self._stop_writing(entry))

    def reclaim(self, session: SessionId, reservation: EntryId) -> None:
        """Nothing can write to the abandoned extent any more."""
        owner = self._sessions.get(session)
        entry = self._index.get(reservation)
        if owner is None or entry is None or reservation not in owner.reservations:
            return  # taken back with its session
        owner.reservations.remove(reservation)
        entry.step(EntryEvent.WRITER_GONE)
        self._give_back_reservation(entry)

    def adopt(
        self, session: SessionId, key: Key, content: Content, extent: Extent
    ) -> EntryId | None:
        """Reserve what a daemon before this one had stored there, until somebody has looked at it.

        Before anything else is stored, in order of extents. None: its place or its key is taken.
        """
        owner = self._sessions.get(session)
        assert owner is not None
        block = None if self._index.writing(key) else self._allocator.allocate_at(extent)
        if block is None:
            return None
        return self._open(owner, key, content, block, 0.0).id

    # -- writing without asking ----------------------------------------------------------------

    def grant(self, session: SessionId, nbytes: int, least: int, most: int, now_s: float) -> bool:
        """Memory for up to `most` entries of `nbytes`, in place of what the session was granted.

        In MAX_PIECES at most: what is free anyway, and for `least` of them room is made, as they
        are about to come, if that takes few victims. False: there is none, or it is being made for
        a reservation, and all stays as it was.
        It goes back when the session ends, and when room is needed.
        """
        if self._sessions.get(session) is None or self._making_room:
            return False
        rounded = self._allocator.rounded_bytes(nbytes)
        share = int(self.limits.granted_share * self._allocator.pool_bytes) - self.granted_bytes
        least, most = min(least, share // rounded), min(most, share // rounded)
        pieces = self._pieces(rounded, least, most, now_s)
        extents = [piece.extent() for piece in pieces]
        begun = self._clients.grant(session, extents) if pieces else None
        if begun is None:
            for piece in pieces:
                self._allocator.free(piece)
            return False
        self._grants.give_back(session, begun)
        for piece in pieces:
            self._grants.add(session, piece)
        self._granted[session] = None
        return True

    def _pieces(self, nbytes: int, least: int, most: int, now_s: float) -> list[Block]:
        """Room for up to `most` times `nbytes`, in as few pieces as there can be."""
        pieces: list[Block] = []
        count = 0
        while count < most and len(pieces) < MAX_PIECES:
            fit = min(most - count, self._allocator.largest_free_bytes // nbytes)
            if fit:
                piece = self._allocator.allocate(fit * nbytes)
            elif count < least and (self._pins.is_settled or self.look_at_pins()):
                self.note_uses(now_s)  # what was read a moment ago is not what goes
                fit, piece = 1, self._evict_for(nbytes, MAX_VICTIMS)
            else:
                break
            if piece is None:
                break
            pieces.append(piece)
            count += fit
        return pieces

    def put(
        self, session: SessionId, key: Key, content: Content, extent: Extent, now_s: float
    ) -> Commitment | AlreadyStored | BeingWritten:
        """Make an entry of what the session, open or leaving, wrote where it was granted memory."""
        block = self._grants.take(session, extent)
        if block is None:
            return NotReserved()
        refusal = self._taken(key)
        if refusal is not None:
            self._allocator.free(block)
            return refusal
        entry = Entry(self._index.next_id(), *key, content, block, session)
        self._index.add(entry)
        return self._publish(entry, now_s, None)

    def puts_left(self, session: SessionId, nbytes: int) -> int:
        """How many entries of this size the session can `put`."""
        return self._grants.room(session, self._allocator.rounded_bytes(nbytes))

    @property
    def granted_bytes(self) -> int:
        return self._grants.nbytes

    @property
    def used_bytes(self) -> int:
        """In extents of entries and reservations; what is granted beside them is free."""
        return self._allocator.used_bytes - self.granted_bytes

    def _take_back_grants(self) -> bool:
        """Some of them, but for what is being written there. True: all have been."""
        sessions = list(islice(self._granted, GRANTS_AT_A_TIME))
        begun = self._clients.revoke(sessions) if sessions else []
        for session, extents in zip(sessions, begun, strict=True):
            del self._granted[session]
            self._grants.give_back(session, extents)
        return not self._granted

    # -- entries that come from elsewhere ------------------------------------------------------

    def wants(self, key: Key) -> bool:
        """Whether the key is neither here nor on its way."""
        return (
            key not in self._expected
            and self._index.stored(key) is None
            and self._index.writing(key) is None
        )

    def expect(self, key: Key) -> None:
        """Somebody tries to bring the entry here: whoever waits only for a writer waits now."""
        self._expected.add(key)

    def stop_expecting(self, key: Key) -> tuple[Wakeup, ...]:
        """The attempt is over, however it ended."""
        self._expected.discard(key)
        if self._index.writing(key) is not None:
            return ()
        return self._nobody_writes(key)

    # -- reading -------------------------------------------------------------------------------

    def acquire(
        self,
        session: SessionId,
        key: Key,
        now_s: float,
        wait_s: float = 0.0,
        only_if_written: bool = False,
        to_pin: bool = False,
        looked: bool = False,
    ) -> Acquisition:
        """A lease on the entry, or a wait of at most `wait_s` for its commit.

        Who reads without asking says `to_pin`, and is told instead that the entry is there.

        With `only_if_written` the wait is only for a key that somebody is writing or that is
        expected: any other is Missing at once, and so it becomes when that comes to nothing.
        `looked`: all steps of `look_at_claims` were taken since somebody asked.
        """
        if self._sessions.get(session) is None:
            return SessionEnded()
        entry = self._index.stored(key)
        if entry is not None:
            return Stored() if to_pin else self._lease(session, entry, now_s)
        if wait_s <= 0.0 or (
            only_if_written and self.wants(key) and not self._is_putting(key, looked)
        ):
            self.counters.misses += 1
            return Missing()
        if self._waits.count(session) >= self.limits.waits_per_session:
            return self._refuse("waits", self.limits.waits_per_session)
        return Waiting(self._waits.add(session, key, now_s + wait_s, only_if_written, to_pin))

    def cancel_wait(self, session: SessionId, ticket: Ticket) -> bool:
        """False if the wait was over: its answer is on the way."""
        return self._waits.cancel(session, ticket)

    def renew(
        self, session: SessionId, leases: Iterable[LeaseId], now_s: float
    ) -> tuple[float, list[LeaseId]]:
        """Until when the leases hold now, and those among them that hold no more."""
        lost = [lease for lease in leases if not self._leases.renew(session, lease, now_s)]
        return now_s + self._leases.ttl_s, lost

    def release(self, session: SessionId, lease: LeaseId) -> bool:
        """End a lease. False if it had ended before."""
        taken = self._leases.take(session, lease)
        if taken is None:
            return False
        self._unhold(self._entry(taken.entry))
        return True

    def contains(self, key: Key) -> bool:
        return self._index.stored(key) is not None

    def look(self, key: Key) -> EntryInfo | None:
        """What is stored for the key, if anything. Counts as no use of it."""
        entry = self._index.stored(key)
        return None if entry is None else _info(entry)

    def extent(self, key: Key) -> Extent | None:
        """Where it is stored, if it is."""
        entry = self._index.stored(key)
        return None if entry is None else entry.extent

    def is_being_written(self, key: Key, looked: bool = False) -> bool:
        return self._index.writing(key) is not None or self._is_putting(key, looked)

    def look_at_claims(self) -> Iterator[None]:
        """Learn, once for many keys, which are being written where memory was granted."""
        return self._clients.look_at_claims()

    def _is_putting(self, key: Key, looked: bool = False) -> bool:
        for _ in () if looked else self._clients.look_at_claims():
            pass
        return self._clients.is_putting(key)

    def note_checksum(self, entry: EntryId, checksum: int) -> None:
        """Remember what the entry's bytes add up to, for as long as it lives."""
        found = self._index.get(entry)
        if found is not None:
            found.checksum = checksum
            self._clients.prove(entry, found.key, checksum)

    # -- reading without asking ----------------------------------------------------------------

    def look_at_readers(self, now_s: float) -> bool:
        """What was read without asking, and what is being read, as `look_at_pins`."""
        self.note_uses(now_s)
        return self.look_at_pins()

    def look_at_pins(self) -> bool:
        """Learn who reads what without a lease: a pin holds an entry as a lease does.

        True: all pins have been looked at, and whatever was evicted and nobody reads is free.
        False: only some have, go on in the next turn.
        """
        found = self._pins.step()
        for begun in found.begun:
            self._hold(self._entry(begun))
        for ended in found.ended:
            self._unhold(self._entry(ended))
        for entry in found.decided:
            if entry.leases == 0 and entry.state is EntryState.DOOMED:
                self._let_go(entry)
        return self._pins.is_settled

    @property
    def is_settled(self) -> bool:
        """Whatever was evicted, and nobody reads, is free."""
        return self._pins.is_settled

    def note_uses(self, now_s: float) -> None:
        """Count what was read without asking, and rank it by that."""
        uses = self._clients.take_uses()
        self.counters.hits += uses.hits
        self.counters.bytes_out += uses.nbytes
        self.counters.misses += uses.misses
        self.counters.duplicates += uses.duplicates
        known_s = 0.0
        for used in uses.entries:
            entry = self._index.get(used)
            if entry is None:
                continue
            entry.hits += 1
            entry.used_s = now_s
            known_s += entry.content.cost_s
            if self._policy.warmth(entry) is not None:
                self._policy.remove(entry)
                self._policy.add(entry)
        if uses.entries:  # the others cost about as much
            self.counters.saved_s += known_s * uses.hits / len(uses.entries)

    # -- time ----------------------------------------------------------------------------------

    def expire(self, now_s: float) -> tuple[list[Expired], list[Wakeup]]:
        """End leases and waits whose time is over; `next_deadline_s` is past if some are left."""
        expired = []
        for lease in self._leases.take_due(now_s, DUE_AT_A_TIME):
            self._unhold(self._entry(lease.entry))
            expired.append(Expired(lease.session, lease.id))
        overdue = [
            Wakeup(wait.session, wait.ticket, Missing())
            for wait in self._waits.take_due(now_s, DUE_AT_A_TIME)
        ]
        self.counters.leases_expired += len(expired)
        self.counters.waits_expired += len(overdue)
        self.counters.misses += len(overdue)
        return expired, overdue

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do at the earliest; it may find that it was moved."""
        deadlines = [s for s in (self._leases.next_s, self._waits.next_s) if s is not None]
        return min(deadlines, default=None)

    # -- eviction and inspection ---------------------------------------------------------------

    def evict(
        self,
        selection: Selection,
        now_s: float,
        limit: int,
        after: EntryId | None = None,
        dry_run: bool = False,
    ) -> EvictionReport:
        """Evict the selected among the next `limit` entries. A leased one goes when released.

        The others' extents are free after a look at the pins, which is left to the caller.
        """
        self.note_uses(now_s)
        if selection.key is not None:
            stored = self._index.stored(selection.key)
            page, next_after = [stored] if stored is not None else [], None
        else:
            page, next_after = self._index.page(after, limit)
        chosen = [
            entry
            for entry in page
            if selection.namespace in (None, entry.key.namespace)
            and now_s - entry.used_s >= selection.idle_s
            and now_s - entry.created_s >= selection.age_s
        ]
        report = EvictionReport(
            entries=len(chosen),
            nbytes=sum(entry.content.nbytes for entry in chosen),
            leased=sum(entry.leases > 0 for entry in chosen),
            next_after=next_after,
        )
        if not dry_run:
            self._take_back_grants()
            for entry in chosen:
                self._evict(entry, "requested")
        return report

    def needs_trim(self) -> bool:
        """Whether the pool, with all that is granted, is fuller than the high watermark."""
        return self._allocator.used_bytes > self.limits.high_watermark * self._allocator.pool_bytes

    def trim(self, limit: int, now_s: float) -> bool:
        """Evict up to `limit` of the coldest entries towards the low watermark. True: go on."""
        if not self.look_at_readers(now_s):
            return True  # what was evicted before is to be free first
        target_bytes = self.limits.low_watermark * self._allocator.pool_bytes
        excess_bytes = self._allocator.used_bytes - target_bytes
        evicted = 0
        while excess_bytes > 0 and evicted < limit:
            entry = next(self._policy.coldest(), None)
            if entry is None:
                break
            excess_bytes -= entry.block.nbytes
            self._evict(entry, "watermark")
            evicted += 1
        return evicted > 0

    def page(self, after: EntryId | None, limit: int) -> tuple[list[EntryInfo], EntryId | None]:
        """Up to `limit` committed entries in order of commit, and where the next page starts."""
        entries, next_after = self._index.page(after, limit)
        return [_info(entry) for entry in entries], next_after

    def take_changes(self) -> dict[Key, bool]:
        """Which keys were stored (True) or evicted since the last call; the first starts it."""
        changes, self._changes = self._changes, {}
        return changes or {}

    @property
    def allocator(self) -> Allocator:
        """For its figures only."""
        return self._allocator

    @property
    def entries(self) -> int:
        return len(self._index)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def leases(self) -> int:
        """Pins included, as far as they were looked at."""
        return len(self._leases) + len(self._pins.held)

    @property
    def waits(self) -> int:
        return len(self._waits)

    @property
    def lease_ttl_s(self) -> float:
        return self._leases.ttl_s

    def check(self) -> None:
        """Raise AssertionError unless every part agrees with every other. O(n log n)."""
        self._allocator.check()
        self._index.check()
        self._leases.check()
        self._waits.check()
        counts = self._leases.counts()
        for pinned in self._pins.held:
            counts[pinned] = counts.get(pinned, 0) + 1
        reserved_bytes = leased_bytes = 0
        reservations = set()
        for entry in self._index:
            nbytes = entry.block.nbytes
            assert nbytes == self._allocator.rounded_bytes(entry.content.nbytes)
            assert entry.leases == counts.pop(entry.id, 0)
            evictable = entry.state is EntryState.COMMITTED and entry.leases == 0
            assert (self._policy.warmth(entry) is not None) == evictable
            if entry.state in (EntryState.RESERVED, EntryState.ORPHANED):
                reservations.add(entry.id)
                reserved_bytes += nbytes
            else:
                kept = entry.leases > 0 or self._pins.keeps(entry.id)
                assert entry.state is EntryState.COMMITTED or kept
                leased_bytes += nbytes if entry.leases else 0
        assert not counts, "a lease on nothing"
        assert reservations == self._sessions.reservations()
        assert (reserved_bytes, leased_bytes) == (self.reserved_bytes, self.leased_bytes)
        self._grants.check()
        used_bytes = sum(entry.block.nbytes for entry in self._index)
        assert used_bytes + self.granted_bytes == self._allocator.used_bytes, (
            "an extent without an entry"
        )

    # -- steps ---------------------------------------------------------------------------------

    def _entry(self, entry: EntryId) -> Entry:
        found = self._index.get(entry)
        assert found is not None, f"entry {entry} vanished"
        return found

    def _reservation(self, session: SessionId, reservation: EntryId) -> Entry | None:
        """The open reservation, taken off its session's books."""
        owner = self._sessions.get(session)
        if owner is None or reservation not in owner.reservations:
            return None
        entry = self._entry(reservation)
        if entry.state is not EntryState.RESERVED:
            return None
        owner.reservations.remove(reservation)
        return entry

    def _open(
        self, owner: Session, key: Key, content: Content, block: Block, now_s: float
    ) -> Entry:
        """A reservation of this block, on its session's books."""
        entry = Entry(self._index.next_id(), *key, content, block, owner.id, created_s=now_s)
        self._index.add(entry)
        owner.reservations.add(entry.id)
        self.reserved_bytes += block.nbytes
        self._note_reservations()
        return entry

    def _taken(self, key: Key) -> AlreadyStored | BeingWritten | None:
        if self._index.stored(key) is not None:
            self.counters.duplicates += 1
            return AlreadyStored()
        return None if self._index.writing(key) is None else BeingWritten()

    def _publish(self, entry: Entry, now_s: float, checksum: int | None) -> Committed:
        entry.step(EntryEvent.COMMIT)
        entry.created_s = entry.used_s = now_s
        entry.checksum = checksum
        self._index.publish(entry)
        self._policy.add(entry)
        info = _info(entry)
        self._clients.show(info)
        self._note_reservations()
        self._note_change(info.key, stored=True)
        self.counters.puts += 1
        self.counters.bytes_in += entry.content.nbytes
        return Committed(
            tuple(
                Wakeup(
                    wait.session,
                    wait.ticket,
                    Stored() if wait.to_pin else self._lease(wait.session, entry, now_s),
                )
                for wait in self._waits.take_for_key(info.key)
            )
        )

    def _stop_writing(self, entry: Entry) -> tuple[Wakeup, ...]:
        self._index.stop_writing(entry)
        self._note_reservations()
        self.counters.aborts += 1
        return () if entry.key in self._expected else self._nobody_writes(entry.key)

    def _nobody_writes(self, key: Key) -> tuple[Wakeup, ...]:
        given_up = self._waits.take_for_key(key, only_if_written=True)
        self.counters.misses += len(given_up)
        return tuple(Wakeup(wait.session, wait.ticket, Missing()) for wait in given_up)

    def _note_reservations(self) -> None:
        self._clients.note_reservations(self._index.reservations + self._reserving)

    def _give_back_reservation(self, entry: Entry) -> None:
        self.reserved_bytes -= entry.block.nbytes
        self._index.remove(entry)
        self._allocator.free(entry.block)

    def _lease(self, session: SessionId, entry: Entry, now_s: float) -> Leased | LimitReached:
        if self._leases.count(session) >= self.limits.leases_per_session:
            return self._refuse("leases", self.limits.leases_per_session)
        self._hold(entry)
        entry.hits += 1
        entry.used_s = now_s
        self.counters.hits += 1
        self.counters.bytes_out += entry.content.nbytes
        self.counters.saved_s += entry.content.cost_s
        lease, expires_s = self._leases.grant(session, entry.id, now_s)
        return Leased(
            lease, entry.key, entry.content, entry.extent, expires_s, entry.id, entry.checksum
        )

    def _hold(self, entry: Entry) -> None:
        if entry.leases == 0:
            if entry.state is EntryState.COMMITTED:
                self._policy.remove(entry)
            self.leased_bytes += entry.block.nbytes
        entry.leases += 1

    def _unhold(self, entry: Entry) -> None:
        entry.leases -= 1
        if entry.leases:
            return
        self.leased_bytes -= entry.block.nbytes
        if entry.state is EntryState.COMMITTED:
            self._policy.add(entry)
        elif not self._pins.keeps(entry.id):
            self._let_go(entry)

    def _make_room(self, nbytes: int, now_s: float) -> Block | None:
        """None: there is none, or none yet, where grants are left or the pins are not settled."""
        all_back = self._take_back_grants()
        block = self._allocator.allocate(nbytes)
        if block is not None or not all_back:
            return block
        if not self.look_at_readers(now_s):
            return None
        return self._allocator.allocate(nbytes) or self._evict_for(nbytes)

    def _evict_for(self, nbytes: int, most: int | None = None) -> Block | None:
        """Room for an entry, if that takes no more than `most` victims at a time."""
        block = None
        for _ in range(PLANS):
            victims = plan(nbytes, self._allocator, self._policy)
            if victims is None or (most is not None and len(victims) > most):
                break
            for victim in victims:
                self._evict(victim, "capacity")
            settled = self.look_at_pins()
            block = self._allocator.allocate(nbytes)
            if block is not None or not settled:
                break
        return block

    def _evict(self, entry: Entry, reason: str) -> None:
        """Its extent is free after a whole look at the pins, unless somebody holds it."""
        self.counters.evictions[reason] += 1
        entry.step(EntryEvent.EVICT)
        self._index.hide(entry)
        key = entry.key
        self._clients.hide(entry.id, key)
        self._note_change(key, stored=False)
        if entry.leases == 0:
            self._policy.remove(entry)
        self._pins.retire(entry)

    def _note_change(self, key: Key, stored: bool) -> None:
        if self._changes is not None:
            self._changes[key] = stored

    def _let_go(self, entry: Entry) -> None:
        entry.step(EntryEvent.LAST_RELEASE)
        self._index.remove(entry)
        self._allocator.free(entry.block)

    def _refuse(self, what: str, limit: int) -> LimitReached:
        self.counters.refused[what] += 1
        return LimitReached(what, limit)


def _info(entry: Entry) -> EntryInfo:
    return EntryInfo(
        entry.id,
        entry.key,
        entry.content,
        entry.extent,
        entry.leases,
        entry.hits,
        entry.created_s,
        entry.used_s,
        entry.checksum,
    )
