"""Copies in device pools: the core against a model, with pins that come and go at any moment."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Set

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ecd.core.cache import Cache
from ecd.core.model.board import NoBoard, Portion
from ecd.core.model.outcomes import (
    AlreadyStored,
    BeingWritten,
    Committed,
    EntryTooLarge,
    Leased,
    Missing,
    NotReserved,
    PoolFull,
    Reserved,
    SessionEnded,
)
from ecd.core.model.types import (
    Content,
    EntryId,
    EntryInfo,
    Extent,
    Key,
    Selection,
    SessionId,
    Start,
)
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from support.examples import drawn, draws
from support.reserving import is_one_free_extent, reserve

PAGE = 4096
HOST, NEAR, FAR = 0, 1, 2
KEYS = [Key("n", "a"), Key("n", "b"), Key("m", "a")]
DEVICES = [NEAR, FAR]


class Shown(NoBoard):
    """What readers would find, and which entries they pin."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Key, int], EntryInfo] = {}  # by key and pool of a copy, or 0
        self.pins: list[EntryId] = []
        self.announced = 0

    def show(self, info: EntryInfo) -> None:
        assert info.replica_in in (0, info.extent.pool)
        if info.replica_in:
            assert (info.key, 0) in self.rows, "a copy of nothing is shown"
        assert (info.key, info.replica_in) not in self.rows
        self.rows[info.key, info.replica_in] = info

    def hide(self, entry: EntryId, key: Key, replica_in: int = 0) -> None:
        assert self.rows.pop((key, replica_in)).entry == entry
        if not replica_in:
            left = [pool for other, pool in self.rows if other == key]
            assert not left, "an entry went before its copies"

    def announce_reservations(self, count: int) -> None:
        self.announced = count

    def pinned(self, live: KeysView[EntryId], starts: Set[Start]) -> Iterator[Portion]:
        yield Portion(set(self.pins) & set(live), is_last=True)


def make(host: int = 8, near: int = 4, far: int = 4) -> tuple[Cache, Shown]:
    board = Shown()
    pools = [
        Pool(Allocator(HOST, host * PAGE, PAGE)),
        Pool(Allocator(NEAR, near * PAGE, PAGE), "device", holds_replicas=True),
        Pool(Allocator(FAR, far * PAGE, PAGE), "device", holds_replicas=True),
    ]
    return Cache(pools, board=board), board


def content(pages: int = 1) -> Content:
    return Content("int8", (pages * PAGE,), pages * PAGE, b"m", 0.5)


def store(cache: Cache, session: SessionId, key: Key, pages: int = 1) -> EntryId:
    reserved = reserve(cache, session, key, content(pages), 0.0)
    assert isinstance(reserved, Reserved), reserved
    assert isinstance(cache.commit(session, reserved.entry, 0.0), Committed)
    return cache.views.info(key).entry


def copy(cache: Cache, session: SessionId, key: Key, pool: int = NEAR) -> Extent:
    entry = cache.views.info(key).entry
    reserved = cache.reserve_replica(session, key, entry, cache.pools[pool], 0.0)
    assert isinstance(reserved, Reserved), reserved
    assert cache.commit(session, reserved.entry, 0.0) == Committed()
    return reserved.extent


@pytest.fixture
def cache() -> Cache:
    return make()[0]


@pytest.fixture
def session(cache: Cache) -> SessionId:
    return cache.open_session()


def test_a_copy_counts_as_no_entry_and_is_leased_to_nobody(
    cache: Cache, session: SessionId
) -> None:
    store(cache, session, KEYS[0])
    cache.take_changes()
    assert copy(cache, session, KEYS[0]).pool == NEAR
    copy(cache, session, KEYS[0], FAR)
    assert cache.views.entries == 1
    assert cache.take_changes() == {}, "other nodes are told of nothing"
    leased = cache.acquire(session, KEYS[0], 0.0)
    assert isinstance(leased, Leased)
    assert leased.extent.pool == HOST
    counters = cache.counters
    assert (counters.puts, counters.bytes_in, counters.copies) == (1, PAGE, 2)
    assert [info.extent.pool for info in cache.views.page(None, 10)[0]] == [HOST]
    cache.check()


def test_an_entry_takes_its_copies_along(cache: Cache, session: SessionId) -> None:
    store(cache, session, KEYS[0])
    copy(cache, session, KEYS[0])
    copy(cache, session, KEYS[0], FAR)
    cache.take_changes()
    report = cache.evictor.evict_selected(Selection(key=KEYS[0]), 0.0, 10)
    assert (report.entries, report.nbytes) == (1, PAGE)
    assert cache.take_changes() == {KEYS[0]: False}, "other nodes are told that it has gone"
    assert cache.pins.step()
    assert all(is_one_free_extent(pool.allocator) for pool in cache.pools)
    assert [pool.evictions["requested"] for pool in cache.pools] == [1, 1, 1]
    cache.check()


