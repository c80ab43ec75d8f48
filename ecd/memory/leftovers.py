"""Leftovers of earlier daemons: their pool, the rows of their indexes, unanswered puts.

Each generation leaves its pool, index, session pages and locks under one name. The next one links
the pool under its own name, and removes the old files only when it has verified every entry: killed
before that, it leaves the rows of both generations to the one after it.

An entry that is recovered must be whole, must be one that can exist, and must overlap no other. Its
checksum must be right. An entry without a checksum, and a put without a row, can be recovered only
where nothing can have reused the memory: docs/reading-without-a-call.md says where that is so.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ecd.base.clock import REAL, Clock
from ecd.base.wire import InvalidRequest, check_content, check_key
from ecd.core.model.board import Uses
from ecd.core.model.types import Content, Extent, Key
from ecd.memory.session_page import SessionPage, described_by
from ecd.memory.use_counters import uncounted
from ecd_proto.contract import size_text
from ecd_proto.shm.files import (
    GRANULE_BYTES,
    INDEX_SUFFIX,
    PINS_SUFFIX,
    POOL_SUFFIX,
    PUTS_SUFFIX,
    SESSIONS_SUFFIX,
    granules_bytes,
    is_any_session_locked,
)
from ecd_proto.shm.index import (
    FIRST_COUNTED_WORD,
    GENERATION_WORD,
    INDEX_HEADER_BYTES,
    MAILBOXES_AT,
    NAMESPACES_AT,
    PAGES_WORD,
    POOL_BYTES_WORD,
    RECOVERING_WORD,
    IndexShape,
    index_header_words,
    unpack_index_header,
)
from ecd_proto.shm.namespaces import NAMESPACES_BYTES, Namespaces
from ecd_proto.shm.rows import (
    ROW_BYTES,
    row_checksum,
    row_entry,
    row_is_copy,
    row_is_truncated,
)
from ecd_proto.shm.session_page import (
    DMA_BLIND_GRACE_S,
    DMA_WORD,
    GRANTED_POOL,
    MAILBOX_BYTES,
    PAGE_BYTES,
    USE_COUNTERS,
)

logger = logging.getLogger(__name__)

KEPT_SUFFIXES = POOL_SUFFIX, INDEX_SUFFIX, SESSIONS_SUFFIX, PINS_SUFFIX, PUTS_SUFFIX
"""Files that a generation leaves."""
CHUNK_ROWS = 2048
MAX_GENERATION = 1 << 63
"""More than can ever exist; the next generation's number has to fit its word."""
WAIT_S = 10.0
"""How long a start waits for clients of the last daemon to release its pool; DMA is extra."""


@dataclass(frozen=True)
class LeftoverEntry:
    """An entry of an earlier generation, as its row or its writer's page describes it.

    `checksum` is 0 if the bytes were never hashed. `number` is the entry's, or that of the put.
    """

    key: Key
    content: Content
    extent: Extent
    checksum: int
    generation: int
    put: bool
    number: int

    @property
    def rank(self) -> tuple[int, bool, bool]:
        """The order of trust: of two overlapping leftovers only the higher one can be right."""
        return self.generation, not self.put, self.checksum != 0


