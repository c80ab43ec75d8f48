"""The policies that a replay can run, by the names that `ECD_EVICTION` has for them."""

from __future__ import annotations

from collections.abc import Callable

from ecd.core.model.entry import Entry
from ecd.core.policy.policy import Lru, Policy
from ecd.core.policy.value_density import ValueDensity
from ecd.core.pool.allocator import Allocator

MakePolicy = Callable[[Allocator], Policy]


def recorded_key(entry: Entry) -> int:
    """The 64 bits of a replayed entry's key, as they were recorded."""
    return int(entry.mm_hash, 16)


POLICIES: dict[str, MakePolicy] = {
    "value": lambda allocator: ValueDensity(allocator.nbytes, recorded_key),
    "lru": lambda _: Lru(),
}
