"""A model of the Redis that the directory asks: its rows in memory, its answers late or lost.

It knows the commands and scripts that `redis_rows` sends, no others. `test_simulated_redis` in
tests/cluster compares its answers with those of a real one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis import ConnectionError as RedisConnectionError
from redis import TimeoutError as RedisTimeoutError

from ecd.cluster.directory.redis_rows import LIVING, NOTE_MAKER, SOME_OF_ROW
from simulation.network import Network

Row = dict[bytes, bytes]
HALT_STEP_S = 0.001


class SimulatedRedis:
    """One server: strings and hashes with their times of expiry."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.is_down = self.is_halted = False
        self.took_s = 0.0  # until it has obeyed what is sent at one time
        self.lost = 0.0  # share of answers that never come, to commands that were obeyed
        self._strings: dict[str, tuple[bytes, float]] = {}
        self._rows: dict[str, Row] = {}
        self._sorted: dict[str, dict[str, int]] = {}

    def empty(self) -> None:
        self._strings.clear()
        self._rows.clear()
        self._sorted.clear()

    def client(self, url: str, timeout_s: float) -> Client:
        return Client(self, timeout_s)

    def held(self) -> dict[str, set[str]]:
        """The names of the rows in which each incarnation stands."""
        held: dict[str, set[str]] = {}
        for name, row in self._rows.items():
            for incarnation in row:
                held.setdefault(incarnation.decode(), set()).add(name)
        return held

    # -- commands ------------------------------------------------------------------------------

    def _get(self, name: str) -> bytes | None:
        value, until_s = self._strings.get(name, (None, 0.0))
        return value if self.network.loop.now_s < until_s else None

    def exists(self, name: str) -> int:
        return int(self._get(name) is not None)

    def set(self, name: str, value: str | bytes, ex: float, xx: bool = False) -> bool | None:
        if xx and self._get(name) is None:
            return None
        data = value.encode() if isinstance(value, str) else value
        self._strings[name] = data, self.network.loop.now_s + ex
        return True

    def delete(self, name: str) -> int:
        return int(self._strings.pop(name, None) is not None)

    def getrange(self, name: str, start: int, end: int) -> bytes:
        return (self._get(name) or b"")[start : end + 1]

    def hset(self, name: str, field: str, value: bytes) -> int:
        row = self._rows.setdefault(name, {})
        is_new = field.encode() not in row
        row[field.encode()] = value
        return int(is_new)

    def hdel(self, name: str, field: str) -> int:
        return int(self._rows.get(name, {}).pop(field.encode(), None) is not None)

    def expire(self, name: str, ttl_s: float) -> bool:
        return bool(self._rows.get(name))  # an hour: longer than any simulated run

    def eval(self, script: str, count: int, name: str, *args: Any) -> Any:
        if script == SOME_OF_ROW:
            some = list(self._rows.get(name, {}).items())[: args[0]]
            return [part for pair in some for part in pair]
        if script == LIVING:
            return self._living(name, *args)
        assert script == NOTE_MAKER
        own, void, ttl_ms = args
        by = self._get(name) or own.encode()
        if by not in (own.encode(), void.encode()):
            return by
        self.set(name, own, ttl_ms / 1000)
        return own.encode()

    def _living(self, name: str, node: str, ttl_s: int, most: int) -> list[Any]:
        now = int(self.network.loop.now_s)
        living = {**self._sorted.get(name, {}), **({node: now} if node else {})}
        living = {node: at for node, at in living.items() if abs(at - now) < ttl_s}
        self._sorted[name] = living
        newest = sorted(living, key=lambda node: (living[node], node), reverse=True)
        return [
            len(living),
            *(node.encode() if len(node) <= 259 else b"" for node in newest[:most]),
        ]

    def zrem(self, name: str, member: str) -> int:
        return int(self._sorted.get(name, {}).pop(member, None) is not None)


class Client:
    """One node's connection, in place of redis.asyncio.Redis."""

    def __init__(self, redis: SimulatedRedis, timeout_s: float) -> None:
        self._redis, self._timeout_s = redis, timeout_s

    def pipeline(self, transaction: bool) -> Pipeline:
        return Pipeline(self)

    async def exists(self, name: str) -> int:
        [answer] = await self.send([("exists", (name,), {})])
        return int(answer)

    async def set(self, name: str, value: str, ex: float) -> None:
        await self.send([("set", (name, value), {"ex": ex})])

    async def aclose(self) -> None: ...

    async def send(self, commands: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        redis, network = self._redis, self._redis.network
        await asyncio.sleep(network.delay_s())
        if redis.is_down:
            raise RedisConnectionError("it is down")
        if redis.is_halted or redis.took_s:
            await self._wait_for_it()
        answers = [getattr(redis, name)(*args, **how) for name, args, how in commands]
        await asyncio.sleep(network.delay_s())
        if redis.is_down or network.rng.random() < redis.lost:
            await asyncio.sleep(self._timeout_s)
            raise RedisConnectionError("the answer did not come")
        return answers

    async def _wait_for_it(self) -> None:
        """Wait until it goes on, and is done."""
        loop = self._redis.network.loop
        until_s = loop.now_s + self._timeout_s
        while self._redis.is_halted:
            if loop.now_s >= until_s:
                raise RedisTimeoutError("it says nothing")
            await asyncio.sleep(HALT_STEP_S)
        await asyncio.sleep(self._redis.took_s)


class Pipeline:
    """Commands that go out together."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._commands: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **how: self._commands.append((name, args, how))

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        return await self._client.send(self._commands)
