"""What a daemon before this one left: its pool, the rows of its index, and puts without an answer.

A life leaves its pool, its index, its sessions' pages and locks under one name. The next links the
pool under its own name, and removes the old ones only when it has looked at every entry: killed on
the way, it leaves both lives' rows to the one after it. Whatever is taken over must be whole,
describe an entry that can be and lie where nothing else lies. What a row says of the bytes must be
true; where it says nothing of them, and where there is a put but no row yet, nobody can have reused
the place: docs/reading-without-a-call.md says why, and of which lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecd.core.allocator import GRANULE_BYTES, Allocator
from ecd.core.types import Content, Extent, Key
from ecd.memory.page import Page
from ecd.wire import InvalidRequest, check_key, content_from
from ecd_proto.shm import (
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
    POOL_SUFFIX,
    PUTS_SUFFIX,
    ROW_BYTES,
    SESSIONS_SUFFIX,
    TAKING_WORD,
    Names,
    is_any_session_locked,
    row_is_whole,
    row_proof,
    unpack_index_header,
    unpack_key,
    unpack_row,
)

logger = logging.getLogger(__name__)

KEPT_SUFFIXES = POOL_SUFFIX, INDEX_SUFFIX, SESSIONS_SUFFIX, PINS_SUFFIX, PUTS_SUFFIX
"""What a life leaves."""
CHUNK_ROWS = 2048
MAX_LIFE = 1 << 63
"""More than there can have been; the next one's number has to fit its word."""
WAIT_S = 10.0
"""How long a start waits for clients of the life before to let go of its pool."""


@dataclass(frozen=True)
class Left:
    """An entry that a life before this one had stored, as its row or its writer's page says.

    `proof` is 0 where nobody had read the bytes. `number` is the entry's, or that of a `put`.
    """

    key: Key
    content: Content
    extent: Extent
    proof: int
    life: int
    put: bool
    number: int

    @property
    def rank(self) -> tuple[int, bool, bool]:
        """Of two in one place the higher is right, if any."""
        return self.life, not self.put, self.proof != 0


@dataclass(frozen=True)
class Before:
    """The lives that had the pool, the last one first."""

    pool: Path
    nbytes: int
    lives: tuple[tuple[int, Path], ...]  # their numbers and their indexes

    @property
    def life(self) -> int:
        return self.lives[0][0]

    def entries(self) -> tuple[list[Left], int]:
        """What can be taken over, in order of extents; how many rows were in doubt."""
        logger.info("reading what the last daemon had stored")
        doubtful = 0
        by_key: dict[Key, Left] = {}
        given_away = False
        for life, index in self.lives:
            for left in _rows(index, life, self.nbytes):
                if left is None or (given_away and not left.proof):
                    doubtful += 1
                else:
                    by_key.setdefault(left.key, left)
            if not given_away:
                for left in _puts(index, life, self.nbytes):
                    by_key.setdefault(left.key, left)
            given_away |= not _header(index)[TAKING_WORD]
        apart: list[Left] = []
        for left in sorted(by_key.values(), key=lambda left: left.extent.offset):
            while apart and _end(apart[-1].extent) > left.extent.offset:
                doubtful += 1
                other = apart[-1]
                if other.rank == left.rank and not left.proof:
                    apart.pop()  # one of them is wrong, and nothing says which
                    doubtful += 1
                    break
                if other.rank >= left.rank:
                    break
                apart.pop()
            else:
                apart.append(left)
        return apart, doubtful

    def remove(self) -> None:
        """Whoever comes next takes over from this life alone."""
        for _, index in self.lives:
            for suffix in KEPT_SUFFIXES:
                index.with_suffix(suffix).unlink(missing_ok=True)


def find(directory: Path, wanted_bytes: int | None) -> Before | str | None:
    """What was left in a directory that is ours, None for nothing, or why it is of no use."""
    lives: list[tuple[int, Path]] = []
    for index in directory.glob(f"*{INDEX_SUFFIX}"):
        if index.with_suffix(POOL_SUFFIX).exists() and index.with_suffix(SESSIONS_SUFFIX).exists():
            life = _life(index)
            if life is None:
                return "it is of another version of ecd"
            if life:
                lives.append((life, index))
    if not lives:
        return None
    lives.sort(reverse=True)
    pool = lives[0][1].with_suffix(POOL_SUFFIX)
    stat = pool.stat()
    same = [(n, p) for n, p in lives if p.with_suffix(POOL_SUFFIX).stat().st_ino == stat.st_ino]
    if wanted_bytes not in (None, stat.st_size):
        return f"its pool has {stat.st_size} bytes, and {wanted_bytes} are wanted"
    if stat.st_blocks * 512 < stat.st_size:
        return "its pool was not populated, or was truncated"
    for _, index in same:
        # A client that comes late finds no page, and gives up. One that came in time holds a lock.
        with contextlib.suppress(FileNotFoundError):
            index.with_suffix(PINS_SUFFIX).rename(index.with_suffix(PUTS_SUFFIX))
    if not _let_go([index.with_suffix(SESSIONS_SUFFIX) for _, index in same]):
        return f"some client has not let go of its pool within {WAIT_S:.0f} s"
    return Before(pool, stat.st_size, tuple(same))


