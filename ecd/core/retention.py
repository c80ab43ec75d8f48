"""The terms of entries: their namespace's quota, their end, and whether an operator keeps them.

Most entries have none, and cost nothing here. A quota's entries are evicted in the order of their
last reads. They are queued by the read that was known as they were queued; one that has been read
since, or is being read, goes to its later place when its turn comes. So a read costs nothing, and
each is paid for once, by a look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ecd.core.counters import Counters
from ecd.core.entries import Entries
from ecd.core.model.deadlines import Deadlines
from ecd.core.model.entry import Entry
from ecd.core.model.outcomes import Keeping, Kept, KeptTooMuch, Missing
from ecd.core.model.rules import Rules
from ecd.core.model.states import EntryState
from ecd.core.model.types import EntryId, Key, Terms

LOOKED_AT = 256
"""Entries of a namespace looked at in one turn for those to evict."""


@dataclass
class _Quota:
    """The entries of one namespace that has a quota."""

    nbytes: int = 0  # of their extents
    reserved_bytes: int = 0  # of extents that are being written
    passed: int = 0  # entries looked at since one was found that nobody holds
    order: Deadlines[EntryId] = field(default_factory=Deadlines)  # by their last known reads


class Book:
    """The terms of all entries, copies in device pools left out: they go with their entries."""

    def __init__(self, entries: Entries, rules: Rules) -> None:
        self.use(rules)
        self.over: dict[str, int] = {}
        """Namespaces above their quotas, and how many entries to examine for some to evict."""
        self.is_timed = False
        """Whether any entry ever had a TTL: until then no caller needs to ask."""
        self._entries = entries
        self._quotas: dict[str, _Quota] = {}
        self._ends: Deadlines[EntryId] = Deadlines()
        self._kept: Deadlines[EntryId] = Deadlines()

    def use(self, rules: Rules) -> None:
        """Set terms by these rules from now on; earlier entries change as they are readmitted."""
        self.rules, self.has_rules = rules, rules.has_quotas or rules.has_ttls

    def admit(self, entry: Entry, put_s: float, kept_until_s: float = 0.0) -> None:
        """Set the terms of a committed entry that was put, here or on another node, at `put_s`."""
        name = entry.namespace
        limit, ttl_s = self.rules.quota_bytes(name), self.rules.ttl_s(name)
        if limit is not None:
            quota = self._quotas.setdefault(name, _Quota())
            quota.nbytes += entry.block.nbytes
            quota.order.add(entry.id, entry.used_s)
            if quota.nbytes > limit:
                self.over[name] = len(quota.order) + LOOKED_AT
        expires_s = inf if ttl_s is None else put_s + ttl_s
        if expires_s < inf:
            self._ends.add(entry.id, expires_s)
            self.is_timed = True
        if limit is not None or expires_s < inf or kept_until_s or put_s != entry.created_s:
            entry.terms = Terms(put_s, expires_s, 0.0, limit is not None)
        if kept_until_s:
            self.keep(entry, kept_until_s)

    def readmit(self, entry: Entry) -> None:
        """Set a committed entry's terms again, by the present rules."""
        terms = entry.terms or Terms(entry.created_s)
        self.leave(entry)
        entry.terms = None
        self.admit(entry, terms.put_s, terms.kept_until_s)

    def leave(self, entry: Entry) -> None:
        """Remove an entry's terms from the books; its last readers may still hold it."""
        terms = entry.terms
        if terms is None:
            return
        self.unkeep(entry)
        if terms.expires_s < inf:
            self._ends.remove(entry.id)
        if terms.has_quota:
            name, quota = entry.namespace, self._quotas[entry.namespace]
            quota.nbytes -= entry.block.nbytes
            quota.order.remove(entry.id)
            limit = self.rules.quota_bytes(name)
            if limit is None or quota.nbytes <= limit:
                self.over.pop(name, None)
            self._drop_if_empty(name, quota)

    # -- quotas --------------------------------------------------------------------------------

    def reserve(self, entry: Entry) -> None:
        """Count the extent of a new reservation, if its namespace has a quota."""
        if self.rules.quota_bytes(entry.namespace) is not None:
            quota = self._quotas.setdefault(entry.namespace, _Quota())
            quota.reserved_bytes += entry.block.nbytes
            entry.terms = Terms(entry.created_s, has_quota=True)

    def end_reservation(self, entry: Entry) -> None:
        """Stop counting the extent of a reservation: it is committed, or nobody can write it."""
        if entry.terms is not None:
            quota, entry.terms = self._quotas[entry.namespace], None
            quota.reserved_bytes -= entry.block.nbytes
            self._drop_if_empty(entry.namespace, quota)

    def excess_bytes(self, namespace: str, more: int = 0) -> int:
        """How much a namespace is above its quota; or would be with so many bytes more reserved."""
        limit = self.rules.quota_bytes(namespace)
        quota = self._quotas.get(namespace) or _Quota()
        reserved_bytes = quota.reserved_bytes + more if more else 0
        return 0 if limit is None else quota.nbytes + reserved_bytes - limit

    def coldest(
        self, namespace: str, nbytes: int, most: int, now_s: float
    ) -> tuple[list[Entry], bool]:
        """Up to `most` of a quota's entries that nobody holds, until they have `nbytes`.

        Those read longest ago come first. True: all that can be evicted is there. So it is when as
        many as there are were held, in this look and those before.
        """
        quota, passed = self._quotas.get(namespace), list[Entry]()
        victims: list[Entry] = []
        is_all = quota is None
        for _ in range(LOOKED_AT):
            if quota is None or nbytes <= 0 or len(victims) == most:
                break
            used_s = quota.order.next_s
            if used_s is None:
                is_all = True
                break
            for each in quota.order.take_due(used_s, 1):
                entry = self._entries.get(each)
                assert entry is not None, f"entry {each} left, but not its quota"
                if self._entries.pool_of(entry).policy.warmth(entry) is None:
                    passed.append(entry)
                    quota.passed += 1
                elif entry.used_s > used_s:
                    quota.order.add(each, entry.used_s)
                else:
                    victims.append(entry)
                    quota.passed = 0
                    nbytes -= entry.block.nbytes
        if quota is not None:
            for entry in victims:
                quota.order.add(entry.id, entry.used_s)
            for entry in passed:  # a held entry counts as read until it is let go
                quota.order.add(entry.id, now_s)
            is_all = is_all or quota.passed >= len(quota.order)
            quota.passed = 0 if is_all else quota.passed
        return victims, is_all

    def _drop_if_empty(self, namespace: str, quota: _Quota) -> None:
        if not len(quota.order) and not quota.reserved_bytes:
            del self._quotas[namespace]

    # -- ends ----------------------------------------------------------------------------------

    def next_s(self) -> float | None:
        """The earliest time at which an entry, or its keeping, may expire; never too late."""
        ends = [s for s in (self._ends.next_s, self._kept.next_s) if s is not None]
        return min(ends, default=None)

    def take_expired(self, now_s: float, most: int) -> list[Entry]:
        """Return expired entries, to be evicted, and end expired holds of operators."""
        for each in self._kept.take_due(now_s, most):
            kept = self._entries.get(each)
            assert kept is not None, f"kept entry {each} vanished"
            self._kept.add(each, now_s)
            self.unkeep(kept)
        expired = []
        for each in self._ends.take_due(now_s, most):
            entry = self._entries.get(each)
            assert entry is not None, f"entry {each} left, but not its end"
            assert entry.terms is not None
            entry.terms = entry.terms._replace(expires_s=inf)  # it is off the books
            expired.append(entry)
        return expired

    # -- what operators keep -------------------------------------------------------------------

    def keep(self, entry: Entry, until_s: float) -> None:
        """Keep a committed entry from eviction for room until then; infinite: until `unkeep`."""
        self.unkeep(entry)
        entry.terms = (entry.terms or Terms(entry.created_s))._replace(kept_until_s=until_s)
        self._entries.pool_of(entry).keep(entry)
        if until_s < inf:
            self._kept.add(entry.id, until_s)
            self.is_timed = True

    def unkeep(self, entry: Entry) -> bool:
        """Allow eviction of an entry for room again. False: it was not kept."""
        terms = entry.terms
        if terms is None or not entry.is_kept:
            return False
        if terms.kept_until_s < inf:
            self._kept.remove(entry.id)
        entry.terms = terms._replace(kept_until_s=0.0)
        self._entries.pool_of(entry).unkeep(entry)
        return True

    def check(self) -> None:
        """Raise AssertionError unless the books are those of the committed entries. O(n log n)."""
        nbytes: dict[str, int] = {}
        reserved: dict[str, int] = {}
        ends = kept = queued = 0
        for entry in self._entries:
            terms = entry.terms
            if terms is not None and entry.state in (EntryState.RESERVED, EntryState.ORPHANED):
                reserved[entry.namespace] = reserved.get(entry.namespace, 0) + entry.block.nbytes
            if terms is None or entry.state is not EntryState.COMMITTED:
                continue
            assert not entry.replica_in, "a replica has its entry's terms"
            ends += terms.expires_s < inf
            kept += 0.0 < terms.kept_until_s < inf
            if terms.has_quota:
                queued += 1
                nbytes[entry.namespace] = nbytes.get(entry.namespace, 0) + entry.block.nbytes
        assert (ends, kept) == (len(self._ends), len(self._kept))
        for name in {*nbytes, *reserved, *self._quotas}:
            quota, known = self._quotas[name], (nbytes.get(name, 0), reserved.get(name, 0))
            assert known == (quota.nbytes, quota.reserved_bytes)
        assert queued == sum(len(quota.order) for quota in self._quotas.values())
        for deadlines in (self._ends, self._kept, *(q.order for q in self._quotas.values())):
            deadlines.check()


