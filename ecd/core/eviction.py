"""Which entries go when room is needed: a policy that ranks, and a plan that frees one extent.

A policy knows only entries that may go now: committed and not leased. Extents differ in size,
so taking victims in pure policy order until a fit appears frees several times the bytes that
are needed (docs/decisions.md). The plan therefore grows a window of neighbours around each of
the coldest entries and takes the one that gives up the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from ecd.core.allocator import Allocator
from ecd.core.index import Entry

ANCHORS = 16
"""Windows compared before the best is taken."""

MAX_ANCHORS = 512
"""Windows tried before giving up, when those around the coldest entries are blocked by leases."""


class Policy(Protocol):
    """Ranks the entries that may go. Every operation is O(1) or O(log n)."""

    def add(self, entry: Entry) -> None:
        """`entry` was just used and may go from now on."""

    def remove(self, entry: Entry) -> None:
        """`entry`, which was ranked, is leased or gone."""

    def coldest(self) -> Iterator[Entry]:
        """The entries that may go, the first to go first."""

    def warmth(self, entry: Entry) -> float | None:
        """Larger means later to go; None: `entry` may not go."""


class Lru:
    """Least recently used first: a list through the entries themselves."""

    def __init__(self) -> None:
        self._coldest: Entry | None = None
        self._warmest: Entry | None = None

    def add(self, entry: Entry) -> None:
        entry.colder = self._warmest
        if self._warmest is None:
            self._coldest = entry
        else:
            self._warmest.warmer = entry
        self._warmest = entry

    def remove(self, entry: Entry) -> None:
        colder, warmer = entry.colder, entry.warmer
        if colder is None:
            self._coldest = warmer
        else:
            colder.warmer = warmer
        if warmer is None:
            self._warmest = colder
        else:
            warmer.colder = colder
        entry.colder = entry.warmer = None

    def coldest(self) -> Iterator[Entry]:
        entry = self._coldest
        while entry is not None:
            yield entry
            entry = entry.warmer

    def warmth(self, entry: Entry) -> float | None:
        ranked = entry.colder is not None or entry is self._coldest
        return entry.used_s if ranked else None


def plan(nbytes: int, allocator: Allocator, policy: Policy) -> list[Entry] | None:
    """Entries whose eviction makes room for `nbytes` in one piece; None: no such set was found.

    Changes nothing. Looks at no more than MAX_ANCHORS windows.
    """
    wanted = allocator.rounded_bytes(nbytes)
    best: list[Entry] | None = None
    best_cost = allocator.pool_bytes + 1
    for tried, anchor in enumerate(islice(policy.coldest(), MAX_ANCHORS), start=1):
        found = _window(wanted, anchor, best_cost, policy)
        if found is not None:
            best, best_cost = found
        if best is not None and tried >= ANCHORS:
            break
    return best


def _window(
    wanted: int, anchor: Entry, cost_limit: int, policy: Policy
) -> tuple[list[Entry], int] | None:
    """Victims around `anchor` and the bytes they give up, if that is below `cost_limit`."""
    victims, cost = [anchor], anchor.block.nbytes
    before, after, free = anchor.block.before, anchor.block.after, 0
    while True:
        if before is not None and before.is_free:
            free += before.nbytes
            before = before.before
        if after is not None and after.is_free:
            free += after.nbytes
            after = after.after
        if cost >= cost_limit:
            return None
        if cost + free >= wanted:
            return victims, cost
        sides = [
            (warmth, entry.id, block)
            for block in (before, after)
            if block is not None and isinstance(entry := block.owner, Entry)
            if (warmth := policy.warmth(entry)) is not None
        ]
        if not sides:
            return None
        _, _, block = min(sides)
        victims.append(block.owner)
        cost += block.nbytes
        if block is before:
            before = block.before
        else:
            after = block.after
