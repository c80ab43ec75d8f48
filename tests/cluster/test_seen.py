"""Several nodes from the command line: what is seen of them, before the first request and by it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from ecd.base.clock import Clock
from ecd.base.identity import NodeIdentity
from ecd.cluster.peers.peers import Peers
from ecd.settings.config import Config
from ecd_client import Client
from ecd_proto.findings import BAD, DOUBTFUL, GOOD, MAX_AWAY, Finding, nodes
from ecd_proto.v1 import cache_pb2 as pb
from support.cli import cli
from support.daemon import Daemon, changed
from support.pages import DOCS, commands, printed
from support.pairs import PATIENCE, missed, start_all
from support.processes import run
from support.redis import LONG_PATIENCE, RedisServer, free_port
from support.waiting import HANG_S, eventually, value_of

MakePeer = Callable[..., Daemon]
QUICK = changed(*PATIENCE, "from ecd.cluster import cluster", "cluster.TRY_S = 0.1")
"""A daemon that often tries the nodes of its settings."""
UNHURRIED = changed(
    *(*LONG_PATIENCE, "from ecd.cluster import cluster"),
    f"cluster.LOCATE_S, cluster.TRY_S = {HANG_S}, 0.1",
)
"""A daemon that waits for Redis and for other nodes as long as they take."""
NOBODY = "127.0.77.1:1"
WAIT = f"{HANG_S:.0f}s"


@pytest.fixture
def redis_pair(
    make_peer: MakePeer, shared_redis: RedisServer, tmp_path: Path
) -> tuple[Daemon, Daemon]:
    """Two nodes of a cluster of their own, which no request has made known to each other."""
    about = {"ECD_DIRECTORY": shared_redis.url, "ECD_CLUSTER": tmp_path.name}
    a, b = make_peer(**about), make_peer(**about)
    a.command = b.command = UNHURRIED
    start_all(a, b)
    for daemon in (a, b):
        eventually(lambda daemon=daemon: daemon.peers().directory.nodes == 2, "both are listed")
    return a, b


def state(daemon: Daemon, node: str) -> str:
    rows = json.loads(cli(daemon, "peers", "--json").stdout)["peers"]
    return {row["node"]: row["state"] for row in rows}.get(node, "no row")


def becomes(daemon: Daemon, node: str, awaited: str) -> bool:
    """Wait for the node's state."""
    eventually(lambda: state(daemon, node) == awaited, f"{node} is {awaited}")
    return awaited in cli(daemon, "peers").stdout


def put(daemon: Daemon, key: str, namespace: str = "default") -> None:
    with Client(daemon.address, namespace=namespace) as client:
        client.put_bytes(key, bytes(range(12)), "uint8", (12,))


def found_by_doctor(daemon: Daemon, check: str) -> list[str]:
    findings = json.loads(cli(daemon, "doctor", "--json").stdout)
    return [f"{each['state']} {each['found']}" for each in findings if each["check"] == check]


def test_nodes_of_the_settings_are_tried_before_any_request(make_peer: MakePeer) -> None:
    b = make_peer()
    a = make_peer(ECD_PEERS=f"{b.peer},{NOBODY}")
    a.command = QUICK
    a.start()
    assert becomes(a, NOBODY, "unreachable")
    assert becomes(a, b.peer, "unreachable")
    [said] = found_by_doctor(a, "peers")
    assert said.startswith(f"{BAD} 0 of 2 configured nodes answer, not {b.peer}: ")
    assert f"; {NOBODY}: Connection refused" in said
    assert "2 unreachable" in cli(a, "status").stdout
    assert json.loads(cli(a, "status", "--json").stdout)["peers"] == {"unreachable": 2}
    b.start()
    assert becomes(a, b.peer, "connected"), "it is tried again"
    [said] = found_by_doctor(a, "peers")
    assert said.startswith(f"{BAD} 1 of 2 configured nodes answers, not {NOBODY}: ")
    assert f'ecd_peer_connected{{peer="{NOBODY}"}} 0.0' in a.metrics()
    with urllib.request.urlopen(a.metrics_url().replace("/metrics", "/status.json")) as answer:
        rows = json.load(answer)["peers"]["peers"]
    assert [(row["node"], row["state"], row["configured"]) for row in rows] == [
        (NOBODY, "unreachable", True),
        (b.peer, "connected", True),
    ]
    assert a.text().count(f"WARNING ecd.cluster.peers.peers: peer {NOBODY}: ") == 1
    assert not any(a.peers().fetches.values()), "nobody has asked for anything"


