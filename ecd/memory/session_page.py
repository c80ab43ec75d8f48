"""One session's page, written by its client, and its mailbox, written for it. Layout:
`ecd_proto/shm/session_page.py`.

The client may write anything into its page: a lie there harms no other client.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import KeysView, Sequence, Set
from operator import itemgetter

from ecd.core.model.board import Put, Uses
from ecd.core.model.types import Content, EntryId, Extent, Key, Start
from ecd_proto.shm.files import granules_bytes
from ecd_proto.shm.namespaces import Namespaces
from ecd_proto.shm.rows import ROW_BYTES, row_is_whole, unpack_key, unpack_row
from ecd_proto.shm.session_page import (
    CLAIM_DONE,
    CLAIM_NUMBER,
    CLAIM_ROW,
    CLAIM_WORDS,
    DMA_WORD,
    FIRST_ANSWER_WORD,
    FIRST_CLAIM_WORD,
    FIRST_GRANT_WORD,
    FIRST_MISSED_WORD,
    FIRST_PIN_WORD,
    FIRST_USE_WORD,
    FOR_ANOTHER,
    GRANTED_POOL,
    MAX_CLAIMS,
    MAX_GRANTS,
    MAX_PINS,
    MISSED_WORDS,
    PINNED_WORD,
    RECENT_USES,
    Grant,
    answer_to,
    pack_answer,
    pack_grant,
    pack_kept,
    unpack_extent_pin,
    unpack_grant,
)

MAX_GROWTH = 1 << 40
"""Most by which a client's own counters can grow between two scans: larger growth is ignored."""

_NO_PINS = bytes(8 * MAX_PINS)
_NO_GRANT = memoryview(bytes(8 * MAX_GRANTS)).cast("Q")
_PUTS_END = FIRST_CLAIM_WORD + MAX_CLAIMS * CLAIM_WORDS
_NUMBERS = slice(FIRST_CLAIM_WORD + CLAIM_NUMBER, _PUTS_END, CLAIM_WORDS)
_DONES = slice(FIRST_CLAIM_WORD + CLAIM_DONE, _PUTS_END, CLAIM_WORDS)


