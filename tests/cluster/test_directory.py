"""The directory in Redis: what it says is advice, and being wrong or down costs a miss."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
import torch

from ecd.cluster.admission import Admission
from ecd.cluster.candidates import Candidates
from ecd.cluster.directory import Found, NoDirectory
from ecd.cluster.fetcher import Fetcher
from ecd.cluster.peers import Peers
from ecd.cluster.redis_directory import RedisDirectory
from ecd.config import Config
from ecd.core.allocator import Allocator
from ecd.core.cache import Cache
from ecd.core.outcomes import Missing, Waiting, Wakeup
from ecd.core.pool import Pool
from ecd.core.types import Key, WaitFor
from ecd.flights import Flights
from ecd.identity import NodeIdentity
from ecd.live import LiveCache
from ecd_client import Client
from ecd_proto.shm.files import GRANULE_BYTES
from support.daemon import Daemon, eventually
from support.redis import PATIENT, RedisServer

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]
BOUND_S = 6.0
ports = itertools.count(16400)


@pytest.fixture
def make_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    servers: list[RedisServer] = []

    def make(**options: object) -> RedisServer:
        servers.append(RedisServer(tmp_path, port=next(ports), **options))
        return servers[-1].start()

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def redis(make_redis: Callable[..., RedisServer]) -> RedisServer:
    return make_redis()


def url(redis: RedisServer) -> str:
    return f"redis://{redis.host}:{redis.port}/0"


def row(key: str, namespace: str = "default", cluster: str = "default") -> str:
    digest = hashlib.sha256(f"{namespace}\0{key}".encode()).hexdigest()[:32]
    return f"ecd:{cluster}:e:{digest}"


def known(redis: RedisServer, key: str) -> list[str]:
    """The incarnations that Redis has for a key."""
    return redis.ask("hkeys", row(key)).split()


def look(client: Client, key: str) -> bool:
    """Whether the key can be had from anywhere, within the bound."""
    started = time.monotonic()
    [found] = client.get_async([key], 5.5, only_if_written=True)
    item = found.result(BOUND_S)
    assert time.monotonic() - started < BOUND_S
    if item is None:
        return False
    with item:
        expected = float(len(key))
        assert (item.tensor == expected).all(), "wrong bytes"
    return True


def store(client: Client, key: str) -> None:
    client.put(key, torch.full((1000,), float(len(key))))


@pytest.fixture
def make_patient(make_peer: MakePeer) -> MakePeer:
    def make(**settings: str) -> Daemon:
        daemon = make_peer(**settings)
        daemon.command = PATIENT
        return daemon

    return make


Two = tuple[Daemon, Client, Daemon, Client]


@pytest.fixture
def two(make_patient: MakePeer, client_of: ClientOf, redis: RedisServer) -> Two:
    """Nodes that wait for Redis for longer than by default."""
    a, b = (make_patient(ECD_DIRECTORY=url(redis)).start() for _ in range(2))
    return a, client_of(a), b, client_of(b)


@pytest.fixture
def two_as_shipped(make_peer: MakePeer, client_of: ClientOf, redis: RedisServer) -> Two:
    a, b = (make_peer(ECD_DIRECTORY=url(redis)).start() for _ in range(2))
    return a, client_of(a), b, client_of(b)


def test_what_is_stored_anywhere_is_found_and_what_is_evicted_is_not(
    two: Two, redis: RedisServer
) -> None:
    a, here, _b, there = two
    for number in range(50):
        store(here, "k" * (number + 1))
    eventually(lambda: a.peers().directory.unpublished == 0)
    eventually(lambda: known(redis, "k" * 50) == [here.incarnation])
    assert all(look(there, "k" * (number + 1)) for number in range(50))
    eventually(lambda: len(known(redis, "k")) == 2, what="the second copy is known too")
    assert not look(there, "nothing")
    a.evict_all()
    eventually(lambda: known(redis, "k") == [there.incarnation])
    assert int(redis.ask("ttl", row("k"))) > 600, "rows expire by themselves"
    record = f"ecd:default:n:{here.incarnation}"
    assert 0 < int(redis.ask("ttl", record)) <= 15, "and with the node that owns them"
    a.terminate()
    assert redis.ask("exists", record) == "0", "a node that leaves says so"
    assert look(there, "k")


def test_no_password_is_shown_where_redis_repeats_it(
    make_peer: MakePeer, make_redis: Callable[..., RedisServer]
) -> None:
    """A Redis of before version 6 repeats the login that it does not know."""
    redis = make_redis(options=["--rename-command", "HELLO", ""])
    daemon = make_peer(ECD_DIRECTORY=f"redis://:hunter2@{redis.host}:{redis.port}/0").start()
    eventually(lambda: daemon.peers().directory.last_error)
    said = daemon.peers().directory.last_error
    assert "unknown command" in said
    assert "hunter2" not in said + daemon.text()


def test_clusters_that_share_a_redis_do_not_see_each_other(
    two: Two, make_patient: MakePeer, client_of: ClientOf, redis: RedisServer
) -> None:
    _, here, _, there = two
    other = make_patient(ECD_DIRECTORY=url(redis), ECD_CLUSTER="other").start()
    store(here, "k")
    eventually(lambda: known(redis, "k") != [])
    assert not look(client_of(other), "k")
    assert look(there, "k")


def test_this_zone_comes_first_then_the_least_busy(
    make_patient: MakePeer, client_of: ClientOf, redis: RedisServer
) -> None:
    zones = ["west", "east", "north"]
    holders = [make_patient(ECD_DIRECTORY=url(redis), ECD_ZONE=zone).start() for zone in zones]
    for daemon in holders:
        store(client_of(daemon), "k")
    eventually(lambda: len(known(redis, "k")) == 3)
    asking = make_patient(ECD_DIRECTORY=url(redis), ECD_ZONE="east").start()
    assert look(client_of(asking), "k")
    assert [peer.zone for peer in asking.peers().peers if peer.reads] == ["east"]


# -- Redis fails -----------------------------------------------------------------------------------


def test_redis_is_killed_and_restarts_empty(two_as_shipped: Two, redis: RedisServer) -> None:
    a, here, b, there = two_as_shipped
    store(here, "k")
    eventually(lambda: known(redis, "k") != [])
    redis.kill()
    for _ in range(3):
        assert not look(there, "kk"), "a miss"
    with there.get("k", 5.0, nodes=[here.node]) as item:
        assert (item.tensor == 1).all(), "hints go on"
    eventually(lambda: not b.peers().directory.up)
    assert b.peers().directory.errors > 0
    assert "ecd_directory_up 0.0" in b.metrics()
    b.evict_all()
    store(here, "kkk")  # while nobody can be told
    eventually(lambda: a.peers().directory.lag_s > 0 or a.peers().directory.unpublished > 0)
    redis.start()
    eventually(lambda: known(redis, "k") == [here.incarnation], 20, "entries are told again")
    eventually(lambda: known(redis, "kkk") == [here.incarnation], 20)
    eventually(lambda: look(there, "k") and look(there, "kkk"), 20)
    eventually(lambda: b.peers().directory.up, 20)


def test_redis_is_flushed(two: Two, redis: RedisServer) -> None:
    a, here, _, there = two
    for number in range(700):  # more than one batch
        store(here, "k" * (number % 7 + 1) + str(number))
    store(here, "k")
    eventually(lambda: known(redis, "k") != [])
    os.kill(a.pid, signal.SIGSTOP)
    redis.ask("flushall")
    assert known(redis, "k") == []
    assert not look(there, "k")
    os.kill(a.pid, signal.SIGCONT)
    eventually(lambda: known(redis, "k") == [here.incarnation], 15, "it is told again")
    eventually(lambda: int(redis.ask("dbsize")) == 701 + 4, 15)


def test_redis_stands_still(two_as_shipped: Two, redis: RedisServer) -> None:
    _a, here, b, there = two_as_shipped
    store(here, "k")
    eventually(lambda: known(redis, "k") != [])
    redis.stop()
    try:
        took_s = []
        for number in range(20):
            started = time.monotonic()
            assert not look(there, f"nothing-{number}")
            took_s.append(time.monotonic() - started)
            store(there, "x" * (number + 1))
        assert median(took_s) < 1.0, "a lookup has a quarter of a second"
        assert max(took_s) < 3.0, "a fetch has five"
        status = b.status()
        assert status.entries == 20, "the daemon serves on"
    finally:
        redis.go_on()
    eventually(lambda: look(there, "k"), 20)
    eventually(lambda: known(redis, "x") == [there.incarnation], 20)


def test_who_cannot_make_an_entry_outlasts_a_halt_of_redis(
    two_as_shipped: Two, redis: RedisServer
) -> None:
    _, here, b, there = two_as_shipped
    for key in ("k", "kk"):
        store(here, key)
        eventually(lambda key=key: known(redis, key) != [])
    redis.stop()
    try:
        started = time.monotonic()
        [made] = there.get_async(["kk"], 5.0, only_if_written=True, makes=[0.0])
        assert made.result(BOUND_S) is None
        assert time.monotonic() - started < 1.7, "an engine that encodes does not wait"
        [waiting] = there.get_async(["k"], 8.0)
        time.sleep(1.0)
    finally:
        redis.go_on()
    item = waiting.result(BOUND_S)
    assert item is not None
    with item:
        assert (item.tensor == 1.0).all(), "wrong bytes"
    assert b.peers().fetches["fetched"] == 1


def test_redis_is_up_again_once_it_has_answered(two_as_shipped: Two, redis: RedisServer) -> None:
    """A lookup is late between two beats, which are five seconds apart."""
    _, _, b, there = two_as_shipped
    eventually(lambda: b.peers().directory.up)
    redis.stop()
    assert not look(there, "nothing")
    redis.go_on()
    assert b.peers().directory.errors > 0
    time.sleep(1.1)  # for a second it is not asked
    eventually(lambda: look(there, "nothing") or b.peers().directory.up, 2.5)


def test_redis_is_slow(two_as_shipped: Two, redis: RedisServer) -> None:
    """Scripts that hold Redis up for 30 ms at a time: slow, but within the time a lookup has."""
    _, here, _, there = two_as_shipped
    for number in range(10):
        store(here, "k" * (number + 1))
    eventually(lambda: known(redis, "k" * 10) != [])
    busy = (
        "local t=redis.call('time') local e=t[1]*1000000+t[2]+30000 "
        "repeat t=redis.call('time') until t[1]*1000000+t[2]>e"
    )
    hold = subprocess.Popen(
        ["redis-cli", "-h", redis.host, "-p", str(redis.port), "-r", "300", "eval", busy, "0"],
        stdout=subprocess.DEVNULL,
    )
    found = False
    while hold.poll() is None and not found:
        found = look(there, "k")
        time.sleep(0.2)
    hold.kill()
    hold.wait()
    assert found
    eventually(lambda: all(look(there, "k" * (n + 1)) for n in range(10)), 20)


# -- rows that are wrong ---------------------------------------------------------------------------


def test_rows_that_lead_nowhere_cost_a_miss(two: Two, redis: RedisServer) -> None:
    a, here, b, there = two
    record = json.dumps({"node": here.node, "zone": "", "load": 0})
    dead = json.dumps({"node": "127.0.77.1:1", "zone": "", "load": 0})
    redis.ask("set", "ecd:default:n:" + "1" * 32, record)
    redis.ask("set", "ecd:default:n:" + "2" * 32, dead)
    redis.ask("set", "ecd:default:n:" + "3" * 32, "not json")
    nowhere = json.dumps({"node": "unix:///run/other.sock", "zone": "", "load": 0})
    redis.ask("set", "ecd:default:n:" + "5" * 32, nowhere)
    redis.ask("hset", row("no node"), "5" * 32, "")
    redis.ask("hset", row("evicted long ago"), here.incarnation, "0:4096+400")
    redis.ask("hset", row("another life"), "1" * 32, "0:0+1000")
    redis.ask("hset", row("a dead node"), "2" * 32, "0:0+1000")
    redis.ask("hset", row("nonsense"), "3" * 32, "", "no incarnation at all", "x")
    places = ["5+5", "0:-1+5", ":+", "0:1e3+7", "99999:0+5", "0:" + "9" * 400 + "+1", "0:0+0"]
    for number, place in enumerate(places):
        redis.ask("hset", row(f"nowhere {number}"), here.incarnation, place)
    redis.ask("hset", row("a node that is gone"), "4" * 32, "")
    redis.ask("set", row("of another type"), "x")
    for key in (
        *("evicted long ago", "another life", "a dead node", "nonsense", "a node that is gone"),
        *("no node", "of another type", "a dead node"),
        *(f"nowhere {number}" for number in range(len(places))),
    ):
        assert not look(there, key), key
    assert b.peers().directory.errors == 0
    store(here, "k")
    redis.ask("hset", row("k"), "2" * 32, "", "4" * 32, "")
    eventually(lambda: here.incarnation in known(redis, "k"))
    before = b.peers().speculative_reads_used
    assert look(there, "k"), "one right row among wrong ones is enough"
    assert b.peers().speculative_reads_used == before + 1, "the row says where it lies"
    for daemon in (a, b):
        daemon.check_nothing_leaked()


def directory_of(redis: RedisServer) -> RedisDirectory:
    """The directory of a node that stores nothing, in this process."""
    config = Config(peer_address="127.0.77.1:1", peer_insecure=True, directory=url(redis))
    identity = NodeIdentity("default", "f" * 32, "a test", "127.0.77.1:1")
    return RedisDirectory(config, identity, Cache([Pool(Allocator(0, 1 << 20, GRANULE_BYTES))]))


def a_node(redis: RedisServer, incarnation: str, record: str | None = None) -> None:
    """A living one of this incarnation, at 127.0.77.1:2 if `record` does not say else."""
    record = record or json.dumps({"node": "127.0.77.1:2", "zone": "", "load": 0})
    redis.ask("set", f"ecd:default:n:{incarnation}", record)


POISONED_RECORDS = {
    "a load beyond all numbers": '{"node": "127.0.77.1:3", "zone": "", "load": 1e999}',
    "a load that is none": '{"node": "127.0.77.1:3", "zone": "", "load": "much"}',
    "deep JSON": "[" * 100_000,
    "JSON that is deep, and not long": "[" * 1000,
    "a list": "[]",
    "a node that is a number": '{"node": 3, "zone": "", "load": 0}',
    "a node that is many": '{"node": ["127.0.77.1:3"], "zone": "", "load": 0}',
    "a long zone": json.dumps({"node": "127.0.77.1:3", "zone": "z" * 100_000, "load": 0}),
    "no text": "\\xff\\xfe",
}


@pytest.mark.parametrize("poison", POISONED_RECORDS)
def test_a_poisoned_record_costs_its_own_candidate(redis: RedisServer, poison: str) -> None:
    a_node(redis, "1" * 32)
    a_node(redis, "2" * 32, POISONED_RECORDS[poison])
    redis.ask("hset", row("k"), "1" * 32, "0:0+5", "2" * 32, "0:0+5")
    redis.ask("hset", row("another"), "1" * 32, "")
    check_that_all_is_found(redis)


def test_a_poisoned_row_costs_its_own_candidates(redis: RedisServer) -> None:
    a_node(redis, "1" * 32)
    redis.ask("hset", row("another"), "1" * 32, "", "not an incarnation", "")
    redis.ask("eval", "redis.call('hset', KEYS[1], '\\255\\254', '')", "1", row("another"))
    redis.ask("eval", "redis.call('hset', KEYS[1], ARGV[1], '\\255')", "1", row("k"), "3" * 32)
    redis.ask("hset", row("k"), "1" * 32, "0:0+5")
    redis.ask("lpush", "ecd:default:n:" + "3" * 32, "x")
    redis.ask("set", row("of another type"), "x")
    check_that_all_is_found(redis)


MANY_FIELDS = (
    "for i = 1, 10000 do redis.call('hset', KEYS[1], string.format('%032x', i), '0:0+5') end"
)
LONG_FIELDS = (
    "redis.call('hset', KEYS[1], string.rep('1', 32), string.rep('5', 4000000)) "
    "redis.call('hset', KEYS[1], string.rep('1', 4000000), '0:0+5')"
)
LONG_STRING = "redis.call('set', KEYS[1], string.rep('5', 4000000))"


def test_what_is_too_large_is_not_read(redis: RedisServer) -> None:
    a_node(redis, "1" * 32)
    a_node(redis, "2" * 32)
    for key in ("k", "another"):
        redis.ask("hset", row(key), "1" * 32, "0:0+5", "e" * 32, "0:0+5")
    redis.ask("eval", MANY_FIELDS, "1", row("of many nodes"))
    redis.ask("eval", LONG_FIELDS, "1", row("of long fields"))
    redis.ask("hset", row("of long fields"), "2" * 32, "0:0+5")
    redis.ask("eval", LONG_STRING, "1", "ecd:default:n:" + "e" * 32)
    names = ("k", "of many nodes", "of long fields", "another")

    async def find() -> None:
        directory = directory_of(redis)
        before = sent_bytes(redis)
        found = await directory.find([Key("default", name) for name in names])
        while directory.state.last_error == "TimeoutError":  # this machine is busy
            directory.state.last_error = ""
            await asyncio.sleep(1.1)
            before = sent_bytes(redis)
            found = await directory.find([Key("default", name) for name in names])
        assert sent_bytes(redis) - before < 50_000
        assert [len(found[Key("default", name)]) for name in names] == [1, 0, 1, 1]
        await directory.close()

    asyncio.run(find())


def sent_bytes(redis: RedisServer) -> int:
    lines = redis.ask("info", "stats").splitlines()
    said = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(said["total_net_output_bytes"])


def check_that_all_is_found(redis: RedisServer) -> None:
    """The node 1 for both keys, and nothing for what is of another type, in one batch."""

    async def find() -> None:
        directory = directory_of(redis)
        keys = [Key("default", key) for key in ("k", "of another type", "another")]
        found = await directory.find(keys)
        while directory.state.last_error == "TimeoutError":  # this machine is busy
            directory.state.last_error, directory.state.errors = "", 0
            await asyncio.sleep(1.1)
            found = await directory.find(keys)
        assert {key.mm_hash: [c.hint.node for c in found[key]] for key in found} == {
            "k": ["127.0.77.1:2"],
            "another": ["127.0.77.1:2"],
        }
        assert found[keys[0]][0].hint.nbytes == 5
        assert directory.state.errors == 0
        await directory.close()

    asyncio.run(find())


def test_lookups_at_one_time_do_not_hurt_each_other(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup that times out drops its connections; another may be about to use them."""
    monkeypatch.setattr("ecd.cluster.redis_directory.NODE_CACHE_S", 0.01)
    names = [f"{number:032x}" for number in range(16)]
    for name in names:
        a_node(redis, name)
        redis.ask("hset", row("all"), name, "")
        redis.ask("hset", row(name), name, "")

    async def find() -> None:
        directory = directory_of(redis)
        finds = []
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:
            for key in (random.choice(names), "all"):
                finds.append(asyncio.ensure_future(directory.find([Key("default", key)])))
                await asyncio.sleep(1e-3)
        for found in await asyncio.gather(*finds):
            whole = [1], [len(names)]
            assert [len(candidates) for candidates in (found or {}).values()] in ([], *whole)
        assert directory.state.last_error in ("", "TimeoutError"), "at most it took too long"
        await directory.close()

    asyncio.run(find())


