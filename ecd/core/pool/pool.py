"""One pool: its allocator, policy and grants, and how room is made in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from ecd.core.model.block import Block
from ecd.core.model.board import MAX_PIECES
from ecd.core.model.entry import Entry
from ecd.core.model.states import EntryState
from ecd.core.model.types import PoolLimits
from ecd.core.policy.policy import Lru, Policy
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.eviction import plan
from ecd.core.pool.grants import Grants

PLANS = 3
"""Plans tried for one extent: a reader may pin a victim at the last moment."""

FOR_ROOM = ("capacity", "watermark", "quota")
REASONS = (*FOR_ROOM, "ttl", "requested")
"""Why entries are evicted."""

REFETCHED_S = 60.0
"""How long after its fetch an entry ranks by the cost of another fetch: its holder may lose it."""

KEPT_SHARE = 0.5
"""Largest share of a pool that operators may keep: reservations need the rest."""

Evict = Callable[[Entry, str], None]
"""Evicts an entry for one of REASONS. Its extent is not free before a scan of the pins."""
Scan = Callable[[], bool]
"""Takes one step of a scan of the pins; returns whether every unread victim is free by now."""


class Pool:
    """Memory of one kind. The cache decides who gets it; the pool finds room in it."""

    def __init__(
        self,
        allocator: Allocator,
        kind: str = "host",
        limits: PoolLimits | None = None,
        policy: Policy | None = None,
        holds_replicas: bool = False,
    ) -> None:
        """`kind` names the memory to operators, the allocator's number names it in extents.

        `holds_replicas`: an entry lies here only while another pool has the key's own, of which it
        is a copy for readers that ask for this pool.
        """
        self.allocator = allocator
        self.number, self.kind = allocator.pool_number, kind
        self.holds_replicas = holds_replicas
        self.limits = PoolLimits() if limits is None else limits
        self.policy: Policy = Lru() if policy is None else policy
        self.grants = Grants(self.allocator)
        self.evictions = dict.fromkeys(REASONS, 0)
        self.reserved_bytes = 0  # in extents that a writer may still write
        self.leased_bytes = 0  # in extents that somebody holds, by lease or pin
        self.kept_bytes = self.kept = 0  # of entries, and their number, that an operator keeps
        self._kept_unheld_bytes = 0  # of those of them that nobody holds
        self.piece_bytes = self.nbytes
        """Largest extent that a grant may contain.

        Equal to the smallest quota, so that an entry too large for a quota always needs a call.
        """
        self.worth_s = 0.0  # to have all entries again
        self.given_up_s = 0.0  # the same of those evicted for room, since the start
        self.is_making_room = False
        """Whether room is being made for a reservation: no grant may take it meanwhile."""
        self._is_trimming = False

    # -- figures -------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self.allocator.nbytes

    @property
    def granule_bytes(self) -> int:
        return self.allocator.granule_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in extents of entries and reservations; `used + granted + free` is the pool."""
        return self.allocator.used_bytes - self.grants.nbytes

    @property
    def granted_bytes(self) -> int:
        """Bytes that sessions may turn into entries without a call."""
        return self.grants.nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no extent and no grant."""
        return self.allocator.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self.allocator.largest_free_bytes

    @property
    def fragmentation(self) -> float:
        """1 - largest free extent / free bytes: 0 when all free memory is in one piece."""
        return self.allocator.fragmentation

    @property
    def held_bytes(self) -> int:
        """Bytes in extents that cannot be evicted for room: leased, kept or being written."""
        return self.leased_bytes + self.reserved_bytes + self._kept_unheld_bytes

    @property
    def kept_most_bytes(self) -> int:
        """Most bytes of the pool that operators may keep at a time."""
        return int(KEPT_SHARE * self.nbytes)

    def rounded_bytes(self, nbytes: int) -> int:
        """The bytes that an extent of `nbytes` takes from the pool."""
        return self.allocator.rounded_bytes(nbytes)

    def has_spare(self, nbytes: int) -> bool:
        """Whether an extent of `nbytes` fits without an eviction, now or by `trim`."""
        used_bytes = self.allocator.used_bytes + self.rounded_bytes(nbytes)
        is_below = used_bytes <= self.limits.high_watermark * self.nbytes
        return is_below and self.rounded_bytes(nbytes) <= self.largest_free_bytes

    # -- writers -------------------------------------------------------------------------------

    def begin_write(self, entry: Entry) -> None:
        """Count the extent of a new reservation as one that a writer may write."""
        self.reserved_bytes += entry.block.nbytes

    def end_write(self, entry: Entry) -> None:
        """Count the extent no more: it is committed, or no writer can reach it."""
        self.reserved_bytes -= entry.block.nbytes

    def admit(self, entry: Entry) -> None:
        """Rank an entry that was just committed."""
        self.policy.admit(entry)
        self.worth_s += entry.worth_s

    # -- readers -------------------------------------------------------------------------------

    def hold(self, entry: Entry) -> None:
        """Count another lease or pin: a held entry cannot be evicted for room."""
        if entry.leases == 0:
            is_kept = entry.terms is not None and entry.terms.kept_until_s > 0.0
            if is_kept:
                self._kept_unheld_bytes -= entry.block.nbytes
            elif entry.state is EntryState.COMMITTED:
                self.policy.hold(entry)
            self.leased_bytes += entry.block.nbytes
        entry.leases += 1

    def let_go(self, entry: Entry) -> None:
        """Count one lease or pin fewer."""
        entry.leases -= 1
        if entry.leases == 0:
            self.leased_bytes -= entry.block.nbytes
            is_kept = entry.terms is not None and entry.terms.kept_until_s > 0.0
            if is_kept:
                self._kept_unheld_bytes += entry.block.nbytes
            elif entry.state is EntryState.COMMITTED:
                self.policy.let_go(entry)

    def keep(self, entry: Entry) -> None:
        """Stop ranking an entry that an operator keeps, until `unkeep`."""
        self.kept += 1
        self.kept_bytes += entry.block.nbytes
        if entry.leases == 0:
            self._kept_unheld_bytes += entry.block.nbytes
            self.policy.hold(entry)

    def unkeep(self, entry: Entry) -> None:
        """Rank the entry again, unless it is held or was evicted."""
        self.kept -= 1
        self.kept_bytes -= entry.block.nbytes
        if entry.leases == 0:
            self._kept_unheld_bytes -= entry.block.nbytes
            if entry.state is EntryState.COMMITTED:
                self.policy.let_go(entry)

    def use(self, entry: Entry, now_s: float, *, for_another: bool = False) -> bool:
        """Count one read, by lease or pin. Returns whether it only hands the entry over.

        `for_another`: by an engine that found it for the one that reads it next.
        """
        entry.hits += 1
        is_handover = False
        if entry.handovers or for_another:
            if not entry.is_handover(now_s):
                entry.handovers = 0
            is_handover = entry.handovers > 0 and not for_another
            entry.handovers += for_another - is_handover
        if entry.state is EntryState.COMMITTED:
            if entry.cost_s < entry.encode_s and now_s - entry.created_s > REFETCHED_S:
                self.price_anew(entry)
            self.policy.use(entry, now_s)
        entry.used_s = now_s
        return is_handover

    def price_anew(self, entry: Entry) -> None:
        """Price a fetched entry by its encoding: the node that had it may have lost it."""
        self.worth_s += entry.encode_s - entry.cost_s
        entry.cost_s = entry.encode_s

    # -- making room ---------------------------------------------------------------------------

    def begin_making_room(self) -> None:
        """Reserve freed memory for a reservation: no grants are made meanwhile."""
        self.is_making_room = True

    def end_making_room(self) -> None:
        """Allow grants again: the reservation has its extent, or is given up."""
        self.is_making_room = False

    def drop(self, entry: Entry, reason: str, is_counted: bool) -> None:
        """Stop ranking an evicted entry; a counted one counts under one of REASONS."""
        self.policy.remove(entry)
        self.worth_s = max(0.0, self.worth_s - entry.worth_s)
        if is_counted:
            self.evictions[reason] += 1
            self.given_up_s += entry.worth_s if reason in FOR_ROOM else 0.0

    def evict_for(
        self, nbytes: int, evict: Evict, scan: Scan, most: int | None = None
    ) -> Block | None:
        """Evict until an extent of `nbytes` is free, and allocate it.

        Returns None if no plan, of at most `most` victims, frees it, or if the pins must be
        scanned further first.
        """
        for _ in range(PLANS):
            victims = plan(nbytes, self.allocator, self.policy)
            if victims is None or (most is not None and len(victims) > most):
                return None
            self.policy.give_up(victims)
            for victim in victims:
                evict(victim, "capacity")
            is_settled = scan()
            block = self.allocator.allocate(nbytes)
            if block is not None or not is_settled:
                return block
        return None

    def pieces(
        self, nbytes: int, least: int, most: int, make_room: Callable[[int], Block | None]
    ) -> list[Block]:
        """Allocate up to `most` times `nbytes`, whole granules, in MAX_PIECES pieces at most.

        Takes free memory, in as few pieces as possible. Only while there is room for fewer than
        `least`, it calls `make_room`. All grants together stay within their share of the pool.
        """
        share = int(self.limits.granted_share * self.nbytes) - self.granted_bytes
        least, most = min(least, share // nbytes), min(most, share // nbytes)
        if nbytes > self.piece_bytes:
            most = 0
        pieces: list[Block] = []
        count = 0
        while count < most and len(pieces) < MAX_PIECES:
            fit = min(most - count, self.largest_free_bytes // nbytes, self.piece_bytes // nbytes)
            if fit:
                piece = self.allocator.allocate(fit * nbytes)
            elif count < least:
                fit, piece = 1, make_room(nbytes)
            else:
                break
            if piece is None:
                break
            pieces.append(piece)
            count += fit
        return pieces

    def next_victims(self) -> Iterator[Entry]:
        """The entries to be evicted first as the pool's next share fills, the coldest first."""
        left_bytes = self.allocator.used_bytes
        left_bytes -= int((self.limits.low_watermark - self.limits.ahead_share) * self.nbytes)
        for entry in self.policy.coldest():
            if left_bytes <= 0:
                break
            left_bytes -= entry.block.nbytes
            yield entry

    def needs_trim(self) -> bool:
        """Whether extents and grants fill the pool above the high watermark."""
        return self.allocator.used_bytes > self.limits.high_watermark * self.nbytes

    def trim(self, most: int, evict: Evict) -> int:
        """Evict up to `most` of the coldest entries; returns how many.

        Begins above the high watermark and goes on, call by call, down to the low one.
        """
        self._is_trimming = self._is_trimming or self.needs_trim()
        excess_bytes = self.allocator.used_bytes - self.limits.low_watermark * self.nbytes
        victims: list[Entry] = []
        for entry in islice(self.policy.coldest(), most) if self._is_trimming else ():
            if excess_bytes <= 0:
                break
            victims.append(entry)
            excess_bytes -= entry.block.nbytes
        self._is_trimming = self._is_trimming and len(victims) == most
        for victim in victims:
            self.policy.give_up([victim])
            evict(victim, "watermark")
        return len(victims)

    def check(self, entries: Iterable[Entry]) -> None:
        """Raise AssertionError unless the figures are those of `entries`, all that lie here."""
        self.allocator.check()
        self.grants.check()
        used_bytes = reserved_bytes = leased_bytes = kept_bytes = kept = unheld_bytes = 0
        worth_s = 0.0
        for entry in entries:
            nbytes = entry.block.nbytes
            assert nbytes == self.rounded_bytes(entry.content.nbytes)
            used_bytes += nbytes
            is_kept = entry.state is EntryState.COMMITTED and entry.is_kept
            kept_bytes, kept = kept_bytes + is_kept * nbytes, kept + is_kept
            unheld_bytes += nbytes if is_kept and entry.leases == 0 else 0
            is_evictable = entry.state is EntryState.COMMITTED and entry.leases == 0 and not is_kept
            assert (self.policy.warmth(entry) is not None) == is_evictable
            worth_s += entry.worth_s if entry.state is EntryState.COMMITTED else 0.0
            if entry.state in (EntryState.RESERVED, EntryState.ORPHANED):
                reserved_bytes += nbytes
            elif entry.leases:
                leased_bytes += nbytes
        assert (reserved_bytes, leased_bytes) == (self.reserved_bytes, self.leased_bytes)
        assert (kept_bytes, kept) == (self.kept_bytes, self.kept)
        assert unheld_bytes == self._kept_unheld_bytes
        assert abs(worth_s - self.worth_s) <= 1e-6 * (1.0 + worth_s + self.given_up_s)
        assert used_bytes == self.used_bytes, "an extent without an entry"