def test_one_pool_can_be_emptied_alone(cache: Cache, session: SessionId) -> None:
    store(cache, session, KEYS[0])
    copy(cache, session, KEYS[0])
    assert cache.evictor.evict_selected(Selection(pool=NEAR), 0.0, 10).entries == 1
    cache.pins.step()
    assert is_one_free_extent(cache.pools[NEAR].allocator)
    assert cache.views.contains(KEYS[0])
    copy(cache, session, KEYS[0])


def test_a_copy_is_made_of_the_entry_that_was_named(cache: Cache, session: SessionId) -> None:
    key, near = KEYS[0], cache.pools[NEAR]
    first = store(cache, session, key)
    late = cache.reserve_replica(session, key, first, near, 0.0)
    assert isinstance(late, Reserved)
    assert cache.reserve_replica(session, key, first, near, 0.0) == BeingWritten()
    cache.evictor.evict_selected(Selection(key=key), 0.0, 10)
    cache.pins.step()
    second = store(cache, session, key)
    assert cache.commit(session, late.entry, 0.0) == NotReserved(), "it has the first one's bytes"
    assert is_one_free_extent(near.allocator)
    assert cache.reserve_replica(session, key, first, near, 0.0) == Missing()
    assert isinstance(cache.reserve_replica(session, key, second, near, 0.0), Reserved)
    cache.check()


def test_a_pool_without_room_evicts_its_coldest_copies_alone() -> None:
    cache, board = make()
    session = cache.open_session()
    for key in KEYS:
        store(cache, session, key, 2)
    copy(cache, session, KEYS[0])
    copy(cache, session, KEYS[1])
    assert isinstance(cache.acquire(session, KEYS[0], 1.0), Leased)  # warms the copy, too
    copy(cache, session, KEYS[2])
    assert [key for key, pool in board.rows if pool == NEAR] == [KEYS[0], KEYS[2]]
    assert all(map(cache.views.contains, KEYS))
    cache.check()


def test_a_copy_that_is_read_keeps_its_memory() -> None:
    cache, board = make(near=2)
    session = cache.open_session()
    for key in KEYS[:2]:
        store(cache, session, key, 2)
    copy(cache, session, KEYS[0])
    board.pins.append(board.rows[KEYS[0], NEAR].entry)
    refused = cache.reserve_replica(
        session, KEYS[1], cache.views.info(KEYS[1]).entry, cache.pools[NEAR], 0
    )
    assert refused == PoolFull(2 * PAGE, 0, 2 * PAGE)
    board.pins.clear()
    cache.pins.step()
    copy(cache, session, KEYS[1])
    cache.check()


def test_what_cannot_be_copied_is_refused(cache: Cache, session: SessionId) -> None:
    entry = store(cache, session, KEYS[0], 5)
    near = cache.pools[NEAR]
    refused = cache.reserve_replica(session, KEYS[0], entry, near, 0.0)
    assert refused == EntryTooLarge(5 * PAGE, 4 * PAGE)
    assert cache.reserve_replica(session, KEYS[1], entry, near, 0.0) == Missing()
    assert cache.reserve_replica(SessionId(99), KEYS[0], entry, near, 0.0) == SessionEnded()
    with pytest.raises(AssertionError):
        cache.reserve_replica(session, KEYS[0], entry, cache.pools[HOST], 0.0)


def test_a_copy_on_its_way_is_no_writer_of_the_key() -> None:
    cache, board = make()
    session, reader = cache.open_session(), cache.open_session()
    store(cache, session, KEYS[0])
    entry = cache.views.info(KEYS[0]).entry
    assert isinstance(
        cache.reserve_replica(session, KEYS[0], entry, cache.pools[NEAR], 0.0), Reserved
    )
    assert board.announced == 0, "puts without a call need not wait for their answers"
    cache.evictor.evict_selected(Selection(), 0.0, 10)
    assert cache.readers.wants(KEYS[0])
    assert reserve(cache, reader, KEYS[0], content(), 0.0).extent.pool == HOST
    cache.leave_session(session)
    cache.check()
    assert cache.close_session(session)
    cache.pins.step()
    assert is_one_free_extent(cache.pools[NEAR].allocator)