def test_a_lookup_that_raises_is_answered_at_once() -> None:
    class BrokenDirectory(NoDirectory):
        async def find(self, keys: object) -> Found:
            await asyncio.sleep(0.01)
            raise KeyError("as no directory should")

    class Asking:
        def __init__(self) -> None:
            self.woken: list[Wakeup] = []

        def wait_ended(self, wakeup: Wakeup) -> None:
            self.woken.append(wakeup)

    async def want() -> None:
        config = Config(peer_address="127.0.77.1:1", peer_insecure=True)
        peers = Peers(config, NodeIdentity("default", "f" * 32, "a test", "127.0.77.1:1"), None)
        directory = BrokenDirectory()
        admission = Admission("127.0.77.1:1", config, peers, directory)
        live = LiveCache(Cache([Pool(Allocator(0, 1 << 20, GRANULE_BYTES))]))
        asking, told = live.open_session(), Asking()
        live.subscribe(asking, told)
        candidates = Candidates(peers, admission, directory, "")
        flights = Flights(live, 5.0)
        flights.sources.append(Fetcher(live, None, candidates, lambda *_: None, 5.0))
        keys = [Key("default", str(number)) for number in range(3)]
        for key in keys:
            flights.want(key)
            assert isinstance(live.acquire(asking, key, 5.0, WaitFor.WRITER), Waiting)
        started = time.monotonic()
        while len(told.woken) < len(keys):
            await asyncio.sleep(0.01)
            assert time.monotonic() - started < 3.0, "a fetch has five"
        assert all(isinstance(wakeup.outcome, Missing) for wakeup in told.woken)
        assert len(flights) == 0
        await flights.close()
        await candidates.close()

    asyncio.run(want())


