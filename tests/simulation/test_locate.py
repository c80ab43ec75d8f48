"""The question which nodes hold a key, and whether all were heard, on the simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ecd.base.wire import TOLD_METADATA_BYTES
from ecd.cluster.cluster import LOCATE_S
from ecd.cluster.directory.redis_health import LOOKUP_TIMEOUT_S, PAUSE
from ecd.core.model.types import Key
from ecd_proto.v1 import cache_pb2 as pb
from simulation.acts import AT_ONCE_S, Engine, play, store
from simulation.scenario import SIZES, key_of
from simulation.world import Run

NUMBER, ABSENT = len(SIZES) - 1, 0
MOMENT_S = 0.01


async def locate(engine: Engine) -> tuple[list[list[pb.Holder]], bool, float]:
    """The holders of both keys, whether there may be more, and the seconds until they are told."""
    reply, took_s = await engine.locate(key_of(NUMBER), key_of(ABSENT))
    return [list(each.holders) for each in reply.located], reply.is_partial, took_s


@pytest.mark.parametrize("directory", ["redis", "static"])
def test_every_node_is_heard_and_this_one_comes_first(directory: str) -> None:
    async def act(run: Run) -> None:
        for node in (0, 1, 2):
            await store(run, node, NUMBER)
        await asyncio.sleep(0.5)
        for _ in range(2):
            (holders, none), is_partial, took_s = await locate(Engine(run, 2))
            assert [holder.nbytes for holder in holders] == [SIZES[NUMBER]] * 3
            assert holders[0].node == run.places[2].node
            assert {holder.node for holder in holders} == {place.node for place in run.places[:3]}
            assert (none, is_partial) == ([], False)
            assert took_s < MOMENT_S

    play(4, act, directory=directory)


@pytest.mark.parametrize("directory", ["redis", "static"])
def test_short_metadata_are_told(directory: str) -> None:
    async def act(run: Run) -> None:
        short, long = Key("n", "short"), Key("n", "long")
        await Engine(run, 0).put(short, metadata=b"\x01 with a space\xff")
        await Engine(run, 0).put(long, metadata=bytes(TOLD_METADATA_BYTES + 1))
        await asyncio.sleep(0.5)
        reply, _ = await Engine(run, 1).locate(short, long)
        told = [holder.metadata for each in reply.located for holder in each.holders]
        assert told == [b"\x01 with a space\xff", b""]

    play(2, act, directory=directory)


def test_the_age_of_an_entry_counts_from_its_put() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, NUMBER)
        await asyncio.sleep(70.0)
        ([holder], _), *_ = await locate(Engine(run, 0))
        assert 70.0 <= holder.age_s < 70.0 + AT_ONCE_S

    play(1, act, directory="none")


def test_without_a_directory_an_answer_is_for_this_node_alone() -> None:
    async def act(run: Run) -> None:
        for node in (0, 1):
            await store(run, node, NUMBER)
        ([holder], none), is_partial, took_s = await locate(Engine(run, 0))
        assert holder.node == run.places[0].node
        assert (none, is_partial) == ([], True)
        assert took_s < MOMENT_S

    play(2, act, directory="none")


def kill(run: Run) -> None:
    run.daemons[2].die(silently=False)


def cut_off(run: Run) -> None:
    run.network.cut_off(run.places[0].node, run.places[2].node)


def halt(run: Run) -> None:
    run.daemons[2].pause()


@pytest.mark.parametrize(("stop", "first_s"), [(kill, 0.0), (cut_off, LOCATE_S), (halt, LOCATE_S)])
def test_a_node_that_is_not_heard_is_said_and_the_others_are_told(
    stop: Callable[[Run], None], first_s: float
) -> None:
    async def act(run: Run) -> None:
        for node in (1, 2):
            await store(run, node, NUMBER)
        stop(run)
        for expected_s in (first_s, 0.0, 0.0):  # then it is left alone for a while
            ([holder], none), is_partial, took_s = await locate(Engine(run, 0))
            assert holder.node == run.places[1].node
            assert (none, is_partial) == ([], True)
            assert took_s == pytest.approx(expected_s, abs=MOMENT_S)

    play(3, act, directory="static")


def test_nobody_knows_what_a_redis_would_have_said_that_stands_still() -> None:
    async def act(run: Run) -> None:
        for node in (0, 1):
            await store(run, node, NUMBER)
        await asyncio.sleep(0.5)
        run.redis.is_halted = True
        for expected_s in (LOOKUP_TIMEOUT_S, 0.0):
            ([holder], none), is_partial, took_s = await locate(Engine(run, 0))
            assert holder.node == run.places[0].node
            assert (none, is_partial) == ([], True)
            assert took_s == pytest.approx(expected_s, abs=MOMENT_S)
        run.redis.is_halted = False
        await asyncio.sleep(PAUSE.first_s + MOMENT_S)
        for is_still in (True, False):  # the daemon's next word to Redis says that it is up
            (holders, _), is_partial, _ = await locate(Engine(run, 0))
            assert (len(holders), is_partial) == (2, is_still)
            await asyncio.sleep(MOMENT_S)

    play(2, act)
