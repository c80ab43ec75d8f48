"""Nodes that take no more links, on the simulated clock and network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random

from simulation.client import Client
from simulation.clock import VirtualLoop, virtual_time
from simulation.network import Weather
from simulation.run import _abandon, small
from simulation.scenario import SIZES, Action, Scenario, key_of
from simulation.world import Run

LARGE, OTHER = len(SIZES) - 1, 0


Act = Callable[[Run], Coroutine[object, object, None]]


def play(nodes: int, links: int, act: Act) -> None:
    """Have nodes that take so many links start, and act."""
    rng = Random(1)
    loop = VirtualLoop(rng)
    asyncio.set_event_loop(loop)
    try:
        with virtual_time(loop, rng), small(links):
            loop.run_until_complete(_start_and_act(loop, nodes, act))
    finally:
        _abandon(loop)
        asyncio.set_event_loop(None)


async def _start_and_act(loop: VirtualLoop, nodes: int, act: Act) -> None:
    about = "redis", 256 << 10, 30.0, 5.0, False, Weather(), 0.0, None, 0.0, (), 2
    run = Run(loop, Scenario(1, nodes, *about))
    for number in range(nodes):
        run.start(number, is_warm=False)
    await asyncio.sleep(0.5)
    await act(run)
    assert not [*run.violations, *loop.errors]


async def get(run: Run, node: int, key: int) -> None:
    """Ask the directory for the key, as an engine does that cannot encode it."""
    await Client(run, node).get(Action(0.0, "get", node, 0, key, 5.0, 0.5))


def has(run: Run, key: int) -> list[int]:
    return [number for number, each in enumerate(run.daemons) if each.has(key_of(key))]


def test_nodes_that_are_refused_read_from_those_that_were_not() -> None:
    async def act(run: Run) -> None:
        await Client(run, 0).put(LARGE, 0.001, 0.0)
        await asyncio.sleep(0.5)
        await asyncio.gather(*(get(run, node, LARGE) for node in range(1, 7)))
        assert has(run, LARGE) == list(range(7))
        refused = [each.cache.counters.refused["peer_links"] for each in run.daemons]
        assert refused[0] >= 4

    play(7, 2, act)


def test_a_link_that_is_not_used_makes_room_for_another() -> None:
    async def act(run: Run) -> None:
        for key in (LARGE, OTHER):
            await Client(run, 0).put(key, 0.001, 0.0)
        await asyncio.sleep(0.5)
        await get(run, 1, LARGE)
        await get(run, 2, OTHER)
        assert has(run, OTHER) == [0], "it was refused, and nobody else has it"
        assert run.daemons[2].flights.outcomes["full"] == 1
        await asyncio.sleep(60.0 + 30.0)
        await get(run, 2, OTHER)
        assert has(run, OTHER) == [0, 2]

    play(3, 1, act)
