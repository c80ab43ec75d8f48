"""Reads of other nodes' memory: lined up, begun, looked at, tried again, hashed, and vouched for.

They are asynchronous and polled by one thread, because a blocking read of Mooncake's burns a core.
A read that was given up on may still write to its destination: the future of a read ends only when
the engine says that the read is over. Where a line here looks odd, the reason is in
docs/mooncake.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ecd.cluster.checksum import PIECE_BYTES, digests
from ecd_proto.mapping import Mapping

MAX_READS_PER_PEER = 64
"""Under way at one time; a peer's queue that overflows may never work again."""
READ_BYTES = 8 << 20
"""Larger entries are read in pieces: one is hashed while the next ones are on their way."""
MAX_LARGE_READS_PER_PEER = 4
"""Of these, those of more than PIECE_BYTES; the others do not wait for them."""
HASHERS = 2
"""Threads that hash what is more than one of its digests."""
HASHERS_NICENESS = 10
"""Mooncake's threads go first: where they wait for hashing, the other end idles meanwhile."""
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
PR_SET_TIMERSLACK = 29


class ReadFailed(Exception):
    """The read is over and did not succeed; the message says why."""


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


@dataclass(eq=False)
class _Lineup:
    """The readings of one engine, which take turns, and what is under way for them."""

    small: deque[Reading] = field(default_factory=deque)
    large: deque[Reading] = field(default_factory=deque)
    pieces: list[_Piece] = field(default_factory=list)
    large_under_way: int = 0
    bytes_under_way: list[int] = field(default_factory=lambda: [0, 0])  # of small ones, of large
    changed_s: float = 0.0
    unproven: list[Reading] = field(default_factory=list)
    proof: _Proof | None = None
    swept_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not (self.small or self.large or self.pieces or self.unproven or self.proof)

    def pause(self, now_s: float) -> float:
        """Until the next look at what is under way: at the small ones, where there are any."""
        nbytes = self.bytes_under_way[False] or self.bytes_under_way[True]
        wanted_s = max(nbytes / BYTES_PER_S, now_s - self.changed_s) / LOOKS
        return min(max(wanted_s, PAUSE_S[0]), PAUSE_S[1])

    def line_up(self, reading: Reading) -> None:
        reading.waits = True
        (self.large if reading.is_large else self.small).append(reading)


_Ended = tuple[Reading, "str | None"]
"""A reading that is over, and why it failed."""


