"""Putting without a call: write where memory was granted ahead of need, and ring the doorbell.

`PutWriter` takes the seven steps of the writer in docs/reading-without-a-call.md, in that order.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from ecd_client import clock
from ecd_client.errors import DaemonUnavailable
from ecd_client.pools import MappedPool
from ecd_client.shared.board import MappedBoard
from ecd_client.shared.index import AskDaemon, IndexReader
from ecd_client.shared.spin import spin
from ecd_client.values import Extent
from ecd_proto.backoff import Backoff
from ecd_proto.shm.files import granules_bytes
from ecd_proto.shm.index import INDEX_HEADER_BYTES, MAILBOXES_AT, RESERVATIONS_WORD
from ecd_proto.shm.rows import ROW_BYTES, Row, pack_row, row_is_truncated
from ecd_proto.shm.session_page import (
    CLAIM_DONE,
    CLAIM_NUMBER,
    CLAIM_ROW,
    CLAIMS_WORD,
    DOORBELL,
    FIRST_ANSWER_WORD,
    FIRST_GRANT_WORD,
    MAILBOX_BYTES,
    MAX_CLAIMS,
    MAX_GRANTS,
    REFUSED,
    STORED,
    answer_to,
    claim_at,
    unpack_grant,
)

MAX_UNANSWERED = MAX_CLAIMS // 2
"""Unanswered puts at which the next one waits for its answer: the daemon lags behind."""
SPIN_S = 150e-6
"""How long a writer spins for an answer before it sleeps between two checks."""
PAUSES = Backoff(20e-6, 1e-3)
"""First and longest sleep between two checks."""
RING_AGAIN_S = 0.01


CopyTo = Callable[[MappedPool, Extent], None]
"""Writes the entry's bytes to its extent of the pool; all are written when it returns or raises."""


class PutState(Enum):
    """The progress of a put."""

    CLAIMED = 1
    """Granted memory is claimed for it, and to be written."""
    UNANSWERED = 2
    """Written, and the daemon may refuse it: its answer must be awaited."""
    MUST_CALL = 3
    """Nothing has happened: the entry must be reserved and committed by calls."""
    STORED = 4
    ALREADY_STORED = 5
    BEING_WRITTEN = 6
    """Another client is writing the key."""

    __hash__ = object.__hash__  # enum's own is a function of Python's, and each put hashes three


PUT: dict[PutState, tuple[PutState, ...]] = {
    PutState.CLAIMED: (PutState.STORED, PutState.UNANSWERED),
    PutState.UNANSWERED: (PutState.STORED, PutState.ALREADY_STORED, PutState.MUST_CALL),
    PutState.MUST_CALL: (PutState.STORED, PutState.ALREADY_STORED, PutState.BEING_WRITTEN),
}
"""The states that may follow each state of a put.

A put begins as CLAIMED, ALREADY_STORED or MUST_CALL. The states without a row end it.
"""


class NewEntry(NamedTuple):
    """An entry to put: its key, and its content."""

    namespace: str
    mm_hash: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    metadata: bytes
    cost_s: float


class Claim(NamedTuple):
    """A put that is announced in the page: its place there, and its extent.

    `needs_answer`: a reservation by a call was open then, perhaps of the same key.
    """

    place: int
    number: int
    pool: int
    offset: int
    nbytes: int
    record: bytes
    needs_answer: bool


