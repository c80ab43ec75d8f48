"""The mapped index: what clients read and pin without a call. Layout in `ecd_proto/shm.py`.

Why a reader never sees a reused extent, whatever moment it is stopped at, stands in
docs/reading-without-a-call.md, which names the steps below.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from ecd.core.allocator import GRANULE_BYTES
from ecd.core.readers import Uses
from ecd.core.types import EntryId, EntryInfo, SessionId
from ecd.memory.host import PoolError, create_file
from ecd_proto.mapping import Mapping
from ecd_proto.shm import (
    BUCKET_BYTES,
    FIRST_PIN_WORD,
    FIRST_USE_WORD,
    INDEX_HEADER_BYTES,
    INDEX_SUFFIX,
    KEPT_USES,
    MAX_PINS,
    MISSES_WORD,
    PIN_PAGE_BYTES,
    PINS_SUFFIX,
    PINS_USED_WORD,
    REMOVALS_WORD,
    ROW_BYTES,
    UNLISTED_WORD,
    USES_WORD,
    IndexShape,
    Row,
    barrier,
    bucket_of,
    key_record,
    pack_index_header,
    pack_row,
)

logger = logging.getLogger(__name__)

MIN_BUCKETS = 1024
CHUNK_ROWS = 2048
"""Rows whose memory is taken at a time."""
MAX_GROWTH = 1 << 40
"""Between two looks, of what a client counts of itself: more is not true."""
_NEXT_WORDS, _ENTRY_WORD = ROW_BYTES // 8, 2


class _Page:
    """One session's pins."""

    def __init__(self, number: int, words: memoryview) -> None:
        self.number, self.words = number, words
        self.uses = self.nbytes = self.misses = 0  # taken so far

    def pinned(self) -> list[int]:
        used = min(self.words[PINS_USED_WORD], MAX_PINS)
        return self.words[FIRST_PIN_WORD : FIRST_PIN_WORD + used].tolist()

    def take_uses(self) -> Uses:
        """Its client writes these words as it likes: nothing here believes them further."""
        uses, nbytes, misses = self.words[USES_WORD : MISSES_WORD + 1].tolist()
        hits = _grown(self.uses, uses)
        known = range(uses - min(hits, KEPT_USES), uses)
        taken = Uses(
            tuple(EntryId(self.words[FIRST_USE_WORD + use % KEPT_USES]) for use in known),
            hits,
            _grown(self.nbytes, nbytes),
            _grown(self.misses, misses),
        )
        self.uses, self.nbytes, self.misses = uses, nbytes, misses
        return taken


def _grown(before: int, now: int) -> int:
    """By how much a client's counter grew: 0, if no client can have done that much."""
    return now - before if 0 <= now - before <= MAX_GROWTH else 0


