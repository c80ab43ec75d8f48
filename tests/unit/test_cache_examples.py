"""The core by example: reserve, commit, acquire, release, evict, in the order of an entry's life.

`test_cache.py` checks every other order of these events, `test_waits.py` how a reader waits.
"""

import pytest

from ecd.core.cache import Cache
from ecd.core.outcomes import AlreadyStored, BeingWritten, Committed, Leased, Missing, PoolFull
from ecd.core.pool import Pool
from ecd.core.types import Content, Key, Selection, SessionId

PAGE = 4096
KEY, OTHER = Key("model", "image-1"), Key("model", "image-2")


def content(pages: int) -> Content:
    return Content("int8", (pages * PAGE,), pages * PAGE)


@pytest.fixture
def cache() -> Cache:
    return Cache([Pool(0, 4 * PAGE, PAGE)], lease_ttl_s=10.0)


@pytest.fixture
def writer(cache: Cache) -> SessionId:
    return cache.open_session()


@pytest.fixture
def reader(cache: Cache) -> SessionId:
    return cache.open_session()


def store(cache: Cache, writer: SessionId, key: Key, pages: int, now_s: float = 0.0) -> None:
    cache.commit(writer, cache.reserve(writer, key, content(pages), now_s).entry, now_s)


def test_a_reservation_is_invisible_until_it_is_committed(
    cache: Cache, writer: SessionId, reader: SessionId
) -> None:
    reserved = cache.reserve(writer, KEY, content(1), now_s=0.0)
    assert reserved.extent == (0, 0, PAGE)  # pool, offset, bytes
    assert cache.acquire(reader, KEY, now_s=0.0) == Missing()
    assert cache.reserve(reader, KEY, content(1), now_s=0.0) == BeingWritten()

    assert cache.commit(writer, reserved.entry, now_s=1.0) == Committed()
    assert cache.contains(KEY)
    assert cache.reserve(reader, KEY, content(1), now_s=1.0) == AlreadyStored()


def test_an_aborted_reservation_gives_its_memory_back(cache: Cache, writer: SessionId) -> None:
    reserved = cache.reserve(writer, KEY, content(4), now_s=0.0)
    assert cache.pools[0].free_bytes == 0
    cache.abort(writer, reserved.entry)
    assert cache.pools[0].free_bytes == 4 * PAGE


def test_a_lease_lasts_until_it_is_released_or_runs_out(
    cache: Cache, writer: SessionId, reader: SessionId
) -> None:
    store(cache, writer, KEY, pages=1)
    first, second = (cache.acquire(reader, KEY, now_s=1.0) for _ in range(2))
    assert isinstance(first, Leased)
    assert (first.extent, first.expires_s) == ((0, 0, PAGE), 11.0)
    assert cache.release(reader, first.lease)
    assert not cache.release(reader, first.lease), "it has ended"

    cache.renew(reader, [second.lease], now_s=5.0)
    assert cache.expire(now_s=14.9) == ([], [])
    [expired], _ = cache.expire(now_s=15.0)
    assert expired.lease == second.lease


def test_the_least_recently_used_entry_makes_room(cache: Cache, writer: SessionId) -> None:
    store(cache, writer, KEY, pages=2, now_s=0.0)
    store(cache, writer, OTHER, pages=2, now_s=1.0)
    leased = cache.acquire(writer, KEY, now_s=2.0)
    cache.release(writer, leased.lease)  # KEY is the warmer now
    store(cache, writer, Key("model", "image-3"), pages=1, now_s=3.0)
    assert (cache.contains(KEY), cache.contains(OTHER)) == (True, False)


def test_a_leased_entry_is_evicted_but_its_bytes_stay(
    cache: Cache, writer: SessionId, reader: SessionId
) -> None:
    store(cache, writer, KEY, pages=4)
    leased = cache.acquire(reader, KEY, now_s=0.0)
    assert cache.reserve(writer, OTHER, content(1), now_s=0.0) == PoolFull(PAGE, 0, 4 * PAGE)
    report = cache.evict(Selection(key=KEY), now_s=0.0, limit=1)
    assert (report.entries, report.leased) == (1, 1)
    assert cache.acquire(reader, KEY, now_s=0.0) == Missing(), "nobody finds it any more"
    assert cache.scan_pins(), "one step: nobody reads without a call here"
    assert cache.pools[0].free_bytes == 0, "its reader still reads"
    cache.release(reader, leased.lease)
    assert cache.pools[0].free_bytes == 4 * PAGE
