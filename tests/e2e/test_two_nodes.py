"""A producer on one machine, a consumer on another: no path for data but the network."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.engines import Engine, installed
from e2e.test_one_encode import holds_three_times
from e2e.test_one_node import PICTURES, REQUESTS, ask, tokens
from support.daemon import eventually
from support.nodes import Node, NodeDaemon
from support.redis import PATIENT, RedisServer

pytestmark = pytest.mark.timeout(600)
ENGINE = {"block_size": 32}  # what vLLM's KV example connector needs on a CPU
ENVIRON = {"VLLM_HOST_IP": "127.0.0.1"}
seeds = itertools.count(5000)


def redrawn(requests: list[dict]) -> list[dict]:
    """The same requests with other pictures: an engine keeps some of what it encoded."""
    offset = next(seeds) * 10
    return [{**r, "images": [[w, h, n + offset] for w, h, n in r["images"]]} for r in requests]


def fresh(count: int) -> list[dict]:
    """Requests for pictures that nobody has seen."""
    return [
        {"text": "what is in this picture?", "images": [[336, 224, next(seeds)]]}
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def version() -> str:
    """Two nodes are tried with the newer vLLM."""
    return installed("0.32.0")


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    near, far = Node(11), Node(12)
    try:
        near.plug(far)
        yield near, far
    finally:
        near.close()
        far.close()


@pytest.fixture(scope="module")
def daemons(
    nodes: tuple[Node, Node], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[NodeDaemon, NodeDaemon]]:
    """A daemon on each node, not started: tests choose how they find each other."""
    directory = tmp_path_factory.mktemp("daemons")
    made = NodeDaemon(nodes[0], directory), NodeDaemon(nodes[1], directory)
    for daemon in made:
        daemon.command = PATIENT
    yield made
    for daemon in made:
        daemon.close()


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(**ENGINE)


@pytest.fixture(scope="module")
def producer(daemons: tuple[NodeDaemon, NodeDaemon], start_engine: Callable[..., Engine]) -> Engine:
    return start_engine("ec_producer", daemon=daemons[0], environ=ENVIRON, **ENGINE)


@pytest.fixture(scope="module")
def consumer(daemons: tuple[NodeDaemon, NodeDaemon], start_engine: Callable[..., Engine]) -> Engine:
    return start_engine("ec_consumer", daemon=daemons[1], environ=ENVIRON, **ENGINE)


@pytest.fixture
def redis(nodes: tuple[Node, Node], tmp_path: Path) -> Iterator[RedisServer]:
    """On the producer's machine."""
    server = RedisServer(
        tmp_path,
        host=nodes[0].address,
        port=6379,
        options=["--protected-mode", "no"],
        prefix=nodes[0].prefix,
    )
    yield server.start()
    server.kill()


@pytest.fixture
def serving(
    daemons: tuple[NodeDaemon, NodeDaemon],
    producer: Engine,
    consumer: Engine,
    plain: Engine,
) -> Callable[..., tuple[NodeDaemon, NodeDaemon]]:
    """Both daemons anew and empty, on the addresses that the engines know."""
    for engine in (producer, consumer, plain):
        engine.wait_ready()

    def start(**settings: str) -> tuple[NodeDaemon, NodeDaemon]:
        for daemon in daemons:
            daemon.close()
            for name in ("ECD_PEERS", "ECD_DIRECTORY"):
                daemon._settings.pop(name, None)
            daemon._settings |= settings
            daemon.start()
        for daemon in daemons:
            daemon.wait_for_clients(2)
        return daemons

    return start