def test_a_row_of_another_type_keeps_no_other_from_being_told(two: Two, redis: RedisServer) -> None:
    a, here, _b, there = two
    redis.ask("set", row("k"), "x")
    for key in ("kk", "k", "kkk"):
        store(here, key)
    eventually(lambda: known(redis, "kk") and known(redis, "kkk"), what="the others are told")
    eventually(lambda: a.peers().directory.unpublished == 0)
    assert a.peers().directory.errors == 0
    assert look(there, "kk")
    assert not look(there, "k")


# -- nodes by their address ------------------------------------------------------------------------


def test_hints_lead_to_nodes_that_the_directory_knows(
    make_patient: MakePeer, client_of: ClientOf, redis: RedisServer
) -> None:
    known_to_redis = {"ECD_DIRECTORY": url(redis), "ECD_HINT_NETWORKS": ""}
    a, b = make_patient(**known_to_redis).start(), make_patient(**known_to_redis).start()
    unknown = make_patient().start()
    other = make_patient(ECD_CLUSTER="other", **known_to_redis).start()
    here, there = client_of(a), client_of(b)
    for daemon in (a, unknown, other):
        store(client_of(daemon), "k")
    eventually(lambda: known(redis, "k") != [])
    redis.ask("del", row("k"))
    for daemon in (unknown, other):
        assert there.get("k", 0.5, nodes=[daemon.peer]) is None
    [ignored] = re.findall(r"^ecd_hints_ignored_total (\S+)", b.metrics(), re.MULTILINE)
    assert float(ignored) >= 2.0
    with there.get("k", 5.0, nodes=[unknown.peer, other.peer, here.node]) as item:
        assert (item.tensor == 1).all()
    assert [peer.node for peer in b.peers().peers] == [a.peer], "no other was asked"
    address = f"ecd:default:a:{a.peer}"
    assert redis.ask("get", address) == here.incarnation
    assert 0 < int(redis.ask("ttl", address)) <= 15
    a.terminate()
    assert redis.ask("exists", address) == "0"


