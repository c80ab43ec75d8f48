"""An entry's checksum: XXH3 (Collet, 64 bits) in pieces.

Pieces are hashed one by one, so that the first ones are hashed while the rest is still arriving.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

PIECE_BYTES = 1 << 20
"""Part of the contract between daemons (peer.proto, PeerLeased.checksum)."""


def digests(data: memoryview) -> list[int]:
    """The XXH3 of each piece of PIECE_BYTES; the last piece is shorter."""
    return [
        xxhash.xxh3_64_intdigest(data[start : start + PIECE_BYTES])
        for start in range(0, len(data), PIECE_BYTES)
    ]


def fold(pieces: Sequence[int]) -> int:
    """The checksum of a whole entry, from the digests of its pieces in order."""
    folded: int = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(pieces)}Q", *pieces))
    return folded
