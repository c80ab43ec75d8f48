"""An entry that a peer delivers more slowly than an engine encodes it is left to the engine."""

from __future__ import annotations

import asyncio

import pytest

from ecd.cluster.peers.rates import EXPLORED, HALVED_IN_S
from ecd_proto.contract import Hint
from simulation.acts import AT_ONCE_S, Act, Answer, Engine, play, store
from simulation.client import Client
from simulation.run import SCALE
from simulation.scenario import SIZES
from simulation.world import Run

LARGE, FIRST, SMALL = len(SIZES) - 1, len(SIZES) - 2, 1
BYTES_PER_S = 2e4
READ_S = SCALE["ecd.cluster.transport.read_queue.READ_BYTES"] / BYTES_PER_S
"""Of any large entry, whose parts are read at one time: 1.6 s. LARGE has cost 0.35 s."""


class Asker:
    """An engine whose node knows how slow the other is, which has the entries."""

    def __init__(self, run: Run) -> None:
        self.run, self.engine = run, Engine(run, 1)

    async def begin(self) -> None:
        self.run.network.weather.bytes_per_s = BYTES_PER_S
        for key in (LARGE, FIRST, SMALL):
            await store(self.run, 0, key)
        found = await self.ask(FIRST, makes_s=0.0)
        assert found.outcome == "leased", "nothing is known of the peer yet"

    async def ask(self, key: int, makes_s: float | None) -> Answer:
        hints = [Hint(self.run.places[0].node)]
        return await self.engine.ask(key, makes_s=makes_s, wait_s=60.0, hints=hints)

    @property
    def outcomes(self) -> dict[str, int]:
        return +self.run.daemons[1].flights.outcomes


def play_slowly(act: Act) -> None:
    play(2, act, directory="none")


def test_an_engine_that_encodes_sooner_is_told_so_at_once_and_others_are_served() -> None:
    async def act(run: Run) -> None:
        asker = Asker(run)
        await asker.begin()
        for makes_s in (0.0, 2.0):  # nor does it wait for another node to make it
            outcome, took_s = await asker.ask(LARGE, makes_s)
            assert outcome == "missing"
            assert took_s < AT_ONCE_S
        assert (await asker.ask(SMALL, 0.0)).outcome == "leased", "small ones are always fetched"
        served = await asker.ask(LARGE, None)
        assert served == ("leased", pytest.approx(READ_S, abs=AT_ONCE_S))
        assert asker.outcomes == {"fetched": 3, "slower_than_encoding": 2}

    play_slowly(act)


@pytest.mark.parametrize("later_s", [0.0, 0.0001, 0.0004, 0.0008, 0.0012, 0.002])
def test_an_engine_without_an_encoder_is_served_whoever_else_waits(later_s: float) -> None:
    async def act(run: Run) -> None:
        asker, other = Asker(run), Asker(run)
        await asker.begin()
        first = asyncio.ensure_future(asker.ask(LARGE, 0.0))
        await asyncio.sleep(later_s)
        assert await other.ask(LARGE, None) == ("leased", pytest.approx(READ_S, abs=AT_ONCE_S))
        await first

    play_slowly(act)


def test_a_peer_that_becomes_faster_is_used_again() -> None:
    """One in some is read to measure again, and each halves what a read seems to take: 3 s."""

    async def act(run: Run) -> None:
        asker, client = Asker(run), Client(run, 1)
        await asker.begin()
        run.network.weather.bytes_per_s = 1e9
        found = []
        for number in range(4 * EXPLORED + 4):
            if (await asker.ask(LARGE, 0.0)).outcome == "leased":
                found.append(number)
                await client.evict(LARGE)
        measured, after = found[:4], found[4:]
        assert measured == [(each + 1) * EXPLORED - 1 for each in range(4)]
        assert after == list(range(4 * EXPLORED, 4 * EXPLORED + 4))

    play_slowly(act)


def test_a_peer_that_was_slow_long_ago_is_used_again() -> None:
    async def act(run: Run) -> None:
        asker = Asker(run)
        await asker.begin()
        await asyncio.sleep(2 * HALVED_IN_S)
        assert (await asker.ask(LARGE, 0.0)).outcome == "missing"
        await asyncio.sleep(HALVED_IN_S)
        assert (await asker.ask(LARGE, 0.0)).outcome == "leased"

    play_slowly(act)
