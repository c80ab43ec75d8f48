"""Hazard pointers: retire, scan, reclaim (Michael, IEEE TPDS 15(6), 2004).

Clients pin what they read without a lease. An evicted entry is hidden and retired; its extent is
reclaimed after a whole scan of the pins, begun after it was hidden, that did not find it. A scan
reads some sessions' pages in each step: a thousand pages take longer than one turn may.

A put that is not listed yet has no entry: its reader pins the start of its extent. No such pin
holds that a scan begun after the put was taken does not find, so starts are known until then, and
for as long as they are pinned or their entries retired.

A reader may pin by its number the entry that it has leased, listed or not, and then end the lease.
So an evicted entry whose lease ends is retired anew: no scan that began before can have to have
found that pin.
"""

from __future__ import annotations

from collections.abc import Iterator

from ecd.core.entries import Entries
from ecd.core.model.board import Board, Portion
from ecd.core.model.entry import Entry
from ecd.core.model.states import EntryEvent, EntryState
from ecd.core.model.types import EntryId, Start

ENDED_AT_A_TIME = 256
"""Pins ended by one step of a scan: each takes up to 4 us, as it may free an extent."""


class Pins:
    """The pins that scans have found, and the evicted entries that wait for a scan."""

    def __init__(self, board: Board, entries: Entries) -> None:
        self.held: set[EntryId] = set()
        """Entries that the last whole scan, or the one under way, found pinned."""
        self._board, self._entries = board, entries
        self._scan: Iterator[Portion] | None = None
        self._seen: set[EntryId] = set()  # entries that the scan under way found pinned
        self._ended: list[EntryId] = []  # entries in `held` whose pins are over
        self._scanned: dict[EntryId, Entry] = {}  # retired before the scan under way began
        self._retired: dict[EntryId, Entry] = {}  # retired since then: the next scan decides
        self._starts: dict[Start, EntryId] = {}  # of entries retired, or pinned by their start
        self._taken: dict[Start, EntryId] = {}  # of puts taken since the last scan began
        self._scanned_taken: dict[Start, EntryId] = {}  # of puts taken before that

    def retire(self, entry: Entry) -> None:
        """Keep a hidden entry's extent until a scan shows that no reader can hold it."""
        self._retired[entry.id] = entry
        self._starts[entry.extent.start] = entry.id

    def take(self, entry: Entry) -> None:
        """Note a put without a call: it may be pinned by the start of its extent already."""
        self._taken[entry.extent.start] = entry.id

    def keeps(self, entry: EntryId) -> bool:
        """Whether the entry is retired and not yet decided by a scan."""
        return entry in self._scanned or entry in self._retired

    def entry_at(self, start: Start) -> Entry | None:
        """The entry of an extent that is pinned by its start, if the put is stored."""
        for known in (self._starts, self._scanned_taken, self._taken):
            entry = self._entries.readable(known[start]) if start in known else None
            if entry is not None and entry.extent.start == start:
                return entry
        return None

    @property
    def is_settled(self) -> bool:
        """Whether no scan is under way and none is needed."""
        return self._scan is None and not self._retired and not self._ended

    def step(self) -> bool:
        """Continue the scan under way, or begin one; returns `is_settled`."""
        if self._ended:
            self._end_some()
        else:
            self._read_on()
        return self.is_settled

    def end_lease(self, entry: Entry) -> None:
        """End one lease of the entry, whose reader may have pinned it meanwhile."""
        if entry.state is EntryState.DOOMED:
            self._retired[entry.id] = entry
        self.let_go(entry)

    def let_go(self, entry: Entry) -> None:
        """End one hold of the entry, and reclaim its extent if no reader can be left."""
        self._entries.pool_of(entry).let_go(entry)
        if entry.leases == 0 and entry.state is EntryState.DOOMED and not self.keeps(entry.id):
            self._reclaim(entry)

    def _read_on(self) -> None:
        if self._scan is None:
            self._scanned, self._retired = self._retired, {}
            self._scanned_taken, self._taken = self._taken, {}
            wanted = frozenset((*self._starts, *self._scanned_taken))
            self._scan, self._seen = self._board.pinned(self._entries.ids(), wanted), set()
        pinned, is_last, starts = next(self._scan)
        for start in starts:
            named = self._starts.get(start) or self._scanned_taken.get(start)
            entry = None if named is None else self._entries.readable(named)
            if entry is not None and entry.extent.start == start:
                self._starts[start] = entry.id
                pinned.add(entry.id)
        self._seen |= pinned
        for begun in pinned - self.held:
            entry = self._entries.readable(begun)
            if entry is not None:
                self.held.add(begun)
                self._entries.pool_of(entry).hold(entry)
        if is_last:
            decided, self._scanned, self._scan = self._scanned, {}, None
            self._ended = list(self.held - self._seen)
            self._end_some()
            for entry in decided.values():
                is_over = entry.leases == 0 and entry.state is EntryState.DOOMED
                if is_over and not self.keeps(entry.id):
                    self._reclaim(entry)

    def _end_some(self) -> None:
        ended, self._ended = self._ended[:ENDED_AT_A_TIME], self._ended[ENDED_AT_A_TIME:]
        self.held.difference_update(ended)
        for each in ended:
            entry = self._entries.get(each)
            assert entry is not None, f"pinned entry {each} vanished"
            if entry.state is EntryState.COMMITTED:
                self._starts.pop(entry.extent.start, None)
            self.let_go(entry)

    def _reclaim(self, entry: Entry) -> None:
        del self._starts[entry.extent.start]
        entry.step(EntryEvent.LAST_RELEASE)
        self._entries.free(entry)
