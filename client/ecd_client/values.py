"""Types that several modules of the client pass to each other: keys, extents and their parts."""

from __future__ import annotations

from typing import Protocol

from ecd_proto.v1 import cache_pb2 as pb

Key = tuple[str, str]
"""Namespace and mm_hash."""
Parts = list[tuple[int, int]]
"""Addresses and sizes in this process of the parts of an extent, to be copied one by one."""


class Extent(Protocol):
    """A place in a pool: a message of the contract, a row of the index."""

    @property
    def pool(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def to_key(key: Key) -> pb.Key:
    namespace, mm_hash = key
    return pb.Key(namespace=namespace, mm_hash=mm_hash)
