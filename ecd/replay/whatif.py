"""What a pool of another size, or another policy, would have made of a trace's accesses.

The accesses go through the real core: reserve and commit on a miss, acquire and release on a hit,
with the watermarks and the contiguous memory of a daemon. A miss is put at once, as by an engine
that encodes what it does not find.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ecd.core.allocator import Allocator, Block
from ecd.core.cache import Cache
from ecd.core.outcomes import Leased, LimitReached, Reserved
from ecd.core.policy import Policy
from ecd.core.pool import Evict, Pool, Scan
from ecd.core.types import Content, Key, PoolLimits
from ecd.replay.policies import MakePolicy
from ecd.replay.reading import TOLD_EVERY, Accesses, Progress, no_progress

TRIMMED_AT_ONCE = 64


@dataclass
class Outcome:
    """What one pool saved of the encoder's seconds."""

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


def simulate(
    accesses: Accesses,
    pool_bytes: int,
    name: str,
    make_policy: MakePolicy,
    progress: Progress = no_progress,
) -> Outcome:
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
    outcome = Outcome(name, pool_bytes, accesses=len(accesses.order))
    items = accesses.items
    keys = [Key(str(item.namespace), f"{item.key:x}") for item in items]
    contents = [Content("", (i.rows,), i.nbytes, cost_s=i.cost_s) for i in items]
    seen = bytearray(len(items))
    for place, (number, now_s) in enumerate(zip(accesses.order, accesses.times_s, strict=True)):
        if place % TOLD_EVERY == 0:
            progress(place, len(accesses.order))
        key, content = keys[number], contents[number]
        outcome.access_bytes += content.nbytes
        outcome.infinite_s += content.cost_s * seen[number]
        seen[number] = 1
        found = cache.acquire(session, key, now_s)
        if isinstance(found, Leased):
            cache.release(session, found.lease)
            outcome.hits += 1
            outcome.hit_bytes += content.nbytes
            outcome.saved_s += content.cost_s
            continue
        reserved = cache.reserve(session, key, content, now_s)
        if not isinstance(reserved, Reserved):
            outcome.refused += 1
            continue
        cache.commit(session, reserved.entry, now_s)
        outcome.moved_in_bytes += content.nbytes
        if cache.needs_trim():
            while cache.trim(TRIMMED_AT_ONCE, now_s):
                pass
    progress(len(accesses.order), len(accesses.order))
    outcome.evictions = dict(pool.evictions)
    if pool.wanted_bytes:
        outcome.waste = pool.freed_bytes / pool.wanted_bytes
    return outcome
