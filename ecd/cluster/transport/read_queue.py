"""Per-peer read scheduler: queues reads, issues, polls and retries their pieces, ends them.

A state machine over `Transfers`, driven by one thread, which brings the time. docs/mooncake.md has
the reason for each line that looks odd.
"""

from __future__ import annotations

from collections import deque

from ecd.cluster.transport.identity import Identities, IdentityCheck
from ecd.cluster.transport.transfers import Ended, Piece, Progress, Read, Transfers

MAX_READS_PER_PEER = 64
"""Pieces in flight at one time. A peer's queue in Mooncake that overflows may stop for good."""
MAX_LARGE_READS_PER_PEER = 4
"""Pieces of large reads in flight at one time. Small reads do not wait for them."""
READ_BYTES = 8 << 20
"""Longest piece. One piece is hashed while the next ones are in flight."""
POLL_S = (5e-6, 500e-6)
"""Shortest and longest pause between two polls."""
POLLS = 4
"""Polls in the time that the pieces in flight take at BYTES_PER_S, or have taken so far."""
BYTES_PER_S = 4e9
SWEEP_S = 0.05
"""Between two sweeps, which end queued reads that were given up, whatever their peer does."""


class ReadQueue:
    """The reads from one peer's engine: the queues for small and large ones, the pieces in flight.

    Each turn of the driving thread calls `poll`, reads the clock, and calls `advance`.
    """

    def __init__(self, engine: str, transfers: Transfers, identities: Identities) -> None:
        self._engine, self._transfers = engine, transfers
        self._small: deque[Read] = deque()
        self._large: deque[Read] = deque()
        self._pieces: list[Piece] = []
        self._large_in_flight = 0
        self._bytes_in_flight = [0, 0]  # of small reads, of large ones
        self._arrived: list[Read] = []  # every piece has arrived, nothing is verified
        self._check = IdentityCheck(engine, transfers, identities)
        self._ended: list[Ended] = []
        self._has_changed = False  # since `advance`
        self._changed_s = 0.0
        self._swept_s = 0.0

    @property
    def is_empty(self) -> bool:
        waiting = self._small or self._large or self._pieces or self._arrived
        return not waiting and self._check.is_empty

    def add(self, read: Read) -> None:
        """Queue a read, of which one piece begins at each of its turns."""
        read.is_queued = True
        (self._large if read.is_large else self._small).append(read)

    def pause(self, now_s: float) -> float:
        """Seconds until the next poll is worth while: for the small reads if any is in flight."""
        small_bytes = self._bytes_in_flight[False] + self._check.bytes_in_flight
        nbytes = small_bytes or self._bytes_in_flight[True]
        wanted_s = max(nbytes / BYTES_PER_S, now_s - self._changed_s) / POLLS
        return min(max(wanted_s, POLL_S[0]), POLL_S[1])

    def poll(self) -> list[Piece]:
        """Note which transfers are over; return the pieces that have arrived, to be hashed."""
        polled, self._pieces = self._pieces, []
        arrived = []
        for piece in polled:
            progress = self._transfers.progress(piece.transfer)
            if progress is Progress.UNDER_WAY:
                self._pieces.append(piece)
                continue
            read = piece.read
            read.in_flight -= 1
            self._bytes_in_flight[read.is_large] -= piece.nbytes
            self._large_in_flight -= read.is_large
            self._has_changed = True
            if progress is Progress.FAILED:
                read.failures += 1
                read.failed_offsets.append(piece.offset)
            else:
                arrived.append(piece)
            if not read.is_queued and self._has_more(read):
                self.add(read)
        self._ended += self._check.poll()
        return arrived

    def advance(self, now_s: float) -> list[Ended]:
        """Begin the pieces and the check that may begin; return the reads that are over.

        `now_s` is read after `poll` returns, and so is never earlier than a byte's arrival.
        """
        self._begin_pieces(now_s)
        self._verify(now_s)
        if now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            self._sweep()
        if self._has_changed:
            self._has_changed, self._changed_s = False, now_s
        ended, self._ended = self._ended, []
        return ended

    def _has_more(self, read: Read) -> bool:
        """Whether a piece is to begin. If none is, and none is in flight, the read moves on."""
        if not (read.has_failed or read.is_begun):
            return True
        if read.in_flight == 0:
            if read.has_failed:
                why = f"{read.failures} reads failed" if read.wanted else "given up"
                self._ended.append(Ended(read, why))
            else:
                self._arrived.append(read)
        return False

    def _begin_pieces(self, now_s: float) -> None:
        """Begin as many pieces as may be in flight, one of each read in turn."""
        while self._small and len(self._pieces) < MAX_READS_PER_PEER - MAX_LARGE_READS_PER_PEER:
            self._begin_next(self._small, now_s)
        while self._large and self._large_in_flight < MAX_LARGE_READS_PER_PEER:
            self._begin_next(self._large, now_s)

    def _begin_next(self, turns: deque[Read], now_s: float) -> None:
        """Begin one piece of the read whose turn it is, unless the read was given up."""
        read = turns.popleft()
        read.is_queued = False
        read.begun_s = read.begun_s or now_s
        if not self._has_more(read):
            return
        offset = read.failed_offsets.pop() if read.failed_offsets else read.next_offset
        nbytes = min(READ_BYTES, read.source.nbytes - offset)
        read.next_offset = max(read.next_offset, offset + nbytes)
        transfer = self._transfers.submit(
            self._engine, read.target + offset, read.source.address + offset, nbytes
        )
        self._pieces.append(Piece(read, offset, nbytes, transfer))
        read.in_flight += 1
        self._bytes_in_flight[read.is_large] += nbytes
        self._large_in_flight += read.is_large
        self._has_changed = True
        if not read.is_begun:
            self.add(read)

    def _verify(self, now_s: float) -> None:
        """End the reads that their lease vouches for; check the peer's identity for the others."""
        for read in self._arrived:
            if self._check.vouched(read, now_s):
                self._ended.append(Ended(read, None))
            else:
                self._check.add(read)
        self._arrived = []
        self._has_changed |= self._check.begin()

    def _sweep(self) -> None:
        """End the reads that were given up and are not in flight: no dead peer delays that."""
        for turns in (self._small, self._large):
            for read in [read for read in turns if read.has_failed]:
                turns.remove(read)
                read.is_queued = False
                self._has_more(read)
        self._ended += self._check.drop_given_up()
