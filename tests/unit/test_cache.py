"""The whole core against a naive model, with every byte of its pools watched.

The model holds what each client may rely on: granules carry the tag of whoever wrote them last,
a late writer included, and every committed entry and every held lease must still read its own.
"""

from collections import Counter
from collections.abc import Callable, Iterator, KeysView, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ecd.core.cache import NO_RULES, Cache
from ecd.core.model.board import MAX_PIECES, Portion, Uses
from ecd.core.model.outcomes import (
    Aborted,
    AlreadyStored,
    BeingWritten,
    Committed,
    EntryTooLarge,
    Kept,
    KeptTooMuch,
    Leased,
    LimitReached,
    MakingRoom,
    Missing,
    NotReserved,
    PoolFull,
    Reservation,
    Reserved,
    SessionEnded,
    Stored,
    Waiting,
    Wakeup,
)
from ecd.core.model.rules import Rules
from ecd.core.model.types import (
    Answer,
    Content,
    EntryId,
    EntryInfo,
    Extent,
    Key,
    LeaseId,
    Limits,
    PoolLimits,
    Selection,
    SessionId,
    Start,
    WaitFor,
)
from ecd.core.policy.policy import Lru
from ecd.core.policy.value_density import ValueDensity
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import PLANS, Pool
from support.examples import drawn, draws
from support.reserving import is_being_written, is_one_free_extent, reserve, scan_claims

GRANULE_BYTES = 4096
KEYS = [Key(f"n{i % 2}", f"h{i}") for i in range(8)]
TTL_S = 10.0
LIMITS = Limits(
    sessions=4,
    reservations_per_session=3,
    leases_per_session=5,
    waits_per_session=3,
)

POOL_LIMITS = PoolLimits(granted_share=0.4, high_watermark=0.8, low_watermark=0.5)
keys = st.sampled_from(KEYS)
sizes = st.integers(0, 12 * GRANULE_BYTES)
Place = tuple[Key, int]
"""A key and the number of the pool that holds a copy, or a writer's extent, of it."""


@dataclass
class Reader:
    tag: int
    extent: Extent
    key: Key
    until_s: float
    info: EntryInfo


@dataclass
class Writer:
    tag: int
    key: Key
    extent: Extent
    asks: bool = False  # it has seen that somebody reserves by a call

    @property
    def place(self) -> Place:
        return self.key, self.extent.pool


@dataclass
class ModelSession:
    writers: dict[EntryId, Writer] = field(default_factory=dict)
    readers: dict[LeaseId, Reader] = field(default_factory=dict)
    waits: dict[int, tuple[Key, float, bool]] = field(default_factory=dict)
    to_pin: set[int] = field(default_factory=set)  # tickets


@dataclass
class Pin:
    """A reader without a call, between two of its steps."""

    session: SessionId
    info: EntryInfo
    set: bool = False
    blocks: bool = False  # set while the entry was shown, or was not free yet
    late: bool = False  # set while it was hidden, on a page that a slow scan may have read already
    held: bool = False  # and shown at the recheck


@dataclass
class ClaimPin:
    """A reader of a put that is not listed yet: it pins the start of the put's extent."""

    session: SessionId
    writer: Writer
    set: bool = False
    held: bool = False


