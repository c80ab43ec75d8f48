"""Turns to read one large entry, on the simulated clock and network."""

from __future__ import annotations

import asyncio

from simulation.acts import get, has, play, store
from simulation.scenario import SIZES, key_of
from simulation.world import Run

NODES = 9
LARGE, SMALL = len(SIZES) - 1, 0


def test_a_node_that_stops_once_it_has_read_costs_nobody_the_entry() -> None:
    """Half of those that wait have been sent to it by then."""

    async def act(run: Run) -> None:
        run.network.weather.bytes_per_s = 1e7
        first, others = run.daemons[1], range(2, NODES)
        await store(run, 1, SMALL)
        await asyncio.sleep(0.5)
        await asyncio.gather(*(get(run, node, SMALL) for node in others))  # all have links to it
        await store(run, 0, LARGE)
        await asyncio.sleep(0.5)
        reading = asyncio.ensure_future(get(run, 1, LARGE))
        await asyncio.sleep(0.005)
        waiting = asyncio.gather(*(get(run, node, LARGE) for node in others))
        while not first.has(key_of(LARGE)):
            await asyncio.sleep(0.0005)
        first.pause()
        await waiting
        assert has(run, LARGE) == list(range(NODES))
        first.resume()
        await reading

    play(NODES, act, readers_per_entry=1)