def test_hints_wait_no_longer_for_a_directory_than_lookups_do(
    make_peer: MakePeer, client_of: ClientOf, redis: RedisServer
) -> None:
    b = make_peer(ECD_DIRECTORY=url(redis), ECD_HINT_NETWORKS="").start()
    there = client_of(b)
    eventually(lambda: b.peers().directory.up)
    redis.stop()
    try:
        started = time.monotonic()
        hints = [f"127.0.77.1:{number}" for number in range(1, 9)]
        founds = there.get_async(
            [f"k{n}" for n in range(64)], 5.0, only_if_written=True, nodes=[hints] * 64
        )
        assert [found.result(BOUND_S) for found in founds] == [None] * 64
        assert time.monotonic() - started < 1.8, "not a lookup for each of the eight"
    finally:
        redis.go_on()


def test_a_node_that_restarts_is_another_incarnation(
    two: Two, redis: RedisServer, client_of: ClientOf
) -> None:
    a, here, _b, there = two
    before = here.incarnation
    store(here, "k")
    eventually(lambda: known(redis, "k") == [before])
    a.kill()
    a.start()
    here = client_of(a)
    assert not look(there, "k"), "what the old life had is gone, though the old row is there"
    store(here, "k")
    eventually(lambda: set(known(redis, "k")) == {before, here.incarnation})
    eventually(lambda: look(there, "k"), 15)


