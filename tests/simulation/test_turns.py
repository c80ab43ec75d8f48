"""Turns to read one large entry, on the simulated clock and network."""

from __future__ import annotations

import asyncio
from random import Random

from simulation.client import Client
from simulation.clock import VirtualLoop
from simulation.network import Weather
from simulation.run import _abandon, small
from simulation.scenario import SIZES, Action, Scenario, key_of
from simulation.world import Run

NODES, FETCH_TIMEOUT_S = 9, 5.0
LARGE, SMALL = len(SIZES) - 1, 0


def test_a_node_that_stops_once_it_has_read_costs_nobody_the_entry() -> None:
    """Half of those that wait have been sent to it by then."""
    loop = VirtualLoop(Random(1))
    asyncio.set_event_loop(loop)
    weather = Weather(bytes_per_s=1e7)
    about = "redis", 256 << 10, 30.0, FETCH_TIMEOUT_S, False, weather, 0.0, None, 0.0, (), 1
    try:
        with small():
            loop.run_until_complete(_stop_a_reader(Run(loop, Scenario(1, NODES, *about))))
    finally:
        _abandon(loop)
        asyncio.set_event_loop(None)


async def _stop_a_reader(run: Run) -> None:
    for node in range(NODES):
        run.start(node, is_warm=False)
    await asyncio.sleep(0.5)
    first, others = run.daemons[1], range(2, NODES)
    await Client(run, 1).put(SMALL, 0.001, 0.0)
    await asyncio.sleep(0.5)
    await asyncio.gather(*(_get(run, node, SMALL) for node in others))  # all have links to it
    await Client(run, 0).put(LARGE, 0.001, 0.0)
    await asyncio.sleep(0.5)
    reading = asyncio.ensure_future(_get(run, 1, LARGE))
    await asyncio.sleep(0.005)
    waiting = asyncio.gather(*(_get(run, node, LARGE) for node in others))
    while not first.has(key_of(LARGE)):
        await asyncio.sleep(0.0005)
    first.pause()
    await waiting
    assert all(run.daemons[node].has(key_of(LARGE)) for node in others)
    first.resume()
    await reading
    assert not [*run.violations, *run.loop.errors]


async def _get(run: Run, node: int, key: int) -> None:
    """Ask the directory for the key, as an engine does that cannot encode it."""
    await Client(run, node).get(Action(0.0, "get", node, 0, key, FETCH_TIMEOUT_S, 0.5))
