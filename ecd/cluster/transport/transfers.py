"""Reads of peers' memory: their types, and the protocol that an engine implements."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

LANES = 16
"""TCP connections to a peer. A dead one fails one transfer before Mooncake replaces it."""
LARGE_BYTES = 1 << 20
"""A read above this size is large: it takes turns with the large ones and delays no small one."""


@dataclass(frozen=True)
class RemoteExtent:
    """Bytes in the memory of a peer's engine, and where that memory holds the peer's identity."""

    engine: str
    address: int
    nbytes: int
    identity_address: int
    identity: bytes


@dataclass(eq=False)
class Read:
    """One read of a remote extent to the address `target`, in pieces.

    Until its queue reports the end, a transfer may still write to the target, given up or not.
    """

    source: RemoteExtent
    target: int
    asked_s: float
    """When the peer was asked for the lease; without the lease nobody uses the bytes."""
    wanted: bool = True
    """Whether the bytes are still of use. Any thread may clear it, nobody sets it again."""
    failures: int = 0
    """Transfers that failed, the reads of the identity included."""
    begun_s: float = 0.0
    """When its first piece began; before that it waited for its turn."""
    # The rest belongs to the read's queue.
    next_offset: int = 0
    failed_offsets: list[int] = field(default_factory=list)
    in_flight: int = 0
    is_queued: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether no more of the read is to begin."""
        return not self.wanted or self.failures > LANES

    @property
    def is_begun(self) -> bool:
        """Whether every piece has arrived or is in flight."""
        return not self.failed_offsets and self.next_offset >= self.source.nbytes

    @property
    def is_large(self) -> bool:
        return self.source.nbytes > LARGE_BYTES


class Piece(NamedTuple):
    """A part of a read, and the engine's number of the transfer that brings it."""

    read: Read
    offset: int
    nbytes: int
    transfer: int


class Ended(NamedTuple):
    """A read that is over. `failure` is the reason, or None if all has arrived and is verified."""

    read: Read
    failure: str | None


class Progress(enum.Enum):
    """The state of a transfer."""

    UNDER_WAY = enum.auto()
    ARRIVED = enum.auto()
    FAILED = enum.auto()


class Transfers(Protocol):
    """One-sided transfers from peers' memory to this process's, begun and polled by one thread."""

    def submit(self, engine: str, target: int, source: int, nbytes: int) -> int:
        """Begin to copy bytes from the peer's address `source` to the local address `target`.

        Returns the transfer's number. A transfer that cannot begin gets one too, and has failed.
        """
        ...

    def progress(self, transfer: int) -> Progress:
        """The state of a transfer, which may write to its target until this says otherwise.

        After ARRIVED or FAILED the number means nothing any more.
        """
        ...
