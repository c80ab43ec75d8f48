"""Retention: operators' rules, and the entries that they keep."""

from __future__ import annotations

from ecd.core.counters import Counters
from ecd.core.entries import Entries
from ecd.core.model.outcomes import Keeping, Kept, KeptTooMuch, Missing
from ecd.core.model.rules import Rules
from ecd.core.model.types import EntryId, Key
from ecd.core.terms import Book


class Retention:
    """How long entries may and must stay."""

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
        """Take these rules over; entries that are stored follow them after `reapply`."""
        self._book.use(rules)
        for pool in self._entries.pools:
            pool.piece_bytes = min(pool.nbytes, rules.least_quota_bytes or pool.nbytes)

    def reapply(self, after: EntryId | None, limit: int) -> EntryId | None:
        """Apply the rules to the next `limit` entries; where to go on, None at the end."""
        entries, next_after = self._entries.page(after, limit)
        for entry in entries:
            if not entry.copy_in:
                self._book.readmit(entry)
        return next_after

    def is_expired(self, namespace: str, age_s: float) -> bool:
        """Whether an entry of the namespace, put so long ago, is not to be served any more."""
        ttl_s = self.rules.ttl_s(namespace) if self.rules.has_ttls else None
        return ttl_s is not None and age_s >= ttl_s

    def keep(self, key: Key, until_s: float) -> Keeping:
        """Evict the key's entry for no room until then; its age and a request evict it still.

        Counts a refusal, where more of the pool would be kept than may be.
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
        """Let room be made of the key's entry again; False if it was not kept."""
        entry = self._entries.stored(key)
        return entry is not None and self._book.unkeep(entry)
