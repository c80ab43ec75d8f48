"""Queues of ranked entries, and the order of all of them.

Entries of one density and frequency share a queue (CAMP: Ghandeharizadeh et al., Middleware 2014).
L only grows, so that a queue's order is the order of the ranks, and only the queues' heads are
compared. Another weighing re-orders the heads alone.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from ecd.core.model.entry import Entry
from ecd.core.policy.policy import EntryList, Weighing

STEPS_PER_OCTAVE = 8
"""Densities are rounded to so many steps between one and its double."""

_Line = tuple[float, int, Any]
"""The rank and place of a queue's coldest entry, or of the next in it, and that queue or entry."""


class Queue(EntryList):
    """The ranked entries of one density and frequency, in order of their last touch."""

    __slots__ = ("density", "is_listed", "number", "weight", "weights")

    def __init__(self, number: int, weighings: Sequence[Weighing]) -> None:
        """`number` has the frequency in the lowest four bits, and the step of density above."""
        super().__init__()
        self.number = number
        self.density: float = 2.0 ** ((number >> 4) / STEPS_PER_OCTAVE)
        self.weights = [weighing.weight(number & 15, self.density) for weighing in weighings]
        self.weight = 0.0  # of `weights`, the one in force while the queue is listed
        self.is_listed = False


class Queues:
    """All queues. An entry's rank is its floor and its queue's weight; its place is later than that
    of any entry that was touched before.
    """

    def __init__(self, weighings: Sequence[Weighing]) -> None:
        """The first weighing is in force."""
        self._weighings, self._chosen = tuple(weighings), 0
        self._queues: dict[int, Queue] = {}
        # Each listed queue, which is every one that is not empty, is in one of two: in `_young`, a
        # heap, by its head's place if all its entries are protected, else in `_heads`, which is
        # sorted, by its head's rank. Either may have those of a colder entry that has left.
        self._young: list[tuple[int, Queue]] = []
        self._heads: list[_Line] = []

    def of(self, number: int) -> Queue:
        """The queue of this number, a new one if there was none."""
        queue = self._queues.get(number)
        if queue is None:
            queue = self._queues[number] = Queue(number, self._weighings)
        return queue

    def enlist(self, queue: Queue, place: int) -> None:
        """Make an unlisted queue findable; an entry of this place is appended to it next."""
        queue.is_listed = True
        queue.weight = queue.weights[self._chosen]
        heappush(self._young, (place, queue))

    def weigh(self, chosen: int) -> None:
        """Apply another weighing. O(queues log queues)."""
        self._chosen = chosen
        for _, queue in self._young:
            queue.weight = queue.weights[chosen]
        listed, self._heads = self._heads, []
        for _, _, queue in listed:
            queue.is_listed = queue.head is not None
            if queue.head is not None:
                queue.weight = queue.weights[chosen]
                self._heads.append(_head(queue.head))
        self._heads.sort()

    def coldest(self, untouched: int) -> Iterator[Entry]:
        """All entries in order of rank, then of place; those of later places than `untouched` last.

        Nothing may change before the iteration ends.
        """
        self._grow_old(untouched)
        heads, count = self._heads, 0
        # The next entries of the first `count` queues: a heap, and those that are protected.
        lines: list[_Line] = []
        protected: list[_Line] = []
        while True:
            while count < len(heads) and (not lines or heads[count] < lines[0]):
                rank, place, queue = heads[count]
                head = queue.head
                if head is not None and head.place == place:
                    heappush(lines, (rank, place, head))
                    count += 1
                    continue
                del heads[count]
                if head is None:
                    queue.is_listed = False
                elif head.place > untouched:
                    heappush(self._young, (head.place, queue))
                else:
                    insort(heads, _head(head))
            if not lines:
                break
            entry = lines[0][2]
            yield entry
            entry = entry.warmer
            if entry is None:
                heappop(lines)
                continue
            line = entry.floor + entry.rank.weight, entry.place, entry
            if entry.place > untouched:
                protected.append(line)
                heappop(lines)
            else:
                heapreplace(lines, line)
        young = [queue.head for _, queue in self._young if queue.head is not None]
        yield from _merged(protected + [(*_head(head)[:2], head) for head in young])

    def _grow_old(self, untouched: int) -> None:
        """Sort in the queues whose heads are not protected any more."""
        young = self._young
        while young and young[0][0] <= untouched:
            queue = young[0][1]
            head = queue.head
            if head is not None and head.place > untouched:
                heapreplace(young, (head.place, queue))
                continue
            heappop(young)
            if head is None:
                queue.is_listed = False
            else:
                insort(self._heads, _head(head))

    def check(self) -> None:
        """Raise AssertionError unless queues, links and lists agree. O(n)."""
        heads = {id(queue): (rank, place) for rank, place, queue in self._heads}
        young = {id(queue): place for place, queue in self._young}
        assert len(heads | young) == len(self._heads) + len(self._young), "listed twice"
        for queue in self._queues.values():
            assert queue.is_listed == (id(queue) in heads or id(queue) in young)
            assert queue.is_listed or queue.head is None, "a queue that no plan finds"
            before: Entry | None = None
            for entry in queue:
                assert entry.rank is queue
                assert entry.colder is before
                assert entry.frequency == queue.number & 15
                if before is not None:
                    assert (before.floor, before.place) < (entry.floor, entry.place)
                elif id(queue) in young:
                    assert young[id(queue)] <= entry.place
                else:
                    assert heads[id(queue)] <= (entry.floor + queue.weight, entry.place)
                before = entry
            assert queue.tail is before


def _head(entry: Entry) -> _Line:
    """The line of a queue by its coldest entry."""
    return entry.floor + entry.rank.weight, entry.place, entry.rank


def _merged(lines: list[_Line]) -> Iterator[Entry]:
    """The entries from these on, in order."""
    heapify(lines)
    while lines:
        entry = lines[0][2]
        yield entry
        entry = entry.warmer
        if entry is None:
            heappop(lines)
        else:
            heapreplace(lines, (entry.floor + entry.rank.weight, entry.place, entry))
