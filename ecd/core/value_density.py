"""The policy that keeps what is worth most: seconds of encoding per byte, weighed by reuse.

GreedyDual-Size (Cao & Irani, USITS 1997) with the frequencies of GDSF (Cherkasova, HPL-98-69R1,
1998): an entry's rank is `H = L + f^e * cost_s / nbytes`, where L is the highest rank that had been
given up when the entry was last touched. L ages the untouched without re-ranking them. Shadows
choose e, or that density does not weigh, which is LRU.

Entries of one density and frequency share a queue (CAMP: Ghandeharizadeh et al., Middleware 2014).
L only grows, so that a queue's order is the order of the ranks, and only the queues' heads are
compared. Another weighing re-orders the heads alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush, heapreplace
from math import log2
from typing import ClassVar

from ecd.core.entry import Entry
from ecd.core.frequencies import MAX_FREQUENCY, Frequencies
from ecd.core.policy import EntryList, Weighing
from ecd.core.shadows import WEIGHINGS, Shadows

STEPS_PER_OCTAVE = 8
"""Densities are rounded to so many steps between one and its double."""
MIN_COST_S, MAX_COST_S = 1e-3, 1e5
"""Costs are ranked as if within these, which bounds the number of queues."""
LOOK_S = 0.25
"""At most one use of an entry counts in each such span of time."""
PROTECTED_SHARE = 0.1
"""Entries touched within the last so many of the pool's bytes go last: the next engine in line may
be about to read them."""
PROTECTED_WORTH = 1e6
"""Seconds per byte, more than any entry has."""

Fingerprint = Callable[[Entry], int]
"""Names an entry's key by 64 bits."""


def fingerprints(salt: bytes = b"") -> Fingerprint:
    """BLAKE2b of the key, with up to 64 bytes of salt: the same in every process."""

    def fingerprint(entry: Entry) -> int:
        name = f"{entry.namespace}\0{entry.mm_hash}".encode()
        return int.from_bytes(blake2b(name, digest_size=8, key=salt).digest(), "little")

    return fingerprint


class _Queue(EntryList):
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


