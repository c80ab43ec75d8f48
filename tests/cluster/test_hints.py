"""Hints come in requests, from whoever sends those: they hurt nobody but the request.

`simulation/test_hints.py` has what made-up ones cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from ecd.base.clock import Clock
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
    identity = NodeIdentity("default", "a" * 32, "a test", config.peer_address)
    known = Peers(config, identity, None, Clock())
    admission = Admission(config.peer_address, config, known, NoDirectory())
    made_up = [Hint(f"10.1.{n // 250}.{n % 250}:9465") for n in range(1000)]
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(admission.admit(made_up)) == []
    assert admission.ignored == 1000
    assert caplog.text.count("which is not asked") == MAX_TOLD


def test_whoever_sends_requests_makes_no_labels(peers: Pair, make_peer: MakePeer) -> None:
    """Nothing listens where the hints lead, so that each ends at once."""
    dead = "127.0.77.1:1"
    asking = make_peer(ECD_PEERS=dead, ECD_DIRECTORY="none").start()
    there = peers.client_of(asking)
    for node in (dead, *(f"127.91.0.{n}:1" for n in range(1, 4))):
        assert missed(there, "k", [node])
    metrics = asking.metrics()
    assert f'ecd_peer_connected{{peer="{dead}"}} 0.0' in metrics, "operators are told of those"
    assert "127.91." not in metrics
    assert metric(asking, "ecd_peers_never_reached") == 3.0


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
