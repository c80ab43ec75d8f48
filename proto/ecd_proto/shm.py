"""The files under `/dev/shm/ecd-<name>/` that the daemon makes and clients open.

lock                    held by the daemon for its life (flock): one daemon per directory
<incarnation>.pool      the host pool; extents start and end on pages
<incarnation>.sessions  one byte per session, locked by the client that owns it
<incarnation>.index     what is stored and where: written by the daemon, read by clients
<incarnation>.pins      one page per session, its pins and puts: written by its client, read by
                        the daemon
<incarnation>.puts      the same file once a later start is looking for puts in it: no client that
                        comes late finds it any more
<incarnation>.bell      a datagram socket: who sends a page's number there has put something

Every start makes new files and unlinks those of dead daemons, never truncating or reusing them:
a client that still maps an old pool keeps reading the bytes that were there.

A client's byte lock is an open file description lock (Linux, `fcntl(2)`). The kernel drops it
when the last process that shares the description is gone, so that holding it proves that the
client may still touch the pool, however its stream ended.

The index is a hash table: a header, the namespaces, buckets that hold the number of a first row
(from 1; 0: none), rows that each hold the number of the next one. A row is found, pinned and read
without a lock and without a call; docs/reading-without-a-call.md says why that is safe.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import secrets
import struct
import threading
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ecd_proto.contract import DTYPES, MAX_DIMENSIONS, MAX_NAMESPACE_BYTES

LOCK_NAME = "lock"
POOL_SUFFIX = ".pool"
SESSIONS_SUFFIX = ".sessions"
INDEX_SUFFIX = ".index"
PINS_SUFFIX = ".pins"
PUTS_SUFFIX = ".puts"
BELL_SUFFIX = ".bell"
SUFFIXES = (POOL_SUFFIX, SESSIONS_SUFFIX, INDEX_SUFFIX, PINS_SUFFIX, PUTS_SUFFIX, BELL_SUFFIX)

_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, len, pid


def pool_dir(shm_dir: str, name: str) -> Path:
    """Where the daemon called `name` keeps its files."""
    return Path(shm_dir) / f"ecd-{name}"


def lock_session(fd: int, offset: int) -> None:
    """Claim a session's byte. Raises BlockingIOError if another description holds it."""
    flock = _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock)


def is_session_locked(fd: int, offset: int) -> bool:
    """Whether a client, as seen from another open file description, holds its session's byte."""
    return _is_locked(fd, offset, 1)


def is_any_session_locked(fd: int) -> bool:
    """Whether any client of the daemon whose file this is may still touch its pool."""
    return _is_locked(fd, 0, 0)  # to the end


def _is_locked(fd: int, offset: int, nbytes: int) -> bool:
    flock = _FLOCK.pack(fcntl.F_WRLCK, 0, offset, nbytes, 0)
    found: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, flock))[0]
    return found != fcntl.F_UNLCK


# -- the index -------------------------------------------------------------------------------------

INDEX_MAGIC = b"ecdindex"
INDEX_VERSION = 4
INDEX_HEADER_BYTES = 4096
_INDEX_HEADER = struct.Struct("<8sIIQQQQ")  # magic, version, bytes of a row, then IndexShape
REMOVALS_WORD = 8
"""The 8-byte word of the header that counts removals: odd while one is under way."""
UNLISTED_WORD = 9
"""The word that counts entries which should have a row and have none, for lack of memory."""
RESERVATIONS_WORD = 10
"""The word that counts reservations made by calls: their keys are not in the index as yet."""
PAGES_WORD = 11
"""The word that says how many pages of pins have ever been in use, the first ones."""
LIFE_WORD = 12
"""The word that counts the daemons which have had the pool, one after the other. Written last."""
TAKING_WORD = 13
"""The word that is 1 until the daemon has shown what those before it left without a proof.

Until then it gives no memory away, so that their rows and puts say what they said.
"""

NAMES_AT, NAMES_BYTES = INDEX_HEADER_BYTES, 64 << 10
DESKS_AT = NAMES_AT + NAMES_BYTES