class ValueDensity:
    """Least value first. A touch costs O(log queues) at most, another weighing O(queues).

    With both exponents 0 the order is that of `Lru`; with the frequency's 0, too, where entries
    have equal costs and sizes.
    """

    anchors: ClassVar[int] = 256

    def __init__(
        self,
        nbytes: int,
        fingerprint: Fingerprint | None = None,
        weighings: Sequence[Weighing] = WEIGHINGS,
    ) -> None:
        """Rank the entries of a pool of `nbytes`, by the first of `weighings` to start with."""
        self._fingerprint = fingerprint or fingerprints()
        self._frequencies = Frequencies(nbytes)
        self._weighings = tuple(weighings)
        self._shadows = Shadows(nbytes, len(weighings))
        self._chooses = len(weighings) > 1
        self._protected_bytes = int(PROTECTED_SHARE * nbytes)
        self._queues: dict[int, _Queue] = {}
        # A heap with one item for each listed queue, which is every one that is not empty. The
        # rank and place are those of the queue's head, or of a colder one that has left.
        self._heads: list[tuple[float, int, _Queue]] = []
        self._floor = 0.0  # L
        self._touched_bytes = 0
        self._entries = 0
        self._weigh()

    @property
    def weighing(self) -> Weighing:
        """The exponents in force."""
        return self._weighings[self._shadows.chosen]

    # -- changes -------------------------------------------------------------------------------

    def admit(self, entry: Entry) -> None:
        self._entries += 1
        entry.fingerprint = self._fingerprint(entry)
        entry.frequency = min(self._frequencies.recall(entry.fingerprint) + 1, MAX_FREQUENCY)
        entry.rank = self._queue_of(entry)
        self._rank(entry)
        self._count(entry)

    def use(self, entry: Entry, now_s: float) -> None:
        queue: _Queue = entry.rank
        is_ranked = queue.has(entry)
        if is_ranked:
            queue.unlink(entry)
        if int(now_s / LOOK_S) != int(entry.used_s / LOOK_S):
            entry.frequency = min(entry.frequency + 1, MAX_FREQUENCY)
            entry.rank = self._queue_of(entry)
            self._count(entry)
        if is_ranked:
            self._rank(entry)

    def hold(self, entry: Entry) -> None:
        entry.rank.unlink(entry)

    def let_go(self, entry: Entry) -> None:
        self._rank(entry)

    def give_up(self, victims: Sequence[Entry]) -> None:
        coldest = min(entry.floor + entry.rank.weight for entry in victims)
        self._floor = max(self._floor, coldest)

    def remove(self, entry: Entry) -> None:
        queue: _Queue | None = entry.rank
        if queue is None:
            return
        if queue.has(entry):
            queue.unlink(entry)
        entry.rank = None
        self._entries -= 1
        self._frequencies.remember(entry.fingerprint, entry.frequency)

    # -- the order -----------------------------------------------------------------------------

    def coldest(self) -> Iterator[Entry]:
        """In order of rank, then of touch; the protected come after all others."""
        self._settle_root()
        heads, untouched = self._heads, self._touched_bytes - self._protected_bytes
        # Ranks and places of the next in each line: of a queue, or of a subtree of the heap, whose
        # root is at the index. Walking the tree leaves the heap as it is.
        lines: list[tuple[float, int, int, Entry | None]] = (
            [(*heads[0][:2], 0, None)] if heads else []
        )
        protected = lines[:0]
        for until in (untouched, self._touched_bytes):
            while lines:
                _, place, index, entry = line = lines[0]
                if entry is None:
                    queue = heads[index][2]
                    for below in range(2 * index + 1, min(2 * index + 3, len(heads))):
                        heappush(lines, (*heads[below][:2], below, None))
                    entry = queue.head
                    if entry is None:
                        heappop(lines)
                        continue
                    line = entry.floor + queue.weight, entry.place, 0, entry
                    if entry.place != place:
                        heapreplace(lines, line)
                        continue
                if place > until:
                    protected.append(line)
                    heappop(lines)
                    continue
                yield entry
                entry = entry.warmer
                if entry is None:
                    heappop(lines)
                else:
                    rank = entry.floor + entry.rank.weight
                    heapreplace(lines, (rank, entry.place, 0, entry))
            lines = protected
            heapify(lines)

    def warmth(self, entry: Entry) -> float | None:
        queue: _Queue | None = entry.rank
        if queue is None or not queue.has(entry):
            return None
        return entry.floor + queue.weight

    def loss(self, entry: Entry) -> float:
        """Seconds: what the entry is worth above L, which it would be ranked by if it came now.

        That of a protected entry is more than any other's.
        """
        worth: float = entry.floor + entry.rank.weight - self._floor
        if worth < 0.0:
            worth = 0.0
        if entry.place > self._touched_bytes - self._protected_bytes:
            worth += PROTECTED_WORTH
        return worth * entry.block.nbytes

    # -- steps ---------------------------------------------------------------------------------

    def _queue_of(self, entry: Entry) -> _Queue:
        """The queue of the entry's frequency and density, as its cost is now."""
        cost_s = entry.cost_s
        if not MIN_COST_S <= cost_s <= MAX_COST_S:
            cost_s = min(max(MIN_COST_S, cost_s), MAX_COST_S)
        step = round(STEPS_PER_OCTAVE * log2(cost_s / entry.block.nbytes))
        number = step << 4 | entry.frequency
        queue = self._queues.get(number)
        if queue is None:
            queue = self._queues[number] = _Queue(number, self._weighings)
        return queue

    def _rank(self, entry: Entry) -> None:
        queue: _Queue = entry.rank
        self._touched_bytes += entry.block.nbytes
        entry.place, entry.floor = self._touched_bytes, self._floor
        if not queue.is_listed:
            queue.is_listed = True
            queue.weight = queue.weights[self._shadows.chosen]
            heappush(self._heads, (entry.floor + queue.weight, entry.place, queue))
        queue.append(entry)

    def _count(self, entry: Entry) -> None:
        """Count a put, or a use in another span of time than the last."""
        self._frequencies.age(self._entries)
        if self._chooses:
            queue, nbytes = entry.rank, entry.block.nbytes
            cost_s = queue.density * nbytes
            if self._shadows.access(entry.fingerprint, nbytes, cost_s, queue.weights):
                self._weigh()

    def _weigh(self) -> None:
        """Weigh the queues by the exponents in force."""
        listed, self._heads = self._heads, []
        for _, _, queue in listed:
            queue.is_listed = queue.head is not None
            if queue.head is not None:
                queue.weight = queue.weights[self._shadows.chosen]
                head = queue.head.floor + queue.weight, queue.head.place, queue
                self._heads.append(head)
        heapify(self._heads)

    def _settle_root(self) -> None:
        """Make the heap's first item that of the coldest entry."""
        heads = self._heads
        while heads:
            _, place, queue = heads[0]
            if queue.head is None:
                heappop(heads)
                queue.is_listed = False
            elif queue.head.place != place:
                coldest = queue.head.floor + queue.weight, queue.head.place, queue
                heapreplace(heads, coldest)
            else:
                return

    def check(self) -> None:
        """Raise AssertionError unless queues, links and heap agree. O(n)."""
        heads = {id(queue): (rank, place) for rank, place, queue in self._heads}
        assert len(heads) == len(self._heads), "a queue is listed twice"
        for queue in self._queues.values():
            assert queue.is_listed == (id(queue) in heads)
            assert queue.is_listed or queue.head is None, "a queue that no plan finds"
            before: Entry | None = None
            for entry in queue:
                assert entry.rank is queue
                assert entry.colder is before
                assert entry.frequency == queue.number & 15
                if before is None:
                    assert heads[id(queue)] <= (entry.floor + queue.weight, entry.place)
                else:
                    assert (before.floor, before.place) < (entry.floor, entry.place)
                before = entry
            assert queue.tail is before
