"""The core by example: reserve, commit, acquire, release, evict, as in the life of an entry."""

import pytest

from ecd.core.allocator import Allocator
from ecd.core.cache import Cache
from ecd.core.outcomes import AlreadyStored, BeingWritten, Committed, Missing, PoolFull
from ecd.core.pool import Pool
from ecd.core.types import Content, Key, Selection, SessionId

PAGE = 4096
KEY, OTHER = Key("model", "image-1"), Key("model", "image-2")


def content(pages: int) -> Content:
    return Content("int8", (pages * PAGE,), pages * PAGE)


@pytest.fixture
def cache() -> Cache:
    return Cache([Pool(Allocator(0, 4 * PAGE, PAGE))], lease_ttl_s=10.0)


@pytest.fixture
def client(cache: Cache) -> SessionId:
    return cache.open_session()


def store(cache: Cache, client: SessionId, key: Key, pages: int, now_s: float = 0.0) -> None:
    cache.commit(client, cache.reserve(client, key, content(pages), now_s).entry, now_s)


def test_a_reservation_is_invisible_until_it_is_committed(cache: Cache, client: SessionId) -> None:
    reserved = cache.reserve(client, KEY, content(1), now_s=0.0)
    assert reserved.extent == (0, 0, PAGE)  # pool, offset, bytes
    assert cache.acquire(client, KEY, now_s=0.0) == Missing()
    assert cache.reserve(client, KEY, content(1), now_s=0.0) == BeingWritten()
    assert cache.commit(client, reserved.entry, now_s=1.0) == Committed()
    assert cache.contains(KEY)
    assert cache.reserve(client, KEY, content(1), now_s=1.0) == AlreadyStored()


def test_an_aborted_reservation_gives_its_memory_back(cache: Cache, client: SessionId) -> None:
    reserved = cache.reserve(client, KEY, content(4), now_s=0.0)
    assert cache.pools[0].free_bytes == 0
    cache.abort(client, reserved.entry)
    assert cache.pools[0].free_bytes == 4 * PAGE


def test_a_lease_lasts_until_it_is_released_or_runs_out(cache: Cache, client: SessionId) -> None:
    store(cache, client, KEY, pages=1)
    first, second = (cache.acquire(client, KEY, now_s=1.0) for _ in range(2))
    assert (first.extent, first.expires_s) == ((0, 0, PAGE), 11.0)
    assert cache.release(client, first.lease)
    assert not cache.release(client, first.lease), "it has ended"
    cache.renew(client, [second.lease], now_s=5.0)
    assert cache.expire(now_s=14.9) == ([], [])
    [expired], _ = cache.expire(now_s=15.0)
    assert expired.lease == second.lease


def test_the_least_recently_used_entry_makes_room(cache: Cache, client: SessionId) -> None:
    store(cache, client, KEY, pages=2, now_s=0.0)
    store(cache, client, OTHER, pages=2, now_s=1.0)
    cache.release(client, cache.acquire(client, KEY, now_s=2.0).lease)  # KEY is the warmer now
    store(cache, client, Key("model", "image-3"), pages=1, now_s=3.0)
    assert (cache.contains(KEY), cache.contains(OTHER)) == (True, False)


def test_a_leased_entry_is_evicted_but_its_bytes_stay(cache: Cache, client: SessionId) -> None:
    store(cache, client, KEY, pages=4)
    leased = cache.acquire(client, KEY, now_s=0.0)
    assert cache.reserve(client, OTHER, content(1), now_s=0.0) == PoolFull(PAGE, 0, 4 * PAGE)
    report = cache.evict(Selection(key=KEY), now_s=0.0, limit=1)
    assert (report.entries, report.leased) == (1, 1)
    assert cache.acquire(client, KEY, now_s=0.0) == Missing(), "nobody finds it any more"
    assert cache.scan_pins(), "one step: nobody reads without a call here"
    assert cache.pools[0].free_bytes == 0, "its reader still reads"
    cache.release(client, leased.lease)
    assert cache.pools[0].free_bytes == 4 * PAGE
