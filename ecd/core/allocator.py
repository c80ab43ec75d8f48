"""Best-fit allocation of variable-size extents from one pool.

Best fit with immediate coalescing by boundary tags (Knuth, TAOCP vol. 1, 2.5). Free extents are
found by size through a tree of 64-bit words, each bit of which says that something lies below
it: a fixed-fanout simplification of van Emde Boas' priority queue (1977). With sizes counted in
granules the tree is at most five levels deep for a terabyte, so allocate and free are
O(log64 of the pool's granules) however many extents there are.
"""

from __future__ import annotations

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


class Allocator:
    """Extents of one pool of `pool_bytes`, rounded down to whole granules.

    `allocate` fails only if no free extent is large enough.
    """

    def __init__(self, pool_bytes: int, pool: int = 0) -> None:
        granules = pool_bytes // GRANULE_BYTES
        if granules <= 0:
            raise ValueError(f"a pool needs at least {GRANULE_BYTES} bytes, not {pool_bytes}")
        self._pool = pool
        self._granules = granules
        self._used: dict[int, int] = {}  # start -> granules
        self._used_by_end: dict[int, int] = {}  # end -> start
        self._free: dict[int, int] = {}
        self._free_by_end: dict[int, int] = {}
        self._starts_by_size: dict[int, dict[int, None]] = {}
        self._sizes = _SizeSet(granules + 1)
        self._used_granules = 0
        self._add_free(0, granules)

    # -- operations --------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Extent | None:
        """The tightest free extent that holds `nbytes`, or None; then nothing has changed."""
        wanted = self._round_up(nbytes)
        size = self._sizes.at_least(wanted)
        if size is None:
            return None
        start = next(iter(self._starts_by_size[size]))
        self._remove_free(start, size)
        if size > wanted:
            self._add_free(start + wanted, size - wanted)
        self._add_used(start, wanted)
        return Extent(self._pool, start * GRANULE_BYTES, nbytes)

    def allocate_at(self, extent: Extent) -> bool:
        """Take this extent, beyond all that are taken. False: it is not free, or not on a page."""
        start, size = extent.offset // GRANULE_BYTES, self._round_up(extent.nbytes)
        tail = self._free_by_end.get(self._granules, self._granules)
        if extent.offset % GRANULE_BYTES or start < tail or start + size > self._granules:
            return False
        self._remove_free(tail, self._granules - tail)
        if start > tail:
            self._add_free(tail, start - tail)
        if start + size < self._granules:
            self._add_free(start + size, self._granules - start - size)
        self._add_used(start, size)
        return True

    def free(self, extent: Extent) -> None:
        """Give an extent back. Raises KeyError if it is not an allocated one."""
        start = extent.offset // GRANULE_BYTES
        size = self._used.pop(start)
        del self._used_by_end[start + size]
        self._used_granules -= size
        before = self._free_by_end.get(start)
        if before is not None:
            merged = self._free[before]
            self._remove_free(before, merged)
            start, size = before, size + merged
        after = self._free.get(start + size)
        if after is not None:
            self._remove_free(start + size, after)
            size += after
        self._add_free(start, size)

    def split(self, offset: int, at: int) -> None:
        """Make two of the allocated extent at `offset`; the second starts at `at`."""
        start, middle = offset // GRANULE_BYTES, at // GRANULE_BYTES
        end = start + self._used[start]
        assert start < middle < end, f"granule {middle} is not inside {start} to {end}"
        self._used[start], self._used[middle] = middle - start, end - middle
        self._used_by_end[middle], self._used_by_end[end] = start, middle

    # -- what lies around an extent, for eviction ----------------------------------------------

    def span(self, offset: int) -> tuple[int, int]:
        """First byte and end of the allocated extent at `offset`, rounding included."""
        start = offset // GRANULE_BYTES
        return offset, (start + self._used[start]) * GRANULE_BYTES

    def free_before(self, offset: int) -> int:
        """Free bytes that end at `offset`."""
        start = self._free_by_end.get(offset // GRANULE_BYTES)
        return 0 if start is None else self._free[start] * GRANULE_BYTES

    def free_after(self, offset: int) -> int:
        """Free bytes that start at `offset`."""
        return self._free.get(offset // GRANULE_BYTES, 0) * GRANULE_BYTES

    def used_before(self, offset: int) -> int | None:
        """Offset of the allocated extent that ends at `offset`."""
        start = self._used_by_end.get(offset // GRANULE_BYTES)
        return None if start is None else start * GRANULE_BYTES

    def used_after(self, offset: int) -> int | None:
        """`offset`, if an allocated extent starts there."""
        return offset if offset // GRANULE_BYTES in self._used else None

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
        return self._free == {0: self._granules}

    @staticmethod
    def rounded_bytes(nbytes: int) -> int:
        """What an extent of `nbytes` really takes from the pool."""
        return Allocator._round_up(nbytes) * GRANULE_BYTES

    def check(self) -> None:
        """Raise AssertionError unless the extents tile the pool and every index agrees. O(n)."""
        position, was_free = 0, False
        for start, size, is_free in sorted(
            [(s, n, True) for s, n in self._free.items()]
            + [(s, n, False) for s, n in self._used.items()]
        ):
            assert start == position, f"a gap or an overlap at granule {position}"
            assert size > 0, f"an empty extent at granule {start}"
            assert not (was_free and is_free), f"neighbours not merged at granule {start}"
            position, was_free = start + size, is_free
        assert position == self._granules, "the extents do not cover the pool"
        assert self._used_granules == sum(self._used.values())
        for starts, by_end in ((self._free, self._free_by_end), (self._used, self._used_by_end)):
            assert by_end == {start + size: start for start, size in starts.items()}
        by_size: dict[int, set[int]] = {}
        for start, size in self._free.items():
            by_size.setdefault(size, set()).add(start)
        assert {n: set(s) for n, s in self._starts_by_size.items()} == by_size
        assert self._sizes.largest() == max(by_size, default=None)

    def _add_used(self, start: int, size: int) -> None:
        self._used[start] = size
        self._used_by_end[start + size] = start
        self._used_granules += size

    # -- free extents --------------------------------------------------------------------------

    @staticmethod
    def _round_up(nbytes: int) -> int:
        if nbytes < 0:
            raise ValueError(f"a negative size: {nbytes}")
        return max(1, -(-nbytes // GRANULE_BYTES))

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._free_by_end[start + size] = start
        starts = self._starts_by_size.get(size)
        if starts is None:
            self._starts_by_size[size] = {start: None}
            self._sizes.add(size)
        else:
            starts[start] = None

    def _remove_free(self, start: int, size: int) -> None:
        del self._free[start]
        del self._free_by_end[start + size]
        starts = self._starts_by_size[size]
        del starts[start]
        if not starts:
            del self._starts_by_size[size]
            self._sizes.remove(size)
