"""Rules for namespaces, and the book of terms, by example."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from ecd.core import retention
from ecd.core.cache import Cache
from ecd.core.model.outcomes import Leased, LimitReached, MakingRoom, Missing, PoolFull, Reserved
from ecd.core.model.rules import Rules
from ecd.core.model.types import Content, EntryId, Key, SessionId
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.settings.config import Config, ConfigError
from ecd.settings.config_sources import load
from support.reserving import reserve

PAGE = 4096
MIB = 1 << 20


def make(rules: Rules, pages: int = 4096) -> tuple[Cache, SessionId]:
    cache = Cache([Pool(Allocator(0, pages * PAGE, PAGE))], rules=rules)
    session = cache.open_session()
    assert not isinstance(session, LimitReached)
    return cache, session


def put(cache: Cache, session: SessionId, key: Key, now_s: float = 0.0, age_s: float = 0.0) -> None:
    reserved = reserve(cache, session, key, Content("int8", (PAGE,), PAGE), now_s)
    while isinstance(reserved, MakingRoom):
        reserved = reserve(cache, session, key, Content("int8", (PAGE,), PAGE), now_s)
    assert isinstance(reserved, Reserved), reserved
    cache.commit(session, reserved.entry, now_s, age_s=age_s)


@pytest.mark.parametrize(
    ("namespace", "quota"),
    [
        ("a", 1),
        ("ab", 2),
        ("abc", 3),
        ("b", 4),
        ("model|main|bfloat16|none|digest|commit-1", 5),
        ("other|main", 4),
    ],
)
def test_the_exact_name_counts_then_the_longest_pattern(namespace: str, quota: int) -> None:
    rules = Rules({"*": 4, "a*": 2, "a": 1, "a?c": 3, "model|*|bfloat16|*": 5})
    assert rules.quota_bytes(namespace) == quota
    assert Rules({"a*": 2}).quota_bytes("b") is None


def test_settings_of_rules() -> None:
    flags = {
        "namespace_quotas": "tenant-*=2GiB, x=y=4Gi,*=25%",
        "namespace_ttls": "tenant-*=12h,s=90s,*=1.5d",
    }
    config, _ = load(flags, None)
    assert config.namespace_quotas == {"tenant-*": 2 << 30, "x=y": 4 << 30, "*": "25%"}
    assert config.namespace_ttls == {"tenant-*": 43200.0, "s": 90.0, "*": 129600.0}
    rules = config.rules(8 << 30)
    assert rules.quota_bytes("anybody") == 2 << 30
    assert rules.ttl_s("tenant-1") == 43200.0
    nothing = Config().rules(MIB)
    assert (nothing.has_quotas, nothing.has_ttls) == (False, False)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("namespace_quotas", "tenant", "must be PATTERN=SIZE, with commas between several"),
        ("namespace_quotas", "a=2GB,b=lots", "b=lots must be a size, such as 512MiB"),
        ("namespace_quotas", "a=0", "a=0 must be more than 0"),
        ("namespace_quotas", "a=101%", "a=101% must be a size"),
        ("namespace_quotas", "a=9999999EiB", "a=9999999EiB must be at most"),
        ("namespace_ttls", f"a={'9' * 400}d", "a=9+d must be"),
        ("namespace_ttls", "a=soon", "a=soon must be a duration, such as 30s, 10m"),
        ("namespace_ttls", "a=0s", "a=0s must be more than 0"),
    ],
)
def test_wrong_rules_are_refused_with_a_sentence(name: str, wrong: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .from flag.: {said}"):
        load({name: wrong}, None)


def test_a_quotas_entries_are_found_whatever_has_been_read_or_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call looks at few: those that cannot go are passed by, and others follow."""
    monkeypatch.setattr(retention, "LOOKED_AT", 4)
    cache, session = make(Rules({"n": 32 * PAGE}))
    keys = [Key("n", str(number)) for number in range(32)]
    for now_s, key in enumerate(keys):
        put(cache, session, key, float(now_s))
    held = {key: cache.acquire(session, key, 40.0) for key in keys[:20]}
    for key in keys[20:31]:
        lease = cache.acquire(session, key, 50.0)
        cache.release(session, lease.lease)
    put(cache, session, Key("n", "new"), 60.0)
    assert not cache.views.contains(keys[31]), "the only one that nobody has read since"
    for number in range(11):
        put(cache, session, Key("n", f"new {number}"), 61.0)
    assert not any(map(cache.views.contains, keys[20:31]))
    assert all(map(cache.views.contains, held))
    cache.check()