@pytest.mark.parametrize("directory", ["redis", "static", "none"])
def test_the_consumer_uses_what_another_machine_encoded(
    directory: str,
    serving: Callable[..., tuple[NodeDaemon, NodeDaemon]],
    nodes: tuple[Node, Node],
    redis: RedisServer,
    producer: Engine,
    consumer: Engine,
    plain: Engine,
) -> None:
    settings = {
        "redis": {"ECD_DIRECTORY": f"redis://{redis.host}:{redis.port}/0"},
        "static": {"ECD_PEERS": ",".join(node.peer for node in nodes)},
        "none": {},
    }[directory]
    has, wants = serving(**settings)
    assert has.node.run("ls", "/dev/shm") != wants.node.run("ls", "/dev/shm")
    requests = redrawn(REQUESTS)
    expected = plain.generate(requests)
    produced = producer.generate(requests, max_tokens=1)
    assert produced["encoded"] == len(PICTURES)
    eventually(lambda: has.status().entries == len(PICTURES))
    eventually(lambda: has.peers().directory.unpublished == 0)
    if directory == "none":  # what a proxy hands from one engine to the next
        produced = producer.generate(requests, max_tokens=1)  # of what is stored, it says where
        requests = [
            {**request, "ec_transfer_params": output["ec_transfer_params"]}
            for request, output in zip(requests, produced["outputs"], strict=True)
        ]
        with_images = [r["ec_transfer_params"] for r in requests if r["images"]]
        for params in with_images:
            assert all(item["ecd_node"] == has.node.peer for item in params.values())
            assert all(item["ecd_extent"][2] > 0 for item in params.values())
            assert all("metadata" in item for item in params.values())
    consumed = consumer.generate(requests)
    assert tokens(consumed) == tokens(expected)
    assert consumed["encoded"] == 0, "the consumer's encoder ran"
    status = wants.peers()
    assert status.fetches["fetched"] == len(PICTURES)
    [peer] = [peer for peer in status.peers if peer.node == has.node.peer]
    assert peer.reads == len(PICTURES)
    ahead = len(PICTURES)
    assert (status.speculative_reads, status.speculative_reads_used) == (ahead, ahead)
    again = consumer.generate(requests)
    assert (tokens(again), again["encoded"]) == (tokens(expected), 0)
    assert wants.peers().fetches["fetched"] == len(PICTURES), "it is local from then on"
    eventually(lambda: has.status().leases == 0)


def test_offers_travel_ahead_of_the_request(
    serving: Callable[..., tuple[NodeDaemon, NodeDaemon]],
    producer: Engine,
    consumer: Engine,
    plain: Engine,
) -> None:
    _, wants = serving()
    requests = fresh(4)
    offered = {"ecd_consumers": [wants.node.peer]}
    producer.generate([{**r, "ec_transfer_params": offered} for r in requests], max_tokens=1)
    eventually(lambda: wants.status().entries == 4, what="before anybody asked there")
    reply = consumer.generate(requests)
    assert tokens(reply) == tokens(plain.generate(requests))
    assert reply["encoded"] == 0


def test_hints_that_are_nonsense_hurt_nobody(
    serving: Callable[..., tuple[NodeDaemon, NodeDaemon]],
    producer: Engine,
    consumer: Engine,
    plain: Engine,
) -> None:
    serving()
    requests = fresh(6)
    nonsense = [
        {"ecd_consumers": 7, "x": None},
        {"ecd_consumers": ["", "a b", "10.77.0.200:1", None] * 50},
        {"ec_items": [1, {"mm_hash": 3}, {"mm_hash": "x", "ecd_node": 5}]},
        {"ec_items": "x", "y": {"ecd_node": "10.77.0.200:9465", "ecd_extent": [0, -1, 2.5]}},
        {"y": {"ecd_node": "10.77.0.1:9465", "ecd_extent": [1 << 32, 0, 1]}},
        {
            "ec_items": [
                {"mm_hash": "x", "ecd_node": "10.77.0.1:9465", "ecd_extent": [0, 0, (1 << 64) - 1]}
            ]
        },
    ]
    asked = [{**r, "ec_transfer_params": p} for r, p in zip(requests, nonsense, strict=True)]
    expected = tokens(plain.generate(requests))
    assert tokens(producer.generate(asked)) != []
    assert tokens(consumer.generate(asked)) == expected
    assert producer.alive
    assert consumer.alive


def test_a_machine_that_is_gone_costs_an_encoder_run(
    serving: Callable[..., tuple[NodeDaemon, NodeDaemon]],
    nodes: tuple[Node, Node],
    producer: Engine,
    consumer: Engine,
    plain: Engine,
) -> None:
    has, _ = serving(ECD_PEERS=",".join(node.peer for node in nodes))
    requests = fresh(6)
    producer.generate(requests, max_tokens=1)
    eventually(lambda: has.status().entries == 6)
    expected = tokens(plain.generate(requests))
    first = consumer.generate(requests[:2])
    assert (tokens(first), first["encoded"]) == (expected[:2], 0)
    has.kill()
    second = consumer.generate(requests[2:4])
    assert (tokens(second), second["encoded"]) == (expected[2:4], 2)
    has.start()
    nodes[0].cable(up=False)
    try:
        third = consumer.generate(requests[4:])
        assert (tokens(third), third["encoded"]) == (expected[4:], 2)
    finally:
        nodes[0].cable(up=True)
    assert consumer.alive


