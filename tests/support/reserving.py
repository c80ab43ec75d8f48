"""What a test or a benchmark asks of a cache that no event loop has: claims are scanned at once."""

from __future__ import annotations

from typing import Any

from ecd.core.cache import Cache
from ecd.core.model.outcomes import MakingRoom, Reservation
from ecd.core.model.types import Key
from ecd.core.pool.allocator import Allocator


def scan_claims(cache: Cache) -> None:
    """Take all steps, before `acquire` with `WaitFor.WRITER`."""
    for _ in cache.scan_claims():
        pass


def is_being_written(cache: Cache, key: Key) -> bool:
    """`Views.is_being_written`, as it is now."""
    scan_claims(cache)
    return cache.views.is_being_written(key)


def reserve(cache: Cache, *about: Any, **more: Any) -> Reservation | MakingRoom:
    """`Cache.reserve` for one put."""
    with cache.reserving() as scan:
        for _ in scan:
            pass
        return cache.reserve(*about, **more)


def is_one_free_extent(allocator: Allocator) -> bool:
    """Whether nothing is allocated, and all free blocks are merged."""
    return allocator.largest_free_bytes == allocator.nbytes
