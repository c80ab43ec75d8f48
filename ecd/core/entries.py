"""Entries by id, by key and by age of commit.

Only this file knows that a key may have several copies, each an entry in a pool of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, KeysView, Sequence
from heapq import nlargest
from itertools import islice
from operator import itemgetter

from ecd.core.model.entry import Entry
from ecd.core.model.states import EntryState
from ecd.core.model.types import EntryId, Key, NamespaceSum
from ecd.core.pool.pool import Pool

LOOKED_AT = 4096
"""Namespaces among which the largest are searched for: the search blocks the event loop."""
IN_A_GROUP = 512
"""Most ids in one group of the order of commit: one list of all would be moved at once."""


class Entries:
    """Every entry that owns an extent.

    In each pool a key has at most one committed entry and at most one open reservation. Doomed
    and orphaned entries are found by id alone; they still own their extents.
    """

    def __init__(self, pools: Sequence[Pool]) -> None:
        """`pools` are at least one, the nearest to readers first, with distinct numbers."""
        self.pools = tuple(pools)
        self._numbered = {pool.number: pool for pool in pools}
        assert len(self._numbered) == len(pools) > 0, "pools need distinct numbers"
        self._nearness = {number: place for place, number in enumerate(self._numbered)}
        self._by_id: dict[EntryId, Entry] = {}
        self._stored: dict[str, dict[str, Entry]] = {}  # nearest copy, by namespace, by mm_hash
        self._sums: dict[str, NamespaceSum] = {}
        self._count = self._nbytes = 0
        self._writing: dict[Key, Entry] = {}  # reservation in the nearest pool
        self._replicating: dict[Key, Entry] = {}  # the same of replicas, for which nobody waits
        self._replicas = 0  # committed
        self._order: list[list[EntryId]] = []  # committed ids, ascending, in groups
        self._changes: dict[Key, bool] | None = None
        self._last_id = 0

    def next_id(self) -> EntryId:
        self._last_id += 1
        return EntryId(self._last_id)

    def pool(self, number: int) -> Pool | None:
        return self._numbered.get(number)

    def pool_of(self, entry: Entry) -> Pool:
        return self._numbered[entry.block.allocator.pool_number]

    # -- changes -------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Add a new reservation, or an entry that is doomed from the start."""
        self._by_id[entry.id] = entry
        entry.block.owner = entry
        if entry.state is EntryState.RESERVED:
            writing, key = self._writing_like(entry), entry.key
            writing[key] = self._linked(writing.get(key), entry)

    def free(self, entry: Entry) -> None:
        """Forget an entry and give its extent back."""
        del self._by_id[entry.id]
        entry.block.owner = None
        self.pool_of(entry).allocator.free(entry.block)

    def publish(self, entry: Entry) -> None:
        """Make a reservation a committed copy, with a new id: ids are in order of commit."""
        self.stop_writing(entry)
        del self._by_id[entry.id]
        entry.id = self.next_id()
        self._by_id[entry.id] = entry
        of_namespace = self._stored.setdefault(entry.namespace, {})
        of_namespace[entry.mm_hash] = self._linked(of_namespace.get(entry.mm_hash), entry)
        self._count += 1
        if not self._order or len(self._order[-1]) == IN_A_GROUP:
            self._order.append([])
        self._order[-1].append(entry.id)
        if entry.replica_in:
            self._replicas += 1
            return
        self._add_up(entry, 1)
        if self._changes is not None:
            self._changes[entry.key] = True

    def stop_writing(self, entry: Entry) -> None:
        """End a reservation: another writer may take its key in its pool."""
        writing, key = self._writing_like(entry), entry.key
        nearest = _unlinked(writing.pop(key), entry)
        if nearest is not None:
            writing[key] = nearest

    def hide(self, entry: Entry) -> None:
        """Unlink a committed copy from its key."""
        of_namespace = self._stored[entry.namespace]
        nearest = _unlinked(of_namespace.pop(entry.mm_hash), entry)
        if nearest is not None:
            of_namespace[entry.mm_hash] = nearest
        elif not of_namespace:
            del self._stored[entry.namespace]
        self._count -= 1
        if entry.replica_in:
            self._replicas -= 1
        else:
            self._add_up(entry, -1)
            if self._changes is not None:
                self._changes[entry.key] = nearest is not None
        place = self._group_of(entry.id)
        group = self._order[place]
        del group[bisect_left(group, entry.id)]
        if not group:
            del self._order[place]

    def take_changes(self) -> dict[Key, bool]:
        """The keys stored (True) or gone since the last call; the first call starts the log."""
        changes, self._changes = self._changes, {}
        return changes or {}

    # -- finding -------------------------------------------------------------------------------

    def get(self, entry: EntryId) -> Entry | None:
        return self._by_id.get(entry)

    def readable(self, entry: EntryId) -> Entry | None:
        """The entry, if a reader may have it: committed, or doomed after the reader found it."""
        found = self._by_id.get(entry)
        if found is None or found.state not in (EntryState.COMMITTED, EntryState.DOOMED):
            return None
        return found

    def ids(self) -> KeysView[EntryId]:
        """A live view of the ids of all entries that own an extent."""
        return self._by_id.keys()

    def stored(self, key: Key) -> Entry | None:
        """The key's nearest committed copy."""
        of_namespace = self._stored.get(key.namespace)
        return None if of_namespace is None else of_namespace.get(key.mm_hash)

    def copies(self, key: Key) -> Iterator[Entry]:
        """The key's committed copies, the nearest first."""
        return _chain(self.stored(key))

    def writing(self, key: Key) -> Entry | None:
        """The key's open reservation in the nearest pool that has one."""
        return self._writing.get(key)

    def stored_in(self, pool: Pool, key: Key) -> Entry | None:
        return _in_pool(pool.number, self.stored(key))

    def writing_in(self, pool: Pool, key: Key) -> Entry | None:
        writing = self._replicating if pool.holds_replicas else self._writing
        return _in_pool(pool.number, writing.get(key))

    def replicas_of(self, entry: Entry) -> list[Entry]:
        """The committed replicas of a committed entry."""
        if entry.replica_in or not self._replicas:
            return []
        return [replica for replica in self.copies(entry.key) if replica.replica_in]

    def use(self, entry: Entry, now_s: float, *, for_another: bool = False) -> bool:
        """Count one read of an entry, which keeps all copies of its key; as `Pool.use`."""
        is_handover = self.pool_of(entry).use(entry, now_s, for_another=for_another)
        for copy in self.copies(entry.key) if self._replicas else ():
            if copy is not entry:
                self.pool_of(copy).use(copy, now_s)
        return is_handover

    def namespaces(self, most: int) -> tuple[dict[str, NamespaceSum], NamespaceSum]:
        """Up to `most` of the largest of LOOKED_AT namespaces, and the sum of all others."""
        some = islice(self._sums.items(), LOOKED_AT)
        largest = dict(nlargest(most, some, key=lambda each: each[1].nbytes))
        entries, nbytes = len(self), self._nbytes
        for each in largest.values():
            entries, nbytes = entries - each.entries, nbytes - each.nbytes
        return largest, NamespaceSum(entries, nbytes)

    def are_in(self, namespace: str) -> bool:
        """Whether the namespace has entries."""
        return namespace in self._sums

    @property
    def being_written(self) -> int:
        """How many keys have an open reservation, those of replicas apart."""
        return len(self._writing)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        """The number of committed entries, replicas apart."""
        return self._count - self._replicas

    def page(self, after: EntryId | None, limit: int) -> tuple[list[Entry], EntryId | None]:
        """Up to `limit` committed entries in order of commit, and where the next page starts.

        The second value is None after the last page. O(log n + limit).
        """
        after = EntryId(0) if after is None else after
        found: list[Entry] = []
        for place in range(max(0, self._group_of(after)), len(self._order)):
            group = self._order[place]
            for each in group[bisect_right(group, after) :]:
                if len(found) == limit:
                    return found, found[-1].id
                found.append(self._by_id[each])
        return found, None

    # -- steps ---------------------------------------------------------------------------------

    def _group_of(self, entry: EntryId) -> int:
        """The place of the only group that may have the id; -1: it comes before all."""
        return bisect_right(self._order, entry, key=itemgetter(0)) - 1

    def _add_up(self, entry: Entry, sign: int) -> None:
        before, nbytes = self._sums.get(entry.namespace, NamespaceSum()), entry.content.nbytes
        after = NamespaceSum(before.entries + sign, before.nbytes + sign * nbytes)
        self._sums[entry.namespace] = after
        self._nbytes += sign * nbytes
        if not after.entries:
            del self._sums[entry.namespace]

    def _writing_like(self, entry: Entry) -> dict[Key, Entry]:
        return self._replicating if entry.replica_in else self._writing

    def _linked(self, nearest: Entry | None, entry: Entry) -> Entry:
        """Add an entry to its key's chain; returns the chain's nearest."""
        if nearest is None:
            return entry
        if self._nearness[entry.pool] < self._nearness[nearest.pool]:
            entry.farther = nearest
            return entry
        nearest.farther = self._linked(nearest.farther, entry)
        return nearest

    def check(self) -> None:
        """Raise AssertionError unless all views of the entries agree. O(n log n)."""
        for entry in self._by_id.values():
            assert entry.block.owner is entry
            assert not entry.block.is_free
            pool, key = self.pool_of(entry), entry.key
            assert entry.replica_in == (pool.number if pool.holds_replicas else 0)
            stored, writing = self.stored_in(pool, key), self.writing_in(pool, key)
            assert (stored is entry) == (entry.state is EntryState.COMMITTED)
            assert (writing is entry) == (entry.state is EntryState.RESERVED)
        assert all(self._stored.values()), "an empty group was kept"
        listed = [[*_chain(e)] for group in self._stored.values() for e in group.values()]
        assert not any(chain[0].replica_in for chain in listed), "a replica of nothing"
        reserved = (*self._writing.values(), *self._replicating.values())
        for chain in (*listed, *map(list, map(_chain, reserved))):
            places = [self._nearness[entry.pool] for entry in chain]
            assert places == sorted(set(places)), "copies out of order, or two in one pool"
            assert all(self._by_id[entry.id] is entry for entry in chain)
        committed = {e.id for e in self._by_id.values() if e.state is EntryState.COMMITTED}
        assert len(committed) == self._count
        assert self._replicas == sum(self._by_id[entry].replica_in > 0 for entry in committed)
        sums: dict[str, list[int]] = {}
        for entry in map(self._by_id.__getitem__, committed):
            if not entry.replica_in:
                sums.setdefault(entry.namespace, []).append(entry.content.nbytes)
        assert self._sums == {name: (len(sizes), sum(sizes)) for name, sizes in sums.items()}
        assert self._nbytes == sum(map(sum, sums.values()))
        assert [each for group in self._order for each in group] == sorted(committed)
        assert all(0 < len(group) <= IN_A_GROUP for group in self._order)


def _chain(nearest: Entry | None) -> Iterator[Entry]:
    while nearest is not None:
        yield nearest
        nearest = nearest.farther


def _in_pool(pool: int, nearest: Entry | None) -> Entry | None:
    while nearest is not None and nearest.pool != pool:
        nearest = nearest.farther
    return nearest


def _unlinked(nearest: Entry, entry: Entry) -> Entry | None:
    """Take an entry out of its key's chain; returns the chain's nearest."""
    if nearest is entry:
        farther, entry.farther = entry.farther, None
        return farther
    assert nearest.farther is not None, f"{entry} is not in its key's chain"
    nearest.farther = _unlinked(nearest.farther, entry)
    return nearest
