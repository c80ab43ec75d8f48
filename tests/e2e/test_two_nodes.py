"""A producer on one machine, a consumer on another: no path for data but the network."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EAGER, HERE, SPREAD, Engine, Fork
from e2e.gates import Gate
from e2e.servers import free_port
from e2e.shared import Engines, Pictures, Plain, await_sessions, constants, tokens
from e2e.test_one_node import PICTURES, REQUESTS, ask
from support.daemon import node_of
from support.nodes import Node, NodeClient, NodeDaemon
from support.redis import LONG_PATIENT, UNHURRIED, RedisServer
from support.waiting import HANG_S, eventually

pytestmark = pytest.mark.timeout(600)
ENGINE = {"block_size": 32}  # what vLLM's KV example connector needs on a CPU
ENVIRON = {"VLLM_HOST_IP": "127.0.0.1"}


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
    about = {"ECD_FETCH_TIMEOUT_S": f"{HANG_S}"}
    made = NodeDaemon(nodes[0], directory, **about), NodeDaemon(nodes[1], directory, **about)
    for daemon in made:
        daemon.command = UNHURRIED
    yield made
    for daemon in made:
        daemon.close()


@pytest.fixture
def plain(version: str, engines: Engines) -> Plain:
    return Plain(engines, version, **ENGINE)


Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def start_there(version: str, engines: Engines) -> Iterator[Start]:
    """Engines on the nodes, which end with the module."""
    started: list[Engine] = []

    def start(role: str, daemon: NodeDaemon, **how: Any) -> Engine:
        started.append(
            engines.start(version, role, daemon=daemon, environ=ENVIRON, **how, **ENGINE)
        )
        return started[-1]

    yield start
    with ThreadPoolExecutor() as side:
        list(side.map(Engine.close, started))


@pytest.fixture(scope="module")
def producer(daemons: tuple[NodeDaemon, NodeDaemon], start_there: Start) -> Engine:
    return start_there("ec_producer", daemons[0])


@pytest.fixture(scope="module")
def consumer(daemons: tuple[NodeDaemon, NodeDaemon], start_there: Start) -> Engine:
    return start_there("ec_consumer", daemons[1])


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
) -> Callable[..., tuple[NodeDaemon, NodeDaemon]]:
    """Both daemons anew and empty, on the addresses that the engines know."""

    def start(**settings: str) -> tuple[NodeDaemon, NodeDaemon]:
        for daemon in daemons:
            daemon.close()
            for name in ("ECD_PEERS", "ECD_DIRECTORY"):
                daemon._settings.pop(name, None)
            daemon._settings |= settings
            daemon.start()
        for engine, daemon in zip((producer, consumer), daemons, strict=True):
            await_sessions(engine, daemon)
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
    plain: Plain,
    new: Pictures,
) -> None:
    settings = {
        "redis": {"ECD_DIRECTORY": f"redis://{redis.host}:{redis.port}/0"},
        "static": {"ECD_PEERS": ",".join(node.peer for node in nodes)},
        "none": {},
    }[directory]
    has, wants = serving(**settings)
    assert has.node.run("ls", "/dev/shm") != wants.node.run("ls", "/dev/shm")
    requests = new.redrawn(REQUESTS)
    expected = plain.generate(requests)
    produced = producer.generate(requests, max_tokens=1)
    assert produced["encoded"] == len(PICTURES)
    eventually(lambda: has.status().entries == len(PICTURES))
    has.wait_idle("settled")
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
    hits = consumer.metrics().get("hits", 0)
    consumed = consumer.generate(requests)
    assert tokens(consumed) == tokens(expected)
    assert consumed["encoded"] == 0, "the consumer's encoder ran"
    near, far = has.status().counters, wants.status().counters
    assert (near.misses, near.hits, far.misses) == (len(PICTURES), 0, 0)
    assert (far.hits, far.handed_over) == (consumer.metrics()["hits"] - hits, len(PICTURES))
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
    plain: Plain,
    new: Pictures,
) -> None:
    _, wants = serving()
    requests = new.requests(4)
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
    plain: Plain,
    new: Pictures,
) -> None:
    serving()
    requests = new.requests(6)
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
    plain: Plain,
    new: Pictures,
) -> None:
    has, _ = serving(ECD_PEERS=",".join(node.peer for node in nodes))
    requests = new.requests(6)
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
    plain: Plain,
    start_there: Start,
    tmp_path: Path,
    new: Pictures,
) -> None:
    """Embeddings by ecd between machines, KV by vLLM's own file connector on the second one.

    The encoder's answers name no node, for routers that compare those of several.
    """
    has, _ = serving(ECD_PEERS=",".join(node.peer for node in nodes))
    silent = {"ecd_announce_node": False}
    producer = start_there("ec_producer", daemons[0], extra=silent)
    kv = str(tmp_path / "kv")
    prefill, decode = (start_there("ec_consumer", daemons[1], kv=kv) for _ in range(2))
    await_sessions(producer, daemons[0])
    for engine in (prefill, decode):
        await_sessions(engine, daemons[1])
    requests = [ask("what is in this picture?", "wide"), ask("and the other", "tall", "small")]
    requests = new.redrawn(requests)
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


def test_two_machines_that_need_a_new_picture_at_one_time_encode_it_once(
    start_there: Start,
    daemons: tuple[NodeDaemon, NodeDaemon],
    redis: RedisServer,
    plain: Plain,
    new: Pictures,
    gate: Gate,
) -> None:
    """However long that takes, and however soon a request is late; makings last as shipped."""
    for daemon in daemons:
        daemon.close()
        daemon.command = LONG_PATIENT
        daemon._settings.pop("ECD_PEERS", None)
        daemon._settings["ECD_DIRECTORY"] = f"redis://{redis.host}:{redis.port}/0"
        daemon.start()
    hasty = {"ecd_load_timeout_s": 5.0}
    near, far = (start_there("ec_both", daemon, extra=hasty) for daemon in daemons)
    for engine, daemon in zip((near, far), daemons, strict=True):
        await_sessions(engine, daemon)
        eventually(lambda daemon=daemon: daemon.peers().directory.up, "the directory")
    with constants(near, far, scheduler__encodes__TIMES_WAITED=20 * HANG_S):
        [request] = new.requests(1)
        requests = [{**request, "text": f"what is in picture {number}?"} for number in range(4)]
        expected = tokens(plain.generate(requests))
        near.send({"do": "generate", "requests": requests, "gate": str(gate.path)})
        gate.await_seen(here=1)
        far.send({"do": "generate", "requests": requests, "gate": str(gate.path)})
        gate.await_seen(here=1, waiting=1)
        with (
            contextlib.closing(NodeClient(daemons[0])) as maker,
            contextlib.closing(NodeClient(daemons[1])) as other,
        ):
            for number in range(2):  # a client that makes a key, and does not work on it
                asked = {"key": f"passing {number}", "timeout": HANG_S, "nodes": []}
                for client in (maker, other):
                    assert not client.ask("get", **asked, makes=HANG_S, seed=0)["found"]
        gate.await_seen(here=1, waiting=1)
        gate.open()
        replies = [engine.receive() for engine in (near, far)]
        assert [tokens(reply) for reply in replies] == [expected, expected]
        assert [reply["encoded"] for reply in replies] == [1, 0]

        several = [new.request(3, "and here?")]
        turned = [{**several[0], "images": several[0]["images"][::-1]}]
        for engine, asked in zip((near, far), (several, turned), strict=True):
            engine.send({"do": "generate", "requests": asked})
        for engine, asked in zip((near, far), (several, turned), strict=True):
            # Two that waited for each other would do so for longer than a reply is waited for.
            assert tokens(engine.receive()) == tokens(plain.generate(asked))

        last = new.requests(1)
        gate.shut()
        near.send({"do": "generate", "requests": last, "gate": str(gate.path)})
        gate.await_seen(here=1)
        far.send({"do": "generate", "requests": last, "gate": str(gate.path)})
        gate.await_seen(here=1, waiting=1)
        near.kill()
        gate.open()
        reply = far.receive()
        assert (tokens(reply), reply["encoded"]) == (tokens(plain.generate(last)), 1)


@pytest.fixture
def follower(
    nodes: tuple[Node, Node], version: str, engines: Engines, tmp_path: Path
) -> Iterator[Callable[..., Path]]:
    """The second machine of an engine, whose log is returned; it has its workers alone."""
    started: list[Fork] = []

    def start(flags: Sequence[str], extra: dict[str, str], **environ: str) -> Path:
        transfer = {
            "ec_connector": "EcdConnector",
            "ec_connector_module_path": "ecd_client.vllm",
            "ec_role": "ec_both",
            "ec_connector_extra_config": extra,
        }
        log = tmp_path / "follower.log"
        command = [str(HERE / "several_servers.py"), str(engines.model(version)), "--headless"]
        command += ["--node-rank=1", *flags, "--ec-transfer-config", json.dumps(transfer)]
        # The rest is as in `engine_process.py`: both machines warm up with one shape.
        command += ["--max-model-len=2048", "--max-num-seqs=8", "--enforce-eager"]
        command += ["--dtype=float32", f"--kv-cache-memory-bytes={64 << 20}"]
        command += ["--limit-mm-per-prompt", json.dumps({"image": 4, "video": 0})]
        holder = node_of(nodes[1].prefix)
        assert holder is not None
        with log.open("wb") as out:
            started.append(Fork(version, command, out, node=holder, spares=(1,), **environ))
        return log

    yield start
    for each in started:
        each.end()


@pytest.mark.night
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_an_engine_on_two_machines_shares_nothing_and_says_why(
    layout: str,
    version: str,
    daemons: tuple[NodeDaemon, NodeDaemon],
    nodes: tuple[Node, Node],
    engines: Engines,
    follower: Callable[..., Path],
    start_engine: Start,
    new: Pictures,
) -> None:
    near, far = daemons
    for daemon in daemons:
        daemon.close()
        daemon.start()
    requests = new.requests(2)
    size = f"{layout}_parallel_size"
    right = Plain(engines, version, **{size: 2}, environ=SPREAD).generate(requests)
    start_engine("ec_producer", daemon=near, environ=ENVIRON, **ENGINE).generate(requests)
    eventually(lambda: near.status().entries == 2, "both stored")

    port = free_port()
    both = {size: 2, "nnodes": 2, "master_addr": nodes[0].address, "master_port": port}
    environ = {**SPREAD, "GLOO_SOCKET_IFNAME": "eth0"}
    leads, follows = ({**environ, "VLLM_HOST_IP": node.address} for node in nodes)
    engine = start_engine("ec_both", daemon=near, environ=leads, node_rank=0, **both)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in both.items()]
    log = follower(flags, {"ecd_address": far.address}, **EAGER, **follows)
    engine.wait_ready()
    assert "nothing is shared: this engine's workers are on 2 machines" in engine.text()
    assert tokens(engine.generate(requests)) == tokens(right)
    assert (near.status().entries, far.status().entries) == (2, 0)
    assert engine.metrics().get("loads", 0) == engine.metrics().get("saves", 0) == 0
    eventually(lambda: near.status().leases == 0, "leases of finished requests")
    assert "Traceback" not in log.read_text(errors="replace")
