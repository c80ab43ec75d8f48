"""Hints come in requests, from whoever sends those: they hurt nobody but the request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
from collections.abc import Callable, Iterator

import pytest
import torch

from ecd.base.identity import NodeIdentity
from ecd.cluster.directory.directory import NoDirectory
from ecd.cluster.peers.admission import MAX_TOLD, Admission
from ecd.cluster.peers.peer import MAX_UNPROVEN_BYTES
from ecd.cluster.peers.peers import Peers
from ecd.settings.config import Config
from ecd_client import Client, Hint, InvalidArgument
from ecd_client.vllm.base import hints
from support.daemon import Daemon
from support.hints import BODY_BYTES, IDENTIFIERS, SHAPES, huge
from support.pairs import Pair, missed, patient_pair
from support.waiting import HANG_S, eventually

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]


@pytest.fixture(scope="module")
def lasting(make_lasting_peer: MakePeer) -> Pair:
    return patient_pair(make_lasting_peer, "64MiB")


@pytest.fixture
def peers(lasting: Pair, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with lasting.for_test(request.node.name) as pair:
        yield pair


def metric(daemon: Daemon, name: str) -> float:
    [line] = [line for line in daemon.metrics().splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


# -- in the daemon ---------------------------------------------------------------------------------


def test_nobody_is_asked_whom_only_hints_name(peers: Pair, make_peer: MakePeer) -> None:
    asking = make_peer(ECD_HINT_NETWORKS="").start()
    there = peers.client_of(asking)
    peers.here.put("k", torch.ones(100))
    for _ in range(3):
        assert missed(there, "k", [peers.a.peer, "not a node", "127.0.77.1:9465\n"])
    assert len(asking.peers().peers) == 0, "nobody was even asked"
    assert metric(asking, "ecd_hints_ignored_total") == 9.0
    told = [line for line in asking.text().splitlines() if "which is not asked" in line]
    assert len(told) == 1, "once a node"
    assert peers.a.peer in told[0]
    assert "ECD_HINT_NETWORKS" in told[0]


def test_the_log_names_some_of_many_made_up_nodes(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(peer_address="127.0.88.5:9465", peer_insecure=True)
    known = Peers(config, NodeIdentity("default", "a" * 32, "a test", config.peer_address), None)
    admission = Admission(config.peer_address, config, known, NoDirectory())
    made_up = [Hint(f"10.1.{n // 250}.{n % 250}:9465") for n in range(1000)]
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(admission.admit(made_up)) == []
    assert admission.ignored == 1000
    assert caplog.text.count("which is not asked") == MAX_TOLD


def test_made_up_nodes_do_not_hold_up_real_ones(peers: Pair, make_peer: MakePeer) -> None:
    """The made-up ones accept every connection, and say no word until their port is closed."""
    asking = make_peer(ECD_PEERS=peers.a.peer).start()
    there, other = peers.client_of(asking), peers.client_of(asking)
    for key in ("first", "k"):
        peers.here.put(key, torch.ones(100))
    there.get("first", HANG_S).close()  # the two know each other
    count = 1024  # as many as may be on their way
    with socket.create_server(("0.0.0.0", 0), backlog=4096) as silent:
        port = silent.getsockname()[1]
        made_up = (
            f"127.{90 + n // 40_000}.{n // 200 % 200}.{n % 200 + 1}:{port}"
            for n in itertools.count()
        )
        named = [list(itertools.islice(made_up, 4)) for _ in range(count)]
        keys = [f"n{n}" for n in range(count)]
        founds = other.get_async(keys, 10 * HANG_S, only_if_written=True, nodes=named)

        def arrives() -> bool:
            item = there.get("k", 1.0)
            return item is not None and bool((item.tensor == 1).all())

        eventually(arrives, "what a real node has")
        assert not all(found.done() for found in founds), "the silent nodes are waited for"
    for found in founds:
        assert found.result(HANG_S) is None
    status = asking.peers()
    assert len(status.peers) <= 256 + 1
    assert metric(asking, "ecd_hints_refused_total") > 0
    assert metric(asking, "ecd_peers_never_reached") == len(status.peers) - 1
    assert "127.90." not in asking.metrics(), "whoever sends requests makes no labels"


def test_hints_leave_something_for_the_directory(peers: Pair, make_peer: MakePeer) -> None:
    asking = make_peer(ECD_PEERS=peers.a.peer, ECD_HINT_NETWORKS="127.0.0.0/8").start()
    there = peers.client_of(asking)
    wrong = [f"127.0.77.1:{port}" for port in range(1, 5)]
    peers.here.put("k", torch.ones(100))
    with there.get("k", HANG_S, nodes=wrong) as item:
        assert (item.tensor == 1).all()
    peers.there.put("elsewhere", torch.ones(100))
    with there.get("elsewhere", HANG_S, nodes=[*wrong[:2], peers.b.peer]) as item:
        assert (item.tensor == 1).all()


def test_made_up_nodes_displace_no_real_one(peers: Pair, make_peer: MakePeer) -> None:
    """More of them than are remembered; nothing listens there, so that each ends at once."""
    dead = "127.0.77.1:1"
    asking = make_peer(ECD_PEERS=f"{peers.b.peer},{dead}", ECD_DIRECTORY="none").start()
    there = peers.client_of(asking)
    peers.here.put("k", torch.ones(100))
    with there.get("k", HANG_S, nodes=[peers.a.peer]) as item:
        assert (item.tensor == 1).all()
    assert missed(there, "nothing", [dead])
    for start in range(0, 1200, 50):
        keys = [f"n{n}" for n in range(start, start + 50)]
        made_up = [[f"127.91.{n // 200}.{n % 200 + 1}:1"] for n in range(start, start + 50)]
        for found in there.get_async(keys, 10 * HANG_S, only_if_written=True, nodes=made_up):
            assert found.result(HANG_S) is None
    status = {peer.node: peer for peer in asking.peers().peers}
    assert status[peers.a.peer].reads == 1, "the link is the one that it was"
    assert status[peers.a.peer].state == "connected"
    assert dead in status, "what the settings name is not forgotten"
    assert len(status) <= 256 + 2
    metrics = asking.metrics()
    assert f'ecd_peer_connected{{peer="{dead}"}} 0.0' in metrics, "operators are told of those"
    assert "127.91." not in metrics


def test_made_up_nodes_hide_no_right_hint(peers: Pair, make_peer: MakePeer) -> None:
    """Two clients want a key at one time, and only the second one knows where it is.

    Of the first one's hints so many are made up that the right one is not followed.
    """
    asking = make_peer(ECD_DIRECTORY="none").start()
    first, second = peers.client_of(asking), peers.client_of(asking)
    peers.here.put("k", torch.ones(100))
    about = {"only_if_written": True}
    with socket.create_server(("0.0.0.0", 0), backlog=64) as silent:
        made_up = [f"127.0.91.{n}:{silent.getsockname()[1]}" for n in range(1, 8)]
        nodes = [[*made_up, peers.a.peer]]
        founds = first.get_async(["k"], 10 * HANG_S, **about, nodes=nodes)
        eventually(lambda: asking.status().waits == 1)
        founds += second.get_async(["k"], 10 * HANG_S, **about, nodes=[[peers.a.peer]])
        eventually(lambda: asking.status().waits == 2)
    for found in founds:
        with found.result(HANG_S) as item:
            assert (item.tensor == 1).all()


def test_made_up_places_displace_nothing(peers: Pair) -> None:
    """Together they have twice the bytes of the pool, and nobody has their keys."""
    there = peers.there
    keys = [f"mine {n}" for n in range(40)]
    for key in keys:
        assert there.put_bytes(key, bytes(1 << 20), "uint8", (1 << 20,))
    place = Hint(peers.a.peer, 0, 0, 8 << 20)
    made_up = [f"nobody has {n}" for n in range(16)]
    for found in there.get_async(made_up, HANG_S, only_if_written=True, nodes=[[place]] * 16):
        assert found.result(HANG_S) is None
    assert there.contains(keys) == [True] * len(keys)


def test_made_up_places_are_read_no_more_until_one_is_right(peers: Pair) -> None:
    here, there = peers.here, peers.there

    def is_found(key: str) -> bool:
        here.put_bytes(key, bytes(1 << 20), "uint8", (1 << 20,))
        return not missed(there, key, [here.hint(key)])

    assert is_found("first")
    before = peers.counted["speculative"]
    for number in range(12):
        assert missed(there, f"nobody has {number}", [Hint(here.node, 0, 0, 8 << 20)])
    read = peers.counted["speculative"] - before
    assert 0 < read <= MAX_UNPROVEN_BYTES // (8 << 20), "those whose reads go on take room"
    used = peers.counted["speculative used"]
    assert is_found("right")
    assert peers.counted["speculative used"] == used, "it was leased first"
    assert is_found("right again")
    assert peers.counted["speculative used"] == used + 1


# -- in the client ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_hints_of_any_form_are_bounded(shape: str) -> None:
    params = huge(shape)
    assert len(hints.consumers_in(params)) <= 8
    for identifiers in IDENTIFIERS:
        counted: list[str] = []
        found = hints.hints_in(params, identifiers, counted.append)
        assert len(found) <= 128
        assert all(len(of_one) <= 8 for of_one in found.values())
        asked = sum(len(str(hint)) + 100 for of_one in found.values() for hint in of_one)
        assert asked < 1 << 20, "the daemon is asked with small messages"
        if shape in ("a long list", "many of one item"):
            assert counted == ["dropped_hints"]


def test_hints_are_what_they_were() -> None:
    """Hints come through in both forms that vLLM has, for the request's own items only."""
    said = {"ecd_node": "10.0.0.1:9465", "ecd_extent": [0, 4096, 100]}
    hint = Hint("10.0.0.1:9465", 0, 4096, 100)
    for params in ({"k": said, "l": {}}, {"ec_items": [{"mm_hash": "k", **said}]}):
        assert hints.hints_in(params)["k"] == [hint]
        assert hints.hints_in(params, ["k"]) == {"k": [hint]}
        assert hints.hints_in(json.loads(json.dumps(params)), ["other"]) == {}


