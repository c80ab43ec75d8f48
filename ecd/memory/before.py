"""What a daemon before this one left: its pool, and the rows of its index.

A life leaves its pool, its index and its sessions' locks under one name. The next links the pool
under its own name, and removes the old ones only when it has looked at every entry: killed on the
way, it leaves both lives' rows to the one after it. No row is believed: it must be whole, describe
an entry that can be and lie where nothing else lies, and what it says of the bytes must be true.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecd.core.allocator import GRANULE_BYTES, Allocator
from ecd.core.types import Content, Extent, Key
from ecd.wire import InvalidRequest, check_key, content_from
from ecd_proto.shm import (
    INDEX_HEADER_BYTES,
    INDEX_SUFFIX,
    LIFE_WORD,
    NAMES_AT,
    NAMES_BYTES,
    POOL_SUFFIX,
    ROW_BYTES,
    SESSIONS_SUFFIX,
    Names,
    is_any_session_locked,
    row_is_whole,
    row_proof,
    unpack_index_header,
    unpack_key,
    unpack_row,
)

logger = logging.getLogger(__name__)

KEPT_SUFFIXES = POOL_SUFFIX, INDEX_SUFFIX, SESSIONS_SUFFIX
"""What a life leaves."""
CHUNK_ROWS = 2048
WAIT_S = 10.0
"""How long a start waits for clients of the life before to let go of its pool."""


@dataclass(frozen=True)
class Left:
    """An entry that a life before this one had stored, as its row says."""

    key: Key
    content: Content
    extent: Extent
    proof: int
    life: int
    entry: int


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
        for life, index in self.lives:
            for left in _rows(index, life, self.nbytes):
                if left is None:
                    doubtful += 1
                elif left.key not in by_key:
                    by_key[left.key] = left
        apart: list[Left] = []
        for left in sorted(by_key.values(), key=lambda left: left.extent.offset):
            # Of two in one place the later life's is right, if any; the bytes will say.
            while apart and _end(apart[-1].extent) > left.extent.offset:
                doubtful += 1
                if apart[-1].life >= left.life:
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
    """Which life's index it is. None: this version does not read it."""
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER_BYTES)
    if len(header) < INDEX_HEADER_BYTES or unpack_index_header(header) is None:
        return None
    life: int = struct.unpack_from("<Q", header, 8 * LIFE_WORD)[0]
    return life


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
    proof = row_proof(row)
    if not row_is_whole(row) or not proof:
        return None
    try:
        said = unpack_row(row)
        namespace, mm_hash = unpack_key(row)
        key = check_key(names.name_of(namespace), mm_hash)
        content = content_from(
            Content(said.dtype, said.shape, said.nbytes, said.metadata, said.cost_s)
        )
    except (InvalidRequest, UnicodeDecodeError, IndexError, struct.error):
        return None
    extent = Extent(said.pool, said.offset, said.nbytes)
    if said.ask or said.pool or said.offset % GRANULE_BYTES or _end(extent) > pool_bytes:
        return None
    return Left(key, content, extent, proof, life, said.entry)


def _end(extent: Extent) -> int:
    return extent.offset + Allocator.rounded_bytes(extent.nbytes)
