"""Failures of peers and of the network: right bytes or a miss, in time, and no leak.

The deadline of a fetch is 5 s (ECD_FETCH_TIMEOUT_S), and a client waits for 8 s; every wait here is
bound to BOUND_S. A daemon that is lied to has 2 s, and a bound a little later as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ecd_client import Client, Hint
from support.daemon import Daemon, eventually
from support.lying_peer import LATER, LIES, NBYTES, OTHER_LIES
from support.node_client import content, put
from support.nodes import Node, NodeClient, NodeDaemon

BOUND_S = 7.5
BELIEVER_S = 2.0
BIG = 128 << 20
POOL = "192MiB"
MakePeer = Callable[..., Daemon]
OnNode = Callable[..., tuple[NodeDaemon, NodeClient]]
SCRIPT = Path(__file__).parents[1] / "support" / "lying_peer.py"


class TwoNodes:
    """A node that has, one that wants, and a cable that takes 2.7 s for the big entry."""

    def __init__(self, pair: tuple[Node, Node], on_node: OnNode) -> None:
        self.near, self.far = pair
        self.has, self.owner = on_node(self.near, POOL)
        self.wants, self.asker = on_node(self.far, POOL)

    def begin(self, key: str = "big") -> None:
        """A fetch of the big entry, under way when this returns."""
        self.asker.send("get", key=key, timeout=8.0, nodes=[self.near.peer], seed=1)
        eventually(lambda: self.wants.status().pools[0].reserved_bytes >= BIG, what="the fetch")
        time.sleep(0.2)

    def end(self, found: bool | None) -> dict:
        """How it went, in time; None: either will do."""
        reply = self.asker.receive()
        assert reply["seconds"] < BOUND_S
        if found is not None:
            assert reply["found"] == found
        if reply["found"]:
            assert reply["right"]
        return reply

    def works(self, key: str) -> None:
        """From now on, or soon: a peer that did not answer is left alone for a while."""
        self.owner.put(key, seed=2)

        def arrives() -> bool:
            got = self.asker.get(key, nodes=[self.near.peer], seed=2)
            assert got["seconds"] < BOUND_S
            assert not got["found"] or got["right"]
            return got["found"]

        eventually(arrives, 30.0, "the nodes find each other again")

    def nothing_leaked(self, within_s: float = 20.0) -> None:
        for daemon in (self.has, self.wants):
            if daemon._process.poll() is None:
                daemon.check_nothing_leaked(within_s)
                assert daemon.peers().set_aside_bytes == 0
                assert "Traceback" not in daemon.text()


@pytest.fixture
def two(pair: tuple[Node, Node], on_node: OnNode) -> TwoNodes:
    nodes = TwoNodes(pair, on_node)
    nodes.owner.put("big", BIG)
    nodes.owner.put("small")
    got = lambda: nodes.asker.get("small", nodes=[nodes.near.peer]).get("right")  # noqa: E731
    eventually(got, 20.0, "they know each other")
    nodes.near.throttle("400mbit")
    return nodes


# -- the peer --------------------------------------------------------------------------------------


def test_the_peer_is_killed_before_a_lease(two: TwoNodes) -> None:
    two.has.kill()
    got = two.asker.get("big", nodes=[two.near.peer])
    assert got["found"] is False
    two.nothing_leaked()


def test_the_peer_is_killed_during_a_read_and_comes_back(two: TwoNodes) -> None:
    two.begin()
    killed_s = time.monotonic()
    two.has.kill()
    two.end(found=False)
    assert time.monotonic() - killed_s < 2.0, "nobody waits for who is known to be gone"
    eventually(lambda: two.wants.peers().peers[0].failed_reads > 0, what="reads were under way")
    two.nothing_leaked()
    before = two.wants.peers().peers[0].incarnation
    two.has.start()
    eventually(lambda: "error" not in two.owner.ask("put", key="new", nbytes=9, seed=1), 10)
    two.works("k")
    assert two.wants.peers().peers[0].incarnation != before
    two.nothing_leaked()


def test_the_peer_is_killed_after_it_has_delivered(two: TwoNodes) -> None:
    two.begin()
    two.near.throttle("1gbit")
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
    eventually(lambda: "error" not in two.owner.ask("put", key="new", nbytes=9, seed=1), 10)
    two.works("k")
    assert two.wants.peers().peers[0].engine != engine
    two.nothing_leaked()


def test_the_peer_stands_still_during_a_read(two: TwoNodes) -> None:
    two.begin()
    os.kill(two.has.pid, signal.SIGSTOP)
    try:
        two.end(found=False)
        got = two.asker.get("small2", nodes=[two.near.peer])
        assert not got["found"], "nor does it hold up the next one"
    finally:
        os.kill(two.has.pid, signal.SIGCONT)
    two.works("k")
    two.nothing_leaked()


def test_the_asking_daemon_is_killed_during_a_read(two: TwoNodes) -> None:
    two.begin()
    assert two.has.status().leases == 1
    two.wants.kill()
    took_s = eventually(lambda: two.has.status().leases == 0, 5, "its leases at the peer")
    assert took_s < 3.0
    two.asker.receive()
    two.nothing_leaked()


def test_the_asking_daemon_is_stopped_during_a_read(two: TwoNodes) -> None:
    two.begin()
    started = time.monotonic()
    assert two.wants.terminate() == 0
    assert time.monotonic() - started < BOUND_S
    eventually(lambda: two.has.status().leases == 0, 2, "its leases at the peer")
    two.asker.receive()
    two.nothing_leaked()


# -- the network -----------------------------------------------------------------------------------


def test_the_link_goes_down_and_up(two: TwoNodes) -> None:
    two.begin()
    two.near.cable(up=False)
    time.sleep(1.0)
    two.near.cable(up=True)
    two.end(found=None)
    two.works("k")
    two.near.cable(up=False)
    got = two.asker.get("gone", nodes=[two.near.peer])
    assert not got["found"]
    assert got["seconds"] < BOUND_S
    two.near.cable(up=True)
    two.works("l")
    two.nothing_leaked()


def test_every_packet_is_lost_for_good(two: TwoNodes) -> None:
    two.begin()
    two.near.drop(two.far, dropped=True)
    eventually(lambda: two.wants.peers().set_aside_bytes, 8.0, "a read may still write there")
    two.end(found=False)
    assert "ecd_set_aside_total 1.0" in two.wants.metrics()
    two.near.drop(two.far, dropped=False)
    two.works("k")
    two.nothing_leaked(within_s=40.0)


def test_some_packets_are_lost(two: TwoNodes) -> None:
    """A queue of six packets at the sender: TCP loses some in every round trip."""
    two.near.throttle("2gbit", limit="9kb")
    for number in range(2):
        two.owner.put(f"k{number}", 4 << 20, seed=number)
        got = two.asker.get(f"k{number}", nodes=[two.near.peer], seed=number)
        assert got["seconds"] < BOUND_S
        assert not got["found"] or got["right"]
    dropped = two.near.run("tc", "-s", "qdisc", "show", "dev", "eth0")
    assert "dropped 0," not in dropped
    two.nothing_leaked()


def test_a_fetch_that_takes_too_long_is_a_miss(two: TwoNodes) -> None:
    two.near.throttle("100mbit")
    two.begin()
    reply = two.end(found=False)
    assert reply["seconds"] > 4
    assert two.wants.peers().fetches["late"] == 1
    two.near.throttle("10gbit")
    two.works("k")
    two.nothing_leaked(within_s=40.0)


def test_nodes_that_expect_a_key_from_each_other_do_not_wait(
    make_peer: MakePeer,
) -> None:
    a, b = make_peer(), make_peer()
    a._settings["ECD_PEERS"], b._settings["ECD_PEERS"] = b.peer, a.peer
    a.start()
    b.start()
    with Client(a.address) as here, Client(b.address) as there:
        for attempt in range(10):
            started = time.monotonic()
            hints = [Hint(node, 0, 0, 1000 * attempt) for node in (b.peer, a.peer)]
            both = [
                client.get_async([f"k{attempt}"], 5.0, only_if_written=True, nodes=[[hint]])[0]
                for client, hint in zip((here, there), hints, strict=True)
            ]
            assert [found.result(6) for found in both] == [None, None]
            assert time.monotonic() - started < 2
    assert a.peers().speculative_reads + b.peers().speculative_reads > 0


# -- a peer that lies ------------------------------------------------------------------------------


@contextlib.contextmanager
def lying_peers(lies: Mapping[int, Sequence[str]]) -> Iterator[list[str]]:
    """Nodes that lie, each with a number of its own: a name of LIES and what else it takes."""
    processes, nodes = [], []
    try:
        for number, lie in lies.items():
            nodes.append(f"127.0.78.{number + 1}:9465")
            ports = f"{26000 + 16 * number}-{26015 + 16 * number}"
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), nodes[-1], ports, *lie],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
            )
            processes.append(process)
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        yield nodes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def liar(request: pytest.FixtureRequest) -> Iterator[str | Hint]:
    lie, ahead = request.param
    number = [*LIES, *OTHER_LIES].index(lie)
    with lying_peers({number + 120 * ahead: [lie]}) as [node]:
        yield Hint(node, 0, 0, NBYTES) if ahead else node


@pytest.fixture(scope="module")
def believer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Client]]:
    """One daemon for all lying peers: no lie may leave a trace in it."""
    daemon = Daemon(
        tmp_path_factory.mktemp("believer"),
        ECD_PEER_ADDRESS="127.0.79.1:9465",
        ECD_ENGINE_PORTS="27000-27031",
        ECD_HINT_NETWORKS="127.0.78.0/24",
        ECD_FETCH_TIMEOUT_S=str(BELIEVER_S),
    )
    daemon.start()
    with Client(daemon.address) as client:
        yield daemon, client
    daemon.close()


LIES_TO_THOSE_AHEAD = (
    *LIES,
    *("another incarnation", "an identity nowhere", "a lease of no time", "no answer"),
    *("an answer to nobody", "hangs up", "dies with the lease", "a pool beyond all"),
)
REFUSED = {
    "an engine elsewhere": "another machine",
    "a lease for ever": "as no node does",
    "a lease of no number": "as no node does",
    "a lease of no time": "as no node does",
    "a pool beyond all": "as no node does",
}
"""Lies that are seen before anything is asked, and what is said of them."""


@pytest.mark.parametrize(
    "liar",
    [(lie, False) for lie in (*LIES, *OTHER_LIES)] + [(lie, True) for lie in LIES_TO_THOSE_AHEAD],
    indirect=True,
    ids=lambda param: param[0] + " to those ahead" * param[1],
)
def test_a_peer_that_lies(
    liar: str | Hint, believer: tuple[Daemon, Client], request: pytest.FixtureRequest
) -> None:
    daemon, client = believer
    started = time.monotonic()
    [found] = client.get_async([f"from {liar}"], 5.5, only_if_written=True, nodes=[[liar]])
    item = found.result(BOUND_S)
    assert time.monotonic() - started < BELIEVER_S + 2.5
    lie, ahead = request.node.callspec.params["liar"]
    if item is not None:
        late = "dies with the lease", *["wrong bytes"] * ahead
        assert lie in ("truth", "bytes from nowhere", *late)  # which may be too late to matter
        assert bytes(item.view) == content(NBYTES, 1)[: item.nbytes]
        item.close()
    else:
        assert lie not in ("truth", "bytes from nowhere")
        node = liar.node if ahead else liar
        [peer] = [peer for peer in daemon.peers().peers if peer.node == node]
        assert peer.last_error or sum(daemon.peers().fetches.values()) > 0
        assert REFUSED.get(lie, "") in peer.last_error
        assert peer.state != "connected" or lie not in REFUSED
        assert ("where it cannot go" in peer.last_error) == lie.startswith("elsewhere")
    assert put(client, "mine", 1000, 3), "the daemon serves on"
    daemon.check_nothing_leaked(within_s=5.0)
    assert "Traceback" not in daemon.text()


def test_a_peer_once_proven_that_answers_late_is_looked_at_again(
    believer: tuple[Daemon, Client],
) -> None:
    """A lease proves the peer only for bytes that come soon after the question; these come late."""
    daemon, client = believer
    with lying_peers({99: [LATER, "0.1"]}) as [node]:
        items = [client.get(f"{key} of {node}", 5.0, nodes=[node]) for key in ("first", "second")]
        assert bytes(items[0].view) == content(NBYTES, 1)
        items[0].close()
        assert items[1] is None
        [peer] = [peer for peer in daemon.peers().peers if peer.node == node]
        assert "another node's memory" in peer.last_error
        daemon.check_nothing_leaked(within_s=5.0)


@pytest.mark.parametrize("ahead", [False, True])
def test_peers_that_die_at_any_moment_of_a_read(
    believer: tuple[Daemon, Client], ahead: bool
) -> None:
    """The peer dies before the first byte, amid the pieces, or before its identity is read."""
    daemon, client = believer
    deaths = {
        100 + 50 * ahead + step: ("dies with the lease", str(step * 0.0005)) for step in range(1, 9)
    }
    with lying_peers(deaths) as nodes:
        for node in nodes:
            started = time.monotonic()
            hint = Hint(node, 0, 0, NBYTES * ahead)
            [found] = client.get_async([f"of {node}"], 5.5, only_if_written=True, nodes=[[hint]])
            item = found.result(BOUND_S)
            assert time.monotonic() - started < 2.0, "nobody waits for who is known to be gone"
            if item is not None:
                assert bytes(item.view) == content(NBYTES, 1)
                item.close()
        daemon.check_nothing_leaked(within_s=5.0)
        assert daemon.peers().set_aside_bytes == 0
    assert "Traceback" not in daemon.text()