class PutWriter:
    """Puts entries into one session's granted memory. Thread-safe."""

    def __init__(
        self, board: MappedBoard, index: IndexReader, pool: MappedPool, doorbell_path: str
    ) -> None:
        """`pool` is where grants lie. Raises OSError where the doorbell is missing."""
        self.page_number = board.page_number
        self.session_is_over = False
        """Set when the stream has ended: no answers will come."""
        self._is_cut_off = False
        self._index, self._pool = index, pool
        self._memory = board.page.view(0, board.page.nbytes)
        self._words = self._memory.cast("Q")
        self._header = board.index.view(0, INDEX_HEADER_BYTES).cast("Q")
        mailbox_at = MAILBOXES_AT + board.page_number * MAILBOX_BYTES
        self._mailbox = board.index.view(mailbox_at, MAILBOX_BYTES).cast("Q")
        self._lock = threading.Lock()
        self._places = list(range(MAX_CLAIMS))
        self._unanswered: list[Claim] = []
        self._records: set[bytes] = set()  # of claims without an answer
        self._last = 0
        self._grants = [0] * MAX_GRANTS
        self._expected = [0] * MAX_GRANTS  # of these, the memory is populated
        self._pieces = [(0, 0)] * MAX_GRANTS  # start and end of the rest of each grant
        self._doorbell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._doorbell.connect(doorbell_path)
        except BaseException:
            self.close()
            raise

    # -- the steps -----------------------------------------------------------------------------

    def claim(self, entry: NewEntry) -> Claim | PutState:
        """Steps 1 to 4: claim granted memory for the entry, unless a call must decide.

        A waiter for the key waits for this put from now on, so every claim must be written or
        left.
        """
        try:
            record = self._index.record(entry.namespace, entry.mm_hash)
        except AskDaemon:
            return PutState.MUST_CALL
        if record is None:
            return PutState.MUST_CALL
        if self._is_stored(record):
            return PutState.ALREADY_STORED
        if not _is_plain(entry):
            return PutState.MUST_CALL
        # Once more, as the grant may have changed in between.
        claim = self._claim(entry, record) or self._claim(entry, record)
        if claim is None:
            return PutState.MUST_CALL
        # Step 4: see whether another session has claimed the key, or it is stored by now.
        if self._index.claims.any_elsewhere(record):
            self.leave(claim)
            return PutState.MUST_CALL
        if self._is_stored(record):
            self.leave(claim)
            return PutState.ALREADY_STORED
        return claim

    def _claim(self, entry: NewEntry, record: bytes) -> Claim | None:
        """Steps 1 to 3. None: no granted memory has room for it."""
        # One put at a time: no other thread is given memory that a stale claim lies in.
        with self._lock:
            self._leave_answered()
            if not self._places or record in self._records:
                return None
            # Step 1: read a grant's word, find the next part of it.
            piece = self._find_piece(granules_bytes(entry.nbytes))
            if piece is None:
                return None
            number, offset = piece
            grant = self._grants[number]
            # The row is packed before anything is taken, as a row may be refused.
            put, pool = self._last + 1, self._pool.number
            _, _, dtype, shape, nbytes, metadata, cost_s = entry
            content = Row(put, pool, offset, nbytes, dtype, shape, metadata, cost_s, False)
            row = pack_row(record, content, 0)
            if row_is_truncated(row):
                return None
            # Step 2: take the part, and claim it, by a row and then its number.
            self._pieces[number] = offset + granules_bytes(nbytes), self._pieces[number][1]
            self._last, place = put, self._places.pop()
            self._records.add(record)
            self._words[CLAIMS_WORD] += 1
            at = claim_at(place)
            start = (at + CLAIM_ROW) * 8
            self._memory[start : start + ROW_BYTES] = row
            self._words[at + CLAIM_NUMBER] = put
            needs_answer = self._header[RESERVATIONS_WORD] > 0
            claim = Claim(place, put, pool, offset, nbytes, record, needs_answer)
            # Step 3: recheck the grant's word.
            if not self._is_granted(number, grant):
                self._leave(claim)
                return None
            return claim

    def write(self, claim: Claim, copy_to: CopyTo) -> PutState:
        """Steps 5 to 7: copy, mark the claim as done, ring. Raises what `copy_to` raises.

        Returns STORED or UNANSWERED.
        """
        try:
            copy_to(self._pool, claim)  # step 5
        except BaseException:
            self.leave(claim)
            raise
        with self._lock:  # a locked instruction, which completes even a copy past the caches
            self._words[claim_at(claim.place) + CLAIM_DONE] = claim.number  # step 6
        lags = len(self._unanswered) >= MAX_UNANSWERED
        is_rung = self._ring()  # step 7
        if not is_rung or lags or claim.needs_answer or self.session_is_over:
            return PutState.UNANSWERED
        with self._lock:
            self._unanswered.append(claim)
        if not self._pool.is_huge:
            with suppress(OSError):  # no memory for a mapping: the put is done all the same
                self._expect_writes()
        return PutState.STORED

    def answer(self, claim: Claim, timeout_s: float) -> PutState:
        """Wait for the answer: STORED, ALREADY_STORED, or MUST_CALL where the daemon refused.

        Raises DaemonUnavailable, after which this session must end.
        """
        answer = self._wait(claim, timeout_s)
        self.leave(claim)
        if answer == REFUSED:
            return PutState.MUST_CALL
        return PutState.STORED if answer == STORED else PutState.ALREADY_STORED

    def leave(self, claim: Claim) -> None:
        """Take the claim back: it has its answer, or nothing was written."""
        with self._lock:
            self._leave(claim)

    # -- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        self._doorbell.close()

    def cut_off(self) -> None:
        """In a forked child: the session is the parent's."""
        self._lock = threading.Lock()
        self.session_is_over = self._is_cut_off = True

    # -- parts of steps ------------------------------------------------------------------------

    def _is_stored(self, record: bytes) -> bool:
        with suppress(AskDaemon):
            if self._index.is_listed(record):
                self._index.note_duplicate()
                return True
        return False

    def _find_piece(self, nbytes: int) -> tuple[int, int] | None:
        """Find `nbytes` in a grant: the grant's place in the mailbox, and the part's offset."""
        words = self._mailbox[FIRST_GRANT_WORD : FIRST_GRANT_WORD + MAX_GRANTS].tolist()
        for number, word in enumerate(words):
            if word != self._grants[number]:
                grant = unpack_grant(word)
                self._pieces[number] = grant.offset, grant.offset + grant.nbytes
                self._grants[number] = word
            start, end = self._pieces[number]
            if start + nbytes <= end:
                return number, start
        return None

    def _expect_writes(self) -> None:
        """Populate new grants before they are written."""
        words = self._mailbox[FIRST_GRANT_WORD : FIRST_GRANT_WORD + MAX_GRANTS].tolist()
        if words != self._expected:
            self._pool.expect_writes(map(unpack_grant, set(words) - set(self._expected)))
            self._expected = words

    def _is_granted(self, number: int, grant: int) -> bool:
        return self._mailbox[FIRST_GRANT_WORD + number] == grant

    def _leave_answered(self) -> None:
        for claim in list(self._unanswered):
            if answer_to(claim.number, self._mailbox[FIRST_ANSWER_WORD + claim.place]):
                self._unanswered.remove(claim)  # first: a claim left twice frees another's place
                self._leave(claim)

    def _leave(self, claim: Claim) -> None:
        if self._is_cut_off:
            return  # its page is the parent's
        self._words[claim_at(claim.place) + CLAIM_NUMBER] = 0
        self._words[CLAIMS_WORD] -= 1
        self._places.append(claim.place)
        self._records.discard(claim.record)

    def _wait(self, claim: Claim, timeout_s: float) -> int:
        """Read the mailbox until the answer is there, and ring again from time to time."""
        mailbox, word = self._mailbox, FIRST_ANSWER_WORD + claim.place

        def look() -> int:
            return answer_to(claim.number, mailbox[word])

        if answer := spin(look, SPIN_S):
            return answer
        started_s = rung_s = clock.now_s()
        pause_s = PAUSES.after()
        while not (answer := look()):
            now_s = clock.now_s()
            if self.session_is_over:
                raise DaemonUnavailable("the session ended before the daemon took the put")
            if now_s - started_s > timeout_s:
                raise DaemonUnavailable("the daemon did not take a put in time")
            if now_s - rung_s > RING_AGAIN_S:
                self._ring()
                rung_s = now_s
            clock.sleep(pause_s)
            pause_s = PAUSES.after(pause_s)
        return answer

    def _ring(self) -> bool:
        """Ring the doorbell. False: its queue is full, or the daemon is gone."""
        try:
            self._doorbell.send(DOORBELL.pack(self.page_number))
        except OSError:
            return False
        return True


def _is_plain(entry: NewEntry) -> bool:
    """Whether the daemon accepts the entry as it is; a call says what is wrong with another."""
    return bool(entry.namespace and entry.mm_hash)