class MappedIndex:
    """Rows for every stored entry, and a page of pins for each session."""

    def __init__(self, directory: Path, incarnation: str, pool_bytes: int, sessions: int) -> None:
        """Raises PoolError."""
        rows = pool_bytes // GRANULE_BYTES
        buckets = max(MIN_BUCKETS, 1 << (rows - 1).bit_length())
        self.shape = IndexShape(buckets, rows, int.from_bytes(os.urandom(8), "little"))
        self._unlisted: set[EntryId] = set()
        self.path = directory / f"{incarnation}{INDEX_SUFFIX}"
        self.pins_path = directory / f"{incarnation}{PINS_SUFFIX}"
        try:
            self._fd = create_file(self.path, self.shape.nbytes)
            self._pins_fd = create_file(self.pins_path, sessions * PIN_PAGE_BYTES)
            self._take_memory(self._fd, 0, self.shape.rows_at)
        except OSError as error:
            raise PoolError(f"the index of the pool cannot be made: {error}") from None
        memory = Mapping(self._fd, self.shape.nbytes, writable=True)
        header = pack_index_header(self.shape)
        memory.view(0, len(header))[:] = header
        self._header = memory.view(0, INDEX_HEADER_BYTES).cast("Q")
        self._buckets = memory.view(INDEX_HEADER_BYTES, buckets * BUCKET_BYTES).cast("I")
        rows_view = memory.view(self.shape.rows_at, rows * ROW_BYTES)
        self._rows, self._row_words = rows_view, rows_view.cast("Q")
        self._pins = Mapping(self._pins_fd, sessions * PIN_PAGE_BYTES, writable=True)
        self._places: dict[EntryId, tuple[int, int]] = {}  # entry: its row's number, its bucket
        self._free_rows: list[int] = []
        self._rows_with_memory = 0
        self._pages: dict[SessionId, _Page] = {}
        self._free_pages = list(range(sessions - 1, -1, -1))

    @property
    def unlisted(self) -> int:
        """Entries that found no memory for a row."""
        return len(self._unlisted)

    # -- what the core says --------------------------------------------------------------------

    def show(self, info: EntryInfo) -> None:
        record = key_record(*info.key)
        if record is None:
            return
        number = self._take_row()
        if number is None:
            self._unlisted.add(info.entry)
            self._header[UNLISTED_WORD] = self.unlisted
            return
        bucket = bucket_of(record, self.shape)
        content, extent = info.content, info.extent
        row = Row(
            info.entry,
            extent.pool,
            extent.offset,
            content.nbytes,
            content.dtype,
            content.shape,
            content.metadata,
            content.cost_s,
            False,
        )
        self._write((number - 1) * ROW_BYTES, pack_row(record, row, self._buckets[bucket]))
        self._buckets[bucket] = number
        self._places[info.entry] = number, bucket

    def hide(self, entry: EntryId) -> None:
        place = self._places.pop(entry, None)
        if place is None:
            self._unlisted.discard(entry)
            self._header[UNLISTED_WORD] = self.unlisted
            return
        number, bucket = place
        words = self._row_words
        words[(number - 1) * _NEXT_WORDS + _ENTRY_WORD] = 0  # from here on no pin of it holds
        self._header[REMOVALS_WORD] += 1
        after = words[(number - 1) * _NEXT_WORDS]
        before = self._buckets[bucket]
        if before == number:
            self._buckets[bucket] = after
        else:
            while (following := words[(before - 1) * _NEXT_WORDS]) != number:
                before = following
            words[(before - 1) * _NEXT_WORDS] = after
        self._header[REMOVALS_WORD] += 1
        self._free_rows.append(number)

    def pinned(self) -> set[EntryId]:
        """Every pin that may hold; what is missing in it can be reused at once.

        The first barrier lets this see the pins of all who looked at their row again before it
        was taken out; the second lets what they read be read before it is written anew.
        """
        if not self._pages:
            return set()
        barrier()
        pinned: set[int] = set()
        for page in self._pages.values():
            pinned.update(page.pinned())
        barrier()
        return {EntryId(entry) for entry in pinned}

    def take_uses(self) -> Uses:
        entries: list[EntryId] = []
        hits = nbytes = misses = 0
        for page in self._pages.values():
            uses = page.take_uses()
            entries.extend(uses.entries)
            hits, nbytes, misses = hits + uses.hits, nbytes + uses.nbytes, misses + uses.misses
        return Uses(tuple(entries), hits, nbytes, misses)

    # -- sessions ------------------------------------------------------------------------------

    def open_page(self, session: SessionId) -> int | None:
        """Where in the file of pins the session's page begins. None: it must ask for everything."""
        if not self._free_pages:
            return None
        number = self._free_pages[-1]
        try:
            self._take_memory(self._pins_fd, number * PIN_PAGE_BYTES, PIN_PAGE_BYTES)
        except OSError as error:
            logger.warning("no memory for a session's pins: %s", error)
            return None
        self._free_pages.pop()
        words = self._pins.view(number * PIN_PAGE_BYTES, PIN_PAGE_BYTES).cast("Q")
        self._pages[session] = _Page(number, words)
        return number * PIN_PAGE_BYTES

    def forget(self, session: SessionId) -> None:
        page = self._pages.pop(session, None)
        if page is not None:
            page.words.cast("B")[:] = bytes(PIN_PAGE_BYTES)
            self._free_pages.append(page.number)

    def close(self) -> None:
        for path in (self.path, self.pins_path):
            path.unlink(missing_ok=True)
        os.close(self._fd)
        os.close(self._pins_fd)

    # -- rows ----------------------------------------------------------------------------------

    def _write(self, start: int, row: bytes) -> None:
        """In whatever order: who reads meanwhile sees by the checksum that it is not whole."""
        self._rows[start : start + ROW_BYTES] = row

    def _take_row(self) -> int | None:
        if not self._free_rows:
            first = self._rows_with_memory
            count = min(CHUNK_ROWS, self.shape.rows - first)
            with contextlib.suppress(OSError):  # then the entry is one that has to be asked for
                start = self.shape.rows_at + first * ROW_BYTES
                self._take_memory(self._fd, start, count * ROW_BYTES)
                self._rows_with_memory += count
                self._free_rows.extend(range(first + count, first, -1))
        return self._free_rows.pop() if self._free_rows else None

    @staticmethod
    def _take_memory(fd: int, offset: int, nbytes: int) -> None:
        """So that a lack of it is an error, not a SIGBUS. Raises OSError."""
        os.posix_fallocate(fd, offset, nbytes)
