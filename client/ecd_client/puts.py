"""Puts without a call: write where memory was granted ahead of need, ring, see the answer appear.

The writer's half of what docs/reading-without-a-call.md describes: announce where is written, see
that the grant is still there, write.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ecd_client.errors import DaemonUnavailable
from ecd_proto.mapping import Mapping
from ecd_proto.shm import (
    BELL,
    DESK_BYTES,
    FIRST_ANSWER_WORD,
    FIRST_PUT_WORD,
    GRANT_WORD,
    MAX_PUTS,
    PUT_DONE,
    PUT_NUMBER,
    PUT_ROW,
    PUT_WORDS,
    REFUSED,
    ROW_BYTES,
    STORED,
    Row,
    answer_to,
    key_record,
    pack_row,
    row_asks,
    unpack_grant,
)

GRANULE_BYTES = 4096
SPINS = 200
"""Looks at the desk, each after letting others run, before they are made further apart."""
SPINS_TO_RING = 50
"""Of these, before the bell rings anew: it rang when the put was about to be done."""
PAUSES_S = (20e-6, 1e-3)
"""First and longest pause between two looks after that."""
RING_AGAIN_S = 0.01


CopyTo = Callable[[memoryview, Callable[[], None]], None]
"""Fills a writable view of the entry's length; says shortly before the end that it is near."""


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
    """A put that is announced: its place among those of its session, and where it writes."""

    place: int
    number: int
    offset: int
    nbytes: int


class Puts:
    """One session's. Thread-safe."""

    def __init__(self, page: Mapping, number: int, desk: Mapping, at: int, bell_path: str) -> None:
        """`page` and `desk` are this session's, the desk `at` its offset. Raises OSError."""
        self._page_number = number
        self._memory = page.view(0, page.nbytes)
        self._words = self._memory.cast("Q")
        self._desk = desk.view(at, DESK_BYTES).cast("Q")
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._bell.connect(bell_path)
        self._lock = threading.Lock()
        self._places = list(range(MAX_PUTS))
        self._last = 0
        self._grant = self._cursor = self._end = 0

    def begin(self, what: What) -> Begun | None:
        """Announce a put in the granted memory. None: it takes a call.

        Who waits for a key that somebody writes waits for it from now on. Every put that is begun
        must be finished.
        """
        record = key_record(what.namespace, what.mm_hash)
        return None if record is None else self._begin(what, record)

    def finish(
        self,
        begun: Begun,
        copy_to: Callable[[Callable[[], None]], None],
        over: Callable[[], bool],
        timeout_s: float,
    ) -> bool | None:
        """True: stored; False: it was there; None: it takes a call, and nothing has happened.

        `copy_to` writes the bytes, and calls what it is given shortly before the last one; `over`
        says whether the daemon went away. Raises DaemonUnavailable, after which this session must
        end, and what `copy_to` raises.
        """
        place, number, _, _ = begun
        try:
            copy_to(lambda: self._ring(soon=True))
            self._words[_word_of(place) + PUT_DONE] = number
            outcome = self._wait(place, number, over, timeout_s)
        except DaemonUnavailable:
            raise  # the daemon may still take it: the place stays as it is
        except BaseException:
            self._leave(place)
            raise
        self._leave(place)
        return None if outcome == REFUSED else outcome == STORED

    def close(self) -> None:
        self._bell.close()

    # -- steps ---------------------------------------------------------------------------------

    def _begin(self, what: What, record: bytes) -> Begun | None:
        rounded = max(1, -(-what.nbytes // GRANULE_BYTES)) * GRANULE_BYTES
        with self._lock:
            grant = self._desk[GRANT_WORD]
            if grant != self._grant:
                self._grant, now = grant, unpack_grant(grant)
                self._cursor, self._end = now.offset, now.offset + now.nbytes
            if not grant or self._cursor + rounded > self._end or not self._places:
                return None
            offset, place = self._cursor, self._places.pop()
            self._cursor += rounded
            self._last = number = self._last + 1
        row = pack_row(
            record,
            Row(
                number,
                0,
                offset,
                what.nbytes,
                what.dtype,
                what.shape,
                what.metadata,
                what.cost_s,
                False,
            ),
            0,
        )
        at = _word_of(place)
        start = (at + PUT_ROW) * 8
        self._memory[start : start + ROW_BYTES] = row
        self._words[at + PUT_NUMBER] = number
        if row_asks(row) or not self._is_granted(grant):
            self._leave(place)
            return None
        return Begun(place, number, offset, what.nbytes)

    def _is_granted(self, grant: int) -> bool:
        return self._desk[GRANT_WORD] == grant

    def _leave(self, place: int) -> None:
        self._words[_word_of(place) + PUT_NUMBER] = 0
        self._places.append(place)

    def _wait(self, place: int, number: int, over: Callable[[], bool], timeout_s: float) -> int:
        """Look at the desk until the answer is there; ring if nobody seems to know."""
        desk, word = self._desk, FIRST_ANSWER_WORD + place
        for spin in range(SPINS):
            if outcome := answer_to(number, desk[word]):
                return outcome
            if spin == SPINS_TO_RING:
                self._ring()
            os.sched_yield()
        started_s = rung_s = time.monotonic()
        pause_s, longest_s = PAUSES_S
        while not (outcome := answer_to(number, desk[word])):
            now_s = time.monotonic()
            if over() or now_s - started_s > timeout_s:
                raise DaemonUnavailable("the daemon did not take a put in time")
            if now_s - rung_s > RING_AGAIN_S:
                self._ring()
                rung_s = now_s
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, longest_s)
        return outcome

    def _ring(self, soon: bool = False) -> None:
        with contextlib.suppress(OSError):  # it is deaf for now, or gone: seen by who waits
            self._bell.send(BELL.pack(self._page_number, soon))


def _word_of(place: int) -> int:
    """Where in the page a put begins."""
    return FIRST_PUT_WORD + place * PUT_WORDS
