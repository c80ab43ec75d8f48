"""What tests have simulated nodes do: an act of each, in a calm world, and engines that ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from ecd.cluster.cluster import LOCATE_S
from ecd.core.model.types import Key
from ecd.rpc.cache.cache_service import MAKING_ROOM_S
from ecd_proto.contract import Hint
from ecd_proto.v1 import cache_pb2 as pb
from simulation.client import Client, Session
from simulation.clock import VirtualLoop
from simulation.network import Weather
from simulation.run import _abandon, small
from simulation.scenario import SIZES, Action, Scenario, bytes_of, key_of
from simulation.world import Run

FETCH_TIMEOUT_S = 5.0
AT_ONCE_S = 0.1
CALM = Scenario(
    seed=1,
    nodes=1,
    directory="redis",
    pool_bytes=256 << 10,
    lease_ttl_s=30.0,
    fetch_timeout_s=FETCH_TIMEOUT_S,
    has_values=False,
    weather=Weather(),
    redis_lost=0.0,
    disk_s=None,
    disk_failures=0.0,
    actions=(),
    readers_per_entry=2,
)
NUMBERS = {key_of(number): number for number in range(len(SIZES))}

Act = Callable[[Run], Coroutine[object, object, None]]


def play(nodes: int, act: Act, settings: Mapping[str, Any] | None = None, **about: Any) -> None:
    """Have nodes with these settings start in a scenario that is CALM but for `about`, and act."""
    scenario = replace(CALM, nodes=nodes, **{"weather": Weather(), **about})
    loop = VirtualLoop(Random(1))
    asyncio.set_event_loop(loop)
    try:
        with small(scenario.links):
            loop.run_until_complete(_start_and_act(Run(loop, scenario, settings), act))
    finally:
        _abandon(loop)
        asyncio.set_event_loop(None)


async def _start_and_act(run: Run, act: Act) -> None:
    for number in range(run.scenario.nodes):
        run.start(number, is_warm=False)
    await asyncio.sleep(0.5)
    await act(run)
    assert not [*run.violations, *run.loop.errors]


async def store(run: Run, node: int, key: int) -> None:
    await Client(run, node).put(key, 0.001, 0.0)


async def get(run: Run, node: int, key: int) -> None:
    """Ask the directory for the key, as an engine does that cannot encode it."""
    await Client(run, node).get(Action(0.0, "get", node, 0, key, 5.0, 0.2))


def has(run: Run, key: int) -> list[int]:
    """The nodes that have the key."""
    return [number for number, each in enumerate(run.daemons) if each.has(key_of(key))]


class Answer(NamedTuple):
    outcome: str
    took_s: float


class Engine:
    """An engine on a node, with a session of its own."""

    def __init__(self, run: Run, node: int) -> None:
        self.run, self.node, self.session = run, node, Session(run, run.daemons[node])

    def request(self, *keys: Key, wait_s: float, **about: Any) -> pb.AcquireRequest:
        named = [pb.Key(namespace=key.namespace, mm_hash=key.mm_hash) for key in keys]
        token = self.session.stream.token
        return pb.AcquireRequest(session=token, keys=named, wait_s=wait_s, **about)

    async def ask_for(
        self,
        *keys: Key,
        makes_s: float | None = None,
        wait_s: float = FETCH_TIMEOUT_S,
        hints: Sequence[Hint] = (),
        only_if_written: bool = True,
    ) -> list[Answer]:
        """Ask for all keys at once; each that comes is right, and is given back.

        The engine makes them if no node has them, and waits so long for another that does; None: it
        makes nothing.
        """
        request = self.request(*keys, wait_s=wait_s, only_if_written=only_if_written)
        for index in range(len(keys)):
            if makes_s is not None:
                request.makes.add(index=index, wait_s=makes_s)
            if hints:
                hinted = request.hints.add(index=index, nodes=[hint.node for hint in hints])
                for hint in hints:
                    hinted.extents.add(pool=hint.pool, offset=hint.offset, nbytes=hint.nbytes)
        begun_s = self.run.loop.now_s
        acquire = self.session.daemon.service.Acquire(request, None)
        reply = await self.session.call(acquire, 0.0)
        ends = [self._end(key, each) for key, each in zip(keys, reply.outcomes, strict=True)]
        return [Answer(said, at_s - begun_s) for said, at_s in await asyncio.gather(*ends)]

    async def _end(self, key: Key, outcome: pb.AcquireOutcome) -> tuple[str, float]:
        if outcome.HasField("waiting"):
            outcome = await self.session.wait(outcome.waiting.ticket)
        ended_s, said = self.run.loop.now_s, outcome.WhichOneof("outcome")
        if said == "leased":
            at, memory = outcome.leased.extent, self.session.daemon.place.pool
            assert bytes(memory.view(at.offset, at.nbytes)) == bytes_of(NUMBERS[key])
            token, leases = self.session.stream.token, [outcome.leased.lease]
            release = pb.ReleaseRequest(session=token, leases=leases)
            await self.session.call(self.session.daemon.service.Release(release, None), 0.0)
        return said, ended_s

    async def ask(self, number: int, **about: Any) -> Answer:
        [answer] = await self.ask_for(key_of(number), **about)
        return answer

    async def put(self, *keys: Key, metadata: bytes = b"") -> None:
        """Store small entries, with no bytes that `ask` knows."""
        service, token = self.session.daemon.service, self.session.stream.token
        content = pb.Content(dtype="uint8", shape=[100], nbytes=100, metadata=metadata)
        named = [pb.Key(namespace=key.namespace, mm_hash=key.mm_hash) for key in keys]
        items = [pb.ReserveItem(key=key, content=content) for key in named]
        reserve = service.Reserve(pb.ReserveRequest(session=token, items=items), None)
        outcomes = (await self.session.call(reserve, MAKING_ROOM_S)).outcomes
        reservations = [outcome.reserved.reservation for outcome in outcomes]
        commit = service.Commit(pb.CommitRequest(session=token, reservations=reservations), None)
        assert all((await self.session.call(commit, 0.0)).committed)

    async def locate(self, *keys: Key) -> tuple[pb.LocateReply, float]:
        """What the daemon says of these keys, and the seconds it took."""
        named = [pb.Key(namespace=key.namespace, mm_hash=key.mm_hash) for key in keys]
        begun_s = self.run.loop.now_s
        locate = self.session.daemon.service.Locate(pb.LocateRequest(keys=named), None)
        return await self.session.call(locate, LOCATE_S), self.run.loop.now_s - begun_s


def engines(run: Run) -> list[Engine]:
    """One on each node."""
    return [Engine(run, node) for node in range(len(run.daemons))]


async def slow_events(engine: Engine, kind: str = "fetch") -> list[pb.SlowEvent]:
    """Those in the slow log of the engine's daemon, the newest first."""
    reply = await engine.session.call(engine.session.daemon.service.Slow(pb.SlowRequest(), None), 0)
    return [event for event in reply.events if event.kind == kind]
