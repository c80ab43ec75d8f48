"""The index: a hash table of rows, found, pinned and read without a lock and without a call.

The file holds a header, the namespaces, the sessions' mailboxes, the buckets, and the rows. A
bucket holds the number of its first row (from 1; 0: none), a row that of the next one.
docs/reading-without-a-call.md says why reading it is safe.
"""

from __future__ import annotations

import secrets
import struct
from typing import NamedTuple

from ecd_proto.shm.namespaces import NAMESPACES_BYTES
from ecd_proto.shm.rows import ROW_BYTES
from ecd_proto.shm.session_page import MAILBOX_BYTES, PAGE_BYTES

INDEX_MAGIC = b"ecdindex"
INDEX_VERSION = 5
INDEX_HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIIQQQQ")  # magic, version, bytes of a row, then IndexShape
_FERMAT_BASES = (2, 3, 5, 7)

# Words of the header, of 8 bytes each.
REMOVALS_WORD = 8
"""The count of removals: odd while one is under way."""
UNLISTED_WORD = 9
"""The count of stored entries that have no row, for lack of memory."""
RESERVATIONS_WORD = 10
"""The count of reservations by calls: their keys are not in the index yet."""
PAGES_WORD = 11
"""The count of session pages ever in use, which are the first ones of the file."""
GENERATION_WORD = 12
"""The count of daemons that have had the pool, one after the other. Written last."""
RECOVERING_WORD = 13
"""1 until the daemon has listed every entry of the generation before that has no checksum.

Meanwhile no memory is given away, so that the old rows and claims stay true.
"""
FIRST_COUNTED_WORD = 14
"""For each of USE_COUNTERS 2**63 and what the daemon has counted of what the pages say, modulo
2**64. The next daemon counts the rest. 0: of a daemon that did not say, or not yet."""
POOL_BYTES_WORD = 32
"""The bytes of the host pool that clients may map: those taken over, and all once it serves.

0: none yet, or of a daemon that did not say.
"""

NAMESPACES_AT = INDEX_HEADER_BYTES
MAILBOXES_AT = NAMESPACES_AT + NAMESPACES_BYTES
BUCKET_BYTES = 4


class IndexShape(NamedTuple):
    """The numbers of buckets (a power of two), rows and mailboxes; the prime that hashes keys."""

    buckets: int
    rows: int
    prime: int
    mailboxes: int

    @property
    def buckets_at(self) -> int:
        return MAILBOXES_AT + self.mailboxes * MAILBOX_BYTES

    @property
    def rows_at(self) -> int:
        return self.buckets_at + self.buckets * BUCKET_BYTES

    @property
    def nbytes(self) -> int:
        return self.rows_at + self.rows * ROW_BYTES

    def fits(self, index_bytes: int, pins_bytes: int) -> bool:
        """Whether files of these sizes hold everything that this shape addresses."""
        return (
            self.buckets > 0
            and self.buckets & self.buckets - 1 == 0
            and self.prime > 0
            and self.nbytes <= index_bytes
            and pins_bytes <= self.mailboxes * PAGE_BYTES
        )


def pack_index_header(shape: IndexShape) -> bytes:
    return _HEADER.pack(INDEX_MAGIC, INDEX_VERSION, ROW_BYTES, *shape)


def unpack_index_header(header: bytes) -> IndexShape | None:
    """The shape, or None for a header of another version or of no index at all."""
    magic, version, row_bytes, *shape = _HEADER.unpack_from(header)
    if (magic, version, row_bytes) != (INDEX_MAGIC, INDEX_VERSION, ROW_BYTES):
        return None
    return IndexShape(*shape)


def index_header_words(header: bytes) -> tuple[int, ...]:
    """The words of a whole header, by their numbers above."""
    return tuple(memoryview(header).cast("Q"))


def bucket_of(record: bytes, shape: IndexShape) -> int:
    """The bucket of a key's record: its remainder by a secret prime (Karp and Rabin, 1987).

    The secret keeps an adversary from choosing keys of one bucket. The shift is for short records,
    each of which is its own remainder.
    """
    buckets, _, prime, _ = shape
    return (int.from_bytes(record, "little") << 64) % prime & buckets - 1


def random_prime() -> int:
    """A random prime of 61 bits; a pseudoprime to four bases (Fermat) serves as well."""
    while True:
        number = secrets.randbits(61) | 1 << 60 | 1
        if all(pow(base, number - 1, number) == 1 for base in _FERMAT_BASES):
            return number