def test_what_a_node_takes_over_is_found_again(
    make_peer: MakePeer, client_of: ClientOf, redis: RedisServer
) -> None:
    a = make_peer(ECD_DIRECTORY=url(redis), ECD_WARM_RESTART="true").start()
    b = make_peer(ECD_DIRECTORY=url(redis)).start()
    here, there = client_of(a), client_of(b)
    store(here, "k")
    eventually(lambda: len(known(redis, "k")) == 1)
    time.sleep(0.3)  # it is hashed
    a.kill()
    a.start()
    here = client_of(a)
    eventually(lambda: here.incarnation in known(redis, "k"))
    eventually(lambda: look(there, "k"), 15)


# -- kinds of Redis --------------------------------------------------------------------------------


def test_a_password(
    make_redis: Callable[..., RedisServer], make_patient: MakePeer, client_of: ClientOf
) -> None:
    redis = make_redis(options=["--requirepass", "pass"], cli=["-a", "pass"])
    at = f"{redis.host}:{redis.port}"
    a, b = (make_patient(ECD_DIRECTORY=f"redis://:pass@{at}/0").start() for _ in range(2))
    wrong = make_patient(ECD_DIRECTORY=f"redis://:wrong-word@{at}/0").start()
    store(client_of(a), "k")
    eventually(lambda: known(redis, "k") != [])
    assert look(client_of(b), "k")
    assert not look(client_of(wrong), "k")
    assert not wrong.peers().directory.up
    assert "wrong-word" not in wrong.text()


