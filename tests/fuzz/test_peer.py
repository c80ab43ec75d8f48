"""Nodes that send anything to the peer port, and answer anything when they are asked."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from random import Random

import grpc
import pytest

from ecd_client import Client, Hint
from ecd_client.session.channel import open_channel
from ecd_proto.contract import CONTRACT_VERSION, proof
from ecd_proto.v1 import cache_pb2
from ecd_proto.v1 import peer_pb2 as pb
from fuzz.conftest import NODE, TOKEN
from support.daemon import Daemon
from support.fuzz import drive, mutated, pick, watched
from support.fuzzing_peer import NAMESPACE
from support.node_client import content, put
from support.processes import child
from support.waiting import HANG_S

BATCH = 8
KEYS = [f"k{number}" for number in range(20)]
SCRIPT = Path(__file__).parents[1] / "support" / "fuzzing_peer.py"
NBYTES = 16 << 10
"""Of every entry of the peer that answers."""
NODES = [f"127.0.81.10:{port}" for port in range(9465, 9497)]
"""On one host, as their one engine is: a node whose engine is elsewhere is not believed."""
"""All of them that peer, as one whose link broke is left alone for a while."""


class Link:
    """A link that was opened properly, or nearly."""

    def __init__(self, node: str, token: str | None, chance: Random) -> None:
        self._channel = open_channel(node)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        nonce, now = secrets.token_hex(16), str(int(datetime.now().timestamp()))
        metadata = [("ecd-nonce", nonce), ("ecd-time", now)]
        if token is not None:
            metadata.append(("ecd-proof", proof(token, "ask", node, nonce, now)))
        if chance.random() < 0.05:
            name, value = metadata.pop(chance.randrange(2))
            metadata.append((name, value[:-1] + chance.choice("z9~")))
        self._replies = self._channel.stream_stream("/ecd.v1.Peer/Link")(
            iter(self._outbox.get, None), metadata=metadata
        )
        hello = pb.LinkHello(contract_version=CONTRACT_VERSION, daemon="an intruder", node=NODES[0])
        greeting = pb.LinkRequest(hello=hello)
        known = {"node": [NODE, NODES[0], NODES[1]], "contract_version": [CONTRACT_VERSION]}
        is_plain = chance.random() < 0.7
        self.send(greeting.SerializeToString() if is_plain else mutated(greeting, chance, known))
        self.leases: deque[int] = deque([0], 16)
        self._found: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._tickets = itertools.count(1 << 40)
        threading.Thread(target=self._drain, daemon=True).start()

    def send(self, data: bytes) -> None:
        self._outbox.put(data)

    @property
    def is_over(self) -> bool:
        return not self._replies.is_active()

    def _drain(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for data in self._replies:
                reply = pb.LinkReply.FromString(data)
                self._found.put(reply.found.ticket)
                for outcome in reply.leases.outcomes:
                    if outcome.HasField("leased"):
                        self.leases.append(outcome.leased.lease)
        self._found.put(None)

    def settle(self) -> None:
        """Wait until all that was sent is answered, or has ended the link."""
        ticket = next(self._tickets)
        self.send(pb.LinkRequest(find=pb.FindKeys(ticket=ticket)).SerializeToString())
        try:
            while self._found.get(timeout=HANG_S) not in (ticket, None):
                pass
        except queue.Empty:
            raise AssertionError("not answered in time") from None

    def close(self) -> None:
        self._outbox.put(None)
        self._replies.cancel()
        self._channel.close()


def request(chance: Random) -> pb.LinkRequest:
    def keys(count: int) -> list[cache_pb2.Key]:
        return [cache_pb2.Key(namespace="fuzz", mm_hash=chance.choice(KEYS)) for _ in range(count)]

    extent = cache_pb2.Extent(offset=4096, nbytes=1000)
    count = chance.choice((1, 2, 5))
    match chance.randrange(5):
        case 0 | 1:
            asked = [
                pb.LeaseKey(
                    ticket=number,
                    key=key,
                    wait_s=chance.choice((0.0, 0.01, 5.0)),
                    bytes_up_to=chance.choice((0, 5000, 1 << 63)),
                )
                for number, key in enumerate(keys(count))
            ]
            return pb.LinkRequest(lease=pb.LeaseKeys(keys=asked))
        case 2:
            return pb.LinkRequest(find=pb.FindKeys(ticket=7, keys=keys(count)))
        case 3:
            return pb.LinkRequest(offer=pb.OfferKeys(keys=keys(count), extents=[extent] * count))
        case _:
            return pb.LinkRequest(release=pb.ReleaseLeases(leases=[1] * count))


@pytest.mark.parametrize("token", [None, TOKEN], ids=["without a token", "with a token"])
def test_messages_to_the_peer_port(make_node: Callable[..., Daemon], token: str | None) -> None:
    daemon = make_node(**({} if token is None else {"ECD_PEER_TOKEN": token})).start()
    with Client(daemon.address, namespace="fuzz") as owner, watched(daemon) as watch:
        for number, key in enumerate(KEYS[:10]):
            put(owner, key, 1 + 1000 * number, number)
        links: list[Link | None] = [None, None, None]

        def send(chance: Random) -> None:
            for _ in range(BATCH):
                number = chance.randrange(len(links))
                opening = Random(chance.getrandbits(64))  # whether one is opened is not drawn
                link = links[number]
                if link is None or link.is_over or opening.random() < 0.02:
                    if link is not None:
                        link.close()
                    link = links[number] = Link(NODE, token, opening)
                leases = list(link.leases)
                known = {"leases": leases, "lease": leases, "mm_hash": KEYS, "namespace": ["fuzz"]}
                asked = request(chance)
                if asked.HasField("release"):
                    asked.release.leases[:] = [pick(chance, leases) for _ in range(3)]
                link.send(mutated(asked, chance, known))
                link.settle()
            watch.now_and_then(10)

        try:
            drive(f"peer port, {'a' if token else 'no'} token", 0.05, send, BATCH)
        finally:
            for link in links:
                if link is not None:
                    link.close()


class FuzzingPeer:
    """A process that answers for all of NODES, with messages that it alters by a seed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._say() == "ready"

    def _say(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def alter(self, seed: int) -> None:
        """Alter the peer's answers from now on, by this seed."""
        assert self._process.stdin is not None
        print(json.dumps(seed), file=self._process.stdin)
        assert self._say() == "ok"


@pytest.fixture
def peer() -> Iterator[FuzzingPeer]:
    with child(
        [sys.executable, str(SCRIPT), "28700-28715", str(NBYTES), *NODES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
    ) as process:
        yield FuzzingPeer(process)


def test_answers_of_other_nodes(make_node: Callable[..., Daemon], peer: FuzzingPeer) -> None:
    """Two of them are asked for everything, the others where a hint leads to them."""
    right = content(NBYTES, 1)
    daemon = make_node(ECD_DIRECTORY="static", ECD_PEERS=",".join(NODES[:2])).start()
    found = itertools.count()
    with Client(daemon.address, namespace=NAMESPACE) as client, watched(daemon) as watch:

        def send(chance: Random) -> None:
            peer.alter(chance.getrandbits(64))
            hints = []
            for _ in range(4 * BATCH):
                node = chance.choice(NODES)
                ahead = chance.random() < 0.3
                hints.append([Hint(node, 0, 4096 * chance.randrange(4), NBYTES) if ahead else node])
            keys = [secrets.token_hex(8) for _ in hints]
            asked = client.get_async(keys, 10 * HANG_S, only_if_written=True, nodes=hints)
            for answer in asked:  # the deadline of a fetch ends it, not the client's patience
                item = answer.result(HANG_S)
                if item is not None:
                    with item:
                        assert bytes(item.view) == right
                    next(found)
            watch.now_and_then(5)

        drive("answers of peers", 0.05, send, 4 * BATCH)
        print(f"found: {next(found)}, {dict(daemon.peers().fetches)}")
        assert next(found) > 10, "nothing was right"
    assert daemon.peers().set_aside_bytes == 0
