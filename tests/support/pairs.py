"""Two daemons that all tests of a file share, each test with clients and counts of its own."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from ecd_client import Client
from ecd_proto.v1 import cache_pb2 as pb
from support.daemon import Daemon, changed, close_all
from support.nodes import Node, NodeClient, NodeDaemon
from support.waiting import HANG_S

PATIENCE = (
    "from ecd.cluster.transport import handshake; from ecd.cluster.peers import link, peers",
    f"handshake.TIMEOUT_S = link.ANSWER_TIMEOUT_S = peers.CONNECT_TIMEOUT_S = {HANG_S}",
)
PATIENT = changed(*PATIENCE)
"""A daemon that takes a halt of this machine for no silence of a peer, which costs misses."""


def start_all(*daemons: Daemon) -> None:
    """Start them at one time."""
    for daemon in daemons:
        daemon.start(wait=False)
    for daemon in daemons:
        daemon.wait_serving()


def missed(client: Client, key: str, nodes: list[str] | None = None) -> bool:
    """Whether the key is a miss long before the deadline of the client's wait."""
    about = {"only_if_written": True, "nodes": [nodes or []]}
    [found] = client.get_async([key], 10 * HANG_S, **about)
    item = found.result(HANG_S)
    if item is not None:
        item.close()
    return item is None


class Pair:
    """Daemons `a` and `b`, a client of each (`here`, `there`), and what `b` has counted."""

    def __init__(self, a: Daemon, b: Daemon) -> None:
        self.a, self.b = a, b
        self._before: Counter[str] = Counter()

    @contextlib.contextmanager
    def for_test(self, name: str) -> Iterator[Pair]:
        """The clients' namespace is `name`. Before and after it the daemons are unused."""
        self._check_unused()
        self.name, self._before = name, self._told()
        with contextlib.ExitStack() as self._clients:
            self.here, self.there = map(self.client_of, (self.a, self.b))
            yield self
        self._check_unused()

    def _check_unused(self) -> None:
        for daemon in (self.a, self.b):
            daemon.wait_idle("settled")
        for daemon in (self.a, self.b):
            daemon.check_unused()

    def client_of(self, daemon: Daemon) -> Client:
        """A client in the test's namespace, closed with the test."""
        client = Client(daemon.address, namespace=self.name, connect_timeout=HANG_S)
        return self._clients.enter_context(client)

    def _told(self) -> Counter[str]:
        told = self.b.peers()
        counts = Counter(told.fetches)
        counts["speculative"] = told.speculative_reads
        counts["speculative used"] = told.speculative_reads_used
        for peer in told.peers:
            if peer.node == self.a.peer:
                for name in ("reads", "read_bytes", "failed_reads"):
                    counts[name] = getattr(peer, name)
        return counts

    @property
    def counted(self) -> Counter[str]:
        """Of `b`, since the test began: outcomes of fetches, and its reads from `a`."""
        return self._told() - self._before

    @property
    def in_flight(self) -> int:
        """Reads of `b` from `a` that are under way."""
        return sum(peer.in_flight for peer in self.b.peers().peers if peer.node == self.a.peer)


def patient_pair(make_peer: Callable[..., Daemon], pool: str, **settings: str) -> Pair:
    """Two that wait for each other as long as it takes."""
    settings = {"ECD_FETCH_TIMEOUT_S": f"{HANG_S}", **settings}
    pair = [make_peer(pool, **settings) for _ in range(2)]
    for daemon in pair:
        daemon.command = PATIENT
    start_all(*pair)
    return Pair(*pair)


@contextlib.contextmanager
def cable() -> Iterator[tuple[Node, Node]]:
    """Two machines and a cable."""
    with contextlib.ExitStack() as stack:
        near, far = (stack.enter_context(contextlib.closing(Node(number))) for number in (1, 2))
        near.plug(far)
        yield near, far


class Apart:
    """A daemon on each of two machines, `wants` reads from `has`, and a client beside each."""

    def __init__(self, near: Node, far: Node, directory: Path, **settings: str) -> None:
        """Settings are those of `wants`."""
        self.near, self.far, self.peer = near, far, near.peer
        self.has = NodeDaemon(near, directory)
        self.wants = NodeDaemon(far, directory, **settings)

    @contextlib.contextmanager
    def running(self) -> Iterator[Apart]:
        try:
            start_all(self.has, self.wants)
            with (
                contextlib.closing(NodeClient(self.has)) as self.owner,
                contextlib.closing(NodeClient(self.wants)) as self.asker,
            ):
                yield self
        finally:
            close_all((self.has, self.wants))

    def outcomes(self) -> Counter[str]:
        return Counter(self.wants.peers().fetches)

    def status(self) -> pb.PeerStatus:
        """What `wants` says of `has`."""
        [status] = [peer for peer in self.wants.peers().peers if peer.node == self.peer]
        return status

    def check_nothing_leaked(self) -> None:
        for daemon in (self.has, self.wants):
            daemon.check_nothing_leaked()


@contextlib.contextmanager
def patient_apart(directory: Path) -> Iterator[Apart]:
    """Two machines, a cable, and daemons that wait for each other as long as it takes."""
    with cable() as (near, far):
        apart = Apart(near, far, directory, ECD_FETCH_TIMEOUT_S=f"{HANG_S}")
        apart.has.command = apart.wants.command = PATIENT
        with apart.running():
            yield apart
