"""The evictor: hides and retires entries, and thereby makes room."""

from __future__ import annotations

from itertools import islice

from ecd.core.counters import Counters
from ecd.core.entries import Entries
from ecd.core.model.block import Block
from ecd.core.model.board import Board
from ecd.core.model.entry import Entry
from ecd.core.model.outcomes import EntryTooLarge, MakingRoom, PoolFull
from ecd.core.model.states import EntryEvent
from ecd.core.model.types import EntryId, EvictionReport, Key, Selection
from ecd.core.pins import Pins
from ecd.core.pool.pool import Pool
from ecd.core.retention import LOOKED_AT, Book

NAMESPACES_AT_A_TIME = 4
"""Namespaces above their quotas that one turn trims."""
MAX_VICTIMS = 64
"""Most entries evicted for one extent of a grant, or in one turn for a quota or as their time is
over; more would block the event loop."""


class Evictor:
    """Evicts for room, above watermarks and quotas, in time and on request."""

    def __init__(
        self, entries: Entries, pins: Pins, board: Board, counters: Counters, book: Book
    ) -> None:
        self._entries, self._pins, self._book = entries, pins, book
        self._board, self._counters = board, counters
        self._now_s = 0.0  # as the last caller said: each drains the uses first

    def evict(self, entry: Entry, reason: str) -> None:
        """Hide and retire an entry: a whole scan of the pins frees it, unless it is held.

        Its copies go first: a reader that sees the entry listed after it has pinned a copy knows
        that the copy is of this entry.
        """
        for copy in self._entries.replicas_of(entry):
            self.evict(copy, reason)
        counters = self._counters.of(entry.namespace)
        if not entry.replica_in:
            idle_s = max(0.0, self._now_s - entry.used_s)
            counters.evicted(entry.namespace, reason, idle_s, entry.content.nbytes)
        entry.step(EntryEvent.EVICT)
        self._entries.hide(entry)
        self._board.hide(entry.id, entry.key, entry.replica_in)
        self._entries.pool_of(entry).drop(entry, reason, counters is self._counters)
        if entry.terms is not None:
            self._book.leave(entry)
        self._pins.retire(entry)

    def drain_uses(self, now_s: float) -> bool:
        """Count a batch of reads without a call, for the policies too. False: some are left."""
        self._now_s = now_s
        counters, uses = self._counters, self._board.drain_uses()
        counters.hits += uses.hits
        counters.bytes_out += uses.nbytes
        counters.duplicates += uses.duplicates
        if not (uses.hits or uses.misses):
            return uses.is_all
        clients = uses.by_client or (uses,)
        for one in clients:
            for namespace, misses in one.misses_in:
                counters.miss(namespace, misses)
            counters.miss("", one.misses - sum(misses for _, misses in one.misses_in))
            counters.other_namespaces.reused += 0 if one.named else one.hits
        named = [
            *((used, True, one.times) for one in clients for used in one.for_others),
            *((used, False, one.times) for one in clients for used in one.entries),
        ]
        handed_over = 0.0
        for used, for_another, times in named:
            if (entry := self._entries.get(used)) is None:
                counters.other_namespaces.reused += times
                continue
            counters.of(entry.namespace).note_hit(entry.content.nbytes)
            is_handover = self._entries.use(entry, now_s, for_another=for_another)
            counters.note_use(entry.namespace, is_handover, entry.saves_s, times)
            handed_over += times * is_handover
        counters.handed_over += round(handed_over)
        return uses.is_all

    @property
    def is_settled(self) -> bool:
        """Whether every evicted entry without a reader is free."""
        return self._pins.is_settled

    def scan(self, now_s: float) -> bool:
        """Drain the uses, then take one step of a scan of the pins."""
        self.drain_uses(now_s)
        self._counters.drop_silent(now_s, self._entries.are_in)
        return self._pins.step()

    def make_room(self, pool: Pool, nbytes: int, now_s: float) -> Block | None:
        """Revoke grants, then evict, for a reservation.

        Returns None if that was not enough, or is not finished: grants are open, or the pins are
        not settled.
        """
        are_closed = pool.grants.revoke(self._board)
        block = pool.allocator.allocate(nbytes)
        if block is not None or not are_closed or not self.scan(now_s):
            return block
        block = pool.allocator.allocate(nbytes)  # the scan may have freed it
        return block or pool.evict_for(nbytes, self.evict, self._pins.step)

    def make_room_for_grant(self, pool: Pool, nbytes: int, now_s: float) -> Block | None:
        """Evict up to MAX_VICTIMS entries for one extent of a grant, or for a copy."""
        if not self._pins.is_settled and not self._pins.step():
            return None
        self.drain_uses(now_s)  # an entry read a moment ago is not the coldest
        return pool.evict_for(nbytes, self.evict, self._pins.step, MAX_VICTIMS)

    def evict_selected(
        self,
        selection: Selection,
        now_s: float,
        limit: int,
        after: EntryId | None = None,
        dry_run: bool = False,
    ) -> EvictionReport:
        """Evict the selected among the next `limit` entries, or only report them."""
        self.drain_uses(now_s)
        if selection.key is None:
            page, next_after = self._entries.page(after, limit)
        else:
            page, next_after = list(self._entries.copies(selection.key)), None
        chosen = [
            entry
            for entry in page
            if selection.namespace in (None, entry.namespace)
            and (not entry.replica_in if selection.pool is None else entry.pool == selection.pool)
            and now_s - entry.used_s >= selection.idle_s
            and now_s - entry.created_s >= selection.age_s
        ]
        report = EvictionReport(
            entries=len(chosen),
            nbytes=sum(entry.content.nbytes for entry in chosen),
            leased=sum(entry.leases > 0 for entry in chosen),
            next_after=next_after,
            kept=sum(entry.is_kept for entry in chosen),
        )
        if not dry_run:
            for pool in self._entries.pools:
                pool.grants.revoke(self._board)
            for entry in chosen:
                self.evict(entry, "requested")
        return report

    def needs_trim(self) -> bool:
        """Whether any pool is filled above its high watermark, or a namespace above its quota."""
        return bool(self._book.over) or any(pool.needs_trim() for pool in self._entries.pools)

    def trim(self, limit: int, now_s: float) -> bool:
        """Evict up to `limit` entries where `needs_trim` finds a need; returns whether to go on.

        Namespaces above their quotas come first: what they lose may be all that a pool needs.
        """
        if not self.scan(now_s):
            return True  # the victims of the last call must be free first
        left, over = limit, self._book.over
        for namespace in list(islice(over, NAMESPACES_AT_A_TIME)):
            if not left:
                break
            excess_bytes = self._book.excess_bytes(namespace)
            victims, is_all = self._book.coldest(namespace, excess_bytes, left, now_s)
            for victim in victims:
                self.evict(victim, "quota")
            left -= len(victims)
            looks = over.pop(namespace, None)
            if looks is not None:  # it comes last now
                over[namespace] = looks if victims else 0 if is_all else looks - LOOKED_AT
        for pool in self._entries.pools if left == limit else ():
            left -= pool.trim(left, self.evict)
        return left < limit or any(looks > 0 for looks in over.values())

    # -- by operators' rules -------------------------------------------------------------------

    def make_quota_room(
        self, pool: Pool, namespace: str, nbytes: int, now_s: float
    ) -> EntryTooLarge | PoolFull | MakingRoom | None:
        """Evict some of the namespace's own entries, if `nbytes` more are above its quota.

        Returns None if there is room. A refusal has evicted nothing in this call.
        """
        quota_bytes, rounded = self._book.rules.quota_bytes(namespace), pool.rounded_bytes(nbytes)
        if quota_bytes is None:
            return None
        if rounded > quota_bytes:
            self._counters.refuse_put(namespace, "quota_full")
            return EntryTooLarge(nbytes, quota_bytes, quota_bytes)
        excess_bytes = self._book.excess_bytes(namespace, rounded)
        if excess_bytes <= 0:
            return None
        if not self.scan(now_s):
            return MakingRoom()  # what is read now is not evicted
        victims, is_all = self._book.coldest(namespace, excess_bytes, MAX_VICTIMS, now_s)
        excess_bytes -= sum(victim.block.nbytes for victim in victims)
        if excess_bytes > 0 and is_all:
            self._counters.refuse_put(namespace, "quota_full")
            return PoolFull(nbytes, 0, quota_bytes + excess_bytes - rounded, quota_bytes)
        for victim in victims:
            self.evict(victim, "quota")
        return MakingRoom() if excess_bytes > 0 else None

    def expire(self, now_s: float) -> None:
        """Evict some of the expired entries, and end some expired holds of operators (`keep`)."""
        self.scan(now_s)  # which frees the victims of the last call, some at a time
        for entry in self._book.take_expired(now_s, MAX_VICTIMS):
            self.evict(entry, "ttl")

    def end_late(self, key: Key, now_s: float) -> None:
        """Evict the key's expired entries, which the timer has not reached yet."""
        for entry in list(self._entries.copies(key)) if self._book.is_timed else ():
            if entry.terms is not None and entry.terms.expires_s <= now_s:
                self.evict(entry, "ttl")