def test_a_question_that_is_too_large_ends_no_session(daemon: Daemon, client_of: ClientOf) -> None:
    client = client_of(daemon)
    client.put("k", torch.ones(10))
    bystander = client.get_async(["later"], HANG_S)[0]
    token = client._connection.session().token
    many = [Hint(f"10.0.{n // 250}.{n % 250}:9465", 0, n, 100) for n in range(70_000)]
    long = "m" * BODY_BYTES
    founds = client.get_async(["asked", long, "\ud800", "", "k"], 0.5, nodes=[many] * 5)
    for found in founds[1:4]:
        assert isinstance(found.exception(HANG_S), InvalidArgument)
    assert founds[0].result(HANG_S) is None
    with founds[4].result(HANG_S) as found:
        assert (found.tensor == 1).all()
    with pytest.raises(InvalidArgument):
        client.get(long, 1.0)
    with pytest.raises(InvalidArgument):
        client.put_async("metadata", torch.ones(1), metadata=b"m" * BODY_BYTES).result(HANG_S)
    with pytest.raises(InvalidArgument):
        client.offer([long], ["10.0.0.1:9465"])
    client.put("later", torch.ones(10))
    with bystander.result(HANG_S) as found:
        assert (found.tensor == 1).all()
    assert client._connection.session().token == token, "it is the session that it was"
    with contextlib.suppress(InvalidArgument):
        client.contains([long])
    eventually(lambda: client.contains(["k", "later"]) == [True, True])
    assert client._connection.session().token == token
