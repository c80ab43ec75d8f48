"""A session's page, which its client writes, and its mailbox, which the daemon writes.

The page, in words of 8 bytes: a header, the pins, a ring of entries used last, the claims, the
misses by namespace. The mailbox lies in the index file: the session's grant in pieces, then the
answer to each claim.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ecd_proto.shm.files import GRANULE_BYTES
from ecd_proto.shm.rows import ROW_WORDS

PAGE_BYTES = 5 * 4096
PAGE_WORDS = PAGE_BYTES // 8
_WORDS = 4096 // 8

# -- header ----------------------------------------------------------------------------------------

PINS_USED_WORD = 0
"""The number of pins ever used: the daemon's scan ends there."""
USES_WORD, USED_BYTES_WORD, MISSES_WORD, DUPLICATES_WORD = 1, 2, 3, 4
USE_COUNTERS = USES_WORD, USED_BYTES_WORD, MISSES_WORD, DUPLICATES_WORD
"""The words in which a client counts its reads and its puts of stored keys; they only grow."""
CLAIMS_WORD = 5
"""The number of claims that are announced: a scan skips the page if it is 0."""
DMA_WORD = 6
"""DMA or DMA_OUTLASTS while a device may copy into the pool for this session's process, else 0.

A client sets the word before its first copy from a device into the pool; one that is attached
(`ATTACHED`) is waited for no longer than it takes. It clears the word when its session's files are
closed and no copy is under way, just before it drops the session's lock. So a dropped lock with the
word still set means that the process died.
"""
DMA, DMA_OUTLASTS = 1, 2
"""DMA outlives the process a little; and for long where something else has the process's channels
on the device: a child that it has forked, with its files, or the server of CUDA's MPS."""
PINNED_WORD = 7
"""Bytes of the pools that the session's process has pinned for its GPUs; for people alone."""

# -- pins ------------------------------------------------------------------------------------------

FIRST_PIN_WORD = 8
MAX_PINS = _WORDS - FIRST_PIN_WORD
_EXTENT = 1 << 63
_EXTENT_POOLS = 1 << 48
FIRST_USE_WORD = _WORDS
RECENT_USES = _WORDS
"""The length of the ring of recently used entries, which the daemon drains."""
FOR_ANOTHER = 1 << 63
"""Set in the ring beside an entry that was found for another engine, which will read it, too."""

# -- claims ----------------------------------------------------------------------------------------

MAX_CLAIMS = 16
"""The puts of one session that may be under way without a call."""
FIRST_CLAIM_WORD = 2 * _WORDS
CLAIM_WORDS = 8 + ROW_WORDS
CLAIM_NUMBER, CLAIM_DONE, CLAIM_ROW = 0, 1, 8
"""Words of a claim: its number (0: none; never used twice), that number again once the bytes are
written, and a row that describes them. A done claim becomes an entry, unless a call has reserved
its key: a reader that finds a done claim without an answer pins its memory, or finds the entry a
moment later."""

# -- misses by namespace ---------------------------------------------------------------------------

FIRST_MISSED_WORD = FIRST_CLAIM_WORD + MAX_CLAIMS * CLAIM_WORDS
MISSED_WORDS = 256
"""Pairs of words: a namespace's number in the index, and the client's misses there, which only
grow. A client counts a miss here before it does in MISSES_WORD. Misses in its own namespace, and in
one without a number, are counted there alone; older clients count none here."""
OTHER_NAMESPACES = (1 << 64) - 1
"""In the number's place of the last pair: the misses in all namespaces that found no free pair."""

# -- DMA of a dead process -------------------------------------------------------------------------

DMA_GRACE_S = 1.0
"""How long DMA may go on after the end of its process, which has closed the device's files.

The driver may leave the release of a killed process's queues to a kernel thread. How long that
takes is not measured; a copy of 128 MiB takes some 3 ms.
"""
DMA_BLIND_GRACE_S = 10.0
"""How long DMA may go on after a session's lock was dropped, where no pidfd tells of its process.

The kernel drops a lock before it closes files that were opened earlier, a device's among them:
0.2 s before, in an experiment with a file that is slow to close.
"""
DMA_LIMIT_S = 60.0
"""How long DMA may go on after a session's lock was dropped by a process that is not about to end.

It has begun another program (`exec`), without the device's files. As long after the end of a
process with DMA_OUTLASTS, of which the daemon cannot see what has the device's files.
"""
SO_PEERPIDFD = 77
"""The option that gives a pidfd of the peer's process (Linux 6.5): Python has no name for it."""
INTRODUCED = "process "
"""Before a session's name on the attach socket: only the sender's process is of interest."""
ATTACHED = b"ok"
"""The daemon's answer to a session's name on its attach socket: the client may copy by DMA."""

# -- the mailbox -----------------------------------------------------------------------------------

MAILBOX_BYTES = 256
MAILBOX_WORDS = MAILBOX_BYTES // 8
FIRST_GRANT_WORD, FIRST_ANSWER_WORD = 0, 16
GRANTED_POOL = 0
"""The number of the pool in which grants lie, as a grant's word has no room for it.

Recovery takes over this pool alone.
"""
MAX_GRANTS = 16
"""The pieces of one grant."""
STORED, DUPLICATE, REFUSED = 1, 2, 3
DOORBELL = struct.Struct("<I")  # the message that a client sends: the number of its page
_NUMBERS, _STARTS, _SIZES = 1 << 20, 1 << 28, 1 << 16
_KEPT = _NUMBERS >> 1


def pack_extent_pin(pool: int, offset: int) -> int:
    """The pin of a claim, which has no entry yet: it names where the extent starts."""
    return _EXTENT + pool % (1 << 15) * _EXTENT_POOLS + offset // GRANULE_BYTES


def unpack_extent_pin(pin: int) -> tuple[int, int] | None:
    """Where the extent that a claim's pin names starts; None: the pin names an entry."""
    if pin < _EXTENT:
        return None
    pool, granule = divmod(pin - _EXTENT, _EXTENT_POOLS)
    return pool, granule * GRANULE_BYTES


def claim_at(place: int) -> int:
    """The word of the page at which a claim begins."""
    return FIRST_CLAIM_WORD + place * CLAIM_WORDS


class Grant(NamedTuple):
    """A piece of granted memory, packed into one word, which a reader reads whole."""

    number: int
    offset: int
    nbytes: int


def pack_grant(grant: Grant) -> int | None:
    """The grant as a word, or None where the offset or the size is beyond the word's fields."""
    start, size = grant.offset // GRANULE_BYTES, grant.nbytes // GRANULE_BYTES
    if start >= _STARTS or size >= _SIZES:
        return None
    return (grant.number % _NUMBERS * _STARTS + start) * _SIZES + size


def unpack_grant(word: int) -> Grant:
    rest, size = divmod(word, _SIZES)
    number, start = divmod(rest, _STARTS)
    return Grant(number, start * GRANULE_BYTES, size * GRANULE_BYTES)


def pack_kept(claim: int, offset: int, nbytes: int) -> int:
    """The memory that an unanswered claim keeps after its grant was taken back.

    The word stands in the answer's place, for a recovering daemon alone: no client's claim has so
    large a number that the word could be its answer.
    """
    return pack_grant(Grant(claim % _KEPT + _KEPT, offset, nbytes)) or 0


def pack_answer(claim: int, outcome: int) -> int:
    return claim % (1 << 56) << 8 | outcome


def answer_to(claim: int, word: int) -> int:
    """The outcome of the claim; 0 while the daemon has not answered."""
    return word & 0xFF if word >> 8 == claim % (1 << 56) else 0
