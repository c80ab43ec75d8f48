"""What proves that an entry arrived as it left: XXH3 (Collet, 64 bits), in pieces.

An entry is hashed in pieces, so that what has arrived is hashed, still in the processor's cache,
while the rest is on its way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

PIECE_BYTES = 1 << 20
"""Part of the contract between daemons (peer.proto, PeerLeased.checksum)."""


def digests(data: memoryview) -> list[int]:
    """The XXH3 of each piece of PIECE_BYTES, the last one shorter."""
    return [
        xxhash.xxh3_64_intdigest(data[start : start + PIECE_BYTES])
        for start in range(0, len(data), PIECE_BYTES)
    ]


def fold(pieces: Sequence[int]) -> int:
    """The checksum of a whole entry, from the digests of its pieces in order."""
    folded: int = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(pieces)}Q", *pieces))
    return folded
