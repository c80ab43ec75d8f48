"""A piece of a pool."""

from __future__ import annotations

from typing import Any, Protocol

from ecd.core.model.types import Extent


class Allocating(Protocol):
    """The block's allocator, as far as the block needs it."""

    pool_number: int
    granule_bytes: int


class Block:
    """A contiguous piece of a pool, free or allocated, linked to its neighbours."""

    __slots__ = ("after", "allocator", "before", "granules", "is_free", "owner", "start")

    def __init__(self, allocator: Allocating, start: int, granules: int, is_free: bool) -> None:
        """A piece of `allocator`'s pool; `start` and `granules` count granules."""
        self.allocator = allocator
        self.start, self.granules, self.is_free = start, granules, is_free
        self.before: Block | None = None
        self.after: Block | None = None
        self.owner: Any = None
        """The caller's own reference; the allocator never reads it."""

    @property
    def end(self) -> int:
        return self.start + self.granules

    @property
    def nbytes(self) -> int:
        """The bytes that the block takes from the pool, a whole number of granules."""
        return self.granules * self.allocator.granule_bytes

    def unlink(self) -> None:
        """Forget the neighbours: blocks that are gone must not keep each other in memory."""
        self.before = self.after = None

    def extent(self, nbytes: int | None = None) -> Extent:
        """The block's first `nbytes`, or the whole block."""
        allocator = self.allocator
        return Extent(
            allocator.pool_number,
            self.start * allocator.granule_bytes,
            self.nbytes if nbytes is None else nbytes,
        )