def test_reservations_count_against_the_quota_and_cost_no_other_namespace() -> None:
    cache, session = make(Rules({"n": 4 * PAGE}), pages=8)
    others = [Key("m", str(number)) for number in range(4)]
    for key in others:
        put(cache, session, key)
    content = Content("int8", (PAGE,), PAGE)
    keys = [Key("n", str(number)) for number in range(5)]
    *outcomes, refused = [reserve(cache, session, key, content, 1.0) for key in keys]
    assert refused == PoolFull(PAGE, 0, 4 * PAGE, 4 * PAGE)
    assert all(map(cache.views.contains, others))
    written, given_up, abandoned, lost = [each.entry for each in outcomes]
    cache.check()
    cache.commit(session, written, 1.0)
    cache.abort(session, given_up)
    cache.abandon(session, abandoned)
    assert isinstance(reserve(cache, session, keys[4], content, 1.0), Reserved)
    assert cache.views.contains(keys[0])
    cache.retention.use(Rules({"m": PAGE}))
    cache.check()
    cache.reclaim(session, abandoned)
    cache.leave_session(session)
    assert cache.close_session(session)
    cache.check()
    assert lost
    assert cache.pools[0].used_bytes == 5 * PAGE


def test_a_quota_of_more_held_entries_than_a_look_takes_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "LOOKED_AT", 4)
    cache, session = make(Rules({"n": 32 * PAGE}))
    keys = [Key("n", str(number)) for number in range(32)]
    for key in keys:
        put(cache, session, key)
    leases = [cache.acquire(session, key, 1.0) for key in keys]
    content, outcomes = Content("int8", (PAGE,), PAGE), []
    for turn in range(32):
        outcomes.append(reserve(cache, session, Key("n", "new"), content, 2.0 + turn))
        if not isinstance(outcomes[-1], MakingRoom):
            break
    assert outcomes[-1] == PoolFull(PAGE, 0, 32 * PAGE, 32 * PAGE)
    cache.release(session, leases[9].lease)
    put(cache, session, Key("n", "new"), 40.0)
    assert not cache.views.contains(keys[9])
    cache.check()


def test_a_turn_of_trimming_is_short_however_many_namespaces_are_over() -> None:
    cache, session = make(Rules())
    names = [f"n{number}" for number in range(40)]
    for name in names:
        for number in range(9):
            put(cache, session, Key(name, str(number)))
    leases = [cache.acquire(session, Key(name, str(n)), 1.0) for name in names for n in range(9)]
    cache.retention.use(Rules({"*": 2 * PAGE}))
    cache.retention.reapply(EntryId(0), 1000)
    asked: list[str] = []
    coldest = cache._book.coldest

    def look(namespace: str, *about: Any) -> Any:
        asked.append(namespace)
        return coldest(namespace, *about)

    cache._book.coldest = look  # type: ignore[method-assign]
    turns, goes_on = 0, True
    while goes_on:
        goes_on = cache.evictor.trim(32, 2.0)
        turns += 1
        assert len(asked) <= 4 * turns
    assert set(asked) == set(names), "all have their turn"
    assert turns < 100
    for lease in leases:
        cache.release(session, lease.lease)
    for _ in range(11):  # as others put
        while cache.evictor.trim(32, 3.0):
            pass
    assert cache.views.entries == 2 * len(names)
    assert not cache.evictor.needs_trim()
    cache.check()


def test_what_a_namespace_above_its_quota_loses_spares_the_others() -> None:
    cache, session = make(Rules(), pages=100)
    others = [Key("m", str(number)) for number in range(80)]
    for number, key in enumerate([*others, *(Key("n", str(n)) for n in range(17))]):
        put(cache, session, key, float(number))
    assert cache.pools[0].needs_trim()
    cache.retention.use(Rules({"n": 5 * PAGE}))
    cache.retention.reapply(EntryId(0), 1000)
    while cache.evictor.trim(32, 100.0):
        pass
    assert all(map(cache.views.contains, others)), "the pool has room again without them"
    assert cache.views.entries == 85
    cache.check()


def test_trimming_for_a_quota_looks_at_all_entries_once_and_ends() -> None:
    cache, session = make(Rules({"n": 2000 * PAGE}))
    keys = [Key("n", str(number)) for number in range(2000)]
    for key in keys:
        put(cache, session, key)
    leases = [cache.acquire(session, key, 1.0) for key in keys]
    cache.retention.use(Rules({"n": 1990 * PAGE}))
    after: EntryId | None = EntryId(0)
    while after is not None:
        after = cache.retention.reapply(after, 500)
    calls = 1
    while cache.evictor.trim(32, 2.0):
        calls += 1
    assert 2000 / retention.LOOKED_AT < calls < 20, "all are held"
    assert cache.views.entries == 2000
    for lease in leases:
        cache.release(session, lease.lease)
    put(cache, session, Key("m", "another"), 3.0)
    cache.retention.reapply(EntryId(0), 5000)
    while cache.evictor.trim(32, 3.0):
        pass
    assert cache.views.entries == 1991
    assert not cache.evictor.needs_trim()


