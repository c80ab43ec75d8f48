"""The reads of one peer: what is asked for takes turns, is begun, looked at, tried again, proven.

On the polling thread alone, except that threads of the hasher fill in digests. Where a line here
looks odd, the reason is in docs/mooncake.md.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ecd.cluster.checksum import PIECE_BYTES, digests
from ecd_proto.mapping import Mapping

logger = logging.getLogger(__name__)

MAX_READS_PER_PEER = 64
"""Under way at one time; a peer's queue that overflows may never work again."""
READ_BYTES = 8 << 20
"""Larger entries are read in pieces: one is hashed while the next ones are on their way."""
MAX_LARGE_READS_PER_PEER = 4
"""Of these, those of more than PIECE_BYTES; the others do not wait for them."""
LANES = 16
"""TCP connections a peer; one that died fails one read before it is made anew."""
PAUSE_S = (5e-6, 500e-6)
"""Shortest and longest sleep between two looks at the reads under way."""
LOOKS = 4
"""Looks at a read in the time that it takes at BYTES_PER_S, and in the time that it has taken."""
BYTES_PER_S = 4e9
IDENTITY_BYTES = 16
PROOFS = 4096
"""Looks at identities under way at one time, one a peer; dead peers hold theirs for a while."""
VOUCHED_S = 0.02
"""From asking a node for a lease to the last byte of what is then its own: if it answers, it was
alive when it was asked, and none dies, starts anew and answers on its old port in less than this.
"""
SWEEP_S = 0.05


@dataclass(frozen=True)
class Source:
    """Memory of another node's engine, and how to tell whose it is."""

    engine: str
    address: int
    nbytes: int
    identity_address: int
    identity: bytes


@dataclass(eq=False)
class Reading:
    """One read, in pieces. `ended` gives the `digests` of what arrived, or raises ReadFailed.

    Until `ended` is done something may write to the target, whoever has given it up.
    """

    source: Source
    target: int
    asked_s: float
    ended: asyncio.Future[list[int]]
    failures: int = 0
    wanted: bool = True
    # The thread's own.
    fresh: int = 0  # offset of the next piece
    again: list[int] = field(default_factory=list)  # offsets of pieces that failed
    under_way: int = 0
    waits: bool = False  # for its turn
    hashing: dict[int, Future[list[int]]] = field(default_factory=dict)  # by offset
    arrived: dict[int, list[int]] = field(default_factory=dict)  # digests by offset

    def give_up(self) -> None:
        """Begin no more of it."""
        self.wanted = False

    @property
    def failed(self) -> bool:
        return not self.wanted or self.failures > LANES

    @property
    def is_begun(self) -> bool:
        """Whether every piece of it has been."""
        return not self.again and self.fresh >= self.source.nbytes

    @property
    def is_large(self) -> bool:
        return self.source.nbytes > PIECE_BYTES

    def hash(self, offset: int, nbytes: int) -> list[int]:
        """The digests of a piece that has arrived, if anybody wants them."""
        return digests(_bytes_at(self.target + offset, nbytes)) if self.wanted else []

    def is_hashed(self) -> bool:
        """Whether all that has arrived is."""
        return all(piece.done() and not piece.cancelled() for piece in self.hashing.values())


@dataclass(eq=False)
class _Piece:
    reading: Reading
    offset: int
    nbytes: int
    id: int


@dataclass(eq=False)
class _Proof:
    """A read of a node's identity, begun after these readings' last bytes had arrived."""

    source: Source
    readings: list[Reading]
    slot: int
    id: int = 0
    failures: int = 0


Ended = tuple[Reading, "str | None"]
"""A reading that is over, and why it failed."""