class Machine(RuleBasedStateMachine):
    """Every granule has the content that was written there last; readers must find their own."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.board = make()
        self.now_s = 0.0
        self.writer = self.cache.open_session()
        self.memory: dict[tuple[int, int], int] = {}
        self.tags: dict[EntryId, int] = {}  # content of each host entry
        self.copying: list[tuple[EntryId, int, Extent]] = []  # reservation, content, place
        self.pinned: list[tuple[EntryId, int, Extent]] = []
        self.leases: list[Leased] = []
        self.tag = 0

    def write(self, extent: Extent, tag: int) -> None:
        for page in range(-(-extent.nbytes // PAGE)):
            self.memory[extent.pool, extent.offset // PAGE + page] = tag

    def read(self, extent: Extent) -> set[int]:
        pages = range(-(-extent.nbytes // PAGE))
        return {self.memory[extent.pool, extent.offset // PAGE + page] for page in pages}

    @rule(key=st.sampled_from(KEYS), pages=st.integers(1, 5))
    def put(self, key: Key, pages: int) -> None:
        self.now_s += 1
        reserved = reserve(self.cache, self.writer, key, content(pages), self.now_s)
        if isinstance(reserved, Reserved):
            self.tag += 1
            self.write(reserved.extent, self.tag)
            assert isinstance(self.cache.commit(self.writer, reserved.entry, self.now_s), Committed)
            self.tags[self.cache.views.info(key).entry] = self.tag

    @precondition(lambda self: self.board.rows)
    @rule(data=st.data(), pool=st.sampled_from(DEVICES))
    def begin_copy(self, data: st.DataObject, pool: int) -> None:
        key = data.draw(st.sampled_from([key for key, at in self.board.rows if not at]))
        entry = self.board.rows[key, 0].entry
        self.now_s += 1
        was_there = (key, pool) in self.board.rows
        outcome = self.cache.reserve_replica(
            self.writer, key, entry, self.cache.pools[pool], self.now_s
        )
        if isinstance(outcome, Reserved):
            assert not was_there
            self.copying.append((outcome.entry, self.tags[entry], outcome.extent))
            self.write(outcome.extent, self.tags[entry])
        else:
            kinds = (AlreadyStored, BeingWritten, PoolFull, EntryTooLarge)
            assert isinstance(outcome, kinds), outcome
            assert was_there == isinstance(outcome, AlreadyStored)

    @precondition(lambda self: self.copying)
    @rule(data=st.data(), aborts=st.booleans())
    def end_copy(self, data: st.DataObject, aborts: bool) -> None:
        ended = data.draw(st.sampled_from(self.copying))
        self.copying.remove(ended)
        if aborts:
            self.cache.abort(self.writer, ended[0])
        else:
            self.cache.commit(self.writer, ended[0], self.now_s)

    @precondition(lambda self: self.board.rows)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """As a client does: pin the copy, then see the entry listed."""
        key, replica_in = data.draw(st.sampled_from(sorted(self.board.rows)))
        info, own = self.board.rows[key, replica_in], self.board.rows[key, 0]
        self.board.pins.append(info.entry)
        self.pinned.append((info.entry, self.tags[own.entry], info.extent))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(pinned)
        self.board.pins.remove(pinned[0])

    @rule(key=st.sampled_from(KEYS))
    def lease(self, key: Key) -> None:
        self.now_s += 1
        outcome = self.cache.acquire(self.writer, key, self.now_s)
        if isinstance(outcome, Leased):
            assert outcome.extent.pool == HOST
            self.leases.append(outcome)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        leased = data.draw(st.sampled_from(self.leases))
        self.leases.remove(leased)
        self.cache.release(self.writer, leased.lease)

    @rule(key=st.sampled_from([None, *KEYS]), pool=st.sampled_from([None, HOST, NEAR, FAR]))
    def evict(self, key: Key | None, pool: int | None) -> None:
        self.cache.evictor.evict_selected(Selection(key=key, pool=pool), self.now_s, 100)

    @rule()
    def scan(self) -> None:
        self.cache.evictor.scan(self.now_s)

    @rule()
    def trim(self) -> None:
        self.cache.evictor.trim(4, self.now_s)

    @rule()
    def begin_another_life(self) -> None:
        """The session ends, and so do its copies on their way."""
        self.cache.leave_session(self.writer)
        self.cache.check()
        while not self.cache.close_session(self.writer):
            pass
        self.copying, self.leases = [], []
        self.writer = self.cache.open_session()

    @invariant()
    def all_parts_agree(self) -> None:
        self.cache.check()

    @invariant()
    def readers_read_their_own_bytes(self) -> None:
        for _, tag, extent in self.pinned:
            assert self.read(extent) == {tag}
        for (key, _), info in self.board.rows.items():
            assert self.read(info.extent) == {self.tags[self.board.rows[key, 0].entry]}

    def teardown(self) -> None:
        self.board.pins.clear()
        self.cache.leave_session(self.writer)
        while not self.cache.close_session(self.writer):
            pass
        self.cache.evictor.evict_selected(Selection(), self.now_s, 100)
        while not self.cache.pins.step():
            pass
        assert not self.board.rows
        assert all(is_one_free_extent(pool.allocator) for pool in self.cache.pools)


Machine.TestCase.settings = draws(100)
TestMachine = drawn(Machine.TestCase)
