"""Entries by key and by age of commit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field

from ecd.core.allocator import Block
from ecd.core.states import ENTRY, EntryEvent, EntryState, apply
from ecd.core.types import Content, EntryId, Extent, Key, SessionId


@dataclass(slots=True, eq=False)
class Entry:
    """One entry's life. Its state changes only through `step`."""

    id: EntryId
    namespace: str
    mm_hash: str
    content: Content
    block: Block = field(repr=False)
    writer: SessionId
    state: EntryState = EntryState.RESERVED
    leases: int = 0
    hits: int = 0
    created_s: float = 0.0
    used_s: float = 0.0
    checksum: int | None = None  # unknown until somebody has read all of it
    colder: Entry | None = field(default=None, repr=False)  # neighbours in the policy's order
    warmer: Entry | None = field(default=None, repr=False)

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.mm_hash)

    @property
    def extent(self) -> Extent:
        return self.block.extent(self.content.nbytes)

    def step(self, event: EntryEvent) -> None:
        self.state = apply(ENTRY, self.state, event)


class Index:
    """Every entry that owns an extent, and which of them answers for its key.

    A key has at most one committed entry and at most one open reservation. Doomed and orphaned
    entries answer for nothing, but their extents are still taken.
    """

    def __init__(self) -> None:
        self._by_id: dict[EntryId, Entry] = {}
        self._stored: dict[str, dict[str, Entry]] = {}  # by namespace, by mm_hash
        self._count = 0
        self._writing: dict[Key, Entry] = {}
        self._order: list[EntryId] = []  # committed ids, ascending, some of them dead
        self._last_id = 0

    def next_id(self) -> EntryId:
        self._last_id += 1
        return EntryId(self._last_id)

    def add(self, entry: Entry) -> None:
        """Take in a new reservation."""
        self._by_id[entry.id] = entry
        entry.block.owner = entry
        self._writing[entry.key] = entry

    def remove(self, entry: Entry) -> None:
        """Forget an entry whose extent was given back."""
        del self._by_id[entry.id]
        entry.block.owner = None

    def publish(self, entry: Entry) -> None:
        """From now on `entry` answers for its key. Its id is new, so that ids order by commit."""
        del self._writing[entry.key]
        del self._by_id[entry.id]
        entry.id = self.next_id()
        self._by_id[entry.id] = entry
        self._stored.setdefault(entry.namespace, {})[entry.mm_hash] = entry
        self._count += 1
        self._order.append(entry.id)

    def stop_writing(self, entry: Entry) -> None:
        """The reservation is over: its key is free for another writer."""
        del self._writing[entry.key]

    def hide(self, entry: Entry) -> None:
        """`entry` answers for its key no longer."""
        of_namespace = self._stored[entry.namespace]
        del of_namespace[entry.mm_hash]
        if not of_namespace:
            del self._stored[entry.namespace]
        self._count -= 1
        if len(self._order) > 64 and len(self._order) > 2 * self._count:
            self._order = [entry for entry in self._order if entry in self._by_id]

    def get(self, entry: EntryId) -> Entry | None:
        return self._by_id.get(entry)

    def is_readable(self, entry: EntryId) -> bool:
        """Whether somebody may still read it: it is stored, or was when its reader found it."""
        found = self._by_id.get(entry)
        return found is not None and found.state in (EntryState.COMMITTED, EntryState.DOOMED)

    def ids(self) -> KeysView[EntryId]:
        """Of all that own an extent, as they are whenever this is looked at."""
        return self._by_id.keys()

    def stored(self, key: Key) -> Entry | None:
        of_namespace = self._stored.get(key.namespace)
        return None if of_namespace is None else of_namespace.get(key.mm_hash)

    def writing(self, key: Key) -> Entry | None:
        return self._writing.get(key)

    @property
    def reservations(self) -> int:
        """How many keys are being written."""
        return len(self._writing)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        """How many entries are committed."""
        return self._count

    def page(self, after: EntryId | None, limit: int) -> tuple[list[Entry], EntryId | None]:
        """Up to `limit` committed entries in order of commit, and where the next page starts.

        None instead of a place: that was the last page. O(log n + entries passed).
        """
        start = 0 if after is None else bisect_right(self._order, after)
        found: list[Entry] = []
        for position in range(start, len(self._order)):
            if len(found) == limit:
                return found, found[-1].id
            entry = self._by_id.get(self._order[position])
            if entry is not None and entry.state is EntryState.COMMITTED:
                found.append(entry)
        return found, None

    def check(self) -> None:
        """Raise AssertionError unless all views of the entries agree. O(n log n)."""
        for entry in self._by_id.values():
            assert entry.block.owner is entry
            assert not entry.block.is_free
            assert (self.stored(entry.key) is entry) == (entry.state is EntryState.COMMITTED)
            assert (self._writing.get(entry.key) is entry) == (entry.state is EntryState.RESERVED)
        assert all(self._stored.values()), "an empty group was kept"
        stored = [entry for group in self._stored.values() for entry in group.values()]
        assert len(stored) == self._count
        for entry in (*stored, *self._writing.values()):
            assert self._by_id[entry.id] is entry
        assert self._order == sorted(self._order)
        assert {entry.id for entry in stored} <= set(self._order)
