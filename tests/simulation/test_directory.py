"""The directory in Redis is emptied, slow or silent: what that costs, on the simulated clock."""

from __future__ import annotations

import asyncio

import pytest

from ecd.base.identity import NodeIdentity
from ecd.cluster.directory.redis_directory import RedisDirectory
from ecd.cluster.directory.redis_health import LOOKUP_TIMEOUT_S, PAUSE
from ecd.cluster.directory.redis_lookup import NODE_CACHE_S
from ecd.cluster.directory.redis_publisher import BATCH, BEAT_S, WRITE_TIMEOUT_S
from ecd.cluster.directory.redis_rows import NODE_TTL_S
from ecd.core.model.types import Key
from ecd.settings.config import Config
from ecd_proto.contract import Hint
from ecd_proto.v1 import cache_pb2 as pb
from simulation.acts import AT_ONCE_S, Engine, play, store
from simulation.scenario import SIZES, key_of
from simulation.world import Run

NUMBER, OTHER = len(SIZES) - 1, 0
MOMENT_S = 0.01


def directory_of(run: Run, node: int) -> pb.DirectoryStatus:
    return run.daemons[node].cluster.status().directory


def knows_all_of(run: Run, node: int) -> bool:
    daemon = run.daemons[node]
    return run.redis.held().get(daemon.incarnation, set()) == daemon.rows()


def test_a_redis_that_was_emptied_is_told_all_again() -> None:
    async def act(run: Run) -> None:
        here, there = Engine(run, 0), Engine(run, 1)
        await here.put(*(Key("n", f"one of many {number}") for number in range(BATCH + 100)))
        await store(run, 0, NUMBER)
        await asyncio.sleep(1.0)
        assert knows_all_of(run, 0)
        run.redis.empty()
        assert (await there.ask(NUMBER)).outcome == "missing"
        await asyncio.sleep(BEAT_S)
        assert knows_all_of(run, 0)
        assert (await there.ask(NUMBER)).outcome == "leased"

    play(2, act, pool_bytes=4 << 20)


def test_a_redis_that_stands_still_costs_the_time_of_one_lookup_a_second() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, NUMBER)
        await asyncio.sleep(0.5)
        engine, run.redis.is_halted = Engine(run, 1), True
        for turn in range(2):
            asked = [await engine.ask_for(Key("n", f"{turn}, {number}")) for number in range(20)]
            [first, *others] = [took_s for [(_, took_s)] in asked]
            assert first == pytest.approx(LOOKUP_TIMEOUT_S, abs=MOMENT_S)
            assert sum(others) < MOMENT_S
            await asyncio.sleep(PAUSE.first_s)
        for number in range(NUMBER):
            await store(run, 1, number)
        await asyncio.sleep(WRITE_TIMEOUT_S + MOMENT_S)  # it is told of them in vain
        assert not directory_of(run, 1).up
        run.redis.is_halted = False
        await asyncio.sleep(PAUSE.first_s + AT_ONCE_S)
        assert directory_of(run, 1).up
        assert knows_all_of(run, 1)
        assert (await engine.ask(NUMBER)).outcome == "leased"

    play(2, act, pool_bytes=1 << 20)


def test_hints_wait_no_longer_for_a_redis_that_stands_still() -> None:
    async def act(run: Run) -> None:
        hints = [Hint(f"10.9.9.9:{number}") for number in range(1, 9)]
        run.redis.is_halted = True
        keys = [Key("n", f"k{number}") for number in range(64)]
        answers = await Engine(run, 0).ask_for(*keys, hints=hints)
        assert {outcome for outcome, _ in answers} == {"missing"}
        assert max(answer.took_s for answer in answers) < LOOKUP_TIMEOUT_S + MOMENT_S

    play(1, act, {"hint_networks": ()})


