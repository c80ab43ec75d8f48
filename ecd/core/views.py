"""Read-only questions to the cache: none changes an entry, or counts as a use of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from ecd.core.costs import Costs
from ecd.core.counters import Counters
from ecd.core.entries import Entries
from ecd.core.model.board import Board
from ecd.core.model.types import (
    Content,
    EntryId,
    EntryInfo,
    Extent,
    Held,
    Key,
    NamespaceSum,
    SessionId,
)
from ecd.core.pins import Pins
from ecd.core.pool.pool import FOR_ROOM
from ecd.core.readers import Readers
from ecd.core.retention import Book
from ecd.core.sessions import Sessions
from ecd.core.writers import Writers

LEASES_AT_A_TIME = 1024
"""Leases summed up in one step, of up to 65,536: each takes some 0.3 us."""


class Views:
    """Answers what a cache holds, and what it would evict next."""

    def __init__(
        self,
        entries: Entries,
        sessions: Sessions,
        pins: Pins,
        readers: Readers,
        writers: Writers,
        board: Board,
        book: Book,
        costs: Costs,
        counters: Counters,
    ) -> None:
        self._entries, self._sessions, self._pins = entries, sessions, pins
        self._readers, self._writers = readers, writers
        self._board, self._book, self._costs = board, book, costs
        self._counters = counters

    # -- of one key ----------------------------------------------------------------------------

    def contains(self, key: Key) -> bool:
        return self._entries.stored(key) is not None

    def info(self, key: Key) -> EntryInfo | None:
        """The key's nearest copy, if it is stored."""
        entry = self._entries.stored(key)
        return None if entry is None else entry.info()

    def extent(self, key: Key) -> Extent | None:
        """The extent of the key's nearest copy, if it is stored."""
        entry = self._entries.stored(key)
        return None if entry is None else entry.extent

    def is_being_written(self, key: Key) -> bool:
        """Whether the key is reserved or, as `scan_claims` has seen, claimed."""
        return self._entries.writing(key) is not None or self._board.is_claimed(key)

    def encode_s(self, key: Key, content: Content) -> float | None:
        """The seconds to encode the content, by the fit; None if no producer reported any."""
        seconds, is_known = self._costs.of(key.namespace, content)
        return seconds if is_known else None

    def cost_s(self, key: Key, content: Content) -> float:
        """As `encode_s`; without reports since the start, the entry's own report, else a guess."""
        seconds, is_known = self._costs.of(key.namespace, content)
        return seconds if is_known else content.cost_s or seconds

    def put_age_s(self, entry: EntryId, now_s: float) -> float:
        """How long ago the entry was put, on whichever node; 0 if it has gone."""
        found = self._entries.get(entry)
        if found is None:
            return 0.0
        return now_s - (found.created_s if found.terms is None else found.terms.put_s)

    # -- of all --------------------------------------------------------------------------------

    def page(self, after: EntryId | None, limit: int) -> tuple[list[EntryInfo], EntryId | None]:
        """Up to `limit` committed entries in order of commit, and where the next page starts.

        Copies are left out.
        """
        entries, next_after = self._entries.page(after, limit)
        return [entry.info() for entry in entries if not entry.replica_in], next_after

    def next_victims(self, limit: int) -> list[EntryInfo]:
        """Up to `limit` entries that eviction for room would choose next, without copies."""
        own = (pool for pool in self._entries.pools if not pool.holds_replicas)
        victims = chain.from_iterable(pool.next_victims() for pool in own)
        return [entry.info() for entry in islice(victims, limit)]

    def namespaces(self, most: int) -> tuple[dict[str, NamespaceSum], NamespaceSum]:
        """Up to `most` of the largest namespaces, the largest first, and the sum of the others.

        Of more than LOOKED_AT namespaces some are not considered.
        """
        return self._entries.namespaces(most)

    def all_sessions(self) -> list[SessionId]:
        """Every session, open or leaving: clients', other nodes' and the daemon's own."""
        return list(self._sessions)

    def held_by(self, session: SessionId) -> Iterator[Held]:
        """Sum up in steps what the session holds; only the last step's sum is complete."""
        pinned, starts = self._board.pinned_by(session, self._entries.ids())
        pins = {entry.id: entry for entry in map(self._entries.readable, pinned) if entry}
        pins |= {entry.id: entry for entry in map(self._pins.entry_at, starts) if entry}
        nbytes = {number: entry.block.nbytes for number, entry in pins.items()}
        leases, count = self._readers.leases.of(session), 0
        for start in range(0, len(leases), LEASES_AT_A_TIME):
            some = map(self._readers.leases.get, leases[start : start + LEASES_AT_A_TIME])
            entries = [lease.entry for lease in some if lease]  # the rest has ended meanwhile
            nbytes |= {entry.id: entry.block.nbytes for entry in entries}
            count += len(entries)
            yield Held()
        reserved = map(self._entries.get, self._sessions.reservations_of(session))
        yield Held(
            entries=len(nbytes),
            leased_bytes=sum(nbytes.values()),
            leases=count,
            pins=len(pins),
            reserved_bytes=sum(entry.block.nbytes for entry in reserved if entry),
            granted_bytes=sum(pool.grants.nbytes_of(session) for pool in self._entries.pools),
        )

    def has_spare(self, namespace: str, nbytes: int) -> bool:
        """Whether `reserve` finds room in the first pool for which nothing is ever evicted."""
        pool = self._entries.pools[0]
        is_within = self._book.excess_bytes(namespace, pool.rounded_bytes(nbytes)) <= 0
        return is_within and pool.has_spare(nbytes)

    @property
    def is_reserving(self) -> bool:
        """Whether a key is, or is about to be, reserved: puts wait for their answers meanwhile."""
        return self._writers.are_announced or self._entries.being_written > 0

    @property
    def evicted_for_room(self) -> int:
        """Entries evicted since the start, without those evicted on request and by age."""
        each = (self._counters, self._counters.bench)
        return sum(counted.evictions[reason] for counted in each if counted for reason in FOR_ROOM)

    @property
    def entries(self) -> int:
        return len(self._entries)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def leases(self) -> int:
        """Leases and the pins that scans have found."""
        return len(self._readers.leases) + len(self._pins.held)

    @property
    def waits(self) -> int:
        return len(self._readers.waits)

    @property
    def lease_ttl_s(self) -> float:
        return self._readers.leases.ttl_s
