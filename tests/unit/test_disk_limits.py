"""The limits of the disk tier: what is written and when, rests, and the time of a read."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecd.core.demotion import BURST_S, Budget, next_demotions
from ecd.core.disk_catalog import Catalog
from ecd.core.model.types import Content, Key
from ecd.memory.disk.disk_limits import (
    FIRST_S,
    HALVED_IN_S,
    REST_S,
    Breaker,
    DiskCounters,
    ReadTime,
)
from ecd.memory.disk.disk_reads import _wait_for
from simulation.clock import VirtualLoop
from support.clock import SetClock

MIB = 1 << 20


# -- writes ----------------------------------------------------------------------------------------


def test_a_budget_is_saved_up_for_some_seconds_and_no_longer() -> None:
    budget = Budget(1000, 0.0)
    budget.take(int(1000 * BURST_S))
    assert budget.wait_s(True, 0.0) == 0.0
    budget.take(1000)
    assert budget.wait_s(True, 0.0) == 1.0
    assert budget.wait_s(True, 0.4) == pytest.approx(0.6)
    assert budget.wait_s(False, 1.0) == BURST_S / 2, "what nobody read leaves half of it"
    assert budget.wait_s(False, 3600.0) == 0.0
    budget.take(int(1000 * BURST_S) + 1)
    assert budget.wait_s(True, 3600.0) == 0.001


@given(st.lists(st.tuples(st.integers(1, 50_000), st.booleans(), st.floats(0.0, 3.0))))
def test_no_more_is_written_than_the_budget_allows(writes: list[tuple[int, bool, float]]) -> None:
    budget, now_s, written = Budget(1000, 0.0), 0.0, 0
    for nbytes, was_read, pause_s in writes:
        now_s += pause_s
        now_s += budget.wait_s(was_read, now_s)
        budget.wait_s(was_read, now_s)
        budget.take(nbytes)
        written += nbytes
        assert written <= 1000 * (BURST_S + now_s) + nbytes + 1


def test_entries_that_save_most_for_their_bytes_are_written_first() -> None:
    catalog = Catalog(10 * MIB)
    costs = {"large": 1.0, "dear": 1.0, "read": 0.5, "cheap": 0.019, "kept": 1.0, "huge": 9.0}
    sizes = {"large": 4 * MIB, "huge": 10 * MIB}
    victims = [
        SimpleNamespace(
            key=Key("n", name),
            content=Content("uint8", (1,), sizes.get(name, MIB)),
            hits=3 * (name == "read"),
        )
        for name in costs
    ]
    catalog.add(Key("n", "kept"), 1, 1, 1.0, 0.5, 0.0)
    views = SimpleNamespace(
        next_victims=lambda most: victims[:most], cost_s=lambda key, _: costs[key.mm_hash]
    )
    chosen = next_demotions(views, catalog, lambda nbytes: 0.01 * nbytes / MIB)
    assert [info.key.mm_hash for info in chosen] == ["read", "dear", "large"]


# -- rests -----------------------------------------------------------------------------------------


def test_after_three_failures_in_a_row_there_is_a_rest(caplog: pytest.LogCaptureFixture) -> None:
    counters, clock = DiskCounters(), SetClock()
    breaker = Breaker("reads", counters, clock)
    for succeeds in (False, False, True, False, False):
        breaker.worked() if succeeds else breaker.failed("read", "broken")
    assert not breaker.is_resting
    breaker.failed("slow", "late")
    assert breaker.is_resting
    breaker.failed("read", "one that was under way")
    assert (counters.failures["read"], counters.failures["slow"]) == (5, 1)
    assert breaker.cause == "read"
    assert [record.getMessage()[:27] for record in caplog.records] == [
        "reads failed 3 times in a r"
    ]
    clock.at_s += REST_S - 0.1
    assert breaker.is_resting
    clock.at_s += 0.2
    assert not breaker.is_resting
    breaker.failed("read", "broken still")
    assert breaker.is_resting, "it has not worked since"


# -- the time of a read ----------------------------------------------------------------------------


def test_the_time_of_a_read_is_learned_of_small_and_of_large_ones() -> None:
    time = ReadTime(clock := SetClock())
    assert time.seconds(0) == FIRST_S
    for _ in range(200):
        time.learn(4096, 0.02)
        time.learn(8 * MIB, 0.02 + 0.8)
    assert time.seconds(0) == pytest.approx(0.02, rel=0.05)
    assert time.seconds(80 * MIB) == pytest.approx(8.0, rel=0.05)
    clock.at_s += HALVED_IN_S
    assert time.seconds(0) == pytest.approx((0.02 + FIRST_S) / 2, rel=0.05), "it may be over"
    clock.at_s += 3600.0
    assert time.seconds(0) == pytest.approx(FIRST_S)


def waited(act: Callable[[VirtualLoop, Callable[[], None]], object]) -> bool:
    """Whether what comes amid `act` is waited for by one that has a patience of a second."""
    loop = VirtualLoop(Random(1))

    async def run() -> bool:
        read = loop.create_future()
        act(loop, lambda: read.set_result(None))
        await _wait_for(read, 1.0)
        return read.done()

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def test_a_halt_of_the_process_is_not_one_of_the_disk() -> None:
    def halt(loop: VirtualLoop, come: Callable[[], None]) -> None:
        loop.now_s += 1000.0
        loop.call_later(0.5, come)

    assert waited(lambda loop, come: loop.call_later(0.5, come))
    assert not waited(lambda loop, come: loop.call_later(1.5, come))
    assert waited(lambda loop, come: loop.call_later(0.3, halt, loop, come))
