"""The directory in a real Redis: what it says is advice, and being wrong or down costs a miss.

`simulation/test_directory.py` has how long a Redis that is silent, slow or emptied is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from redis.asyncio.connection import AbstractConnection

from ecd.base.clock import Clock
from ecd.base.identity import NodeIdentity
from ecd.cluster.deliveries import Deliveries
from ecd.cluster.directory import redis_health, redis_lookup, redis_publisher
from ecd.cluster.directory.directory import Found, NoDirectory
from ecd.cluster.directory.redis_directory import RedisDirectory
from ecd.cluster.directory.redis_rows import NODE_TTL_S, RowNames
from ecd.cluster.fetcher import Fetcher
from ecd.cluster.peers.admission import Admission
from ecd.cluster.peers.candidates import Candidates
from ecd.cluster.peers.peers import Peers
from ecd.core.cache import Cache
from ecd.core.model.outcomes import Missing, Waiting, Wakeup
from ecd.core.model.types import Key, WaitFor
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.live.flights import Flights
from ecd.live.live import LiveCache
from ecd.settings.config import Config
from ecd_client import Client
from ecd_proto.backoff import Backoff
from ecd_proto.findings import Finding, nodes
from ecd_proto.shm.files import GRANULE_BYTES
from ecd_proto.v1 import cache_pb2 as pb
from support.daemon import Daemon
from support.pairs import start_all
from support.processes import child, run
from support.redis import UNHURRIED, RedisServer, free_port
from support.waiting import HANG_S, eventually, eventually_async, within_hang

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]
MakeRedis = Callable[..., RedisServer]
LONG_S = 600.0


@pytest.fixture
def client_of(client_of: Callable[..., Client], request: pytest.FixtureRequest) -> ClientOf:
    return partial(client_of, namespace=request.node.name)


def row(key: str, namespace: str = "default") -> str:
    digest = hashlib.sha256(f"{namespace}\0{key}".encode()).hexdigest()[:32]
    return f"ecd:default:e:{digest}"


def known(redis: RedisServer, client: Client, key: str) -> list[str]:
    """The incarnations that Redis has for a key of the client's namespace."""
    return redis.ask("hkeys", row(key, client.namespace)).split()


def look(client: Client, key: str, *nodes: str) -> bool:
    """Whether the key can be had from anywhere."""
    [found] = client.get_async([key], LONG_S, only_if_written=True, nodes=[nodes])
    item = found.result(HANG_S)
    if item is None:
        return False
    with item:
        expected = float(len(key))
        assert (item.tensor == expected).all(), "wrong bytes"
    return True


def store(client: Client, key: str) -> None:
    client.put(key, torch.full((1000,), float(len(key))))


Two = tuple[Daemon, Client, Daemon, Client]


@pytest.fixture
def two(unused_pair: list[Daemon], client_of: ClientOf) -> Two:
    """Nodes that wait for Redis for longer than by default."""
    a, b = unused_pair
    return a, client_of(a), b, client_of(b)


def test_what_is_stored_anywhere_is_found_and_what_is_evicted_is_not(
    two: Two, shared_redis: RedisServer
) -> None:
    redis, (a, here, b, there) = shared_redis, two
    for number in range(50):
        store(here, "k" * (number + 1))
    a.wait_idle("settled")
    assert a.peers().directory.unpublished == 0
    assert known(redis, here, "k" * 50) == [here.incarnation]
    assert all(look(there, "k" * (number + 1)) for number in range(50))
    b.wait_idle("settled")
    assert len(known(redis, here, "k")) == 2, "the second copy is known too"
    assert not look(there, "nothing")
    a.evict_all()
    a.wait_idle("settled")
    assert known(redis, here, "k") == [there.incarnation]
    assert int(redis.ask("ttl", row("k", here.namespace))) > 600, "rows expire by themselves"
    record, address = f"ecd:default:n:{here.incarnation}", f"ecd:default:a:{a.peer}"
    assert 0 < int(redis.ask("ttl", record)) <= 15, "and with the node that owns them"
    assert redis.ask("get", address) == here.incarnation
    assert 0 < int(redis.ask("ttl", address)) <= 15
    assert json.loads(redis.ask("get", record))["zone"] == "west"