BUCKET_BYTES = 4
ROW_BYTES = 256
_ROW = struct.Struct("<QQQQQdHBBHH")
"""next row, checksum, entry, offset, nbytes, cost, pool, dtype, dimensions, metadata's bytes, ask.

The key's record and what else varies in length follow: the shape, the metadata.
"""
ROW_PROOF_WORD = ROW_BYTES // 8 - 1
"""The last word of a row: the checksum of the entry's bytes, 0 until the daemon has read them.

For the daemon alone, which may write it at any time: the row's own checksum leaves it out.
"""
_number = int.from_bytes
_NEXT = struct.Struct("<Q")
_MARKED = struct.Struct("<QQ")
_MARK = slice(8, 24)  # checksum and entry: two rows that agree in these are one
_CHECKED = slice(16, 8 * ROW_PROOF_WORD)
_RECORD_AT = _ROW.size
_RECORD = struct.Struct("<HH")  # the namespace's number, the mm_hash's bytes, which follow
_MAX_RECORD = _CHECKED.stop - _RECORD_AT - 32
_SHAPES = tuple(struct.Struct(f"<{dimensions}Q") for dimensions in range(MAX_DIMENSIONS + 1))
_DTYPES = tuple(DTYPES)


class IndexShape(NamedTuple):
    """How many buckets (a power of two), rows and desks there are; what keys are hashed by."""

    buckets: int
    rows: int
    prime: int
    desks: int

    @property
    def buckets_at(self) -> int:
        return DESKS_AT + self.desks * DESK_BYTES

    @property
    def rows_at(self) -> int:
        return self.buckets_at + self.buckets * BUCKET_BYTES

    @property
    def nbytes(self) -> int:
        return self.rows_at + self.rows * ROW_BYTES

    def fits(self, index_bytes: int, pins_bytes: int) -> bool:
        """Whether files of these sizes hold all that is looked at by this shape."""
        return (
            self.buckets > 0
            and self.buckets & self.buckets - 1 == 0
            and self.prime > 0
            and self.nbytes <= index_bytes
            and pins_bytes <= self.desks * PAGE_BYTES
        )


class Row(NamedTuple):
    """What the index says of one stored entry. `ask`: the rest did not fit, the daemon knows it."""

    entry: int
    pool: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    metadata: bytes
    cost_s: float
    ask: bool


def pack_index_header(shape: IndexShape) -> bytes:
    return _INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, ROW_BYTES, *shape)


def unpack_index_header(header: bytes) -> IndexShape | None:
    """None: not an index, or one of another version."""
    magic, version, row_bytes, *shape = _INDEX_HEADER.unpack_from(header)
    if (magic, version, row_bytes) != (INDEX_MAGIC, INDEX_VERSION, ROW_BYTES):
        return None
    return IndexShape(*shape)


def key_record(namespace: int, mm_hash: str) -> bytes | None:
    """The key as a row holds it, whole; `namespace` is its number in `Names`.

    None: it is too long for a row, and has none.
    """
    encoded = mm_hash.encode()
    if len(encoded) > _MAX_RECORD - _RECORD.size:
        return None
    return _RECORD.pack(namespace, len(encoded)) + encoded


def bucket_of(record: bytes, shape: IndexShape) -> int:
    """By the remainder of a prime that nobody knows (Karp and Rabin, 1987).

    So nobody can choose keys that all fall into one bucket; shifted, as a short key is its own
    remainder.
    """
    buckets, _, prime, _ = shape
    return (_number(record, "little") << 64) % prime & buckets - 1


def random_prime() -> int:
    """Of 61 bits; what passes Fermat's test for four bases by chance does as well."""
    while True:
        number = secrets.randbits(61) | 1 << 60 | 1
        if all(pow(base, number - 1, number) == 1 for base in (2, 3, 5, 7)):
            return number


def pack_row(record: bytes, row: Row, next_row: int) -> bytes:
    """The bytes of a row. What does not fit is left out, and `ask` set."""
    rest = _SHAPES[len(row.shape)].pack(*row.shape) + row.metadata
    ask = _RECORD_AT + len(record) + len(rest) > _CHECKED.stop
    dimensions, metadata_bytes = len(row.shape), len(row.metadata)
    if ask:
        rest, dimensions, metadata_bytes = b"", 0, 0
    place = (row.entry, row.offset, row.nbytes, row.cost_s, row.pool)
    kind = (_DTYPES.index(row.dtype), dimensions, metadata_bytes, ask)
    checked = _ROW.pack(0, 0, *place, *kind)[_CHECKED.start :] + record + rest
    checked = checked.ljust(_CHECKED.stop - _CHECKED.start, b"\0")
    return _MARKED.pack(next_row, crc32(checked)) + checked + bytes(8)


