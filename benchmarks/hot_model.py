"""Shared links and a busy Redis, for the simulated cluster of hot.py and scale.py.

The reads from one node share its link, as flows of TCP do, and Redis answers one command at a time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from ecd.cluster.directory.redis_rows import SOME_OF_ROW

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulation.client import Client
from simulation.clock import OUTSIDE, VirtualLoop
from simulation.engine import Engines, Transfer
from simulation.network import Network
from simulation.redis import Client as RedisClient
from simulation.redis import SimulatedRedis
from simulation.scenario import Action
from simulation.stream import Pipe

REDIS_S = {"eval": 37e-6, "hset": 3.3e-6, "set": 35e-6, "exists": 20e-6}
"""What a command costs Redis (docs/benchmarks/directory.md); `exists` as half a lookup."""


REDIS_WINDOW_S = 0.1
"""Of which the busiest is the peak."""


class Uplink:
    """A node's link to the others: the reads under way get equal parts of it."""

    def __init__(self, loop: VirtualLoop, bytes_per_s: float) -> None:
        self._loop, self._bytes_per_s = loop, bytes_per_s
        self._each = 0.0  # bytes that a read would have got if it had been there from the start
        self._since_s = 0.0
        self._reads: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self._timer: Any = None

    def add(self, nbytes: int, done: Any) -> None:
        self._go_on()
        heapq.heappush(self._reads, (self._each + nbytes, next(self._numbers), done))
        self._wait()

    def _go_on(self) -> None:
        now_s = self._loop.now_s
        if self._reads:
            self._each += (now_s - self._since_s) * self._bytes_per_s / len(self._reads)
        self._since_s = now_s

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._reads:
            left_s = (self._reads[0][0] - self._each) * len(self._reads) / self._bytes_per_s
            self._timer = self._loop.call_later(max(left_s, 0.0), self._over, context=OUTSIDE)

    def _over(self) -> None:
        self._go_on()
        while self._reads and self._reads[0][0] <= self._each + 0.5:
            heapq.heappop(self._reads)[2]()
        self._wait()


class Links(Engines):
    """Engines whose transfers share the link of the node that is read."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.uplinks: dict[str, Uplink] = {}
        self.read_bytes: dict[str, int] = {}
        self.readers: dict[str, dict[str, int]] = {}
        self.most_readers: dict[str, int] = {}

    def begin(self, transfer: Transfer) -> None:
        network, name = self.network, transfer.engine
        transfer.may_write = lambda: None
        if name not in self.uplinks:
            self.uplinks[name] = Uplink(network.loop, network.weather.bytes_per_s)
        readers = self.readers.setdefault(name, {})
        reader = transfer.reader.endpoint
        is_large = transfer.nbytes > 16
        if is_large:
            readers[reader] = readers.get(reader, 0) + 1
            self.most_readers[name] = max(self.most_readers.get(name, 0), len(readers))

        def served() -> None:
            if is_large:
                readers[reader] -= 1
                if not readers[reader]:
                    del readers[reader]
            self.read_bytes[name] = self.read_bytes.get(name, 0) + transfer.nbytes
            self._serve(transfer, 0, transfer.nbytes, True)

        def arrive() -> None:
            self.uplinks[name].add(transfer.nbytes, served)

        network.loop.call_later(2 * network.delay_s(), arrive, context=OUTSIDE)


class BusyRedis(SimulatedRedis):
    """A Redis that takes its time for each command, one after the other."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.free_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self.busy_s = self.longest_s = 0.0
        self.commands: Counter[int] = Counter()  # that came in each REDIS_WINDOW_S

    def take(self, commands: list[Any]) -> float:
        """The seconds until these commands, which come now, are done."""
        now_s = self.network.loop.now_s
        took_s = sum(REDIS_S.get(name, 3.3e-6) for name, *_ in commands)
        self.commands[int(now_s / REDIS_WINDOW_S)] += len(commands)
        self.busy_s += took_s
        self.free_s = max(self.free_s, now_s) + took_s
        self.longest_s = max(self.longest_s, self.free_s - now_s)
        return self.free_s - now_s

    def eval(self, script: str, count: int, name: str, *args: Any) -> Any:
        row = self._rows.get(name, {})
        if script == SOME_OF_ROW and len(row) > args[0]:  # as HRANDFIELD picks them
            some = self.network.rng.sample(list(row.items()), args[0])
            return [part for pair in some for part in pair]
        return super().eval(script, count, name, *args)

    def client(self, url: str, timeout_s: float) -> RedisClient:
        return BusyClient(self, timeout_s)


class BusyClient(RedisClient):
    async def send(self, commands: list[Any]) -> list[Any]:
        redis: Any = self._redis
        await asyncio.sleep(redis.take(commands))
        return await super().send(commands)


class BusyPipe(Pipe):
    """A stream's direction whose receiver takes in one message after the other."""

    message_s = 0.0
    free_s: ClassVar[dict[str, float]] = {}

    def put(self, message: object) -> None:
        _, receiver = self._way
        loop = self._network.loop
        at_s = max(loop.now_s, self.free_s.get(receiver, 0.0)) + self.message_s
        self.free_s[receiver] = at_s
        loop.call_at(at_s, super().put, message, context=OUTSIDE)


class Reader(Client):
    """An engine that notes when it has stored the picture, and when it has it from another node."""

    stored_s = has_s = None

    async def put(self, number: int, seconds: float, choice: float) -> None:
        await super().put(number, seconds, choice)
        self.stored_s = self._loop.now_s

    def _hint(self, hint: Any, action: Action) -> None:
        hint.nodes.append(self._run.places[0].node)

    async def _read(self, session: Any, action: Action, leased: Any) -> None:
        self.has_s = self._loop.now_s
        await super()._read(session, action._replace(seconds=0.0), leased)