def test_no_password_is_shown_where_redis_repeats_it(
    make_peer: MakePeer, make_redis: MakeRedis
) -> None:
    """A Redis of before version 6 repeats the login that it does not know."""
    redis = make_redis(options=["--rename-command", "HELLO", ""])
    daemon = make_peer(ECD_DIRECTORY=f"redis://:hunter2@{redis.host}:{redis.port}/0").start()
    eventually(lambda: "unknown command" in daemon.peers().directory.last_error)
    assert "hunter2" not in daemon.peers().directory.last_error + daemon.text()


# -- Redis fails -----------------------------------------------------------------------------------


def test_redis_is_killed_and_restarts_empty(
    make_peer: MakePeer, redis: RedisServer, client_of: ClientOf
) -> None:
    a, b = (make_peer(ECD_DIRECTORY=redis.url) for _ in range(2))
    start_all(a, b)
    here, there = map(client_of, (a, b))
    store(here, "k")
    a.wait_idle("settled")
    assert known(redis, here, "k")
    redis.kill()
    for _ in range(3):
        assert not look(there, "kk"), "a miss"
    assert look(there, "k", here.node), "hints go on"
    eventually(lambda: not b.peers().directory.up)
    assert b.peers().directory.errors > 0
    assert "ecd_directory_up 0.0" in b.metrics()
    b.evict_all()
    store(here, "kkk")  # while nobody can be told
    eventually(lambda: a.peers().directory.lag_s > 0 or a.peers().directory.unpublished > 0)
    redis.start()
    for key in ("k", "kkk"):
        eventually(lambda key=key: known(redis, here, key) == [here.incarnation], "told again")
    eventually(lambda: look(there, "k") and look(there, "kkk"))
    eventually(lambda: b.peers().directory.up)


def test_what_is_made_for_long_is_noted_again_unless_another_node_makes_it(
    empty_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_lookup, "LOOKUP_TIMEOUT_S", LONG_S)
    """However many that are."""
    many = [f"one of many {number}" for number in range(redis_publisher.BATCH)]
    lasting = [Key("default", name) for name in ("own", "lost", "another's", *many)]
    names = [RowNames("default").making(key) for key in lasting]

    async def begin() -> None:
        one, other = directory_at(empty_redis.url, "1"), directory_at(empty_redis.url, "2")
        await other._publisher._beat()  # a maker without a record is followed
        assert await one.begin_making({lasting[0]: ""}) == {}
        assert await other.begin_making({lasting[2]: ""}) == {}
        empty_redis.ask("pexpire", names[0], "600000")
        one._publisher._lasting = lambda _: lasting
        await one._publisher._beat()
        await one.close()
        await other.close()

    asyncio.run(begin())
    by = empty_redis.ask("mget", *names).split()
    assert by == ["1" * 32, "1" * 32, "2" * 32, *["1" * 32] * len(many)]
    assert 0 < int(empty_redis.ask("pttl", names[0])) <= 1000 * NODE_TTL_S


# -- rows that are wrong ---------------------------------------------------------------------------


