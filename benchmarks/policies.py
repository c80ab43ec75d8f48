"""Policies to compare with, as published, over the core's interface.

Those that rank by a value give up the least of it per window; the others the fewest bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, count
from math import inf
from typing import ClassVar

from ecd.core.model.entry import Entry
from ecd.core.policy.policy import Policy, Weighing
from ecd.core.pool.allocator import Allocator


class Ranked:
    """Ranks by a number that an access gives an entry, in a heap that is cleaned up when read."""

    anchors: ClassVar[int] = 16
    weighing: ClassVar[Weighing] = Weighing(0.0, 0.0)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry]] = []
        self._place: dict[Entry, tuple[float, int]] = {}  # rank and number of the latest access
        self._ranked: set[Entry] = set()
        self._numbers = count()
        self.uses: dict[Entry, int] = {}
        self.floor = 0.0  # the highest rank that was given up

    def rank(self, entry: Entry) -> float:
        """The entry's rank after an access."""
        raise NotImplementedError

    def _touch(self, entry: Entry) -> None:
        self._place[entry] = self.rank(entry), next(self._numbers)

    def _push(self, entry: Entry) -> None:
        heappush(self._heap, (*self._place[entry], entry))

    def admit(self, entry: Entry) -> None:
        self.uses[entry] = 1
        self._touch(entry)
        self.let_go(entry)

    def use(self, entry: Entry, now_s: float) -> None:
        self.uses[entry] += 1
        self._touch(entry)
        if entry in self._ranked:
            self._push(entry)

    def hold(self, entry: Entry) -> None:
        self._ranked.discard(entry)

    def let_go(self, entry: Entry) -> None:
        self._ranked.add(entry)
        self._push(entry)

    def give_up(self, victims: Sequence[Entry]) -> None:
        self.floor = max(self.floor, min(self._place[entry][0] for entry in victims))

    def remove(self, entry: Entry) -> None:
        self._ranked.discard(entry)
        del self._place[entry], self.uses[entry]

    def coldest(self) -> Iterator[Entry]:
        passed: list[tuple[float, int, Entry]] = []
        try:
            while self._heap:
                item = heappop(self._heap)
                entry = item[2]
                is_current = entry in self._ranked and self._place[entry] == item[:2]
                if is_current and item not in passed[-1:]:
                    passed.append(item)
                    yield entry
        finally:
            for item in passed:
                heappush(self._heap, item)

    def warmth(self, entry: Entry) -> float | None:
        return self._place[entry][0] if entry in self._ranked else None

    def loss(self, entry: Entry) -> float:
        return entry.block.nbytes if entry in self._ranked else inf


class Fifo(Ranked):
    """First in, first out."""

    def rank(self, entry: Entry) -> float:
        return entry.id


class Lfu(Ranked):
    """Least frequently used since it came in, then least recently."""

    def rank(self, entry: Entry) -> float:
        return self.uses[entry]


class Gds(Ranked):
    """GreedyDual-Size (Cao & Irani, USITS 1997)."""

    anchors: ClassVar[int] = 64

    def weight(self, entry: Entry) -> float:
        return entry.cost_s / entry.block.nbytes

    def rank(self, entry: Entry) -> float:
        return self.floor + self.weight(entry)

    def loss(self, entry: Entry) -> float:
        loss = (self._place[entry][0] - self.floor) * entry.block.nbytes
        return loss if entry in self._ranked else inf


class Gdsf(Gds):
    """GreedyDual-Size with frequency (Cherkasova, HPL-98-69R1, 1998)."""

    def weight(self, entry: Entry) -> float:
        return self.uses[entry] * super().weight(entry)


class Queues:
    """Common to policies whose queues are passed over, not ranked: the oldest of each first."""

    anchors: ClassVar[int] = 16
    weighing: ClassVar[Weighing] = Weighing(0.0, 0.0)

    def __init__(self) -> None:
        self._held: set[Entry] = set()

    def hold(self, entry: Entry) -> None:
        self._held.add(entry)

    def let_go(self, entry: Entry) -> None:
        self._held.discard(entry)

    def loss(self, entry: Entry) -> float:
        return inf if entry in self._held else entry.block.nbytes


