"""The eviction plan: which entries to evict so that one extent fits.

Extents differ in size, so evicting in pure policy order until a fit appears frees several times
the bytes needed (docs/decisions.md). The plan grows a window of neighbours around each of the
coldest entries instead, and takes the window that gives up the least, as the policy has it.
"""

from __future__ import annotations

from math import inf

from ecd.core.model.entry import Entry
from ecd.core.policy.policy import Policy
from ecd.core.pool.allocator import Allocator

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
            loss = policy.loss(anchor)
            if loss >= least:
                steps += 1
            else:
                victims, lost = _window(wanted, anchor, loss, least, policy)
                steps += len(victims)
                if lost is None:
                    enclosed.update(victims)
                elif lost < least:
                    best, least = victims, lost
        is_enough = tried >= policy.anchors or granules >= TIMES_WANTED * wanted
        if best is None:
            if steps >= STEPS_IN_VAIN:
                break
        elif steps >= STEPS or (tried >= MIN_ANCHORS and is_enough):
            break
    return best


def _window(
    wanted: int, anchor: Entry, loss: float, limit: float, policy: Policy
) -> tuple[list[Entry], float | None]:
    """The victims around `anchor`, whose loss is below `limit`, that free `wanted` granules.

    Returns them with their loss: infinite of victims that free too little and lose `limit` or more,
    and None of all between two held extents, which free too little.
    """
    victims, room = [anchor], anchor.block.granules
    before, after = anchor.block.before, anchor.block.after
    # Losses of the neighbours, and by granule; None while unknown.
    density_before: float | None = None
    density_after: float | None = None
    while loss < limit:
        if before is not None and before.is_free:
            room += before.granules
            before = before.before
        if after is not None and after.is_free:
            room += after.granules
            after = after.after
        if room >= wanted:
            return victims, loss
        if density_before is None:
            density_before = loss_before = inf
            if before is not None and isinstance(before.owner, Entry):
                loss_before = policy.loss(before.owner)
                density_before = loss_before / before.granules
        if density_after is None:
            density_after = loss_after = inf
            if after is not None and isinstance(after.owner, Entry):
                loss_after = policy.loss(after.owner)
                density_after = loss_after / after.granules
        if before is None or after is None or density_before != density_after:
            is_after = density_after < density_before
        else:
            is_after = density_after < inf and _is_colder(after.owner, before.owner, policy)
        if is_after and after is not None:
            victims.append(after.owner)
            loss += loss_after
            room += after.granules
            after, density_after = after.after, None
        elif before is not None and density_before < inf:
            victims.append(before.owner)
            loss += loss_before
            room += before.granules
            before, density_before = before.before, None
        else:
            return victims, None
    return victims, inf


def _is_colder(one: Entry, other: Entry, policy: Policy) -> bool:
    """Whether the first of two ranked entries is evicted before the second."""
    return (policy.warmth(one) or 0.0, one.id) < (policy.warmth(other) or 0.0, other.id)
