"""Encoders that register themselves at one node and are known at others, on the simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import IPv4Network

import pytest

from ecd.cluster.directory.redis_lookup import NODE_CACHE_S
from ecd.cluster.directory.redis_publisher import BEAT_S
from ecd.cluster.directory.redis_rows import NODE_TTL_S
from ecd.cluster.peers.encoders import KNOWN_S
from ecd.cluster.peers.link import ANSWER_TIMEOUT_S, Link
from ecd.cluster.peers.peers import CONNECT_TIMEOUT_S
from ecd_proto.encoders import MAX_ENCODERS, RegisteredEncoder
from ecd_proto.engines import Engine
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import peer_pb2
from simulation.acts import AT_ONCE_S, play
from simulation.client import Session
from simulation.world import Run

LISTED_S = BEAT_S + NODE_CACHE_S + 0.5
"""By when all nodes know an encoder with Redis: its daemon's next record, and theirs of it."""
GONE_S = ANSWER_TIMEOUT_S + CONNECT_TIMEOUT_S + 0.5
ANY = "http://0.0.0.0:8000"
ON_NODE_0 = "http://10.0.0.1:8000"


def register(run: Run, node: int, url: str = ANY, namespace: str = "n") -> Session:
    """An engine of its own, with its API server; both end with the session."""
    session = Session(run, run.daemons[node])
    engines, number = run.daemons[node].node.streams.engines, session.stream.session
    about = f"e{node}-{number}", "m", namespace, True, False, {}, "image"
    engines.describe(number, Engine(*about))
    assert engines.register(number, RegisteredEncoder(about[0], url))
    return session


async def known(run: Run, node: int, namespace: str = "n") -> list[tuple[str, str]]:
    """The URLs that a daemon tells its engines anew, and the nodes that named them."""
    await asyncio.sleep(KNOWN_S)
    return await told(run, node, namespace)


async def told(run: Run, node: int, namespace: str = "n") -> list[tuple[str, str]]:
    daemon = run.daemons[node]
    asked = pb.EncodersRequest(namespace=namespace)
    reply = await daemon.start(daemon.service.Encoders(asked, None))
    return [(each.url, each.node) for each in reply.encoders]


@pytest.mark.parametrize("directory", ["redis", "static"])
def test_an_encoder_is_known_at_all_nodes_until_its_session_ends(directory: str) -> None:
    async def act(run: Run) -> None:
        session, other = register(run, 0), register(run, 0, namespace="other")
        register(run, 2, "http://10.0.0.3:8001/e")
        await asyncio.sleep(LISTED_S)
        here, there = run.places[0].node, run.places[2].node
        both = [(ON_NODE_0, here), ("http://10.0.0.3:8001/e", there)]
        assert await known(run, 1) == both
        assert await known(run, 0) == [(ON_NODE_0, ""), both[1]]
        assert len(await known(run, 1, "")) == 3
        session.end()
        assert await known(run, 1) == both[1:]
        other.end()

    play(3, act, directory=directory)


def test_the_age_of_an_encoder_counts_from_its_registration() -> None:
    async def act(run: Run) -> None:
        register(run, 0)
        await asyncio.sleep(70.0)
        daemon = run.daemons[0]
        reply = await daemon.start(daemon.service.Encoders(pb.EncodersRequest(), None))
        [encoder] = reply.encoders
        assert 70.0 <= encoder.age_s < 70.0 + AT_ONCE_S

    play(1, act)


def kill(run: Run) -> None:
    run.daemons[0].die(silently=False)


def unplug(run: Run) -> None:
    run.daemons[0].die(silently=True)


def cut_off(run: Run) -> None:
    run.network.cut_off(run.places[0].node, run.places[1].node)


@pytest.mark.parametrize("end", [kill, unplug, cut_off])
@pytest.mark.parametrize("directory", ["redis", "static"])
def test_the_encoders_of_a_node_that_does_not_answer_are_left_out(
    directory: str, end: Callable[[Run], None]
) -> None:
    async def act(run: Run) -> None:
        register(run, 0)
        await asyncio.sleep(LISTED_S)
        assert await known(run, 1)
        end(run)
        begun_s = run.loop.now_s
        while run.loop.now_s < begun_s + NODE_TTL_S:
            asked_s = run.loop.now_s + KNOWN_S
            assert await known(run, 1) == []
            assert run.loop.now_s - asked_s < GONE_S, "nobody waits longer for it"
            await asyncio.sleep(1.0)

    play(2, act, directory=directory)


def test_a_daemon_that_is_back_has_the_encoders_that_register_anew() -> None:
    async def act(run: Run) -> None:
        register(run, 0)
        await asyncio.sleep(0.5)
        assert await known(run, 1)
        run.daemons[0].die(silently=False)
        assert await known(run, 1) == []
        run.start(0, is_warm=False)
        await asyncio.sleep(1.0)
        register(run, 0)
        await asyncio.sleep(1.0)
        assert await known(run, 1) == [(ON_NODE_0, run.places[0].node)]

    play(2, act, directory="static")


