"""Best-fit allocation of variable-size extents from one pool.

Best fit with immediate coalescing of neighbours (Knuth, TAOCP vol. 1, 2.5), which are linked in
the order of their places. Free blocks are found by size through a tree of 64-bit words, each bit
of which says that something lies below it: a fixed-fanout simplification of van Emde Boas'
priority queue (1977). With sizes counted in granules the tree is at most five levels deep for a
terabyte, so allocate and free are O(log64 of the pool's granules) however many extents there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ecd.core.types import Extent

GRANULE_BYTES = 4096
"""Extents start and end on pages: what RDMA registration, GPU copies and mappings all accept."""

_BITS = 64


class _SizeSet:
    """A set of integers in [0, limit) with successor and maximum in O(log64 limit)."""

    def __init__(self, limit: int) -> None:
        self._levels: list[dict[int, int]] = [{}]
        while limit > _BITS:
            limit = -(-limit // _BITS)
            self._levels.append({})

    def add(self, value: int) -> None:
        for words in self._levels:
            value, bit = divmod(value, _BITS)
            word = words.get(value, 0)
            words[value] = word | 1 << bit
            if word:
                return

    def remove(self, value: int) -> None:
        for words in self._levels:
            value, bit = divmod(value, _BITS)
            word = words[value] & ~(1 << bit)
            if word:
                words[value] = word
                return
            del words[value]

    def at_least(self, value: int) -> int | None:
        """The smallest member that is not below `value`."""
        for level, words in enumerate(self._levels):
            index, bit = divmod(value, _BITS)
            word = words.get(index, 0) >> bit << bit
            if word:
                return self._lowest(level, index * _BITS + (word & -word).bit_length() - 1)
            value = index + 1
        return None

    def _lowest(self, level: int, value: int) -> int:
        for words in reversed(self._levels[:level]):
            word = words[value]
            value = value * _BITS + (word & -word).bit_length() - 1
        return value

    def largest(self) -> int | None:
        if not self._levels[-1]:
            return None
        value = 0
        for words in reversed(self._levels):
            value = value * _BITS + words[value].bit_length() - 1
        return value


class Block:
    """A piece of the pool between its neighbours, in granules."""

    __slots__ = ("after", "before", "granules", "is_free", "owner", "start")

    def __init__(self, start: int, granules: int, is_free: bool) -> None:
        self.start, self.granules, self.is_free = start, granules, is_free
        self.before: Block | None = None
        self.after: Block | None = None
        self.owner: Any = None
        """Whatever the caller keeps there."""

    @property
    def end(self) -> int:
        return self.start + self.granules

    @property
    def nbytes(self) -> int:
        """What it takes of the pool."""
        return self.granules * GRANULE_BYTES

    def extent(self, nbytes: int | None = None) -> Extent:
        """Its first `nbytes`, or all of it."""
        return Extent(0, self.start * GRANULE_BYTES, self.nbytes if nbytes is None else nbytes)


class Allocator:
    """Blocks of one pool of `pool_bytes`, rounded down to whole granules.

    `allocate` fails only if no free block is large enough.
    """

    def __init__(self, pool_bytes: int) -> None:
        granules = pool_bytes // GRANULE_BYTES
        if granules <= 0:
            raise ValueError(f"a pool needs at least {GRANULE_BYTES} bytes, not {pool_bytes}")
        self._granules = granules
        self._free: dict[int, dict[Block, None]] = {}  # by size
        self._sizes = _SizeSet(granules + 1)
        self._used_granules = 0
        self._last = Block(0, granules, is_free=True)
        self._add_free(self._last)

    # -- operations --------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Block | None:
        """The head of the tightest free block that holds `nbytes`.

        None: there is none, and nothing has changed.
        """
        wanted = _granules_of(nbytes)
        size = self._sizes.at_least(wanted)
        return None if size is None else self._take(next(iter(self._free[size])), wanted)

    def allocate_at(self, extent: Extent) -> Block | None:
        """Take this extent, beyond all that are taken. None: it is not free, or not on a page."""
        start, wanted = extent.offset // GRANULE_BYTES, _granules_of(extent.nbytes)
        tail = self._last
        if extent.offset % GRANULE_BYTES or not tail.is_free:
            return None
        if start < tail.start or start + wanted > tail.end:
            return None
        if start > tail.start:
            self._remove_free(tail)
            gap, tail = tail, self._cut(tail, start)
            self._add_free(gap)
            self._add_free(tail)
        return self._take(tail, wanted)

    def free(self, block: Block) -> None:
        """Give a block back. Raises KeyError if it is not an allocated one."""
        if block.is_free:
            raise KeyError(block.start)
        self._used_granules -= block.granules
        merged = Block(block.start, block.granules, is_free=True)
        merged.before, merged.after = block.before, block.after
        block.is_free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._remove_free(neighbour)
                merged.start = min(merged.start, neighbour.start)
                merged.granules += neighbour.granules
                if neighbour is block.before:
                    merged.before = neighbour.before
                else:
                    merged.after = neighbour.after
        self._link(merged)
        self._add_free(merged)

    def split(self, block: Block, at: int) -> Block:
        """Make two of an allocated block; the second starts at granule `at`."""
        assert not block.is_free
        assert block.start < at < block.end, f"granule {at} is not inside {block.start} to ..."
        return self._cut(block, at)

    # -- figures -------------------------------------------------------------------------------

    @property
    def pool_bytes(self) -> int:
        return self._granules * GRANULE_BYTES

    @property
    def used_bytes(self) -> int:
        return self._used_granules * GRANULE_BYTES

    @property
    def free_bytes(self) -> int:
        return self.pool_bytes - self.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        return (self._sizes.largest() or 0) * GRANULE_BYTES

    @property
    def fragmentation(self) -> float:
        """1 - largest free extent / free bytes: 0 when all free memory is in one piece."""
        return 1.0 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0

    @property
    def is_one_free_extent(self) -> bool:
        return self._last.is_free and self._last.granules == self._granules

    @staticmethod
    def rounded_bytes(nbytes: int) -> int:
        """What an extent of `nbytes` really takes from the pool."""
        return _granules_of(nbytes) * GRANULE_BYTES

    def check(self) -> None:
        """Raise AssertionError unless the blocks tile the pool and every index agrees. O(n)."""
        position, used, free = self._granules, 0, set()
        after: Block | None = None
        for block in self._backwards():
            assert block.after is after
            assert block.end == position, f"a gap or an overlap at granule {position}"
            assert block.granules > 0, f"an empty block at granule {position}"
            assert after is None or not (block.is_free and after.is_free), "neighbours not merged"
            if block.is_free:
                assert block in self._free[block.granules]
                free.add(block)
            else:
                used += block.granules
            position, after = block.start, block
        assert position == 0, "the blocks do not cover the pool"
        assert self._used_granules == used
        assert all(self._free.values()), "an empty group was kept"
        assert free == {block for blocks in self._free.values() for block in blocks}
        assert self._sizes.largest() == max(self._free, default=None)

    def _backwards(self) -> Iterator[Block]:
        block: Block | None = self._last
        while block is not None:
            yield block
            block = block.before

    # -- steps ---------------------------------------------------------------------------------

    def _take(self, free: Block, wanted: int) -> Block:
        """The head of a free block. What was handed out once is never handed out again."""
        self._remove_free(free)
        taken = Block(free.start, wanted, is_free=False)
        taken.before, taken.after = free.before, free.after
        if free.granules > wanted:
            free.start += wanted
            free.granules -= wanted
            taken.after = free
            self._add_free(free)
        self._link(taken)
        self._used_granules += wanted
        return taken

    def _cut(self, block: Block, at: int) -> Block:
        """Its tail, from granule `at`, as a block of its own and of the same kind."""
        tail = Block(at, block.end - at, block.is_free)
        block.granules = at - block.start
        tail.before, tail.after = block, block.after
        self._link(tail)
        return tail

    def _link(self, block: Block) -> None:
        """Tell its neighbours of it."""
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        else:
            self._last = block

    def _add_free(self, block: Block) -> None:
        blocks = self._free.get(block.granules)
        if blocks is None:
            self._free[block.granules] = {block: None}
            self._sizes.add(block.granules)
        else:
            blocks[block] = None

    def _remove_free(self, block: Block) -> None:
        blocks = self._free[block.granules]
        del blocks[block]
        if not blocks:
            del self._free[block.granules]
            self._sizes.remove(block.granules)


def _granules_of(nbytes: int) -> int:
    if nbytes < 0:
        raise ValueError(f"a negative size: {nbytes}")
    return max(1, -(-nbytes // GRANULE_BYTES))