def test_tls(
    make_redis: Callable[..., RedisServer],
    make_patient: MakePeer,
    client_of: ClientOf,
    tmp_path: Path,
) -> None:
    made = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem"),
        *("-out", "cert.pem", "-subj", "/CN=127.0.0.1", "-days", "2"),
        *("-addext", "subjectAltName=IP:127.0.0.1"),
    ]
    subprocess.run(made, check=True, capture_output=True, cwd=tmp_path)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    tls_port = next(ports)
    redis = make_redis(
        options=[
            *("--tls-port", str(tls_port), "--tls-cert-file", cert, "--tls-key-file", key),
            *("--tls-ca-cert-file", cert, "--tls-auth-clients", "no"),
        ]
    )
    at = f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={cert}"
    a, b = (make_patient(ECD_DIRECTORY=at).start() for _ in range(2))
    store(client_of(a), "k")
    eventually(lambda: known(redis, "k") != [])
    assert look(client_of(b), "k")


def test_redis_cluster(
    make_redis: Callable[..., RedisServer],
    make_patient: MakePeer,
    client_of: ClientOf,
    tmp_path: Path,
) -> None:
    servers = [
        make_redis(options=["--cluster-enabled", "yes", "--cluster-config-file", f"n{i}.conf"])
        for i in range(3)
    ]
    nodes = [f"127.0.0.1:{server.port}" for server in servers]
    servers[0].ask("--cluster", "create", *nodes, "--cluster-yes")
    eventually(lambda: "cluster_state:ok" in servers[0].ask("cluster", "info"), 20)
    at = f"redis+cluster://{nodes[0]}"
    a, b = (make_patient(ECD_DIRECTORY=at).start() for _ in range(2))
    here, there = client_of(a), client_of(b)
    for number in range(30):
        store(here, "k" * (number + 1))
    eventually(lambda: a.peers().directory.unpublished == 0 and a.peers().directory.up, 10)
    assert all(look(there, "k" * (number + 1)) for number in range(30))
    sizes = [int(server.ask("dbsize")) for server in servers]
    assert all(size > 0 for size in sizes), "rows lie on every server of the cluster"
