"""Who reads what without a lease, and what may be reused: retire, scan, reclaim.

A scan reads the pages of all sessions, some of them at a time, as a thousand pages take longer
than one turn may. An extent is reused after a whole scan that began when its entry was hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ecd.core.clients import Clients, Portion
from ecd.core.index import Entry, Index
from ecd.core.types import EntryId

ENDED_AT_A_TIME = 256
"""Pins found to be over, in one step: each takes up to 4 us, as its extent may become free."""


@dataclass(frozen=True)
class Found:
    """By one step of a scan: who is pinned, no longer pinned, or not kept by the scan any more."""

    begun: Collection[EntryId] = ()
    ended: Collection[EntryId] = ()
    decided: Collection[Entry] = ()


class Pins:
    """The scan that is under way, what it decides, and what the last one found."""

    def __init__(self, clients: Clients, index: Index) -> None:
        self.held: set[EntryId] = set()
        """Entries that the last whole scan, or the one under way, has found pinned."""
        self._clients, self._index = clients, index
        self._scan: Iterator[Portion] | None = None
        self._seen: set[EntryId] = set()
        self._ended: list[EntryId] = []  # pins that are over, of entries still held
        self._scanned: dict[EntryId, Entry] = {}  # hidden before the scan under way began
        self._retired: dict[EntryId, Entry] = {}  # hidden since: the next scan decides them

    def retire(self, entry: Entry) -> None:
        """The entry was hidden: keep its extent until `step` gives it back."""
        self._retired[entry.id] = entry

    def keeps(self, entry: EntryId) -> bool:
        """Whether a reader of this entry may be one that no scan has seen yet."""
        return entry in self._scanned or entry in self._retired

    @property
    def is_settled(self) -> bool:
        """No scan is under way, and there is nothing that one has yet to decide."""
        return self._scan is None and not self._retired and not self._ended

    def step(self) -> Found:
        """Go on with the scan, or begin one."""
        if self._ended:
            return Found(ended=self._end_some())
        if self._scan is None:
            self._scan, self._seen = self._clients.pinned(self._index.ids()), set()
            self._scanned, self._retired = self._retired, {}
        pinned, is_last = next(self._scan)
        self._seen |= pinned
        begun = [entry for entry in pinned - self.held if self._index.is_readable(entry)]
        self.held.update(begun)
        if not is_last:
            return Found(begun)
        decided = list(self._scanned.values())
        self._scan, self._scanned = None, {}
        self._ended = list(self.held - self._seen)
        return Found(begun, self._end_some(), decided)

    def _end_some(self) -> list[EntryId]:
        ended, self._ended = self._ended[:ENDED_AT_A_TIME], self._ended[ENDED_AT_A_TIME:]
        self.held.difference_update(ended)
        return ended
