from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ecd_client import Client
from support.daemon import Daemon, close_all
from support.nodes import Node, NodeClient, NodeDaemon
from support.pairs import PATIENT, start_all
from support.redis import UNHURRIED, RedisServer
from support.waiting import HANG_S

TOKEN = "a secret of the test"
MakePeer = Callable[..., Daemon]
_hosts = itertools.count(2)
_ports = itertools.count()


def as_peer(make_daemon: Callable[..., Daemon], pool: str = "64MiB", **settings: str) -> Daemon:
    """A daemon on a loopback address of its own, which stands for a node. It is patient."""
    node = settings.pop("ECD_PEER_ADDRESS", f"127.0.77.{next(_hosts)}:9465")
    # Its own: a port that was closed rests for a minute. Servers of tests have those from 20000 on,
    # some on all addresses.
    first = 10000 + 16 * next(_ports)
    clustered = {
        "ECD_PEER_ADDRESS": node,
        "ECD_PEER_TOKEN": TOKEN,
        "ECD_HINT_NETWORKS": "127.0.0.0/8",
        "ECD_ENGINE_PORTS": f"{first}-{first + 15}",
        "ECD_WARM_RESTART": "false",  # a node that restarts has lost what it had
        "ECD_FETCH_TIMEOUT_S": f"{HANG_S}",
    }
    daemon = make_daemon(pool, **{**clustered, **settings})
    daemon.peer, daemon.command = node, PATIENT
    return daemon


@pytest.fixture
def make_peer(make_daemon: Callable[..., Daemon]) -> Callable[..., Daemon]:
    return partial(as_peer, make_daemon)


@pytest.fixture(scope="module")
def make_lasting_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Daemon]]:
    """Peers that end with the module."""
    directory, daemons = tmp_path_factory.mktemp("peers"), []

    def make(pool: str, **settings: str) -> Daemon:
        daemons.append(Daemon(directory, pool, **settings))
        return daemons[-1]

    yield partial(as_peer, make)
    close_all(daemons)


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for all tests of a file that neither end, stop nor empty it."""
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    yield redis.start()
    redis.kill()


@pytest.fixture(scope="module")
def shared_pair(make_lasting_peer: MakePeer, shared_redis: RedisServer) -> list[Daemon]:
    """Two nodes with a directory, whose waits end by no time of theirs."""
    about = {"ECD_DIRECTORY": shared_redis.url, "ECD_FETCH_TIMEOUT_S": "600", "ECD_ZONE": "west"}
    pair = [make_lasting_peer("64MiB", **about) for _ in range(2)]
    for daemon in pair:
        daemon.command = UNHURRIED
    start_all(*pair)
    return pair


@pytest.fixture
def unused_pair(shared_pair: list[Daemon]) -> Iterator[list[Daemon]]:
    """The nodes of the file, for one test: before and after it nobody uses them."""
    for daemon in shared_pair:
        daemon.check_unused()
        daemon.wait_idle("settled")
    yield shared_pair
    for daemon in shared_pair:
        daemon.check_unused()


@pytest.fixture
def make_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Servers that end with the test."""
    servers: list[RedisServer] = []

    def make(**about: object) -> RedisServer:
        servers.append(RedisServer(tmp_path, **about))
        return servers[-1].start()

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def redis(make_redis: Callable[..., RedisServer]) -> RedisServer:
    return make_redis()


@pytest.fixture
def client_of() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def client(daemon: Daemon, **about: object) -> Client:
        clients.append(Client(daemon.address, connect_timeout=HANG_S, **about))
        return clients[-1]

    yield client
    for each in clients:
        each.close()


@pytest.fixture
def on_node(tmp_path: Path) -> Iterator[Callable[..., tuple[NodeDaemon, NodeClient]]]:
    """A patient daemon on a node, started, and a client process beside it."""
    daemons: list[NodeDaemon] = []
    clients: list[NodeClient] = []

    def make(node: Node, pool: str = "64MiB", **settings: str) -> tuple[NodeDaemon, NodeClient]:
        daemons.append(NodeDaemon(node, tmp_path, pool, **settings))
        daemons[-1].command = PATIENT
        daemons[-1].start()
        clients.append(NodeClient(daemons[-1]))
        return daemons[-1], clients[-1]

    yield make
    for client in clients:
        client.close()
    close_all(daemons)
