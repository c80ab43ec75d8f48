"""Writers: reservations, which sessions may write until commit, and grants ahead of need."""

from __future__ import annotations

from functools import partial
from itertools import islice
from math import inf

from ecd.core.costs import Costs
from ecd.core.counters import Counters
from ecd.core.entries import Entries
from ecd.core.evictor import Evictor
from ecd.core.model.block import Block
from ecd.core.model.board import Board
from ecd.core.model.entry import Entry
from ecd.core.model.outcomes import (
    AlreadyStored,
    BeingWritten,
    EntryTooLarge,
    MakingRoom,
    Missing,
    PoolFull,
    Reserved,
)
from ecd.core.model.states import EntryEvent, EntryState
from ecd.core.model.types import Content, EntryId, Extent, Key, SessionId
from ecd.core.pool.pool import Pool
from ecd.core.retention import Book
from ecd.core.sessions import Session, Sessions

RECLAIMED_AT_A_TIME = 256
"""Most reservations freed by one call, for a session that closes."""


class Writers:
    """The reservations and grants of all sessions."""

    def __init__(
        self,
        entries: Entries,
        sessions: Sessions,
        evictor: Evictor,
        board: Board,
        counters: Counters,
        costs: Costs,
        book: Book,
    ) -> None:
        self._entries, self._sessions, self._costs, self._book = entries, sessions, costs, book
        self._evictor, self._board, self._counters = evictor, board, counters
        self._about_to_reserve = 0
        self._recovering: dict[EntryId, bool] = {}  # whether it is a put that this cache counts

    # -- the count on the board ----------------------------------------------------------------

    @property
    def are_announced(self) -> bool:
        """Whether a caller is between `announce` and `settle`."""
        return self._about_to_reserve > 0

    def announce(self) -> None:
        """Count one more caller that is about to reserve (see `Board.announce_reservations`)."""
        self._about_to_reserve += 1
        self._publish_count()

    def settle(self) -> None:
        """Count one such caller fewer; after the last, no room is being made."""
        self._about_to_reserve -= 1
        self._publish_count()
        if not self._about_to_reserve:
            for pool in self._entries.pools:
                pool.end_making_room()

    def _publish_count(self) -> None:
        count = self._entries.being_written + self._about_to_reserve
        self._board.announce_reservations(count)

    def taken(self, key: Key, pool: Pool) -> AlreadyStored | BeingWritten | None:
        """Why the key cannot be written in this pool now; None: it can."""
        if self._entries.stored_in(pool, key) is not None:
            self._counters.of(key.namespace).duplicates += 1
            return AlreadyStored()
        return None if self._entries.writing_in(pool, key) is None else BeingWritten()

    # -- reservations --------------------------------------------------------------------------

    def reserve(
        self, pool: Pool, owner: Session, key: Key, content: Content, now_s: float
    ) -> Reserved | BeingWritten | MakingRoom | PoolFull | EntryTooLarge:
        """Reserve a key that is not taken in the pool, after a scan of the claims."""
        if self._board.is_claimed(key):
            return BeingWritten()
        nbytes = content.nbytes
        if self._book.rules.has_quotas:
            refusal = self._evictor.make_quota_room(pool, key.namespace, nbytes, now_s)
            if refusal is not None:
                return refusal
        block = pool.allocator.allocate(nbytes) or self._evictor.make_room(pool, nbytes, now_s)
        if block is None and (pool.grants.are_open or not self._evictor.is_settled):
            pool.begin_making_room()
            return MakingRoom()
        pool.end_making_room()
        if block is None:
            return self.no_room(pool, key.namespace, nbytes)
        entry = self._open(pool, owner, key, content, block, now_s)
        if self._book.rules.has_quotas:
            self._book.reserve(entry)
        return Reserved(entry.id, entry.extent)

    def reserve_replica(
        self, pool: Pool, owner: Session, key: Key, original: EntryId, now_s: float
    ) -> Reserved | AlreadyStored | BeingWritten | PoolFull | EntryTooLarge | Missing:
        """Reserve room for a copy of this entry of the key, where that takes no second call."""
        assert pool.holds_replicas, "the key's own entry cannot lie there"
        stored = self._entries.stored(key)
        if stored is None or stored.id != original:
            return Missing()
        if self._entries.stored_in(pool, key) is not None:
            return AlreadyStored()
        if self._entries.writing_in(pool, key) is not None:
            return BeingWritten()
        content = stored.content
        if content.nbytes > pool.nbytes:
            return EntryTooLarge(content.nbytes, pool.nbytes)
        block = pool.allocator.allocate(content.nbytes)
        block = block or self._evictor.make_room_for_grant(pool, content.nbytes, now_s)
        if block is None:
            return _pool_full(pool, content.nbytes)  # no loss, so it is not counted
        entry = self._open(pool, owner, key, content, block, now_s, stored)
        return Reserved(entry.id, entry.extent)

    def no_room(self, pool: Pool, namespace: str, nbytes: int) -> PoolFull:
        self._counters.refuse_put(namespace, "pool_full")
        return _pool_full(pool, nbytes)

    def recover(
        self, owner: Session, key: Key, content: Content, extent: Extent, is_put: bool
    ) -> Entry | None:
        """Reserve this extent; None if it or the key is taken."""
        pool = self._entries.pool(extent.pool)
        if pool is None or self._entries.writing_in(pool, key) is not None:
            return None
        block = pool.allocator.allocate_at(extent)
        if block is None:
            return None
        entry = self._open(pool, owner, key, content, block, 0.0)
        self._recovering[entry.id] = is_put
        return entry

    def find(self, session: SessionId, reservation: EntryId) -> tuple[Session, Entry] | None:
        """An open session and its open reservation."""
        owner = self._sessions.get(session)
        if owner is None or reservation not in owner.reservations:
            return None
        entry = self._entry(reservation)
        return (owner, entry) if entry.state is EntryState.RESERVED else None

    def publish(
        self,
        owner: Session,
        entry: Entry,
        now_s: float,
        checksum: int | None,
        refetch_s: float = inf,
        age_s: float = 0.0,
    ) -> None:
        """Commit a reservation; `refetch_s` and `age_s` as in `Cache.commit`."""
        is_put = self._recovering.pop(entry.id, True)
        self._take(owner, entry)
        entry.handovers += owner.hands_over
        self._publish(entry, now_s, checksum, is_put, refetch_s, age_s)

    def abort(self, owner: Session, entry: Entry) -> None:
        """End an open reservation and free its extent."""
        entry.step(EntryEvent.ABORT)
        self._stop_writing(entry)
        self._free(owner, entry)

    def orphan(self, entry: Entry) -> None:
        """Free the key of an open reservation, but not its extent: it may still be written."""
        entry.step(EntryEvent.WRITER_LOST)
        self._stop_writing(entry)

    def orphan_all(self, owner: Session) -> list[Key]:
        """Orphan the session's open reservations; returns their keys, those of replicas apart."""
        entries = [self._entry(reservation) for reservation in owner.reservations]
        lost = [entry for entry in entries if entry.state is EntryState.RESERVED]
        for entry in lost:
            self.orphan(entry)
        return [entry.key for entry in lost if not entry.replica_in]

    def reclaim(self, owner: Session, reservation: EntryId) -> None:
        """Free the extent of an orphaned reservation, which cannot be written any more."""
        entry = self._entry(reservation)
        entry.step(EntryEvent.WRITER_GONE)
        self._free(owner, entry)

    def reclaim_some(self, owner: Session) -> bool:
        """Reclaim some of the session's orphaned reservations; returns whether none is left."""
        for reservation in list(islice(owner.reservations, RECLAIMED_AT_A_TIME)):
            self.reclaim(owner, reservation)
        return not owner.reservations

    # -- grants --------------------------------------------------------------------------------

    def grant(
        self, pool: Pool, session: SessionId, nbytes: int, least: int, most: int, now_s: float
    ) -> bool:
        if self._sessions.get(session) is None or pool.is_making_room:
            return False
        make_room = partial(self._evictor.make_room_for_grant, pool, now_s=now_s)
        pieces = pool.pieces(pool.rounded_bytes(nbytes), least, most, make_room)
        begun = self._board.grant(session, [piece.extent() for piece in pieces]) if pieces else None
        if begun is None:
            for piece in pieces:
                pool.allocator.free(piece)
            return False
        self.give_back(session, begun)
        pool.grants.grant(session, pieces)
        return True

    def give_back(self, session: SessionId, begun: list[Extent]) -> None:
        """Free the session's grants in all pools, except memory that it has begun to write."""
        for pool in self._entries.pools:
            pool.grants.give_back(session, begun)

    def publish_granted(
        self, session: SessionId, key: Key, content: Content, block: Block, now_s: float
    ) -> Entry:
        """Commit what the session wrote in a block of its grants."""
        entry = Entry(self._entries.next_id(), *key, content, block, session)
        entry.handovers = int(self._sessions.hands_over(session))
        self._entries.add(entry)
        self._publish(entry, now_s, None)
        return entry

    def discard_granted(
        self, session: SessionId, key: Key, content: Content, block: Block
    ) -> Entry:
        """Store what the session wrote in a block of its grants as a doomed entry."""
        content = Content(content.dtype, content.shape, content.nbytes)  # nothing else is checked
        entry = Entry(
            self._entries.next_id(), *key, content, block, session, state=EntryState.DOOMED
        )
        self._entries.add(entry)
        return entry

    # -- steps ---------------------------------------------------------------------------------

    def _entry(self, reservation: EntryId) -> Entry:
        found = self._entries.get(reservation)
        assert found is not None, f"reservation {reservation} vanished"
        return found

    def _open(
        self,
        pool: Pool,
        owner: Session,
        key: Key,
        content: Content,
        block: Block,
        now_s: float,
        original: Entry | None = None,
    ) -> Entry:
        """Make a reservation of an allocated block."""
        entry = Entry(self._entries.next_id(), *key, content, block, owner.id, created_s=now_s)
        entry.replica_in, entry.original = pool.number if original else 0, original
        self._entries.add(entry)
        owner.reservations.add(entry.id)
        pool.begin_write(entry)
        self._publish_count()
        return entry

    def _publish(
        self,
        entry: Entry,
        now_s: float,
        checksum: int | None,
        is_put: bool = True,
        refetch_s: float = inf,
        age_s: float = 0.0,
    ) -> None:
        """Make the entry visible to all clients."""
        entry.step(EntryEvent.COMMIT)
        entry.original = None
        entry.created_s = entry.used_s = now_s
        entry.checksum = checksum
        self._entries.publish(entry)
        self._price(entry, refetch_s)
        self._entries.pool_of(entry).admit(entry)
        if (self._book.has_rules or age_s) and not entry.replica_in:
            self._book.admit(entry, now_s - age_s)
        self._board.show(entry.info())
        self._publish_count()
        counters = self._counters.of(entry.namespace)
        if entry.replica_in:
            counters.copies += 1
        elif is_put:
            counters.put(entry.content.nbytes)
        else:
            counters.recovered += 1

    def _price(self, entry: Entry, refetch_s: float) -> None:
        """Set the cost of an entry by the fit, or lower if another fetch is cheaper."""
        if not entry.replica_in:
            self._costs.learn(entry.namespace, entry.content)
        entry.cost_s, is_known = self._costs.of(entry.namespace, entry.content)
        if is_known:
            entry.encode_s = entry.cost_s
            entry.cost_s = min(entry.cost_s, refetch_s)

    def _stop_writing(self, entry: Entry) -> None:
        self._entries.stop_writing(entry)
        self._publish_count()
        is_given_up = not entry.replica_in and self._recovering.pop(entry.id, True)
        self._counters.of(entry.namespace).aborts += is_given_up

    def _take(self, owner: Session, entry: Entry) -> None:
        """Remove a reservation from the books."""
        owner.reservations.remove(entry.id)
        self._entries.pool_of(entry).end_write(entry)
        if entry.terms is not None:
            self._book.end_reservation(entry)

    def _free(self, owner: Session, entry: Entry) -> None:
        self._take(owner, entry)
        self._entries.free(entry)

    def check(self) -> None:
        """Raise AssertionError unless the sessions' books agree with the entries. O(n)."""
        writable = (EntryState.RESERVED, EntryState.ORPHANED)
        reservations = {entry.id for entry in self._entries if entry.state in writable}
        assert reservations == self._sessions.reservations()


def _pool_full(pool: Pool, nbytes: int) -> PoolFull:
    return PoolFull(nbytes, pool.largest_free_bytes, pool.held_bytes)