def test_a_quota_whose_entries_are_all_held_refuses_and_evicts_none() -> None:
    cache, session = make(Rules({"n": 4 * PAGE}))
    keys = [Key("n", str(number)) for number in range(4)]
    for key in keys:
        put(cache, session, key)
    leases = [cache.acquire(session, key, 1.0) for key in keys[1:]]
    content = Content("int8", (2 * PAGE,), 2 * PAGE)
    refused = reserve(cache, session, Key("n", "new"), content, 1.0)
    assert refused == PoolFull(2 * PAGE, 0, 3 * PAGE, 4 * PAGE)
    assert cache.views.contains(keys[0]), "it alone makes too little room"
    assert isinstance(reserve(cache, session, Key("m", "new"), content, 1.0), Reserved)
    cache.release(session, leases[0].lease)
    assert isinstance(reserve(cache, session, Key("n", "new"), content, 1.0), Reserved)
    assert cache.counters.evictions["quota"] == 2
    cache.check()


def test_a_refused_put_counts_each_kept_entry_once() -> None:
    cache, session = make(Rules(), pages=8)
    keys = [Key("n", str(number)) for number in range(4)]
    for key in keys:
        put(cache, session, key)
    cache.retention.keep(keys[0], inf)
    lease = cache.acquire(session, keys[1], 1.0)
    cache.retention.keep(keys[1], inf)
    cache.acquire(session, keys[2], 1.0)
    content = Content("int8", (6 * PAGE,), 6 * PAGE)
    assert reserve(cache, session, Key("n", "new"), content, 1.0) == PoolFull(
        6 * PAGE, 4 * PAGE, 3 * PAGE
    )
    cache.release(session, lease.lease)
    cache.check()
    cache.retention.unkeep(keys[1])
    assert cache.pools[0].held_bytes == 2 * PAGE
    cache.check()


def test_an_age_counts_from_the_put_on_another_node() -> None:
    cache, session = make(Rules({}, {"n": 10.0}))
    put(cache, session, Key("n", "here"), 100.0)
    put(cache, session, Key("n", "from elsewhere"), 100.0, age_s=7.0)
    assert cache.next_deadline_s() == 103.0
    info = cache.views.info(Key("n", "from elsewhere"))
    assert info is not None
    assert cache.views.put_age_s(info.entry, 102.0) == 9.0
    assert cache.acquire(session, Key("n", "from elsewhere"), 103.0) == Missing(), "a late timer"
    cache.expire(103.0)
    assert cache.views.entries == 1
    cache.expire(110.0)
    assert cache.views.entries == 0
    assert cache.counters.evictions["ttl"] == 2
    cache.check()


def test_a_node_without_rules_keeps_an_age_and_tells_it() -> None:
    cache, session = make(Rules())
    put(cache, session, Key("n", "here"), 100.0)
    put(cache, session, Key("n", "from elsewhere"), 100.0, age_s=7.0)
    infos = [cache.views.info(Key("n", name)) for name in ("here", "from elsewhere")]
    assert [cache.views.put_age_s(info.entry, 102.0) for info in infos if info] == [2.0, 9.0]


def test_a_put_replaces_an_entry_whose_time_is_over_while_the_timer_is_late() -> None:
    cache, session = make(Rules({}, {"n": 10.0}))
    put(cache, session, Key("n", "k"), 0.0)
    put(cache, session, Key("n", "k"), 10.0)
    assert cache.counters.evictions["ttl"] == 1
    assert isinstance(cache.acquire(session, Key("n", "k"), 19.0), Leased)
    cache.check()


def test_many_entries_end_in_bounded_steps() -> None:
    cache, session = make(Rules({}, {"*": 10.0}))
    for number in range(1000):
        put(cache, session, Key("n", str(number)))
    cache.expire(10.0)
    assert 900 < cache.views.entries < 1000
    steps = 1
    while (next_s := cache.next_deadline_s()) is not None and next_s <= 10.0:
        cache.expire(10.0)
        steps += 1
    assert cache.views.entries == 0
    assert steps > 10


def test_new_rules_hold_for_what_is_stored_already() -> None:
    cache, session = make(Rules({"a": 2 * PAGE}, {"b": 10.0}))
    for number in range(4):
        put(cache, session, Key("b", str(number)), float(number))
    cache.retention.keep(Key("b", "0"), 100.0)
    cache.retention.use(Rules({"b": 3 * PAGE}, {"*": 20.0}))
    after: EntryId | None = EntryId(0)
    while after is not None:
        after = cache.retention.reapply(after, 1)
        cache.check()
    cache.expire(19.0)
    assert cache.evictor.needs_trim()
    while cache.evictor.trim(1, 5.0):
        pass
    assert [cache.views.contains(Key("b", str(number))) for number in range(4)] == [1, 0, 1, 1]
    assert cache.pools[0].kept == 1
    cache.check()


def test_no_grant_has_a_piece_larger_than_the_least_quota() -> None:
    """Or an entry above the quota would come without a call, and be evicted instead of refused."""
    cache, _ = make(Rules({"a": 3 * PAGE}))
    pool = cache.pools[0]
    pieces = pool.pieces(PAGE, 2, 16, lambda _: None)
    assert pieces
    assert {piece.nbytes for piece in pieces} == {3 * PAGE, PAGE}
    assert pool.pieces(4 * PAGE, 2, 16, lambda _: None) == []