def test_nodes_of_redis_are_seen_before_any_request(
    redis_pair: tuple[Daemon, Daemon],
) -> None:
    a, b = redis_pair
    assert (state(a, b.peer), state(b, a.peer)) == ("never asked", "never asked")
    assert "redis, up, 2 nodes with this one" in cli(b, "peers").stdout
    assert "1 never asked" in cli(b, "status").stdout
    assert found_by_doctor(b, "peers") == [f"{GOOD} 1 known, none unreachable; 1 never asked"]
    assert "ecd_peer_connected{" not in b.metrics()
    a.terminate()
    eventually(lambda: b.peers().directory.nodes == 1, "it has left the list")
    assert found_by_doctor(b, "peers") == [f"{DOUBTFUL} redis lists no other node"]


def test_a_node_that_leaves_redis_is_gone_and_one_that_is_back_has_a_link(
    redis_pair: tuple[Daemon, Daemon],
) -> None:
    a, b = redis_pair
    put(a, "k")
    a.wait_idle("settled")
    with Client(b.address) as client:
        client.get("k", HANG_S).close()
    assert state(b, a.peer) == "connected"
    a.terminate()
    assert becomes(b, a.peer, "gone")
    assert found_by_doctor(b, "peers") == [f"{DOUBTFUL} redis lists no other node"]
    assert f'ecd_peer_connected{{peer="{a.peer}"}} 0.0' in b.metrics(), "EcdPeerDown needs it"
    a.start()
    assert becomes(b, a.peer, "connected"), "without a request"
    assert found_by_doctor(b, "peers") == [f"{GOOD} 1 known, none unreachable"]


def unlisted(
    make_peer: MakePeer, redis: RedisServer, cluster: str, *tokens: str
) -> tuple[Daemon, Daemon]:
    """A node with an entry that Redis does not list, as if it were older, and one that it does."""
    redis.ask("acl", "setuser", "before", "on", ">pass", "~*", "+@all", "-@sortedset")
    urls = redis.url.replace("redis://", "redis://before:pass@"), redis.url
    secrets = [{"ECD_PEER_TOKEN": token} for token in tokens] or [{}, {}]
    a, b = (
        make_peer(ECD_DIRECTORY=url, ECD_CLUSTER=cluster, **secret)
        for url, secret in zip(urls, secrets, strict=True)
    )
    a.command = b.command = UNHURRIED
    start_all(a, b)
    eventually(lambda: b.peers().directory.nodes == 1)
    put(a, "k")
    a.wait_idle("settled")
    return a, b


def test_a_node_that_redis_never_listed_is_not_gone(
    make_peer: MakePeer, shared_redis: RedisServer, tmp_path: Path
) -> None:
    a, b = unlisted(make_peer, shared_redis, tmp_path.name, "a" * 32, "b" * 32)
    with Client(b.address) as client:
        assert missed(client, "k")
    assert state(b, a.peer) == "unreachable"
    [said] = found_by_doctor(b, "peers")
    assert said.startswith(f"{BAD} {a.peer}: no proof of the cluster's token")


def test_a_node_that_redis_never_listed_is_tried_again(
    make_peer: MakePeer, shared_redis: RedisServer, tmp_path: Path
) -> None:
    a, b = unlisted(make_peer, shared_redis, tmp_path.name)
    with Client(b.address) as client:
        client.get("k", HANG_S).close()
    a.terminate()
    assert becomes(b, a.peer, "unreachable")
    a.start()
    assert becomes(b, a.peer, "connected"), "without a request"


@pytest.mark.parametrize("has_token", [True, False])
def test_a_node_that_the_settings_name_by_an_alias_is_no_other_node(
    make_peer: MakePeer, has_token: bool
) -> None:
    port = free_port()
    name = f"localhost:{port}"
    a = make_peer(ECD_PEER_ADDRESS=f"127.0.0.1:{port}", ECD_PEERS=name)
    if not has_token:
        del a._settings["ECD_PEER_TOKEN"]
    a.command = QUICK
    a.start()
    eventually(lambda: state(a, name) == "no row")
    assert found_by_doctor(a, "peers") == [f"{GOOD} 0 known, none unreachable"]