class Names:
    """The namespaces of an index: few, and too long for each row to hold its own.

    The table begins with the bytes that are in use of it; then each name, behind its checksum and
    its length. Names are only ever added, by the daemon, and their numbers count from 1.
    """

    _HEAD = struct.Struct("<IH")
    _USED = struct.Struct("<Q")

    def __init__(self, table: memoryview) -> None:
        self._table = table
        self._used = self._USED.size
        self._names: list[str] = []
        self.numbers: dict[str, int] = {}
        """Those that were read so far."""
        self._lock = threading.Lock()

    def number_of(self, name: str) -> int | None:
        """0: nothing of this namespace is in the index. None: that cannot be told."""
        number = self.numbers.get(name)
        if number is None:
            with self._lock:
                whole = self._read()
                number = self.numbers.get(name, 0 if whole and self._has_room() else None)
        return number

    def name_of(self, number: int) -> str:
        """Raises IndexError: no namespace has it."""
        if number > len(self._names):
            with self._lock:
                self._read()
        if number < 1:
            raise IndexError(number)
        return self._names[number - 1]

    def add(self, name: str) -> int | None:
        """Its number, for the daemon. None: the table is full, and stays so."""
        number = self.number_of(name)
        if number == 0:
            encoded = name.encode()
            head = self._HEAD.pack(crc32(encoded), len(encoded))
            end = self._used + len(head) + len(encoded)
            self._table[self._used : end] = head + encoded
            self._table[: self._USED.size] = self._USED.pack(end)
            number = self.number_of(name)
        return number

    def _has_room(self) -> bool:
        return self._used + self._HEAD.size + MAX_NAMESPACE_BYTES <= len(self._table)

    def _read(self) -> bool:
        """Take in what was added. False: it is not all there as yet, or not what it was."""
        end = max(self._used, self._USED.unpack_from(self._table)[0])
        while self._used < end:
            start = self._used + self._HEAD.size
            if start > len(self._table):
                return False
            checksum, nbytes = self._HEAD.unpack_from(self._table, self._used)
            encoded = bytes(self._table[start : start + nbytes])
            if not encoded or len(encoded) != nbytes or crc32(encoded) != checksum:
                return False
            try:
                name = encoded.decode()
            except UnicodeDecodeError:
                return False
            self._names.append(name)
            self.numbers[name] = len(self._names)
            self._used = start + nbytes
        return True


def row_asks(row: bytes) -> bool:
    """Whether something did not fit into it."""
    return bool(_ROW.unpack_from(row)[-1])


def row_has_key(row: bytes, record: bytes) -> bool:
    return row.startswith(record, _RECORD_AT)


def row_is_whole(row: bytes) -> bool:
    """False for one that was read while it was written, or that lists nothing."""
    checksum, entry = _MARKED.unpack_from(row, 8)
    return entry != 0 and bool(checksum == crc32(row[_CHECKED]))


def row_entry(row: bytes) -> int:
    """The entry that it lists, or, where a client puts one, the number of the put."""
    entry: int = _MARKED.unpack_from(row, 8)[1]
    return entry


def row_proof(row: bytes) -> int:
    """The checksum of the entry's bytes; 0: nobody has read them yet."""
    proof: int = struct.unpack_from("<Q", row, 8 * ROW_PROOF_WORD)[0]
    return proof


def row_mark(row: bytes | memoryview) -> bytes:
    """What no two rows have in common, and no row after it was taken out."""
    return bytes(row[_MARK])


def next_of(row: bytes) -> int:
    number: int = _NEXT.unpack_from(row)[0]
    return number


def unpack_key(row: bytes) -> tuple[int, str]:
    """The namespace's number and the mm_hash. Raises UnicodeDecodeError: not from `pack_row`."""
    namespace, nbytes = _RECORD.unpack_from(row, _RECORD_AT)
    at = _RECORD_AT + _RECORD.size
    return namespace, row[at : at + nbytes].decode()


def unpack_row(row: bytes) -> Row:
    """What a row says, if it is whole. Raises struct.error and IndexError: nothing that is one."""
    _, _, entry, offset, nbytes, cost_s, pool, dtype, dimensions, metadata_bytes, ask = (
        _ROW.unpack_from(row)
    )
    at = _RECORD_AT + _RECORD.size + _RECORD.unpack_from(row, _RECORD_AT)[1]
    shape = _SHAPES[dimensions].unpack_from(row, at)
    at += 8 * dimensions
    metadata = row[at : at + metadata_bytes]
    return Row(entry, pool, offset, nbytes, _DTYPES[dtype], shape, metadata, cost_s, bool(ask))


