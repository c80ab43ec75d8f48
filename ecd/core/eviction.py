"""The eviction plan: which entries to evict so that one extent fits.

Extents differ in size, so evicting in pure policy order until a fit appears frees several times
the bytes needed (docs/decisions.md). The plan grows a window of neighbours around each of the
coldest entries instead, and takes the window that gives up the least, as the policy has it.
"""

from __future__ import annotations

from math import inf

from ecd.core.allocator import Allocator, Block
from ecd.core.entry import Entry
from ecd.core.policy import Policy

MIN_ANCHORS, TIMES_WANTED = 16, 8
"""Windows compared at least, where there are as many. Up to the policy's `anchors` follow until the
anchors alone take so many times the bytes wanted: room for a large entry is rare among small."""
STEPS, STEPS_IN_VAIN = 1024, 4096
"""Entries looked at until no further window is tried, with one found, and with none because held
extents are around the coldest entries: the event loop waits meanwhile."""


def plan(nbytes: int, allocator: Allocator, policy: Policy) -> list[Entry] | None:
    """The entries whose eviction frees `nbytes` in one piece; None if no such set was found.

    Changes nothing. Begins no window after STEPS_IN_VAIN entries.
    """
    wanted = allocator.rounded_bytes(nbytes) // allocator.granule_bytes
    best: list[Entry] | None = None
    least, granules, steps = inf, 0, 0
    enclosed: set[Entry] = set()
    for tried, anchor in enumerate(policy.coldest(), start=1):
        granules += anchor.block.granules
        steps += 1
        if anchor not in enclosed:
            victims, loss = _window(wanted, anchor, least, policy)
            steps += len(victims)
            if loss is None:
                enclosed.update(victims)
            elif loss < least:
                best, least = victims, loss
        is_enough = tried >= policy.anchors or granules >= TIMES_WANTED * wanted
        if best is None:
            if steps >= STEPS_IN_VAIN:
                break
        elif steps >= STEPS or (tried >= MIN_ANCHORS and is_enough):
            break
    return best


def _window(
    wanted: int, anchor: Entry, limit: float, policy: Policy
) -> tuple[list[Entry], float | None]:
    """The victims around `anchor` that free `wanted` granules, and their loss.

    The loss is infinite of victims that free too little and lose `limit` or more, and None of all
    between two held extents, which free too little.
    """
    victims, loss, room = [anchor], policy.loss(anchor), anchor.block.granules
    before, after = anchor.block.before, anchor.block.after
    rank_before = rank_after = None
    is_known_before = is_known_after = False
    while loss < limit:
        if before is not None and before.is_free:
            room += before.granules
            before = before.before
        if after is not None and after.is_free:
            room += after.granules
            after = after.after
        if room >= wanted:
            return victims, loss
        if not is_known_before:
            rank_before, is_known_before = _rank(before, policy), True
        if not is_known_after:
            rank_after, is_known_after = _rank(after, policy), True
        if rank_before is None or (rank_after is not None and rank_after < rank_before):
            rank, block, is_known_after = rank_after, after, False
            after = block and block.after
        else:
            rank, block, is_known_before = rank_before, before, False
            before = block and block.before
        if rank is None or block is None:
            return victims, None
        victims.append(block.owner)
        loss += rank[3]
        room += block.granules
    return victims, inf


def _rank(block: Block | None, policy: Policy) -> tuple[float, float, int, float] | None:
    """The rank of the entry in a block: its loss by granule, its warmth, its id, and its loss.

    None if it cannot be evicted.
    """
    entry = None if block is None else block.owner
    if block is None or not isinstance(entry, Entry):
        return None
    warmth = policy.warmth(entry)
    if warmth is None:
        return None
    loss = policy.loss(entry)
    return loss / block.granules, warmth, entry.id, loss
