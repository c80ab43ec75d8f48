"""Failures of peers and of the network: right bytes or a miss, and no leak.

A fetch has LONG_S: a test that shows a cause of its end hangs if there is none. Where the deadline
itself is to end it, it has SHORT_S.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from ecd_client import Client, Hint, Item
from ecd_proto.v1 import cache_pb2 as pb
from support.daemon import Daemon, close_all
from support.lying_peer import LATER, LIES, NBYTES, OTHER_LIES
from support.node_client import content, put
from support.nodes import Node, NodeClient, NodeDaemon
from support.pairs import PATIENT, cable, start_all
from support.processes import child
from support.waiting import HANG_S, eventually, value_of

LONG_S, SHORT_S = 600.0, 2.0
BIG = 32 << 20
MakePeer = Callable[..., Daemon]


def has_ended(daemon: Daemon) -> bool:
    return daemon._process is None or daemon._process.poll() is not None


class TwoNodes:
    """A node that has, one that wants, and a cable that takes 11 s for the big entry."""

    def __init__(self, near: Node, far: Node, directory: Path) -> None:
        self.near, self.far = near, far
        about = {"ECD_LEASE_TTL_S": str(LONG_S), "ECD_FETCH_TIMEOUT_S": str(LONG_S)}
        self.has = NodeDaemon(near, directory, **about)
        self.wants = NodeDaemon(far, directory, **about)
        start_all(self.has, self.wants)
        self.owner, self.asker = NodeClient(self.has), NodeClient(self.wants)

    def prepare(self, fetch_timeout_s: float) -> None:
        """Have both daemons run and know each other, and the near one have two entries."""
        self.near.throttle("10gbit")
        if self.wants._settings.get("ECD_FETCH_TIMEOUT_S") != str(fetch_timeout_s):
            self.wants._settings["ECD_FETCH_TIMEOUT_S"] = str(fetch_timeout_s)
            self.wants.kill()
        for daemon in (self.has, self.wants):
            if has_ended(daemon):
                daemon.start()
        self.works("small")
        self.owner.put("big", BIG)
        self.near.throttle("25mbit")

    def begin(self) -> pb.PeersReply:
        """A fetch of the big entry, whose bytes come when this returns.

        What the asking daemon had counted before it. If a fetch ends before any bytes come, as the
        other daemon stood still, another one is begun.
        """

        def begins() -> pb.PeersReply | None:
            counted, before = self.wants.peers(), self._received()
            come = lambda: self._received() > before + (1 << 20)  # noqa: E731
            self.asker.send("get", key="big", timeout=LONG_S, nodes=[self.near.peer], seed=1)
            eventually(lambda: come() or self.asker.has_said(), "the bytes come, or none")
            if come():
                return counted
            self.end(found=False)
            return None

        return value_of(begins)

    def _received(self) -> int:
        """Bytes that the far node has received."""
        [about] = json.loads(self.far.run("ip", "-s", "-j", "link", "show", "eth0"))
        return about["stats64"]["rx"]["bytes"]

    def get(self, key: str, seed: int = 1) -> dict:
        return self.asker.get(key, LONG_S, [self.near.peer], seed)

    def end(self, found: bool | None) -> None:
        """How it went; None: either will do."""
        reply = self.asker.receive()
        if found is not None:
            assert reply["found"] == found
        assert reply.get("right", True)

    def works(self, key: str) -> None:
        """From now on, or soon: a peer that did not answer is left alone for a while."""

        def arrives() -> bool:
            # Once more, as a client that has not heard yet of its daemon's end puts to that.
            self.owner.ask("put", key=key, nbytes=1 << 20, seed=2)
            got = self.get(key, seed=2)
            assert got.get("right", True)
            return got.get("found", False)

        eventually(arrives, "the nodes find each other again")

    def nothing_leaked(self) -> None:
        for daemon in (self.has, self.wants):
            if not has_ended(daemon):
                daemon.check_nothing_leaked()
                daemon.wait_idle("settled")
                assert daemon.peers().set_aside_bytes == 0
                assert "Traceback" not in daemon.text()

    def close(self) -> None:
        for client in (self.owner, self.asker):
            client.close()
        close_all([self.has, self.wants])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with cable() as (near, far):
        both = TwoNodes(near, far, tmp_path_factory.mktemp("nodes"))
        with contextlib.closing(both):
            yield both


@pytest.fixture
def two(nodes: TwoNodes) -> TwoNodes:
    nodes.prepare(LONG_S)
    return nodes


@pytest.fixture
def two_in_haste(nodes: TwoNodes) -> TwoNodes:
    nodes.prepare(SHORT_S)
    return nodes


# -- the peer --------------------------------------------------------------------------------------


def test_the_peer_is_killed_before_a_lease(two: TwoNodes) -> None:
    two.has.kill()
    assert two.get("big")["found"] is False
    two.nothing_leaked()


def test_the_peer_is_killed_during_a_read_and_comes_back(two: TwoNodes) -> None:
    two.begin()
    two.has.kill()
    two.end(found=False)
    eventually(lambda: two.wants.peers().peers[0].failed_reads > 0, what="reads were under way")
    two.nothing_leaked()
    before = two.wants.peers().peers[0].incarnation
    two.has.start()
    two.works("k")
    assert two.wants.peers().peers[0].incarnation != before
    two.nothing_leaked()


def test_the_peer_is_killed_after_it_has_delivered(two: TwoNodes) -> None:
    two.begin()
    two.near.throttle("10gbit")
    two.end(found=True)
    two.has.kill()
    got = two.asker.get("big", timeout=0.0)
    assert got["right"], "it is local from then on"
    two.nothing_leaked()


def test_the_peer_restarts_with_other_ports_under_the_same_name(two: TwoNodes) -> None:
    engine = two.wants.peers().peers[0].engine
    assert two.has.terminate() == 0
    two.has._settings["ECD_ENGINE_PORTS"] = "18300-18331"
    two.has.start()
    del two.has._settings["ECD_ENGINE_PORTS"]
    two.works("k")
    assert two.wants.peers().peers[0].engine != engine
    two.nothing_leaked()


def test_the_peer_stands_still_during_a_read(two_in_haste: TwoNodes) -> None:
    two = two_in_haste
    two.begin()
    with two.has.stopped():
        two.end(found=False)
        assert not two.get("another")["found"], "nor does it hold up the next one"
    two.works("k")
    two.nothing_leaked()


def test_the_asking_daemon_is_killed_during_a_read(two: TwoNodes) -> None:
    two.begin()
    assert two.has.status().leases == 1
    two.wants.kill()
    eventually(lambda: two.has.status().leases == 0, "its leases at the peer")
    two.asker.receive()
    two.nothing_leaked()


def test_the_asking_daemon_is_stopped_during_a_read(two: TwoNodes) -> None:
    two.begin()
    assert two.wants.terminate() == 0
    eventually(lambda: two.has.status().leases == 0, "its leases at the peer")
    two.asker.receive()
    two.nothing_leaked()


# -- the network -----------------------------------------------------------------------------------


def test_the_link_goes_down_and_up(two_in_haste: TwoNodes) -> None:
    two = two_in_haste
    two.begin()
    two.near.cable(up=False)
    two.near.cable(up=True)
    two.end(found=None)
    two.works("k")
    two.near.cable(up=False)
    assert not two.get("gone")["found"]
    two.near.cable(up=True)
    two.works("l")
    two.nothing_leaked()


def test_every_packet_is_lost_for_good(two_in_haste: TwoNodes) -> None:
    two = two_in_haste
    before = two.begin().set_aside
    two.near.drop(two.far, dropped=True)
    eventually(lambda: two.wants.peers().set_aside_bytes, "a read may still write there")
    two.end(found=False)
    assert two.wants.peers().set_aside == before + 1
    two.near.drop(two.far, dropped=False)
    two.works("k")
    two.nothing_leaked()


def test_some_packets_are_lost(two_in_haste: TwoNodes) -> None:
    """A queue of six packets at the sender: TCP loses some in every round trip."""
    two = two_in_haste
    two.near.throttle("2gbit", limit="9kb")
    for number in range(2):
        two.owner.put(f"k{number}", 4 << 20, seed=number)
        assert two.get(f"k{number}", seed=number).get("right", True)
    dropped = two.near.run("tc", "-s", "qdisc", "show", "dev", "eth0")
    assert "dropped 0," not in dropped
    two.nothing_leaked()


# -- a peer that lies ------------------------------------------------------------------------------

SEVERAL = """
import asyncio, json, os, sys
from support import lying_peer
for arguments in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.argv[1:] = arguments
        asyncio.run(lying_peer.main())