@dataclass(frozen=True)
class Leftovers:
    """The generations that had the pool of number GRANTED_POOL, the last one first.

    `nbytes` are those that clients may have mapped: the file is longer if a start made the pool
    grow and ended before it served.
    """

    pool: Path
    nbytes: int
    generations: tuple[tuple[int, Path], ...]  # their numbers and their indexes

    @property
    def last(self) -> int:
        """The last generation's number."""
        return self.generations[0][0]

    def entries(self) -> tuple[list[LeftoverEntry], int]:
        """The entries that may be recovered, in order of extents; how many rows were in doubt."""
        logger.info("reading what the last daemon had stored")
        doubtful = 0
        by_key: dict[Key, LeftoverEntry] = {}
        given_away = False
        for generation, index in self.generations:
            for row in _rows(index, generation, self.nbytes):
                if row is None or (given_away and not row.checksum):
                    doubtful += 1
                else:
                    by_key.setdefault(row.key, row)
            if not given_away:
                for put in _puts(index, generation, self.nbytes):
                    by_key.setdefault(put.key, put)
            given_away |= not _header(index)[RECOVERING_WORD]
        apart: list[LeftoverEntry] = []
        for each in sorted(by_key.values(), key=lambda each: each.extent.offset):
            while apart and _end(apart[-1].extent) > each.extent.offset:
                doubtful += 1
                other = apart[-1]
                if other.rank == each.rank and not each.checksum:
                    apart.pop()  # one of them is wrong, and nothing says which
                    doubtful += 1
                    break
                if other.rank >= each.rank:
                    break
                apart.pop()
            else:
                apart.append(each)
        return apart, doubtful

    def uses(self) -> Uses:
        """What clients of the last daemon read and counted in their pages, and it did not count.

        A daemon that ended before it had taken over the one before it had no clients yet.
        """
        for _, index in self.generations:
            header = _header(index)
            told = header[FIRST_COUNTED_WORD : FIRST_COUNTED_WORD + len(USE_COUNTERS)]
            if any(told):
                break
        else:
            return Uses()
        said: list[list[int]] = []
        path = index.with_suffix(PUTS_SUFFIX)
        with contextlib.suppress(FileNotFoundError), path.open("rb") as pages:
            for _ in range(header[PAGES_WORD]):
                page = pages.read(PAGE_BYTES)
                if len(page) < PAGE_BYTES:
                    break
                words = memoryview(page).cast("Q")
                said.append([words[word] for word in USE_COUNTERS])
        return uncounted(said, told)

    def remove(self) -> None:
        """Remove the files: from now on this generation's index describes the whole pool."""
        for _, index in self.generations:
            for suffix in KEPT_SUFFIXES:
                index.with_suffix(suffix).unlink(missing_ok=True)


@dataclass(frozen=True)
class Unusable:
    """Leftovers that cannot be used."""

    why: str


def find(
    directory: Path, wanted_bytes: int | None, clock: Clock = REAL
) -> Leftovers | Unusable | None:
    """Find the leftovers in a directory of this user; None if there are none.

    A pool larger than `wanted_bytes` is not taken: to cut it short would end a client that still
    maps it.
    """
    generations: list[tuple[int, Path]] = []
    for index in directory.glob(f"*{INDEX_SUFFIX}"):
        if index.with_suffix(POOL_SUFFIX).exists() and index.with_suffix(SESSIONS_SUFFIX).exists():
            generation = generation_of(index)
            if generation is None:
                return Unusable("it is of another version of ecd")
            if generation:
                generations.append((generation, index))
    if not generations:
        return None
    generations.sort(reverse=True)
    pool = generations[0][1].with_suffix(POOL_SUFFIX)
    stat = pool.stat()
    same = [
        (number, index)
        for number, index in generations
        if index.with_suffix(POOL_SUFFIX).stat().st_ino == stat.st_ino
    ]
    nbytes = max(_header(index)[POOL_BYTES_WORD] for _, index in same) or stat.st_size
    if wanted_bytes is not None and wanted_bytes < nbytes:
        found, wanted = size_text(nbytes), size_text(wanted_bytes)
        return Unusable(f"its pool has {found}, and only {wanted} are wanted")
    if min(stat.st_blocks * 512, stat.st_size) < nbytes:
        return Unusable("its pool was not populated, or was truncated")
    for _, index in same:
        # A client that comes late finds no page, and gives up. One that came in time holds a lock.
        with contextlib.suppress(FileNotFoundError):
            index.with_suffix(PINS_SUFFIX).rename(index.with_suffix(PUTS_SUFFIX))
    if not _let_go([index.with_suffix(SESSIONS_SUFFIX) for _, index in same], clock):
        return Unusable(f"some client has not let go of its pool within {WAIT_S:.0f} s")
    if any(_died_copying(index) for _, index in same):
        logger.info(
            "waiting %.0f s: a client of the last daemon was killed while its device could copy, "
            "and the device may still write to the pool",
            DMA_BLIND_GRACE_S,
        )
        clock.block(DMA_BLIND_GRACE_S)
    return Leftovers(pool, nbytes, tuple(same))


def _let_go(sessions: Sequence[Path], clock: Clock) -> bool:
    """Wait until no client of these generations can touch the pool. False: one still can."""
    deadline_s = clock.now_s() + WAIT_S
    fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in sessions]
    try:
        if any(map(is_any_session_locked, fds)):
            logger.info("waiting for clients of the last daemon to let go of its pool")
        while any(map(is_any_session_locked, fds)):
            if clock.now_s() > deadline_s:
                return False
            clock.block(0.02)
        return True
    finally:
        for fd in fds:
            os.close(fd)


