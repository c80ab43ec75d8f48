"""Nodes that take no more links, on the simulated clock and network."""

from __future__ import annotations

import asyncio

from ecd.cluster.fetcher import MAX_PAUSING
from ecd.core.model.types import Key
from ecd.live.flights import MAX_FLIGHTS, Maker
from ecd_proto.contract import Hint
from simulation.acts import FETCH_TIMEOUT_S, get, has, play, store
from simulation.scenario import SIZES, key_of
from simulation.world import Run

LARGE, OTHER = len(SIZES) - 1, 0


def test_nodes_that_are_refused_read_from_those_that_were_not() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        await asyncio.sleep(0.5)
        await asyncio.gather(*(get(run, node, LARGE) for node in range(1, 7)))
        assert has(run, LARGE) == list(range(7))
        refused = [each.cache.counters.refused["peer_links"] for each in run.daemons]
        assert refused[0] >= 4

    play(7, act, links=2)


def test_a_link_that_is_not_used_makes_room_for_another() -> None:
    async def act(run: Run) -> None:
        for key in (LARGE, OTHER):
            await store(run, 0, key)
        await asyncio.sleep(0.5)
        await get(run, 1, LARGE)
        await get(run, 2, OTHER)
        assert has(run, OTHER) == [0], "it was refused, and nobody else has it"
        assert run.daemons[2].flights.outcomes["full"] == 1
        await asyncio.sleep(60.0 + 30.0)
        await get(run, 2, OTHER)
        assert has(run, OTHER) == [0, 2]

    play(3, act, links=1)


def test_an_engine_encodes_at_once_what_a_node_that_is_not_full_delivers_more_slowly() -> None:
    async def act(run: Run) -> None:
        run.network.weather.bytes_per_s = 1e5
        for node, key in ((0, LARGE), (1, LARGE), (0, OTHER), (1, LARGE - 1)):
            await store(run, node, key)
        await asyncio.sleep(0.5)
        await get(run, 3, OTHER)  # takes the link of the first
        await get(run, 2, LARGE - 1)  # finds how slow the second is
        asker, session = run.daemons[2], run.daemons[2].live.cache.open_session()
        hints = [Hint(run.places[node].node) for node in (0, 1)]
        flights, maker = asker.flights, Maker(session, 0.0)
        asker.context.run(flights.want, key_of(LARGE), hints, maker)
        await asyncio.sleep(0.2)
        outcomes = +flights.outcomes
        assert outcomes == {"fetched": 1, "slower_than_encoding": 1}
        asker.live.close_session(session)

    play(4, act, links=1)


def test_an_engine_encodes_what_only_a_full_node_has() -> None:
    async def act(run: Run) -> None:
        for key in (LARGE, OTHER):
            await store(run, 0, key)
        await asyncio.sleep(0.5)
        await get(run, 1, OTHER)  # takes the link
        asker, session = run.daemons[2], run.daemons[2].live.cache.open_session()
        hints = [Hint(run.places[0].node)]
        asker.context.run(asker.flights.want, key_of(LARGE), hints, Maker(session, 0.0))
        await asyncio.sleep(0.2)
        assert +asker.flights.outcomes == {"made_here": 1}
        asker.live.close_session(session)

    play(3, act, links=1)


def test_a_node_without_time_asks_no_more() -> None:
    async def act(run: Run) -> None:
        for key in (LARGE, OTHER):
            await store(run, 0, key)
        await asyncio.sleep(0.5)
        await get(run, 1, OTHER)
        asker = run.daemons[2]
        asker.flights.reload(1.0)
        asker.deliveries.timeout_s = 1.0
        hints = [Hint(run.places[0].node)]
        asker.context.run(asker.flights.want, key_of(LARGE), hints, None, False, True)
        await asyncio.sleep(1.1)
        assert +asker.flights.outcomes == {"full": 1}, "it is not late"

    play(3, act, links=1)


def test_flights_to_a_full_node_take_no_place_of_others() -> None:
    async def act(run: Run) -> None:
        for node, key in ((0, LARGE), (1, OTHER)):
            await store(run, node, key)
        await asyncio.sleep(0.5)
        await get(run, 2, LARGE)  # it has reached the node
        await asyncio.sleep(60.0 + 30.0)
        await get(run, 3, LARGE)  # its link is ended
        asker, full = run.daemons[2], Hint(run.places[0].node)
        for number in range(MAX_FLIGHTS):
            key = Key("n", f"elsewhere {number}")
            asker.context.run(asker.flights.want, key, [full], None, False, True)
        await asyncio.sleep(0.2)
        asker.context.run(asker.flights.want, key_of(OTHER))
        await asyncio.sleep(0.2)
        assert has(run, OTHER) == [1, 2]
        assert asker.flights.outcomes["full"] == MAX_FLIGHTS - MAX_PAUSING
        await asyncio.sleep(FETCH_TIMEOUT_S)
        assert asker.flights.outcomes["full"] == MAX_FLIGHTS

    play(4, act, links=1)


def test_a_node_whose_idle_link_ended_asks_at_once() -> None:
    async def act(run: Run) -> None:
        for key in (LARGE, OTHER):
            await store(run, 0, key)
        await asyncio.sleep(0.5)
        for node in (1, 2):
            await get(run, node, OTHER)
        await asyncio.sleep(60.0 + 30.0)
        reading, first = asyncio.ensure_future(get(run, 3, OTHER)), run.daemons[1]
        while first.cluster._peers.is_connected(run.places[0].node):
            await asyncio.sleep(0.001)
        await get(run, 1, LARGE)
        assert has(run, LARGE) == [0, 1], "the link of another makes room"
        await reading

    play(4, act, links=2)
