"""A Redis that does not answer: who waits for it, and who does not, on the simulated clock."""

from __future__ import annotations

import asyncio

import pytest
from redis import ResponseError

from ecd.cluster.directory.redis_health import LOOKUP_TIMEOUT_S
from ecd.core.model.types import Key
from ecd_proto.contract import Hint
from simulation.acts import Engine, has, play, store
from simulation.scenario import SIZES, key_of
from simulation.world import Run

LARGE, OTHER = len(SIZES) - 1, 0


async def wait(run: Run, wait_s: float = 5.0) -> str:
    """Have an engine of node 1 that has no encoder ask for LARGE; the outcome."""
    return (await Engine(run, 1).ask(LARGE, only_if_written=False, wait_s=wait_s)).outcome


def outcomes(run: Run) -> dict[str, int]:
    return +run.daemons[1].flights.outcomes


@pytest.mark.parametrize("is_stored", ["before", "meanwhile"])
@pytest.mark.parametrize("down_s", [0.1, 0.5, 1.0, 2.0])
def test_who_waits_outlasts_a_short_failure(down_s: float, is_stored: str) -> None:
    async def act(run: Run) -> None:
        if is_stored == "before":
            await store(run, 0, LARGE)
            await asyncio.sleep(0.5)
        run.redis.is_down = True
        if is_stored == "meanwhile":
            await store(run, 0, LARGE)
        waiting = asyncio.ensure_future(wait(run))
        await asyncio.sleep(down_s)
        run.redis.is_down = False
        await store(run, 1, OTHER)  # Redis is told of it, and has answered then
        assert await waiting == "leased"
        assert has(run, LARGE) == [0, 1]

    play(2, act)


@pytest.mark.parametrize("makes_s", [None, 0.0, 1.5])
@pytest.mark.parametrize("after_s", [None, 0.0, 0.3, 0.6, 1.4])
def test_who_goes_on_without_does_not_wait(after_s: float | None, makes_s: float | None) -> None:
    """Whether or not another client waits, or has waited, that asked so long before."""

    async def act(run: Run) -> None:
        run.redis.is_down = True
        if after_s is not None:
            waiting = asyncio.ensure_future(wait(run, 0.05))
            await asyncio.sleep(after_s)
        outcome, took_s = await Engine(run, 1).ask(LARGE, makes_s=makes_s)
        assert outcome == "missing"
        assert took_s < LOOKUP_TIMEOUT_S + 0.01
        if after_s is not None:
            await waiting

    play(2, act)


def test_nobody_waits_for_a_redis_that_is_away_for_long() -> None:
    async def act(run: Run) -> None:
        run.redis.is_down = True
        for outcome in ("directory_silent", "missing", "missing"):
            before = outcomes(run).get(outcome, 0)
            assert await wait(run) == "missing"
            assert outcomes(run)[outcome] == before + 1
            await asyncio.sleep(1.0)

    play(2, act)


def test_nobody_waits_for_a_redis_that_refuses_lookups() -> None:
    """What nodes tell it is taken all the time."""

    async def act(run: Run) -> None:
        def refuse(script: str, *args: object) -> object:
            raise ResponseError("NOPERM this user has no permissions to run the 'eval' command")

        run.redis.eval = refuse  # type: ignore[method-assign]
        for number in range(8):
            await store(run, 1, number % 3)
            asking = asyncio.ensure_future(wait(run))
            await asyncio.sleep(0.5)
            assert number == 0 or not run.daemons[1].flights
            await asking

    play(2, act)


def test_offers_take_no_place_of_clients_that_wait() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, LARGE)
        await asyncio.sleep(0.5)
        here, run.redis.is_down = run.daemons[1], True
        here_too = Hint(run.places[0].node)
        here.start(here.cluster.offered({Key("n", f"{n}"): here_too for n in range(256)}))
        await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(wait(run))
        await asyncio.sleep(0.3)
        run.redis.is_down = False
        assert await waiting == "leased"

    play(2, act)


def test_what_a_client_here_has_stored_meanwhile_is_written_here() -> None:
    async def act(run: Run) -> None:
        run.redis.is_down = True
        waiting = asyncio.ensure_future(wait(run))
        await asyncio.sleep(0.1)
        await store(run, 1, LARGE)
        assert await waiting == "leased"
        await asyncio.sleep(5.0)
        assert outcomes(run) == {"written_here": 1}

    play(2, act)


def test_a_hinted_node_that_does_not_answer_is_counted_as_such() -> None:
    async def act(run: Run) -> None:
        run.redis.is_down = True
        flights = run.daemons[1].flights
        run.daemons[1].context.run(flights.want, key_of(LARGE), [Hint("10.0.9.9:9470")])
        await asyncio.sleep(5.0)
        assert outcomes(run) == {"unreachable": 1}

    play(2, act)
