"""A trace's accesses, through a pool of another size or with another policy.

The accesses go through the real core: reserve and commit on a miss, acquire and release on a hit,
with the watermarks and the contiguous memory of a daemon. A miss is put at once, as by an engine
that encodes what it does not find. A disk tier keeps what the daemon's rule writes ahead within the
write budget, by the trace's time; its reads and writes take no turns, and none fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ecd.core.cache import Cache
from ecd.core.demotion import BLOCK_BYTES, LOOKED_AT, Budget, next_demotions, rounded
from ecd.core.disk_catalog import Catalog
from ecd.core.model.block import Block
from ecd.core.model.outcomes import Leased, LimitReached, Reserved
from ecd.core.model.types import Content, Key, PoolLimits
from ecd.core.policy.policy import Policy
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Evict, Pool, Scan
from ecd.replay.policies import MakePolicy
from ecd.replay.reading import TOLD_EVERY, Accesses, Progress, no_progress

TRIMMED_AT_ONCE = 64
READ_S = 1e-3
"""The time of a read from disk, besides that of its bytes."""


class Disk(NamedTuple):
    """A disk tier: its size, its write budget, and how fast an entry is read."""

    nbytes: int
    write_bytes_per_s: int = 20_000_000
    read_bytes_per_s: int = 1_000_000_000

    def read_time_s(self, nbytes: int) -> float:
        return READ_S + nbytes / self.read_bytes_per_s


@dataclass
class PoolOutcome:
    """The encoder's seconds that one pool saved, and its other figures."""

    policy: str
    pool_bytes: int
    saved_s: float = 0.0
    infinite_s: float = 0.0
    """The seconds that a pool which evicts nothing would have saved."""
    hits: int = 0
    hit_bytes: int = 0
    accesses: int = 0
    access_bytes: int = 0
    moved_in_bytes: int = 0
    refused: int = 0
    """Entries for which no room could be made: larger than the pool."""
    evictions: dict[str, int] = field(default_factory=dict)  # by reason
    waste: float = 1.0
    """Bytes freed by evictions for an extent, per byte of these extents."""
    disk_hits: int = 0
    """The hits that were read from disk."""
    disk_saved_s: float = 0.0
    """The seconds that these saved: those of encoding less those of reading."""
    disk_written_bytes: int = 0

    @property
    def share(self) -> float:
        """The saved seconds, of those that a pool which evicts nothing would have saved."""
        return self.saved_s / self.infinite_s if self.infinite_s else 0.0

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def byte_hit_ratio(self) -> float:
        return self.hit_bytes / self.access_bytes if self.access_bytes else 0.0

    def count_hit(self, content: Content, read_s: float | None = None) -> None:
        """Count an access that found its key: in memory, or on disk after `read_s`."""
        saved_s = content.cost_s - (read_s or 0.0)
        self.hits += 1
        self.hit_bytes += content.nbytes
        self.saved_s += saved_s
        if read_s is not None:
            self.disk_hits += 1
            self.disk_saved_s += saved_s


class _MeasuredPool(Pool):
    def __init__(self, allocator: Allocator, policy: Policy, limits: PoolLimits) -> None:
        super().__init__(allocator, limits=limits, policy=policy)
        self.wanted_bytes = self.freed_bytes = 0

    def evict_for(
        self, nbytes: int, evict: Evict, scan: Scan, most: int | None = None
    ) -> Block | None:
        before = self.allocator.used_bytes
        block = super().evict_for(nbytes, evict, scan, most)
        if block is not None:
            self.wanted_bytes += block.nbytes
            self.freed_bytes += before + block.nbytes - self.allocator.used_bytes
        return block


