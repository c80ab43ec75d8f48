"""Nodes that are sent from a busy one to one that has just read, on the simulated clock."""

from __future__ import annotations

import asyncio

from simulation.acts import get, has, play, store
from simulation.scenario import SIZES
from simulation.world import Run

NODES, LARGE = 9, len(SIZES) - 1


def test_a_node_reads_where_it_was_sent() -> None:
    async def act(run: Run) -> None:
        run.network.weather.bytes_per_s = 1e6
        await store(run, 0, LARGE)
        await asyncio.sleep(0.5)
        await asyncio.gather(*(get(run, node, LARGE) for node in range(1, NODES)))
        assert has(run, LARGE) == list(range(NODES))
        read = [p.node for each in run.daemons for p in each.cluster._peers if p.reads]
        assert len(read) == NODES - 1
        assert read.count(run.places[0].node) < len(read), "some read from those that had it first"

    play(NODES, act)