# -- pins ------------------------------------------------------------------------------------------

PAGE_BYTES = 5 * 4096
"""One session's: a header, its pins, the entries that it used last, its puts."""
PINS_USED_WORD = 0
"""How many of the pins were ever used: the daemon looks no further."""
USES_WORD, USED_BYTES_WORD, MISSES_WORD, DUPLICATES_WORD = 1, 2, 3, 4
PUTS_WORD = 5
"""How many of the puts have a number: who looks for one looks no further if none has."""
FIRST_PIN_WORD = 8
MAX_PINS = 4096 // 8 - FIRST_PIN_WORD
FIRST_USE_WORD = 4096 // 8
KEPT_USES = 4096 // 8
"""Of the entries used, as many as are kept until the daemon looks."""


# -- puts ------------------------------------------------------------------------------------------

MAX_PUTS = 16
"""Of one session at a time without a call."""
FIRST_PUT_WORD = 2 * 4096 // 8
PUT_WORDS = 8 + ROW_BYTES // 8
PUT_NUMBER, PUT_DONE, PUT_ROW = 0, 1, 8
"""Words of a put: its number (0: none; never used twice), that number again once the bytes are
written, and a row that says where they are and what. A put that is done becomes an entry, unless
its key is reserved by a call: who finds one without an answer finds the entry a moment later."""

DESK_BYTES = 256
"""What the daemon tells one session: its grant, in pieces, and the answer to each of its puts.

A put that has no answer yet may have there which memory it keeps, by `pack_kept`.
"""
FIRST_GRANT_WORD, FIRST_ANSWER_WORD = 0, 16
MAX_GRANTS = 16
STORED, DUPLICATE, REFUSED = 1, 2, 3
BELL = struct.Struct("<I")  # what is sent to the bell: the number of a page
_GRANTS, _STARTS, _SIZES = 1 << 20, 1 << 28, 1 << 16
_KEPT = _GRANTS >> 1


class Grant(NamedTuple):
    """Memory that the session may write entries to; one word, so that it is read whole."""

    number: int
    offset: int
    nbytes: int


def pack_grant(grant: Grant) -> int | None:
    """None: beyond what the word can say."""
    start, size = grant.offset // 4096, grant.nbytes // 4096
    if start >= _STARTS or size >= _SIZES:
        return None
    return (grant.number % _GRANTS * _STARTS + start) * _SIZES + size


def unpack_grant(word: int) -> Grant:
    rest, size = divmod(word, _SIZES)
    number, start = divmod(rest, _STARTS)
    return Grant(number, start * 4096, size * 4096)


def pack_kept(put: int, offset: int, nbytes: int) -> int:
    """What stands in place of an answer once the grant that a put was begun in is taken back.

    For the next daemon alone: no client's number of a put is so large that it is one's answer.
    """
    return pack_grant(Grant(put % _KEPT + _KEPT, offset, nbytes)) or 0


def pack_answer(put: int, outcome: int) -> int:
    return put % (1 << 56) << 8 | outcome


def answer_to(put: int, word: int) -> int:
    """The outcome; 0: the put has no answer as yet."""
    return word & 0xFF if word >> 8 == put % (1 << 56) else 0


# -- barriers --------------------------------------------------------------------------------------

STORES_IN_ORDER = platform.machine() == "x86_64"
"""Who sees a store here sees what its thread stored before, and what that thread loaded before was
loaded (Sewell et al., x86-TSO, CACM 53(7), 2010)."""

_MEMBARRIER = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_QUERY, _BARRIER, _REGISTER = 0, 1 << 1, 1 << 2  # MEMBARRIER_CMD_..._GLOBAL_EXPEDITED
_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: the call takes 2 us


def _membarrier(command: int) -> int:
    if _MEMBARRIER is None:
        return -1
    result: int = _libc.syscall(_MEMBARRIER, command, 0, 0)
    return result


def has_barriers() -> bool:
    """Whether this kernel, and what confines this process, lets it order others' memory."""
    commands = _membarrier(_QUERY)
    return commands > 0 and bool(commands & _BARRIER) and bool(commands & _REGISTER)


def take_part_in_barriers() -> bool:
    """Let every `barrier` on this machine be one for this process too. False: it cannot be had."""
    return _membarrier(_REGISTER) == 0


def barrier() -> None:
    """A full memory barrier in every thread of every process that takes part: membarrier(2).

    Raises OSError.
    """
    if _membarrier(_BARRIER) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "membarrier")