def test_rows_that_lead_nowhere_cost_a_miss(
    two: Two, shared_redis: RedisServer, request: pytest.FixtureRequest
) -> None:
    redis, (a, here, b, there) = shared_redis, two
    row_of = partial(row, namespace=request.node.name)
    errors = b.peers().directory.errors
    record = json.dumps({"node": here.node, "zone": "", "load": 0})
    dead = json.dumps({"node": "127.0.77.1:1", "zone": "", "load": 0})
    redis.ask("set", "ecd:default:n:" + "1" * 32, record)
    redis.ask("set", "ecd:default:n:" + "2" * 32, dead)
    redis.ask("set", "ecd:default:n:" + "3" * 32, "not json")
    nowhere = json.dumps({"node": "unix:///run/other.sock", "zone": "", "load": 0})
    redis.ask("set", "ecd:default:n:" + "5" * 32, nowhere)
    redis.ask("hset", row_of("no node"), "5" * 32, "")
    redis.ask("hset", row_of("evicted long ago"), here.incarnation, "0:4096+400")
    redis.ask("hset", row_of("another life"), "1" * 32, "0:0+1000")
    redis.ask("hset", row_of("a dead node"), "2" * 32, "0:0+1000")
    redis.ask("hset", row_of("nonsense"), "3" * 32, "", "no incarnation at all", "x")
    places = ["5+5", "0:-1+5", ":+", "0:1e3+7", "99999:0+5", "0:" + "9" * 400 + "+1", "0:0+0"]
    for number, place in enumerate(places):
        redis.ask("hset", row_of(f"nowhere {number}"), here.incarnation, place)
    redis.ask("hset", row_of("a node that is gone"), "4" * 32, "")
    redis.ask("set", row_of("of another type"), "x")
    for key in (
        *("evicted long ago", "another life", "a dead node", "nonsense", "a node that is gone"),
        *("no node", "of another type", "a dead node"),
        *(f"nowhere {number}" for number in range(len(places))),
    ):
        assert not look(there, key), key
    assert b.peers().directory.errors == errors
    store(here, "k")
    redis.ask("hset", row_of("k"), "2" * 32, "", "4" * 32, "")
    eventually(lambda: here.incarnation in known(redis, here, "k"))
    before = b.peers().speculative_reads_used
    assert look(there, "k"), "one right row among wrong ones is enough"
    assert b.peers().speculative_reads_used == before + 1, "the row says where it lies"
    for daemon in (a, b):
        daemon.check_nothing_leaked()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories in this process take a halt of this machine for no silence of Redis."""
    monkeypatch.setattr(redis_lookup, "LOOKUP_TIMEOUT_S", HANG_S)
    for limit in ("LOOKUP_TIMEOUT_S", "WRITE_TIMEOUT_S"):
        monkeypatch.setattr(redis_publisher, limit, HANG_S)


@pytest.fixture(scope="module")
def bare_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    redis = RedisServer(tmp_path_factory.mktemp("bare"))
    yield redis.start()
    redis.kill()


@pytest.fixture
def empty_redis(bare_redis: RedisServer, patient: None) -> RedisServer:
    """For directories in this process: no daemon uses it."""
    bare_redis.ask("flushall")
    return bare_redis


def config_at(url: str, cluster: str = "default") -> Config:
    about = {"peer_address": "127.0.77.1:1", "peer_insecure": True, "cluster": cluster}
    return Config(**about, directory=url)


def directory_at(url: str, name: str = "f", cluster: str = "default") -> RedisDirectory:
    """The directory of a node that stores nothing, in this process."""
    identity = NodeIdentity("default", name * 32, "a test", f"127.0.77.1:{int(name, 16)}")
    cache = Cache([Pool(Allocator(0, 1 << 20, GRANULE_BYTES))])
    return RedisDirectory(config_at(url, cluster), identity, cache, Clock())


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
def test_a_poisoned_record_costs_its_own_candidate(empty_redis: RedisServer, poison: str) -> None:
    redis = empty_redis
    a_node(redis, "1" * 32)
    a_node(redis, "2" * 32, POISONED_RECORDS[poison])
    redis.ask("hset", row("k"), "1" * 32, "0:0+5", "2" * 32, "0:0+5")
    redis.ask("hset", row("another"), "1" * 32, "")
    check_that_all_is_found(redis)


def test_a_poisoned_row_costs_its_own_candidates(empty_redis: RedisServer) -> None:
    redis = empty_redis
    a_node(redis, "1" * 32)
    redis.ask("hset", row("another"), "1" * 32, "", "not an incarnation", "")
    redis.ask("eval", "redis.call('hset', KEYS[1], '\\255\\254', '')", "1", row("another"))
    redis.ask("eval", "redis.call('hset', KEYS[1], ARGV[1], '\\255')", "1", row("k"), "3" * 32)
    redis.ask("hset", row("k"), "1" * 32, "0:0+5")
    redis.ask("lpush", "ecd:default:n:" + "3" * 32, "x")
    redis.ask("set", row("of another type"), "x")
    check_that_all_is_found(redis)


@pytest.mark.parametrize(
    "garbage",
    [
        ("set", "NOTE", "x" * 100_000),
        ("set", "NOTE", "0" * 32),
        ("set", "NOTE", ""),
        ("hset", "NOTE", "a", "b"),
        ("set", "NOTE", "\udcff\udcfe" * 16),
    ],
    ids=["long", "unknown", "empty", "hash", "bytes"],
)
def test_a_note_that_is_not_ours_costs_nothing(
    empty_redis: RedisServer, garbage: tuple[str, ...]
) -> None:
    key = Key("default", "k")
    name = RowNames("default").making(key)
    empty_redis.ask(*(name if word == "NOTE" else word for word in garbage))
    assert empty_redis.ask("exists", name) == "1"

    async def begin() -> None:
        directory = directory_at(empty_redis.url)
        assert await directory.begin_making({key: ""}) == {}
        assert directory.state.errors == 0
        await directory.close()

    asyncio.run(begin())


MANY_FIELDS = (
    "for i = 1, 10000 do redis.call('hset', KEYS[1], string.format('%032x', i), '0:0+5') end"
)
LONG_FIELDS = (
    "redis.call('hset', KEYS[1], string.rep('1', 32), string.rep('5', 4000000)) "
    "redis.call('hset', KEYS[1], string.rep('1', 4000000), '0:0+5')"
)
LONG_STRING = "redis.call('set', KEYS[1], string.rep('5', 4000000))"


def test_what_is_too_large_is_not_read(empty_redis: RedisServer) -> None:
    redis = empty_redis
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
        directory = directory_at(redis.url)
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
        directory = directory_at(redis.url)
        keys = [Key("default", key) for key in ("k", "of another type", "another")]
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
    empty_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup that times out drops its connections; another may be about to use them."""
    monkeypatch.setattr(redis_lookup, "NODE_CACHE_S", 0.0)
    monkeypatch.setattr(redis_health, "PAUSE", Backoff(0.0, 0.0))  # Redis is always asked
    names = [f"{number:032x}" for number in range(16)]
    for name in names:
        a_node(empty_redis, name)
        empty_redis.ask("hset", row("all"), name, "")
        empty_redis.ask("hset", row(name), name, "")
    directory = directory_at(empty_redis.url)

    async def find(key: str, within_s: float) -> None:
        redis_lookup.LOOKUP_TIMEOUT_S = within_s  # read before the lookup first waits
        found = await directory.find([Key("default", key)])
        nodes = [len(candidates) for candidates in (found or {}).values()]
        expected = len(names) if key == "all" else 1
        assert nodes == [expected] or (within_s < HANG_S and nodes == [])

    async def find_many() -> None:
        running: set[asyncio.Task[None]] = set()
        for number in range(1000):
            key = random.choice(names) if number % 2 else "all"
            within_s = random.choice((0.001, 0.005, HANG_S))
            running.add(asyncio.ensure_future(find(key, within_s)))
            while len(running) > 8:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for each in [each for each in running if each.done()]:
                    running.remove(each)
                    each.result()
        await within_hang(asyncio.gather(*running))
        assert directory.state.last_error in ("", "TimeoutError"), "at most it took too long"
        await directory.close()

    asyncio.run(find_many())


