"""Best-fit allocation of variable-size extents from one pool.

Best fit with immediate coalescing of neighbours (Knuth, TAOCP vol. 1, 2.5); a linked list keeps
the blocks in the order of their offsets. A tree of 64-bit words finds free blocks by size: each
bit says that its subtree is not empty, a fixed-fanout simplification of van Emde Boas' priority
queue (1977). The tree counts sizes in granules, so it is at most five levels deep for a terabyte
of pages: allocate and free are O(log64 of the pool's granules), however many extents there are.
"""

from __future__ import annotations

from collections.abc import Iterator

from ecd.core.model.block import Block
from ecd.core.model.types import Extent

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
        """The smallest member that is `value` or larger; None if there is none."""
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


class Allocator:
    """The blocks of one pool.

    `allocate` fails only if no free block is large enough.
    """

    def __init__(self, pool_number: int, nbytes: int, granule_bytes: int) -> None:
        """Extents name `pool_number`; `nbytes` is rounded down to whole granules.

        Raises ValueError if the pool is smaller than one granule.
        """
        granules = nbytes // granule_bytes
        if granules <= 0:
            raise ValueError(f"a pool needs at least {granule_bytes} bytes, not {nbytes}")
        self.pool_number, self.granule_bytes = pool_number, granule_bytes
        self._granules = granules
        self._free: dict[int, dict[Block, None]] = {}  # by size
        self._sizes = _SizeSet(granules + 1)
        self._used_granules = 0
        self._last = Block(self, 0, granules, is_free=True)
        self._add_free(self._last)

    # -- operations --------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Block | None:
        """Take the head of the tightest free block that holds `nbytes`.

        Returns None, and changes nothing, if no free block is large enough.
        """
        wanted = self._granules_of(nbytes)
        size = self._sizes.at_least(wanted)
        return None if size is None else self._take(next(iter(self._free[size])), wanted)

    def allocate_at(self, extent: Extent) -> Block | None:
        """Take this extent, which must lie behind every allocated block.

        Returns None if it does not, is not free, or does not start on a granule.
        """
        start, misplaced = divmod(extent.offset, self.granule_bytes)
        wanted = self._granules_of(extent.nbytes)
        tail = self._last
        if misplaced or not tail.is_free:
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
        """Give a block back. Raises KeyError if it is free already."""
        if block.is_free:
            raise KeyError(block.start)
        self._used_granules -= block.granules
        merged = Block(self, block.start, block.granules, is_free=True)
        merged.before, merged.after = block.before, block.after
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._remove_free(neighbour)
                merged.start = min(merged.start, neighbour.start)
                merged.granules += neighbour.granules
                if neighbour is block.before:
                    merged.before = neighbour.before
                else:
                    merged.after = neighbour.after
                neighbour.unlink()
        block.is_free = True
        block.unlink()
        self._link(merged)
        self._add_free(merged)

    def split(self, block: Block, at: int) -> Block:
        """Cut an allocated block in two; returns the second, which starts at granule `at`."""
        assert not block.is_free
        assert block.start < at < block.end, f"granule {at} is not inside {block.start} to ..."
        return self._cut(block, at)

    # -- figures -------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The pool's size in whole granules."""
        return self._granules * self.granule_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_granules * self.granule_bytes

    @property
    def free_bytes(self) -> int:
        return (self._granules - self._used_granules) * self.granule_bytes

    @property
    def largest_free_bytes(self) -> int:
        return (self._sizes.largest() or 0) * self.granule_bytes

    @property
    def fragmentation(self) -> float:
        """1 - largest free extent / free bytes: 0 when all free memory is in one piece."""
        return 1.0 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0

    def rounded_bytes(self, nbytes: int) -> int:
        """The bytes that an extent of `nbytes` takes: whole granules, at least one."""
        return self._granules_of(nbytes) * self.granule_bytes

    def check(self) -> None:
        """Raise AssertionError unless the blocks tile the pool and every index agrees. O(n)."""
        position, used, free = self._granules, 0, set()
        after: Block | None = None
        for block in self._backwards():
            assert block.allocator is self
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
        """Cut `wanted` granules off the head of a free block.

        The result is a new object: a caller that keeps a freed block cannot free another's.
        """
        self._remove_free(free)
        taken = Block(self, free.start, wanted, is_free=False)
        taken.before, taken.after = free.before, free.after
        if free.granules > wanted:
            free.start += wanted
            free.granules -= wanted
            taken.after = free
            self._add_free(free)
        else:
            free.unlink()
        self._link(taken)
        self._used_granules += wanted
        return taken

    def _cut(self, block: Block, at: int) -> Block:
        """Make the block's tail, from granule `at`, a block that is free or allocated like it."""
        tail = Block(self, at, block.end - at, block.is_free)
        block.granules = at - block.start
        tail.before, tail.after = block, block.after
        self._link(tail)
        return tail

    def _link(self, block: Block) -> None:
        """Make the block's neighbours, or the end of the pool, refer to it."""
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

    def _granules_of(self, nbytes: int) -> int:
        if nbytes < 0:
            raise ValueError(f"a negative size: {nbytes}")
        return max(1, -(-nbytes // self.granule_bytes))
