"""A row: what the index says of one stored entry, and what a claim says of one being written."""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

from ecd_proto.contract import DTYPES, MAX_DIMENSIONS

ROW_BYTES = 256
ROW_WORDS = ROW_BYTES // 8
_ROW = struct.Struct("<QQQQQdHBBHH")
"""next row, crc, entry, offset, nbytes, cost, pool, dtype, dimensions, metadata's bytes, truncated.

The key's record follows, then the shape and the metadata.
"""
ROW_NEXT_WORD, ROW_ENTRY_WORD = 0, 2
ROW_CHECKSUM_WORD = ROW_WORDS - 1
"""The last word: the checksum of the entry's bytes, 0 until the daemon has read them.

The daemon alone writes and reads it, at any time: the row's own crc leaves it out.
"""
_NEXT = struct.Struct("<Q")
_MARKED = struct.Struct("<QQ")
_MARK = slice(8, 24)  # crc and entry, which no two rows have in common
_CHECKED = slice(8 * ROW_ENTRY_WORD, 8 * ROW_CHECKSUM_WORD)
_RECORD_AT = _ROW.size
_RECORD = struct.Struct("<HBB")
"""The namespace's number, the mm_hash's length, and the pool of a copy; the mm_hash follows."""
_MAX_RECORD = _CHECKED.stop - _RECORD_AT - 32
_SHAPES = tuple(struct.Struct(f"<{dimensions}Q") for dimensions in range(MAX_DIMENSIONS + 1))
_DTYPES = tuple(DTYPES)


class Row(NamedTuple):
    """A row's content. `truncated`: shape and metadata did not fit; the daemon knows them."""

    entry: int
    pool: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    metadata: bytes
    cost_s: float
    truncated: bool


def key_record(namespace: int, mm_hash: str, replica_in: int = 0) -> bytes | None:
    """The key as a row holds it, with the namespace's number in `Namespaces`.

    `replica_in`: the number of a pool that holds replicas, for the row of the one there; 0 for the
    key's own row. None if the mm_hash is too long: such a key has no row.
    """
    encoded = mm_hash.encode()
    if len(encoded) > _MAX_RECORD - _RECORD.size:
        return None
    return _RECORD.pack(namespace, len(encoded), replica_in) + encoded


def copy_record(record: bytes, pool: int) -> bytes:
    """The record of the copy that a pool has of the entry with this record."""
    namespace, nbytes, _ = _RECORD.unpack_from(record)
    return _RECORD.pack(namespace, nbytes, pool) + record[_RECORD.size :]


def pack_row(record: bytes, row: Row, next_row: int) -> bytes:
    """The bytes of a row. Shape and metadata are left out, and `truncated` set, if too long."""
    rest = _SHAPES[len(row.shape)].pack(*row.shape) + row.metadata
    truncated = _RECORD_AT + len(record) + len(rest) > _CHECKED.stop
    dimensions, metadata_bytes = len(row.shape), len(row.metadata)
    if truncated:
        rest, dimensions, metadata_bytes = b"", 0, 0
    place = (row.entry, row.offset, row.nbytes, row.cost_s, row.pool)
    kind = (_DTYPES.index(row.dtype), dimensions, metadata_bytes, truncated)
    checked = _ROW.pack(0, 0, *place, *kind)[_CHECKED.start :] + record + rest
    checked = checked.ljust(_CHECKED.stop - _CHECKED.start, b"\0")
    return _MARKED.pack(next_row, crc32(checked)) + checked + bytes(8)


def unpack_row(row: bytes) -> Row:
    """The content of a whole row. Raises struct.error and IndexError for other bytes."""
    _, _, entry, offset, nbytes, cost_s, pool, dtype, dimensions, metadata_bytes, truncated = (
        _ROW.unpack_from(row)
    )
    at = _RECORD_AT + _RECORD.size + _RECORD.unpack_from(row, _RECORD_AT)[1]
    shape = _SHAPES[dimensions].unpack_from(row, at)
    at += 8 * dimensions
    metadata = row[at : at + metadata_bytes]
    dtype_name = _DTYPES[dtype]
    return Row(entry, pool, offset, nbytes, dtype_name, shape, metadata, cost_s, bool(truncated))


def unpack_key(row: bytes) -> tuple[int, str]:
    """The namespace's number and the mm_hash. Raises UnicodeDecodeError for other bytes."""
    namespace, nbytes, _ = _RECORD.unpack_from(row, _RECORD_AT)
    at = _RECORD_AT + _RECORD.size
    return namespace, row[at : at + nbytes].decode()


def row_is_copy(row: bytes) -> bool:
    """Whether the row is of a copy, in a pool that holds replicas."""
    return bool(_RECORD.unpack_from(row, _RECORD_AT)[2])


def row_is_truncated(row: bytes) -> bool:
    """Whether shape and metadata were left out of the row."""
    return bool(_ROW.unpack_from(row)[-1])


def row_has_key(row: bytes, record: bytes) -> bool:
    return row.startswith(record, _RECORD_AT)


def row_is_whole(row: bytes) -> bool:
    """False for a row that was read while it was written, and for one that lists nothing."""
    crc, entry = _MARKED.unpack_from(row, 8)
    return entry != 0 and bool(crc == crc32(row[_CHECKED]))


def row_entry(row: bytes) -> int:
    """The entry that the row lists (0: none); in a claim, the claim's number."""
    entry: int = _MARKED.unpack_from(row, 8)[1]
    return entry


def row_checksum(row: bytes) -> int:
    """The checksum of the entry's bytes; 0 while nobody has read them."""
    checksum: int = struct.unpack_from("<Q", row, 8 * ROW_CHECKSUM_WORD)[0]
    return checksum


def row_mark(row: bytes | memoryview) -> bytes:
    """Bytes that differ between any two rows, and change when a row is taken out."""
    return bytes(row[_MARK])


def next_row(row: bytes) -> int:
    """The number of the next row of the bucket; 0 at the end."""
    number: int = _NEXT.unpack_from(row)[0]
    return number