def test_a_node_that_a_reload_removes_is_not_tried_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = tuple(f"127.0.77.{n}:1" for n in range(1, 40))
    config = Config(peer_address="127.0.88.5:9465", peer_insecure=True, peers=nodes)
    identity = NodeIdentity("default", "a" * 32, "a test", config.peer_address)
    known = Peers(config, identity, None, Clock())
    tried = []

    async def link(node: str) -> None:
        tried.append(node)
        known.reload([])

    monkeypatch.setattr(known, "link", link)
    asyncio.run(known.try_unlinked(()))
    assert (len(tried), list(known)) == (1, [])


def test_what_others_write_to_the_list_of_nodes_costs_at_most_its_rows(
    make_peer: MakePeer, shared_redis: RedisServer, tmp_path: Path
) -> None:
    name = f"ecd:{tmp_path.name}:nodes"
    soon = str(int(shared_redis.ask("time").split()[0]) + 3000)
    many = [part for n in range(300) for part in (soon, f"node{n}:9465")]
    shared_redis.ask("zadd", name, *many, soon, "x" * 1000, "+inf", "forever:9465")
    daemon = make_peer(ECD_DIRECTORY=shared_redis.url, ECD_CLUSTER=tmp_path.name)
    daemon.command = changed(
        "from ecd.cluster.directory import redis_publisher as at; at.NODE_TTL_S = 6000"
    )
    daemon.start()
    reply = value_of(lambda: told if (told := daemon.peers()).directory.nodes else None)
    assert reply.directory.nodes == 301
    assert len(reply.peers) == 127
    assert {peer.state for peer in reply.peers} == {"never asked"}
    more = f"{300 - len(reply.peers)} more nodes of the directory: never asked."
    assert more in cli(daemon, "peers").stdout
    shared_redis.ask("set", name, "another type")
    eventually(lambda: daemon.peers().directory.nodes == 0)
    assert daemon.peers().directory.up


FEW = "+@read", "+@write", "+@scripting", "+@connection", "-@sortedset"


@pytest.mark.parametrize(
    "rights",
    [
        ("~*", *FEW),
        ("~*", *FEW, "+zadd", "+zrem"),
        ("~*", *FEW, "+@sortedset"),
        ("~ecd:default:[enma]:*", "+@all"),
    ],
)
def test_a_user_of_redis_that_may_not_list_nodes_has_a_directory_all_the_same(
    make_peer: MakePeer, shared_redis: RedisServer, rights: tuple[str, ...]
) -> None:
    shared_redis.ask("acl", "setuser", "few", "reset", "on", ">pass", *rights)
    url = shared_redis.url.replace("redis://", "redis://few:pass@")
    daemon = make_peer(ECD_DIRECTORY=url).start()
    eventually(lambda: daemon.peers().directory.up)
    put(daemon, "k")
    daemon.wait_idle("settled")
    assert daemon.peers().directory.nodes == 0
    assert daemon.terminate() == 0


def of(*states: str) -> Finding:
    """The finding about configured nodes of these states."""
    peers = [
        pb.PeerStatus(node=f"n{n}:1", state=each, configured=True, last_error="refused")
        for n, each in enumerate(states)
    ]
    directory = pb.DirectoryStatus(kind="static", up=True)
    _, found = nodes(pb.PeersReply(node="here:1", directory=directory, peers=peers))
    return found


def test_the_finding_about_configured_nodes_is_bounded() -> None:
    assert of("connected", "idle").state == GOOD
    so_far = of("connected", "connecting", "never asked")
    assert (so_far.state, so_far.found) == (
        DOUBTFUL,
        "1 of 3 configured nodes answers so far, not n1:1, n2:1",
    )
    many = of(*["unreachable"] * (MAX_AWAY + 12), "connected")
    assert many.state == BAD
    assert many.found.count("refused") == MAX_AWAY
    assert many.found.endswith("; and 12 more")


