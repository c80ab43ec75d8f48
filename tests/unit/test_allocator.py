"""The allocator against a bitmap that cannot be wrong."""

import gc
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from ecd.core.model.block import Block
from ecd.core.model.types import Extent
from ecd.core.pool.allocator import Allocator
from support.examples import drawn, draws
from support.reserving import is_one_free_extent

GRANULE_BYTES = 4096
POOL = 3


class AllocatorMachine(RuleBasedStateMachine):
    blocks = Bundle("blocks")

    @initialize(granules=st.integers(1, 5000))
    def create(self, granules: int) -> None:
        self.allocator = Allocator(POOL, granules * GRANULE_BYTES, GRANULE_BYTES)
        self.taken = [False] * granules

    def runs(self) -> list[int]:
        runs, run = [], 0
        for taken in [*self.taken, True]:
            if taken:
                runs.append(run)
                run = 0
            else:
                run += 1
        return [run for run in runs if run]

    @rule(
        target=blocks,
        nbytes=st.one_of(st.integers(0, 20 * GRANULE_BYTES), st.integers(0, 6000 * GRANULE_BYTES)),
    )
    def allocate(self, nbytes: int) -> Block | None:
        wanted = max(1, -(-nbytes // GRANULE_BYTES))
        runs = self.runs()
        block = self.allocator.allocate(nbytes)
        if block is None:
            assert wanted > max(runs, default=0), "a fitting hole was refused"
            return None
        start = block.start
        assert block.granules == wanted
        assert block.extent(nbytes) == Extent(POOL, start * GRANULE_BYTES, nbytes)
        assert not any(self.taken[start : start + wanted]), "overlaps a live extent"
        self.taken[start : start + wanted] = [True] * wanted
        left = sorted(self.runs())
        tightest = min(run for run in runs if run >= wanted)
        runs.remove(tightest)
        if tightest > wanted:
            runs.append(tightest - wanted)
        assert left == sorted(runs), "not the tightest hole, or not cut from its edge"
        return block

    @rule(target=blocks, block=consumes(blocks), share=st.floats(0, 1))
    def split(self, block: Block | None, share: float) -> Block | None:
        if block is None or block.granules == 1:
            return block
        start, end = block.start, block.end
        middle = start + 1 + int(share * (block.granules - 2))
        tail = self.allocator.split(block, middle)
        assert (block.start, block.end, tail.start, tail.end) == (start, middle, middle, end)
        self.allocator.free(block)
        self.taken[start:middle] = [False] * (middle - start)
        return tail

    @rule(block=consumes(blocks))
    def free(self, block: Block | None) -> None:
        if block is None:
            return
        start, end = block.start, block.end
        self.allocator.free(block)
        self.taken[start:end] = [False] * (end - start)
        with pytest.raises(KeyError):
            self.allocator.free(block)

    @invariant()
    def figures_agree(self) -> None:
        self.allocator.check()
        runs = self.runs()
        assert self.allocator.largest_free_bytes == max(runs, default=0) * GRANULE_BYTES
        assert self.allocator.free_bytes == sum(runs) * GRANULE_BYTES


AllocatorMachine.TestCase.settings = draws(60, steps=60)
TestAllocator = drawn(AllocatorMachine.TestCase)


def test_a_pool_below_one_granule_is_refused() -> None:
    with pytest.raises(ValueError, match="4096"):
        Allocator(POOL, GRANULE_BYTES - 1, GRANULE_BYTES)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Allocator(POOL, GRANULE_BYTES, GRANULE_BYTES).allocate(-1)


def test_fragmentation_is_reported() -> None:
    allocator = Allocator(POOL, 4 * GRANULE_BYTES, GRANULE_BYTES)
    blocks = [allocator.allocate(GRANULE_BYTES) for _ in range(4)]
    assert allocator.fragmentation == 0.0
    for block in (blocks[0], blocks[2]):
        assert block is not None
        allocator.free(block)
    assert allocator.free_bytes == 2 * GRANULE_BYTES
    assert allocator.largest_free_bytes == GRANULE_BYTES
    assert allocator.fragmentation == 0.5


@draws(100)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40 * GRANULE_BYTES)), max_size=50))
def test_extents_are_taken_where_they_lie_or_not_at_all(gaps: list[tuple[int, int]]) -> None:
    allocator = Allocator(POOL, 300 * GRANULE_BYTES, GRANULE_BYTES)
    taken: list[Block] = []
    offset = 0
    for gap, nbytes in gaps:
        extent = Extent(POOL, offset + gap * GRANULE_BYTES, nbytes)
        end = extent.offset + allocator.rounded_bytes(nbytes)
        block = allocator.allocate_at(extent)
        assert (block is not None) == (end <= allocator.nbytes)
        assert not allocator.allocate_at(extent), "it is taken, or beyond the end"
        assert not allocator.allocate_at(Extent(POOL, end + 1, 1)), "not on a page"
        if block is not None:
            assert block.extent(nbytes) == extent
            taken.append(block)
            offset = end
        allocator.check()
    for block in taken:
        allocator.free(block)
    assert is_one_free_extent(allocator)


def test_blocks_that_are_gone_leave_no_garbage() -> None:
    """A daemon's garbage is rarely looked for: they would add up."""
    allocator, chance = Allocator(POOL, 1000 * GRANULE_BYTES, GRANULE_BYTES), random.Random(1)
    held: list[Block] = []
    gc.disable()
    try:
        for _ in range(2000):
            block = allocator.allocate(chance.randint(1, 50) * GRANULE_BYTES)
            if block is not None:
                held.append(block)
            else:
                allocator.free(held.pop(chance.randrange(len(held))))
        del block
        alive = [each for each in gc.get_objects() if type(each) is Block]
        assert sum(each.allocator is allocator for each in alive) == len([*allocator._backwards()])
    finally:
        gc.enable()
    allocator.check()
