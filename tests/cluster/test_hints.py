"""Hints come in requests, from whoever sends those: they hurt nobody but the request."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from ecd_client import Client, Hint, InvalidArgument
from ecd_client.vllm import hints
from support.daemon import Daemon, eventually

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]
BODY_BYTES = 17 << 20


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts every connection on every address, and never says a word."""
    with socket.create_server(("0.0.0.0", 0), backlog=4096) as server:
        yield server.getsockname()[1]


def value_of(metrics: str, name: str) -> float:
    [line] = [line for line in metrics.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


# -- in the daemon ---------------------------------------------------------------------------------


def test_nobody_is_asked_whom_only_hints_name(make_peer: MakePeer, client_of: ClientOf) -> None:
    a = make_peer().start()
    b = make_peer(ECD_HINT_NETWORKS="").start()
    here, there = client_of(a), client_of(b)
    here.put("k", torch.ones(100))
    for _ in range(3):
        assert there.get("k", 0.2, nodes=[a.peer, "not a node", "127.0.77.1:9465\n"]) is None
    assert len(b.peers().peers) == 0, "nobody was even asked"
    assert value_of(b.metrics(), "ecd_hints_ignored_total") == 9.0
    told = [line for line in b.text().splitlines() if "which is not asked" in line]
    assert len(told) == 1, "once a node"
    assert a.peer in told[0]
    assert "ECD_HINT_NETWORKS" in told[0]


def test_the_log_names_some_of_many_made_up_nodes(make_peer: MakePeer, client_of: ClientOf) -> None:
    b = make_peer(ECD_HINT_NETWORKS="").start()
    nodes = [[f"10.1.{n // 250}.{n % 250}:9465"] for n in range(1000)]
    founds = client_of(b).get_async([str(n) for n in range(1000)], 5.0, nodes=nodes)
    assert all(found.result(10) is None for found in founds)
    assert value_of(b.metrics(), "ecd_hints_ignored_total") == 1000.0
    assert b.text().count("which is not asked") == 64


def test_made_up_nodes_do_not_hold_up_real_ones(
    make_peer: MakePeer, client_of: ClientOf, silent_port: int
) -> None:
    a = make_peer().start()
    b = make_peer(ECD_PEERS=a.peer, ECD_HINT_NETWORKS="127.0.0.0/8").start()
    here, there, other = client_of(a), client_of(b), client_of(b)
    here.put("k", torch.ones(100))
    here.put("first", torch.ones(100))
    there.get("first", 5.0).close()  # the two know each other
    count = 1024  # as many as may be on their way
    made_up = (
        f"127.{90 + n // 40_000}.{n // 200 % 200}.{n % 200 + 1}:{silent_port}"
        for n in itertools.count()
    )
    hints = [list(itertools.islice(made_up, 4)) for _ in range(count)]
    founds = other.get_async(
        [f"n{n}" for n in range(count)], 5.0, only_if_written=True, nodes=hints
    )

    def arrives() -> bool:
        item = there.get("k", 1.0)
        return item is not None and bool((item.tensor == 1).all())

    assert eventually(arrives, 3.5) < 3.5, "four silent nodes have four seconds"
    for found in founds:
        assert found.result(7) is None
    status, metrics = b.peers(), b.metrics()
    assert len(status.peers) <= 256 + 1
    assert value_of(metrics, "ecd_hints_refused_total") > 0
    assert value_of(metrics, "ecd_peers_never_reached") == len(status.peers) - 1
    assert "127.90." not in metrics, "whoever sends requests makes no labels"


def test_hints_leave_something_for_the_directory(make_peer: MakePeer, client_of: ClientOf) -> None:
    a, hinted = make_peer().start(), make_peer().start()
    b = make_peer(ECD_PEERS=a.peer, ECD_HINT_NETWORKS="127.0.0.0/8").start()
    here, other, there = client_of(a), client_of(hinted), client_of(b)
    wrong = [f"127.0.77.1:{port}" for port in range(1, 5)]
    here.put("k", torch.ones(100))
    with there.get("k", 5.0, nodes=wrong) as item:
        assert (item.tensor == 1).all()
    other.put("elsewhere", torch.ones(100))
    with there.get("elsewhere", 5.0, nodes=[*wrong[:2], hinted.peer]) as item:
        assert (item.tensor == 1).all()


def test_made_up_nodes_displace_no_real_one(make_peer: MakePeer, client_of: ClientOf) -> None:
    """More of them than are remembered; nothing listens there, so that each ends at once."""
    a, named = make_peer().start(), make_peer().start()
    b = make_peer(ECD_PEERS=f"{named.peer},127.0.77.1:1", ECD_DIRECTORY="none").start()
    here, there = client_of(a), client_of(b)
    here.put("k", torch.ones(100))
    with there.get("k", 5.0, nodes=[a.peer]) as item:
        assert (item.tensor == 1).all()
    there.get("nothing", 5.0, nodes=["127.0.77.1:1"])
    for start in range(0, 1200, 50):
        keys = [f"n{n}" for n in range(start, start + 50)]
        hints = [[f"127.91.{n // 200}.{n % 200 + 1}:1"] for n in range(start, start + 50)]
        for found in there.get_async(keys, 5.0, only_if_written=True, nodes=hints):
            assert found.result(6) is None
    status = {peer.node: peer for peer in b.peers().peers}
    assert status[a.peer].reads == 1, "the link is the one that it was"
    assert status[a.peer].state == "connected"
    assert "127.0.77.1:1" in status, "what the settings name is not forgotten"
    assert len(status) <= 256 + 2
    metrics = b.metrics()
    assert 'ecd_peer_connected{peer="127.0.77.1:1"} 0.0' in metrics, "operators are told of those"
    assert "127.91." not in metrics


# -- in the client ---------------------------------------------------------------------------------


def item(number: int) -> dict:
    return {"ecd_node": f"10.0.{number // 250 % 250}.1:9465", "ecd_extent": [0, number, 100]}


def deep() -> dict:
    outermost: dict = {}
    inner = outermost
    for _ in range(500):
        inner["k"] = inner["ec_items"] = {}
        inner = inner["k"]
    return outermost


def huge(shape: str) -> object:
    match shape:
        case "many items":
            return {f"{number:064x}": item(number) for number in range(70_000)}
        case "a long list":
            return {"ec_items": [{"mm_hash": f"{n:064x}", **item(n)} for n in range(70_000)]}
        case "many of one item":
            return {"ec_items": [{"mm_hash": "k", **item(number)} for number in range(70_000)]}
        case "no items at all":
            return {"ec_items": [[number] for number in range(BODY_BYTES // 8)]}
        case "a long name":
            return {"k" * BODY_BYTES: item(0), "ec_items": None}
        case "a long node":
            return {"k": {"ecd_node": "1" * BODY_BYTES, "ecd_extent": [0, 0, 1]}}
        case "a long extent":
            return {"k": {"ecd_node": "10.0.0.1:9465", "ecd_extent": [0] * BODY_BYTES}}
        case "a large number":
            return {"k": {"ecd_node": "10.0.0.1:9465", "ecd_extent": [0, 1 << (8 * BODY_BYTES), 1]}}
        case "names that are none":
            return {"ec_items": [{"mm_hash": ["k"] * 1000}, {"mm_hash": {}}, {"mm_hash": None}]}
        case "many consumers":
            return {"ecd_consumers": ["1" * 1000] * (BODY_BYTES // 1000)}
        case "deep":
            return deep()
    return shape


SHAPES = (
    *("many items", "a long list", "many of one item", "no items at all", "a long name"),
    *("a long node", "a long extent", "a large number", "names that are none", "many consumers"),
    *("deep", "not even a dict"),
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("identifiers", [None, {"k", *(f"{n:064x}" for n in range(20))}])
def test_hints_of_any_form_take_less_than_a_millisecond(
    shape: str, identifiers: set[str] | None
) -> None:
    params, took_s, counted = huge(shape), [], []
    for _ in range(10):
        started = time.perf_counter()
        found = hints.hints_in(params, identifiers, counted.append)
        consumers = hints.consumers_in(params)
        took_s.append(time.perf_counter() - started)
    assert min(took_s) < 1e-3
    assert len(found) <= 128
    assert all(len(of_one) <= 8 for of_one in found.values())
    assert len(consumers) <= 8
    asked = sum(len(str(hint)) + 100 for of_one in found.values() for hint in of_one)
    assert asked < 1 << 20, "the daemon is asked with small messages"
    if shape in ("a long list", "many of one item"):
        assert counted == ["dropped_hints"] * 10


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
    bystander = client.get_async(["later"], 5.0)[0]
    token = client._connection.session().token
    many = [Hint(f"10.0.{n // 250}.{n % 250}:9465", 0, n, 100) for n in range(70_000)]
    long = "m" * BODY_BYTES
    founds = client.get_async(["asked", long, "\ud800", "", "k"], 0.5, nodes=[many] * 5)
    for found in founds[1:4]:
        assert isinstance(found.exception(2), InvalidArgument)
    assert founds[0].result(2) is None
    with founds[4].result(2) as found:
        assert (found.tensor == 1).all()
    with pytest.raises(InvalidArgument):
        client.get(long, 1.0)
    with pytest.raises(InvalidArgument):
        client.put_async("metadata", torch.ones(1), metadata=b"m" * BODY_BYTES).result(5)
    client.offer([long], ["10.0.0.1:9465"])
    client.put("later", torch.ones(10))
    with bystander.result(2) as found:
        assert (found.tensor == 1).all()
    assert client._connection.session().token == token, "it is the session that it was"
    with contextlib.suppress(InvalidArgument):
        client.contains([long])
    eventually(lambda: client.contains(["k", "later"]) == [True, True])
    assert client._connection.session().token == token
