"""Reads of other nodes' memory, for the event loop: asynchronous, and polled by one thread.

A blocking read of Mooncake's burns a core. A read that was given up on may still write to its
destination: the future of a read ends only when the engine says that the read is over.
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
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ecd.cluster.lineup import Ended, Lineup, Reading, Source, Transfers

logger = logging.getLogger(__name__)

HASHERS = 2
"""Threads that hash what is more than one of its digests."""
HASHERS_NICENESS = 10
"""Mooncake's threads go first: where they wait for hashing, the other end idles meanwhile."""
PR_SET_TIMERSLACK = 29


class ReadFailed(Exception):
    """The read is over and did not succeed; the message says why."""


class Reads:
    """By one TransferEngine, told on the event loop that made this.

    `failed` raises what ended the thread that polls, which nothing should.
    """

    def __init__(self, mooncake: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._submitted: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._lineups: dict[str, Lineup] = {}
        self._hasher = ThreadPoolExecutor(HASHERS, "ecd-hash", _let_others_go_first)
        self._transfers = Transfers(mooncake, self._hasher)
        self.scratch = self._transfers.scratch
        """Written to besides what is asked for."""
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="ecd-reads", daemon=True)

    def start(self) -> None:
        """Read what is asked for, and what was asked for before this."""
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
        self._transfers.close()

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
            ended: list[Ended] = []
            for peer, lineup in list(self._lineups.items()):
                ended += lineup.look()
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
                peer = reading.source.engine
                if peer not in self._lineups:
                    self._lineups[peer] = Lineup(peer, self._transfers)
                self._lineups[peer].line_up(reading)
        return True

    def _report(self, ended: list[Ended]) -> None:
        """Say what is over, of each reading when all that has arrived of it is hashed."""
        over: list[Ended] = []
        for end in ended:
            if end[0].is_hashed():
                over.append(end)
            else:
                for piece in end[0].hashing.values():
                    piece.add_done_callback(functools.partial(self._report_hashed, end))
        if over:
            self._tell(_settle, over)

    def _report_hashed(self, end: Ended, _: Future[list[int]]) -> None:
        if end[0].is_hashed():
            self._tell(_settle, [end])


def _sleep_precisely() -> None:
    """Let this thread's short sleeps be as short as they say: the kernel adds 50 us otherwise."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def _let_others_go_first() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), HASHERS_NICENESS)


def _settle(ended: list[Ended]) -> None:
    for reading, failure in ended:
        if reading.ended.done():
            continue
        if failure is not None:
            reading.ended.set_exception(ReadFailed(failure))
            continue
        try:
            hashed = {offset: piece.result() for offset, piece in reading.hashing.items()}
        except Exception as error:
            logger.exception("what a read brought cannot be hashed")
            reading.ended.set_exception(ReadFailed(str(error)))
            continue
        in_order = sorted((reading.arrived | hashed).items())
        reading.ended.set_result([digest for _, piece in in_order for digest in piece])