def test_a_lookup_that_raises_is_answered_at_once() -> None:
    class BrokenDirectory(NoDirectory):
        async def find(self, keys: object) -> Found:
            await asyncio.sleep(0)
            raise KeyError("as no directory should")

    class Asking:
        def __init__(self) -> None:
            self.woken: list[Wakeup] = []

        def wait_ended(self, wakeup: Wakeup) -> None:
            self.woken.append(wakeup)

    async def want() -> None:
        config = Config(peer_address="127.0.77.1:1", peer_insecure=True)
        identity = NodeIdentity("default", "f" * 32, "a test", "127.0.77.1:1")
        peers = Peers(config, identity, None, Clock())
        directory = BrokenDirectory()
        admission = Admission("127.0.77.1:1", config, peers, directory)
        live = LiveCache(Cache([Pool(Allocator(0, 1 << 20, GRANULE_BYTES))]), Clock())
        asking, told = live.cache.open_session(), Asking()
        live.subscribe(asking, told)
        candidates = Candidates(peers, admission, directory, "")
        flights = Flights(live, LONG_S)
        deliveries = Deliveries(live, None, candidates, lambda *_: None, LONG_S)
        flights.sources.append(Fetcher(live, candidates, deliveries))
        keys = [Key("default", str(number)) for number in range(3)]
        for key in keys:
            flights.want(key)
            assert isinstance(live.acquire(asking, key, LONG_S, WaitFor.WRITER), Waiting)
        await eventually_async(lambda: len(told.woken) == len(keys), "each is answered")
        assert all(isinstance(wakeup.outcome, Missing) for wakeup in told.woken)
        assert len(flights) == 0
        await flights.close()
        await candidates.close()

    asyncio.run(want())


