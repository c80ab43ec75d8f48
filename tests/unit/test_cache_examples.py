"""The core by example: reserve, commit, acquire, release, evict, as in the life of an entry."""

import pytest

from ecd.core.cache import Cache
from ecd.core.counters import COUNTED_NAMESPACES, QUIET_S
from ecd.core.model.board import NoBoard, Uses
from ecd.core.model.outcomes import (
    AlreadyStored,
    BeingWritten,
    Committed,
    LimitReached,
    Missing,
    PoolFull,
)
from ecd.core.model.types import Answer, Content, EntryId, Held, Key, Limits, Selection, SessionId
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from support.reserving import reserve

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
    cache.commit(client, reserve(cache, client, key, content(pages), now_s).entry, now_s)


def test_a_reservation_is_invisible_until_it_is_committed(cache: Cache, client: SessionId) -> None:
    reserved = reserve(cache, client, KEY, content(1), now_s=0.0)
    assert reserved.extent == (0, 0, PAGE)  # pool, offset, bytes
    assert cache.acquire(client, KEY, now_s=0.0) == Missing()
    assert reserve(cache, client, KEY, content(1), now_s=0.0) == BeingWritten()
    assert cache.commit(client, reserved.entry, now_s=1.0) == Committed()
    assert cache.views.contains(KEY)
    assert reserve(cache, client, KEY, content(1), now_s=1.0) == AlreadyStored()


def test_an_aborted_reservation_gives_its_memory_back(cache: Cache, client: SessionId) -> None:
    reserved = reserve(cache, client, KEY, content(4), now_s=0.0)
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
    _, lost = cache.renew(client, [second.lease], now_s=15.0)
    assert lost == [second.lease], "it is over, though nobody has ended it yet"
    [expired], _ = cache.expire(now_s=15.0)
    assert expired.lease == second.lease


def test_the_least_recently_used_entry_makes_room(cache: Cache, client: SessionId) -> None:
    store(cache, client, KEY, pages=2, now_s=0.0)
    store(cache, client, OTHER, pages=2, now_s=1.0)
    cache.release(client, cache.acquire(client, KEY, now_s=2.0).lease)  # KEY is the warmer now
    store(cache, client, Key("model", "image-3"), pages=1, now_s=3.0)
    assert (cache.views.contains(KEY), cache.views.contains(OTHER)) == (True, False)


def test_a_read_without_a_call_makes_an_entry_the_warmer() -> None:
    class Board(NoBoard):
        read: tuple[EntryId, ...] = ()

        def drain_uses(self) -> Uses:
            read, self.read = self.read, ()
            return Uses(read, len(read), 0)

    board = Board()
    cache = Cache([Pool(Allocator(0, 4 * PAGE, PAGE))], board=board)
    client = cache.open_session()
    for number, key in enumerate((KEY, OTHER)):
        store(cache, client, key, pages=2, now_s=float(number))
    board.read = (cache.views.page(None, 1)[0][0].entry,)
    store(cache, client, Key("model", "image-3"), pages=1, now_s=3.0)
    assert (cache.views.contains(KEY), cache.views.contains(OTHER)) == (True, False)


def test_reads_of_a_burst_are_counted_as_those_that_are_known() -> None:
    class Board(NoBoard):
        uses = Uses()

        def drain_uses(self) -> Uses:
            uses, self.uses = self.uses, Uses()
            return uses

    board = Board()
    cache = Cache([Pool(Allocator(0, 4 * PAGE, PAGE))], board=board)
    client = cache.open_session()
    for namespace in ("a", "b"):
        store(cache, client, Key(namespace, "image"), pages=1, now_s=0.0)
    entries = [info.entry for info in cache.views.page(None, 2)[0]]
    board.uses = Uses((entries[0], entries[0], entries[1], EntryId(99)), 20, misses=3)
    cache.evictor.drain_uses(1.0)
    board.uses = Uses(hits=2, misses=4, misses_in=(("a", 1), ("c", 2)))
    cache.evictor.drain_uses(2.0)
    counted, others = cache.counters.namespaces, cache.counters.other_namespaces
    assert {name: (part.reused, part.misses) for name, part in counted.items()} == {
        "a": (10.0, 1),
        "b": (5.0, 0),
        "c": (0.0, 2),
    }
    assert (others.reused, others.misses) == (7.0, 4), "an entry that has gone, and no name at all"
    clients = (
        Uses((entries[0],), 30, for_others=()),
        Uses((entries[1],) * 3, 3),
    )
    board.uses = Uses(hits=33, by_client=clients)
    cache.evictor.drain_uses(3.0)
    assert (counted["a"].reused, counted["b"].reused) == (40.0, 8.0), "each client's for itself"
    cache.check()


