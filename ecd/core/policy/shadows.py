"""Which weighing of entries would have saved the most: caches of metadata beside the pool."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from ecd.core.policy.policy import Weighing

MAX_KEYS = 2048
"""Most keys that a shadow keeps: above, half of the sampled keys are dropped."""
_EVICTIONS = 64
"""Most evictions of a shadow at one access; it makes up for the rest at the next."""
_ACCESSES = 500
"""Accesses of the pool between two choices."""
_DECAY = 0.95
_MARGIN = 1.02

WEIGHINGS = (Weighing(1, 1), Weighing(0, 1), Weighing(2, 1), Weighing(0, 0))
"""GDSF, GreedyDual-Size, nearly LFU, and LRU."""


class _Shadow:
    """GreedyDual over the sampled keys, by one weighing."""

    def __init__(self) -> None:
        self.saved_s, self.nbytes = 0.0, 0
        self.kept: dict[int, tuple[float, int, int]] = {}  # by key: rank, last access, bytes
        # A heap with one item for each kept key: rank and number of this or an earlier access.
        self._heap: list[tuple[float, int, int]] = []
        self._floor = 0.0

    def access(
        self, key: int, nbytes: int, cost_s: float, weight: float, number: int, capacity: int
    ) -> None:
        """Keep a key, and evict, a bounded number, until no more than `capacity` bytes are kept."""
        heap, kept = self._heap, self.kept
        rank, used_bytes = self._floor + weight, self.nbytes + nbytes
        latest = kept.get(key)
        if latest is None:
            heappush(heap, (rank, number, key))
        else:
            self.saved_s += cost_s
            used_bytes -= latest[2]
        kept[key] = rank, number, nbytes
        if used_bytes > capacity:
            for _ in range(_EVICTIONS):
                rank, number, key = heap[0]
                latest = kept[key]
                if latest[1] != number:
                    heapreplace(heap, (latest[0], latest[1], key))
                    continue
                heappop(heap)
                del kept[key]
                self._floor = rank
                used_bytes -= latest[2]
                if used_bytes <= capacity:
                    break
        self.nbytes = used_bytes

    def keep(self, mask: int) -> None:
        """Drop the keys that are not sampled any more."""
        self.kept = {key: kept for key, kept in self.kept.items() if not key & mask}
        self.nbytes = sum(kept[2] for kept in self.kept.values())
        self._heap = [(*kept[:2], key) for key, kept in self.kept.items()]
        heapify(self._heap)


class Shadows:
    """Miniature simulations, one for each weighing (Waldspurger et al., USENIX ATC 2017).

    Every key is simulated until a shadow would keep too many; then keys are sampled by their
    fingerprints (SHARDS: Waldspurger et al., FAST 2015). A shadow has the same share of the pool's
    bytes.
    """

    def __init__(self, pool_bytes: int, count: int) -> None:
        """Simulate `count` weighings; the first is in force until another would have saved more."""
        self._pool_bytes = pool_bytes
        self._shadows = [_Shadow() for _ in range(count)]
        self.chosen = 0
        """The number of the weighing in force."""
        self._accesses = 0
        self._sampled = 1  # one key in so many, a power of two

    @property
    def saved_s(self) -> list[float]:
        """Seconds that each weighing would have saved recently, of the sampled keys."""
        return [shadow.saved_s for shadow in self._shadows]

    @property
    def keys(self) -> int:
        """The most that a shadow keeps."""
        return max(len(shadow.kept) for shadow in self._shadows)

    def access(self, key: int, nbytes: int, cost_s: float, weights: Sequence[float]) -> bool:
        """Simulate a use or put of a key that has this weight by each weighing.

        Returns whether another weighing is chosen now.
        """
        self._accesses += 1
        if not key & self._sampled - 1:
            capacity = self._pool_bytes // self._sampled
            if nbytes <= capacity:
                is_full = False
                for shadow, weight in zip(self._shadows, weights, strict=True):
                    shadow.access(key, nbytes, cost_s, weight, self._accesses, capacity)
                    is_full = is_full or len(shadow.kept) > MAX_KEYS
                if is_full:
                    self._sampled *= 2
                    for shadow in self._shadows:
                        shadow.keep(self._sampled - 1)
        return self._accesses % _ACCESSES == 0 and self._choose()

    def _choose(self) -> bool:
        saved_s, chosen = self.saved_s, self.chosen
        best = max(range(len(saved_s)), key=saved_s.__getitem__)
        if saved_s[best] > _MARGIN * saved_s[chosen]:
            self.chosen = best
        for shadow in self._shadows:
            shadow.saved_s *= _DECAY
        return self.chosen != chosen
