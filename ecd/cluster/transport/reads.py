"""Reads of other nodes' memory for the event loop: asynchronous, polled by one thread.

A blocking read of Mooncake's burns a core. A read that was given up may still write to its
target: its future ends only when the engine says that every transfer is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ecd.base.checksum import digests
from ecd.base.clock import REAL, Clock
from ecd.cluster.transport.identity import Identities
from ecd.cluster.transport.read_queue import ReadQueue
from ecd.cluster.transport.transfers import Ended, Piece, Read, RemoteExtent, Transfers

logger = logging.getLogger(__name__)

HASHERS = 2
"""Threads that hash the pieces of large reads. The polling thread hashes small reads itself."""
HASHERS_NICENESS = 10
"""Mooncake's threads have priority: while they wait for hashing, the peer idles."""
PR_SET_TIMERSLACK = 29


class ReadFailed(Exception):
    """The read is over and did not succeed; the message says why."""


class Reading:
    """A read as the event loop sees it.

    `ended` gives the digests of the bytes that arrived, or raises ReadFailed. Until it is done a
    transfer may write to the target, whether or not the read was given up.
    """

    def __init__(self, read: Read, ended: asyncio.Future[list[int]]) -> None:
        self.read, self.ended = read, ended
        self._digests: dict[int, list[int]] = {}  # by the offset of the piece
        self._hashing: dict[int, Future[list[int]]] = {}

    @property
    def failures(self) -> int:
        """Transfers that failed, each of which was tried again or ended the read."""
        return self.read.failures

    def give_up(self) -> None:
        """Begin no more transfers. `ended` is done when those in flight are over."""
        self.read.wanted = False

    # -- on the polling thread -----------------------------------------------------------------

    def hash(self, piece: Piece, hashers: ThreadPoolExecutor) -> None:
        """Compute the digests of a piece that has arrived: those of a large read elsewhere."""
        if self.read.is_large:
            self._hashing[piece.offset] = hashers.submit(self._digests_of, piece)
        else:
            self._digests[piece.offset] = self._digests_of(piece)

    def when_hashed(self, callback: Callable[[], None]) -> None:
        """Call back, from a hasher's thread, when all pieces are hashed; perhaps twice."""
        for piece in self._hashing.values():
            piece.add_done_callback(lambda _: callback() if self.is_hashed() else None)

    def is_hashed(self) -> bool:
        return all(piece.done() and not piece.cancelled() for piece in self._hashing.values())

    def _digests_of(self, piece: Piece) -> list[int]:
        """The digests of one piece; none if the read was given up."""
        if not self.read.wanted:
            return []
        address = self.read.target + piece.offset
        return digests(memoryview((ctypes.c_ubyte * piece.nbytes).from_address(address)).cast("B"))

    # -- on the event loop ---------------------------------------------------------------------

    def resolve(self, failure: str | None) -> None:
        """Give `ended` its result, or ReadFailed. All pieces are hashed."""
        if self.ended.done():
            return
        if failure is not None:
            self.ended.set_exception(ReadFailed(failure))
            return
        try:
            hashed = {offset: piece.result() for offset, piece in self._hashing.items()}
        except Exception as error:
            logger.exception("the bytes of a read cannot be hashed")
            self.ended.set_exception(ReadFailed(str(error)))
            return
        in_order = sorted((self._digests | hashed).items())
        self.ended.set_result([digest for _, piece in in_order for digest in piece])


class Reads:
    """All reads of one engine. Their results appear on the event loop that made this object.

    `failed` raises the error that ended the polling thread, which none should.
    """

    def __init__(self, transfers: Transfers, clock: Clock = REAL) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._transfers = transfers
        self._identities = Identities()
        self.scratch = self._identities.scratch
        """Memory that transfers write to besides the targets of reads."""
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._submitted: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._readings: dict[Read, Reading] = {}
        self._queues: dict[str, ReadQueue] = {}  # by the name of the peer's engine
        self._hashers = ThreadPoolExecutor(HASHERS, "ecd-hash", _lower_priority)
        self._thread = threading.Thread(target=self._run, name="ecd-reads", daemon=True)

    def start(self) -> None:
        """Start the polling thread, and with it the reads that were requested before."""
        self._thread.start()

    def read(self, source: RemoteExtent, target: int, asked_s: float) -> Reading:
        """Read the bytes of `source` to the address `target`, and verify whose they were.

        A peer that restarted answers on its old ports, so its identity is read after the last
        byte has arrived. This is left out if the identity was seen before and the last byte
        arrives within VOUCHED_S of `asked_s`, the monotonic time at which the peer was asked for
        the lease without which the bytes are of no use. Pieces that fail are read again at once,
        as often as there may be connections that have died.
        """
        reading = Reading(Read(source, target, asked_s), self._loop.create_future())
        self._submitted.put(reading)
        return reading

    def close(self) -> None:
        """Stop polling. Reads that are not over stay open."""
        if self._thread.is_alive():
            self._submitted.put(None)
            self._thread.join()
        self._hashers.shutdown(cancel_futures=True)

    # -- on the polling thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._poll()
        except Exception as error:
            self._call_on_loop(self.failed.set_exception, error)

    def _poll(self) -> None:
        _sleep_precisely()
        while self._take_submitted(self._pause()):
            ended: list[Ended] = []
            for engine, waiting in list(self._queues.items()):
                for piece in waiting.poll():
                    self._readings[piece.read].hash(piece, self._hashers)
                ended += waiting.advance(self._clock.now_s())
                if waiting.is_empty:
                    del self._queues[engine]
            self._report(ended)

    def _pause(self) -> float | None:
        """Seconds until the next poll; None if nothing is to be polled."""
        now_s = self._clock.now_s()
        return min((waiting.pause(now_s) for waiting in self._queues.values()), default=None)

    def _take_submitted(self, wait_s: float | None) -> bool:
        """Queue the reads requested, waiting for the first. False: `close` was called."""
        with contextlib.suppress(queue.Empty):
            while True:
                reading = self._submitted.get(timeout=wait_s)
                wait_s = 0.0
                if reading is None:
                    return False
                engine = reading.read.source.engine
                if engine not in self._queues:
                    self._queues[engine] = ReadQueue(engine, self._transfers, self._identities)
                self._readings[reading.read] = reading
                self._queues[engine].add(reading.read)
        return True

    def _report(self, ended: list[Ended]) -> None:
        """Resolve the reads that are over, each as soon as all that has arrived is hashed."""
        resolvable: list[tuple[Reading, str | None]] = []
        for read, failure in ended:
            reading = self._readings.pop(read)
            if reading.is_hashed():
                resolvable.append((reading, failure))
            else:
                resolve = functools.partial(self._call_on_loop, reading.resolve, failure)
                reading.when_hashed(resolve)
        if resolvable:
            self._call_on_loop(_resolve_all, resolvable)

    def _call_on_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)


def _resolve_all(ended: list[tuple[Reading, str | None]]) -> None:
    for reading, failure in ended:
        reading.resolve(failure)


def _sleep_precisely() -> None:
    """Let this thread sleep as briefly as it asks to; the kernel's default adds 50 us."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def _lower_priority() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), HASHERS_NICENESS)
