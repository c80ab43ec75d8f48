"""Deadlines that may be moved later or dropped, in O(log n)."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T", bound=int)


class Deadlines(Generic[T]):
    """A heap with lazy deletion: an item moved later is found stale, and pushed back, when popped.

    `next_s` may be early (the deadline an item had before it moved), never late.
    """

    def __init__(self) -> None:
        self._due_s: dict[T, float] = {}
        self._heap: list[tuple[float, T]] = []

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, item: T, due_s: float) -> None:
        self._due_s[item] = due_s
        heapq.heappush(self._heap, (due_s, item))

    def postpone(self, item: T, due_s: float) -> None:
        """Move to a time that is not earlier. Raises KeyError for an unknown item."""
        self._due_s[item] = max(due_s, self._due_s[item])

    def remove(self, item: T) -> None:
        del self._due_s[item]
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._due_s):
            self._heap = [(due_s, item) for item, due_s in self._due_s.items()]
            heapq.heapify(self._heap)

    def due_s(self, item: T) -> float:
        return self._due_s[item]

    def pop_due(self, now_s: float) -> T | None:
        """Take one item whose deadline is not after `now_s`."""
        while self._heap and self._heap[0][0] <= now_s:
            _, item = heapq.heappop(self._heap)
            due_s = self._due_s.get(item)
            if due_s is None:
                continue
            if due_s <= now_s:
                del self._due_s[item]
                return item
            heapq.heappush(self._heap, (due_s, item))
        return None

    @property
    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def check(self) -> None:
        """Raise AssertionError unless every item can still be found in the heap. O(n)."""
        earliest: dict[T, float] = {}
        for due_s, item in self._heap:
            earliest[item] = min(due_s, earliest.get(item, due_s))
        for item, due_s in self._due_s.items():
            assert earliest[item] <= due_s, f"item {item} would be found too late"
