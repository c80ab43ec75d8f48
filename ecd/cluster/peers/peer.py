"""One other node, and how it has been doing."""

from __future__ import annotations

from dataclasses import dataclass, field

from ecd.base.clock import Clock
from ecd.cluster.directory.directory import MAX_ERROR_CHARS
from ecd.cluster.peers.rates import ReadRate
from ecd_proto.backoff import Backoff
from ecd_proto.v1 import peer_pb2 as pb

BACKOFF = Backoff(0.25, 10.0)
"""First and longest pause after which a peer that did not answer is asked again."""


MAX_UNPROVEN_BYTES, LEAST_UNPROVEN_BYTES = 64 << 20, 64 << 10
"""Most bytes that are read from a node at hinted places until a lease names one of them, and the
bytes for which a smaller place counts."""


class PeerUnavailable(Exception):
    """The node cannot be asked now; the message says why."""


class PeerFull(PeerUnavailable):
    """The node answers, and takes no more links."""


@dataclass(eq=False)
class Peer:
    """A node, its last description of itself, and counts of what was read from it."""

    node: str
    clock: Clock
    hinted: bool = False  # only requests name it
    last: pb.NodeDescription = field(default_factory=pb.NodeDescription)
    last_error: str = ""
    warned: str = ""  # the error of the last attempt to connect, which the log has
    is_full: bool = False  # it took no more links when it was asked last
    backoff_s: float = 0.0
    retry_at_s: float = 0.0
    round_trip_s: float = 0.0
    reads: int = 0
    read_bytes: int = 0
    failed_reads: int = 0
    in_flight: int = 0
    unproven_bytes: int = 0  # of places that hints named, since a lease proved one right
    rate: ReadRate = field(default_factory=ReadRate)

    @property
    def was_reached(self) -> bool:
        return bool(self.last.incarnation)

    @property
    def is_stranger(self) -> bool:
        """Whether the node is known only from hints, and was never reached."""
        return self.hinted and not self.was_reached

    def connected(self, description: pb.NodeDescription) -> None:
        self.last, self.last_error, self.warned = description, "", ""
        self.is_full, self.backoff_s = False, 0.0

    def failed(self, why: object, is_full: bool = False) -> None:
        """Do not ask the node for a while, each time for longer."""
        self.blame(why)
        self.is_full = is_full
        self.backoff_s = BACKOFF.after(self.backoff_s)
        self.retry_at_s = self.clock.now_s() + self.backoff_s

    def unavailable(self, why: str) -> PeerUnavailable:
        """The error for callers who want a link."""
        return (PeerFull if self.is_full else PeerUnavailable)(f"{self.node}{why}")

    def blame(self, why: object) -> None:
        """Note an error of the node that is no reason to avoid it."""
        self.last_error = str(why)[:MAX_ERROR_CHARS]

    def read_ahead(self, nbytes: int) -> bool:
        """Count a place that a hint names; whether it may be read before it is leased.

        Anybody may name places: made-up ones cost this node and that one reads in vain.
        """
        is_allowed = self.unproven_bytes < MAX_UNPROVEN_BYTES
        self.unproven_bytes += max(nbytes, LEAST_UNPROVEN_BYTES) * is_allowed
        return is_allowed

    def prove_hint(self) -> None:
        """Note that an entry was leased at the place that its hint named."""
        self.unproven_bytes = 0

    def answered(self, took_s: float) -> None:
        self.round_trip_s = took_s
        self.rate.answered(took_s)

    def read_began(self, nbytes: int) -> None:
        self.in_flight += 1
        self.rate.began(nbytes, self.clock.now_s())

    def read_ended(self, nbytes: int, failures: int, is_whole: bool) -> None:
        """`is_whole`: all bytes have come."""
        self.in_flight -= 1
        self.failed_reads += failures
        self.rate.ended(nbytes, self.clock.now_s(), is_whole)

    def is_slow(self, nbytes: int) -> bool:
        """Whether `is_slower` may be true of an entry of that size."""
        return self.rate.is_slow(nbytes, self.clock.now_s())

    def is_slower(self, nbytes: int, than_s: float) -> bool:
        """Whether encoding an entry, in `than_s`, is quicker than reading it from the node."""
        return self.rate.is_slower(nbytes, than_s, self.clock.now_s())

    def read_s(self, nbytes: int) -> float | None:
        """The seconds that a read takes; None while unknown."""
        return self.rate.seconds(nbytes, self.clock.now_s())

    def brought(self, nbytes: int) -> None:
        """Count an entry that was read from the node and is stored here."""
        self.reads += 1
        self.read_bytes += nbytes
