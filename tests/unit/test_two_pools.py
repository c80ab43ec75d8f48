"""A second host pool, used through the whole core: nothing may assume that there is one pool."""

from collections.abc import Sequence

import pytest

from ecd.core.cache import Cache
from ecd.core.model.board import NoBoard
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
    Waiting,
    Wakeup,
)
from ecd.core.model.types import Content, Extent, Key, PoolLimits, Selection, SessionId, WaitFor
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from support.reserving import is_one_free_extent, reserve

PAGE = 4096
KEY = Key("n", "k")
LIMITS = PoolLimits(high_watermark=0.8, low_watermark=0.5)


def content(pages: int = 1) -> Content:
    return Content("int8", (pages * PAGE,), pages * PAGE)


@pytest.fixture
def pools() -> tuple[Pool, Pool]:
    """The nearest first; their numbers say nothing of that, and their granules differ."""
    near, far = Allocator(7, 8 * PAGE, PAGE), Allocator(2, 16 * PAGE, 2 * PAGE)
    return Pool(near, limits=LIMITS), Pool(far, limits=LIMITS)


@pytest.fixture
def cache(pools: tuple[Pool, Pool]) -> Cache:
    return Cache(pools)


class GrantingBoard(NoBoard):
    """A board where every session has a place, and none has begun a put."""

    def grant(self, session: SessionId, pieces: Sequence[Extent]) -> list[Extent] | None:
        return []


@pytest.fixture
def session(cache: Cache) -> SessionId:
    return cache.open_session()


def store(cache: Cache, session: SessionId, key: Key, pool: Pool, now_s: float = 0.0) -> Extent:
    reserved = reserve(cache, session, key, content(), now_s, pool=pool)
    assert isinstance(reserved, Reserved), reserved
    cache.commit(session, reserved.entry, now_s)
    return reserved.extent


def figures(pool: Pool) -> tuple[int, int, int]:
    return pool.used_bytes // PAGE, pool.reserved_bytes // PAGE, pool.leased_bytes // PAGE


def test_a_copy_lives_in_the_second_pool_from_reservation_to_eviction(
    cache: Cache, pools: tuple[Pool, Pool], session: SessionId
) -> None:
    near, far = pools
    reserved = reserve(cache, session, KEY, content(), 0.0, pool=far)
    assert isinstance(reserved, Reserved)
    assert reserved.extent == Extent(2, 0, PAGE)
    assert (figures(near), figures(far)) == ((0, 0, 0), (2, 2, 0))
    waiting = cache.acquire(session, KEY, 0.0, 5.0, WaitFor.WRITER)
    assert isinstance(waiting, Waiting)
    [woken] = cache.commit(session, reserved.entry, 1.0).woken
    assert woken.outcome.extent == reserved.extent
    assert (figures(near), figures(far)) == ((0, 0, 0), (2, 0, 2))
    cache.check()
    cache.evictor.evict_selected(Selection(), 1.0, 10)
    cache.pins.step()
    assert figures(far) == (2, 0, 2), "it is leased"
    assert cache.release(session, woken.outcome.lease)
    cache.pins.step()
    assert (figures(near), figures(far)) == ((0, 0, 0), (0, 0, 0))
    assert (near.evictions["requested"], far.evictions["requested"]) == (0, 1)
    cache.check()


def test_readers_get_the_nearest_copy(
    cache: Cache, pools: tuple[Pool, Pool], session: SessionId
) -> None:
    near, far = pools
    cache.take_changes()
    store(cache, session, KEY, far)
    assert cache.views.extent(KEY).pool == far.number
    assert reserve(cache, session, KEY, content(), 0.0, pool=far) == AlreadyStored()
    reserved = reserve(cache, session, KEY, content(), 0.0)
    assert reserve(cache, session, KEY, content(), 0.0) == BeingWritten()
    cache.commit(session, reserved.entry, 0.0)
    assert cache.take_changes() == {KEY: True}
    cache.check()

    leased = cache.acquire(session, KEY, 0.0)
    assert isinstance(leased, Leased)
    assert leased.extent.pool == near.number
    assert [info.extent.pool for info in cache.views.page(None, 10)[0]] == [2, 7], (
        "in order of commit"
    )
    cache.evictor.evict_selected(Selection(key=KEY, pool=near.number), 0.0, 1)
    assert cache.take_changes() == {KEY: True}, "the farther copy is left"
    assert cache.views.info(KEY).extent.pool == far.number
    cache.evictor.evict_selected(Selection(key=KEY), 0.0, 1)
    assert cache.take_changes() == {KEY: False}
    assert cache.acquire(session, KEY, 0.0) == Missing()
    cache.check()


