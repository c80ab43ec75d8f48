"""Claims: a table of all sessions' puts without a call that are under way, by key.

A scan reads the numbers of all puts, a column of the pages at a time, and then the rows whose
number is new. A number is never used twice, so the other rows have not changed. A number may
become visible before its row: until the row is whole, the number counts as new.
"""

from __future__ import annotations

from collections.abc import Iterator

from ecd_proto.shm.barriers import barrier
from ecd_proto.shm.rows import row_entry, row_is_whole, unpack_key
from ecd_proto.shm.session_page import (
    CLAIM_NUMBER,
    CLAIM_ROW,
    CLAIM_WORDS,
    CLAIMS_WORD,
    FIRST_ANSWER_WORD,
    MAILBOX_WORDS,
    MAX_CLAIMS,
    PAGE_WORDS,
    answer_to,
    claim_at,
)

CLAIMS_AT_A_TIME = 256
"""Rows read in one step of a scan: each takes some 2 us."""
NUMBERS_FOR_A_CLAIM = 16
"""Numbers read in the time of one row, at least."""

Claimed = tuple[int, str]
"""A namespace's number, and an mm_hash."""


class Claims:
    """One per daemon; `pages` and `mailboxes` are the words of all sessions."""

    def __init__(self, pages: memoryview, mailboxes: memoryview, sessions: int) -> None:
        self._pages, self._mailboxes = pages, mailboxes
        self._numbers = [[0] * sessions for _ in range(MAX_CLAIMS)]  # as last read, by place
        self._open: dict[int, Claimed] = {}  # by page and place; answered ones are found out
        self._slots: dict[Claimed, set[int]] = {}

    def scan(self, pages: int) -> Iterator[None]:
        """Scan the first `pages` pages for new claims, some a step.

        The caller has published its count of reservations before. The barrier shows this scan the
        claims of all clients that saw no reservation. Each row is read after it, however long the
        steps lie apart.
        """
        barrier()
        cost = 0
        end = pages * PAGE_WORDS
        if not self._open and not any(self._pages[CLAIMS_WORD:end:PAGE_WORDS].tolist()):
            return
        for place in range(MAX_CLAIMS):
            known = self._numbers[place]
            first = claim_at(place) + CLAIM_NUMBER
            numbers = self._pages[first:end:PAGE_WORDS].tolist()
            cost += pages // NUMBERS_FOR_A_CLAIM
            if numbers == known[:pages]:
                continue
            for page, number in enumerate(numbers):
                if number != known[page]:
                    self._read(page, place)
                    cost += 1
                    if cost >= CLAIMS_AT_A_TIME:
                        yield
                        cost = 0

    def is_claimed(self, key: Claimed) -> bool:
        """Whether a put of the key has no answer."""
        return any(map(self._is_unanswered, self._slots.get(key, ())))

    def forget(self, page: int) -> None:
        """Forget a page that was cleared: its numbers begin anew."""
        for place in range(MAX_CLAIMS):
            self._numbers[place][page] = 0
            self._drop(page * MAX_CLAIMS + place)

    def _read(self, page: int, place: int) -> None:
        """Read one row, with its present number: another scan may have read it meanwhile."""
        slot = page * MAX_CLAIMS + place
        self._drop(slot)
        at = page * PAGE_WORDS + claim_at(place)
        number = self._pages[at + CLAIM_NUMBER]
        row = self._pages[at + CLAIM_ROW : at + CLAIM_WORDS].tobytes()
        if not row_is_whole(row) or row_entry(row) != number:
            number = 0  # not whole yet: the next scan reads it again
        self._numbers[place][page] = number
        if not number:
            return
        try:
            claimed = unpack_key(row)
        except UnicodeDecodeError:
            return  # nobody's key
        self._open[slot] = claimed
        self._slots.setdefault(claimed, set()).add(slot)

    def _drop(self, slot: int) -> None:
        claimed = self._open.pop(slot, None)
        if claimed is not None:
            slots = self._slots[claimed]
            slots.remove(slot)
            if not slots:
                del self._slots[claimed]

    def _is_unanswered(self, slot: int) -> bool:
        page, place = divmod(slot, MAX_CLAIMS)
        answer = self._mailboxes[page * MAILBOX_WORDS + FIRST_ANSWER_WORD + place]
        return not answer_to(self._numbers[place][page], answer)
