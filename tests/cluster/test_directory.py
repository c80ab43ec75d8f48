"""The directory in Redis: what it says is advice, and being wrong or down costs a miss."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ecd_client import Client
from support.daemon import Daemon, eventually
from support.redis import RedisServer

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
def two(
    make_peer: MakePeer, client_of: ClientOf, redis: RedisServer
) -> tuple[Daemon, Client, Daemon, Client]:
    a = make_peer(ECD_DIRECTORY=url(redis)).start()
    b = make_peer(ECD_DIRECTORY=url(redis)).start()
    return a, client_of(a), b, client_of(b)


Two = tuple[Daemon, Client, Daemon, Client]


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


def test_clusters_that_share_a_redis_do_not_see_each_other(
    two: Two, make_peer: MakePeer, client_of: ClientOf, redis: RedisServer
) -> None:
    _, here, _, there = two
    other = make_peer(ECD_DIRECTORY=url(redis), ECD_CLUSTER="other").start()
    store(here, "k")
    eventually(lambda: known(redis, "k") != [])
    assert not look(client_of(other), "k")
    assert look(there, "k")


def test_this_zone_comes_first_then_the_least_busy(
    make_peer: MakePeer, client_of: ClientOf, redis: RedisServer
) -> None:
    zones = ["west", "east", "north"]
    holders = [make_peer(ECD_DIRECTORY=url(redis), ECD_ZONE=zone).start() for zone in zones]
    for daemon in holders:
        store(client_of(daemon), "k")
    eventually(lambda: len(known(redis, "k")) == 3)
    asking = make_peer(ECD_DIRECTORY=url(redis), ECD_ZONE="east").start()
    assert look(client_of(asking), "k")
    assert [peer.zone for peer in asking.peers().peers if peer.reads] == ["east"]


# -- Redis fails -----------------------------------------------------------------------------------


def test_redis_is_killed_and_restarts_empty(two: Two, redis: RedisServer) -> None:
    a, here, b, there = two
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
    _, here, _, there = two
    for number in range(700):  # more than one batch
        store(here, "k" * (number % 7 + 1) + str(number))
    store(here, "k")
    eventually(lambda: known(redis, "k") != [])
    redis.ask("flushall")
    assert not look(there, "k")
    eventually(lambda: known(redis, "k") == [here.incarnation], 15, "it is told again")
    eventually(lambda: int(redis.ask("dbsize")) == 701 + 2, 15)


def test_redis_stands_still(two: Two, redis: RedisServer) -> None:
    _a, here, b, there = two
    store(here, "k")
    eventually(lambda: known(redis, "k") != [])
    redis.stop()
    try:
        slowest = 0.0
        for number in range(20):
            started = time.monotonic()
            assert not look(there, f"nothing-{number}")
            slowest = max(slowest, time.monotonic() - started)
            store(there, "x" * (number + 1))
        assert slowest < 1.0, "a lookup has a quarter of a second"
        status = b.status()
        assert status.entries == 20, "the daemon serves on"
    finally:
        redis.go_on()
    eventually(lambda: look(there, "k"), 20)
    eventually(lambda: known(redis, "x") == [there.incarnation], 20)


def test_redis_is_slow(two: Two, redis: RedisServer) -> None:
    """Scripts that hold Redis up for 100 ms at a time: slow, but within the time a lookup has."""
    _, here, _, there = two
    for number in range(10):
        store(here, "k" * (number + 1))
    eventually(lambda: known(redis, "k" * 10) != [])
    busy = (
        "local t=redis.call('time') local e=t[1]*1000000+t[2]+100000 "
        "repeat t=redis.call('time') until t[1]*1000000+t[2]>e"
    )
    hold = subprocess.Popen(
        ["redis-cli", "-h", redis.host, "-p", str(redis.port), "-r", "20", "eval", busy, "0"],
        stdout=subprocess.DEVNULL,
    )
    found = [look(there, "k" * (number + 1)) for number in range(10)]
    hold.wait()
    assert any(found)
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
    redis.ask("hset", row("evicted long ago"), here.incarnation, "4096+400")
    redis.ask("hset", row("another life"), "1" * 32, "0+1000")
    redis.ask("hset", row("a dead node"), "2" * 32, "0+1000")
    redis.ask("hset", row("nonsense"), "3" * 32, "", "no incarnation at all", "x")
    places = ["-1+5", "+", "1e3+7", "99999999999999999+999", "9" * 400 + "+1", "0+0"]
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
    time.sleep(1.1)  # the row of another type made Redis answer with an error
    store(here, "k")
    redis.ask("hset", row("k"), "2" * 32, "", "4" * 32, "")
    eventually(lambda: here.incarnation in known(redis, "k"))
    before = b.peers().reads_ahead_used
    assert look(there, "k"), "one right row among wrong ones is enough"
    assert b.peers().reads_ahead_used == before + 1, "the row says where it lies"
    for daemon in (a, b):
        daemon.check_nothing_leaked()


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
    make_redis: Callable[..., RedisServer], make_peer: MakePeer, client_of: ClientOf
) -> None:
    redis = make_redis(options=["--requirepass", "pass"], cli=["-a", "pass"])
    at = f"{redis.host}:{redis.port}"
    a, b = (make_peer(ECD_DIRECTORY=f"redis://:pass@{at}/0").start() for _ in range(2))
    wrong = make_peer(ECD_DIRECTORY=f"redis://:wrong-word@{at}/0").start()
    store(client_of(a), "k")
    eventually(lambda: known(redis, "k") != [])
    assert look(client_of(b), "k")
    assert not look(client_of(wrong), "k")
    assert not wrong.peers().directory.up
    assert "wrong-word" not in wrong.text()


def test_tls(
    make_redis: Callable[..., RedisServer],
    make_peer: MakePeer,
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
    a, b = (make_peer(ECD_DIRECTORY=at).start() for _ in range(2))
    store(client_of(a), "k")
    eventually(lambda: known(redis, "k") != [])
    assert look(client_of(b), "k")


def test_redis_cluster(
    make_redis: Callable[..., RedisServer], make_peer: MakePeer, client_of: ClientOf, tmp_path: Path
) -> None:
    servers = [
        make_redis(options=["--cluster-enabled", "yes", "--cluster-config-file", f"n{i}.conf"])
        for i in range(3)
    ]
    nodes = [f"127.0.0.1:{server.port}" for server in servers]
    servers[0].ask("--cluster", "create", *nodes, "--cluster-yes")
    eventually(lambda: "cluster_state:ok" in servers[0].ask("cluster", "info"), 20)
    at = f"redis+cluster://{nodes[0]}"
    a, b = (make_peer(ECD_DIRECTORY=at).start() for _ in range(2))
    here, there = client_of(a), client_of(b)
    for number in range(30):
        store(here, "k" * (number + 1))
    eventually(lambda: a.peers().directory.unpublished == 0 and a.peers().directory.up, 10)
    assert all(look(there, "k" * (number + 1)) for number in range(30))
    sizes = [int(server.ask("dbsize")) for server in servers]
    assert all(size > 0 for size in sizes), "rows lie on every server of the cluster"
