"""Deadlines that may be moved later or dropped, in O(log n)."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T", bound=int)

MOVED_AT_A_TIME = 4
"""Items moved to the new heap by one removal: rebuilding a large heap at once takes 30 ms."""


class Deadlines(Generic[T]):
    """A heap with lazy deletion: a postponed item is pushed back when its old deadline is popped.

    `next_s` may be early (the deadline of an item before it was postponed), never late. A record
    of an item that was removed, and maybe added again since, is dropped when it is come to.
    """

    def __init__(self) -> None:
        self._records: dict[T, tuple[float, T]] = {}  # of each item the one in a heap that counts
        self._postponed_s: dict[T, float] = {}
        self._heap: list[tuple[float, T]] = []
        self._old: list[tuple[float, T]] = []  # mostly removed items; emptied bit by bit

    def __len__(self) -> int:
        return len(self._records)

    def add(self, item: T, due_s: float) -> None:
        """Add an item that is not there."""
        record = self._records[item] = (due_s, item)
        heapq.heappush(self._heap, record)

    def postpone(self, item: T, due_s: float) -> None:
        """Move a deadline later; an earlier time changes nothing. KeyError for an unknown item."""
        if due_s > self.due_s(item):
            self._postponed_s[item] = due_s

    def remove(self, item: T) -> None:
        del self._records[item]
        self._postponed_s.pop(item, None)
        if not self._old and len(self._heap) > 64 and len(self._heap) > 2 * len(self._records):
            self._old, self._heap = self._heap, []
        for _ in range(min(MOVED_AT_A_TIME, len(self._old))):
            record = self._old.pop()  # a leaf: the rest is still a heap
            if self._records.get(record[1]) is record:
                self._move(record[1])

    def due_s(self, item: T) -> float:
        return self._postponed_s.get(item, self._records[item][0])

    def take_due(self, now_s: float, most: int) -> list[T]:
        """Take the items that are due at `now_s`, in `most` steps in the heap at most.

        If `next_s` is still due then, items may be left.
        """
        due: list[T] = []
        for _ in range(most):
            heap = self._first
            if not heap or heap[0][0] > now_s:
                break
            record = heapq.heappop(heap)
            item = record[1]
            if self._records.get(item) is not record:
                continue
            if self._postponed_s.get(item, now_s) <= now_s:
                del self._records[item]
                self._postponed_s.pop(item, None)
                due.append(item)
            else:
                self._move(item)
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

    def _move(self, item: T) -> None:
        """Give an item whose record was popped a new one, by its deadline as it is now."""
        self.add(item, self.due_s(item))
        self._postponed_s.pop(item, None)

    def check(self) -> None:
        """Raise AssertionError unless every item can still be found in the heap. O(n)."""
        listed = {id(record) for record in self._heap + self._old}
        for item, record in self._records.items():
            assert item == record[1]
            assert id(record) in listed, f"item {item} would not be found"
        assert all(due_s > self._records[item][0] for item, due_s in self._postponed_s.items())
