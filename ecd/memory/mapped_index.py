"""The mapped index: what clients read and pin without a call. Layout in `ecd_proto/shm.py`.

Why a reader never sees a reused extent, whatever moment it is stopped at, stands in
docs/reading-without-a-call.md, which names the steps below.
"""

from __future__ import annotations

import contextlib
import logging
import os
from bisect import bisect_left
from collections.abc import Iterator, KeysView, Sequence

from ecd.core.allocator import GRANULE_BYTES
from ecd.core.clients import Portion, Put, Uses
from ecd.core.types import EntryId, EntryInfo, Extent, Key, SessionId
from ecd.memory.claims import Claims
from ecd.memory.host import advice
from ecd.memory.page import Page
from ecd.memory.pool_dir import PoolDir, PoolError
from ecd_proto.mapping import Mapping
from ecd_proto.shm import (
    BUCKET_BYTES,
    DESK_BYTES,
    DESKS_AT,
    DUPLICATES_WORD,
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
    TAKING_WORD,
    UNLISTED_WORD,
    USES_WORD,
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
MAX_USED_PAGES = 128
"""Whose uses are taken at a time: each takes some 5 us."""
MAX_COST = 8192
"""What one step of a scan costs, about 0.6 ms, in words that it has to look at anew."""
PAGE_COST, PIN_COST = 16, 10
"""Of seeing that a page is as it was, and of an entry that it pins and did not, in such words."""
_ROW_WORDS, _ENTRY_WORD = ROW_BYTES // 8, 2
_COUNTERS = range(USES_WORD, DUPLICATES_WORD + 1)


class MappedIndex:
    """Rows for every stored entry, and a page of pins for each session."""

    def __init__(
        self, directory: PoolDir, incarnation: str, pool_bytes: int, sessions: int, life: int = 1
    ) -> None:
        """`life` counts the daemons that have had the pool. Raises PoolError."""
        rows = pool_bytes // GRANULE_BYTES
        buckets = max(MIN_BUCKETS, 1 << (rows - 1).bit_length())
        self.shape = IndexShape(buckets, rows, random_prime(), sessions)
        self._unlisted: set[EntryId] = set()
        self._unseen = 0
        self.path = directory.path / f"{incarnation}{INDEX_SUFFIX}"
        self.pins_path = directory.path / f"{incarnation}{PINS_SUFFIX}"
        try:
            self._fd = directory.create(self.path.name, self.shape.nbytes, clients_write=False)
            self._pins_fd = directory.create(self.pins_path.name, sessions * PAGE_BYTES)
            self._take_memory(self._fd, 0, self.shape.rows_at)
        except OSError as error:
            raise PoolError(
                f"the pool's index needs {self.shape.rows_at} bytes more in {directory.path}: "
                f"{error.strerror}. {advice(pool_bytes)}"
            ) from None
        memory = Mapping(self._fd, self.shape.nbytes, writable=True)
        header = pack_index_header(self.shape)
        memory.view(0, len(header))[:] = header
        self._header = memory.view(0, INDEX_HEADER_BYTES).cast("Q")
        self._header[TAKING_WORD] = life > 1
        self._header[LIFE_WORD] = life
        self._names = Names(memory.view(NAMES_AT, NAMES_BYTES))
        self._desks = memory.view(DESKS_AT, sessions * DESK_BYTES)
        self._buckets = memory.view(self.shape.buckets_at, buckets * BUCKET_BYTES).cast("I")
        rows_view = memory.view(self.shape.rows_at, rows * ROW_BYTES)
        self._rows, self._row_words = rows_view, rows_view.cast("Q")
        self._pins = Mapping(self._pins_fd, sessions * PAGE_BYTES, writable=True)
        self._free_rows: list[int] = []
        self._rows_with_memory = 0
        pin_words = self._pins.view(0, self._pins.nbytes).cast("Q")
        self._counters = [pin_words[word :: PAGE_BYTES // 8] for word in _COUNTERS]
        self._claims = Claims(pin_words, self._desks.cast("Q"), sessions)
        self._last_counted = [(0, 0, 0, 0)] * sessions  # by page
        self._next_used = 0  # the page whose uses come first the next time
        self._pages: dict[SessionId, Page] = {}
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
        if not STORES_IN_ORDER:
            barrier()  # who finds the row by its bucket finds it whole
        self._buckets[bucket] = number
        if info.checksum is not None:
            self._row_words[(number - 1) * _ROW_WORDS + ROW_PROOF_WORD] = info.checksum

    def prove(self, entry: EntryId, key: Key, checksum: int) -> None:
        _, _, number = self._place_of(entry, key)
        if number:
            self._row_words[(number - 1) * _ROW_WORDS + ROW_PROOF_WORD] = checksum

    def note_taken(self) -> None:
        """What was left without a proof is shown here: from now on memory may be given away."""
        self._header[TAKING_WORD] = 0

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

    def pinned(self, live: KeysView[EntryId]) -> Iterator[Portion]:
        """Every pin of these that may hold; what no portion had can be reused after the last.

        The first barrier lets this see the pins of all who looked at their row again before it
        was taken out; the second lets what they read be read before it is written anew. Pages
        of sessions that come later matter to nobody: what they pin was not hidden before.
        """
        pinned: set[EntryId] = set()
        cost = 0
        if self._pages:
            barrier()
        for page in list(self._pages.values()):
            found, words = page.pinned(live)
            pinned |= found
            cost += PAGE_COST + words + len(found) * (PIN_COST if words else 1)
            if cost > MAX_COST:
                yield Portion(pinned)
                pinned, cost = set(), 0
        if self._pages and not STORES_IN_ORDER:
            barrier()
        yield Portion(pinned, is_last=True)

    def take_uses(self) -> Uses:
        """Of sessions whose counters have changed, some at a time, so that no look takes long."""
        used = self._header[PAGES_WORD]
        counted = list(zip(*(words[:used].tolist() for words in self._counters), strict=True))
        last = self._last_counted
        taken: list[Uses] = []
        changed = [page for page in range(used) if counted[page] != last[page]]
        turn = bisect_left(changed, self._next_used)
        known = 0
        for page in (changed[turn:] + changed[:turn])[:MAX_USED_PAGES]:
            last[page] = counted[page]
            session = self._sessions.get(page)
            if session is None:
                continue
            taken.append(self._pages[session].take_uses(counted[page]))
            known += len(taken[-1].entries)
            self._next_used = page + 1
            if known >= MAX_USES:
                break
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
        [begun] = self._begun(page)
        return begun

    def revoke(self, sessions: Sequence[SessionId]) -> list[list[Extent]]:
        pages = [self._pages[session] for session in sessions]
        for page in pages:
            page.revoke()
        return self._begun(*pages)

    @staticmethod
    def _begun(*pages: Page) -> list[list[Extent]]:
        """The barrier lets this see what was begun by all who saw the grant before."""
        barrier()
        return [page.begun() for page in pages]

    def look_at_claims(self) -> Iterator[None]:
        return self._claims.look(self._header[PAGES_WORD])

    def is_putting(self, key: Key) -> bool:
        namespace = self._names.numbers.get(key.namespace)
        return namespace is not None and self._claims.is_claimed((namespace, key.mm_hash))

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

    def page_of(self, session: SessionId) -> int | None:
        page = self._pages.get(session)
        return None if page is None else page.number

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
        page = self._pages[session] = Page(number, words, desk, self._names)
        page.clear()  # touched now, or the first look at a thousand of them takes some ms more
        self._sessions[number] = session
        self._header[PAGES_WORD] = max(self._header[PAGES_WORD], number + 1)
        return number * PAGE_BYTES

    def forget(self, session: SessionId) -> None:
        page = self._pages.pop(session, None)
        if page is not None:
            page.clear()
            self._claims.forget(page.number)
            self._last_counted[page.number] = (0, 0, 0, 0)
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