def test_no_question_waits_longer_than_a_lookup() -> None:
    async def act(run: Run) -> None:
        config = Config(peer_address="10.0.9.9:1", peer_insecure=True, directory="redis://r")
        identity = NodeIdentity("default", "f" * 32, "a test", "10.0.9.9:1")
        about = config, identity, run.daemons[0].cache, run.loop.clock, run.redis.client
        run.redis.is_halted = True
        for ask, nothing in (
            (lambda at: at.find([key_of(NUMBER)]), None),
            (lambda at: at.begin_making({key_of(NUMBER): ""}), {}),
            (lambda at: at.knows("10.0.9.8:1"), False),
        ):
            directory, begun_s = RedisDirectory(*about), run.loop.now_s
            assert await ask(directory) == nothing
            assert run.loop.now_s - begun_s == pytest.approx(LOOKUP_TIMEOUT_S, abs=MOMENT_S)
            assert (directory.state.errors, directory.state.up) == (1, False)
            begun_s = run.loop.now_s
            assert not await directory.knows("10.0.9.7:1")
            assert run.loop.now_s == begun_s, "who has just not answered is not asked again"

    play(1, act)


@pytest.mark.parametrize(("took_s", "outcome"), [(0.1, "leased"), (0.3, "missing")])
def test_a_slow_redis_is_waited_for_as_long_as_a_lookup_may_take(
    took_s: float, outcome: str
) -> None:
    async def act(run: Run) -> None:
        for number in range(4):
            await store(run, 0, number)
        await asyncio.sleep(0.5)
        run.redis.took_s = took_s
        answers = await Engine(run, 1).ask_for(*map(key_of, range(4)))
        assert {answer.outcome for answer in answers} == {outcome}
        expected_s = min(2 * took_s, LOOKUP_TIMEOUT_S)  # the rows, then the node's record
        assert max(each.took_s for each in answers) == pytest.approx(expected_s, abs=MOMENT_S)

    play(2, act)


def test_hints_lead_to_nodes_that_the_directory_knows() -> None:
    async def act(run: Run) -> None:
        await store(run, 0, NUMBER)
        await asyncio.sleep(0.5)
        run.redis.hdel(*of_row(run, 0))
        engine, daemon = Engine(run, 1), run.daemons[1]
        unknown, of_another_cluster = Hint("10.9.9.9:1"), Hint("10.9.9.9:2")
        run.redis.set(f"ecd:other:a:{of_another_cluster.node}", "1" * 32, ex=60)
        for hint in (unknown, of_another_cluster):
            assert (await engine.ask(NUMBER, hints=[hint])).outcome == "missing"
        assert daemon.cluster.hints() == (2, 0)
        hints = [unknown, of_another_cluster, Hint(run.places[0].node)]
        assert (await engine.ask(NUMBER, hints=hints)).outcome == "leased"
        assert [peer.node for peer in daemon.cluster.status().peers] == [run.places[0].node]

    play(2, act, {"hint_networks": ()})


def of_row(run: Run, node: int) -> tuple[str, str]:
    """The name of the one row in which a node stands, and its field there."""
    [row] = run.daemons[node].rows()
    return row, run.daemons[node].incarnation


def test_a_node_that_restarts_is_another_incarnation() -> None:
    """It tells what it takes over, and the rows of what it has lost lead nowhere."""

    async def act(run: Run) -> None:
        await store(run, 0, NUMBER)
        await asyncio.sleep(0.5)
        for is_warm in (True, False):
            old = run.daemons[0].incarnation
            run.daemons[0].die(silently=False)
            run.start(0, is_warm)
            await asyncio.sleep(NODE_CACHE_S)
            assert knows_all_of(run, 0)
            outcome = (await Engine(run, 1).ask(NUMBER)).outcome
            assert outcome == ("leased" if is_warm else "missing")
            assert old in run.redis.held(), "nobody has told that it is gone"
            await run.daemons[1].start(run.daemons[1].evict_all())
        await store(run, 0, NUMBER)
        await asyncio.sleep(0.5)
        assert (await Engine(run, 1).ask(NUMBER)).outcome == "leased"

    play(2, act)


def test_a_node_that_leaves_says_so_and_one_that_dies_is_known_for_a_while() -> None:
    async def act(run: Run) -> None:
        records = [f"ecd:default:n:{daemon.incarnation}" for daemon in run.daemons]
        await run.daemons[0].stop()
        run.daemons[1].die(silently=False)
        assert list(map(run.redis.exists, records)) == [0, 1]
        await asyncio.sleep(NODE_TTL_S)
        assert list(map(run.redis.exists, records)) == [0, 0]

    play(2, act)
