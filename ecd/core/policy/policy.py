"""Eviction policies: in which order unread entries of one pool may be evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import ClassVar, NamedTuple, Protocol

from ecd.core.model.entry import Entry

_DENSITY = 1e-9
"""Seconds per byte, about an encoder's; only the change between weighings depends on it."""


class Weighing(NamedTuple):
    """The exponents by which frequency and density weigh: with 0 and 0 all weigh the same."""

    frequency: float
    density: float

    def weight(self, frequency: int, density: float) -> float:
        """The weight of an entry used so often, worth `density` seconds per byte."""
        evened: float = _DENSITY * (density / _DENSITY) ** self.density
        return float(evened * frequency**self.frequency)


class Policy(Protocol):
    """Ranks the entries of one pool. Every operation is O(1) or O(log n).

    Only entries without a holder are ranked; a policy may remember the others.
    """

    @property
    def anchors(self) -> int:
        """Windows of neighbours compared at most, around the coldest entries, for one extent."""

    @property
    def weighing(self) -> Weighing:
        """How entries are ranked now."""

    def admit(self, entry: Entry) -> None:
        """Rank an entry that was just committed."""

    def use(self, entry: Entry, now_s: float) -> None:
        """Count one read of the entry, which may be held; `entry.used_s` is the last one's."""

    def hold(self, entry: Entry) -> None:
        """Take the entry out of the ranking: its first reader came."""

    def let_go(self, entry: Entry) -> None:
        """Rank the entry again: its last reader went."""

    def give_up(self, victims: Sequence[Entry]) -> None:
        """Note that these ranked entries are evicted together, for room; `remove` follows."""

    def remove(self, entry: Entry) -> None:
        """Forget an evicted entry, held or not."""

    def coldest(self) -> Iterator[Entry]:
        """The ranked entries in order of eviction."""

    def warmth(self, entry: Entry) -> float | None:
        """The entry's rank, larger for later eviction; None if it is not ranked."""

    def loss(self, entry: Entry) -> float:
        """The loss of evicting an entry, infinite if it is not ranked.

        A window of the least loss is evicted.
        """


class EntryList:
    """Entries in the order in which they were appended, the coldest first. O(1).

    The list runs through the entries (`Entry.colder`, `Entry.warmer`), two words each. An
    OrderedDict takes 90 bytes for each, and stops the event loop for too long when it grows.
    """

    __slots__ = ("head", "tail")

    def __init__(self) -> None:
        self.head: Entry | None = None
        self.tail: Entry | None = None

    def append(self, entry: Entry) -> None:
        entry.colder = self.tail
        if self.tail is None:
            self.head = entry
        else:
            self.tail.warmer = entry
        self.tail = entry

    def unlink(self, entry: Entry) -> None:
        colder, warmer = entry.colder, entry.warmer
        if colder is None:
            self.head = warmer
        else:
            colder.warmer = warmer
        if warmer is None:
            self.tail = colder
        else:
            warmer.colder = colder
        entry.colder = entry.warmer = None

    def has(self, entry: Entry) -> bool:
        """Whether the entry is linked; it must be in no other list."""
        return entry.colder is not None or entry is self.head

    def __iter__(self) -> Iterator[Entry]:
        entry = self.head
        while entry is not None:
            yield entry
            entry = entry.warmer


class Lru(EntryList):
    """Least recently used first; an entry counts as used until its last reader goes."""

    __slots__ = ()
    anchors: ClassVar[int] = 16
    weighing: ClassVar[Weighing] = Weighing(0, 0)

    admit = let_go = EntryList.append
    hold = EntryList.unlink
    coldest = EntryList.__iter__

    def use(self, entry: Entry, now_s: float) -> None:  # noqa: ARG002
        if entry.warmer is not None:  # ranked, and not the warmest already
            self.unlink(entry)
            self.append(entry)

    def give_up(self, victims: Sequence[Entry]) -> None:
        pass

    def remove(self, entry: Entry) -> None:
        if self.has(entry):
            self.unlink(entry)

    def warmth(self, entry: Entry) -> float | None:
        return entry.used_s if self.has(entry) else None

    def loss(self, entry: Entry) -> float:
        if entry.colder is None and entry is not self.head:  # as `has`, of which plans ask much
            return inf
        return entry.block.nbytes
