"""An entry that a peer delivers more slowly than an engine encodes it is left to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from support.daemon import eventually
from support.nodes import Node, NodeClient, NodeDaemon

OnNode = Callable[..., tuple[NodeDaemon, NodeClient]]
NBYTES = 4 << 20
SLOWER = "slower than encoding"
EXPLORED = 32


@dataclass
class SlowPeer:
    """A node with entries that took 80 ms to encode, and one that reads them at 25 MB/s."""

    near: Node
    owner: NodeClient
    daemon: NodeDaemon
    asker: NodeClient

    def put(self, key: str, nbytes: int = NBYTES, cost_s: float = 0.08) -> None:
        stored = self.owner.ask("put", key=key, nbytes=nbytes, seed=1, cost=cost_s)
        assert stored == {"stored": True}

    def found(self, key: str, makes: float | None) -> bool:
        """Whether the asking client, which makes the key in so many seconds or not, gets it."""
        self.send(self.asker, key, makes)
        return self.receive(self.asker)

    def send(self, client: NodeClient, key: str, makes: float | None) -> None:
        about = {"key": key, "nodes": [self.near.peer], "seed": 1, "makes": makes}
        client.send("get", timeout=8.0, **about)

    def receive(self, client: NodeClient) -> bool:
        got = client.receive()
        assert got.get("right", True)
        return got["found"]

    def outcome(self, name: str) -> int:
        return self.daemon.peers().fetches[name]


@pytest.fixture
def slow(pair: tuple[Node, Node], on_node: OnNode) -> SlowPeer:
    near, far = pair
    (_, owner), (daemon, asker) = on_node(near), on_node(far)
    near.throttle("200mbit")
    slow = SlowPeer(near, owner, daemon, asker)
    slow.put("first")
    found = lambda: slow.found("first", makes=0.0)  # noqa: E731
    eventually(found, 20.0, "nothing is known of the peer yet")
    return slow


def test_an_engine_that_encodes_sooner_is_told_so_and_others_are_served(slow: SlowPeer) -> None:
    slow.put("k")
    assert not slow.found("k", makes=0.0)
    assert not slow.found("k", makes=2.0), "nor does it wait for another node to make it"
    assert slow.outcome(SLOWER) == 2
    slow.put("small", nbytes=1 << 19, cost_s=1e-4)
    assert slow.found("small", makes=0.0), "small entries are always fetched"
    assert slow.found("k", makes=None), "this client has no encoder"
    assert slow.outcome(SLOWER) == 2
    assert f'ecd_fetches_total{{outcome="{SLOWER}"}} 2.0' in slow.daemon.metrics()
    slow.daemon.check_nothing_leaked(20.0)


def test_a_client_without_an_encoder_is_served_whoever_else_waits(slow: SlowPeer) -> None:
    other = NodeClient(slow.daemon)
    try:
        for number in range(5):
            slow.put(key := f"k{number}")
            slow.send(slow.asker, key, makes=0.0)
            slow.send(other, key, makes=None)
            assert slow.receive(other)
            slow.receive(slow.asker)
    finally:
        other.close()


def test_a_peer_that_becomes_faster_is_used_again(slow: SlowPeer) -> None:
    slow.near.throttle("10gbit")
    in_a_row = tries = 0
    while in_a_row < 2:  # some are read to measure again, but never two
        slow.put(key := f"k{tries}")
        in_a_row = in_a_row + 1 if slow.found(key, makes=0.0) else 0
        tries += 1
        assert tries < 12 * EXPLORED
    assert slow.outcome(SLOWER) >= EXPLORED - 1
