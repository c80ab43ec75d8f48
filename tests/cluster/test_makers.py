"""One client in the cluster makes what no node has: the directory decides, the others wait.

Unless a test says so, no wait for a maker ends by time: the maker ends it, or the test hangs.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from ecd_client import Client, EntryTooLarge
from support.daemon import Daemon
from support.pairs import start_all
from support.processes import child
from support.redis import LONG_PATIENT, UNHURRIED, RedisServer
from support.waiting import HANG_S, eventually

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]
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
def peers(unused_pair: list[Daemon]) -> list[Daemon]:
    return unused_pair


@pytest.fixture
def own_peers(make_peer: MakePeer, redis: RedisServer) -> list[Daemon]:
    return with_directory(make_peer, redis, UNHURRIED)


def with_directory(
    make_peer: MakePeer, redis: RedisServer, command: tuple[str, ...]
) -> list[Daemon]:
    about = {"ECD_DIRECTORY": redis.url, "ECD_FETCH_TIMEOUT_S": str(LONG_S)}
    daemons = [make_peer(**about) for _ in range(2)]
    for daemon in daemons:
        daemon.command = command
    start_all(*daemons)
    for daemon in daemons:
        daemon.wait_idle("settled")
    return daemons


@pytest.fixture
def client_of(client_of: Callable[..., Client], request: pytest.FixtureRequest) -> ClientOf:
    return partial(client_of, namespace=request.node.name)


@pytest.fixture
def clients(peers: list[Daemon], client_of: ClientOf) -> tuple[Client, Client]:
    a, b = map(client_of, peers)
    return a, b


def ask(client: Client, *keys: str, waits_s: float | None = LONG_S) -> list[Answer]:
    """Ask for keys that the client makes; None: it does not."""
    return client.get_async(keys, LONG_S, only_if_written=True, makes=[waits_s] * len(keys))


def is_missing(answer: Answer) -> bool:
    """Whether the client is to make the key."""
    item = answer.result(HANG_S)
    if item is not None:
        item.close()
    return item is None


def waits_at(maker: Daemon, *answers: Answer) -> bool:
    """Whether these wait for a client of the maker, once as many do."""
    eventually(lambda: maker.status().waits == len(answers), "others wait for the maker")
    return not any(answer.done() for answer in answers)


def store(client: Client, key: str) -> None:
    client.put(key, torch.full((3000,), float(len(key))))


def is_right(answer: Answer, key: str) -> bool:
    with answer.result(HANG_S) as item:
        return bool((item.tensor == float(len(key))).all())


def is_known(client: Client, key: str) -> bool:
    return not is_missing(ask(client, key, waits_s=None)[0])


def test_another_node_waits_for_the_maker_and_gets_what_it_made(
    peers: Sequence[Daemon], clients: tuple[Client, Client]
) -> None:
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    [answer] = ask(b, "k")
    assert waits_at(peers[0], answer)
    store(a, "k")
    assert is_right(answer, "k")


def test_who_makes_nothing_is_told_at_once(
    peers: Sequence[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    for client in (a, b, client_of(peers[0])):
        assert is_missing(ask(client, "k", waits_s=None)[0])
    store(a, "k")
    eventually(lambda: is_known(b, "k"), "the directory has it")


def test_of_two_that_ask_at_one_time_one_makes_each_key(clients: tuple[Client, Client]) -> None:
    keys = [f"key {'x' * number}" for number in range(200)]
    for start in range(0, len(keys), 20):
        some = keys[start : start + 20]
        answers = [ask(client, *some) for client in clients]
        for key, *both in zip(some, *answers, strict=True):
            eventually(lambda both=both: any(each.done() for each in both), "one of the two")
            maker = 0 if both[0].done() else 1
            assert is_missing(both[maker])
            assert not both[1 - maker].done(), f"{key} is made twice"
            store(clients[maker], key)
            assert is_right(both[1 - maker], key)


def test_asked_again_the_maker_is_to_make_it_still(clients: tuple[Client, Client]) -> None:
    for _ in range(3):
        assert is_missing(ask(clients[0], "k")[0])


def test_the_makers_end_is_told_to_those_who_wait_and_one_of_them_makes_it(
    peers: Sequence[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    maker, b, a = client_of(peers[0]), clients[1], clients[0]
    assert is_missing(ask(maker, "k")[0])
    [answer] = ask(b, "k")
    assert waits_at(peers[0], answer)
    maker.close()
    assert is_missing(answer)
    [third] = ask(a, "k")
    assert waits_at(peers[1], third), "the second makes it now"
    store(b, "k")
    assert is_right(third, "k")


def test_a_dead_node_is_waited_for_no_more(
    own_peers: Sequence[Daemon], client_of: ClientOf
) -> None:
    a, b = map(client_of, own_peers)
    assert is_missing(ask(a, "k")[0])
    [answer] = ask(b, "k")
    assert waits_at(own_peers[0], answer)
    own_peers[0].kill()
    assert is_missing(answer)


def test_a_maker_is_waited_for_as_long_as_it_locks_the_key(
    make_peer: MakePeer, redis: RedisServer, client_of: ClientOf
) -> None:
    """MAKING_S is as shipped: makers that lock nothing and store nothing let it pass."""
    peers = with_directory(make_peer, redis, LONG_PATIENT)
    a, b = map(client_of, peers)
    for key in ("stored", "unlocked"):
        assert a.lock(key, LONG_S)
        assert is_missing(ask(a, key)[0])
    stored, unlocked = ask(b, "stored")[0], ask(b, "unlocked")[0]
    for number in range(4):
        assert is_missing(ask(a, f"passing {number}")[0])
        assert is_missing(ask(b, f"passing {number}")[0])
    assert waits_at(peers[0], stored, unlocked)
    assert all(map(b.is_made_elsewhere, ("stored", "unlocked")))
    assert not a.is_made_elsewhere("stored")
    store(a, "stored")
    assert is_right(stored, "stored")
    a.unlock("unlocked")
    assert is_missing(unlocked)
    assert not any(map(b.is_made_elsewhere, ("stored", "unlocked")))


def test_a_maker_that_is_killed_is_waited_for_no_more(
    make_peer: MakePeer, redis: RedisServer, client_of: ClientOf
) -> None:
    peers = with_directory(make_peer, redis, LONG_PATIENT)
    a, b = map(client_of, peers)
    command = [sys.executable, "-c", MAKER, a.address, a.namespace]
    with child(command, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout.readline() == "None\n"
        [answer] = ask(b, "k")
        assert is_missing(ask(a, "passing")[0])
        assert is_missing(ask(b, "passing")[0])
        assert waits_at(peers[0], answer)
        assert b.lock("k", LONG_S)
        maker.kill()
        assert is_missing(answer)
    [third] = ask(a, "k")
    assert waits_at(peers[1], third), "the second makes it now"
    store(b, "k")
    assert is_right(third, "k")


def test_a_call_may_end_before_the_maker_and_its_client_sees_that(
    peers: Sequence[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    [answer] = b.get_async(["k"], 0.2, only_if_written=True, makes=[LONG_S])
    assert is_missing(answer)
    eventually(lambda: b.is_made_elsewhere("k"), "its daemon waits on")
    assert client_of(peers[1]).is_made_elsewhere("k")
    assert is_missing(ask(b, "k", waits_s=0.0)[0]), "it makes the key in any case"
    store(a, "k")
    eventually(lambda: b.is_shown("k"), "it comes to who has waited")
    eventually(lambda: not b.is_made_elsewhere("k"), "the end of the wait")


def test_who_makes_a_key_in_any_case_waits_for_nobody(
    peers: Sequence[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    (a, b), neighbour = clients, client_of(peers[1])
    assert is_missing(ask(a, "k", waits_s=0.0)[0])
    assert is_missing(ask(b, "k", waits_s=0.0)[0])
    assert is_missing(ask(b, "other", waits_s=0.0)[0])
    [answer] = ask(a, "other")
    assert waits_at(peers[1], answer), "others wait for it, though"
    [beside] = ask(client_of(peers[0]), "other", waits_s=0.0)
    assert is_missing(beside), "its daemon waits for another node, for another client"
    store(b, "other")
    assert is_right(answer, "other")
    keys = [f"in both orders {number}" for number in range(30)]
    asked = ask(a, *keys, waits_s=0.0), ask(b, *reversed(keys), waits_s=0.0)
    near = ask(neighbour, *keys, waits_s=0.0)
    assert all(map(is_missing, (*asked[0], *asked[1], *near)))


def test_a_wait_is_no_longer_than_it_was_asked_for(clients: tuple[Client, Client]) -> None:
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    assert is_missing(ask(b, "k", waits_s=0.2)[0])


def test_a_client_takes_back_that_it_makes_a_key(
    peers: Sequence[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    (a, b), other = clients, client_of(peers[1])
    assert is_missing(ask(a, "k")[0])
    [answer] = ask(b, "k")
    assert waits_at(peers[0], answer)
    other.stop_making(["k"])  # which it has not said
    assert other.locate(["k"]).holders == [[]]  # answered after it
    assert waits_at(peers[0], answer)
    a.stop_making(["another", "k"])
    assert is_missing(answer)


def test_a_node_waits_no_longer_than_its_client_makes_the_key(
    peers: Sequence[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    (a, b), leaves = clients, client_of(peers[1])
    for key, client in (("taken back", b), ("left", leaves)):
        assert is_missing(ask(a, key)[0])
        [answer] = ask(client, key)
        eventually(lambda key=key: b.is_made_elsewhere(key), "its node waits")
        if client is b:
            b.stop_making([key])
            assert is_missing(answer)
        else:
            leaves.close()
        eventually(lambda key=key: not b.is_made_elsewhere(key), "its node waits no more")


def test_what_finds_no_room_is_waited_for_no_more(
    peers: Sequence[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    a, b = clients
    worker = client_of(peers[0])  # in an engine another session stores than the one that asks
    assert is_missing(ask(a, "k")[0])
    [answer] = ask(b, "k")
    assert waits_at(peers[0], answer)
    with pytest.raises(EntryTooLarge):
        worker.put("k", torch.zeros(1 << 30, dtype=torch.uint8))
    assert is_missing(answer)


def test_nobody_waits_for_makers_without_a_directory_of_all(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    names = ["127.0.78.1:9465", "127.0.78.2:9465"]
    both = [make_peer(ECD_PEER_ADDRESS=name, ECD_PEERS=",".join(names)) for name in names]
    for daemon in both:
        daemon.command = UNHURRIED
    start_all(*both)
    a, b = map(client_of, both)
    for number, how in enumerate((LONG_S, 0.0, None)):
        assert is_missing(ask(a, str(number))[0])
        assert is_missing(ask(b, str(number), waits_s=how)[0])
        [hinted] = b.get_async([str(number)], LONG_S, only_if_written=True, nodes=[[names[0]]])
        assert is_missing(hinted)


def test_lookups_go_on_where_redis_takes_no_claims_and_without_it_each_node_makes_the_key(
    own_peers: Sequence[Daemon], client_of: ClientOf, redis: RedisServer
) -> None:
    a, b = map(client_of, own_peers)
    for number in range(10):
        store(a, f"stored {number}")
    own_peers[0].wait_idle("settled")
    redis.ask("config", "set", "maxmemory", "1")
    for number in range(10):
        assert is_missing(ask(b, f"new {number}")[0])
        assert is_right(ask(b, f"stored {number}")[0], f"stored {number}")
    redis.kill()
    for client in (a, b):
        assert is_missing(ask(client, "k")[0])


@pytest.mark.parametrize(
    "garbage",
    [
        ("set", "KEY", "x" * 100_000),
        ("set", "KEY", "0" * 32),
        ("set", "KEY", ""),
        ("hset", "KEY", "a", "b"),
        ("set", "KEY", "\udcff\udcfe" * 16),
    ],
    ids=["long", "unknown", "empty", "hash", "bytes"],
)
def test_a_claim_that_is_not_ours_costs_nothing(
    garbage: tuple[str, ...],
    clients: tuple[Client, Client],
    shared_redis: RedisServer,
    request: pytest.FixtureRequest,
) -> None:
    digest = hashlib.sha256(f"{request.node.name}\0k".encode()).hexdigest()[:32]
    claim = f"ecd:default:m:{digest}"
    shared_redis.ask(*(claim if word == "KEY" else word for word in garbage))
    assert shared_redis.ask("exists", claim) == "1"
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    store(a, "k")
    eventually(lambda: is_known(b, "k"), "the directory has it")
