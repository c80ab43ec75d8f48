"""Which entries go when room is needed: a policy that ranks, and a plan that frees one extent.

A policy knows only entries that may go now: committed and not leased. Extents differ in size,
so taking victims in pure policy order until a fit appears frees several times the bytes that
are needed (docs/decisions.md). The plan therefore grows a window of neighbours around each of
the coldest entries and takes the one that gives up the fewest bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from ecd.core.allocator import Allocator
from ecd.core.types import EntryId

ANCHORS = 16
"""Windows compared before the best is taken."""

MAX_ANCHORS = 512
"""Windows tried before giving up, when those around the coldest entries are blocked by leases."""


class Policy(Protocol):
    """Ranks the entries that may go. Every operation is O(1) or O(log n)."""

    def add(self, entry: EntryId) -> None:
        """`entry` was just used and may go from now on."""

    def remove(self, entry: EntryId) -> None:
        """`entry` is leased or gone. Raises KeyError if it was not ranked."""

    def coldest(self) -> Iterator[EntryId]:
        """The entries that may go, the first to go first."""

    def warmth(self, entry: EntryId) -> float | None:
        """Larger means later to go; None: `entry` may not go."""


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._used: OrderedDict[EntryId, int] = OrderedDict()
        self._clock = 0

    def add(self, entry: EntryId) -> None:
        self._clock += 1
        self._used[entry] = self._clock
        self._used.move_to_end(entry)

    def remove(self, entry: EntryId) -> None:
        del self._used[entry]

    def coldest(self) -> Iterator[EntryId]:
        return iter(self._used)

    def warmth(self, entry: EntryId) -> float | None:
        return self._used.get(entry)


class Placement(Protocol):
    """Where entries lie: what the plan needs to know of the index."""

    def offset_of(self, entry: EntryId) -> int: ...

    def entry_at(self, offset: int) -> EntryId | None: ...


def plan(
    nbytes: int, allocator: Allocator, policy: Policy, placement: Placement
) -> list[EntryId] | None:
    """Entries whose eviction makes room for `nbytes` in one piece; None: no such set was found.

    Changes nothing. Looks at no more than MAX_ANCHORS windows.
    """
    wanted = allocator.rounded_bytes(nbytes)
    best: list[EntryId] | None = None
    best_cost = allocator.pool_bytes + 1
    for tried, anchor in enumerate(islice(policy.coldest(), MAX_ANCHORS), start=1):
        found = _window(wanted, anchor, best_cost, allocator, policy, placement)
        if found is not None:
            best, best_cost = found
        if best is not None and tried >= ANCHORS:
            break
    return best


def _window(
    wanted: int,
    anchor: EntryId,
    cost_limit: int,
    allocator: Allocator,
    policy: Policy,
    placement: Placement,
) -> tuple[list[EntryId], int] | None:
    """Victims around `anchor` and the bytes they give up, if that is below `cost_limit`."""
    low, high = allocator.span(placement.offset_of(anchor))
    victims, cost = [anchor], high - low
    while True:
        low -= allocator.free_before(low)
        high += allocator.free_after(high)
        if cost >= cost_limit:
            return None
        if high - low >= wanted:
            return victims, cost
        sides = [
            (warmth, entry, offset)
            for offset in (allocator.used_before(low), allocator.used_after(high))
            if offset is not None
            for entry in (placement.entry_at(offset),)
            if entry is not None
            for warmth in (policy.warmth(entry),)
            if warmth is not None
        ]
        if not sides:
            return None
        _, victim, offset = min(sides)
        victims.append(victim)
        start, end = allocator.span(offset)
        cost += end - start
        low, high = min(low, start), max(high, end)