class SessionPage:
    """One session's page and mailbox, as words of 8 bytes."""

    def __init__(
        self, number: int, words: memoryview, mailbox: memoryview, names: Namespaces
    ) -> None:
        self.number, self._names = number, names
        self._words, self._mailbox = words, mailbox
        self._pins = words[FIRST_PIN_WORD : FIRST_PIN_WORD + MAX_PINS]
        self._missed = words[FIRST_MISSED_WORD : FIRST_MISSED_WORD + MISSED_WORDS]
        self._missed_before = [0] * MISSED_WORDS
        self._last_pins, self._last_pinned = _NO_PINS, frozenset[EntryId]()
        self.pinned_starts: frozenset[Start] = frozenset()
        """Starts of extents that the last `pinned` found pinned, without entries."""
        self._counted = (0, 0, 0, 0)
        self.taken: tuple[int, ...] = (0, 0, 0, 0)
        """The sums of all that `drain_uses` returned, in the order of USE_COUNTERS."""
        self.namespace = ""
        """In which the client looks, as it says, unless a miss is counted in another."""
        self._grants = 0
        self._granted: list[tuple[int, int]] = []  # from, to, in GRANTED_POOL
        self._allowed: list[tuple[int, int]] = []  # and what was, until the next grant

    def clear(self) -> None:
        for words in (self._words, self._mailbox):
            words.cast("B")[:] = bytes(words.nbytes)

    # -- reading -------------------------------------------------------------------------------

    @property
    def dma_word(self) -> int:
        """Whether the page says that a device may copy into the pool: 0, DMA or DMA_OUTLASTS."""
        return self._words[DMA_WORD]

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pools that the client says it has pinned for its GPUs."""
        return self._words[PINNED_WORD]

    def pinned_now(self, live: KeysView[EntryId]) -> tuple[Set[EntryId], Set[Start]]:
        """The entries of `live`, and the starts of extents, that the page pins; for no scan."""
        words = [word for word in self._pins.tolist() if word]
        return live & words, frozenset(filter(None, map(unpack_extent_pin, words)))

    def pinned(self, live: KeysView[EntryId]) -> tuple[frozenset[EntryId], int]:
        """The entries of `live` that the page pins, and how many words were examined.

        Words that are as the last scan found them hold the same pins: a reader announces an entry
        that it has found, so its number was in `live` when that scan read it.
        """
        pins = self._pins.tobytes()
        if pins == self._last_pins:
            return self._last_pinned, 0
        count = -(-len(pins.rstrip(b"\0")) // 8)
        words: list[int] = memoryview(pins)[: 8 * count].cast("Q").tolist()
        self._last_pinned = frozenset(live & words)
        self._last_pins = pins if count else _NO_PINS
        self.pinned_starts = frozenset(filter(None, map(unpack_extent_pin, words)))
        return self._last_pinned, count

    def drain_uses(self, counted: tuple[int, int, int, int]) -> Uses:
        """The uses since the last call, given what the counters say now."""
        if counted == self._counted:
            return Uses()
        hits, nbytes, misses, duplicates = map(_grown, self._counted, counted)
        self._counted = counted
        grown = hits, nbytes, misses, duplicates
        self.taken = tuple(map(sum, zip(self.taken, grown, strict=True)))
        known = range(counted[0] - min(hits, RECENT_USES), counted[0])
        words = [self._words[FIRST_USE_WORD + use % RECENT_USES] for use in known]
        # 0: it had no entry yet
        entries = tuple(EntryId(word) for word in words if 0 < word < FOR_ANOTHER)
        others = tuple(EntryId(word - FOR_ANOTHER) for word in words if word > FOR_ANOTHER)
        misses_in = tuple(self._misses_in(misses).items()) if misses else ()
        return Uses(
            entries, hits, nbytes, misses, duplicates, for_others=others, misses_in=misses_in
        )

    def _misses_in(self, misses: int) -> Counter[str]:
        """The namespaces of new misses; "" for those beyond the page's pairs.

        The pairs may be ahead of the sum, which is read earlier: the rest is left to the next call.
        """
        found: Counter[str] = Counter()
        left = misses
        before, now = self._missed_before, self._missed.tolist()
        changed = range(1, MISSED_WORDS, 2) if now != before else ()
        for word in [word for word in changed if now[word] != before[word]]:
            number = before[word - 1] = now[word - 1]
            grown = min(_grown(before[word], now[word]), left)
            before[word] += grown
            left -= grown
            try:
                found[self._names.name_of(number)] += grown
            except IndexError:  # OTHER_NAMESPACES, or the client wrote anything
                found[""] += grown
        found[self.namespace] += left
        return found

    # -- writing -------------------------------------------------------------------------------

    def grant(self, pieces: Sequence[Extent]) -> bool:
        """Show a grant to the client. False: the words cannot express its place."""
        if len(pieces) > MAX_GRANTS or any(piece.pool != GRANTED_POOL for piece in pieces):
            return False
        words = [0] * MAX_GRANTS
        for place, piece in enumerate(pieces):
            self._grants += 1
            word = pack_grant(Grant(self._grants, piece.offset, piece.nbytes))
            if word is None:
                return False
            words[place] = word
        self._allow(pieces)
        for place, word in enumerate(words):
            self._mailbox[FIRST_GRANT_WORD + place] = word
        return True

    def _allow(self, pieces: Sequence[Extent]) -> None:
        """Note which puts the client has begun, before the words that allow them are removed."""
        self._allowed = self._granted
        self.begun()
        self._granted = [(piece.offset, piece.offset + piece.nbytes) for piece in pieces]
        self._allowed += self._granted

    def revoke(self) -> None:
        self._allow(())
        self._mailbox[FIRST_GRANT_WORD : FIRST_GRANT_WORD + MAX_GRANTS] = _NO_GRANT

    def begun(self) -> list[Extent]:
        """The extents of puts that the client has begun and that have no answer.

        The mailbox records them from now on, whatever becomes of the grant.
        """
        extents = []
        for place, number, _ in self._open_puts():
            put = self._read(place, number)
            if put is not None:
                extents.append(put.extent)
                if _lies_in(put.extent, self._allowed):
                    self._mailbox[FIRST_ANSWER_WORD + place] = _kept(put)
        return extents

    def finished_puts(self) -> list[Put]:
        """Puts whose bytes are all written, if the caller has made a barrier."""
        puts = [
            self._read(place, number) for place, number, done in self._open_puts() if done == number
        ]
        return [put for put in puts if put is not None]

    def is_granted(self, put: Put) -> bool:
        """Whether the mailbox grants the put's extent to the session: for the next daemon."""
        words = self._mailbox[FIRST_GRANT_WORD : FIRST_GRANT_WORD + MAX_GRANTS].tolist()
        grants = map(unpack_grant, words)
        pieces = [(grant.offset, grant.offset + grant.nbytes) for grant in grants]
        kept = _kept(put)
        said = self._mailbox[FIRST_ANSWER_WORD + put.place]
        return bool(kept and kept == said) or _lies_in(put.extent, pieces)

    def answer(self, put: Put, outcome: int) -> None:
        self._mailbox[FIRST_ANSWER_WORD + put.place] = pack_answer(put.number, outcome)

    def _open_puts(self) -> list[tuple[int, int, int]]:
        """Puts without an answer, in order of number: place, number and the word that says done."""
        numbers = self._words[_NUMBERS].tolist()
        if not any(numbers):
            return []
        dones = self._words[_DONES].tolist()
        found = [
            (place, number, done)
            for place, (number, done) in enumerate(zip(numbers, dones, strict=True))
            if number and not answer_to(number, self._mailbox[FIRST_ANSWER_WORD + place])
        ]
        return sorted(found, key=itemgetter(1)) if len(found) > 1 else found

    def _read(self, place: int, number: int) -> Put | None:
        start = FIRST_CLAIM_WORD + place * CLAIM_WORDS + CLAIM_ROW
        row = self._words[start : start + ROW_BYTES // 8].tobytes()
        described = described_by(row, self._names)
        return None if described is None else Put(place, number, *described)


def described_by(row: bytes, names: Namespaces) -> tuple[Key, Content, Extent] | None:
    """The entry that a row describes; None if the row is not whole, or describes no entry."""
    if not row_is_whole(row):
        return None
    try:
        said = unpack_row(row)
        namespace, mm_hash = unpack_key(row)
        return (
            Key(names.name_of(namespace), mm_hash),
            Content(said.dtype, said.shape, said.nbytes, said.metadata, said.cost_s),
            Extent(said.pool, said.offset, said.nbytes),
        )
    except (UnicodeDecodeError, IndexError, struct.error):
        return None


def _lies_in(extent: Extent, pieces: Sequence[tuple[int, int]]) -> bool:
    """Whether one of these pieces of GRANTED_POOL contains the extent."""
    end = extent.offset + granules_bytes(extent.nbytes)
    is_contained = any(first <= extent.offset and end <= last for first, last in pieces)
    return is_contained and extent.pool == GRANTED_POOL


def _kept(put: Put) -> int:
    """The word that records the put's memory; 0 for memory of another pool than GRANTED_POOL."""
    if put.extent.pool != GRANTED_POOL:
        return 0
    return pack_kept(put.number, put.extent.offset, granules_bytes(put.extent.nbytes))


def _grown(before: int, now: int) -> int:
    """How much a client's counter grew; 0 if by more than any client can have done."""
    return now - before if 0 <= now - before <= MAX_GROWTH else 0
