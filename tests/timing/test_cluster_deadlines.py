"""How long nodes wait for Redis, for a peer and for a client that makes a key."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from cluster import conftest
from ecd.live.live import SCAN_S
from ecd_client import Client
from ecd_proto.contract import MAKING_S
from support.daemon import Daemon
from support.pairs import start_all
from support.redis import PATIENT, RedisServer
from support.waiting import HANG_S, eventually
from timing.conftest import Figure

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]
make_peer, client_of = conftest.make_peer, conftest.client_of
make_redis, redis = conftest.make_redis, conftest.redis


def peers(make_peer: MakePeer, redis: RedisServer, count: int, command: tuple = ()) -> list[Daemon]:
    daemons = [make_peer(ECD_DIRECTORY=redis.url) for _ in range(count)]
    for daemon in daemons:
        daemon.command = command or daemon.command
    start_all(*daemons)
    for daemon in daemons:
        daemon.wait_idle("settled")
    return daemons


def took_s(act: Callable[[], object]) -> float:
    started_s = time.monotonic()
    act()
    return time.monotonic() - started_s


def miss(client: Client, *keys: str, makes: float | None = None, nodes: list[str] = ()) -> float:
    """The seconds until no node has these keys."""

    def ask() -> None:
        about = {"makes": [makes] * len(keys), "nodes": [list(nodes)] * len(keys)}
        founds = client.get_async(keys, HANG_S, only_if_written=True, **about)
        assert [found.result(HANG_S) for found in founds] == [None] * len(keys)

    return took_s(ask)


def test_redis_stands_still(
    make_peer: MakePeer, redis: RedisServer, client_of: ClientOf, figure: Figure
) -> None:
    [daemon] = peers(make_peer, redis, 1)
    client = client_of(daemon)
    with redis.stopped():
        seconds = [miss(client, f"k{number}") for number in range(20)]
        figure("a miss, median", median(seconds), "s", "0.0: Redis is not asked for a second")
        figure("a miss, longest", max(seconds), "s", "0.25: the time of a lookup")
        eventually(lambda: miss(client, "made", makes=MAKING_S) > 0.2, "Redis is asked again")
        located_s = took_s(lambda: client.locate(["k"]))
        figure("locate", located_s, "s", "0.0: Redis is not asked for a second")

    def up_s() -> float:
        return took_s(lambda: eventually(lambda: client.locate(["k"]) and is_up(daemon)))

    figure("until it is up again", up_s(), "s", "0.5 to 1.1: not the five of a beat")


def is_up(daemon: Daemon) -> bool:
    return daemon.peers().directory.up


def test_hints_wait_no_longer_for_redis_than_one_lookup_does(
    make_peer: MakePeer, redis: RedisServer, client_of: ClientOf, figure: Figure
) -> None:
    daemon = make_peer(ECD_DIRECTORY=redis.url, ECD_HINT_NETWORKS="").start()
    daemon.wait_idle("settled")
    client, hints = client_of(daemon), [f"127.0.77.1:{number}" for number in range(1, 9)]
    with redis.stopped():
        seconds = miss(client, *(f"k{number}" for number in range(64)), nodes=hints)
    figure("64 keys with 8 hints each", seconds, "s", "0.25 to 0.6, not a lookup for each hint")


def test_an_engine_that_encodes_does_not_wait_for_a_silent_redis(
    make_peer: MakePeer, redis: RedisServer, client_of: ClientOf, figure: Figure
) -> None:
    [daemon] = peers(make_peer, redis, 1)
    with redis.stopped():
        seconds = miss(client_of(daemon), "k", makes=0.0)
    figure("a miss", seconds, "s", "0.25: the time of a lookup")


def test_a_dead_peer_of_two_is_asked_where_a_key_is(
    make_peer: MakePeer, client_of: ClientOf, figure: Figure
) -> None:
    there = make_peer().start()
    here = make_peer(ECD_PEERS=f"{there.peer},127.0.78.3:9465").start()
    client = client_of(here)
    seconds = took_s(lambda: client.locate(["k"]))
    assert client.locate(["k"]).is_partial
    figure("locate", seconds, "s", "below 1: LOCATE_S")


def test_makers_that_store_nothing(
    make_peer: MakePeer, redis: RedisServer, client_of: ClientOf, figure: Figure
) -> None:
    """Each that has waited makes the key in its turn; the first begins it anew all the time."""
    clients = [client_of(daemon) for daemon in peers(make_peer, redis, 4, PATIENT)]
    miss(clients[0], "alone", makes=MAKING_S)
    seconds = miss(clients[1], "alone", makes=HANG_S)
    figure("a wait for one", seconds, "s", f"{MAKING_S}, or {SCAN_S} more: it locks no key")
    miss(clients[0], "k", makes=MAKING_S)
    started_s = time.monotonic()
    answers = [
        client.get_async(["k"], HANG_S, only_if_written=True, makes=[MAKING_S])[0]
        for client in clients[1:]
    ]
    while not all(answer.done() for answer in answers):
        miss(clients[0], "k", makes=0.0)
        time.sleep(0.2)
    seconds = time.monotonic() - started_s
    assert [answer.result(HANG_S) for answer in answers] == [None] * 3
    figure("a wait for several", seconds, "s", f"{MAKING_S}: as long as it was asked for")
