"""The index in shared memory, read and pinned by clients without a call. Layout: `ecd_proto.shm`.

docs/reading-without-a-call.md says why a reader never sees a reused extent, at whatever moment it
is stopped; it names the steps below.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, KeysView, Sequence, Set

from ecd.core.model.board import Portion, Put, Uses
from ecd.core.model.types import EntryId, EntryInfo, Extent, Key, SessionId, Start
from ecd.memory.claims import Claims
from ecd.memory.host import advice
from ecd.memory.pool_dir import PoolDir, PoolError
from ecd.memory.session_page import SessionPage
from ecd.memory.use_counters import UseCounters
from ecd_proto.contract import size_text
from ecd_proto.mapped_file import MappedFile
from ecd_proto.shm.barriers import STORES_IN_ORDER, barrier
from ecd_proto.shm.files import GRANULE_BYTES, INDEX_SUFFIX, PINS_SUFFIX
from ecd_proto.shm.index import (
    BUCKET_BYTES,
    FIRST_COUNTED_WORD,
    GENERATION_WORD,
    INDEX_HEADER_BYTES,
    MAILBOXES_AT,
    NAMESPACES_AT,
    PAGES_WORD,
    POOL_BYTES_WORD,
    RECOVERING_WORD,
    REMOVALS_WORD,
    RESERVATIONS_WORD,
    UNLISTED_WORD,
    IndexShape,
    bucket_of,
    pack_index_header,
    random_prime,
)
from ecd_proto.shm.namespaces import NAMESPACES_BYTES, Namespaces
from ecd_proto.shm.rows import (
    ROW_BYTES,
    ROW_CHECKSUM_WORD,
    ROW_ENTRY_WORD,
    ROW_NEXT_WORD,
    ROW_WORDS,
    Row,
    key_record,
    pack_row,
)
from ecd_proto.shm.session_page import MAILBOX_BYTES, PAGE_BYTES, USE_COUNTERS

logger = logging.getLogger(__name__)

MIN_BUCKETS = 1024
CHUNK_ROWS = 2048
"""Rows whose memory is allocated at a time."""
MAX_COST = 8192
"""Cost of one step of a scan, in words to be examined: about 0.6 ms."""
PAGE_COST, PIN_COST = 16, 10
"""Cost, in such words, of a page that has not changed, and of an entry that it newly pins."""


class SharedIndex:
    """Rows for every stored entry, and a page of pins for each session."""

    def __init__(
        self,
        directory: PoolDir,
        incarnation: str,
        pool_bytes: int,
        sessions: int,
        generation: int = 1,
    ) -> None:
        """`pool_bytes` are those of all pools together, each granule of which may need a row.

        `generation` counts the daemons that have had the pool. Raises PoolError.
        """
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
                f"the pool's index needs {size_text(self.shape.rows_at)} more in {directory.path}: "
                f"{error.strerror}. {advice(pool_bytes, directory)}"
            ) from None
        memory = MappedFile(self._fd, self.shape.nbytes, writable=True)
        header = pack_index_header(self.shape)
        memory.view(0, len(header))[:] = header
        self._header = memory.view(0, INDEX_HEADER_BYTES).cast("Q")
        self._header[RECOVERING_WORD] = generation > 1
        self._header[GENERATION_WORD] = generation
        self._names = Namespaces(memory.view(NAMESPACES_AT, NAMESPACES_BYTES))
        self._mailboxes = memory.view(MAILBOXES_AT, sessions * MAILBOX_BYTES)
        self._buckets = memory.view(self.shape.buckets_at, buckets * BUCKET_BYTES).cast("I")
        rows_view = memory.view(self.shape.rows_at, rows * ROW_BYTES)
        self._rows, self._row_words = rows_view, rows_view.cast("Q")
        self._pins = MappedFile(self._pins_fd, sessions * PAGE_BYTES, writable=True)
        self._free_rows: list[int] = []
        self._rows_with_memory = 0
        pin_words = self._pins.view(0, self._pins.nbytes).cast("Q")
        told = self._header[FIRST_COUNTED_WORD : FIRST_COUNTED_WORD + len(USE_COUNTERS)]
        self._uses = UseCounters(pin_words, sessions, told)
        self._claims = Claims(pin_words, self._mailboxes.cast("Q"), sessions)
        self._pages: dict[SessionId, SessionPage] = {}
        self._sessions: dict[int, SessionId] = {}  # by page
        self._free_pages = list(range(sessions - 1, -1, -1))

    @property
    def unlisted(self) -> int:
        """Entries without a row, because there was no memory for one."""
        return len(self._unlisted)

    # -- the core's announcements --------------------------------------------------------------

    def show(self, info: EntryInfo) -> None:
        record = self._record(info.key, info.replica_in)
        if record is None:
            return  # clients know by the same rule that they have to call
        number = self._take_row()
        if number is None:
            if not info.replica_in:  # a replica that nobody finds is no loss
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
            barrier()  # a client that finds the row by its bucket finds it whole
        self._buckets[bucket] = number
        if info.checksum is not None:
            self._row_words[(number - 1) * ROW_WORDS + ROW_CHECKSUM_WORD] = info.checksum

    def note_checksum(self, entry: EntryId, key: Key, checksum: int) -> None:
        _, _, number = self._place_of(entry, key)
        if number:
            self._row_words[(number - 1) * ROW_WORDS + ROW_CHECKSUM_WORD] = checksum

    def note_taken(self) -> None:
        """Allow memory to be reused: all entries without a checksum have their rows here."""
        self._header[RECOVERING_WORD] = 0

    def note_populated(self, pool_bytes: int) -> None:
        """Record how many bytes of the host pool the next daemon may take over."""
        self._header[POOL_BYTES_WORD] = pool_bytes

    def note_unseen(self, count: int) -> None:
        """Make clients that miss a key make a call, while this many entries are not verified."""
        self._unseen = count
        self._note_unlisted()

    def _note_unlisted(self) -> None:
        self._header[UNLISTED_WORD] = self.unlisted + self._unseen

    def announce_reservations(self, count: int) -> None:
        self._header[RESERVATIONS_WORD] = count

    def hide(self, entry: EntryId, key: Key, replica_in: int = 0) -> None:
        bucket, before, number = self._place_of(entry, key, replica_in)
        if not number:
            self._unlisted.discard(entry)
            self._note_unlisted()
            return
        words = self._row_words
        words[(number - 1) * ROW_WORDS + ROW_ENTRY_WORD] = 0  # later pins of it do not hold
        self._header[REMOVALS_WORD] += 1
        after = words[(number - 1) * ROW_WORDS + ROW_NEXT_WORD]
        if before:
            words[(before - 1) * ROW_WORDS + ROW_NEXT_WORD] = after
        else:
            self._buckets[bucket] = after
        self._header[REMOVALS_WORD] += 1
        self._free_rows.append(number)

    def pinned(
        self, live: KeysView[EntryId], starts: Set[Start] = frozenset()
    ) -> Iterator[Portion]:
        """Scan all pins of these entries: after the last portion, one in no portion is free.

        The first barrier shows this scan the pins of all readers whose recheck came before the row
        was hidden. The second orders their reads before the next writes to the same memory. Pages
        of later sessions do not matter: they can pin no entry that was hidden before.
        """
        pinned: set[EntryId] = set()
        begun: set[Start] = set()
        cost = 0
        if self._pages:
            barrier()
        for page in list(self._pages.values()):
            found, words = page.pinned(live)
            pinned |= found
            begun |= page.pinned_starts & starts
            cost += PAGE_COST + words + len(found) * (PIN_COST if words else 1)
            if cost > MAX_COST:
                yield Portion(pinned, starts=begun)
                pinned, begun, cost = set(), set(), 0
        if self._pages and not STORES_IN_ORDER:
            barrier()
        yield Portion(pinned, True, begun)

    def pinned_by(
        self, session: SessionId, live: KeysView[EntryId]
    ) -> tuple[Set[EntryId], Set[Start]]:
        page = self._pages.get(session)
        return (frozenset(), frozenset()) if page is None else page.pinned_now(live)

    def drain_uses(self) -> Uses:
        return self._uses.take(self._header[PAGES_WORD], self._page_at)

    def begin_counting(self, earlier: Uses) -> None:
        """Record what is counted for the next daemon, from now on.

        The next drain counts uncounted reads of an `earlier` incarnation's clients.
        """
        self._uses.begin(earlier)

    def _page_at(self, number: int) -> SessionPage | None:
        session = self._sessions.get(number)
        return None if session is None else self._pages[session]

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
    def _begun(*pages: SessionPage) -> list[list[Extent]]:
        """The puts begun by all clients that saw a grant before it went, as the barrier shows."""
        barrier()
        return [page.begun() for page in pages]

    def scan_claims(self) -> Iterator[None]:
        return self._claims.scan(self._header[PAGES_WORD])

    def is_claimed(self, key: Key) -> bool:
        namespace = self._names.numbers.get(key.namespace)
        return namespace is not None and self._claims.is_claimed((namespace, key.mm_hash))

    # -- puts ----------------------------------------------------------------------------------

    def finished_puts(self, page: int) -> tuple[SessionId, list[Put]] | None:
        """The session of this page and its finished puts; None if the page is free."""
        session = self._sessions.get(page)
        if session is None:
            return None
        puts = self._pages[session].finished_puts()
        if puts and not STORES_IN_ORDER:
            barrier()  # their bytes are visible before their rows are
        return session, puts

    def answer(self, session: SessionId, put: Put, outcome: int) -> None:
        self._pages[session].answer(put, outcome)

    # -- sessions ------------------------------------------------------------------------------

    def page_of(self, session: SessionId) -> int | None:
        page = self._pages.get(session)
        return None if page is None else page.number

    def dma_word(self, session: SessionId) -> int:
        """DMA_WORD of the session's page; 0 without a page, by which no device copies."""
        page = self._pages.get(session)
        return 0 if page is None else page.dma_word

    @property
    def pinning_sessions(self) -> int:
        """The sessions whose clients say that they have pinned the pool for their GPUs."""
        return sum(page.pinned_bytes > 0 for page in self._pages.values())

    def pinned_bytes(self, session: SessionId) -> int:
        """Bytes of the pools that the session's client says it has pinned for its GPUs."""
        page = self._pages.get(session)
        return 0 if page is None else page.pinned_bytes

    def note_namespace(self, session: SessionId, namespace: str) -> None:
        """Count the session's misses as this namespace's, from now on."""
        page = self._pages.get(session)
        if page is not None:
            page.namespace = namespace

    def open_page(self, session: SessionId) -> int | None:
        """Give the session a page: its offset in the file of pins. None if there is no memory."""
        if not self._free_pages:
            return None
        number = self._free_pages[-1]
        try:
            self._take_memory(self._pins_fd, number * PAGE_BYTES, PAGE_BYTES)
        except OSError as error:
            logger.warning(
                "no memory in %s for a session's pins: %s. Its gets and puts are calls: free what "
                "else lies there, or make it larger",
                self.pins_path.parent.parent,
                error.strerror,
            )
            return None
        self._free_pages.pop()
        words = self._pins.view(number * PAGE_BYTES, PAGE_BYTES).cast("Q")
        mailbox = self._mailboxes[number * MAILBOX_BYTES : (number + 1) * MAILBOX_BYTES].cast("Q")
        page = self._pages[session] = SessionPage(number, words, mailbox, self._names)
        page.clear()  # touched now, or the first scan of a thousand pages takes some ms more
        self._sessions[number] = session
        self._header[PAGES_WORD] = max(self._header[PAGES_WORD], number + 1)
        return number * PAGE_BYTES

    def forget(self, session: SessionId) -> None:
        page = self._pages.pop(session, None)
        if page is not None:
            self._uses.forget(page)
            page.clear()
            self._claims.forget(page.number)
            del self._sessions[page.number]
            self._free_pages.append(page.number)

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._pins_fd)

    # -- rows ----------------------------------------------------------------------------------

    def _record(self, key: Key, replica_in: int) -> bytes | None:
        """The key as rows spell it. None if it cannot have a row, as clients know by this rule."""
        namespace = self._names.add(key.namespace)
        return None if namespace is None else key_record(namespace, key.mm_hash, replica_in)

    def _place_of(self, entry: EntryId, key: Key, replica_in: int = 0) -> tuple[int, int, int]:
        """The entry's bucket, the row before its own, and its row; 0 for each it does not have."""
        record = self._record(key, replica_in)
        if record is None:
            return 0, 0, 0
        bucket = bucket_of(record, self.shape)
        before, number = 0, self._buckets[bucket]
        words = self._row_words
        while number and words[(number - 1) * ROW_WORDS + ROW_ENTRY_WORD] != entry:
            before, number = number, words[(number - 1) * ROW_WORDS + ROW_NEXT_WORD]
        return bucket, before, number

    def _write(self, start: int, row: bytes) -> None:
        """Write in any order: a reader detects an incomplete row by its checksum."""
        self._rows[start : start + ROW_BYTES] = row

    def _take_row(self) -> int | None:
        if not self._free_rows:
            first = self._rows_with_memory
            count = min(CHUNK_ROWS, self.shape.rows - first)
            with contextlib.suppress(OSError):  # then a client has to call for the entry
                start = self.shape.rows_at + first * ROW_BYTES
                self._take_memory(self._fd, start, count * ROW_BYTES)
                self._rows_with_memory += count
                self._free_rows.extend(range(first + count, first, -1))
        return self._free_rows.pop() if self._free_rows else None

    @staticmethod
    def _take_memory(fd: int, offset: int, nbytes: int) -> None:
        """Allocate file memory, so that a lack of it is an OSError instead of a SIGBUS."""
        os.posix_fallocate(fd, offset, nbytes)
