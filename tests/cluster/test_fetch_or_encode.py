"""An entry that a peer delivers more slowly than an engine encodes it is left to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from support.nodes import NodeClient
from support.pairs import Apart, patient_apart
from support.waiting import HANG_S, eventually

NBYTES = 1 << 20
SLOWER = "slower than encoding"
EXPLORED = 32


@dataclass
class SlowPeer:
    """A node with entries that took 0.1 s to encode, and one that reads them at 5 MB/s."""

    apart: Apart

    def put(self, key: str, nbytes: int = NBYTES, cost_s: float = 0.1) -> None:
        stored = self.apart.owner.ask("put", key=key, nbytes=nbytes, seed=1, cost=cost_s)
        assert stored == {"stored": True}

    def found(self, key: str, makes: float | None) -> bool:
        """Whether the asking client, which makes the key in so many seconds or not, gets it."""
        self.send(self.apart.asker, key, makes)
        return self.receive(self.apart.asker)

    def send(self, client: NodeClient, key: str, makes: float | None) -> None:
        about = {"key": key, "nodes": [self.apart.peer], "seed": 1, "makes": makes}
        client.send("get", timeout=HANG_S, **about)

    def receive(self, client: NodeClient) -> bool:
        got = client.receive()
        assert got.get("right", True)
        return got["found"]

    def outcome(self) -> int:
        return self.apart.outcomes()[SLOWER]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowPeer]:
    with patient_apart(tmp_path_factory.mktemp("apart")) as apart:
        slow = SlowPeer(apart)
        apart.near.throttle("40mbit")
        slow.put("first")
        eventually(lambda: slow.found("first", makes=0.0), "nothing is known of the peer yet")
        yield slow
        apart.check_nothing_leaked()


def test_an_engine_that_encodes_sooner_is_told_so_and_others_are_served(slow: SlowPeer) -> None:
    before = slow.outcome()
    slow.put("k")
    assert not slow.found("k", makes=0.0)
    assert not slow.found("k", makes=2.0), "nor does it wait for another node to make it"
    assert slow.outcome() == before + 2
    slow.put("small", nbytes=1 << 19, cost_s=1e-4)
    assert slow.found("small", makes=0.0), "small entries are always fetched"
    assert slow.found("k", makes=None), "this client has no encoder"
    assert slow.outcome() == before + 2
    counted = f'ecd_fetches_total{{outcome="{SLOWER}"}} {before + 2}.0'
    assert counted in slow.apart.wants.metrics()


def test_a_client_without_an_encoder_is_served_whoever_else_waits(slow: SlowPeer) -> None:
    asker = slow.apart.asker
    with contextlib.closing(NodeClient(slow.apart.wants)) as other:
        for number in range(5):
            slow.put(key := f"shared {number}")
            slow.send(asker, key, makes=0.0)
            slow.send(other, key, makes=None)
            assert slow.receive(other)
            slow.receive(asker)


def test_a_peer_that_becomes_faster_is_used_again(slow: SlowPeer) -> None:
    """The last here: it makes the peer fast."""
    slow.apart.near.throttle("10gbit")
    in_a_row = tries = 0
    while in_a_row < 2:  # some are read to measure again, but never two
        slow.put(key := f"faster {tries}")
        in_a_row = in_a_row + 1 if slow.found(key, makes=0.0) else 0
        tries += 1
        assert tries < 12 * EXPLORED
    assert slow.outcome() >= EXPLORED - 1