def test_a_get_with_a_timeout_fetches(redis_pair: tuple[Daemon, Daemon], tmp_path: Path) -> None:
    (a, b), to = redis_pair, tmp_path / "k.safetensors"
    put(a, "k")
    a.wait_idle("settled")
    alone = cli(b, "get", "k", "-o", str(to))
    assert (alone.returncode, "this node's memory; --timeout" in alone.stderr) == (1, True)
    assert not to.exists()
    found = cli(b, "locate", "k")
    assert (found.returncode, a.peer in found.stdout) == (0, True), "in the default namespace"
    got = cli(b, "get", "k", "-o", str(to), "--timeout", WAIT)
    assert got.returncode == 0, got.stderr
    assert "uint8 [12], fetched in " in got.stdout
    assert to.read_bytes().endswith(bytes(range(12)))
    assert state(b, a.peer) == "connected"
    again = json.loads(cli(b, "get", "k", "-o", str(to), "--timeout", WAIT, "--json").stdout)
    assert (again["fetched"], again["namespace"]) == (False, "default")
    assert b.status().counters.hits == 0, "an operator's look is no use"


def test_the_recipe_of_two_nodes_prints_what_it_says(redis_pair: tuple[Daemon, Daemon]) -> None:
    a, b = redis_pair
    page = DOCS / "recipes.md"
    [program] = [
        words for words in commands(page) if words[0] == "python" and "put_bytes" in words[2]
    ]
    done = run(
        [sys.executable, *program[1:]],
        env={**os.environ, "ECD_ADDRESS": a.address},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    a.wait_idle("settled")
    look, fetch = [words for words in commands(page) if words[0] == "ecd-cli" and "k" in words]
    fetch[-1] = WAIT
    now = "".join(cli(b, *words[1:]).stdout for words in (look, fetch))
    shown = "\n".join(printed(page, "two nodes")).replace("10.0.0.1:9465", a.peer)
    assert in_any_time(now) == in_any_time(shown)
    assert state(b, a.peer) == "connected"


def in_any_time(lines: str) -> list[str]:
    """The words, without how long the fetch took."""
    return re.sub(r"in [\d.]+ s", "in N s", lines).split()


def test_a_get_and_a_locate_without_a_namespace_look_in_the_default_one(
    redis_pair: tuple[Daemon, Daemon],
) -> None:
    a, b = redis_pair
    put(a, "of an engine", namespace="n")
    a.wait_idle("settled")
    assert becomes(b, a.peer, "never asked")
    get = "get", "of an engine", "-o", "/dev/null", "--timeout", WAIT
    elsewhere = cli(b, *get)
    assert elsewhere.returncode == 1
    assert "in the namespace 'default': no other node delivers it, of 1 known" in elsewhere.stderr
    assert "another one (--namespace)" in elsewhere.stderr
    nowhere = cli(b, "locate", "of an engine")
    assert (nowhere.returncode, "another one (--namespace)" in nowhere.stderr) == (1, True)
    named = cli(b, *get, "--namespace", "n")
    assert named.returncode == 0, named.stderr


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "this daemon has no list of nodes to ask; set ECD_DIRECTORY or ECD_PEERS"),
        ({"ECD_PEERS": NOBODY}, f"no other node delivers it; no answer from {NOBODY}"),
        ({"ECD_DIRECTORY": "redis://127.0.77.1:1"}, "redis does not answer: "),
    ],
)
def test_a_get_in_vain_names_the_cause(
    make_peer: MakePeer, settings: dict[str, str], said: str
) -> None:
    daemon = make_peer(**settings).start()
    if "ECD_PEERS" in settings:
        assert becomes(daemon, NOBODY, "unreachable")
    done = cli(daemon, "get", "k", "--namespace", "n", "-o", "/dev/null", "--timeout", WAIT)
    assert done.returncode == 1
    assert f"no entry 'k' in the namespace 'n': {said}" in done.stderr


def test_a_get_whose_time_is_over_says_so(make_peer: MakePeer) -> None:
    b = make_peer().start()
    a = make_peer(ECD_PEERS=b.peer).start()
    assert becomes(a, b.peer, "connected")
    with b.stopped():
        done = cli(a, "get", "k", "--namespace", "n", "-o", "/dev/null", "--timeout", "0.2s")
    assert done.returncode == 1
    assert "no entry 'k' in the namespace 'n' came within 0.2s" in done.stderr
    wrong = cli(a, "get", "k", "-o", "/dev/null", "--timeout", "5")
    assert (wrong.returncode, "needs a unit" in wrong.stderr) == (2, True)
