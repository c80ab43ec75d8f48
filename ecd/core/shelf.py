"""The shelf: what lies in a staged pool, and what leaves it for room.

GreedyDual-Size-Frequency (Cherkasova, HPL-98-69R1): rank = L + uses * saved seconds / bytes. L is
the rank of the last entry that left. A use saves the time of encoding less that of reading. Ranks
only rise, so `Deadlines` serves as their heap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from ecd.core.model.deadlines import Deadlines
from ecd.core.model.types import Key

MAX_ENTRIES = 1 << 18
"""More would stop the event loop for too long when their tables grow."""


@dataclass(slots=True, eq=False)
class Shelved:
    """One entry on the shelf; `file_bytes` are what it takes there."""

    number: int
    key: Key
    nbytes: int
    file_bytes: int
    cost_s: float  # to encode it
    density: float  # seconds saved by one use, for each byte
    rank: float
    used_s: float
    created_s: float  # when the entry was put
    expires_s: float = inf
    uses: int = 1
    is_ready: bool = True  # to be read
    is_erased: bool = False  # on request: what a read of it brings is not to be stored
    earlier: Shelved | None = field(default=None, repr=False)  # neighbours in order of arrival
    later: Shelved | None = field(default=None, repr=False)


class Shelf:
    """The entries of one staged pool. Every operation is O(log n)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.used_bytes = nbytes, 0
        self._by_key: dict[Key, Shelved] = {}
        self._by_number: dict[int, Shelved] = {}
        self._ranks: Deadlines[int] = Deadlines()
        self._ends: Deadlines[int] = Deadlines()
        self._least = 0.0  # L
        self._last = 0
        self._head: Shelved | None = None
        self._tail: Shelved | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Shelved]:
        """In order of arrival. Entries may come and go meanwhile, and none is copied before."""
        shelved = self._head
        while shelved is not None:
            yield shelved
            shelved = shelved.later

    def get(self, key: Key) -> Shelved | None:
        return self._by_key.get(key)

    def add(
        self,
        key: Key,
        nbytes: int,
        file_bytes: int,
        cost_s: float,
        saved_s: float,
        now_s: float,
        age_s: float = 0.0,
        idle_s: float = 0.0,
        ttl_s: float = inf,
    ) -> Shelved:
        """Add a key that is not there; `make_room` comes first where there is a bound to keep.

        Its entry was put `age_s` ago, and its file not read for `idle_s`.
        """
        assert key not in self._by_key
        self._last += 1
        density = max(0.0, saved_s) / file_bytes
        rank = self._least + density
        shelved = Shelved(
            self._last,
            key,
            nbytes,
            file_bytes,
            cost_s,
            density,
            rank,
            now_s - idle_s,
            now_s - age_s,
        )
        shelved.earlier = self._tail
        if self._tail is None:
            self._head = shelved
        else:
            self._tail.later = shelved
        self._tail = shelved
        self._by_key[key] = self._by_number[shelved.number] = shelved
        self._ranks.add(shelved.number, rank)
        self.end_after(shelved, ttl_s)
        self.used_bytes += file_bytes
        return shelved

    def use(self, shelved: Shelved, now_s: float) -> None:
        """Count one read."""
        if self._by_key.get(shelved.key) is shelved:
            shelved.uses += 1
            shelved.used_s = now_s
            shelved.rank = self._least + shelved.uses * shelved.density
            self._ranks.postpone(shelved.number, shelved.rank)

    def remove(self, shelved: Shelved) -> None:
        """Take an entry away; no effect if it has left already."""
        if self._by_key.get(shelved.key) is shelved:
            self._ranks.remove(shelved.number)
            self._forget(shelved)

    def end_after(self, shelved: Shelved, ttl_s: float) -> None:
        """Have the entry end so long after its put, and not as was said before."""
        if self._by_key.get(shelved.key) is shelved:
            if shelved.expires_s < inf:
                self._ends.remove(shelved.number)
            shelved.expires_s = shelved.created_s + ttl_s
            if ttl_s < inf:
                self._ends.add(shelved.number, shelved.expires_s)

    def take_expired(self, now_s: float, most: int) -> list[Shelved]:
        """Take away up to `most` entries whose time is over."""
        taken = []
        for number in self._ends.take_due(now_s, most):
            shelved = self._by_number[number]
            self._ends.add(number, now_s)
            self.remove(shelved)
            taken.append(shelved)
        return taken

    def has_room(self, file_bytes: int) -> bool:
        """Whether one more entry of so many bytes has room, or nothing can be taken away for it."""
        is_full = self.used_bytes + file_bytes > self.nbytes or len(self) >= MAX_ENTRIES
        return not is_full or not self._by_key

    def make_room(self, file_bytes: int, most: int) -> list[Shelved]:
        """Take away some of those worth least, in `most` steps; `has_room` tells whether to go on.

        A step may find that an entry has been used since, and take none.
        """
        taken: list[Shelved] = []
        for _ in range(most):
            if self.has_room(file_bytes):
                break
            least = self._ranks.next_s
            assert least is not None
            for number in self._ranks.take_due(least, 1):
                shelved = self._by_number[number]
                self._least = max(self._least, shelved.rank)
                self._forget(shelved)
                taken.append(shelved)
        return taken

    def _forget(self, shelved: Shelved) -> None:
        """Unlink an entry. Its own links stay, for an iteration that has come to it."""
        if shelved.earlier is None:
            self._head = shelved.later
        else:
            shelved.earlier.later = shelved.later
        if shelved.later is None:
            self._tail = shelved.earlier
        else:
            shelved.later.earlier = shelved.earlier
        del self._by_key[shelved.key], self._by_number[shelved.number]
        if shelved.expires_s < inf:
            self._ends.remove(shelved.number)
        self.used_bytes -= shelved.file_bytes

    def check(self) -> None:
        """Raise AssertionError unless all views agree. O(n)."""
        self._ranks.check()
        self._ends.check()
        assert len(self._ends) == sum(shelved.expires_s < inf for shelved in self)
        assert [shelved.number for shelved in self] == sorted(self._by_number)
        assert len(self._ranks) == len(self._by_key)
        assert self.used_bytes == sum(shelved.file_bytes for shelved in self)