def _let_go(sessions: Sequence[Path]) -> bool:
    """Wait until no client of these lives can touch the pool."""
    deadline_s = time.monotonic() + WAIT_S
    fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in sessions]
    try:
        if any(map(is_any_session_locked, fds)):
            logger.info("waiting for clients of the last daemon to let go of its pool")
        while any(map(is_any_session_locked, fds)):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.02)
        return True
    finally:
        for fd in fds:
            os.close(fd)


def _life(index: Path) -> int | None:
    """Which life's index it is; 0: of one that ended before it began.

    None: this version does not read it.
    """
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER_BYTES)
    if not any(header):
        return 0
    if len(header) < INDEX_HEADER_BYTES or unpack_index_header(header) is None:
        return None
    life = _header(index)[LIFE_WORD]
    return life if life < MAX_LIFE else None


def _header(index: Path) -> tuple[int, ...]:
    """As words."""
    with index.open("rb") as file:
        return struct.unpack("<512Q", file.read(INDEX_HEADER_BYTES))


def _rows(index: Path, life: int, pool_bytes: int) -> Iterator[Left | None]:
    """Every row that lists something; None: it is in doubt."""
    with index.open("rb") as file:
        shape = unpack_index_header(file.read(INDEX_HEADER_BYTES))
        assert shape is not None
        file.seek(NAMES_AT)
        names = Names(memoryview(file.read(NAMES_BYTES).ljust(NAMES_BYTES, b"\0")))
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
                if any(row[16:24]):  # the entry's number
                    yield _left(row, names, life, pool_bytes)


def _left(row: bytes, names: Names, life: int, pool_bytes: int) -> Left | None:
    if not row_is_whole(row):
        return None
    try:
        said = unpack_row(row)
        namespace, mm_hash = unpack_key(row)
        name = names.name_of(namespace)
    except (UnicodeDecodeError, IndexError, struct.error):
        return None
    if said.ask:
        return None
    content = Content(said.dtype, said.shape, said.nbytes, said.metadata, said.cost_s)
    extent = Extent(said.pool, said.offset, said.nbytes)
    checked = _checked(Key(name, mm_hash), content, extent, pool_bytes)
    return Left(*checked, extent, row_proof(row), life, False, said.entry) if checked else None


def _puts(index: Path, life: int, pool_bytes: int) -> Iterator[Left]:
    """What was written whole, and neither shown nor refused, as far as it can be told."""
    try:
        pages = index.with_suffix(PUTS_SUFFIX).open("rb")
    except FileNotFoundError:
        return
    with pages, index.open("rb") as file:
        shape = unpack_index_header(file.read(INDEX_HEADER_BYTES))
        assert shape is not None
        names = Names(memoryview(file.read(NAMES_BYTES).ljust(NAMES_BYTES, b"\0")))
        file.seek(DESKS_AT)
        for number in range(min(_header(index)[PAGES_WORD], shape.desks)):
            words, desk = pages.read(PAGE_BYTES), file.read(DESK_BYTES)
            if len(words) < PAGE_BYTES or len(desk) < DESK_BYTES:
                return
            page = Page(number, memoryview(words).cast("Q"), memoryview(desk).cast("Q"), names)
            for put in filter(page.is_granted, page.finished_puts()):
                if checked := _checked(put.key, put.content, put.extent, pool_bytes):
                    yield Left(*checked, put.extent, 0, life, True, put.number)


def _checked(
    key: Key, content: Content, extent: Extent, pool_bytes: int
) -> tuple[Key, Content] | None:
    """None: there can be no such entry."""
    if extent.pool or extent.offset % GRANULE_BYTES or _end(extent) > pool_bytes:
        return None
    try:
        return check_key(*key), content_from(content)
    except InvalidRequest:
        return None


def _end(extent: Extent) -> int:
    return extent.offset + Allocator.rounded_bytes(extent.nbytes)