@pytest.mark.parametrize(
    ("url", "networks", "is_called"),
    [
        ("http://127.0.0.1:8000", "127.0.0.0/8", False),
        ("http://[::1]:8000", "0.0.0.0/0", False),
        ("http://localhost:8000", "0.0.0.0/0", False),
        ("http://10.9.9.9:8000", "10.9.9.0/24", True),
        ("http://10.9.9.9:8000", "10.9.8.0/24", False),
        ("http://gateway:8000", "0.0.0.0/0", False),
        ("https://10.0.0.1:443", "10.9.8.0/24", True),
    ],
)
def test_other_nodes_call_their_peers_hosts_and_networks_that_hints_may_lead_into(
    url: str, networks: str, is_called: bool
) -> None:
    async def act(run: Run) -> None:
        register(run, 0, url)
        await asyncio.sleep(0.5)
        assert await known(run, 0) == [(url, "")], "its own node calls it"
        assert await known(run, 1) == ([(url, run.places[0].node)] if is_called else [])

    play(2, act, {"hint_networks": (IPv4Network(networks),)}, directory="static")


def test_a_node_that_only_hints_name_is_not_asked() -> None:
    async def act(run: Run) -> None:
        register(run, 0)
        await run.daemons[1].start(run.daemons[1].cluster._peers.link(run.places[0].node, True))
        assert await known(run, 1) == []

    play(2, act, directory="none")


def test_an_older_peer_is_not_asked_and_its_link_stays() -> None:
    async def act(run: Run) -> None:
        register(run, 0)
        older = run.daemons[0].cluster
        describe = older.describe
        older.describe = lambda: _without_encoders(describe())
        await run.daemons[1].stop()
        run.start(1, is_warm=False)
        await asyncio.sleep(0.5)
        assert await known(run, 1) == []
        assert run.daemons[1].cluster._peers.is_connected(run.places[0].node)

    play(2, act, directory="static")


def _without_encoders(said: peer_pb2.NodeDescription) -> peer_pb2.NodeDescription:
    said.takes_find_encoders = False
    return said


def test_a_peer_that_names_too_many_or_wrong_ones_is_not_believed() -> None:
    async def act(run: Run) -> None:
        said = [RegisteredEncoder("e", f"http://10.0.0.1:{port}", "n") for port in range(1, 66)]
        cluster, node = run.daemons[0].cluster, run.places[0].node
        cluster.told_encoders = lambda: said
        assert await known(run, 1) == []
        assert not run.daemons[1].cluster._peers.is_connected(node), "the link has ended"
        urls = "http://10.0.0.1:8000?x", "http://127.0.0.1:80", "http://0.0.0.0:80", "http://e:80"
        wrong = [RegisteredEncoder("e", url, "n") for url in urls]
        other = [RegisteredEncoder("e", ON_NODE_0, "another")]
        said = [*wrong, *other, RegisteredEncoder("e", ON_NODE_0, "n", node="10.0.0.9:1")]
        await asyncio.sleep(1.0)
        assert await known(run, 1) == [(ON_NODE_0, node)], "a node speaks for itself"

    play(2, act, {"hint_networks": (IPv4Network("0.0.0.0/0"),)}, directory="static")


def test_an_answer_has_a_bound() -> None:
    async def act(run: Run) -> None:
        for port in range(8000, 8000 + MAX_ENCODERS):
            register(run, 0, f"http://0.0.0.0:{port}")
        register(run, 1)
        await asyncio.sleep(0.5)
        assert len(await known(run, 0)) == len(await known(run, 1)) == MAX_ENCODERS
        assert (await known(run, 1))[0] == ("http://10.0.0.2:8000", ""), "its own comes first"

    play(2, act, directory="static")


def test_a_redis_that_stands_still_hides_no_encoder() -> None:
    async def act(run: Run) -> None:
        session = register(run, 0)
        await asyncio.sleep(LISTED_S)
        assert await known(run, 1)
        run.redis.is_halted = True
        await asyncio.sleep(NODE_TTL_S)
        for _ in range(16):  # while it is asked, and while it is left alone
            assert await known(run, 1) == [(ON_NODE_0, run.places[0].node)]
            await asyncio.sleep(BEAT_S / 4)
        session.end()
        assert await known(run, 1) == []

    play(2, act)


def test_a_node_without_encoders_is_not_asked() -> None:
    async def act(run: Run) -> None:
        register(run, 0, "http://127.0.0.1:8000")
        await asyncio.sleep(LISTED_S)
        assert await known(run, 1) == []
        assert not run.daemons[1].cluster.status().peers[0].incarnation

    play(2, act)


def test_a_node_is_asked_once_for_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Link] = []
    encoders = Link.encoders

    async def counted(link: Link) -> list[RegisteredEncoder]:
        asked.append(link)
        return await encoders(link)

    monkeypatch.setattr(Link, "encoders", counted)

    async def act(run: Run) -> None:
        register(run, 0)
        await asyncio.sleep(0.5)
        many = await asyncio.gather(*(told(run, 1, name) for name in ("n", "n", "other", "")))
        assert list(map(len, many)) == [1, 1, 0, 1]
        assert len(asked) == 1
        assert await told(run, 1)
        assert len(asked) == 1
        assert await known(run, 1)
        assert len(asked) == 2

    play(2, act, directory="static")
