"""Puts without a call: write where memory was granted ahead of need, ring, see the answer appear.

The writer's half of what docs/reading-without-a-call.md describes: announce where is written, see
that the grant is still there, write.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

from ecd_client.errors import DaemonUnavailable
from ecd_proto.contract import MAX_DIMENSIONS
from ecd_proto.mapping import Mapping
from ecd_proto.shm import (
    BELL,
    DESK_BYTES,
    DESKS_AT,
    FIRST_ANSWER_WORD,
    FIRST_GRANT_WORD,
    FIRST_PUT_WORD,
    INDEX_HEADER_BYTES,
    MAX_GRANTS,
    MAX_PUTS,
    PUT_DONE,
    PUT_NUMBER,
    PUT_ROW,
    PUT_WORDS,
    PUTS_WORD,
    REFUSED,
    RESERVATIONS_WORD,
    ROW_BYTES,
    STORED,
    Row,
    answer_to,
    pack_row,
    row_asks,
    unpack_grant,
)

GRANULE_BYTES = 4096
MAX_UNANSWERED = MAX_PUTS // 2
"""Puts that are done before one of them waits for its answer: the daemon lags behind."""
SPINS = 200
"""Looks at the desk, each after letting others run, before they are made further apart."""
PAUSES_S = (20e-6, 1e-3)
"""First and longest pause between two looks after that."""
RING_AGAIN_S = 0.01


CopyTo = Callable[[memoryview], None]
"""Fills a writable view of the entry's length."""


class What(NamedTuple):
    """An entry to be: its key, and what `Content` says of it."""

    namespace: str
    mm_hash: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    metadata: bytes
    cost_s: float


class Begun(NamedTuple):
    """A put that is announced: its place among those of its session, and where it writes.

    `asks`: somebody who made a call was writing something by then, perhaps the same key.
    """

    place: int
    number: int
    offset: int
    nbytes: int
    record: bytes
    asks: bool


