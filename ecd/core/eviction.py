"""The eviction plan: which entries to evict so that one extent fits.

Extents differ in size, so evicting in pure policy order until a fit appears frees several times
the bytes needed (docs/decisions.md). The plan grows a window of neighbours around each of the
coldest entries instead, and takes the window that gives up the least, as the policy has it.
"""

from __future__ import annotations

from itertools import islice
from math import inf

from ecd.core.allocator import Allocator
from ecd.core.entry import Entry
from ecd.core.policy import Policy

MAX_ANCHORS = 512
"""Windows tried before giving up, when leases block those around the coldest entries."""


def plan(nbytes: int, allocator: Allocator, policy: Policy) -> list[Entry] | None:
    """The entries whose eviction frees `nbytes` in one piece; None if no such set was found.

    Changes nothing, and tries no more than MAX_ANCHORS windows.
    """
    wanted = allocator.rounded_bytes(nbytes)
    best: list[Entry] | None = None
    least = inf
    for tried, anchor in enumerate(islice(policy.coldest(), MAX_ANCHORS), start=1):
        found = _window(wanted, anchor, least, policy)
        if found is not None:
            best, least = found
        if best is not None and tried >= policy.anchors:
            break
    return best


def _window(
    wanted: int, anchor: Entry, limit: float, policy: Policy
) -> tuple[list[Entry], float] | None:
    """The victims around `anchor` and their loss; None unless that is below `limit`."""
    victims, loss, room = [anchor], policy.loss(anchor), anchor.block.nbytes
    before, after = anchor.block.before, anchor.block.after
    while True:
        if before is not None and before.is_free:
            room += before.nbytes
            before = before.before
        if after is not None and after.is_free:
            room += after.nbytes
            after = after.after
        if loss >= limit:
            return None
        if room >= wanted:
            return victims, loss
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
        loss += policy.loss(block.owner)
        room += block.nbytes
        if block is before:
            before = block.before
        else:
            after = block.after
