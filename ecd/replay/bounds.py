"""Offline bounds of a trace: no policy saves more.

PFOO (Berger, Beckmann, Harchol-Balter, "Practical Bounds on Optimal Caching with Variable Object
Sizes", POMACS 2018), with seconds in place of hits. The interval between two accesses of a key is
one item to pack into the rectangle of the pool's bytes times the trace's accesses. PFOO-U packs
them by seconds per byte and access until the area is full, an upper bound; PFOO-L packs only those
that fit at every point in time, which an offline policy can do. Both count bytes, as if memory were
never fragmented.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from ecd.replay.reading import TOLD_EVERY, Accesses, Progress, no_progress


class Bounds(NamedTuple):
    """Seconds saved by the best packing found, and a bound on the best that there is."""

    feasible_s: float
    upper_s: float


def bounds(accesses: Accesses, pool_bytes: int, progress: Progress = no_progress) -> Bounds:
    """PFOO-L and PFOO-U for a pool of `pool_bytes`. O(n log n)."""
    intervals = _intervals(accesses)
    area = float(pool_bytes * len(accesses.order))
    used = _Occupancy(len(accesses.order))
    feasible_s = upper_s = 0.0
    for place, (_, start, end, nbytes, cost_s) in enumerate(intervals):
        if place % TOLD_EVERY == 0:
            progress(place, len(intervals))
        volume = nbytes * (end - start)
        upper_s += cost_s * min(1.0, area / volume)
        area = max(0.0, area - volume)
        if nbytes <= pool_bytes and used.most(start, end) + nbytes <= pool_bytes:
            used.add(start, end, nbytes)
            feasible_s += cost_s
    progress(len(intervals), len(intervals))
    return Bounds(feasible_s, upper_s)


def _intervals(accesses: Accesses) -> list[tuple[float, int, int, int, float]]:
    """Density, start, end, bytes and seconds of each interval, the densest first."""
    last: dict[int, int] = {}
    found = []
    for end, number in enumerate(accesses.order):
        start = last.get(number)
        last[number] = end
        if start is not None:
            item = accesses.items[number]
            nbytes = accesses.block_bytes(item)
            density = item.cost_s / (nbytes * (end - start))
            found.append((-density, start, end, nbytes, item.cost_s))
    return sorted(found)


class _Occupancy:
    """Bytes in use at each access: a segment tree of sums over ranges, and of their maximum.

    Walks from the leaves up, on both sides outside of the range, and pushes nothing down.
    """

    def __init__(self, length: int) -> None:
        self._leaves = 1 << (length + 1).bit_length()  # with one spare at each end
        self._added = [0] * (2 * self._leaves)  # to all accesses of the node
        self._most = [0] * (2 * self._leaves)  # of the node, without what its parents have added

    def add(self, start: int, end: int, nbytes: int) -> None:
        most, added = self._most, self._added
        left, right = start + self._leaves, end + self._leaves + 1
        while left ^ right != 1:
            for inside in (left ^ 1,) * (not left & 1) + (right ^ 1,) * (right & 1):
                most[inside] += nbytes
                added[inside] += nbytes
            left, right = left >> 1, right >> 1
            most[left] = max(most[2 * left], most[2 * left + 1]) + added[left]
            most[right] = max(most[2 * right], most[2 * right + 1]) + added[right]
        while left > 1:
            left >>= 1
            most[left] = max(most[2 * left], most[2 * left + 1]) + added[left]

    def most(self, start: int, end: int) -> float:
        most, added = self._most, self._added
        left, right = start + self._leaves, end + self._leaves + 1
        found_left = found_right = -inf
        while left ^ right != 1:
            if not left & 1:
                found_left = max(found_left, most[left ^ 1])
            if right & 1:
                found_right = max(found_right, most[right ^ 1])
            left, right = left >> 1, right >> 1
            found_left += added[left]
            found_right += added[right]
        found = max(found_left, found_right)
        while left > 1:
            left >>= 1
            found += added[left]
        return found