class Reads:
    """By one TransferEngine, told on the event loop that made this.

    `failed` raises what ended the thread that polls, which nothing should.
    """

    def __init__(self, mooncake: Any) -> None:
        self._mooncake = mooncake
        self._loop = asyncio.get_running_loop()
        self._submitted: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._lineups: dict[str, _Lineup] = {}
        self._hasher = ThreadPoolExecutor(HASHERS, "ecd-hash", _let_others_go_first)
        self.scratch = Mapping.of_memory(PROOFS * IDENTITY_BYTES)
        """Where identities are read to."""
        self._slots = list(range(PROOFS))
        self._proven: dict[str, bytes] = {}
        """What was last read as the identity of each peer."""
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="ecd-reads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def read(self, source: Source, target: int, asked_s: float) -> Reading:
        """Bring the bytes of `source` to the address `target`, and make sure whose they were.

        A node that restarted answers on its old ports, so its identity is read after the last byte
        has arrived. Not so where it was seen before and all has arrived within VOUCHED_S of
        `asked_s`: when, on the monotonic clock, the node was asked for the lease without which
        nobody looks at these bytes. Pieces that fail are read again at once, as often as there may
        be connections that have died.
        """
        reading = Reading(source, target, asked_s, self._loop.create_future())
        self._submitted.put(reading)
        return reading

    def close(self) -> None:
        """Stop reading. Readings that are open stay open."""
        if self._thread.is_alive():
            self._submitted.put(None)
            self._thread.join()
        self._hasher.shutdown(cancel_futures=True)
        del self._mooncake

    # -- the thread that polls -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._poll()
        except Exception as error:
            self._tell(self.failed.set_exception, error)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _poll(self) -> None:
        _sleep_precisely()
        while self._take_submitted(self._pause()):
            ended: list[_Ended] = []
            for peer, lineup in list(self._lineups.items()):
                self._look_at_pieces(lineup, ended)
                self._look_at_proof(lineup, ended)
                self._begin(peer, lineup, ended)
                self._sweep(lineup, ended)
                if lineup.is_empty:
                    del self._lineups[peer]
            self._report(ended)

    def _pause(self) -> float | None:
        """Until the next look; None: there is nothing to look at."""
        now_s = time.monotonic()
        return min((lineup.pause(now_s) for lineup in self._lineups.values()), default=None)

    def _take_submitted(self, wait_s: float | None) -> bool:
        """Line up what is asked for, waiting for the first of it. False: the engine closes."""
        with contextlib.suppress(queue.Empty):
            while True:
                reading = self._submitted.get(timeout=wait_s)
                wait_s = 0.0
                if reading is None:
                    return False
                self._lineups.setdefault(reading.source.engine, _Lineup()).line_up(reading)
        return True

    def _report(self, ended: list[_Ended]) -> None:
        """Say what is over, of each reading when all that has arrived of it is hashed."""
        over: list[_Ended] = []
        for end in ended:
            if end[0].is_hashed():
                over.append(end)
            else:
                for piece in end[0].hashing.values():
                    piece.add_done_callback(functools.partial(self._report_hashed, end))
        if over:
            self._tell(_settle, over)

    def _report_hashed(self, end: _Ended, _: Future[list[int]]) -> None:
        if end[0].is_hashed():
            self._tell(_settle, [end])

    def _look_at_pieces(self, lineup: _Lineup, ended: list[_Ended]) -> None:
        """Take note of what has arrived or failed."""
        still: list[_Piece] = []
        for piece in lineup.pieces:
            status = self._status(piece.id)
            if status == 0:
                still.append(piece)
                continue
            reading = piece.reading
            reading.under_way -= 1
            lineup.bytes_under_way[reading.is_large] -= piece.nbytes
            lineup.large_under_way -= reading.is_large
            if status == -1:
                reading.failures += 1
                reading.again.append(piece.offset)
            elif reading.is_large:
                hashing = self._hasher.submit(reading.hash, piece.offset, piece.nbytes)
                reading.hashing[piece.offset] = hashing
            else:
                reading.arrived[piece.offset] = reading.hash(piece.offset, piece.nbytes)
            if not (reading.waits or self._is_over(reading, lineup, ended)):
                lineup.line_up(reading)
        if len(still) < len(lineup.pieces):
            lineup.changed_s = time.monotonic()
        lineup.pieces = still

    def _is_over(self, reading: Reading, lineup: _Lineup, ended: list[_Ended]) -> bool:
        """Whether no piece of it is to be begun, or under way; then it goes where it belongs."""
        if reading.failed:
            if reading.under_way == 0:
                ended.append((reading, f"{reading.failures} reads failed"))
            return True
        if not reading.is_begun:
            return False
        if reading.under_way == 0:
            if self._is_vouched_for(reading):
                ended.append((reading, None))
            else:
                lineup.unproven.append(reading)
        return True

    def _is_vouched_for(self, reading: Reading) -> bool:
        seen = self._proven.get(reading.source.engine) == reading.source.identity
        in_time = time.monotonic() < reading.asked_s + VOUCHED_S
        return seen and in_time and reading.failures == 0

    def _begin(self, peer: str, lineup: _Lineup, ended: list[_Ended]) -> None:
        """Begin as many pieces as may be under way, one of each reading in turn, and a proof."""
        while lineup.small and len(lineup.pieces) < MAX_READS_PER_PEER - MAX_LARGE_READS_PER_PEER:
            self._begin_next(peer, lineup, lineup.small, ended)
        while lineup.large and lineup.large_under_way < MAX_LARGE_READS_PER_PEER:
            self._begin_next(peer, lineup, lineup.large, ended)
        if lineup.unproven and lineup.proof is None and self._slots:
            # One look at the identity proves all that had arrived before.
            first = lineup.unproven[0].source
            alike = [r for r in lineup.unproven if _same_node(r.source, first)]
            lineup.proof = _Proof(first, alike, self._slots.pop())
            lineup.unproven = [r for r in lineup.unproven if not _same_node(r.source, first)]
            self._begin_proof(lineup, lineup.proof)

    def _begin_next(
        self, peer: str, lineup: _Lineup, turns: deque[Reading], ended: list[_Ended]
    ) -> None:
        """Begin a piece of the reading whose turn it is, unless that was given up."""
        reading = turns.popleft()
        reading.waits = False
        if self._is_over(reading, lineup, ended):
            return
        offset = reading.again.pop() if reading.again else reading.fresh
        nbytes = min(READ_BYTES, reading.source.nbytes - offset)
        reading.fresh = max(reading.fresh, offset + nbytes)
        began = self._submit(peer, reading.target + offset, reading.source.address + offset, nbytes)
        lineup.pieces.append(_Piece(reading, offset, nbytes, began))
        lineup.bytes_under_way[reading.is_large] += nbytes
        lineup.changed_s = time.monotonic()
        lineup.large_under_way += reading.is_large
        reading.under_way += 1
        if not reading.is_begun:
            lineup.line_up(reading)

    def _sweep(self, lineup: _Lineup, ended: list[_Ended]) -> None:
        """Now and then, end what was given up and is not under way: no dead peer holds it up."""
        now_s = time.monotonic()
        if now_s - lineup.swept_s < SWEEP_S:
            return
        lineup.swept_s = now_s
        for turns in (lineup.small, lineup.large):
            for reading in [r for r in turns if r.failed]:
                turns.remove(reading)
                reading.waits = False
                self._is_over(reading, lineup, ended)
        proving = lineup.proof.readings if lineup.proof else []
        for readings in (lineup.unproven, proving):
            for reading in [r for r in readings if not r.wanted]:
                readings.remove(reading)
                ended.append((reading, "given up"))

    def _begin_proof(self, lineup: _Lineup, proof: _Proof) -> None:
        source, target = proof.source, self.scratch.address + proof.slot * IDENTITY_BYTES
        proof.id = self._submit(source.engine, target, source.identity_address, IDENTITY_BYTES)
        lineup.bytes_under_way[False] += IDENTITY_BYTES
        lineup.changed_s = time.monotonic()

    def _look_at_proof(self, lineup: _Lineup, ended: list[_Ended]) -> None:
        proof = lineup.proof
        if proof is None:
            return
        status = self._status(proof.id)
        if status == 0:
            return
        lineup.bytes_under_way[False] -= IDENTITY_BYTES
        if status == -1 and proof.failures < LANES and proof.readings:
            proof.failures += 1
            proof.readings[0].failures += 1
            self._begin_proof(lineup, proof)
            return
        at = self.scratch.address + proof.slot * IDENTITY_BYTES
        self._slots.append(proof.slot)
        lineup.proof = None
        proven = False
        if status == 1:
            seen = self._proven[proof.source.engine] = bytes(_bytes_at(at, IDENTITY_BYTES))
            proven = seen == proof.source.identity
        why = "another node's memory" if status == 1 else f"{proof.failures} reads failed"
        ended.extend((reading, None if proven else why) for reading in proof.readings)

    def _submit(self, peer: str, target: int, source: int, nbytes: int) -> int:
        """Begin one read. One entry an id: the engine reports the first entry's status for all."""
        began: int = self._mooncake.batch_transfer_async_read(peer, [target], [source], [nbytes])
        return began

    def _status(self, began: int) -> int:
        """0: under way, 1: arrived, -1: failed. After that the id is no more."""
        status: int = self._mooncake.transfer_check_status(began) if began else -1
        return status


def _sleep_precisely() -> None:
    """Let this thread's short sleeps be as short as they say: the kernel adds 50 us otherwise."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def _let_others_go_first() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), HASHERS_NICENESS)


def _same_node(one: Source, other: Source) -> bool:
    return (one.identity_address, one.identity) == (other.identity_address, other.identity)


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _settle(ended: list[_Ended]) -> None:
    for reading, failure in ended:
        if reading.ended.done():
            continue
        if failure is not None:
            reading.ended.set_exception(ReadFailed(failure))
        else:
            hashed = {offset: piece.result() for offset, piece in reading.hashing.items()}
            in_order = sorted((reading.arrived | hashed).items())
            reading.ended.set_result([digest for _, piece in in_order for digest in piece])