class Sieve(Queues):
    """SIEVE (Zhang et al., NSDI 2024): a hand passes the queue, sparing once what was used."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: OrderedDict[Entry, bool] = OrderedDict()  # behind the hand: used since?
        self._ahead: OrderedDict[Entry, bool] = OrderedDict()  # the next under the hand first

    def admit(self, entry: Entry) -> None:
        self._ahead[entry] = False

    def use(self, entry: Entry, now_s: float) -> None:
        (self._ahead if entry in self._ahead else self._passed)[entry] = True

    def give_up(self, victims: Sequence[Entry]) -> None:
        """Move the hand to the first of the victims."""
        for _ in range(2 * (len(self._ahead) + len(self._passed))):
            if not self._ahead:
                self._ahead, self._passed = self._passed, self._ahead
            entry = next(iter(self._ahead))
            if entry in victims:
                return
            del self._ahead[entry]
            self._passed[entry] = False

    def remove(self, entry: Entry) -> None:
        self._ahead.pop(entry, None)
        self._passed.pop(entry, None)
        self._held.discard(entry)

    def coldest(self) -> Iterator[Entry]:
        for was_used in (False, True):
            for entry, used in chain(self._ahead.items(), self._passed.items()):
                if used == was_used and entry not in self._held:
                    yield entry

    def warmth(self, entry: Entry) -> float | None:
        used = self._ahead.get(entry, self._passed.get(entry))
        return None if used is None or entry in self._held else float(used)


class S3Fifo(Queues):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for newcomers, a main one, and ghosts."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._small_share = nbytes // 10
        self._small_bytes = 0
        self._small: OrderedDict[Entry, int] = OrderedDict()  # uses, at most 3
        self._main: OrderedDict[Entry, int] = OrderedDict()
        self._ghosts: OrderedDict[tuple[str, str], None] = OrderedDict()

    def admit(self, entry: Entry) -> None:
        if entry.key in self._ghosts:
            del self._ghosts[entry.key]
            self._main[entry] = 0
        else:
            self._small[entry] = 0
            self._small_bytes += entry.block.nbytes

    def use(self, entry: Entry, now_s: float) -> None:
        queue = self._small if entry in self._small else self._main
        queue[entry] = min(3, queue[entry] + 1)

    def give_up(self, victims: Sequence[Entry]) -> None:
        for entry in victims:
            if entry in self._small:
                self._ghosts[entry.key] = None
        while len(self._ghosts) > max(64, len(self._main)):
            self._ghosts.popitem(last=False)

    def remove(self, entry: Entry) -> None:
        if self._small.pop(entry, None) is not None:
            self._small_bytes -= entry.block.nbytes
        self._main.pop(entry, None)
        self._held.discard(entry)

    def _settle(self) -> None:
        """Move on what the queues' heads spare."""
        while self._small and (entry := next(iter(self._small))) and self._small[entry] > 1:
            del self._small[entry]
            self._small_bytes -= entry.block.nbytes
            self._main[entry] = 0
        while self._main and (entry := next(iter(self._main))) and self._main[entry] > 0:
            self._main[entry] -= 1
            self._main.move_to_end(entry)

    def coldest(self) -> Iterator[Entry]:
        self._settle()
        queues = [(self._small, 1), (self._main, 0)]
        if self._small_bytes <= self._small_share:
            queues.reverse()
        for is_spared in (False, True):
            for queue, most in queues:
                for entry, uses in queue.items():
                    if (uses > most) == is_spared and entry not in self._held:
                        yield entry

    def warmth(self, entry: Entry) -> float | None:
        uses = self._small.get(entry, self._main.get(entry))
        return None if uses is None or entry in self._held else float(uses)


def _of_allocator(make: Callable[[], Policy]) -> Callable[[Allocator], Policy]:
    return lambda _: make()


COMPARED: dict[str, Callable[[Allocator], Policy]] = {
    "FIFO": _of_allocator(Fifo),
    "SIEVE": _of_allocator(Sieve),
    "S3-FIFO": lambda allocator: S3Fifo(allocator.nbytes),
    "LFU": _of_allocator(Lfu),
    "GDS": _of_allocator(Gds),
    "GDSF": _of_allocator(Gdsf),
}
