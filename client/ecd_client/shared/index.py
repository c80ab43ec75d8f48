"""Reading without a call, the reader's half of hazard pointers.

The steps are find, announce, recheck; docs/reading-without-a-call.md has the argument.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterable, Sequence
from enum import Enum

from ecd_client.shared.board import MappedBoard
from ecd_client.shared.claims import ClaimReader
from ecd_client.shared.missed_in import MissedIn
from ecd_client.shared.spin import spin
from ecd_proto.contract import nbytes_of
from ecd_proto.shm.barriers import STORES_IN_ORDER
from ecd_proto.shm.files import GRANULE_BYTES
from ecd_proto.shm.index import (
    BUCKET_BYTES,
    INDEX_HEADER_BYTES,
    NAMESPACES_AT,
    REMOVALS_WORD,
    RESERVATIONS_WORD,
    UNLISTED_WORD,
    bucket_of,
)
from ecd_proto.shm.namespaces import NAMESPACES_BYTES, Namespaces
from ecd_proto.shm.rows import (
    ROW_BYTES,
    Row,
    copy_record,
    key_record,
    next_row,
    row_entry,
    row_has_key,
    row_is_whole,
    row_mark,
    unpack_row,
)
from ecd_proto.shm.session_page import (
    DUPLICATES_WORD,
    FIRST_PIN_WORD,
    FIRST_USE_WORD,
    FOR_ANOTHER,
    GRANTED_POOL,
    MAX_PINS,
    MISSES_WORD,
    PAGE_BYTES,
    PINS_USED_WORD,
    RECENT_USES,
    USED_BYTES_WORD,
    USES_WORD,
    pack_extent_pin,
)

TRIES = 8
"""Walks along a chain that changes meanwhile before the daemon is asked."""
MAX_CHAIN = 256
LISTED_WITHIN_S = 500e-6
"""How long a reader waits for the daemon to list a finished put, before it makes a call."""
_U64 = (1 << 64) - 1
_row_at = struct.Struct(f"{ROW_BYTES}s").unpack_from


class AskDaemon(Exception):
    """The index cannot say: make the call."""


class OnMiss(Enum):
    """The ways to end a lookup that finds no row."""

    COUNT = 1
    """Count the miss: the caller asks no further."""
    GO_ON = 2
    """Leave the counting to the daemon, which the caller asks next."""
    ASK_IF_CLAIMED = 3
    """Raise AskDaemon if a client may be writing the key."""


_COUNT, _ASK_IF_CLAIMED = OnMiss.COUNT, OnMiss.ASK_IF_CLAIMED


def _first_of(rows: Iterable[bytes]) -> Row | None:
    """The first of these that is a row; None: none is."""
    for row in filter(row_is_whole, rows):
        with contextlib.suppress(struct.error, IndexError):  # a claim is another client's
            return unpack_row(row)
    return None


class IndexReader:
    """Finds entries in the daemon's index and pins them in this session's page. Thread-safe."""

    def __init__(self, board: MappedBoard) -> None:
        index, shape = board.index, board.shape
        self.claims = ClaimReader(board)
        self.counts = True
        """Whether reads are counted, for statistics and eviction."""
        self._shape = shape
        self._header = index.view(0, INDEX_HEADER_BYTES).cast("Q")
        buckets = index.view(shape.buckets_at, shape.buckets * BUCKET_BYTES)
        self._buckets = buckets.cast("I")
        self._rows = index.view(shape.rows_at, shape.rows * ROW_BYTES)
        self._names = Namespaces(index.view(NAMESPACES_AT, NAMESPACES_BYTES))
        self._numbers = self._names.numbers
        self._page = board.page
        self._words = board.page.view(0, PAGE_BYTES).cast("Q")
        self._missed = MissedIn(self._words)
        self._lock = threading.Lock()
        self._free = list(range(FIRST_PIN_WORD + MAX_PINS - 1, FIRST_PIN_WORD - 1, -1))

    def contains(self, namespace: str, mm_hashes: Sequence[str]) -> list[bool]:
        """Return for each key whether it is stored. Raises AskDaemon."""
        found, find = [], self._find
        for mm_hash in mm_hashes:
            record = self.record(namespace, mm_hash)
            found.append(
                record is not None
                and (
                    find(record) is not None
                    or self.claims.any_done(record)
                    or find(record) is not None  # perhaps listed before the claims were read
                )
            )
        return found

    def row(self, namespace: str, mm_hash: str) -> Row | None:
        """The row of an entry that is listed or claimed, not held. Raises AskDaemon."""
        record = self.record(namespace, mm_hash)
        if record is None:
            return None
        with contextlib.suppress(AskDaemon):  # a claim may be there all the same
            if (listed := self._find(record)) is not None:
                return _first_of([listed[1]])
        claimed = _first_of(claim.row for claim in self.claims.of(record))
        if claimed is not None:
            return claimed
        listed = self._find(record)  # perhaps since before the claims were read
        return None if listed is None else _first_of([listed[1]])

    def is_listed(self, record: bytes) -> bool:
        """Whether the key has a row; puts without one do not count. Raises AskDaemon."""
        return self._find(record) is not None

    def pin(
        self, namespace: str, mm_hash: str, on_miss: OnMiss, is_use: bool = True
    ) -> tuple[Row, int] | None:
        """The entry's row, and the pin that holds it until `unpin`. None: it is not stored.

        The row of a put that is not listed yet has the entry 0.
        `is_use`: count it, for statistics and eviction. Raises AskDaemon.
        """
        record = self.record(namespace, mm_hash)
        is_use = is_use and self.counts
        for _ in range(TRIES):
            found = None if record is None else self._find(record)
            if found is None:
                if on_miss is _ASK_IF_CLAIMED and self._header[RESERVATIONS_WORD]:
                    break
                if record is not None:
                    claimed = self._pin_claimed(record, is_use)
                    if claimed is not None:
                        return claimed
                    found = self._find_claimed(record, on_miss)
            if found is None:
                if on_miss is _COUNT:
                    self.note_miss(namespace)
                return None
            start, bytes_ = found
            try:
                row = unpack_row(bytes_)
            except (IndexError, struct.error):
                break
            if row.truncated:
                break
            pin = self._announce(row.entry)
            try:
                if row_mark(self._rows[start : start + ROW_BYTES]) == row_mark(bytes_):
                    if is_use:
                        self._note_use(row.entry, row.nbytes)
                    return row, pin
            except BaseException:  # Ctrl-C
                self.unpin(pin)
                raise
            self.unpin(pin)
        raise AskDaemon

    def pin_copy(
        self, namespace: str, mm_hash: str, entry: int, pool: int
    ) -> tuple[Row, int] | None:
        """The row of the copy that pool `pool` has of a held entry, and the pin that holds it.

        The entry must be listed after the copy was pinned: its copies are hidden before it is, so
        this one is of no other entry of the key. None: there is none. Raises AskDaemon.
        """
        own = self.record(namespace, mm_hash)
        found = None if own is None else self._find(copy_record(own, pool))
        if own is None or found is None:
            return None
        start, bytes_ = found
        try:
            row = unpack_row(bytes_)
        except (IndexError, struct.error):
            return None
        pin, is_right = self._announce(row.entry), False
        try:
            if row_mark(self._rows[start : start + ROW_BYTES]) == row_mark(bytes_):
                listed = self._find(own)
                is_right = listed is not None and row_entry(listed[1]) == entry
        finally:
            if not is_right:
                self.unpin(pin)
        return (row, pin) if is_right else None

    def pin_own(self, pool: int, offset: int) -> int:
        """The pin that holds the extent of a put of this session's own, which is not done.

        The extent is the session's until then, so there is nothing to recheck. Raises AskDaemon.
        """
        return self._announce(pack_extent_pin(pool, offset))

    def pin_leased(self, entry: int) -> int:
        """The pin that holds an entry, listed or not, if its lease holds after this returns.

        The daemon scans the pins anew after a lease's end. Raises AskDaemon.
        """
        return self._announce(entry)

    def record(self, namespace: str, mm_hash: str) -> bytes | None:
        """The key as rows hold it. None: its namespace has no row at all. Raises AskDaemon."""
        number = self._numbers.get(namespace)
        if number is None:
            unlisted = self._header[UNLISTED_WORD]
            number = self._names.number_of(namespace)
            if number == 0 and not unlisted and namespace and mm_hash:
                return None
        record = number and key_record(number, mm_hash)
        if not record or not mm_hash:
            raise AskDaemon  # a key too long for a row, or one that the daemon refuses
        return record

    def note_duplicate(self) -> None:
        """Count a put of a key that was stored."""
        if self.counts:
            with self._lock:
                self._words[DUPLICATES_WORD] += 1

    def note_miss(self, namespace: str) -> None:
        """Count a lookup that found nothing; "": in the client's own namespace."""
        if self.counts:
            number = namespace and self._names.number_of(namespace)
            with self._lock:
                if number:
                    self._missed.count(number)
                self._words[MISSES_WORD] += 1

    def note_use(
        self, namespace: str, mm_hash: str, entry: int, nbytes: int, *, for_another: bool
    ) -> None:
        """Count a use of a pinned entry; an `entry` of 0 had no number when it was pinned."""
        if not self.counts:
            return
        if not entry:
            with contextlib.suppress(AskDaemon):
                record = self.record(namespace, mm_hash)
                found = None if record is None else self._find(record)
                entry = 0 if found is None else row_entry(found[1])
        self._note_use(entry and entry | (FOR_ANOTHER if for_another else 0), nbytes)

    @property
    def pins_left(self) -> int:
        """How many more entries can be pinned."""
        return len(self._free)

    def unpin(self, pin: int) -> None:
        self._words[pin] = 0
        self._free.append(pin)

    def cut_off(self) -> None:
        """In a forked child: its pins and claims are private, and no other process sees them."""
        self._page.cut_off()
        self._lock = threading.Lock()

    # -- steps ---------------------------------------------------------------------------------

    def _find(self, record: bytes) -> tuple[int, bytes] | None:
        """The place of the key's row, and its bytes. None: it has no row, and is not stored.

        Raises AskDaemon.
        """
        bucket = bucket_of(record, self._shape)
        rows, header, last = self._rows, self._header, self._shape.rows
        for _ in range(TRIES):
            removals, unlisted = header[REMOVALS_WORD], header[UNLISTED_WORD]
            number = self._buckets[bucket]
            passed = 0
            while 0 < number <= last and passed < MAX_CHAIN:
                start = (number - 1) * ROW_BYTES
                row: bytes = _row_at(rows, start)[0]
                if row_has_key(row, record):
                    if row_is_whole(row):
                        return start, row
                    break
                number = next_row(row)
                passed += 1
            if not number:
                if unlisted:
                    break
                if header[REMOVALS_WORD] == removals and not removals & 1:
                    return None
        raise AskDaemon

    def _pin_claimed(self, record: bytes, is_use: bool) -> tuple[Row, int] | None:
        """Pin the memory of a put that is done and not listed yet. Raises AskDaemon.

        On Arm the daemon's barrier before it lists the put makes the bytes visible, so there is
        none to read before that.
        """
        if not STORES_IN_ORDER:
            return None
        for claim in self.claims.of(record):
            if not claim.is_done or not row_is_whole(claim.row):
                continue
            try:
                row = unpack_row(claim.row)
            except (IndexError, struct.error):
                continue
            if row.entry != claim.number or not _makes_sense(row):
                continue
            pin = self._announce(pack_extent_pin(row.pool, row.offset))
            try:
                if self.claims.is_still(claim):
                    if is_use:
                        self._note_use(0, row.nbytes)
                    return row._replace(entry=0), pin
            except BaseException:  # Ctrl-C
                self.unpin(pin)
                raise
            self.unpin(pin)
        return None

    def _find_claimed(self, record: bytes, on_miss: OnMiss) -> tuple[int, bytes] | None:
        """Look once more where `_find` found no row, after the puts that are done have theirs.

        The daemon may have listed a put between `_find` and the reading of the claims: hence the
        second look also where no claim is found. Raises AskDaemon.
        """
        if not self._is_settled(record, on_miss) and not spin(
            lambda: self._is_settled(record, on_miss), LISTED_WITHIN_S
        ):
            raise AskDaemon
        return self._find(record)

    def _is_settled(self, record: bytes, on_miss: OnMiss) -> bool:
        """Whether every put of this key that is done has its row by now. Raises AskDaemon."""
        done = [claim.is_done for claim in self.claims.of(record)]
        if not done:
            return True
        if on_miss is _ASK_IF_CLAIMED and not any(done):
            raise AskDaemon
        return not any(done)

    def _announce(self, named: int) -> int:
        """Store what names the entry in a free word of the own page; return the word's place."""
        words = self._words
        try:
            pin = self._free.pop()
        except IndexError:
            raise AskDaemon from None
        words[pin] = named
        if words[PINS_USED_WORD] <= pin - FIRST_PIN_WORD:
            with self._lock:
                words[PINS_USED_WORD] = max(words[PINS_USED_WORD], pin - FIRST_PIN_WORD + 1)
        return pin

    def _note_use(self, entry: int, nbytes: int) -> None:
        """Count a use; an `entry` of 0 has no number yet."""
        words = self._words
        with self._lock:
            use = words[USES_WORD]
            words[FIRST_USE_WORD + use % RECENT_USES] = entry
            words[USED_BYTES_WORD] = words[USED_BYTES_WORD] + nbytes & _U64
            words[USES_WORD] = use + 1


def _makes_sense(row: Row) -> bool:
    """Whether a claim's row can become an entry: the daemon has not checked it yet."""
    return (
        not row.truncated
        and row.nbytes == nbytes_of(row.dtype, row.shape)
        and row.pool == GRANTED_POOL
        and row.offset % GRANULE_BYTES == 0
    )