def test_a_row_of_another_type_keeps_no_other_from_being_told(
    two: Two, shared_redis: RedisServer
) -> None:
    a, here, _, there = two
    errors = a.peers().directory.errors
    shared_redis.ask("set", row("k", here.namespace), "x")
    for key in ("kk", "k", "kkk"):
        store(here, key)
    a.wait_idle("settled")
    assert known(shared_redis, here, "kk")
    assert known(shared_redis, here, "kkk")
    assert a.peers().directory.errors == errors
    assert look(there, "kk")
    assert not look(there, "k")


# -- nodes -----------------------------------------------------------------------------------------


def test_this_zone_comes_first_then_the_least_busy(empty_redis: RedisServer) -> None:
    about = {"1": ("west", 1), "2": ("west", 0), "3": ("east", 5), "4": ("east", 4)}
    for name, (zone, load) in about.items():
        record = {"node": f"127.0.77.1:{name}", "zone": zone, "load": load}
        a_node(empty_redis, name * 32, json.dumps(record))
        empty_redis.ask("hset", row("k"), name * 32, "")

    async def find() -> list[str]:
        directory, config = directory_at(empty_redis.url), config_at(empty_redis.url)
        identity = NodeIdentity("default", "f" * 32, "a test", "127.0.77.1:15")
        peers = Peers(config, identity, None, Clock())
        admission = Admission("127.0.77.1:15", config, peers, directory)
        candidates = Candidates(peers, admission, directory, "east")
        found = await within_hang(candidates.known(Key("default", "k")))
        await candidates.close()
        await directory.close()
        return [admitted.hint.node[-1] for admitted in found]

    assert asyncio.run(find()) == ["4", "3", "2", "1"]


def test_a_node_says_that_it_leaves_and_what_it_takes_over(
    make_peer: MakePeer, shared_redis: RedisServer, client_of: ClientOf
) -> None:
    redis = shared_redis
    a = make_peer(ECD_DIRECTORY=redis.url, ECD_WARM_RESTART="true")
    a.command = UNHURRIED
    here = client_of(a.start())
    store(here, "k")
    a.wait_idle("hashed", "settled")
    record, address = f"ecd:default:n:{here.incarnation}", f"ecd:default:a:{a.peer}"
    assert redis.ask("exists", record, address) == "2"
    assert a.terminate() == 0
    assert redis.ask("exists", record, address) == "0"
    here = client_of(a.start())
    a.wait_idle("hashed", "settled")  # what it takes over is told once it has its checksum
    assert here.incarnation in known(redis, here, "k")


# -- kinds of Redis --------------------------------------------------------------------------------