sys.stdin.read()
"""
"""A program that becomes several liars."""


@contextlib.contextmanager
def lying_peers(lies: Mapping[int, Sequence[str]]) -> Iterator[list[str]]:
    """Nodes that lie, each with a number of its own: a name of LIES and what else it takes."""
    nodes = [f"127.0.78.{number + 1}:9465" for number in lies]
    ports = [f"{26000 + 16 * number}-{26015 + 16 * number}" for number in lies]
    arguments = [[*where, *lie] for *where, lie in zip(nodes, ports, lies.values(), strict=True)]
    command = [sys.executable, "-c", SEVERAL, json.dumps(arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with child(command, env=environment, **pipes) as processes:
        said = processes.stdout.read(len(lies) * len("ready\n"))
        assert said.count("ready") == len(lies)
        yield nodes


class Told(NamedTuple):
    """What became of a fetch from a liar."""

    content: bytes | None
    error: str
    state: str


Lie = tuple[str, bool]
"""Its name, and whether it is told to one who reads ahead."""
LIES_TO_THOSE_AHEAD = (
    *LIES,
    *("another incarnation", "an identity nowhere", "a lease of no time", "no answer"),
    *("an answer to nobody", "hangs up", "dies with the lease", "a pool beyond all"),
)
ALL_LIES = [(lie, False) for lie in (*LIES, *OTHER_LIES)]
ALL_LIES += [(lie, True) for lie in LIES_TO_THOSE_AHEAD]
ENDLESS = {
    *("memory of others", "beyond the end", "another incarnation", "an identity nowhere"),
    "no answer",
}
"""Lies that the deadline of the fetch alone ends."""
REFUSED = {
    "an engine elsewhere": "another machine",
    "an engine whose port is of other digits": "as no node does",
    "a lease for ever": "as no node does",
    "a zone of 65 characters": "as no node does",
    "a description of 16 KiB": "as no node does",
    "a lease of no number": "as no node does",
    "a lease of no time": "as no node does",
    "a pool beyond all": "as no node does",
}
"""Lies that are seen before anything is asked, and what is said of them."""
AT_ONE_TIME = 8


def believe(directory: Path, number: int, fetch_timeout_s: float) -> Daemon:
    """A daemon that follows hints to liars."""
    daemon = Daemon(
        directory,
        ECD_PEER_ADDRESS=f"127.0.79.{number}:9465",
        ECD_ENGINE_PORTS=f"{27000 + 32 * number}-{27031 + 32 * number}",
        ECD_HINT_NETWORKS="127.0.78.0/24",
        ECD_FETCH_TIMEOUT_S=str(fetch_timeout_s),
    )
    daemon.command = PATIENT
    return daemon


@pytest.fixture(scope="module")
def believers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    """Two daemons for all lying peers, in which no lie may leave a trace.

    The fetches of the first never end by time, and those of the second soon do.
    """
    directory = tmp_path_factory.mktemp("believers")
    daemons = [believe(directory, 1, LONG_S), believe(directory, 2, SHORT_S)]
    try:
        start_all(*daemons)
        yield daemons
    finally:
        close_all(daemons)


@pytest.fixture(scope="module")
def told(believers: list[Daemon]) -> dict[Lie, Told]:
    """What became of a fetch from each liar, of some at one time."""
    told = {}
    for daemon in believers:
        is_hasty = daemon is believers[1]
        lies = [lie for lie in ALL_LIES if (lie[0] in ENDLESS) is is_hasty]
        with Client(daemon.address) as client:
            for start in range(0, len(lies), AT_ONE_TIME):
                some = lies[start : start + AT_ONE_TIME]
                told |= zip(some, ask_liars(daemon, client, some), strict=True)
                assert put(client, f"mine {start}", 1000, 3), "the daemon serves on"
                daemon.check_nothing_leaked()
        assert "Traceback" not in daemon.text()
    return told


def ask_liars(daemon: Daemon, client: Client, lies: Sequence[Lie]) -> list[Told]:
    with lying_peers({ALL_LIES.index(lie): [lie[0]] for lie in lies}) as nodes:
        hints = [
            Hint(node, 0, 0, NBYTES * ahead) for node, (_, ahead) in zip(nodes, lies, strict=True)
        ]
        hints = [hint if hint.nbytes else hint.node for hint in hints]
        keys = [f"from {node}" for node in nodes]
        founds = client.get_async(
            keys, LONG_S, only_if_written=True, nodes=[[hint] for hint in hints]
        )
        contents = [taken(found.result(HANG_S)) for found in founds]
        peers = {peer.node: peer for peer in daemon.peers().peers}
        return [
            Told(content, peers[node].last_error, peers[node].state)
            for content, node in zip(contents, nodes, strict=True)
        ]


def taken(item: Item | None) -> bytes | None:
    if item is None:
        return None
    with item:
        return bytes(item.view)


@pytest.mark.parametrize("lie", ALL_LIES, ids=lambda lie: lie[0] + " to those ahead" * lie[1])
def test_a_peer_that_lies(lie: Lie, told: dict[Lie, Told]) -> None:
    (name, ahead), (got, error, state) = lie, told[lie]
    if got is not None:
        late = "dies with the lease", *["wrong bytes"] * ahead
        assert name in ("truth", "bytes from nowhere", *late)  # which may be too late to matter
        assert got == content(NBYTES, 1)[: len(got)]
    else:
        assert name not in ("truth", "bytes from nowhere")
        assert REFUSED.get(name, "") in error
        assert state != "connected" or name not in REFUSED
        assert ("where it cannot go" in error) == name.startswith("elsewhere")


def test_a_peer_once_proven_that_answers_late_is_looked_at_again(believers: list[Daemon]) -> None:
    """A lease proves the peer only for bytes that come soon after the question; these come late."""
    daemon = believers[1]
    for number in range(90, 100):
        with lying_peers({number: [LATER, "0.1"]}) as [node], Client(daemon.address) as client:
            first = fetch(client, f"first of {node}", node)
            if first is None:
                continue  # one of them stood still until the deadline: to be proven by another one
            assert first == content(NBYTES, 1)

            def is_seen(client=client, node=node) -> bool:
                assert fetch(client, f"second of {node}", node) is None
                [peer] = [peer for peer in daemon.peers().peers if peer.node == node]
                return "another node's memory" in peer.last_error

            eventually(is_seen)
            break
    else:
        pytest.fail("no peer is proven")
    daemon.check_unused()


@pytest.mark.parametrize("ahead", [False, True])
def test_peers_that_die_at_any_moment_of_a_read(believers: list[Daemon], ahead: bool) -> None:
    """The peer dies before the first byte, amid the pieces, or before its identity is read."""
    daemon = believers[0]
    deaths = {
        100 + 50 * ahead + step: ("dies with the lease", str(step * 0.0005)) for step in range(1, 9)
    }
    with lying_peers(deaths) as nodes, Client(daemon.address) as client:
        for node in nodes:
            got = fetch(client, f"of {node}", Hint(node, 0, 0, NBYTES * ahead))
            assert got in (None, content(NBYTES, 1))
    daemon.check_unused()
    assert daemon.peers().set_aside_bytes == 0
    assert "Traceback" not in daemon.text()


def fetch(client: Client, key: str, node: str | Hint) -> bytes | None:
    [found] = client.get_async([key], LONG_S, only_if_written=True, nodes=[[node]])
    return taken(found.result(HANG_S))
