"""Entries come from other nodes, or do not: bounds and deadlines, on the simulated clock."""

from __future__ import annotations

import asyncio

import pytest

from ecd.cluster.peers.link import ANSWER_TIMEOUT_S
from ecd.cluster.peers.offers import OFFER_TTL_S
from ecd_proto.contract import Hint
from simulation.acts import Engine, has, play, store
from simulation.client import Client
from simulation.scenario import SIZES, Action
from simulation.world import Run

LARGE, OTHER, SMALL, ABSENT = len(SIZES) - 1, len(SIZES) - 2, 2, 0
MOMENT_S = 0.01


def outcomes(run: Run, node: int) -> dict[str, int]:
    return +run.daemons[node].flights.outcomes


def test_static_peers_are_asked_at_one_time() -> None:
    async def act(run: Run) -> None:
        for node, key in ((0, LARGE), (1, SMALL), (0, OTHER)):
            await store(run, node, key)
        run.daemons[2].die(silently=False)
        engine, status = Engine(run, 4), run.daemons[4].cluster.status
        for key in (LARGE, SMALL):
            assert (await engine.ask(key)).took_s < MOMENT_S
        assert status().speculative_reads_used == 1, "answers say where an entry lies"
        assert (await engine.ask(ABSENT)).took_s < MOMENT_S, "nobody waits for a dead node"
        run.daemons[3].pause()
        assert (await engine.ask(OTHER)).took_s < MOMENT_S, "nor for one that is silent"
        for expected_s in (ANSWER_TIMEOUT_S, 0.0):  # then it is left alone for a while
            assert (await engine.ask(ABSENT)).took_s == pytest.approx(expected_s, abs=MOMENT_S)

    play(5, act, directory="static")


def test_no_room_is_a_miss() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, OTHER)
        await store(run, 1, LARGE)
        reading = Client(run, 1).get(Action(0.0, "get", 1, 0, LARGE, 10.0, 0.2))
        holding = asyncio.ensure_future(reading)
        await asyncio.sleep(0.1)
        hints = [Hint(run.places[0].node)]
        outcome, took_s = await Engine(run, 1).ask(OTHER, hints=hints)
        assert outcome == "missing"
        assert took_s < MOMENT_S
        assert outcomes(run, 1) == {"no_room": 1}
        await holding
        assert (await Engine(run, 1).ask(OTHER, hints=hints)).outcome == "leased"

    play(2, act, directory="none", pool_bytes=160 << 10)


def test_offers_bring_entries_ahead_of_need() -> None:
    async def act(run: Run) -> None:
        client, to = Client(run, 0), run.places[1].node
        await store(run, 0, LARGE)
        for key in (LARGE, OTHER):
            await client.offer(key, to)
        await client.offer(SMALL, "169.254.0.1:80")
        await asyncio.sleep(0.1)
        assert has(run, LARGE) == [0, 1], "what is stored already"
        await asyncio.sleep(OFFER_TTL_S - 0.2)
        for key in (OTHER, SMALL):
            await store(run, 0, key)
        await asyncio.sleep(0.1)
        assert has(run, OTHER) == [0, 1], "what was stored later"
        assert has(run, SMALL) == [0]

    play(2, act, directory="none")


def test_an_offer_is_kept_for_a_minute() -> None:
    async def act(run: Run) -> None:
        await Client(run, 0).offer(LARGE, run.places[1].node)
        await asyncio.sleep(OFFER_TTL_S)
        await store(run, 0, LARGE)
        await asyncio.sleep(1.0)
        assert has(run, LARGE) == [0]

    play(2, act, directory="none")


@pytest.mark.parametrize("fetch_timeout_s", [1.0, 2.5])
def test_a_fetch_that_takes_too_long_is_a_miss(fetch_timeout_s: float) -> None:
    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        run.network.weather.bytes_per_s = 1e4
        hints = [Hint(run.places[0].node)]
        outcome, took_s = await Engine(run, 1).ask(LARGE, wait_s=60.0, hints=hints)
        assert (outcome, took_s) == ("missing", pytest.approx(fetch_timeout_s, abs=MOMENT_S))
        assert outcomes(run, 1) == {"late": 1}
        assert run.daemons[1].cluster.status().set_aside_bytes > 0, "a read may still write there"
        await asyncio.sleep(3.5)
        assert run.daemons[1].cluster.status().set_aside_bytes == 0

    play(2, act, directory="none", fetch_timeout_s=fetch_timeout_s)


@pytest.mark.parametrize("nbytes", [0, 1000, 60_000])
def test_nodes_that_expect_a_key_from_each_other_do_not_wait(nbytes: int) -> None:
    async def act(run: Run) -> None:
        here, there = (Engine(run, node) for node in range(2))
        hints = [Hint(place.node, 0, 0, nbytes) for place in run.places]
        for _ in range(10):
            asks = here.ask(LARGE, hints=[hints[1]]), there.ask(LARGE, hints=[hints[0]])
            for outcome, took_s in await asyncio.gather(*asks):
                assert outcome == "missing"
                assert took_s < MOMENT_S
        read = [daemon.cluster.status().speculative_reads for daemon in run.daemons]
        assert read == [10 * (nbytes > 0)] * 2

    play(2, act, directory="static")


def test_a_ttl_counts_from_the_put_on_whichever_node() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        run.daemons[2].die(silently=False)
        run.settings = {"namespace_ttls": {"n": 60.0}}
        run.start(2, is_warm=False)
        await asyncio.sleep(0.5)
        hints, strict = [Hint(run.places[0].node)], Engine(run, 2)
        assert (await strict.ask(LARGE, hints=hints)).outcome == "leased"
        await asyncio.sleep(59.0)
        assert has(run, LARGE) == [0, 2]
        await asyncio.sleep(2.0)
        assert has(run, LARGE) == [0], "not from its arrival"
        run.network.weather.hung_reads = 1.0
        outcome, took_s = await strict.ask(LARGE, hints=hints)
        assert (outcome, took_s < MOMENT_S) == ("missing", True), (
            "it is told the age, and reads none"
        )
        run.network.weather.hung_reads = 0.0
        assert (await Engine(run, 1).ask(LARGE, hints=hints)).outcome == "leased"
        await asyncio.sleep(3600.0 - 61.0)
        assert has(run, LARGE) == []

    play(3, act, {"namespace_ttls": {"n": 3600.0}}, directory="none")
