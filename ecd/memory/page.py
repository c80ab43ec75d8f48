"""One session's page, written by its client, and its desk, written for it. Layout in `shm.py`.

The client writes its page as it likes: what is read here is believed no further than that one
client can be harmed by it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import itemgetter

from ecd.core.clients import Put, Uses
from ecd.core.types import Content, EntryId, Extent, Key
from ecd_proto.shm import (
    DUPLICATES_WORD,
    FIRST_ANSWER_WORD,
    FIRST_GRANT_WORD,
    FIRST_PIN_WORD,
    FIRST_PUT_WORD,
    FIRST_USE_WORD,
    KEPT_USES,
    MAX_GRANTS,
    MAX_PINS,
    MAX_PUTS,
    PINS_USED_WORD,
    PUT_DONE,
    PUT_NUMBER,
    PUT_ROW,
    PUT_WORDS,
    ROW_BYTES,
    USES_WORD,
    Grant,
    Names,
    answer_to,
    pack_answer,
    pack_grant,
    row_is_whole,
    unpack_key,
    unpack_row,
)

MAX_GROWTH = 1 << 40
"""Between two looks, of what a client counts of itself: more is not true."""

_PUTS_END = FIRST_PUT_WORD + MAX_PUTS * PUT_WORDS
_NUMBERS = slice(FIRST_PUT_WORD + PUT_NUMBER, _PUTS_END, PUT_WORDS)
_DONES = slice(FIRST_PUT_WORD + PUT_DONE, _PUTS_END, PUT_WORDS)


class Page:
    """Both as words of 8 bytes."""

    def __init__(self, number: int, words: memoryview, desk: memoryview, names: Names) -> None:
        self.number, self._names = number, names
        self._words, self._desk = words, desk
        self._counted = [0, 0, 0, 0]
        self._grants = 0

    def clear(self) -> None:
        for words in (self._words, self._desk):
            words.cast("B")[:] = bytes(words.nbytes)

    # -- reading -------------------------------------------------------------------------------

    def pinned(self) -> list[int]:
        used = min(self._words[PINS_USED_WORD], MAX_PINS)
        return self._words[FIRST_PIN_WORD : FIRST_PIN_WORD + used].tolist()

    def take_uses(self) -> Uses:
        """What was read since the last call."""
        counted = self._words[USES_WORD : DUPLICATES_WORD + 1].tolist()
        if counted == self._counted:
            return Uses()
        hits, nbytes, misses, duplicates = map(_grown, self._counted, counted)
        self._counted = counted
        known = range(counted[0] - min(hits, KEPT_USES), counted[0])
        entries = (EntryId(self._words[FIRST_USE_WORD + use % KEPT_USES]) for use in known)
        return Uses(tuple(entries), hits, nbytes, misses, duplicates)

    # -- writing -------------------------------------------------------------------------------

    def grant(self, pieces: Sequence[Extent]) -> bool:
        words = [0] * MAX_GRANTS
        for place, piece in enumerate(pieces):
            self._grants += 1
            word = pack_grant(Grant(self._grants, piece.offset, piece.nbytes))
            if word is None:
                return False
            words[place] = word
        for place, word in enumerate(words):
            self._desk[FIRST_GRANT_WORD + place] = word
        return True

    def revoke(self) -> None:
        self.grant(())

    def begun(self) -> list[Extent]:
        """What its client may be writing to, or has written and was not answered."""
        puts = [self._read(place, number) for place, number, _ in self._open_puts()]
        return [put.extent for put in puts if put is not None]

    def finished_puts(self) -> list[Put]:
        """Puts whose bytes are all written; the caller makes that true with a barrier."""
        puts = [
            self._read(place, number) for place, number, done in self._open_puts() if done == number
        ]
        return [put for put in puts if put is not None]

    def is_putting(self, key: Key) -> bool:
        puts = (self._read(place, number) for place, number, _ in self._open_puts())
        return any(put is not None and put.key == key for put in puts)

    def answer(self, put: Put, outcome: int) -> None:
        self._desk[FIRST_ANSWER_WORD + put.place] = pack_answer(put.number, outcome)

    def _open_puts(self) -> list[tuple[int, int, int]]:
        """Places, numbers and what says that they are done, of puts without an answer, in order."""
        numbers = self._words[_NUMBERS].tolist()
        if not any(numbers):
            return []
        dones = self._words[_DONES].tolist()
        found = [
            (place, number, done)
            for place, (number, done) in enumerate(zip(numbers, dones, strict=True))
            if number and not answer_to(number, self._desk[FIRST_ANSWER_WORD + place])
        ]
        return sorted(found, key=itemgetter(1)) if len(found) > 1 else found

    def _read(self, place: int, number: int) -> Put | None:
        start = FIRST_PUT_WORD + place * PUT_WORDS + PUT_ROW
        row = self._words[start : start + ROW_BYTES // 8].tobytes()
        if not row_is_whole(row):
            return None
        try:
            said = unpack_row(row)
            namespace, mm_hash = unpack_key(row)
            return Put(
                place,
                number,
                Key(self._names.name_of(namespace), mm_hash),
                Content(said.dtype, said.shape, said.nbytes, said.metadata, said.cost_s),
                Extent(said.pool, said.offset, said.nbytes),
            )
        except (UnicodeDecodeError, IndexError, struct.error):
            return None


def _grown(before: int, now: int) -> int:
    """By how much a client's counter grew: 0, if no client can have done that much."""
    return now - before if 0 <= now - before <= MAX_GROWTH else 0