def _died_copying(index: Path) -> bool:
    """Whether a page says, with all locks dropped, that a device may copy for its client."""
    try:
        fd = os.open(index.with_suffix(PUTS_SUFFIX), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        pages = min(_header(index)[PAGES_WORD], os.fstat(fd).st_size // PAGE_BYTES)
        return any(any(os.pread(fd, 8, at * PAGE_BYTES + 8 * DMA_WORD)) for at in range(pages))
    finally:
        os.close(fd)


def generation_of(index: Path) -> int | None:
    """The index's generation; 0 if its daemon ended before it wrote the header.

    None if this version of ecd does not read the index.
    """
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER_BYTES)
    if not any(header):
        return 0
    if len(header) < INDEX_HEADER_BYTES or unpack_index_header(header) is None:
        return None
    generation = _header(index)[GENERATION_WORD]
    return generation if generation < MAX_GENERATION else None


def _header(index: Path) -> tuple[int, ...]:
    """The index's header, as words."""
    with index.open("rb") as file:
        return index_header_words(file.read(INDEX_HEADER_BYTES))


def _table(file: BinaryIO) -> tuple[IndexShape, Namespaces]:
    """The shape and the namespaces of an index that `find` has accepted."""
    shape = unpack_index_header(file.read(INDEX_HEADER_BYTES))
    assert shape is not None
    file.seek(NAMESPACES_AT)
    names = file.read(NAMESPACES_BYTES).ljust(NAMESPACES_BYTES, b"\0")
    return shape, Namespaces(memoryview(names))


def _rows(index: Path, generation: int, pool_bytes: int) -> Iterator[LeftoverEntry | None]:
    """Every row that lists an entry; None for a row in doubt."""
    with index.open("rb") as file:
        shape, names = _table(file)
        size = os.fstat(file.fileno()).st_size
        if shape.rows_at >= size:
            return
        end = os.lseek(file.fileno(), shape.rows_at, os.SEEK_HOLE)
        file.seek(shape.rows_at)
        left_bytes = end - shape.rows_at
        while left_bytes >= ROW_BYTES:
            chunk = file.read(min(CHUNK_ROWS * ROW_BYTES, left_bytes))
            if not chunk:
                return
            left_bytes -= len(chunk)
            for start in range(0, len(chunk) - ROW_BYTES + 1, ROW_BYTES):
                row = chunk[start : start + ROW_BYTES]
                if row_entry(row) and not row_is_copy(row):
                    yield _left(row, names, generation, pool_bytes)


def _left(row: bytes, names: Namespaces, generation: int, pool_bytes: int) -> LeftoverEntry | None:
    described = described_by(row, names)
    if described is None or row_is_truncated(row):
        return None
    key, content, extent = described
    checked = _checked(key, content, extent, pool_bytes)
    return (
        LeftoverEntry(*checked, extent, row_checksum(row), generation, False, row_entry(row))
        if checked
        else None
    )


def _puts(index: Path, generation: int, pool_bytes: int) -> Iterator[LeftoverEntry]:
    """Puts that were written completely and not answered, by their pages."""
    try:
        pages = index.with_suffix(PUTS_SUFFIX).open("rb")
    except FileNotFoundError:
        return
    with pages, index.open("rb") as file:
        shape, names = _table(file)
        file.seek(MAILBOXES_AT)
        for number in range(min(_header(index)[PAGES_WORD], shape.mailboxes)):
            words, mailbox = pages.read(PAGE_BYTES), file.read(MAILBOX_BYTES)
            if len(words) < PAGE_BYTES or len(mailbox) < MAILBOX_BYTES:
                return
            page = SessionPage(
                number, memoryview(words).cast("Q"), memoryview(mailbox).cast("Q"), names
            )
            for put in filter(page.is_granted, page.finished_puts()):
                if checked := _checked(put.key, put.content, put.extent, pool_bytes):
                    yield LeftoverEntry(*checked, put.extent, 0, generation, True, put.number)


def _checked(
    key: Key, content: Content, extent: Extent, pool_bytes: int
) -> tuple[Key, Content] | None:
    """The key and content as the contract allows them; None if there can be no such entry.

    Only GRANTED_POOL is recovered: no file of another pool is found again.
    """
    if extent.pool != GRANTED_POOL or extent.offset % GRANULE_BYTES or _end(extent) > pool_bytes:
        return None
    try:
        return check_key(*key), check_content(content)
    except InvalidRequest:
        return None


def _end(extent: Extent) -> int:
    return extent.offset + granules_bytes(extent.nbytes)