class _DiskTier:
    """The entries on disk. The cache does not change between two accesses."""

    def __init__(self, disk: Disk, cache: Cache, now_s: float) -> None:
        self._cache, self._catalog = cache, Catalog(disk.nbytes)
        self._budget = Budget(disk.write_bytes_per_s, now_s)
        self._read_time_s = disk.read_time_s
        self._at_s = now_s
        self._writes_left = 0
        self.written_bytes = 0

    def note_put(self) -> None:
        """Search again for entries to write, LOOKED_AT at most until the next put."""
        self._writes_left = LOOKED_AT

    def write_until(self, now_s: float) -> None:
        """Write ahead as much as the budget allows by then."""
        while self._write_some(now_s):
            pass
        self._at_s = max(self._at_s, now_s)

    def read_s(self, key: Key, now_s: float) -> float | None:
        """Read a key, in so many seconds; None if it is not there, or encoding is quicker."""
        on_disk = self._catalog.get(key)
        if on_disk is None:
            return None
        seconds = self._read_time_s(on_disk.nbytes)
        if seconds >= on_disk.cost_s:
            return None
        self._catalog.use(on_disk, now_s)
        return seconds

    def _write_some(self, until_s: float) -> bool:
        """Write what is evicted next. False: nothing is left, or the budget comes too late."""
        if self._writes_left <= 0 or not self._may_write(True, until_s):
            return False
        chosen = next_demotions(self._cache.views, self._catalog, self._read_time_s)
        if not chosen:
            self._writes_left = 0
        for info in chosen:
            if not self._may_write(info.hits > 0, until_s):
                return False
            self._write(info.key, info.content)
        return True

    def _may_write(self, was_read: bool, until_s: float) -> bool:
        """Wait for the budget, unless that is too long."""
        at_s = self._at_s + self._budget.wait_s(was_read, self._at_s)
        if at_s > until_s:
            return False
        self._at_s = at_s
        return True

    def _write(self, key: Key, content: Content) -> None:
        file_bytes = BLOCK_BYTES + rounded(content.nbytes)
        cost_s = self._cache.views.cost_s(key, content)
        saved_s = cost_s - self._read_time_s(content.nbytes)
        self._budget.take(file_bytes)
        while not self._catalog.has_room(file_bytes):
            self._catalog.make_room(file_bytes, TRIMMED_AT_ONCE)
        self._catalog.add(key, content.nbytes, file_bytes, cost_s, saved_s, self._at_s)
        self.written_bytes += file_bytes
        self._writes_left -= 1


def simulate(
    accesses: Accesses,
    pool_bytes: int,
    name: str,
    make_policy: MakePolicy,
    progress: Progress = no_progress,
    disk: Disk | None = None,
) -> PoolOutcome:
    """Run the accesses through a pool of `pool_bytes` under the policy called `name`."""
    allocator = Allocator(0, pool_bytes, accesses.granule_bytes)
    limits = PoolLimits()
    if accesses.recorded is not None:
        low, high = accesses.recorded.watermarks
        limits = PoolLimits(low_watermark=low, high_watermark=high)
    pool = _MeasuredPool(allocator, make_policy(allocator), limits)
    cache = Cache([pool])
    session = cache.open_session()
    assert not isinstance(session, LimitReached)
    outcome = PoolOutcome(name, pool_bytes, accesses=len(accesses.order))
    items = accesses.items
    keys = [Key(str(item.namespace), f"{item.key:x}") for item in items]
    contents = [Content("", (i.rows,), i.nbytes, cost_s=i.cost_s) for i in items]
    tier = _DiskTier(disk, cache, accesses.times_s[0]) if disk and accesses.order else None
    seen = bytearray(len(items))
    for place, (number, now_s) in enumerate(zip(accesses.order, accesses.times_s, strict=True)):
        if place % TOLD_EVERY == 0:
            progress(place, len(accesses.order))
        key, content = keys[number], contents[number]
        outcome.access_bytes += content.nbytes
        outcome.infinite_s += content.cost_s * seen[number]
        seen[number] = 1
        if tier is not None:
            tier.write_until(now_s)
        found = cache.acquire(session, key, now_s)
        if isinstance(found, Leased):
            cache.release(session, found.lease)
            outcome.count_hit(content)
            continue
        with cache.reserving():  # in this pool nobody claims a key
            reserved = cache.reserve(session, key, content, now_s)
        if not isinstance(reserved, Reserved):
            outcome.refused += 1
            continue
        cache.commit(session, reserved.entry, now_s)
        outcome.moved_in_bytes += content.nbytes
        if cache.evictor.needs_trim():
            while cache.evictor.trim(TRIMMED_AT_ONCE, now_s):
                pass
        if tier is not None:
            tier.note_put()
            read_s = tier.read_s(key, now_s)
            if read_s is not None:
                outcome.count_hit(content, read_s)
                lease = cache.acquire(session, key, now_s)
                if isinstance(lease, Leased):
                    cache.release(session, lease.lease)
    progress(len(accesses.order), len(accesses.order))
    outcome.evictions = dict(pool.evictions)
    outcome.disk_written_bytes = 0 if tier is None else tier.written_bytes
    if pool.wanted_bytes:
        outcome.waste = pool.freed_bytes / pool.wanted_bytes
    return outcome
