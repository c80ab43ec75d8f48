"""The policy that keeps what is worth most: seconds of encoding per byte, weighed by reuse.

GreedyDual-Size (Cao & Irani, USITS 1997) with the frequencies of GDSF (Cherkasova, HPL-98-69R1,
1998): an entry's rank is `H = L + f^e * cost_s / nbytes`, where L is the highest rank that had been
given up when the entry was last touched. L ages the untouched without re-ranking them. Shadows
choose e, or that density does not weigh, which is LRU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from math import inf, log2
from typing import ClassVar

from ecd.core.model.entry import Entry
from ecd.core.policy.frequencies import MAX_FREQUENCY, Frequencies
from ecd.core.policy.policy import Weighing
from ecd.core.policy.queues import STEPS_PER_OCTAVE, Queue, Queues
from ecd.core.policy.shadows import WEIGHINGS, Shadows

MIN_COST_S, MAX_COST_S = 1e-3, 1e5
"""Costs are ranked as if within these, which bounds the number of queues."""
ONE_USE_S = 0.25
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


class ValueDensity:
    """Least value first. A touch costs O(log queues) at most, another weighing
    O(queues log queues).

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
        self._queues = Queues(weighings)
        self._floor = 0.0  # L
        self._touched_bytes = 0
        self._entries = 0

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
        queue: Queue = entry.rank
        is_ranked = queue.has(entry)
        if is_ranked:
            queue.unlink(entry)
        if int(now_s / ONE_USE_S) != int(entry.used_s / ONE_USE_S):
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
        coldest = min([entry.floor + entry.rank.weight for entry in victims])
        if coldest > self._floor:
            self._floor = coldest

    def remove(self, entry: Entry) -> None:
        queue: Queue | None = entry.rank
        if queue is None:
            return
        if queue.has(entry):
            queue.unlink(entry)
        entry.rank = None
        self._entries -= 1
        self._frequencies.remember(entry.fingerprint, entry.frequency)

    # -- the order -----------------------------------------------------------------------------

    def coldest(self) -> Iterator[Entry]:
        """In order of rank, then of touch; the protected come after all others.

        The policy must not change before the iteration ends.
        """
        return self._queues.coldest(self._touched_bytes - self._protected_bytes)

    def warmth(self, entry: Entry) -> float | None:
        queue: Queue | None = entry.rank
        if queue is None or not queue.has(entry):
            return None
        return entry.floor + queue.weight

    def loss(self, entry: Entry) -> float:
        """Seconds: what the entry is worth above L, which it would be ranked by if it came now.

        That of a protected entry is more than any other's.
        """
        queue: Queue | None = entry.rank
        if queue is None or (entry.colder is None and entry is not queue.head):
            return inf
        worth: float = entry.floor + queue.weight - self._floor
        if worth < 0.0:
            worth = 0.0
        if entry.place > self._touched_bytes - self._protected_bytes:
            worth += PROTECTED_WORTH
        block = entry.block
        return worth * (block.granules * block.allocator.granule_bytes)

    # -- steps ---------------------------------------------------------------------------------

    def _queue_of(self, entry: Entry) -> Queue:
        """The queue of the entry's frequency and density, as its cost is now."""
        cost_s = entry.cost_s
        if not MIN_COST_S <= cost_s <= MAX_COST_S:
            cost_s = min(max(MIN_COST_S, cost_s), MAX_COST_S)
        step = round(STEPS_PER_OCTAVE * log2(cost_s / entry.block.nbytes))
        return self._queues.of(step << 4 | entry.frequency)

    def _rank(self, entry: Entry) -> None:
        queue: Queue = entry.rank
        self._touched_bytes += entry.block.nbytes
        entry.place, entry.floor = self._touched_bytes, self._floor
        if not queue.is_listed:
            self._queues.enlist(queue, entry.place)
        queue.append(entry)

    def _count(self, entry: Entry) -> None:
        """Count a put, or a use in another span of time than the last."""
        self._frequencies.age(self._entries)
        if self._chooses:
            queue, nbytes = entry.rank, entry.block.nbytes
            cost_s = queue.density * nbytes
            if self._shadows.access(entry.fingerprint, nbytes, cost_s, queue.weights):
                self._queues.weigh(self._shadows.chosen)

    def check(self) -> None:
        """Raise AssertionError unless queues, links and heap agree. O(n)."""
        self._queues.check()