async def tell_and_find(keys: int, writer: RedisDirectory, *readers: RedisDirectory) -> list[bool]:
    """Have one node tell that it has so many keys; whether each reader finds all of them."""
    names = [Key("default", f"k{number}") for number in range(keys)]
    running = asyncio.ensure_future(writer.run())
    writer.publish(dict.fromkeys(names, True))
    await eventually_async(lambda: writer.is_told and writer.state.up, "Redis is told, and is up")
    expected = {name: ["127.0.77.1:1"] for name in names}
    finds = []
    for reader in readers:
        found = await reader.find(names) or {}
        nodes = {key: [c.hint.node for c in candidates] for key, candidates in found.items()}
        assert nodes in ({}, expected)
        finds.append(nodes == expected)
    running.cancel()
    for directory in (writer, *readers):
        await directory.close()
    return finds


def test_clusters_that_share_a_redis_do_not_see_each_other(empty_redis: RedisServer) -> None:
    url = empty_redis.url
    both = directory_at(url, "2"), directory_at(url, "3", cluster="other")
    assert asyncio.run(tell_and_find(1, directory_at(url, "1"), *both)) == [True, False]


def test_a_password(patient: None, make_redis: MakeRedis, caplog: pytest.LogCaptureFixture) -> None:
    redis = make_redis(options=["--requirepass", "pass"], cli=["-a", "pass"])
    at = f"{redis.host}:{redis.port}"
    wrong = directory_at(f"redis://:wrong-word@{at}/0", "3")
    without = directory_at(f"redis://{at}/0", "4")
    right = (directory_at(f"redis://:pass@{at}/0", name) for name in "12")
    assert asyncio.run(tell_and_find(1, *right, wrong, without)) == [True, False, False]
    assert not wrong.state.up
    assert wrong.state.last_error
    assert "wrong-word" not in wrong.state.last_error + caplog.text
    assert caplog.text.count("the directory refuses this node: ") == 2
    for refused in (wrong, without):
        advised = "put the user and the password into the URL of ECD_DIRECTORY"
        assert finding_about(refused).advice == advised


def finding_about(directory: RedisDirectory) -> Finding:
    """What operators read of its last error."""
    status = pb.DirectoryStatus(kind="redis", last_error=directory.state.last_error)
    return next(nodes(pb.PeersReply(node="n", directory=status)))


def test_what_a_redis_refuses_is_no_silence(
    patient: None, make_redis: MakeRedis, caplog: pytest.LogCaptureFixture
) -> None:
    redis = make_redis()
    at = f"{redis.host}:{redis.port}"
    no_cluster, no_database = f"redis+cluster://{at}", f"redis://{at}/999"
    readers = [directory_at(url, name) for url, name in ((no_cluster, "3"), (no_database, "4"))]
    assert asyncio.run(tell_and_find(1, directory_at(redis.url, "1"), *readers)) == [False, False]
    said = [finding_about(reader) for reader in readers]
    assert all("redis refuses this node: " in each.found for each in said)
    assert said[0].advice == "begin the URL of ECD_DIRECTORY with redis:// or rediss://"
    assert "number of the database" in said[1].advice
    assert "Traceback" not in caplog.text


async def refused_until(redis: RedisServer, refusal: str, *mends: str) -> Finding:
    """What operators read while Redis refuses a node, which it serves after these commands."""
    directory = directory_at(redis.url, "1")
    running = asyncio.ensure_future(directory.run())
    await eventually_async(lambda: refusal in directory.state.last_error, refusal)
    assert not directory.state.up
    found = finding_about(directory)
    for mend in mends:
        await asyncio.to_thread(redis.ask, *mend.split())
    await eventually_async(lambda: directory.state.up, "the directory works again")
    running.cancel()
    await directory.close()
    return found


REPLICA, UNSAVED, LOADING = "read only replica", "MISCONF", "loading the dataset"