class Board:
    """A naive board of plain collections: entries shown, pins, grants and claims.

    With `ambush`, every reader that has found an entry pins it just before it is hidden.
    """

    def __init__(self) -> None:
        self.shown: dict[EntryId, EntryInfo] = {}
        self.pins: list[Pin] = []
        self.claim_pins: list[ClaimPin] = []
        self.garbage: set[EntryId] = set()
        self.grants: dict[SessionId, list[Extent]] = {}  # what is left of them
        self.begun: dict[SessionId, list[Writer]] = {}
        self.reservations = 0
        self.known: set[Key] = set()  # claimed keys that the last scan has found
        self.slow = False  # a scan of pins takes a step for each session with pins
        self.uses: list[EntryInfo] = []
        self.told: list[EntryInfo] = []
        self.ambush = self.ambushed = False

    def announce_reservations(self, count: int) -> None:
        self.reservations = count

    def show(self, info: EntryInfo) -> None:
        self.shown[info.entry] = info

    def note_checksum(self, entry: EntryId, key: Key, checksum: int) -> None:
        assert self.shown[entry].key == key

    def hide(self, entry: EntryId, key: Key, replica_in: int = 0) -> None:
        assert self.shown[entry].key == key
        for pin in self.pins:
            if self.ambush and pin.info.entry == entry and not pin.set:
                self.ambushed = True
                self.pin(pin)
                self.recheck(pin)
        del self.shown[entry]

    def pins_set(self) -> set[EntryId]:
        return {pin.info.entry for pin in self.pins if pin.set} | self.garbage

    def pinned(self, live: KeysView[EntryId], starts: Set[Start]) -> Iterator[Portion]:
        """Scan page by page if `slow`: a pin set on a page that was read is not seen."""
        both = (*self.pins, *self.claim_pins)
        pages = sorted({pin.session for pin in both}) if self.slow else []
        for page in pages:
            pins = [pin for pin in self.pins if pin.set and pin.session == page]
            begun = starts & self.starts_set(lambda session, page=page: session == page)
            yield Portion(live & {pin.info.entry for pin in pins}, starts=begun)
        pins = [pin for pin in self.pins if pin.set and pin.session not in pages]
        begun = starts & self.starts_set(lambda session: session not in pages)
        pinned = live & ({pin.info.entry for pin in pins} | self.garbage)
        yield Portion(pinned, is_last=True, starts=begun)

    @property
    def pins_starts(self) -> bool:
        """Whether an extent may be pinned whose entry does not show it: it may be a victim."""
        return any(pin.set and not pin.held for pin in self.claim_pins)

    def starts_set(self, is_on: Callable[[SessionId], bool]) -> set[Start]:
        pins = [pin for pin in self.claim_pins if pin.set and is_on(pin.session)]
        return {pin.writer.extent.start for pin in pins}

    def drain_uses(self) -> Uses:
        uses, self.uses = self.uses, []
        nbytes = sum(info.content.nbytes for info in uses)
        return Uses(tuple(info.entry for info in uses), len(uses), nbytes)

    def grant(self, session: SessionId, pieces: Sequence[Extent]) -> list[Extent] | None:
        assert 0 < len(pieces) <= MAX_PIECES
        [begun] = self.revoke([session])
        self.grants[session] = list(pieces)
        return begun

    def revoke(self, sessions: Sequence[SessionId]) -> list[list[Extent]]:
        for session in sessions:
            self.grants.pop(session, None)
        return [[writer.extent for writer in self.begun.get(session, ())] for session in sessions]

    def scan_claims(self) -> Iterator[None]:
        yield
        self.known = {writer.key for writers in self.begun.values() for writer in writers}

    def is_claimed(self, key: Key) -> bool:
        return key in self.known

    def is_begun(self, key: Key) -> bool:
        return any(writer.key == key for writers in self.begun.values() for writer in writers)

    def take_from_grant(self, session: SessionId, nbytes: int) -> Extent | None:
        rounded = max(1, -(-nbytes // GRANULE_BYTES)) * GRANULE_BYTES
        for number, piece in enumerate(pieces := self.grants[session]):
            if rounded <= piece.nbytes:
                rest = piece.offset + rounded, piece.nbytes - rounded
                pieces[number] = Extent(piece.pool, *rest)
                return Extent(piece.pool, piece.offset, nbytes)
        return None

    def forget(self, session: SessionId) -> None:
        self.grants.pop(session, None)
        self.begun.pop(session, None)
        self.pins = [pin for pin in self.pins if pin.session != session]
        self.claim_pins = [pin for pin in self.claim_pins if pin.session != session]

    def pin(self, pin: Pin) -> None:
        pin.set, pin.blocks = True, pin.info.entry in self.shown
        pin.late = self.slow and not pin.blocks

    def recheck(self, pin: Pin) -> None:
        if pin.info.entry in self.shown:
            pin.held = True
            self.uses.append(pin.info)
            self.told.append(pin.info)
        else:
            self.pins.remove(pin)


class CacheMachine(RuleBasedStateMachine):
    numbers: tuple[int, ...] = (0,)
    """The pools' numbers, the nearest first."""
    namespace_rules: Rules = NO_RULES

    @initialize(granules=st.integers(1, 24), by_value=st.booleans(), data=st.data())
    def create(self, granules: int, by_value: bool, data: st.DataObject) -> None:
        self.board = Board()
        self.by_value = by_value
        self.granules = {
            number: granules if number == self.numbers[0] else data.draw(st.integers(1, 24))
            for number in self.numbers
        }
        pools = [
            self.pool(number, count * GRANULE_BYTES) for number, count in self.granules.items()
        ]
        self.cache = Cache(pools, TTL_S, LIMITS, self.board, self.namespace_rules)
        self.kept_s: dict[int, float] = {}  # by tag: until when an operator keeps the entry
        self.memory: dict[tuple[int, int], int] = {}  # by pool and granule
        self.now_s = 0.0
        self.tag = 0
        self.open: dict[SessionId, ModelSession] = {}
        self.leaving: dict[SessionId, ModelSession] = {}
        self.stored: dict[Place, tuple[int, Extent, Content, float]] = {}
        self.committed_s: dict[Place, float] = {}
        self.warm_s: dict[int, float] = {}  # by tag: the commit, or the end of the last lease
        self.counted = Counter[str]()
        self.expected: set[Key] = set()
        self.checksums: dict[int, int | None] = {}  # by tag
        self.tags: dict[EntryId, int] = {}
        self.known_extents: dict[EntryId, Extent] = {}
        self.set_aside: dict[SessionId, dict[EntryId, Writer]] = {}
        self.batch: AbstractContextManager[Iterator[None]] | None = None
        self.batch_scan: Iterator[None] | None = None  # None: it is over
        self.vaguely_warm: set[int] = set()  # tags of which `warm_s` is not sure
        self.known: dict[Key, bool] = {}
        self.cache.take_changes()
        for _ in range(2):
            self.open_session()

    def pool(self, number: int, nbytes: int) -> Pool:
        policy = ValueDensity(nbytes) if self.by_value else Lru()
        return Pool(Allocator(number, nbytes, GRANULE_BYTES), limits=POOL_LIMITS, policy=policy)

    # -- the model's memory ----------------------------------------------------------------------

    def span(self, extent: Extent) -> list[tuple[int, int]]:
        start = extent.offset // GRANULE_BYTES
        end = start + max(1, -(-extent.nbytes // GRANULE_BYTES))
        return [(extent.pool, granule) for granule in range(start, end)]

    def write(self, writer: Writer) -> None:
        for granule in self.span(writer.extent):
            self.memory[granule] = writer.tag

    def reads(self, extent: Extent, tag: int) -> bool:
        return all(self.memory.get(granule) == tag for granule in self.span(extent))

    def writing(self) -> set[Place]:
        return {w.place for m in self.open.values() for w in m.writers.values()}

    def keys_written(self) -> set[Key]:
        return {key for key, _ in self.writing()}

    def keys_stored(self) -> set[Key]:
        return {key for key, _ in self.stored}

    def nearest(self, key: Key) -> Place | None:
        return next((p for n in self.numbers if (p := (key, n)) in self.stored), None)

    def infos(self) -> dict[Place, EntryInfo]:
        """All entries of the cache, each key once in each pool."""
        infos, after = {}, None
        for _ in range(len(KEYS) * len(self.numbers) + 2):
            page, after = self.cache.views.page(after, 3)
            assert len(page) <= 3
            for info in page:
                assert (info.key, info.extent.pool) not in infos
                infos[info.key, info.extent.pool] = info
            if after is None:
                break
        return infos

    def any_pool(self, data: st.DataObject) -> Pool:
        if len(self.numbers) == 1:
            return self.cache.pools[0]
        return data.draw(st.sampled_from(self.cache.pools), label="pool")

    def leased_tags(self) -> set[int]:
        return (
            {
                reader.tag
                for session in [*self.open.values(), *self.leaving.values()]
                for reader in session.readers.values()
            }
            | {self.tags[entry] for entry in self.board.pins_set() if entry in self.tags}
            | {pin.writer.tag for pin in self.board.claim_pins if pin.held}
        )

    def known_leased_tags(self) -> set[int]:
        """The tags that are kept, or leased, without pins that the cache may not have seen yet."""
        if not self.board.slow:
            return self.leased_tags() | self.kept_s.keys()
        everyone = [*self.open.values(), *self.leaving.values()]
        leased = {reader.tag for session in everyone for reader in session.readers.values()}
        return leased | self.kept_s.keys()

    def scan(self) -> None:
        """Scan all pins, unless scans are slow."""
        while not self.board.slow and not self.cache.pins.step():
            pass

    def forget_evicted(self) -> int:
        """Drop entries from the model that the cache no longer has; returns how many."""
        left = self.infos()
        gone = [place for place in self.stored if place not in left]
        for place in gone:
            self.kept_s.pop(self.stored[place][0], None)
            del self.stored[place]
        stored = self.keys_stored()
        assert all(self.cache.views.contains(key) == (key in stored) for key in KEYS)
        return len(gone)

    def any_open(self, data: st.DataObject) -> SessionId:
        return data.draw(st.sampled_from(sorted(self.open)), label="session")

    def take_wakeups(self, woken: tuple[Wakeup, ...] | list[Wakeup]) -> None:
        for wakeup in woken:
            key, _, _ = self.open[wakeup.session].waits.pop(wakeup.ticket)
            if wakeup.ticket in self.open[wakeup.session].to_pin:
                assert wakeup.outcome in (Stored(), Missing())
                assert (wakeup.outcome == Stored()) == (key in self.keys_stored())
            if isinstance(wakeup.outcome, Stored):
                continue
            if isinstance(wakeup.outcome, Leased):
                self.take_lease(wakeup.session, key, wakeup.outcome)
            elif isinstance(wakeup.outcome, LimitReached):
                assert len(self.open[wakeup.session].readers) == LIMITS.leases_per_session
            else:
                self.counted["misses"] += 1

    def take_lease(self, session: SessionId, key: Key, leased: Leased) -> None:
        place = self.nearest(key)
        assert place is not None
        tag, extent, content, _ = self.stored[place]
        assert (leased.key, leased.extent, leased.content) == (key, extent, content)
        assert leased.expires_s == self.now_s + TTL_S
        assert leased.checksum == self.checksums[tag]
        assert self.reads(extent, tag), "the bytes are not those that were committed"
        self.counted.update(hits=1, bytes_out=extent.nbytes)
        info = self.cache.views.info(key)
        assert info is not None
        assert info.entry == leased.entry
        reader = Reader(tag, extent, key, leased.expires_s, info)
        self.open[session].readers[leased.lease] = reader
        self.stored[place] = (tag, extent, content, self.now_s)

    def lease_ended(self, reader: Reader) -> None:
        if self.board.slow:
            self.vaguely_warm.add(reader.tag)
        if reader.tag not in self.leased_tags():
            self.warm_s[reader.tag] = self.now_s

    # -- sessions ----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.open) < 3)
    @rule()
    def open_session(self) -> None:
        outcome = self.cache.open_session()
        if len(self.open) + len(self.leaving) >= LIMITS.sessions:
            assert outcome == LimitReached("sessions", LIMITS.sessions)
        else:
            assert isinstance(outcome, int)
            assert outcome not in self.open
            self.open[outcome] = ModelSession()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def stream_ends(self, data: st.DataObject) -> None:
        session = self.any_open(data)
        lost = self.open.pop(session)
        self.leaving[session] = lost
        self.board.ambush = False
        keys_lost = {writer.key for writer in lost.writers.values()}
        expected = {
            (s, ticket)
            for s, model in self.open.items()
            for ticket, (key, _, only_if_written) in model.waits.items()
            if only_if_written and key in keys_lost - self.expected - self.keys_written()
        }
        woken = self.cache.leave_session(session)
        assert {(w.session, w.ticket) for w in woken} == expected
        assert all(w.outcome == Missing() for w in woken)
        self.take_wakeups(woken)
        lost.waits.clear()
        self.counted["aborts"] += len(lost.writers)
        self.ended_session_is_told(session, lost)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def process_is_gone(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.leaving)))
        if self.is_read_early(self.board.begun.get(session, ())):
            return  # all puts that are done are taken first
        lost = self.leaving.pop(session)
        begun = list(self.board.begun.get(session, ()))
        pinned = {pin.info.entry for pin in self.board.pins if pin.set and pin.session == session}
        self.cache.close_session(session)
        self.set_aside.pop(session, None)
        for entry in pinned:
            self.unpinned(entry)
        for reader in lost.readers.values():
            self.lease_ended(reader)
        self.ended_session_is_told(session, lost)
        for writer in begun:
            content = Content("int8", (writer.extent.nbytes,), writer.extent.nbytes)
            outcome = self.cache.granted.put(
                session, writer.key, content, writer.extent, self.now_s
            )
            assert outcome == NotReserved()

    def ended_session_is_told(self, session: SessionId, lost: ModelSession) -> None:
        content = Content("int8", (1,), 1)
        assert reserve(self.cache, session, KEYS[0], content, self.now_s) == SessionEnded()
        assert self.cache.acquire(session, KEYS[0], self.now_s, 1.0) == SessionEnded()
        for reservation in lost.writers:
            assert self.cache.commit(session, reservation, self.now_s) == NotReserved()
            assert self.cache.abort(session, reservation) == NotReserved()

    # -- writing -----------------------------------------------------------------------------------

    @precondition(lambda self: self.open)
    @rule(data=st.data(), key=keys, nbytes=sizes, done=st.booleans())
    def reserve(self, data: st.DataObject, key: Key, nbytes: int, done: bool) -> None:
        session = self.any_open(data)
        pool = self.any_pool(data)
        outcome = self.ask_for_space(session, key, nbytes, pool)
        while isinstance(outcome, MakingRoom) and data.draw(st.booleans(), label="goes on"):
            outcome = self.ask_for_space(session, key, nbytes, pool)
        if done and isinstance(outcome, Reserved):
            self.finish(session, outcome.entry)

    @rule(slow=st.booleans())
    def scan_slowly(self, slow: bool) -> None:
        """Scan only some pins with each step from now on, or again all of them."""
        self.board.slow = slow
        self.scan()

    @precondition(lambda self: self.board.slow)
    @rule()
    def scan_on(self) -> None:
        self.cache.pins.step()

    @rule()
    def reserve_many(self) -> None:
        """Begin a batch, go on with its scan of the claims, or end it."""
        if self.batch is None:
            self.batch = self.cache.reserving()
            self.batch_scan = self.batch.__enter__()
        elif self.batch_scan is not None:
            if next(self.batch_scan, self) is self:
                self.batch_scan = None
        else:
            self.batch.__exit__(None, None, None)
            self.batch = None

    def ask_for_space(
        self, session: SessionId, key: Key, nbytes: int, pool: Pool
    ) -> Reservation | MakingRoom:
        place = key, pool.number
        is_scanned = self.batch is not None and self.batch_scan is None
        model = self.open[session]
        content = Content("int8", (nbytes,), nbytes, metadata=key.mm_hash.encode())
        was_stored = place in self.stored
        used_s = {stored: value[3] for stored, value in self.stored.items()}
        leased = self.known_leased_tags()
        for_quota = self.cache.counters.evictions["quota"]
        ask = self.cache.reserve if is_scanned else partial(reserve, self.cache)
        outcome = ask(session, key, content, self.now_s, pool)
        for_quota = self.cache.counters.evictions["quota"] - for_quota
        evicted = set(used_s) - set(self.infos())
        own = {stored for stored in evicted if stored[0].namespace == key.namespace}
        assert for_quota <= len(own), "another namespace's entry went for a quota"
        assert all(number == pool.number for _, number in evicted - own), "evicted in another pool"
        assert not any(self.stored[k][0] in leased for k in evicted), "a leased entry was evicted"
        ambushed = self.take_ambushed() or self.board.pins_starts
        if not isinstance(outcome, Reserved | MakingRoom) and not ambushed and not for_quota:
            assert not evicted, "a refusal evicted"
        self.counted.update(capacity=len(evicted) - for_quota, quota=for_quota)
        self.forget_evicted()
        quota_bytes = self.namespace_rules.quota_bytes(key.namespace) or (1 << 40)
        match outcome:
            case AlreadyStored():
                assert was_stored
                self.counted["duplicates"] += 1
            case BeingWritten():
                assert place in self.writing() or self.board.is_claimed(key)
            case MakingRoom():
                assert self.board.slow
            case LimitReached():
                held = len(model.writers) + len(self.set_aside.get(session, ()))
                assert held == LIMITS.reservations_per_session
            case EntryTooLarge(quota_bytes=limit) if limit:
                assert limit == quota_bytes < len(self.span(Extent(0, 0, nbytes))) * GRANULE_BYTES
                self.counted["quota_full"] += 1
            case EntryTooLarge():
                assert nbytes > self.granules[pool.number] * GRANULE_BYTES
                self.counted["entry_too_large"] += 1
            case PoolFull(held_bytes=held_bytes, quota_bytes=limit) if limit:
                taken = held_bytes + len(self.span(Extent(0, 0, nbytes))) * GRANULE_BYTES
                assert limit == quota_bytes < taken
                self.counted["quota_full"] += 1
            case PoolFull():
                self.counted["pool_full"] += 1
                run = self.longest_possible_run(pool.number)
                gave_up = len(evicted) >= PLANS  # each victim was pinned just before it was hidden
                least = len(self.span(Extent(0, 0, nbytes)))
                assert self.board.slow or run < least or (ambushed and gave_up)
            case Reserved(entry, extent):
                assert not was_stored
                assert place not in self.writing()
                assert extent.pool == pool.number
                unaware = [w for w in self.begun_writers() if w.key == key and not w.asks]
                assert not unaware, "a writer that does not ask would be refused"
                assert extent.nbytes == nbytes
                everyone = [*self.open.values(), *self.leaving.values()]
                writers = [*(each.writers for each in everyone), *self.set_aside.values()]
                written = [w for each in writers for w in each.values()]
                own = [extent, *(w.extent for w in written if w.key[0] == key.namespace)]
                here = self.nbytes_of(key.namespace)
                here += sum(len(self.span(each)) for each in own) * GRANULE_BYTES
                assert here <= quota_bytes, "it takes the namespace above its quota"
                self.tag += 1
                writer = Writer(self.tag, key, extent)
                self.assert_free(extent)
                model.writers[entry] = writer
                self.write(writer)
            case _:
                raise AssertionError(outcome)
        return outcome

    def nbytes_of(self, namespace: str) -> int:
        """The bytes of the pools that the namespace's entries take."""
        extents = [value[1] for (key, _), value in self.stored.items() if key[0] == namespace]
        return sum(len(self.span(extent)) * GRANULE_BYTES for extent in extents)

    def assert_free(self, extent: Extent) -> None:
        taken = {g for _, e, _, _ in self.stored.values() for g in self.span(e)}
        for session in [*self.open.values(), *self.leaving.values()]:
            taken |= {g for w in session.writers.values() for g in self.span(w.extent)}
            taken |= {g for r in session.readers.values() for g in self.span(r.extent)}
        taken |= {g for p in self.board.pins if p.held for g in self.span(p.info.extent)}
        taken |= {g for p in self.board.claim_pins if p.held for g in self.span(p.writer.extent)}
        pieces = [p for pieces in self.board.grants.values() for p in pieces if p.nbytes]
        taken |= {g for piece in pieces for g in self.span(piece)}
        taken |= {g for w in self.begun_writers() for g in self.span(w.extent)}
        for writers in self.set_aside.values():
            taken |= {g for w in writers.values() for g in self.span(w.extent)}
        assert not taken & set(self.span(extent)), "the extent belongs to someone"
        assert extent.offset + extent.nbytes <= self.granules[extent.pool] * GRANULE_BYTES

    def longest_possible_run(self, pool: int) -> int:
        """The most granules of the pool in a row that eviction could free."""
        blocked = set()
        for session in [*self.open.values(), *self.leaving.values()]:
            blocked |= {g for w in session.writers.values() for g in self.span(w.extent)}
            blocked |= {g for r in session.readers.values() for g in self.span(r.extent)}
        for writers in self.set_aside.values():
            blocked |= {g for w in writers.values() for g in self.span(w.extent)}
        blocked |= {g for w in self.begun_writers() for g in self.span(w.extent)}
        for pin in self.board.pins:
            blocked |= set(self.span(pin.info.extent)) if pin.blocks else set()
        for tag, extent, _, _ in self.stored.values():
            blocked |= set(self.span(extent)) if tag in self.kept_s else set()
        for entry in self.board.garbage & set(self.known_extents):
            blocked |= set(self.span(self.known_extents[entry]))
        starts = self.board.starts_set(lambda _: True)
        extents = [pin.writer.extent for pin in self.board.claim_pins]
        for extent in (*extents, *self.known_extents.values()):
            blocked |= set(self.span(extent)) if extent.start in starts else set()
        longest = run = 0
        for granule in range(self.granules[pool]):
            run = 0 if (pool, granule) in blocked else run + 1
            longest = max(longest, run)
        return longest

    @precondition(lambda self: any(m.writers for m in self.open.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([s for s, m in self.open.items() if m.writers]))
        self.finish(session, data.draw(st.sampled_from(sorted(self.open[session].writers))))

    def finish(self, session: SessionId, reservation: EntryId) -> None:
        """Write, commit, and see who is told."""
        writer = self.open[session].writers.pop(reservation)
        self.write(writer)
        waiting = {
            (s, t)
            for s, m in self.open.items()
            for t, wait in m.waits.items()
            if wait[0] == writer.key
        }
        nbytes = writer.extent.nbytes
        content = Content("int8", (nbytes,), nbytes, writer.key.mm_hash.encode())
        learned = Content("bool", (1, nbytes), nbytes, b"", 2.0) if writer.tag % 3 == 0 else None
        content = learned or content
        self.stored[writer.place] = (writer.tag, writer.extent, content, self.now_s)
        self.committed_s[writer.place] = self.warm_s[writer.tag] = self.now_s
        # Some writers know the checksum; of other entries it is found out later, or never.
        self.checksums[writer.tag] = writer.tag if writer.tag % 2 else None
        checksum = self.checksums[writer.tag]
        about = checksum, learned, 0.1 * (writer.tag % 7)
        outcome = self.cache.commit(session, reservation, self.now_s, *about)
        assert isinstance(outcome, Committed)
        self.committed(writer, outcome, waiting)
        assert self.cache.commit(session, reservation, self.now_s) == NotReserved()

    def committed(
        self, writer: Writer, outcome: Committed, waiting: set[tuple[SessionId, int]]
    ) -> None:
        info = self.infos()[writer.place]
        assert self.board.shown[info.entry] == info or outcome.woken
        self.tags[info.entry] = writer.tag
        self.known_extents[info.entry] = info.extent
        self.counted.update(puts=1, bytes_in=writer.extent.nbytes)
        assert {(w.session, w.ticket) for w in outcome.woken} == waiting
        self.take_wakeups(outcome.woken)

    # -- writing without asking --------------------------------------------------------------------

    def begun_writers(self) -> list[Writer]:
        return [writer for writers in self.board.begun.values() for writer in writers]

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        nbytes=st.integers(1, 3 * GRANULE_BYTES),
        least=st.integers(0, 2),
        most=st.integers(1, 4),
    )
    def grant(self, data: st.DataObject, nbytes: int, least: int, most: int) -> None:
        session = self.any_open(data)
        pool = self.any_pool(data)
        stored, leased = set(self.stored), self.known_leased_tags()
        before = self.granted(session)
        granted = self.cache.granted.grant(session, nbytes, least, most, self.now_s, pool)
        evicted = stored - set(self.infos())
        assert all(number == pool.number for _, number in evicted), "evicted in another pool"
        assert least or not evicted, "a grant evicted that should not"
        assert not any(self.stored[place][0] in leased for place in evicted), "a lease was broken"
        self.counted["capacity"] += len(evicted)
        self.forget_evicted()
        if granted:
            pieces = self.board.grants.pop(session)
            assert all(piece.nbytes >= nbytes for piece in pieces)
            assert self.cache.granted.room(session, nbytes, pool) > 0
            for piece in pieces:
                assert piece.pool == pool.number
                self.assert_free(piece)
            self.board.grants[session] = pieces
        else:
            assert before == self.granted(session)
        begun = Counter(number for w in self.begun_writers() for number, _ in self.span(w.extent))
        for pool in self.cache.pools:
            share = POOL_LIMITS.granted_share * self.granules[pool.number]
            assert pool.granted_bytes <= (share + begun[pool.number]) * GRANULE_BYTES

    def granted(self, session: SessionId) -> tuple[list[Extent] | None, list[int]]:
        return self.board.grants.get(session), [pool.granted_bytes for pool in self.cache.pools]

    @precondition(lambda self: self.board.grants)
    @rule(data=st.data(), key=keys, nbytes=st.integers(0, 3 * GRANULE_BYTES))
    def begin(self, data: st.DataObject, key: Key, nbytes: int) -> None:
        self.claim(data, key, nbytes)

    @precondition(lambda self: self.board.grants and self.open)
    @rule(data=st.data(), key=keys, nbytes=st.integers(0, 3 * GRANULE_BYTES))
    def put_what_is_read_early(self, data: st.DataObject, key: Key, nbytes: int) -> None:
        session, writer = self.claim(data, key, nbytes)
        if writer is not None:
            pin = ClaimPin(self.any_open(data), writer, set=True, held=True)
            self.board.claim_pins.append(pin)
            self.vaguely_warm.add(writer.tag)
            self.board.begun[session].remove(writer)
            self.take_put(session, writer)

    def claim(self, data: st.DataObject, key: Key, nbytes: int) -> tuple[SessionId, Writer | None]:
        """A writer does not know yet that its stream has ended, or never learns it."""
        session = data.draw(st.sampled_from(sorted(self.board.grants)))
        extent = self.board.take_from_grant(session, nbytes)
        if extent is None:
            return session, None
        self.tag += 1
        writer = Writer(self.tag, key, extent, self.board.reservations > 0)
        self.board.begun.setdefault(session, []).append(writer)
        self.write(writer)
        return session, writer

    @precondition(lambda self: self.begun_writers())
    @rule(data=st.data(), gives_up=st.booleans())
    def put(self, data: st.DataObject, gives_up: bool) -> None:
        session = data.draw(st.sampled_from(sorted(s for s, w in self.board.begun.items() if w)))
        writers = self.board.begun[session]
        writer = writers.pop(data.draw(st.integers(0, len(writers) - 1)))
        if gives_up and not self.is_read_early([writer]) and data.draw(st.booleans()):
            return
        self.take_put(session, writer)

    def take_put(self, session: SessionId, writer: Writer) -> None:
        key, extent = writer.key, writer.extent
        content = Content("int8", (extent.nbytes,), extent.nbytes, key.mm_hash.encode())
        for other in {*self.open, *self.leaving} - {session}:
            assert self.cache.granted.put(other, key, content, extent, self.now_s) == NotReserved()
        waiting = {
            (s, t) for s, m in self.open.items() for t, wait in m.waits.items() if wait[0] == key
        }
        was_stored, was_written = writer.place in self.stored, writer.place in self.writing()
        if not was_stored and not was_written:
            self.stored[writer.place] = (writer.tag, extent, content, self.now_s)
            self.committed_s[writer.place] = self.warm_s[writer.tag] = self.now_s
            self.checksums[writer.tag] = None
        outcome = self.cache.granted.put(session, key, content, extent, self.now_s)
        match outcome:
            case Committed():
                assert not was_stored
                assert not was_written
                self.committed(writer, outcome, waiting)
            case AlreadyStored():
                assert was_stored
                self.counted["duplicates"] += 1
            case BeingWritten():
                assert was_written
                assert writer.asks, "it was told that its put is stored"
            case NotReserved():
                raise AssertionError("a put in granted memory was refused")
        assert self.cache.granted.put(session, key, content, extent, self.now_s) == NotReserved()

    @rule(key=keys)
    def hash(self, key: Key) -> None:
        info = self.cache.views.info(key)
        place = self.nearest(key)
        assert (info is not None) == (place is not None)
        on_its_way = key in self.keys_written() or self.board.is_begun(key)
        assert is_being_written(self.cache, key) == on_its_way
        if info is not None and place is not None:
            tag, extent, content, _ = self.stored[place]
            assert (info.key, info.extent, info.content) == (key, extent, content)
            assert info.checksum == self.checksums[tag]
            self.cache.note_checksum(info.entry, tag + 1)
            self.checksums[tag] = tag + 1
        self.cache.note_checksum(EntryId(1 << 40), 1)  # of an entry that has gone

    @precondition(lambda self: any(m.writers for m in self.open.values()))
    @rule(data=st.data(), may_still_write=st.booleans())
    def abort(self, data: st.DataObject, may_still_write: bool) -> None:
        session = data.draw(st.sampled_from([s for s, m in self.open.items() if m.writers]))
        reservation = data.draw(st.sampled_from(sorted(self.open[session].writers)))
        writer = self.open[session].writers.pop(reservation)
        others = [s for s in self.open if s != session]
        if others:
            assert self.cache.commit(others[0], reservation, self.now_s) == NotReserved()
        giving_up = {
            (s, t)
            for s, m in self.open.items()
            for t, (key, _, only_if_written) in m.waits.items()
            if key == writer.key and only_if_written
            if key not in self.expected | self.keys_written()
        }
        if may_still_write:
            self.set_aside.setdefault(session, {})[reservation] = writer
            outcome = self.cache.abandon(session, reservation)
            assert self.cache.abandon(session, reservation) == NotReserved()
            assert self.cache.commit(session, reservation, self.now_s) == NotReserved()
        else:
            outcome = self.cache.abort(session, reservation)
        assert isinstance(outcome, Aborted)
        self.counted["aborts"] += 1
        assert {(w.session, w.ticket) for w in outcome.woken} == giving_up
        self.take_wakeups(outcome.woken)

    @precondition(lambda self: self.set_aside)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.set_aside)))
        reservation = data.draw(st.sampled_from(sorted(self.set_aside[session])))
        self.cache.reclaim(session, reservation)
        if session in self.open:
            self.forget_set_aside(session, reservation)

    def forget_set_aside(self, session: SessionId, reservation: EntryId) -> None:
        del self.set_aside[session][reservation]
        if not self.set_aside[session]:
            del self.set_aside[session]

    # -- entries from elsewhere --------------------------------------------------------------------

    @rule(key=keys)
    def expect(self, key: Key) -> None:
        wanted = key not in self.keys_stored() | self.keys_written() | self.expected
        assert self.cache.readers.wants(key) == wanted
        if wanted:
            self.cache.readers.expect(key)
            self.expected.add(key)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def stop_expecting(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        self.expected.remove(key)
        giving_up = {
            (s, t)
            for s, m in self.open.items()
            for t, wait in m.waits.items()
            if wait[0] == key and wait[2] and key not in self.keys_written()
        }
        woken = self.cache.readers.stop_expecting(key)
        assert {(w.session, w.ticket) for w in woken} == giving_up
        self.take_wakeups(woken)

    # -- reading -----------------------------------------------------------------------------------

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        key=keys,
        wait_s=st.sampled_from([0.0, 0.0, 3.0, 30.0]),
        only_if_written=st.booleans(),
        known=st.booleans(),
        to_pin=st.booleans(),
    )
    def acquire(
        self,
        data: st.DataObject,
        key: Key,
        wait_s: float,
        only_if_written: bool,
        known: bool,
        to_pin: bool,
    ) -> None:
        session = self.any_open(data)
        coming = self.keys_stored() | self.keys_written() | self.expected
        if known and coming:
            key = data.draw(st.sampled_from(sorted(coming)))
        model = self.open[session]
        wait_for = WaitFor.WRITER if only_if_written else WaitFor.ANY
        answer = Answer.PIN if to_pin else Answer.LEASE
        scan_claims(self.cache)
        outcome = self.cache.acquire(session, key, self.now_s, wait_s, wait_for, answer)
        match outcome:
            case Leased():
                assert not to_pin
                self.take_lease(session, key, outcome)
            case Stored():
                assert to_pin
                assert key in self.keys_stored()
            case Missing():
                self.counted["misses"] += 1
                assert key not in self.keys_stored()
                on_its_way = key in self.keys_written() | self.expected
                on_its_way = on_its_way or self.board.is_begun(key)
                assert wait_s == 0.0 or (only_if_written and not on_its_way)
            case Waiting(ticket):
                assert key not in self.keys_stored()
                assert wait_s > 0.0
                assert not only_if_written or self.board.is_begun(key) or key in coming
                model.waits[ticket] = (key, self.now_s + wait_s, only_if_written)
                if to_pin:
                    model.to_pin.add(ticket)
            case LimitReached("leases"):
                assert len(model.readers) == LIMITS.leases_per_session
            case LimitReached("waits"):
                assert len(model.waits) == LIMITS.waits_per_session
            case _:
                raise AssertionError(outcome)

    @precondition(lambda self: any(m.readers for m in self.open.values()))
    @rule(data=st.data(), pins=st.booleans())
    def release(self, data: st.DataObject, pins: bool) -> None:
        """With `pins`, the reader has pinned the entry while it was leased, and reads on."""
        session = data.draw(st.sampled_from([s for s, m in self.open.items() if m.readers]))
        lease = data.draw(st.sampled_from(sorted(self.open[session].readers)))
        for other in self.open:
            if other != session:
                assert not self.cache.release(other, lease), "another session's lease"
        reader = self.open[session].readers.pop(lease)
        if pins:
            info, late = reader.info, self.board.slow
            self.board.pins.append(Pin(session, info, set=True, blocks=True, late=late, held=True))
        self.lease_ended(reader)
        assert self.cache.release(session, lease)
        assert not self.cache.release(session, lease)

    @precondition(lambda self: any(m.waits for m in self.open.values()))
    @rule(data=st.data())
    def cancel_wait(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([s for s, m in self.open.items() if m.waits]))
        ticket = data.draw(st.sampled_from(sorted(self.open[session].waits)))
        del self.open[session].waits[ticket]
        assert self.cache.cancel_wait(session, ticket)
        assert not self.cache.cancel_wait(session, ticket)

    @precondition(lambda self: any(m.readers for m in self.open.values()))
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([s for s, m in self.open.items() if m.readers]))
        model = self.open[session]
        chosen = data.draw(st.lists(st.sampled_from(sorted(model.readers)), unique=True))
        until_s, lost = self.cache.renew(session, [*chosen, LeaseId(-1)], self.now_s)
        assert lost == [-1]
        for lease in chosen:
            model.readers[lease].until_s = until_s

    # -- readers of puts that are not listed yet ---------------------------------------------------

    def is_read_early(self, writers: Sequence[Writer]) -> bool:
        """Whether one of these puts was found by a reader: then it is done."""
        return any(pin.writer is writer for pin in self.board.claim_pins for writer in writers)

    @precondition(lambda self: self.open and self.begun_writers())
    @rule(data=st.data(), steps=st.integers(0, 2))
    def find_claim(self, data: st.DataObject, steps: int) -> None:
        writers = self.begun_writers()
        writer = writers[data.draw(st.integers(0, len(writers) - 1))]
        pin = ClaimPin(self.any_open(data), writer)
        self.board.claim_pins.append(pin)
        for _ in range(steps):
            self.go_on_reading(pin)

    @precondition(lambda self: self.board.claim_pins)
    @rule(data=st.data())
    def read_claim(self, data: st.DataObject) -> None:
        pins = self.board.claim_pins
        self.go_on_reading(pins[data.draw(st.integers(0, len(pins) - 1))])

    def go_on_reading(self, pin: ClaimPin) -> None:
        """Pin, recheck and read, or end."""
        self.vaguely_warm.add(pin.writer.tag)  # a scan may hold the entry, or end that
        if not pin.set:
            pin.set = True
        elif not pin.held and any(pin.writer is writer for writer in self.begun_writers()):
            pin.held = True
        else:
            self.board.claim_pins.remove(pin)

    # -- readers that ask nobody -------------------------------------------------------------------

    @precondition(lambda self: self.open and self.board.shown)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(sorted(self.board.shown)))
        self.board.pins.append(Pin(self.any_open(data), self.board.shown[entry]))

    @precondition(lambda self: any(not pin.set for pin in self.board.pins))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        pins = [pin for pin in self.board.pins if not pin.set]
        pin = pins[data.draw(st.integers(0, len(pins) - 1))]
        self.board.pin(pin)
        # Hidden before it was pinned, an entry is kept for as long as each scan finds any pin.
        pin.blocks |= self.cache._entries.get(pin.info.entry) is not None

    @precondition(lambda self: any(pin.set and not pin.held for pin in self.board.pins))
    @rule(data=st.data())
    def recheck(self, data: st.DataObject) -> None:
        pins = [pin for pin in self.board.pins if pin.set and not pin.held]
        pin = pins[data.draw(st.integers(0, len(pins) - 1))]
        self.board.recheck(pin)
        if not pin.held:
            self.unpinned(pin.info.entry)

    @precondition(lambda self: any(pin.held for pin in self.board.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pins = [pin for pin in self.board.pins if pin.held]
        pin = pins[data.draw(st.integers(0, len(pins) - 1))]
        self.board.pins.remove(pin)
        self.unpinned(pin.info.entry)

    def unpinned(self, entry: EntryId) -> None:
        self.scan()
        if self.board.slow and entry in self.tags:
            self.vaguely_warm.add(self.tags[entry])
        if entry in self.tags and self.tags[entry] not in self.leased_tags():
            self.warm_s[self.tags[entry]] = self.now_s

    @rule(entry=st.integers(1, 60), ambush=st.booleans())
    def mischief(self, entry: int, ambush: bool) -> None:
        """A client pins what it never found."""
        self.board.ambush = ambush
        before, self.board.garbage = self.board.garbage, {EntryId(entry)}
        for old in before:
            self.unpinned(old)

    def take_ambushed(self) -> bool:
        ambushed, self.board.ambushed = self.board.ambushed, False
        return ambushed

    @invariant()
    def uses_are_counted(self) -> None:
        told, self.board.told = self.board.told, []
        infos = self.infos() if told else {}
        for info in told:
            self.counted.update(hits=1, bytes_out=info.content.nbytes)
            place = info.key, info.extent.pool
            if place in infos and infos[place].entry == info.entry:
                tag, extent, content, _ = self.stored[place]
                self.stored[place] = (tag, extent, content, self.now_s)
                self.warm_s[tag] = self.now_s
        self.cache.evictor.drain_uses(self.now_s)  # without a scan of the pins

    # -- time and eviction -----------------------------------------------------------------------

    @rule(step_s=st.sampled_from([0.5, 2.0, 5.0, TTL_S]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        due_leases, due_waits = set(), set()
        for sessions in (self.open, self.leaving):
            for session, model in sessions.items():
                for lease, reader in list(model.readers.items()):
                    if reader.until_s <= self.now_s:
                        due_leases.add((session, lease))
                        self.lease_ended(model.readers.pop(lease))
                for ticket, (_, until_s, _) in model.waits.items():
                    if until_s <= self.now_s:
                        due_waits.add((session, ticket))
        ttls = {place: self.namespace_rules.ttl_s(place[0].namespace) for place in self.stored}
        over = {place for place, ttl_s in ttls.items() if ttl_s and self.age_s(place) >= ttl_s}
        next_s = self.cache.next_deadline_s()
        ends = [until_s for until_s in self.kept_s.values() if until_s <= self.now_s]
        if due_leases or due_waits or over or ends:
            assert next_s is not None
            assert next_s <= self.now_s
        expired, overdue = self.cache.expire(self.now_s)
        self.counted.update(leases_expired=len(due_leases), waits_expired=len(due_waits))
        assert {(e.session, e.lease) for e in expired} == due_leases
        assert {(w.session, w.ticket) for w in overdue} == due_waits
        assert all(w.outcome == Missing() for w in overdue)
        left = self.infos().keys()
        assert over == self.stored.keys() - left, "only those whose time was over"
        self.counted["ttl"] += self.forget_evicted()
        for tag in [tag for tag, until_s in self.kept_s.items() if until_s <= self.now_s]:
            self.kept_no_more(tag)
        self.take_wakeups(overdue)

    def age_s(self, place: Place) -> float:
        return self.now_s - self.committed_s[place]

    def kept_no_more(self, tag: int) -> None:
        del self.kept_s[tag]
        if self.board.slow:
            self.vaguely_warm.add(tag)
        if tag not in self.leased_tags():
            self.warm_s[tag] = self.now_s

    @rule(key=keys, for_s=st.sampled_from([2.0, 20.0, inf]))
    def keep(self, key: Key, for_s: float) -> None:
        place = self.nearest(key)
        outcome = self.cache.retention.keep(key, self.now_s + for_s)
        if place is None:
            assert outcome == Missing()
            return
        tag, extent, _, _ = self.stored[place]
        kept = [v[1] for p, v in self.stored.items() if v[0] in self.kept_s and p[1] == place[1]]
        kept_bytes = sum(len(self.span(each)) for each in kept) * GRANULE_BYTES
        nbytes, most = len(self.span(extent)) * GRANULE_BYTES, self.granules[place[1]] / 2
        if tag not in self.kept_s and kept_bytes + nbytes > most * GRANULE_BYTES:
            assert outcome == KeptTooMuch(nbytes, kept_bytes, int(most * GRANULE_BYTES))
        else:
            assert outcome == Kept()
            if tag in self.kept_s:
                self.kept_no_more(tag)
            self.kept_s[tag] = self.now_s + for_s

    @precondition(lambda self: self.kept_s)
    @rule(key=keys)
    def unkeep(self, key: Key) -> None:
        place = self.nearest(key)
        tag = None if place is None else self.stored[place][0]
        assert self.cache.retention.unkeep(key) == (tag in self.kept_s)
        if tag in self.kept_s:
            self.kept_no_more(tag)

    @precondition(lambda self: len(self.stored) > 2)
    @rule(
        key=st.one_of(st.none(), keys),
        namespace=st.sampled_from([None, "n0", "n1", "n9"]),
        idle_s=st.sampled_from([0.0, 0.0, 4.0]),
        age_s=st.sampled_from([0.0, 0.0, 4.0]),
        dry_run=st.sampled_from([True, True, False]),
        data=st.data(),
    )
    def evict(
        self,
        key: Key | None,
        namespace: str | None,
        idle_s: float,
        age_s: float,
        dry_run: bool,
        data: st.DataObject,
    ) -> None:
        several = len(self.numbers) > 1
        pool = data.draw(st.sampled_from([None, *self.numbers])) if several else None
        expected = {
            (stored, number): content.nbytes
            for (stored, number), (_, _, content, used_s) in self.stored.items()
            if key in (None, stored)
            and pool in (None, number)
            and namespace in (None, stored.namespace)
            and self.now_s - used_s >= idle_s
            and self.now_s - self.committed_s[stored, number] >= age_s
        }
        leased = self.leased_tags()
        expected_leased = sum(self.stored[k][0] in leased for k in expected)
        selection = Selection(key, namespace, idle_s, age_s, pool)
        totals, after = [0, 0, 0], None
        for _ in range(len(KEYS) * len(self.numbers) + 2):
            report = self.cache.evictor.evict_selected(selection, self.now_s, 2, after, dry_run)
            totals = [
                a + b
                for a, b in zip(totals, (report.entries, report.nbytes, report.leased), strict=True)
            ]
            after = report.next_after
            if after is None:
                break
        assert totals[:2] == [len(expected), sum(expected.values())]
        assert totals[2] == expected_leased or self.board.slow or self.board.pins_starts
        gone = self.forget_evicted()
        assert gone == (0 if dry_run else len(expected))
        self.counted["requested"] += gone

    @precondition(lambda self: self.cache.evictor.needs_trim())
    @rule()
    def trim(self) -> None:
        self.scan_slowly(slow=False)
        self.scan()  # the one that was under way may have found a pin that is over by now
        leased = self.leased_tags() | self.kept_s.keys()
        needy = [pool for pool in self.cache.pools if pool.needs_trim()]
        over = {key[0] for key, _ in self.stored if self.is_over(key[0])}
        for_quota = self.cache.counters.evictions["quota"]
        while self.cache.evictor.trim(1, self.now_s):
            pass
        ambushed = self.board.ambushed or self.board.pins_starts
        for_quota = self.cache.counters.evictions["quota"] - for_quota
        infos = self.infos()
        gone_own = {place for place in self.stored.keys() - infos if place[0].namespace in over}
        assert for_quota <= len(gone_own), "another namespace's entry went for a quota"
        for pool in self.cache.pools:
            mine = [p for p in self.stored if p[1] == pool.number and p[0].namespace not in over]
            here = {place: self.stored[place][0] for place in mine}
            sure = {p: tag for p, tag in here.items() if tag not in leased}
            if self.vaguely_warm & set(sure.values()):
                sure = {}
            warm_s = {p: self.warm_s[tag] for p, tag in sure.items()}
            gone = [s for p, s in warm_s.items() if p not in infos]
            left = [s for p, s in warm_s.items() if p in infos]
            assert pool in needy or here.keys() <= infos.keys(), "trimmed without need"
            if gone and left and not self.by_value:
                assert max(gone) <= min(left), "a warmer entry went first"
            if left and not ambushed and pool in needy and not for_quota:
                used_bytes = pool.used_bytes + pool.granted_bytes
                assert used_bytes <= POOL_LIMITS.low_watermark * pool.nbytes
        self.take_ambushed()
        assert all(p in infos for p, v in self.stored.items() if v[0] in leased)
        self.counted.update(watermark=self.forget_evicted() - for_quota, quota=for_quota)
        for namespace in over:
            held = [p for p, v in self.stored.items() if p[0].namespace == namespace]
            is_held = all(self.stored[place][0] in leased for place in held)
            assert is_held or ambushed or not self.is_over(namespace)

    def is_over(self, namespace: str) -> bool:
        quota_bytes = self.namespace_rules.quota_bytes(namespace)
        return quota_bytes is not None and self.nbytes_of(namespace) > quota_bytes

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def late_writers_write(self) -> None:
        """A writer that has not given its extent back may write at any time."""
        for session in [*self.open.values(), *self.leaving.values()]:
            for writer in session.writers.values():
                self.write(writer)
        for writers in self.set_aside.values():
            for writer in writers.values():
                self.write(writer)
        for writer in self.begun_writers():
            self.write(writer)

    @invariant()
    def the_core_agrees_with_itself(self) -> None:
        self.cache.check()
        for pool in self.cache.pools:
            if isinstance(pool.policy, ValueDensity):
                pool.policy.check()

    @invariant()
    def every_byte_is_as_promised(self) -> None:
        for (key, _), (tag, extent, _, _) in self.stored.items():
            assert self.cache.views.contains(key)
            assert self.reads(extent, tag)
        for session in [*self.open.values(), *self.leaving.values()]:
            for reader in session.readers.values():
                assert self.reads(reader.extent, reader.tag), "a lease was not kept"
        for pin in self.board.pins:
            if pin.held:
                assert self.reads(pin.info.extent, self.tags[pin.info.entry]), "not kept for a pin"
        for early in self.board.claim_pins:
            if early.held:
                assert self.reads(early.writer.extent, early.writer.tag), "not kept for a claim"

    @invariant()
    def figures_agree(self) -> None:
        everyone = [*self.open.values(), *self.leaving.values()]
        assert self.cache.views.entries == len(self.stored)
        assert self.board.reservations == len(self.keys_written()) + (self.batch is not None)
        self.scan()
        kept = [pin for pin in self.board.pins if pin.blocks and not pin.late]
        alive = set(self.board.shown) | {pin.info.entry for pin in kept}
        pinned = 0 if self.board.slow else len(self.board.pins_set() & alive)
        assert self.cache.views.leases - sum(len(m.readers) for m in everyone) >= pinned
        assert self.cache.views.waits == sum(len(m.waits) for m in everyone)
        assert self.cache.views.sessions == len(everyone)
        for pool in self.cache.pools:
            assert pool.nbytes == self.granules[pool.number] * GRANULE_BYTES
            assert pool.used_bytes + pool.granted_bytes + pool.free_bytes == pool.nbytes
            used_bytes = pool.used_bytes + pool.granted_bytes
            assert pool.needs_trim() == (used_bytes > POOL_LIMITS.high_watermark * pool.nbytes)
        is_full = any(pool.needs_trim() for pool in self.cache.pools)
        is_over = any(self.is_over(namespace) for namespace in ("n0", "n1"))
        assert self.cache.retention.is_over_quota == is_over
        assert self.cache.evictor.needs_trim() == (is_full or is_over)

    @invariant()
    def pages_list_everything(self) -> None:
        found = {place: info.content for place, info in self.infos().items()}
        assert found == {place: value[2] for place, value in self.stored.items()}

    @invariant()
    def changes_are_told(self) -> None:
        self.known |= self.cache.take_changes()
        assert {key for key, stored in self.known.items() if stored} == self.keys_stored()

    @invariant()
    def everything_is_counted(self) -> None:
        self.uses_are_counted()
        counters = self.cache.counters
        told = {**vars(counters), **counters.evictions, **counters.refused}
        assert {name: told[name] for name in self.counted} == self.counted

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for session in list(self.open):
            self.take_wakeups(self.cache.leave_session(session))
            self.leaving[session] = self.open.pop(session)
            self.leaving[session].waits.clear()
        for session in self.leaving:
            self.cache.close_session(session)
        granted_bytes = [pool.granted_bytes for pool in self.cache.pools]
        assert not any(granted_bytes), "a grant outlived its session"
        self.board.ambush, self.board.garbage = False, set()
        self.board.slow = False
        self.scan()
        self.cache.evictor.evict_selected(
            Selection(), self.now_s, limit=len(KEYS) * len(self.numbers) + 1
        )
        self.scan()
        self.cache.check()
        for pool in self.cache.pools:
            assert is_one_free_extent(pool.allocator), "something leaked"


CacheMachine.TestCase.settings = draws(150, steps=80)
TestCache = drawn(CacheMachine.TestCase)


class RuledMachine(CacheMachine):
    """The same clients where one namespace has a quota, and the other's entries an end."""

    namespace_rules = Rules({"n0": 5 * GRANULE_BYTES}, {"n?": 12.0, "n0": 1e6})


RuledMachine.TestCase.settings = draws(100, steps=80)
TestRuled = drawn(RuledMachine.TestCase)


class TwoPoolsMachine(CacheMachine):
    """The same clients with two pools; their numbers are not in the order of nearness."""

    numbers = (7, 2)


TwoPoolsMachine.TestCase.settings = draws(100, steps=80)
TestTwoPools = drawn(TwoPoolsMachine.TestCase)


def test_who_waits_for_an_expected_key_outlasts_a_writer_that_gives_up() -> None:
    """A key expected, being written and waited for at one time, which chance seldom meets."""
    cache, key = Cache([Pool(Allocator(0, GRANULE_BYTES, GRANULE_BYTES))], TTL_S, LIMITS), KEYS[0]
    writer, reader = cache.open_session(), cache.open_session()
    assert not isinstance(writer, LimitReached)
    assert not isinstance(reader, LimitReached)
    cache.readers.expect(key)
    reserved = reserve(cache, writer, key, Content("int8", (1,), 1), 0.0)
    assert isinstance(reserved, Reserved)
    waiting = cache.acquire(reader, key, 0.0, 5.0, wait_for=WaitFor.WRITER)
    assert isinstance(waiting, Waiting)
    assert cache.abort(writer, reserved.entry) == Aborted(), "it may still come from elsewhere"
    assert cache.readers.stop_expecting(key) == (Wakeup(reader, waiting.ticket, Missing()),)


def test_a_recovered_entry_is_seen_by_nobody_until_it_is_committed() -> None:
    board = Board()
    cache = Cache([Pool(Allocator(0, 64 * GRANULE_BYTES, GRANULE_BYTES))], board=board)
    session, reader = cache.open_session(), cache.open_session()
    assert not isinstance(session, LimitReached)
    assert not isinstance(reader, LimitReached)
    content = Content("int8", (5000,), 5000)
    keys = [Key("n", name) for name in ("right", "wrong", "over it")]
    places = [Extent(0, number * GRANULE_BYTES, 5000) for number in (3, 7, 8)]
    adopted = [
        cache.recover(session, key, content, place) for key, place in zip(keys, places, strict=True)
    ]
    assert adopted[2] is None, "its place is another's"
    assert cache.recover(session, keys[0], content, Extent(0, 20 * GRANULE_BYTES, 5000)) is None
    cache.check()
    assert cache.views.entries == 0
    assert cache.acquire(reader, keys[0], 0.0) == Missing()
    assert reserve(cache, reader, keys[0], content, 0.0) == BeingWritten()
    waiting = cache.acquire(reader, keys[1], 0.0, 5.0, wait_for=WaitFor.WRITER)
    assert isinstance(waiting, Waiting)
    right, wrong, _ = adopted
    assert right is not None
    assert wrong is not None
    cache.commit(session, right, 1.0, 77)
    aborted = cache.abort(session, wrong)
    assert isinstance(aborted, Aborted)
    assert [wakeup.outcome for wakeup in aborted.woken] == [Missing()]
    leased = cache.acquire(reader, keys[0], 1.0)
    assert isinstance(leased, Leased)
    assert (leased.extent, leased.checksum) == (places[0], 77)
    cache.check()


@pytest.mark.parametrize("leased", [False, True])
def test_an_entry_hidden_during_a_scan_is_kept_for_who_pinned_it_behind_the_scan(
    leased: bool,
) -> None:
    """The reader pins after its page was read: only the next scan sees the pin."""
    board = Board()
    cache = Cache([Pool(Allocator(0, 64 * GRANULE_BYTES, GRANULE_BYTES))], board=board)
    first, second = cache.open_session(), cache.open_session()
    assert not isinstance(first, LimitReached)
    assert not isinstance(second, LimitReached)
    for key in KEYS[:2]:
        reserved = reserve(cache, first, key, Content("int8", (1,), 1), 0.0)
        assert isinstance(reserved, Reserved)
        cache.commit(first, reserved.entry, 0.0)
    other, wanted = (cache.views.info(key) for key in KEYS[:2])
    assert other is not None
    assert wanted is not None
    lease = cache.acquire(second, KEYS[1], 0.0) if leased else None
    board.pins = [Pin(first, other), Pin(second, other)]
    board.slow = True
    assert not cache.pins.step(), "the page of the first session has been read, no other"
    pin = Pin(first, wanted)
    board.pins.append(pin)
    board.pin(pin)
    board.recheck(pin)
    assert pin.held
    cache.evictor.evict_selected(Selection(key=KEYS[1]), 0.0, 1)
    if isinstance(lease, Leased):
        cache.release(second, lease.lease)
    while cache.pins._scanned or cache.pins._scan is not None:
        cache.pins.step()
    assert cache.pools[0].used_bytes == 2 * GRANULE_BYTES, (
        "the scan that was under way cannot decide it"
    )
    assert not cache.pins.is_settled
    while not cache.pins.step():
        pass
    assert cache.pools[0].used_bytes == 2 * GRANULE_BYTES
    board.pins.remove(pin)
    while not cache.pins.step():
        pass
    assert cache.pools[0].used_bytes == GRANULE_BYTES
    cache.check()


def stored_and_leased(cache: Cache, session: SessionId) -> tuple[EntryInfo, Leased]:
    """An entry of KEYS[0], and the session's lease of it."""
    reserved = reserve(cache, session, KEYS[0], Content("int8", (1,), 1), 0.0)
    assert isinstance(reserved, Reserved)
    cache.commit(session, reserved.entry, 0.0)
    info = cache.views.info(KEYS[0])
    lease = cache.acquire(session, KEYS[0], 0.0)
    assert info is not None
    assert isinstance(lease, Leased)
    return info, lease


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("runs_out", [False, True])
def test_a_pin_of_a_leased_entry_holds_when_the_lease_has_ended(
    runs_out: bool, under_way: bool
) -> None:
    """Also that of an entry that was evicted before, which no scan decides that began before."""
    board = Board()
    cache = Cache([Pool(Allocator(0, 64 * GRANULE_BYTES, GRANULE_BYTES))], TTL_S, board=board)
    session, other = cache.open_session(), cache.open_session()
    assert not isinstance(session, LimitReached)
    assert not isinstance(other, LimitReached)
    info, lease = stored_and_leased(cache, session)
    board.pins = [Pin(other, info, set=under_way)]
    cache.evictor.evict_selected(Selection(key=KEYS[0]), 0.0, 1)
    assert cache.pins.step(), "decided: it is leased, and perhaps pinned by another reader"
    if under_way:  # a scan that has read the session's page, and finds that reader gone
        board.pins, board.slow = [Pin(session, info)], True
        assert not cache.pins.step()
    pin = Pin(session, info, set=True)
    board.pins = [pin]
    if runs_out:
        cache.expire(TTL_S)
    else:
        cache.release(session, lease.lease)
    while not cache.pins.step():
        pass
    assert cache.pools[0].used_bytes == GRANULE_BYTES
    board.pins = []
    while not cache.pins.step():
        pass
    assert cache.pools[0].used_bytes == 0
    cache.check()


def test_a_lease_that_ends_amid_a_scan_leaves_its_entry_to_the_next_one() -> None:
    """The scan has read the page of a reader who pins then what it has leased."""
    board = Board()
    cache = Cache([Pool(Allocator(0, 64 * GRANULE_BYTES, GRANULE_BYTES))], TTL_S, board=board)
    session, other = cache.open_session(), cache.open_session()
    assert not isinstance(session, LimitReached)
    assert not isinstance(other, LimitReached)
    info, lease = stored_and_leased(cache, session)
    cache.evictor.evict_selected(Selection(key=KEYS[0]), 0.0, 1)
    board.pins, board.slow = [Pin(session, info), Pin(other, info)], True
    assert not cache.pins.step(), "the page of the first session has been read, no other"
    board.pins[0].set = True
    cache.release(session, lease.lease)
    while cache.pins._scan is not None:
        cache.pins.step()
    assert cache.pools[0].used_bytes == GRANULE_BYTES
    board.pins = []
    while not cache.pins.step():
        pass
    assert cache.pools[0].used_bytes == 0
    cache.check()


def test_a_key_that_a_put_without_a_call_has_claimed_is_not_reserved() -> None:
    board = Board()
    cache = Cache([Pool(Allocator(0, 64 * GRANULE_BYTES, GRANULE_BYTES))], TTL_S, board=board)
    session, other = cache.open_session(), cache.open_session()
    assert not isinstance(session, LimitReached)
    assert not isinstance(other, LimitReached)
    board.begun[session] = [Writer(0, KEYS[0], Extent(0, 0, GRANULE_BYTES))]
    content = Content("int8", (1,), 1)
    assert reserve(cache, other, KEYS[0], content, 0.0) == BeingWritten()
    del board.begun[session]
    assert isinstance(reserve(cache, other, KEYS[0], content, 0.0), Reserved)
    cache.check()