class Puts:
    """One session's. Thread-safe."""

    def __init__(self, page: Mapping, number: int, index: Mapping, bell_path: str) -> None:
        """`page` is this session's, of this number. Raises OSError."""
        self.page_number = number
        self._memory = page.view(0, page.nbytes)
        self._words = self._memory.cast("Q")
        self._header = index.view(0, INDEX_HEADER_BYTES).cast("Q")
        desk_at = DESKS_AT + number * DESK_BYTES
        self._desk = index.view(desk_at, DESK_BYTES).cast("Q")
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._bell.connect(bell_path)
        self._lock = threading.Lock()
        self._places = list(range(MAX_PUTS))
        self._unanswered: list[Begun] = []
        self._records: set[bytes] = set()  # of what is begun, and has no answer
        self._last = 0
        self._grants = [0] * MAX_GRANTS
        self._pieces = [(0, 0)] * MAX_GRANTS  # what is left of each: from, to

    def begin(self, what: What, record: bytes) -> Begun | None:
        """Announce a put in the granted memory; `record` is its key's. None: it takes a call.

        Who waits for a key that somebody writes waits for it from now on. Every put that is begun
        must be finished.
        """
        if not _is_plain(what):
            return None
        return self._begin(what, record) or self._begin(what, record)  # the grant may have changed

    def write(self, begun: Begun, copy_to: Callable[[], None], over: Callable[[], bool]) -> bool:
        """Have `copy_to` write the bytes, and let the entry be seen. Raises what that raises.

        True: that was all. False: there is an `answer` to wait for, as the daemon might refuse,
        lags behind or is, by `over`, gone.
        """
        try:
            copy_to()
        except BaseException:
            self.leave(begun)
            raise
        with self._lock:  # a locked instruction, which completes even a copy past the caches
            self._words[_word_of(begun.place) + PUT_DONE] = begun.number
        lags = len(self._unanswered) >= MAX_UNANSWERED
        if not self._ring() or lags or begun.asks or over():
            return False
        with self._lock:
            self._unanswered.append(begun)
        return True

    def answer(self, begun: Begun, over: Callable[[], bool], timeout_s: float) -> bool | None:
        """True: stored; False: it was there; None: it takes a call, and nothing has happened.

        Raises DaemonUnavailable, after which this session must end.
        """
        outcome = self._wait(begun, over, timeout_s)
        self.leave(begun)
        return None if outcome == REFUSED else outcome == STORED

    def leave(self, begun: Begun) -> None:
        """It is answered, or comes to nothing."""
        with self._lock:
            self._leave(begun)

    def close(self) -> None:
        self._bell.close()

    def cut_off(self) -> None:
        self._lock = threading.Lock()

    # -- steps ---------------------------------------------------------------------------------

    def _begin(self, what: What, record: bytes) -> Begun | None:
        # One put at a time up to its recheck: no other thread is given memory that a stale claim
        # lies in.
        with self._lock:
            self._leave_answered()
            if not self._places or record in self._records:
                return None
            piece = self._take_piece(max(1, -(-what.nbytes // GRANULE_BYTES)) * GRANULE_BYTES)
            if piece is None:
                return None
            number, offset = piece
            grant = self._grants[number]
            self._last += 1
            put, place = self._last, self._places.pop()
            self._records.add(record)
            self._words[PUTS_WORD] += 1
            _, _, dtype, shape, nbytes, metadata, cost_s = what
            content = Row(put, 0, offset, nbytes, dtype, shape, metadata, cost_s, False)
            row = pack_row(record, content, 0)
            at = _word_of(place)
            start = (at + PUT_ROW) * 8
            self._memory[start : start + ROW_BYTES] = row
            self._words[at + PUT_NUMBER] = put
            asks = self._header[RESERVATIONS_WORD] > 0
            begun = Begun(place, put, offset, nbytes, record, asks)
            if row_asks(row) or not self._is_granted(number, grant):
                self._leave(begun)
                return None
            return begun

    def _take_piece(self, nbytes: int) -> tuple[int, int] | None:
        """Cut off the grant: of which of its pieces, and where that is. None: it has no such."""
        words = self._desk[FIRST_GRANT_WORD : FIRST_GRANT_WORD + MAX_GRANTS].tolist()
        for number, word in enumerate(words):
            if word != self._grants[number]:
                grant = unpack_grant(word)
                self._pieces[number] = grant.offset, grant.offset + grant.nbytes
                self._grants[number] = word
            start, end = self._pieces[number]
            if start + nbytes <= end:
                self._pieces[number] = start + nbytes, end
                return number, start
        return None

    def _is_granted(self, number: int, grant: int) -> bool:
        return self._desk[FIRST_GRANT_WORD + number] == grant

    def _leave_answered(self) -> None:
        still = []
        for begun in self._unanswered:
            if answer_to(begun.number, self._desk[FIRST_ANSWER_WORD + begun.place]):
                self._leave(begun)
            else:
                still.append(begun)
        self._unanswered = still

    def _leave(self, begun: Begun) -> None:
        self._words[_word_of(begun.place) + PUT_NUMBER] = 0
        self._words[PUTS_WORD] -= 1
        self._places.append(begun.place)
        self._records.discard(begun.record)

    def _wait(self, begun: Begun, over: Callable[[], bool], timeout_s: float) -> int:
        """Look at the desk until the answer is there; ring again if nobody seems to know."""
        desk, word = self._desk, FIRST_ANSWER_WORD + begun.place
        for _ in range(SPINS):
            if outcome := answer_to(begun.number, desk[word]):
                return outcome
            os.sched_yield()
        started_s = rung_s = time.monotonic()
        pause_s, longest_s = PAUSES_S
        while not (outcome := answer_to(begun.number, desk[word])):
            now_s = time.monotonic()
            if over() or now_s - started_s > timeout_s:
                raise DaemonUnavailable("the daemon did not take a put in time")
            if now_s - rung_s > RING_AGAIN_S:
                self._ring()
                rung_s = now_s
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, longest_s)
        return outcome

    def _ring(self) -> bool:
        """False: the daemon is deaf for now, or gone."""
        try:
            self._bell.send(BELL.pack(self.page_number))
        except OSError:
            return False
        return True


def _is_plain(what: What) -> bool:
    """Whether the daemon takes it as it is; the call for what is not says what is wrong with it."""
    return bool(
        what.namespace
        and what.mm_hash
        and len(what.shape) <= MAX_DIMENSIONS
        and isfinite(what.cost_s)
        and what.cost_s >= 0.0
    )


def _word_of(place: int) -> int:
    """Where in the page a put begins."""
    return FIRST_PUT_WORD + place * PUT_WORDS
