"""Deadlines that may be moved later or dropped, in O(log n)."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T", bound=int)

MOVED_AT_A_TIME = 4
"""Items moved to the new heap by one removal: rebuilding a large heap at once takes 30 ms."""


class Deadlines(Generic[T]):
    """A heap with lazy deletion: a postponed item is pushed back when its old deadline is popped.

    `next_s` may be early (the deadline of an item before it was postponed), never late.
    """

    def __init__(self) -> None:
        self._due_s: dict[T, float] = {}
        self._heap: list[tuple[float, T]] = []
        self._old: list[tuple[float, T]] = []  # mostly removed items; emptied bit by bit

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, item: T, due_s: float) -> None:
        self._due_s[item] = due_s
        heapq.heappush(self._heap, (due_s, item))

    def postpone(self, item: T, due_s: float) -> None:
        """Move a deadline later; an earlier time changes nothing. KeyError for an unknown item."""
        self._due_s[item] = max(due_s, self._due_s[item])

    def remove(self, item: T) -> None:
        del self._due_s[item]
        if not self._old and len(self._heap) > 64 and len(self._heap) > 2 * len(self._due_s):
            self._old, self._heap = self._heap, []
        for _ in range(min(MOVED_AT_A_TIME, len(self._old))):
            _, moved = self._old.pop()  # a leaf: the rest is still a heap
            if moved in self._due_s:
                heapq.heappush(self._heap, (self._due_s[moved], moved))

    def due_s(self, item: T) -> float:
        return self._due_s[item]

    def take_due(self, now_s: float, most: int) -> list[T]:
        """Take the items that are due at `now_s`, in `most` steps in the heap at most.

        If `next_s` is still due then, items may be left.
        """
        due: list[T] = []
        for _ in range(most):
            heap = self._first
            if not heap or heap[0][0] > now_s:
                break
            _, item = heapq.heappop(heap)
            due_s = self._due_s.get(item)
            if due_s is None:
                continue
            if due_s <= now_s:
                del self._due_s[item]
                due.append(item)
            else:
                heapq.heappush(self._heap, (due_s, item))
        return due

    @property
    def next_s(self) -> float | None:
        return self._first[0][0] if self._first else None

    @property
    def _first(self) -> list[tuple[float, T]]:
        """The heap whose head is the earlier."""
        if self._old and (not self._heap or self._old[0] < self._heap[0]):
            return self._old
        return self._heap

    def check(self) -> None:
        """Raise AssertionError unless every item can still be found in the heap. O(n)."""
        earliest: dict[T, float] = {}
        for due_s, item in self._heap + self._old:
            earliest[item] = min(due_s, earliest.get(item, due_s))
        for item, due_s in self._due_s.items():
            assert earliest[item] <= due_s, f"item {item} would be found too late"
