"""The simulated world: nodes that start and die, their engines, and what happens to both."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

from ecd.core.model.states import EntryState
from ecd.settings.config import Config
from ecd_proto.mapped_file import MappedFile
from ecd_proto.v1 import cache_pb2 as pb
from simulation.client import Client
from simulation.clock import VirtualLoop
from simulation.daemon import GRANULE_BYTES, Daemon, Place, World
from simulation.disk import SimulatedDisk
from simulation.engine import Engines, Transfer
from simulation.network import Network
from simulation.redis import SimulatedRedis
from simulation.scenario import FIRE, SIZES, Action, Scenario, key_of
from support.reserving import is_one_free_extent

DOWN_S = (0.05, 0.5)  # a restart takes never less than VOUCHED_S
CLIENTS = 2
BEAT_S = 6.0
"""More than passes between two signs of life that a daemon gives the directory."""
IDLE_S = 30.0
"""By when everything that was under way is to be over. Leases of peers end by themselves later."""
TOLD_S = 60.0
"""By when the directory is to be told: a dozen tries, where it is slow."""


@cache
def _config() -> Config:
    return Config(peer_address="10.0.0.1:9470", peer_insecure=True, hint_networks="10.0.0.0/16")


class Run(World):
    """One run of a scenario; `violations` is what it has shown to be broken."""

    def __init__(
        self, loop: VirtualLoop, scenario: Scenario, settings: Mapping[str, Any] | None = None
    ) -> None:
        """`settings` are those of every daemon, besides what the scenario says."""
        self.scenario, self.loop, self.settings = scenario, loop, settings or {}
        self.rng = Random(scenario.seed + 1)
        network = Network(loop, self.rng)
        super().__init__(network, Engines(network), SimulatedRedis(network))
        network.weather, self.redis.lost = scenario.weather, scenario.redis_lost
        self.engines.owner = self._owner
        self.violations: list[str] = []
        self.may_corrupt = scenario.weather.rogue > 0.0
        """Whether peers send bytes that are not the entry's, or release what they still read."""
        self.places = [self._place(number) for number in range(scenario.nodes)]
        self.daemons: list[Daemon] = []
        """The last incarnation on each node."""
        self.clients = [
            [Client(self, number) for _ in range(CLIENTS)] for number in range(scenario.nodes)
        ]
        self._incarnations = itertools.count(1)
        self._doing: list[asyncio.Task[None]] = []
        self.known_places: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        """Where a node had a key once: pool, offset, bytes. Hints may say so ever after."""

    def fail(self, what: str) -> None:
        self.violations.append(what)

    def holders(self, number: int) -> list[Daemon]:
        """The nodes that have a key now, in memory or on disk."""
        return [each for each in self.daemons if each.is_serving and each.has(key_of(number))]

    def note_place(self, node: int, number: int, at: pb.Extent) -> None:
        places = self.known_places.setdefault((self.places[node].node, number), [])
        if (place := (at.pool, at.offset, at.nbytes)) not in places:
            places.append(place)

    # -- nodes ---------------------------------------------------------------------------------

    def _place(self, number: int) -> Place:
        pool, identity = memory_of(number, self.scenario.pool_bytes)
        disk = None
        if self.scenario.disk_s is not None:
            self.loop.disk_range_s = self.scenario.disk_s
            disk = SimulatedDisk(self.rng, self.scenario.disk_failures)
            disk.may_write = lambda target: self._check_disk_read(number, target)
        address = f"10.0.{number // 250}.{number % 250 + 1}"
        return Place(f"{address}:9470", pool, identity, disk)

    def start(self, number: int, is_warm: bool) -> None:
        place, scenario = self.places[number], self.scenario
        left = None
        if is_warm and len(self.daemons) > number:
            left = self.daemons[number].leftovers()
        else:
            place.pool.view(0, place.pool.nbytes)[:] = bytes(place.pool.nbytes)
        others: tuple[str, ...] = ()
        if scenario.directory == "static":
            others = tuple(p.node for p in self.places if p is not place)
        config = _config().model_copy(
            update={
                "peer_address": place.node,
                "peers": others,
                "directory": "redis://r" if scenario.directory == "redis" else None,
                "lease_ttl_s": scenario.lease_ttl_s,
                "fetch_timeout_s": scenario.fetch_timeout_s,
                "readers_per_entry": scenario.readers_per_entry,
                **self.settings,
            }
        )
        incarnation = f"{next(self._incarnations):032x}"
        daemon = Daemon(self, place, config, incarnation, left, scenario.has_values)
        self.daemons[number : number + 1] = [daemon]

    def _check_disk_read(self, number: int, target: memoryview) -> None:
        daemon = self.daemons[number]
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(target))
        offset = address - daemon.place.pool.address
        for entry in daemon.cache._entries:
            if entry.extent.offset == offset and entry.state in WRITABLE:
                return
        self.fail("a read from disk writes to memory that is not reserved for it any more")

    def _owner(self, transfer: Transfer):
        """The check, whenever a transfer writes, that its target is still a reservation's."""
        daemon = transfer.reader.process
        offset = transfer.target - daemon.place.pool.address
        if not 0 <= offset < daemon.place.pool.nbytes:
            return lambda: None  # an identity's
        entries = daemon.cache._entries
        found = [e for e in entries if e.extent.offset <= offset < e.block.end * GRANULE_BYTES]

        def check() -> None:
            for entry in found:
                if entries.get(entry.id) is entry and entry.state in WRITABLE:
                    return
            self.fail("a read writes to memory that is not reserved for it any more")

        return check

    # -- actions -------------------------------------------------------------------------------

    async def run(self) -> None:
        for number in range(self.scenario.nodes):
            self.start(number, is_warm=False)
        started_s = self.loop.now_s
        for action in self.scenario.actions:
            await asyncio.sleep(started_s + action.at_s - self.loop.now_s)
            self._doing.append(asyncio.ensure_future(self._do(action)))
        await self._calm_down()

    async def _do(self, action: Action) -> None:
        action = self._aimed(action)
        daemon, other = self.daemons[action.node], self.daemons[action.other]
        chosen = self.clients[action.node][int(action.choice * CLIENTS)]
        match action.kind:
            case "put":
                await chosen.put(action.key, action.seconds, action.choice)
            case "get" | "make":
                await chosen.get(action, is_maker=action.kind == "make")
            case "burst":
                everybody = [client for clients in self.clients for client in clients]
                gets = [client.get(action, is_maker=action.choice < 0.5) for client in everybody]
                await asyncio.gather(*gets)
            case "fetch under fire":
                get = asyncio.ensure_future(chosen.get(action._replace(seconds=2.0)))
                action = action._replace(node=self.rng.choice(self._holding(action)))
                await asyncio.sleep(self.rng.random() * self._fetch_s(action.key))
                kind, choice = self.rng.choice(FIRE), self.rng.random()
                seconds = self.rng.uniform(0.0, 3.0)
                await self._do(action._replace(kind=kind, choice=choice, seconds=seconds))
                await get
            case "move":
                held = [
                    each for each in range(len(SIZES)) if daemon.cache.views.contains(key_of(each))
                ]
                if held:
                    moved = held[action.key % len(held)]
                    await chosen.evict(moved)
                    await chosen.put(action.other, 0.001, 0.0)
                    await chosen.put(moved, 0.001, 0.0)
            case "offer":
                await chosen.offer(action.key, self.places[action.other].node)
            case "evict" | "evict all":
                await chosen.evict(None if action.kind == "evict all" else action.key)
            case "locate":
                await chosen.locate(action.key)
            case "client dies":
                chosen.die()
            case "cold restart" | "warm restart":
                if daemon.alive:
                    daemon.die(silently=action.seconds > 1.0)
                    await asyncio.sleep(self.rng.uniform(*DOWN_S))
                    if not self.daemons[action.node].alive:
                        self.start(action.node, action.kind == "warm restart")
            case "die":
                if daemon.alive:
                    daemon.die(silently=action.seconds > 1.0)
            case "start" if not daemon.alive:
                self.start(action.node, action.choice < 0.5)
            case "pause":
                if daemon.alive and not daemon.is_paused:
                    daemon.pause()
                    await asyncio.sleep(action.seconds)
                    daemon.resume()
            case "cut":
                if daemon is not other:
                    self.network.cut_off(daemon.place.node, other.place.node)
            case "heal":
                self.network.heal()
            case "redis empty":
                self.redis.empty()
            case "redis down":
                self.redis.is_down = True
                await asyncio.sleep(action.seconds)
                self.redis.is_down = False
            case "lie":
                self.may_corrupt = daemon.engine.lies = True

    def _holding(self, action: Action) -> list[int]:
        """The numbers of the nodes that have the action's key; its own if there is none."""
        having = self.holders(action.key)
        return [n for n, each in enumerate(self.daemons) if each in having] or [action.node]

    def _fetch_s(self, key: int) -> float:
        """About how long a fetch of the key takes."""
        weather = self.scenario.weather
        return 8 * weather.delay_s[1] + 1.5 * SIZES[key] / weather.bytes_per_s

    def _aimed(self, action: Action) -> Action:
        """Most actions are aimed at what happens now: readers want what others have, and faults
        come to nodes that are being read.
        """
        if action.choice * 10 % 1 < 0.3:
            return action
        if action.kind in ("get", "make", "burst", "offer", "fetch under fire"):
            here = self.daemons[action.node]
            wanted = [
                number
                for number in range(len(SIZES))
                if self.holders(number) and not here.cache.views.contains(key_of(number))
            ]
            return action._replace(key=wanted[action.key % len(wanted)]) if wanted else action
        read = [
            number
            for number, each in enumerate(self.daemons)
            for reader in self.daemons
            if any(t.engine == each.engine.endpoint for t in reader.engine.under_way)
        ]
        return action._replace(node=read[action.node % len(read)]) if read else action

    # -- the end -------------------------------------------------------------------------------

    async def _calm_down(self) -> None:
        """Let everything end, and see that nothing is left."""
        self.network.heal()
        for task in self._doing:
            try:
                await asyncio.wait_for(task, 60.0)
            except asyncio.TimeoutError:
                self.fail("an action does not end")
        self.network.heal()
        await asyncio.sleep(BEAT_S if self.redis.lost else 0.0)
        self.redis.lost = 0.0
        living = [daemon for daemon in self.daemons if daemon.alive]
        for client in itertools.chain(*self.clients):
            client.leave()
        await self._until_idle(living)
        await self._until_told(living)
        for daemon in living:
            await daemon.start(daemon.evict_all())
            if not is_one_free_extent(daemon.pool.allocator):
                self.fail(f"{daemon.place.node}: the pool is not one free extent")
        await self._until_told(living)
        for daemon in living:
            await daemon.start(daemon.stop())
        await asyncio.sleep(0.2)
        for daemon in living:
            if daemon.running:
                self.fail(f"{daemon.place.node}: tasks are left: {daemon.running}")

    async def _until_idle(self, living: list[Daemon]) -> None:
        until_s = self.loop.now_s + IDLE_S
        while left := [text for daemon in living for text in daemon.busy()]:
            if self.loop.now_s > until_s:
                return self.fail(f"never idle: {left}")
            await asyncio.sleep(0.5)

    async def _until_told(self, living: list[Daemon]) -> None:
        """The directory comes to know what each node holds, and nothing else of it."""
        until_s = self.loop.now_s + TOLD_S
        while self.scenario.directory == "redis":
            told = self.redis.held()
            wrong = [
                f"{daemon.place.node}: {names}"
                for daemon in living
                if (names := told.get(daemon.incarnation, set()) ^ daemon.rows())
            ]
            if not wrong:
                return
            if self.loop.now_s > until_s:
                return self.fail(f"the directory is wrong for good: {wrong}")
            await asyncio.sleep(0.5)


WRITABLE = (EntryState.RESERVED, EntryState.ORPHANED)


@cache
def memory_of(number: int, nbytes: int) -> tuple[MappedFile, MappedFile]:
    """A node's pool and the page with its identity: memory is not made anew for each run."""
    return MappedFile.of_memory(nbytes), MappedFile.of_memory(4096)
