"""The simulation's model of Redis answers as Redis does, whatever the directory says to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from redis import RedisError

from ecd.cluster.directory.redis_rows import LIVING, NOTE_MAKER, SOME_OF_ROW, connect
from simulation.clock import VirtualLoop
from simulation.network import Network
from simulation.redis import SimulatedRedis
from support.redis import RedisServer
from support.waiting import HANG_S

ONE, TWO = "1" * 32, "2" * 32
TTL_MS, GONE_S = 900_000, 3600
PIPELINES: list[list[tuple[Any, ...]]] = [
    [("set", "n", "record", {"ex": 900, "xx": True}), ("exists", "n"), ("getrange", "n", 0, 3)],
    [("set", "n", "record", {"ex": 900}), ("set", "n", "again", {"ex": 900, "xx": True})],
    [("exists", "n"), ("getrange", "n", 0, 2), ("getrange", "n", 0, 1024)],
    [("hset", "e", ONE, b"0:0+5"), ("hset", "e", ONE, b"0:8+5"), ("expire", "e", GONE_S)],
    [("eval", SOME_OF_ROW, 1, "e", 16), ("eval", SOME_OF_ROW, 1, "nothing", 16)],
    [("hdel", "e", TWO), ("hdel", "e", ONE), ("eval", SOME_OF_ROW, 1, "e", 16)],
    [
        ("eval", NOTE_MAKER, 1, "m", ONE, "", TTL_MS),
        ("eval", NOTE_MAKER, 1, "m", TWO, "", TTL_MS),
    ],
    [
        ("eval", NOTE_MAKER, 1, "m", TWO, ONE, TTL_MS),
        ("eval", NOTE_MAKER, 1, "m", ONE, "", TTL_MS),
    ],
    [("eval", NOTE_MAKER, 1, "m", TWO, "", TTL_MS), ("getrange", "m", 0, 1024)],
    [("delete", "n"), ("delete", "n"), ("exists", "n")],
    [("eval", LIVING, 1, "s", f"10.0.0.{n}:9465", GONE_S, 2) for n in range(3)],
    [("eval", LIVING, 1, "s", f"{'x' * size}:9465", GONE_S, 2) for size in (254, 255)],
    [
        ("zrem", "s", f"{'x' * 255}:9465"),
        ("zrem", "s", "10.0.0.1:9465"),
        ("zrem", "s", "10.0.0.1:9465"),
    ],
    [("eval", LIVING, 1, "s", node, GONE_S, 128) for node in ("10.0.0.4:9465", "", "")],
    [("eval", LIVING, 1, "nothing", "", GONE_S, 128), ("eval", LIVING, 1, "t", "a:1", GONE_S, 1)],
]


async def answers(client: Any) -> list[Any]:
    said = []
    for commands in PIPELINES:
        pipeline = client.pipeline(transaction=False)
        for name, *arguments in commands:
            how = arguments.pop() if isinstance(arguments[-1], dict) else {}
            getattr(pipeline, name)(*arguments, **how)
        said.append(await pipeline.execute(raise_on_error=False))
    await client.set("n", "record", ex=900)
    said.append([await client.exists("n")])
    await client.aclose()
    return said


async def failure(client: Any) -> str:
    with pytest.raises(RedisError) as error:
        await client.exists("n")
    await client.aclose()
    return error.typename


@pytest.fixture
def model() -> Iterator[SimulatedRedis]:
    rng = Random(1)
    loop = VirtualLoop(rng)
    yield SimulatedRedis(Network(loop, rng))
    loop.close()


def test_it_answers_as_redis_does(redis: RedisServer, model: SimulatedRedis) -> None:
    simulated = model.network.loop.run_until_complete(answers(model.client("redis://r", 1.0)))
    assert simulated == asyncio.run(answers(connect(redis.url, HANG_S)))


def test_it_stands_still_as_redis_does(redis: RedisServer, model: SimulatedRedis) -> None:
    model.is_halted = True
    simulated = model.network.loop.run_until_complete(failure(model.client("redis://r", 1.0)))
    with redis.stopped():
        assert simulated == asyncio.run(failure(connect(redis.url, 0.1)))


def test_it_is_away_as_redis_is(redis: RedisServer, model: SimulatedRedis) -> None:
    model.is_down = True
    simulated = model.network.loop.run_until_complete(failure(model.client("redis://r", 1.0)))
    redis.kill()
    assert simulated == asyncio.run(failure(connect(redis.url, HANG_S)))
