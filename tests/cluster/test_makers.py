"""One client in the cluster makes what no node has: the directory decides, the others wait."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from ecd_client import Client, EntryTooLarge
from ecd_proto.contract import MAKING_S
from support.daemon import Daemon, eventually
from support.redis import PATIENT, RedisServer

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]
Answer = Future["Item | None"]
ports = itertools.count(16700)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, port=next(ports)).start()
    yield server
    server.kill()


@pytest.fixture
def peers(make_peer: MakePeer, redis: RedisServer) -> list[Daemon]:
    return [make_patient(make_peer, redis) for _ in range(2)]


def make_patient(make_peer: MakePeer, redis: RedisServer) -> Daemon:
    daemon = make_peer(ECD_DIRECTORY=f"redis://{redis.host}:{redis.port}/0")
    daemon.command = PATIENT
    return daemon.start()


@pytest.fixture
def clients(peers: list[Daemon], client_of: ClientOf) -> tuple[Client, Client]:
    a, b = map(client_of, peers)
    for daemon in peers:
        eventually(lambda daemon=daemon: daemon.peers().directory.up, 10, "the directory")
    return a, b


def ask(client: Client, *keys: str, waits_s: float | None = MAKING_S) -> list[Answer]:
    """Ask for keys that the client makes; None: it does not."""
    return client.get_async(keys, 5.0, only_if_written=True, makes=[waits_s] * len(keys))


def is_missing(answer: Answer) -> bool:
    """Whether the client is to make the key: it is told so at once."""
    item = answer.result(1.0)
    if item is not None:
        item.close()
    return item is None


def waits(answer: Answer) -> bool:
    time.sleep(0.3)
    return not answer.done()


def store(client: Client, key: str) -> None:
    client.put(key, torch.full((3000,), float(len(key))))


def is_right(answer: Answer, key: str) -> bool:
    with answer.result(5.0) as item:
        return bool((item.tensor == float(len(key))).all())


def test_another_node_waits_for_the_maker_and_gets_what_it_made(
    clients: tuple[Client, Client],
) -> None:
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    [answer] = ask(b, "k")
    assert waits(answer)
    store(a, "k")
    assert is_right(answer, "k")


def test_who_makes_nothing_is_told_at_once(
    peers: list[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    for client in (a, b, client_of(peers[0])):
        assert is_missing(ask(client, "k", waits_s=None)[0])
    store(a, "k")
    eventually(lambda: not is_missing(ask(b, "k", waits_s=None)[0]), 10, "the directory has it")


def test_of_two_that_ask_at_one_time_one_makes_each_key(clients: tuple[Client, Client]) -> None:
    keys = [f"key {'x' * number}" for number in range(200)]
    made = 0
    for start in range(0, len(keys), 20):
        some = keys[start : start + 20]
        answers = [ask(client, *some) for client in clients]
        for key, *both in zip(some, *answers, strict=True):
            eventually(lambda both=both: any(each.done() for each in both), 3, "one of the two")
            maker = 0 if both[0].done() else 1
            assert is_missing(both[maker])
            assert not both[1 - maker].done(), f"{key} is made twice"
            store(clients[maker], key)
            assert is_right(both[1 - maker], key)
            made += 1
    assert made == len(keys)


def test_asked_again_the_maker_is_to_make_it_still(clients: tuple[Client, Client]) -> None:
    for _ in range(3):
        assert is_missing(ask(clients[0], "k")[0])


def test_the_makers_end_is_told_to_those_who_wait_and_one_of_them_makes_it(
    peers: list[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    maker, b, a = client_of(peers[0]), clients[1], clients[0]
    assert is_missing(ask(maker, "k")[0])
    [answer] = ask(b, "k")
    assert waits(answer)
    maker.close()
    assert is_missing(answer)
    [third] = ask(a, "k")
    assert waits(third), "the second makes it now"
    store(b, "k")
    assert is_right(third, "k")


def test_a_dead_node_is_waited_for_no_more(
    peers: list[Daemon], clients: tuple[Client, Client]
) -> None:
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    [answer] = ask(b, "k")
    assert waits(answer)
    peers[0].kill()
    assert is_missing(answer)


def test_a_maker_that_stores_nothing_is_waited_for_no_longer_than_it_may_take(
    clients: tuple[Client, Client],
) -> None:
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    began_s = time.monotonic()
    [answer] = ask(b, "k")
    assert answer.result(MAKING_S + 1.0) is None
    assert time.monotonic() - began_s > MAKING_S / 2


def test_who_makes_a_key_in_any_case_waits_for_nobody(
    peers: list[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    (a, b), neighbour = clients, client_of(peers[1])
    assert is_missing(ask(a, "k", waits_s=0.0)[0])
    assert is_missing(ask(b, "k", waits_s=0.0)[0])
    assert is_missing(ask(b, "other", waits_s=0.0)[0])
    [answer] = ask(a, "other")
    assert waits(answer), "others wait for it, though"
    [beside] = ask(client_of(peers[0]), "other", waits_s=0.0)
    assert is_missing(beside), "its daemon waits for another node, for another client"
    store(b, "other")
    assert is_right(answer, "other")
    keys = [f"in both orders {number}" for number in range(30)]
    began_s = time.monotonic()
    asked = ask(a, *keys, waits_s=0.0), ask(b, *reversed(keys), waits_s=0.0)
    near = ask(neighbour, *keys, waits_s=0.0)
    assert all(map(is_missing, (*asked[0], *asked[1], *near)))
    assert time.monotonic() - began_s < MAKING_S


def test_a_wait_is_no_longer_than_it_was_asked_for_however_many_make_the_key(
    make_peer: MakePeer, peers: list[Daemon], redis: RedisServer, client_of: ClientOf
) -> None:
    """Each of the nodes stores nothing, and each that has waited makes the key in its turn."""
    everyone = [*peers, *(make_patient(make_peer, redis) for _ in range(2))]
    clients = [client_of(daemon) for daemon in everyone]
    for daemon in everyone:
        eventually(lambda daemon=daemon: daemon.peers().directory.up, 10, "the directory")
    assert is_missing(ask(clients[0], "k")[0])
    began_s = time.monotonic()
    answers = [ask(client, "k")[0] for client in clients[1:]]
    while not all(answer.done() for answer in answers):
        ask(clients[0], "k")  # its making begins anew
        time.sleep(0.2)
    assert time.monotonic() - began_s < 2 * MAKING_S - 0.1
    assert all(map(is_missing, answers))


def test_a_client_takes_back_that_it_makes_a_key(clients: tuple[Client, Client]) -> None:
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    [answer] = ask(b, "k")
    assert waits(answer)
    b.stop_making(["k"])  # which it has not said
    assert waits(answer)
    a.stop_making(["another", "k"])
    assert is_missing(answer)


def test_what_finds_no_room_is_waited_for_no_more(
    peers: list[Daemon], clients: tuple[Client, Client], client_of: ClientOf
) -> None:
    a, b = clients
    worker = client_of(peers[0])  # in an engine another session stores than the one that asks
    assert is_missing(ask(a, "k")[0])
    [answer] = ask(b, "k")
    assert waits(answer)
    with pytest.raises(EntryTooLarge):
        worker.put("k", torch.zeros(1 << 30, dtype=torch.uint8))
    assert is_missing(answer)


def test_nobody_waits_for_makers_without_a_directory_of_all(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    names = ["127.0.78.1:9465", "127.0.78.2:9465"]
    a, b = (
        client_of(make_peer(ECD_PEER_ADDRESS=name, ECD_PEERS=",".join(names)).start())
        for name in names
    )
    for number, how in enumerate((MAKING_S, 0.0, None)):
        assert is_missing(ask(a, str(number))[0])
        assert is_missing(ask(b, str(number), waits_s=how)[0])
        [hinted] = b.get_async([str(number)], 5.0, only_if_written=True, nodes=[[names[0]]])
        assert is_missing(hinted)


def test_lookups_go_on_where_redis_takes_no_claims(
    clients: tuple[Client, Client], redis: RedisServer, peers: list[Daemon]
) -> None:
    a, b = clients
    for number in range(10):
        store(a, f"stored {number}")
    eventually(lambda: redis.ask("dbsize") == "14", 10, "ten rows, and two nodes by two names")
    redis.ask("config", "set", "maxmemory", "1")
    for number in range(10):
        assert is_missing(ask(b, f"new {number}")[0])
        assert is_right(ask(b, f"stored {number}")[0], f"stored {number}")


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
    garbage: tuple[str, ...], clients: tuple[Client, Client], redis: RedisServer
) -> None:
    digest = hashlib.sha256(b"default\0k").hexdigest()[:32]
    redis.ask(*(f"ecd:default:m:{digest}" if word == "KEY" else word for word in garbage))
    a, b = clients
    assert is_missing(ask(a, "k")[0])
    store(a, "k")
    eventually(lambda: not is_missing(ask(b, "k", waits_s=None)[0]), 10, "the directory has it")


def test_without_its_directory_each_node_makes_the_key(
    clients: tuple[Client, Client], redis: RedisServer
) -> None:
    redis.kill()
    for client in clients:
        assert is_missing(ask(client, "k")[0])


def test_a_silent_directory_costs_the_time_of_a_lookup(
    make_peer: MakePeer, client_of: ClientOf, redis: RedisServer
) -> None:
    at = f"redis://{redis.host}:{redis.port}/0"
    peers = [make_peer(ECD_DIRECTORY=at).start() for _ in range(2)]
    clients = [client_of(daemon) for daemon in peers]
    for daemon in peers:
        eventually(lambda daemon=daemon: daemon.peers().directory.up, 10, "the directory")
    redis.stop()
    try:
        for client in clients:
            assert is_missing(ask(client, "k")[0])
    finally:
        redis.go_on()