def test_memory_granted_in_the_second_pool_becomes_an_entry_there(pools: tuple[Pool, Pool]) -> None:
    near, far = pools
    cache = Cache(pools, board=GrantingBoard())
    session = cache.open_session()
    assert cache.granted.grant(session, PAGE, 1, 1, 0.0, far)
    assert (near.granted_bytes, far.granted_bytes) == (0, 2 * PAGE)
    room = [cache.granted.room(session, PAGE, pool) for pool in pools]
    assert room == [0, 1]
    assert cache.granted.put(session, KEY, content(), Extent(7, 0, PAGE), 1.0) == NotReserved()
    assert cache.granted.put(session, KEY, content(), Extent(2, 0, PAGE), 1.0) == Committed()
    assert cache.views.extent(KEY) == Extent(2, 0, PAGE)
    assert (figures(near), figures(far)) == ((0, 0, 0), (2, 0, 0))
    assert far.granted_bytes == cache.granted.room(session, PAGE, far) == 0
    cache.check()
    cache.evictor.evict_selected(Selection(pool=2), 1.0, 10)
    cache.pins.step()
    assert is_one_free_extent(far.allocator)
    cache.check()


def test_room_is_made_in_the_pool_that_needs_it(
    cache: Cache, pools: tuple[Pool, Pool], session: SessionId
) -> None:
    near, far = pools
    for number in range(8):
        store(cache, session, Key("n", f"near{number}"), near)
        store(cache, session, Key("n", f"far{number}"), far)
    assert reserve(cache, session, KEY, content(9), 1.0) == EntryTooLarge(9 * PAGE, 8 * PAGE)
    assert isinstance(reserve(cache, session, KEY, content(9), 1.0, pool=far), Reserved)
    assert near.evictions["capacity"] == 0
    assert far.evictions["capacity"] == 5
    assert reserve(cache, session, KEY, content(), 1.0, pool=far) == BeingWritten()
    outcome = reserve(cache, session, Key("n", "large"), content(9), 1.0, pool=far)
    assert outcome == PoolFull(9 * PAGE, 0, 10 * PAGE), "held by the reservation before it"
    cache.check()


def test_only_the_pool_above_its_watermark_is_trimmed(
    cache: Cache, pools: tuple[Pool, Pool], session: SessionId
) -> None:
    near, far = pools
    for number in range(7):
        store(cache, session, Key("n", f"near{number}"), near, float(number))
    for number in range(5):
        store(cache, session, Key("n", f"far{number}"), far, float(number))
    assert (near.needs_trim(), far.needs_trim()) == (True, False)
    assert cache.evictor.needs_trim()
    while cache.evictor.trim(2, 10.0):
        pass
    assert (near.evictions["watermark"], far.evictions["watermark"]) == (3, 0)
    assert not cache.views.contains(Key("n", "near2"))
    assert cache.views.contains(Key("n", "near3"))


def test_a_writer_left_in_another_pool_is_still_waited_for(
    cache: Cache, pools: tuple[Pool, Pool], session: SessionId
) -> None:
    reader = cache.open_session()
    first, second = (reserve(cache, session, KEY, content(), 0.0, pool=pool) for pool in pools)
    waiting = cache.acquire(reader, KEY, 0.0, 5.0, WaitFor.WRITER)
    assert cache.abort(session, first.entry).woken == ()
    assert cache.abort(session, second.entry).woken == (Wakeup(reader, waiting.ticket, Missing()),)


def test_an_extent_of_a_pool_that_is_not_there_is_refused(cache: Cache, session: SessionId) -> None:
    nowhere = Extent(3, 0, PAGE)
    assert cache.recover(session, KEY, content(), nowhere) is None
    assert cache.granted.put(session, KEY, content(), nowhere, 0.0) == NotReserved()
    assert cache.recover(session, KEY, content(), Extent(2, 0, PAGE)) is not None
    assert cache.recover(session, KEY, content(), Extent(2, 2 * PAGE, PAGE)) is None, "reserved"
    assert cache.recover(session, KEY, content(), Extent(7, 0, PAGE)) is not None
    cache.leave_session(session)
    assert reserve(cache, session, KEY, content(), 0.0) == SessionEnded()
    cache.close_session(session)
    assert [pool.used_bytes for pool in cache.pools] == [0, 0]