class Retention:
    """Operators' rules, and the entries that they keep."""

    def __init__(self, entries: Entries, book: Book, counters: Counters) -> None:
        self._entries, self._book, self._counters = entries, book, counters
        self.use(book.rules)

    @property
    def rules(self) -> Rules:
        return self._book.rules

    @property
    def is_over_quota(self) -> bool:
        """Whether a namespace is above its quota until the next `trim`."""
        return bool(self._book.over)

    def use(self, rules: Rules) -> None:
        """Set new rules; stored entries follow them after `reapply`."""
        self._book.use(rules)
        for pool in self._entries.pools:
            pool.piece_bytes = min(pool.nbytes, rules.least_quota_bytes or pool.nbytes)

    def reapply(self, after: EntryId | None, limit: int) -> EntryId | None:
        """Apply the rules to the next `limit` entries; where to continue, or None at the end."""
        entries, next_after = self._entries.page(after, limit)
        for entry in entries:
            if not entry.replica_in:
                self._book.readmit(entry)
        return next_after

    def is_expired(self, namespace: str, age_s: float) -> bool:
        """Whether an entry of the namespace with this age must not be served any more."""
        ttl_s = self.rules.ttl_s(namespace) if self.rules.has_ttls else None
        return ttl_s is not None and age_s >= ttl_s

    def keep(self, key: Key, until_s: float) -> Keeping:
        """Keep the key's entry from eviction for room until then; TTL and requests still apply.

        Counts a refusal if operators would keep more of the pool than they may.
        """
        entry = self._entries.stored(key)
        if entry is None:
            return Missing()
        pool, nbytes = self._entries.pool_of(entry), entry.block.nbytes
        if not entry.is_kept and pool.kept_bytes + nbytes > pool.kept_most_bytes:
            self._counters.refused["kept"] += 1
            return KeptTooMuch(nbytes, pool.kept_bytes, pool.kept_most_bytes)
        self._book.keep(entry, until_s)
        return Kept()

    def unkeep(self, key: Key) -> bool:
        """Allow eviction of the key's entry for room again. False: it was not kept."""
        entry = self._entries.stored(key)
        return entry is not None and self._book.unkeep(entry)
