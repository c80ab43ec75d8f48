"""The catalog of the disk tier: what lies on disk, and what leaves it for room.

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
"""Limit of entries: larger tables would block the event loop for too long when they grow."""


@dataclass(slots=True, eq=False)
class OnDisk:
    """One entry on disk; `file_bytes` is the size of its file."""

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
    earlier: OnDisk | None = field(default=None, repr=False)  # neighbours in order of arrival
    later: OnDisk | None = field(default=None, repr=False)


class Catalog:
    """The entries of one disk tier. Every operation is O(log n)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.used_bytes = nbytes, 0
        self._by_key: dict[Key, OnDisk] = {}
        self._by_number: dict[int, OnDisk] = {}
        self._ranks: Deadlines[int] = Deadlines()
        self._ends: Deadlines[int] = Deadlines()
        self._least = 0.0  # L
        self._last = 0
        self._head: OnDisk | None = None
        self._tail: OnDisk | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[OnDisk]:
        """In order of arrival. Entries may come and go meanwhile, and none is copied before."""
        on_disk = self._head
        while on_disk is not None:
            yield on_disk
            on_disk = on_disk.later

    def get(self, key: Key) -> OnDisk | None:
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
    ) -> OnDisk:
        """Add a key that is not there; `make_room` comes first where there is a bound to keep.

        Its entry was put `age_s` ago, and its file not read for `idle_s`.
        """
        assert key not in self._by_key
        self._last += 1
        density = max(0.0, saved_s) / file_bytes
        rank = self._least + density
        on_disk = OnDisk(
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
        on_disk.earlier = self._tail
        if self._tail is None:
            self._head = on_disk
        else:
            self._tail.later = on_disk
        self._tail = on_disk
        self._by_key[key] = self._by_number[on_disk.number] = on_disk
        self._ranks.add(on_disk.number, rank)
        self.end_after(on_disk, ttl_s)
        self.used_bytes += file_bytes
        return on_disk

    def use(self, on_disk: OnDisk, now_s: float) -> None:
        """Count one read."""
        if self._by_key.get(on_disk.key) is on_disk:
            on_disk.uses += 1
            on_disk.used_s = now_s
            on_disk.rank = self._least + on_disk.uses * on_disk.density
            self._ranks.postpone(on_disk.number, on_disk.rank)

    def remove(self, on_disk: OnDisk) -> None:
        """Remove an entry; no effect if it has left already."""
        if self._by_key.get(on_disk.key) is on_disk:
            self._ranks.remove(on_disk.number)
            self._forget(on_disk)

    def end_after(self, on_disk: OnDisk, ttl_s: float) -> None:
        """Set the age, counted from the put, at which the entry expires."""
        if self._by_key.get(on_disk.key) is on_disk:
            if on_disk.expires_s < inf:
                self._ends.remove(on_disk.number)
            on_disk.expires_s = on_disk.created_s + ttl_s
            if ttl_s < inf:
                self._ends.add(on_disk.number, on_disk.expires_s)

    def take_expired(self, now_s: float, most: int) -> list[OnDisk]:
        """Remove up to `most` expired entries."""
        taken = []
        for number in self._ends.take_due(now_s, most):
            on_disk = self._by_number[number]
            self._ends.add(number, now_s)
            self.remove(on_disk)
            taken.append(on_disk)
        return taken

    def has_room(self, file_bytes: int) -> bool:
        """Whether an entry of this size has room, or no other can be removed for it."""
        is_full = self.used_bytes + file_bytes > self.nbytes or len(self) >= MAX_ENTRIES
        return not is_full or not self._by_key

    def make_room(self, file_bytes: int, most: int) -> list[OnDisk]:
        """Remove entries that are worth least, in `most` steps; `has_room` tells whether to go on.

        A step may find that an entry has been used since, and remove none.
        """
        taken: list[OnDisk] = []
        for _ in range(most):
            if self.has_room(file_bytes):
                break
            least = self._ranks.next_s
            assert least is not None
            for number in self._ranks.take_due(least, 1):
                on_disk = self._by_number[number]
                self._least = max(self._least, on_disk.rank)
                self._forget(on_disk)
                taken.append(on_disk)
        return taken

    def _forget(self, on_disk: OnDisk) -> None:
        """Unlink an entry. Its own links stay, for an iteration that has come to it."""
        if on_disk.earlier is None:
            self._head = on_disk.later
        else:
            on_disk.earlier.later = on_disk.later
        if on_disk.later is None:
            self._tail = on_disk.earlier
        else:
            on_disk.later.earlier = on_disk.earlier
        del self._by_key[on_disk.key], self._by_number[on_disk.number]
        if on_disk.expires_s < inf:
            self._ends.remove(on_disk.number)
        self.used_bytes -= on_disk.file_bytes

    def check(self) -> None:
        """Raise AssertionError unless all views agree. O(n)."""
        self._ranks.check()
        self._ends.check()
        assert len(self._ends) == sum(on_disk.expires_s < inf for on_disk in self)
        assert [on_disk.number for on_disk in self] == sorted(self._by_number)
        assert len(self._ranks) == len(self._by_key)
        assert self.used_bytes == sum(on_disk.file_bytes for on_disk in self)