def test_silent_namespaces_without_entries_give_their_names_to_others(
    cache: Cache, client: SessionId
) -> None:
    counters, now_s = cache.counters, 0.0
    store(cache, client, KEY, pages=1)
    for name in ("model", *(f"typo-{number}" for number in range(1, COUNTED_NAMESPACES))):
        now_s += QUIET_S
        cache.evictor.scan(now_s)
        counters.miss(name)
    assert len(counters.namespaces) == COUNTED_NAMESPACES, "nothing is dropped before"
    counters.miss("late")
    counters.miss("typo-7")
    cache.evictor.scan(now_s + QUIET_S - 1)
    assert len(counters.namespaces) == COUNTED_NAMESPACES
    cache.evictor.scan(now_s + QUIET_S)
    assert list(counters.namespaces) == ["model", "typo-7", "typo-49"], "an entry, two events"
    for name in ("late", "typo-3"):
        counters.miss(name)
    counted = {name: part.misses for name, part in counters.namespaces.items()}
    assert counted == {"model": 1, "typo-7": 2, "typo-49": 1, "late": 1, "typo-3": 1}
    assert counters.other_namespaces.misses == 1, "the counts of others are no events of it"
    cache.check()


def test_a_session_has_no_more_leases_and_waits_than_it_may() -> None:
    limits = Limits(leases_per_session=1, waits_per_session=1)
    cache = Cache([Pool(Allocator(0, 4 * PAGE, PAGE))], limits=limits)
    client, other = cache.open_session(), cache.open_session()
    store(cache, client, KEY, pages=1)
    for session in (client, other):
        assert cache.acquire(session, KEY, now_s=0.0).key == KEY
    assert cache.acquire(client, KEY, now_s=0.0) == LimitReached("leases", 1)
    for session in (client, other):
        assert cache.acquire(session, OTHER, now_s=0.0, wait_s=5.0).ticket
    assert cache.acquire(client, OTHER, now_s=0.0, wait_s=5.0) == LimitReached("waits", 1)


def test_what_a_session_holds_is_summed_up_in_steps(cache: Cache, client: SessionId) -> None:
    store(cache, client, KEY, pages=2)
    reserve(cache, client, OTHER, content(1), now_s=0.0)
    other = cache.open_session()
    assert cache.views.all_sessions() == [client, other]
    for session in [client] * 3000 + [other]:
        cache.acquire(session, KEY, now_s=0.0)
    *steps, held = cache.views.held_by(client)
    assert len(steps) >= 2
    assert held == Held(entries=1, leased_bytes=2 * PAGE, leases=3000, reserved_bytes=PAGE)
    cache.evictor.evict_selected(Selection(key=KEY), now_s=0.0, limit=1)
    cache.leave_session(client)
    [*_, left] = cache.views.held_by(client)
    assert left == held, "its process may still read and write"
    while not cache.close_session(client):
        pass
    assert [*cache.views.held_by(client)] == [Held()]
    [*_, others] = cache.views.held_by(other)
    assert others == Held(entries=1, leased_bytes=2 * PAGE, leases=1)


def test_another_nodes_read_is_no_hit_and_no_miss_of_this_one(
    cache: Cache, client: SessionId
) -> None:
    store(cache, client, KEY, pages=1)
    cache.acquire(client, KEY, now_s=0.0, answer=Answer.PEER)
    assert cache.acquire(client, OTHER, now_s=0.0, answer=Answer.PEER) == Missing()
    counters = cache.counters
    assert (counters.hits, counters.misses, counters.peer_leases) == (0, 0, 1)


def test_a_leased_entry_is_evicted_but_its_bytes_stay(cache: Cache, client: SessionId) -> None:
    store(cache, client, KEY, pages=4)
    leased = cache.acquire(client, KEY, now_s=0.0)
    assert reserve(cache, client, OTHER, content(1), now_s=0.0) == PoolFull(PAGE, 0, 4 * PAGE)
    report = cache.evictor.evict_selected(Selection(key=KEY), now_s=0.0, limit=1)
    assert (report.entries, report.leased) == (1, 1)
    assert cache.acquire(client, KEY, now_s=0.0) == Missing(), "nobody finds it any more"
    assert cache.pins.step(), "one step: nobody reads without a call here"
    assert cache.pools[0].free_bytes == 0, "its reader still reads"
    cache.release(client, leased.lease)
    assert cache.pools[0].free_bytes == 0, "its reader may have pinned it meanwhile"
    assert cache.pins.step()
    assert cache.pools[0].free_bytes == 4 * PAGE
