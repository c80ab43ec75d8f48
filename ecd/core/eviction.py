"""The eviction plan: which entries to evict so that one extent fits.

Extents differ in size, so evicting in pure policy order until a fit appears frees several times
the bytes needed (docs/decisions.md). The plan grows a window of neighbours around each of the
coldest entries instead, and takes the window that gives up the fewest bytes.
"""

from __future__ import annotations

from itertools import islice

from ecd.core.allocator import Allocator
from ecd.core.entry import Entry
from ecd.core.policy import Policy

ANCHORS = 16
"""Windows compared before the cheapest is taken."""

MAX_ANCHORS = 512
"""Windows tried before giving up, when leases block those around the coldest entries."""


def plan(nbytes: int, allocator: Allocator, policy: Policy) -> list[Entry] | None:
    """The entries whose eviction frees `nbytes` in one piece; None if no such set was found.

    Changes nothing, and tries no more than MAX_ANCHORS windows.
    """
    wanted = allocator.rounded_bytes(nbytes)
    best: list[Entry] | None = None
    best_cost = allocator.nbytes + 1
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
    """The victims around `anchor` and their bytes; None unless those are below `cost_limit`."""
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
