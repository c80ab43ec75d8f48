"""Verifies whose memory was read: a peer's identity is read after the last byte of an entry.

A peer that restarted answers on its old ports with other memory, and Mooncake does not notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from ecd.cluster.transport.transfers import LANES, Ended, Progress, Read, RemoteExtent, Transfers
from ecd_proto.mapped_file import MappedFile

IDENTITY_BYTES = 16
MAX_IDENTITY_READS = 4096
"""Reads of identities in flight, at most one per peer. A dead peer's lasts some seconds."""
VOUCHED_S = 0.02
"""If the last byte arrives this soon after the lease request was sent, the peer's reply itself
rules out a restart in between: no daemon dies, starts and answers on its old port in less.
"""


class Identities:
    """The identity last read from each peer, and the memory that identities are read into."""

    def __init__(self, slots: int = MAX_IDENTITY_READS) -> None:
        self.scratch = MappedFile.of_memory(slots * IDENTITY_BYTES)
        self.seen: dict[str, bytes] = {}
        """The identities read last, by the names of the peers' engines."""
        self.free_slots = list(range(0, self.scratch.nbytes, IDENTITY_BYTES))
        """Offsets in the scratch memory that no transfer may write to."""


@dataclass
class _IdentityRead:
    """One read of a peer's identity. It began after the last bytes of these reads had arrived."""

    source: RemoteExtent
    reads: list[Read]
    slot: int
    transfer: int | None = None
    failures: int = 0


class IdentityCheck:
    """Checks of one peer's identity, each for all the reads that have arrived before it begins."""

    def __init__(self, engine: str, transfers: Transfers, identities: Identities) -> None:
        self._engine, self._transfers, self._identities = engine, transfers, identities
        self._unchecked: list[Read] = []
        self._current: _IdentityRead | None = None

    @property
    def is_empty(self) -> bool:
        return not self._unchecked and self._current is None

    @property
    def bytes_in_flight(self) -> int:
        return 0 if self._current is None else IDENTITY_BYTES

    def vouched(self, read: Read, now_s: float) -> bool:
        """Whether the lease vouches for a read whose last byte had arrived by `now_s`: no check."""
        seen = self._identities.seen.get(self._engine) == read.source.identity
        in_time = now_s < read.asked_s + VOUCHED_S
        return seen and in_time and read.failures == 0

    def add(self, read: Read) -> None:
        """Check the read, whose last byte has arrived."""
        self._unchecked.append(read)

    def poll(self) -> list[Ended]:
        """Note the end of the transfer under way; return the reads that it decides on."""
        current = self._current
        if current is None or current.transfer is None:
            return []
        progress = self._transfers.progress(current.transfer)
        if progress is Progress.UNDER_WAY:
            return []
        if progress is Progress.FAILED and current.failures < LANES and current.reads:
            current.failures += 1
            current.reads[0].failures += 1
            current.transfer = None
            return []
        self._current = None
        self._identities.free_slots.append(current.slot)
        failure: str | None = f"{current.failures} reads failed"
        if progress is Progress.ARRIVED:
            seen = bytes(self._identities.scratch.view(current.slot, IDENTITY_BYTES))
            self._identities.seen[self._engine] = seen
            failure = None if seen == current.source.identity else "another node's memory"
        return [Ended(read, failure) for read in current.reads]

    def begin(self) -> bool:
        """Begin the next transfer, or the failed one again; return whether one was begun."""
        if self._current is None and self._unchecked and self._identities.free_slots:
            source = self._unchecked[0].source
            alike = [r for r in self._unchecked if _same_peer(r.source, source)]
            self._unchecked = [r for r in self._unchecked if not _same_peer(r.source, source)]
            self._current = _IdentityRead(source, alike, self._identities.free_slots.pop())
        current = self._current
        if current is None or current.transfer is not None:
            return False
        target = self._identities.scratch.address + current.slot
        current.transfer = self._transfers.submit(
            self._engine, target, current.source.identity_address, IDENTITY_BYTES
        )
        return True

    def drop_given_up(self) -> list[Ended]:
        """End the reads that were given up, whose bytes have all arrived."""
        ended = []
        for reads in (self._unchecked, self._current.reads if self._current else []):
            for read in [read for read in reads if not read.wanted]:
                reads.remove(read)
                ended.append(Ended(read, "given up"))
        return ended


def _same_peer(one: RemoteExtent, other: RemoteExtent) -> bool:
    return (one.identity_address, one.identity) == (other.identity_address, other.identity)