def test_encoder_prefill_and_decode_are_three_engines(
    serving: Callable[..., tuple[NodeDaemon, NodeDaemon]],
    nodes: tuple[Node, Node],
    daemons: tuple[NodeDaemon, NodeDaemon],
    plain: Engine,
    start_engine: Callable[..., Engine],
    tmp_path: Path,
) -> None:
    """Embeddings by ecd between machines, KV by vLLM's own file connector on the second one.

    The encoder's answers name no node, for routers that compare those of several.
    """
    has, _ = serving(ECD_PEERS=",".join(node.peer for node in nodes))
    silent = {"ecd_announce_node": False}
    producer = start_engine(
        "ec_producer", extra=silent, daemon=daemons[0], environ=ENVIRON, **ENGINE
    )
    kv = str(tmp_path / "kv")
    prefill, decode = (
        start_engine("ec_consumer", daemon=daemons[1], environ=ENVIRON, kv=kv, **ENGINE)
        for _ in range(2)
    )
    requests = [ask("what is in this picture?", "wide"), ask("and the other", "tall", "small")]
    requests = redrawn(requests)
    expected = plain.generate(requests)
    produced = producer.generate(requests, max_tokens=1)
    assert produced["encoded"] == 3
    for output in produced["outputs"]:
        assert len(output["ec_transfer_params"]) > 0
        assert not any("ecd_node" in each for each in output["ec_transfer_params"].values())
    eventually(lambda: has.status().entries == 3)
    first = prefill.generate(requests, max_tokens=1)
    assert first["encoded"] == 0
    assert [t[:1] for t in tokens(expected)] == tokens(first)
    last = decode.generate(requests)
    assert tokens(last) == tokens(expected)
    assert last["encoded"] == 0
    assert "External Cache Hit" in decode.text(), "the prompt's KV was loaded, not computed"


@pytest.fixture(scope="module")
def both(
    daemons: tuple[NodeDaemon, NodeDaemon], start_engine: Callable[..., Engine]
) -> tuple[Engine, Engine]:
    """An engine on each machine that does all."""
    near, far = (
        start_engine("ec_both", daemon=daemon, environ=ENVIRON, **ENGINE) for daemon in daemons
    )
    return near.wait_ready(), far.wait_ready()


def test_two_machines_that_need_a_new_picture_at_one_time_encode_it_once(
    both: tuple[Engine, Engine],
    daemons: tuple[NodeDaemon, NodeDaemon],
    redis: RedisServer,
    plain: Engine,
) -> None:
    for daemon in daemons:
        daemon.close()
        daemon._settings.pop("ECD_PEERS", None)
        daemon._settings["ECD_DIRECTORY"] = f"redis://{redis.host}:{redis.port}/0"
        daemon.start()
    for daemon in daemons:
        eventually(lambda daemon=daemon: daemon.status().sessions >= 2, 20, "the engines")
        eventually(lambda daemon=daemon: daemon.peers().directory.up, 20, "the directory")
    for engine in both:  # the first time takes long
        engine.generate(fresh(1))

    def is_encoded_once() -> bool:
        [request] = fresh(1)
        requests = [{**request, "text": f"what is in picture {number}?"} for number in range(4)]
        for engine in both:
            engine.send({"do": "generate", "requests": requests, "encode_s": 0.25})
        replies = [engine.receive() for engine in both]
        expected = tokens(plain.generate(requests))
        assert [tokens(reply) for reply in replies] == [expected, expected]
        return sum(reply["encoded"] for reply in replies) == 1

    holds_three_times(is_encoded_once)
    several = [{"text": "and here?", "images": [[336, 224, next(seeds)] for _ in range(3)]}]
    turned = [{**several[0], "images": several[0]["images"][::-1]}]
    for engine, requests in zip(both, (several, turned), strict=True):
        engine.send({"do": "generate", "requests": requests, "encode_s": 0.25})
    for engine, requests in zip(both, (several, turned), strict=True):
        reply = engine.receive()
        assert reply["seconds"] < 10, "neither may wait for the other, which waits for it"
        assert tokens(reply) == tokens(plain.generate(requests))
