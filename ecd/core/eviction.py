"""The eviction plan: which entries to evict so that one extent fits.

Extents differ in size, so evicting in pure policy order until a fit appears frees several times
the bytes needed (docs/decisions.md). The plan grows a window of neighbours around each of the
coldest entries instead, and takes the window that gives up the least, as the policy has it.
"""

from __future__ import annotations

from itertools import islice
from math import inf

from ecd.core.allocator import Allocator, Block
from ecd.core.entry import Entry
from ecd.core.policy import Policy

MIN_ANCHORS, TIMES_WANTED = 16, 8
"""Windows compared at least, where there are as many. Up to the policy's `anchors` follow until the
anchors alone take so many times the bytes wanted: room for a large entry is rare among small."""
MAX_ANCHORS = 512
"""Windows tried before giving up, when leases block those around the coldest entries."""


def plan(nbytes: int, allocator: Allocator, policy: Policy) -> list[Entry] | None:
    """The entries whose eviction frees `nbytes` in one piece; None if no such set was found.

    Changes nothing, and tries no more than MAX_ANCHORS windows.
    """
    wanted = allocator.rounded_bytes(nbytes) // allocator.granule_bytes
    best: list[Entry] | None = None
    least, granules = inf, 0
    for tried, anchor in enumerate(islice(policy.coldest(), MAX_ANCHORS), start=1):
        found = _window(wanted, anchor, least, policy)
        if found is not None:
            best, least = found
        granules += anchor.block.granules
        is_enough = tried >= policy.anchors or granules >= TIMES_WANTED * wanted
        if best is not None and tried >= MIN_ANCHORS and is_enough:
            break
    return best


def _window(
    wanted: int, anchor: Entry, limit: float, policy: Policy
) -> tuple[list[Entry], float] | None:
    """The victims around `anchor` that free `wanted` granules, and their loss.

    None unless the loss is below `limit`.
    """
    victims, loss, room = [anchor], policy.loss(anchor), anchor.block.granules
    before, after = anchor.block.before, anchor.block.after
    while loss < limit:
        if before is not None and before.is_free:
            room += before.granules
            before = before.before
        if after is not None and after.is_free:
            room += after.granules
            after = after.after
        if room >= wanted:
            return victims, loss
        rank, rank_after = _rank(before, policy), _rank(after, policy)
        if rank is None or (rank_after is not None and rank_after < rank):
            block, rank = after, rank_after
            after = block and block.after
        else:
            block = before
            before = block and block.before
        if rank is None or block is None:
            return None
        victims.append(block.owner)
        loss += policy.loss(block.owner)
        room += block.granules
    return None


def _rank(block: Block | None, policy: Policy) -> tuple[float, int] | None:
    """The warmth of the entry in a block, then its id; None if it cannot be evicted."""
    entry = None if block is None else block.owner
    if not isinstance(entry, Entry):
        return None
    warmth = policy.warmth(entry)
    return None if warmth is None else (warmth, entry.id)
