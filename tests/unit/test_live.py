"""The core on the event loop: what follows an operation happens, whoever made it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from ecd.base.clock import Clock
from ecd.core.cache import Cache
from ecd.core.model.outcomes import Leased, LimitReached, Missing, Reserved, Waiting, Wakeup
from ecd.core.model.types import Content, Key, LeaseId, Selection, SessionId
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.live.intake import NoPuts
from ecd.live.live import LiveCache
from ecd.memory.pool_dir import PoolDir
from ecd.memory.shared_index import SharedIndex
from support.reserving import reserve
from support.waiting import eventually_async, within_hang

POOL_BYTES = 1 << 20
KEY, CONTENT = Key("n", "k"), Content("uint8", (4096,), 4096)


class Told:
    """A session's owner."""

    def __init__(self, live: LiveCache) -> None:
        session = live.cache.open_session()
        assert not isinstance(session, LimitReached)
        self.session = session
        self.waits: list[Wakeup] = []
        self.leases: list[LeaseId] = []
        live.subscribe(session, self)

    def wait_ended(self, wakeup: Wakeup) -> None:
        self.waits.append(wakeup)

    def leases_ended(self, session: SessionId, leases: Sequence[LeaseId]) -> None:
        self.leases += leases


async def store(live: LiveCache, session: SessionId, key: Key = KEY) -> None:
    pace = await live.begin()
    async with live.reserving(session, pace, 1.0) as reserve:
        reserved = await reserve(key, CONTENT)
    assert isinstance(reserved, Reserved)
    live.commit(session, reserved.entry)


def run(act: Callable[[LiveCache], Awaitable[None]]) -> None:
    async def on_loop() -> None:
        live = LiveCache(Cache([Pool(Allocator(0, POOL_BYTES, 4096))], lease_ttl_s=0.05), Clock())
        await act(live)
        live.cache.check()

    asyncio.run(on_loop())


def test_a_commit_tells_who_waited_and_its_lease_runs_out() -> None:
    async def act(live: LiveCache) -> None:
        writer, reader = Told(live), Told(live)
        assert isinstance(live.acquire(reader.session, KEY, wait_s=60.0), Waiting)
        await store(live, writer.session)
        await eventually_async(lambda: reader.waits)
        [ended] = reader.waits
        assert isinstance(ended.outcome, Leased)
        await eventually_async(lambda: reader.leases)
        assert reader.leases == [ended.outcome.lease]
        assert live.cache.views.leases == 0

    run(act)


def test_a_wait_ends_with_its_time_and_when_it_is_cancelled() -> None:
    async def act(live: LiveCache) -> None:
        reader = Told(live)
        late = live.acquire(reader.session, KEY, wait_s=0.02)
        cancelled = live.acquire(reader.session, KEY, wait_s=60.0)
        assert isinstance(late, Waiting)
        assert isinstance(cancelled, Waiting)
        live.cancel_wait(reader.session, cancelled.ticket)
        await eventually_async(lambda: len(reader.waits) == 2)
        assert [each.ticket for each in reader.waits] == [cancelled.ticket, late.ticket]
        assert all(isinstance(each.outcome, Missing) for each in reader.waits)

    run(act)


def test_a_session_that_has_left_is_told_nothing() -> None:
    async def act(live: LiveCache) -> None:
        writer, reader = Told(live), Told(live)
        assert isinstance(live.acquire(reader.session, KEY, wait_s=60.0), Waiting)
        live.leave_session(reader.session)
        live.close_session(reader.session)
        await store(live, writer.session)
        await eventually_async(lambda: live.cache.views.sessions == 1)
        assert not reader.waits

    run(act)


def test_changes_are_collected_from_when_they_are_noted() -> None:
    async def act(live: LiveCache) -> None:
        writer, later = Told(live), Key("n", "later")
        await store(live, writer.session)
        followed = live.follow_changes()
        await store(live, writer.session, later)
        assert await followed.next() == {later: True}

    run(act)


def test_each_follower_is_told_of_every_change_though_another_has_taken_it() -> None:
    async def act(live: LiveCache) -> None:
        writer, later = Told(live), Key("n", "later")
        eager, lazy = live.follow_changes(), live.follow_changes()
        await store(live, writer.session)
        assert await eager.next() == {KEY: True}
        await store(live, writer.session, later)
        await live.operators.evict(Selection(key=KEY), False, live.turns.pace())
        assert await eager.next() == {later: True, KEY: False}
        assert await lazy.next() == {later: True, KEY: False}
        await store(live, writer.session)
        assert await lazy.next() == {KEY: True}, "it was told all else before"

    run(act)


def test_a_pool_that_gets_full_is_trimmed() -> None:
    async def act(live: LiveCache) -> None:
        writer = Told(live)
        for number in range(256):
            await store(live, writer.session, Key("n", str(number)))
        [pool] = live.cache.pools
        await eventually_async(lambda: pool.used_bytes <= pool.limits.low_watermark * POOL_BYTES)
        assert live.cache.counters.evictions["capacity"] == 0

    run(act)


def test_a_pool_that_fetches_fill_is_trimmed() -> None:
    async def act(live: LiveCache) -> None:
        fetcher = Told(live)
        for number in range(256):
            pace = await live.begin()
            key = Key("n", str(number))
            reserved = await live.reserve(fetcher.session, key, CONTENT, pace)
            assert isinstance(reserved, Reserved)
            live.commit(fetcher.session, reserved.entry)
        [pool] = live.cache.pools
        await eventually_async(lambda: pool.used_bytes <= pool.limits.low_watermark * POOL_BYTES)
        assert live.cache.counters.evictions["capacity"] == 0

    run(act)


class OneGrant(NoPuts):
    """An intake whose puts are all stored, with one session that is still to be granted memory."""

    is_pending = True

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        session = cache.open_session()
        assert not isinstance(session, LimitReached)
        self.session = session

    def grant_next(self, now_s: float) -> None:
        self.is_pending = False
        assert self._cache.granted.grant(
            self.session, CONTENT.nbytes, 16, 16, now_s, self._cache.pools[0]
        )


def test_a_turn_that_only_grants_announces_what_it_evicted(tmp_path: Path) -> None:
    directory = PoolDir(str(tmp_path), "test")
    index = SharedIndex(directory, "ab", POOL_BYTES, 4)

    async def act() -> None:
        [pool] = pools = [Pool(Allocator(0, POOL_BYTES, 4096))]
        cache = Cache(pools, board=index)
        intake = OneGrant(cache)
        index.open_page(intake.session)
        live = LiveCache(cache, Clock(), intake)
        for number in range(256):
            reserved = reserve(cache, intake.session, Key("n", str(number)), CONTENT, 0.0)
            assert isinstance(reserved, Reserved)
            cache.commit(intake.session, reserved.entry, 0.0)
        followed = live.follow_changes()
        live.drain()
        assert pool.evictions["capacity"] == 16
        changes = await within_hang(followed.next())
        assert changes == {Key("n", str(number)): False for number in range(16)}
        await eventually_async(lambda: pool.used_bytes + pool.granted_bytes <= 0.9 * POOL_BYTES)
        cache.check()

    asyncio.run(act())
    index.close()
    directory.close()
