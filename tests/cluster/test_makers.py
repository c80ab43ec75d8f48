"""One client in the cluster makes what no node has: a process that dies, a Redis that is full.

No wait for a maker ends by time: the maker ends it, or the test hangs. `simulation/test_makers.py`
has who waits for whom, and how long.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
import torch

from ecd_client import Client
from support.daemon import Daemon
from support.pairs import start_all
from support.processes import child
from support.redis import LONG_PATIENT, RedisServer
from support.waiting import HANG_S, eventually

MakePeer = Callable[..., Daemon]
Answer = Future["Item | None"]
LONG_S = 600.0
MAKER = """
import signal, sys
from ecd_client import Client

client = Client(sys.argv[1], namespace=sys.argv[2], connect_timeout=60)
assert client.lock("k", 600)
[answer] = client.get_async(["k"], 600, only_if_written=True, makes=[600])
print(answer.result(), flush=True)
signal.pause()
"""


@pytest.fixture
def peers(make_peer: MakePeer, redis: RedisServer) -> list[Daemon]:
    about = {"ECD_DIRECTORY": redis.url, "ECD_FETCH_TIMEOUT_S": str(LONG_S)}
    daemons = [make_peer(**about) for _ in range(2)]
    for daemon in daemons:
        daemon.command = LONG_PATIENT
    start_all(*daemons)
    for daemon in daemons:
        daemon.wait_idle("settled")
    return daemons


@pytest.fixture
def clients(
    peers: list[Daemon], client_of: Callable[..., Client], request: pytest.FixtureRequest
) -> tuple[Client, Client]:
    a, b = (client_of(daemon, namespace=request.node.name) for daemon in peers)
    return a, b


def ask(client: Client, key: str) -> Answer:
    """Ask for a key that the client makes if no node has it."""
    [answer] = client.get_async([key], LONG_S, only_if_written=True, makes=[LONG_S])
    return answer


def is_missing(answer: Answer) -> bool:
    """Whether the client is to make the key."""
    item = answer.result(HANG_S)
    if item is not None:
        item.close()
    return item is None


def waits_at(maker: Daemon, answer: Answer) -> bool:
    """Whether this one waits for a client of the maker, once one does."""
    eventually(lambda: maker.status().waits == 1, "another waits for the maker")
    return not answer.done()


def store(client: Client, key: str) -> None:
    client.put(key, torch.full((3000,), float(len(key))))


def is_right(answer: Answer, key: str) -> bool:
    with answer.result(HANG_S) as item:
        return bool((item.tensor == float(len(key))).all())


def test_a_maker_that_is_killed_is_waited_for_no_more(
    peers: Sequence[Daemon], clients: tuple[Client, Client]
) -> None:
    a, b = clients
    command = [sys.executable, "-c", MAKER, a.address, a.namespace]
    with child(command, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout.readline() == "None\n"
        answer = ask(b, "k")
        assert is_missing(ask(a, "passing"))
        assert is_missing(ask(b, "passing"))
        assert waits_at(peers[0], answer)
        assert b.lock("k", LONG_S)
        maker.kill()
        assert is_missing(answer)
    third = ask(a, "k")
    assert waits_at(peers[1], third), "the second makes it now"
    store(b, "k")
    assert is_right(third, "k")


def test_lookups_go_on_where_redis_takes_no_notes_and_without_it_each_node_makes_the_key(
    peers: Sequence[Daemon], clients: tuple[Client, Client], redis: RedisServer
) -> None:
    a, b = clients
    for number in range(10):
        store(a, f"stored {number}")
    peers[0].wait_idle("settled")
    redis.ask("config", "set", "maxmemory", "1")
    for number in range(10):
        assert is_missing(ask(b, f"new {number}"))
        assert is_right(ask(b, f"stored {number}"), f"stored {number}")
    redis.kill()
    for client in (a, b):
        assert is_missing(ask(client, "k"))
