"""What clients write where memory was granted: a table of all sessions' puts, by key.

A look reads the numbers of all puts, a column of the pages at a time, and then the rows of those
whose number is new. A number is never used twice, so the other rows are what they were. A number
may be seen before its row is: until the row is there, it counts as new.
"""

from __future__ import annotations

from collections.abc import Iterator

from ecd_proto.shm import (
    DESK_BYTES,
    FIRST_ANSWER_WORD,
    FIRST_PUT_WORD,
    MAX_PUTS,
    PAGE_BYTES,
    PUT_NUMBER,
    PUT_ROW,
    PUT_WORDS,
    PUTS_WORD,
    ROW_BYTES,
    answer_to,
    barrier,
    row_entry,
    row_is_whole,
    unpack_key,
)

CLAIMS_AT_A_TIME = 256
"""Rows read in one step of a look: each takes some 2 us."""
NUMBERS_FOR_A_CLAIM = 16
"""How many numbers are read in the time of a row, at least."""
_PAGE_WORDS, _DESK_WORDS = PAGE_BYTES // 8, DESK_BYTES // 8
_FIRST_NUMBER = FIRST_PUT_WORD + PUT_NUMBER

Claimed = tuple[int, str]
"""A namespace's number, and an mm_hash."""


class Claims:
    """One per daemon; `pages` and `desks` are the words of all sessions."""

    def __init__(self, pages: memoryview, desks: memoryview, sessions: int) -> None:
        self._pages, self._desks = pages, desks
        self._numbers = [[0] * sessions for _ in range(MAX_PUTS)]  # as last read, by place
        self._open: dict[int, Claimed] = {}  # by page and place; answered ones are found out
        self._slots: dict[Claimed, set[int]] = {}

    def look(self, pages: int) -> Iterator[None]:
        """Bring the table up to date with the first `pages` of them, some claims a step.

        The barrier lets this see the claims of all who saw no reservation, if one was counted
        before. Each row is read after it, however long the steps lie apart.
        """
        barrier()
        cost = 0
        end = pages * _PAGE_WORDS
        if not self._open and not any(self._pages[PUTS_WORD:end:_PAGE_WORDS].tolist()):
            return
        for place in range(MAX_PUTS):
            known = self._numbers[place]
            first = _FIRST_NUMBER + place * PUT_WORDS
            numbers = self._pages[first:end:_PAGE_WORDS].tolist()
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
        """Whether a put of it has no answer."""
        return any(map(self._is_unanswered, self._slots.get(key, ())))

    def forget(self, page: int) -> None:
        """The page was cleared, and numbers begin anew."""
        for place in range(MAX_PUTS):
            self._numbers[place][page] = 0
            self._drop(page * MAX_PUTS + place)

    def _read(self, page: int, place: int) -> None:
        """Whatever the number is by now: others may have looked since it was seen to be new."""
        slot = page * MAX_PUTS + place
        self._drop(slot)
        at = page * _PAGE_WORDS + FIRST_PUT_WORD + place * PUT_WORDS
        number = self._pages[at + PUT_NUMBER]
        row = self._pages[at + PUT_ROW : at + PUT_ROW + ROW_BYTES // 8].tobytes()
        if not row_is_whole(row) or row_entry(row) != number:
            number = 0  # not all of it is seen as yet: the next look reads it again
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
        page, place = divmod(slot, MAX_PUTS)
        answer = self._desks[page * _DESK_WORDS + FIRST_ANSWER_WORD + place]
        return not answer_to(self._numbers[place][page], answer)
