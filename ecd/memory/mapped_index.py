"""The mapped index: what clients read and pin without a call. Layout in `ecd_proto/shm.py`.

Why a reader never sees a reused extent, whatever moment it is stopped at, stands in
docs/reading-without-a-call.md, which names the steps below.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from ecd.core.allocator import GRANULE_BYTES
from ecd.core.clients import Put, Uses
from ecd.core.types import EntryId, EntryInfo, Extent, Key, SessionId
from ecd.memory.host import PoolError, advice, create_file
from ecd.memory.page import Page
from ecd_proto.mapping import Mapping
from ecd_proto.shm import (
    BUCKET_BYTES,
    DESK_BYTES,
    DESKS_AT,
    INDEX_HEADER_BYTES,
    INDEX_SUFFIX,
    LIFE_WORD,
    NAMES_AT,
    NAMES_BYTES,
    PAGE_BYTES,
    PAGES_WORD,
    PINS_SUFFIX,
    REMOVALS_WORD,
    RESERVATIONS_WORD,
    ROW_BYTES,
    ROW_PROOF_WORD,
    STORES_IN_ORDER,
    UNLISTED_WORD,
    IndexShape,
    Names,
    Row,
    barrier,
    bucket_of,
    key_record,
    pack_index_header,
    pack_row,
    random_prime,
)

logger = logging.getLogger(__name__)

MIN_BUCKETS = 1024
CHUNK_ROWS = 2048
"""Rows whose memory is taken at a time."""
MAX_USES = 1024
"""Ranked anew at a time."""
_ROW_WORDS, _ENTRY_WORD = ROW_BYTES // 8, 2


class MappedIndex:
    """Rows for every stored entry, and a page of pins for each session."""

    def __init__(
        self, directory: Path, incarnation: str, pool_bytes: int, sessions: int, life: int = 1
    ) -> None:
        """`life` counts the daemons that have had the pool. Raises PoolError."""
        rows = pool_bytes // GRANULE_BYTES
        buckets = max(MIN_BUCKETS, 1 << (rows - 1).bit_length())
        self.shape = IndexShape(buckets, rows, random_prime(), sessions)
        self._unlisted: set[EntryId] = set()
        self._unseen = 0
        self.path = directory / f"{incarnation}{INDEX_SUFFIX}"
        self.pins_path = directory / f"{incarnation}{PINS_SUFFIX}"
        try:
            self._fd = create_file(self.path, self.shape.nbytes)
            self._pins_fd = create_file(self.pins_path, sessions * PAGE_BYTES)
            self._take_memory(self._fd, 0, self.shape.rows_at)
        except OSError as error:
            raise PoolError(
                f"the pool's index needs {self.shape.rows_at} bytes more in {directory}: "
                f"{error.strerror}. {advice(pool_bytes)}"
            ) from None
        memory = Mapping(self._fd, self.shape.nbytes, writable=True)
        header = pack_index_header(self.shape)
        memory.view(0, len(header))[:] = header
        self._header = memory.view(0, INDEX_HEADER_BYTES).cast("Q")
        self._header[LIFE_WORD] = life
        self._names = Names(memory.view(NAMES_AT, NAMES_BYTES))
        self._desks = memory.view(DESKS_AT, sessions * DESK_BYTES)
        self._buckets = memory.view(self.shape.buckets_at, buckets * BUCKET_BYTES).cast("I")
        rows_view = memory.view(self.shape.rows_at, rows * ROW_BYTES)
        self._rows, self._row_words = rows_view, rows_view.cast("Q")
        self._pins = Mapping(self._pins_fd, sessions * PAGE_BYTES, writable=True)
        self._free_rows: list[int] = []
        self._rows_with_memory = 0
        self._pages: OrderedDict[SessionId, Page] = OrderedDict()
        self._sessions: dict[int, SessionId] = {}  # by page
        self._free_pages = list(range(sessions - 1, -1, -1))

    @property
    def unlisted(self) -> int:
        """Entries that found no memory for a row."""
        return len(self._unlisted)

    # -- what the core says --------------------------------------------------------------------

    def show(self, info: EntryInfo) -> None:
        record = self._record(info.key)
        if record is None:
            return  # who looks for it knows that it has to ask
        number = self._take_row()
        if number is None:
            self._unlisted.add(info.entry)
            self._note_unlisted()
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
        if info.checksum is not None:
            self._row_words[(number - 1) * _ROW_WORDS + ROW_PROOF_WORD] = info.checksum

    def prove(self, entry: EntryId, key: Key, checksum: int) -> None:
        _, _, number = self._place_of(entry, key)
        if number:
            self._row_words[(number - 1) * _ROW_WORDS + ROW_PROOF_WORD] = checksum

    def note_unseen(self, count: int) -> None:
        """So many entries were taken over and nobody has looked at them: who misses one asks."""
        self._unseen = count
        self._note_unlisted()

    def _note_unlisted(self) -> None:
        self._header[UNLISTED_WORD] = self.unlisted + self._unseen

    def note_reservations(self, count: int) -> None:
        self._header[RESERVATIONS_WORD] = count

    def hide(self, entry: EntryId, key: Key) -> None:
        bucket, before, number = self._place_of(entry, key)
        if not number:
            self._unlisted.discard(entry)
            self._note_unlisted()
            return
        words = self._row_words
        words[(number - 1) * _ROW_WORDS + _ENTRY_WORD] = 0  # from here on no pin of it holds
        self._header[REMOVALS_WORD] += 1
        after = words[(number - 1) * _ROW_WORDS]
        if before:
            words[(before - 1) * _ROW_WORDS] = after
        else:
            self._buckets[bucket] = after
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
        if not STORES_IN_ORDER:
            barrier()
        pinned.discard(0)  # words that pin nothing
        return {EntryId(entry) for entry in pinned}

    def take_uses(self) -> Uses:
        """Of the sessions whose turn it is, so that no look takes long."""
        taken: list[Uses] = []
        known = 0
        while len(taken) < len(self._pages) and known < MAX_USES:
            session, page = next(iter(self._pages.items()))
            self._pages.move_to_end(session)
            taken.append(page.take_uses())
            known += len(taken[-1].entries)
        return Uses(
            tuple(entry for uses in taken for entry in uses.entries),
            sum(uses.hits for uses in taken),
            sum(uses.nbytes for uses in taken),
            sum(uses.misses for uses in taken),
            sum(uses.duplicates for uses in taken),
        )

    def grant(self, session: SessionId, pieces: Sequence[Extent]) -> list[Extent] | None:
        page = self._pages.get(session)
        if page is None or not page.grant(pieces):
            return None
        return self._begun(page)

    def revoke(self, session: SessionId) -> list[Extent]:
        page = self._pages[session]
        page.revoke()
        return self._begun(page)

    @staticmethod
    def _begun(page: Page) -> list[Extent]:
        """The barrier lets this see what was begun by all who saw the grant before."""
        barrier()
        return page.begun()

    def is_putting(self, key: Key) -> bool:
        return any(page.is_putting(key) for page in self._pages.values())

    # -- puts ----------------------------------------------------------------------------------

    def finished_puts(self, page: int) -> tuple[SessionId, list[Put]] | None:
        """What the session of this page has written. None: it is nobody's page."""
        session = self._sessions.get(page)
        if session is None:
            return None
        puts = self._pages[session].finished_puts()
        if puts and not STORES_IN_ORDER:
            barrier()  # what they wrote is there for all who will see the rows
        return session, puts

    def answer(self, session: SessionId, put: Put, outcome: int) -> None:
        self._pages[session].answer(put, outcome)

    # -- sessions ------------------------------------------------------------------------------

    def open_page(self, session: SessionId) -> int | None:
        """Where in the file of pins the session's page begins. None: it must ask for everything."""
        if not self._free_pages:
            return None
        number = self._free_pages[-1]
        try:
            self._take_memory(self._pins_fd, number * PAGE_BYTES, PAGE_BYTES)
        except OSError as error:
            logger.warning("no memory for a session's pins: %s", error)
            return None
        self._free_pages.pop()
        words = self._pins.view(number * PAGE_BYTES, PAGE_BYTES).cast("Q")
        desk = self._desks[number * DESK_BYTES : (number + 1) * DESK_BYTES].cast("Q")
        self._pages[session] = Page(number, words, desk, self._names)
        self._sessions[number] = session
        self._header[PAGES_WORD] = max(self._header[PAGES_WORD], number + 1)
        return number * PAGE_BYTES

    def forget(self, session: SessionId) -> None:
        page = self._pages.pop(session, None)
        if page is not None:
            page.clear()
            del self._sessions[page.number]
            self._free_pages.append(page.number)

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._pins_fd)

    # -- rows ----------------------------------------------------------------------------------

    def _record(self, key: Key) -> bytes | None:
        """None: its key has no row, as everybody knows."""
        namespace = self._names.add(key.namespace)
        return None if namespace is None else key_record(namespace, key.mm_hash)

    def _place_of(self, entry: EntryId, key: Key) -> tuple[int, int, int]:
        """The entry's bucket, the row before its own there, and its row; 0 for what it has not."""
        record = self._record(key)
        if record is None:
            return 0, 0, 0
        bucket = bucket_of(record, self.shape)
        before, number = 0, self._buckets[bucket]
        words = self._row_words
        while number and words[(number - 1) * _ROW_WORDS + _ENTRY_WORD] != entry:
            before, number = number, words[(number - 1) * _ROW_WORDS]
        return bucket, before, number

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
