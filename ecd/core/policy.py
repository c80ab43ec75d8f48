"""Eviction policies: in which order unread entries of one pool may be evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from ecd.core.entry import Entry


class Policy(Protocol):
    """Ranks the entries of one pool. Every operation is O(1) or O(log n).

    Only entries that nobody holds are ranked; a policy may remember the others.
    """

    anchors: ClassVar[int]
    """Windows of neighbours compared, around as many of the coldest entries, for one extent."""

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
        """The ranked entries, the first to be evicted first."""

    def warmth(self, entry: Entry) -> float | None:
        """The entry's rank, larger for later eviction; None if it is not ranked."""

    def loss(self, entry: Entry) -> float:
        """What evicting a ranked entry gives up: a window of the least loss is evicted."""


class Lru:
    """Least recently used first; an entry counts as used until its last reader goes.

    The list runs through the entries (`Entry.colder`, `Entry.warmer`), two words each. An
    OrderedDict takes 90 bytes for each, and stops the event loop for too long when it grows.
    """

    anchors: ClassVar[int] = 16

    def __init__(self) -> None:
        self._coldest: Entry | None = None
        self._warmest: Entry | None = None

    def admit(self, entry: Entry) -> None:
        entry.colder = self._warmest
        if self._warmest is None:
            self._coldest = entry
        else:
            self._warmest.warmer = entry
        self._warmest = entry

    def use(self, entry: Entry, now_s: float) -> None:  # noqa: ARG002
        if entry.warmer is not None:  # ranked, and not the warmest already
            self.hold(entry)
            self.admit(entry)

    def hold(self, entry: Entry) -> None:
        colder, warmer = entry.colder, entry.warmer
        if colder is None:
            self._coldest = warmer
        else:
            colder.warmer = warmer
        if warmer is None:
            self._warmest = colder
        else:
            warmer.colder = colder
        entry.colder = entry.warmer = None

    let_go = admit

    def give_up(self, victims: Sequence[Entry]) -> None:
        pass

    def remove(self, entry: Entry) -> None:
        if self._is_ranked(entry):
            self.hold(entry)

    def coldest(self) -> Iterator[Entry]:
        entry = self._coldest
        while entry is not None:
            yield entry
            entry = entry.warmer

    def warmth(self, entry: Entry) -> float | None:
        return entry.used_s if self._is_ranked(entry) else None

    def loss(self, entry: Entry) -> float:
        return entry.block.nbytes

    def _is_ranked(self, entry: Entry) -> bool:
        return entry.colder is not None or entry is self._coldest