class Transfers:
    """Mooncake's reads, and what the line-ups of all peers share."""

    def __init__(self, mooncake: Any, hasher: ThreadPoolExecutor) -> None:
        self._mooncake, self.hasher = mooncake, hasher
        self.identities: dict[str, bytes] = {}
        """What was last read as that of each peer."""
        self.scratch = Mapping.of_memory(PROOFS * IDENTITY_BYTES)
        """Where they are read to."""
        self.slots = list(range(0, self.scratch.nbytes, IDENTITY_BYTES))
        """Offsets in there that are free."""

    def submit(self, peer: str, target: int, source: int, nbytes: int) -> int:
        """Begin one read. One entry an id: the engine reports the first entry's status for all."""
        try:
            began: int = self._mooncake.batch_transfer_async_read(
                peer, [target], [source], [nbytes]
            )
        except Exception:  # it fails as one that was begun does
            logger.exception("Mooncake does not take a read from %s", peer)
            return 0
        return began

    def status(self, began: int) -> int:
        """0: under way, 1: arrived, -1: failed. After that the id is no more."""
        status: int = self._mooncake.transfer_check_status(began) if began else -1
        return status

    def close(self) -> None:
        del self._mooncake


class Lineup:
    """The readings of one engine, which take turns, and what is under way for them."""

    def __init__(self, peer: str, transfers: Transfers) -> None:
        self._peer, self._transfers = peer, transfers
        self._small: deque[Reading] = deque()
        self._large: deque[Reading] = deque()
        self._pieces: list[_Piece] = []
        self._large_under_way = 0
        self._bytes_under_way = [0, 0]  # of small ones, of large
        self._changed_s = 0.0
        self._unproven: list[Reading] = []
        self._proof: _Proof | None = None
        self._swept_s = 0.0
        self._ended: list[Ended] = []

    @property
    def is_empty(self) -> bool:
        return not (self._small or self._large or self._pieces or self._unproven or self._proof)

    def pause(self, now_s: float) -> float:
        """Until the next look at what is under way: at the small ones, where there are any."""
        nbytes = self._bytes_under_way[False] or self._bytes_under_way[True]
        wanted_s = max(nbytes / BYTES_PER_S, now_s - self._changed_s) / LOOKS
        return min(max(wanted_s, PAUSE_S[0]), PAUSE_S[1])

    def line_up(self, reading: Reading) -> None:
        """It is begun when it is its turn."""
        reading.waits = True
        (self._large if reading.is_large else self._small).append(reading)

    def look(self) -> list[Ended]:
        """Take note of what has arrived, and begin what may be: what is over by that."""
        self._look_at_pieces()
        self._look_at_proof()
        self._begin()
        self._sweep()
        ended, self._ended = self._ended, []
        return ended

    def _look_at_pieces(self) -> None:
        """Take note of what has arrived or failed."""
        still: list[_Piece] = []
        for piece in self._pieces:
            status = self._transfers.status(piece.id)
            if status == 0:
                still.append(piece)
                continue
            reading = piece.reading
            reading.under_way -= 1
            self._bytes_under_way[reading.is_large] -= piece.nbytes
            self._large_under_way -= reading.is_large
            if status == -1:
                reading.failures += 1
                reading.again.append(piece.offset)
            elif reading.is_large:
                hashing = self._transfers.hasher.submit(reading.hash, piece.offset, piece.nbytes)
                reading.hashing[piece.offset] = hashing
            else:
                reading.arrived[piece.offset] = reading.hash(piece.offset, piece.nbytes)
            if not (reading.waits or self._is_over(reading)):
                self.line_up(reading)
        if len(still) < len(self._pieces):
            self._changed_s = time.monotonic()
        self._pieces = still

    def _is_over(self, reading: Reading) -> bool:
        """Whether no piece of it is to be begun, or under way; then it goes where it belongs."""
        if reading.failed:
            if reading.under_way == 0:
                self._ended.append((reading, f"{reading.failures} reads failed"))
            return True
        if not reading.is_begun:
            return False
        if reading.under_way == 0:
            if self._is_vouched_for(reading):
                self._ended.append((reading, None))
            else:
                self._unproven.append(reading)
        return True

    def _is_vouched_for(self, reading: Reading) -> bool:
        seen = self._transfers.identities.get(self._peer) == reading.source.identity
        in_time = time.monotonic() < reading.asked_s + VOUCHED_S
        return seen and in_time and reading.failures == 0

    def _begin(self) -> None:
        """Begin as many pieces as may be under way, one of each reading in turn, and a proof."""
        while self._small and len(self._pieces) < MAX_READS_PER_PEER - MAX_LARGE_READS_PER_PEER:
            self._begin_next(self._small)
        while self._large and self._large_under_way < MAX_LARGE_READS_PER_PEER:
            self._begin_next(self._large)
        if self._unproven and self._proof is None and self._transfers.slots:
            # One look at the identity proves all that had arrived before.
            first = self._unproven[0].source
            alike = [r for r in self._unproven if _same_node(r.source, first)]
            self._proof = _Proof(first, alike, self._transfers.slots.pop())
            self._unproven = [r for r in self._unproven if not _same_node(r.source, first)]
            self._begin_proof(self._proof)

    def _begin_next(self, turns: deque[Reading]) -> None:
        """Begin a piece of the reading whose turn it is, unless that was given up."""
        reading = turns.popleft()
        reading.waits = False
        if self._is_over(reading):
            return
        offset = reading.again.pop() if reading.again else reading.fresh
        nbytes = min(READ_BYTES, reading.source.nbytes - offset)
        reading.fresh = max(reading.fresh, offset + nbytes)
        began = self._transfers.submit(
            self._peer, reading.target + offset, reading.source.address + offset, nbytes
        )
        self._pieces.append(_Piece(reading, offset, nbytes, began))
        self._bytes_under_way[reading.is_large] += nbytes
        self._changed_s = time.monotonic()
        self._large_under_way += reading.is_large
        reading.under_way += 1
        if not reading.is_begun:
            self.line_up(reading)

    def _sweep(self) -> None:
        """Now and then, end what was given up and is not under way: no dead peer holds it up."""
        now_s = time.monotonic()
        if now_s - self._swept_s < SWEEP_S:
            return
        self._swept_s = now_s
        for turns in (self._small, self._large):
            for reading in [r for r in turns if r.failed]:
                turns.remove(reading)
                reading.waits = False
                self._is_over(reading)
        proving = self._proof.readings if self._proof else []
        for readings in (self._unproven, proving):
            for reading in [r for r in readings if not r.wanted]:
                readings.remove(reading)
                self._ended.append((reading, "given up"))

    def _begin_proof(self, proof: _Proof) -> None:
        target, source = self._transfers.scratch.address + proof.slot, proof.source.identity_address
        proof.id = self._transfers.submit(self._peer, target, source, IDENTITY_BYTES)
        self._bytes_under_way[False] += IDENTITY_BYTES
        self._changed_s = time.monotonic()

    def _look_at_proof(self) -> None:
        proof = self._proof
        if proof is None:
            return
        status = self._transfers.status(proof.id)
        if status == 0:
            return
        self._bytes_under_way[False] -= IDENTITY_BYTES
        if status == -1 and proof.failures < LANES and proof.readings:
            proof.failures += 1
            proof.readings[0].failures += 1
            self._begin_proof(proof)
            return
        self._transfers.slots.append(proof.slot)
        self._proof = None
        proven = False
        if status == 1:
            seen = bytes(self._transfers.scratch.view(proof.slot, IDENTITY_BYTES))
            self._transfers.identities[self._peer] = seen
            proven = seen == proof.source.identity
        why = "another node's memory" if status == 1 else f"{proof.failures} reads failed"
        self._ended.extend((reading, None if proven else why) for reading in proof.readings)


def _same_node(one: Source, other: Source) -> bool:
    return (one.identity_address, one.identity) == (other.identity_address, other.identity)


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