@pytest.mark.parametrize(
    ("refusal", "mends", "advice"),
    [
        (REPLICA, ["replicaof no one"], "name the primary in ECD_DIRECTORY"),
        (UNSAVED, ["config set stop-writes-on-bgsave-error no"], "free space where that Redis"),
        (LOADING, ["config set key-load-delay 0"], "wait: that Redis has started"),
    ],
)
def test_what_redis_answers_is_said_and_that_it_works_again(
    patient: None,
    make_redis: MakeRedis,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    refusal: str,
    mends: list[str],
    advice: str,
) -> None:
    caplog.set_level("INFO")
    (place := tmp_path / "data").mkdir()
    redis = make_redis(options=["--dir", str(place), "--enable-debug-command", "yes"])
    loading = contextlib.ExitStack()
    if refusal == REPLICA:
        redis.ask("replicaof", "127.0.0.1", "1")
    elif refusal == UNSAVED:
        redis.ask("config", "set", "save", "3600 1000000")
        place.rmdir()
        redis.ask("bgsave")
        eventually(lambda: "bgsave_status:err" in redis.ask("info", "persistence"))
    else:
        redis.ask("eval", "for i = 1, 50000 do redis.call('set', i, i) end", "0")
        for setting in (
            ("loading-process-events-interval-bytes", "1024"),
            ("key-load-delay", "5000"),
        ):
            redis.ask("config", "set", *setting)
        reload = ["redis-cli", "-p", str(redis.port), "debug", "reload"]
        loading.enter_context(child(reload, stdout=subprocess.DEVNULL))
        eventually(lambda: "LOADING" in redis.ask("get", "1"))
    with loading:
        found = asyncio.run(refused_until(redis, refusal, *mends))
    assert found.found.startswith("redis refuses this node: ")
    assert refusal in found.found
    assert found.advice.startswith(advice)
    assert caplog.text.count("the directory refuses this node: ") == 1
    assert "does not answer" not in caplog.text
    assert caplog.text.count("the directory works again, after ") == 1


def test_a_connection_that_is_closed_while_it_is_made_is_one_line_of_log(
    patient: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(self: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

    async def find() -> None:
        directory = directory_at("redis://127.0.77.1:1")
        await directory.find([Key("default", "k")])
        await directory.close()

    monkeypatch.setattr(AbstractConnection, "connect", connect)  # as uvloop does
    asyncio.run(find())
    assert "the directory does not answer: unable to perform operation" in caplog.text
    assert "Traceback" not in caplog.text


def test_tls(patient: None, make_redis: MakeRedis, tmp_path: Path) -> None:
    made = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem"),
        *("-out", "cert.pem", "-subj", "/CN=127.0.0.1", "-days", "2"),
        *("-addext", "subjectAltName=IP:127.0.0.1"),
    ]
    run(made, check=True, capture_output=True, cwd=tmp_path)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    tls_port = free_port()
    make_redis(
        options=[
            *("--tls-port", str(tls_port), "--tls-cert-file", cert, "--tls-key-file", key),
            *("--tls-ca-cert-file", cert, "--tls-auth-clients", "no"),
        ]
    )
    at = f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={cert}"
    both = (directory_at(at, name) for name in "12")
    assert asyncio.run(tell_and_find(1, *both)) == [True]


def test_redis_cluster(patient: None, make_redis: MakeRedis) -> None:
    servers = [
        make_redis(options=["--cluster-enabled", "yes", "--cluster-config-file", f"n{i}.conf"])
        for i in range(3)
    ]
    nodes = [f"127.0.0.1:{server.port}" for server in servers]
    servers[0].ask("--cluster", "create", *nodes, "--cluster-yes")
    eventually(lambda: "cluster_state:ok" in servers[0].ask("cluster", "info"))
    both = (directory_at(f"redis+cluster://{nodes[0]}", name) for name in "12")
    assert asyncio.run(tell_and_find(30, *both)) == [True]
    sizes = [int(server.ask("dbsize")) for server in servers]
    assert all(size > 0 for size in sizes), "rows lie on every server of the cluster"
