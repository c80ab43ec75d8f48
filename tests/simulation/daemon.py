"""One life of a simulated daemon: ecd's own classes, wired as `ecd.daemon` wires them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ecd.base.identity import NodeIdentity
from ecd.cluster.cluster import Cluster, Outside, PoolMemory
from ecd.cluster.directory.redis_rows import RowNames
from ecd.core.cache import Cache
from ecd.core.model.types import Key, Selection
from ecd.core.policy.policy import Lru
from ecd.core.policy.value_density import ValueDensity, fingerprints
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.live.flights import Flights
from ecd.live.live import LiveCache
from ecd.live.slow_log import SlowLog
from ecd.memory.checksums import Checksums
from ecd.memory.disk.disk import DiskTier
from ecd.memory.disk.disk_reads import READERS
from ecd.memory.leftovers import LeftoverEntry
from ecd.memory.recovery import Recovery
from ecd.node import Node
from ecd.rpc.cache.cache_service import Monitor
from ecd.rpc.cache.origins import NothingToRecover, Recovering
from ecd.rpc.peer.peer_service import PeerService
from ecd.rpc.peer.peer_token import TokenCheck
from ecd.settings.config import Config
from ecd_proto.mapped_file import MappedFile
from ecd_proto.v1 import cache_pb2 as pb
from simulation.clock import Process
from simulation.disk import SimulatedDisk
from simulation.engine import Engines, SimulatedEngine
from simulation.network import Network
from simulation.parts import Files, Index, Leftovers, Watched
from simulation.redis import SimulatedRedis
from simulation.stream import Channel

GRANULE_BYTES = 4096
DISK_BYTES = 300 << 10
GRACE_S = 0.1
"""How long calls of peers may take after the daemon was told to stop."""


class DaemonGone(Exception):
    """The daemon died during the call."""


@dataclass
class Place:
    """What outlives a daemon on its node: its memory's addresses, its ports."""

    node: str
    pool: MappedFile
    identity: MappedFile
    disk: SimulatedDisk | None

    @property
    def readable(self) -> MappedFile:
        return self.pool

    @property
    def writable(self) -> MappedFile:
        return self.pool


@dataclass
class World:
    """The world as far as a daemon sees it."""

    network: Network
    engines: Engines
    redis: SimulatedRedis


class Daemon(Process):
    """One incarnation, from its start to its end."""

    def __init__(
        self,
        world: World,
        place: Place,
        config: Config,
        incarnation: str,
        left: Sequence[LeftoverEntry] | None,
        has_values: bool,
    ) -> None:
        """`left` is what a warm start takes over; None: a cold one."""
        super().__init__()
        self.world, self.place, self.config, self.incarnation = world, place, config, incarnation
        self.is_serving = False
        self._paused_s = self._since_s = 0.0
        self.context.run(self._make, left, has_values)
        self.main = self.start(self._run())

    def _make(self, left: Sequence[LeftoverEntry] | None, has_values: bool) -> None:
        world, place, config = self.world, self.place, self.config
        loop, node = world.network.loop, place.node
        policy = ValueDensity(place.pool.nbytes, fingerprints(b"salt")) if has_values else Lru()
        pool = Pool(Allocator(0, place.pool.nbytes, GRANULE_BYTES), policy=policy)
        rules = config.rules(place.pool.nbytes)
        self.pool, self.cache = pool, Cache([pool], config.lease_ttl_s, rules=rules)
        self.live = LiveCache(self.cache, loop.clock)
        self.files = Files()
        identity = NodeIdentity("default", self.incarnation, "ecd simulated", node)
        slow_log = SlowLog(loop.clock)
        self.node = Node(self.live, self.files, identity, slow_log)
        self.flights: Flights = self.node.flights
        self.checksums = Checksums(self.live, {0: place})
        recovery: Recovering = NothingToRecover()
        if left is not None:
            recovery = Recovery(self.live, self.checksums, Leftovers(left), Index())
        self.recovery = recovery
        self.disk: DiskTier | None = None
        if place.disk is not None:
            self.disk = DiskTier(self.live, place.disk, {0: place}, DISK_BYTES, 10**9)
            self.flights.sources.append(self.disk.reads)
        place.identity.view(0, 16)[:] = bytes.fromhex(self.incarnation)
        outside = Outside(
            self._make_engine,
            lambda to, _: Channel(world.network, self, node, to),
            self._probe,
            world.redis.client,
        )
        memory = PoolMemory({0: place}, self.checksums)
        self.cluster = Cluster(
            config, self.live, self.flights, memory, identity, lambda *_: None, outside
        )
        self.cluster.encoders.own = self.node.streams.engines.encoders
        self.fetcher = self.flights.sources[-1]
        self.watched = self.flights.sources[-1] = Watched(self.fetcher)
        self.deliveries = self.fetcher.deliveries
        self.deliveries._commit = self._checked(self.deliveries._commit)
        self.flights.reload(config.fetch_timeout_s)
        monitor = Monitor(pb.StatusReply, lambda *_: None, slow_log)
        self.service = self.node.service(self.cluster, recovery, monitor, self.disk)
        self.peers = PeerService(
            self.live, self.cluster, TokenCheck(node, None, loop.clock), config.readers_per_entry
        )

    def _make_engine(self, settings: object, identity: bytes) -> SimulatedEngine:
        endpoint = self.place.node.replace(":9470", ":18200")
        self.engine = SimulatedEngine(
            self.world.engines, self, self.place.node, endpoint, self.place.identity
        )
        return self.engine

    def _checked(self, commit: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
        """The commit of deliveries; it may take in only what is leased to it until then."""

        def checked(arrival: Any, link: Any, lease: Any) -> None:
            if self.world.network.loop.now_s >= lease.until_s:
                self.watched.wrong = "an entry is taken in whose lease has run out"
            commit(arrival, link, lease)

        return checked

    async def _probe(self, endpoint: str) -> str:
        network = self.world.network
        await asyncio.sleep(network.delay_s())
        answering = self.world.engines.answering.get(endpoint)
        if answering is None:
            raise OSError(f"{endpoint} refuses")
        way = self.place.node, answering.node
        while way in network.cut or way[::-1] in network.cut or answering.process.is_paused:
            await asyncio.sleep(0.2)
        await asyncio.sleep(network.delay_s())
        return answering.protocol

    async def _run(self) -> None:
        await self.cluster.start()
        self.world.network.listening[self.place.node] = self, self.peers
        self.is_serving = True
        disk = [] if self.disk is None else [self.disk.run()]
        await asyncio.gather(self.cluster.run(), self.recovery.run(), self.live.run(), *disk)

    # -- being stopped for a while ---------------------------------------------------------------

    @property
    def paused_s(self) -> float:
        """How long it has been stopped so far."""
        now_s = self.world.network.loop.now_s
        return self._paused_s + (now_s - self._since_s if self.is_paused else 0.0)

    def pause(self) -> None:
        """SIGSTOP."""
        self.is_paused, self._since_s = True, self.world.network.loop.now_s

    def resume(self) -> None:
        """SIGCONT; what came meanwhile is done now."""
        if self.is_paused:
            self._paused_s, self.is_paused = self.paused_s, False
            self.world.network.loop.go_on(self)

    # -- its figures ---------------------------------------------------------------------------

    def busy(self) -> list[str]:
        """What is still under way, in words."""
        cache, links = self.cache, self.cluster._peers._links.values()
        figures = {
            "flights": len(self.flights),
            "leases": cache.views.leases,
            "waits": cache.views.waits,
            "bytes set aside": self.deliveries.counters.set_aside_bytes,
            "reads": not self.engine.reads.is_idle,
            "transfers": len(self.engine._transfers),
            "turns of peers": len(self.peers.serving.lines),
            "questions": sum(link.is_asked for link in links),
            "waits for makings": len(self.live.makings._early),
            "makings": len(self.live.makings._makings),
            "keys made elsewhere": len(self.files.made_elsewhere),
            "expected keys": len(cache.readers._expected),
            "reserved bytes": self.pool.reserved_bytes,
            "reads from disk": 0 if self.disk is None else READERS - self.disk.reads._free,
            "clients": self.node.streams.clients,
        }
        return [f"{self.place.node}: {name}={count}" for name, count in figures.items() if count]

    def rows(self) -> set[str]:
        """The rows of the directory in which this daemon is to stand."""
        names = RowNames(self.config.cluster)
        entries, _ = self.cache.views.page(None, 1 << 20)
        return {names.row(entry.key) for entry in entries}

    def has(self, key: Key) -> bool:
        on_disk = self.disk is not None and self.disk.reads.may_have(key)
        return on_disk or self.cache.views.contains(key)

    async def evict_all(self) -> None:
        pace = await self.live.begin()
        await self.live.operators.evict(Selection(), False, pace)

    # -- its end -------------------------------------------------------------------------------

    def die(self, silently: bool) -> None:
        """SIGKILL: nothing it does from now on reaches anybody. `silently`: nor does the news."""
        self.alive = self.is_serving = False
        self.resume()
        if self.world.engines.answering.get(self.engine.endpoint) is self.engine:
            del self.world.engines.answering[self.engine.endpoint]
        self.world.network.end_of(self, self.place.node, silently)
        for task in self.running:
            task.cancel()

    async def stop(self) -> None:
        """End in order, as on SIGTERM."""
        self.is_serving = False
        self.node.streams.end_all()
        self.peers.end_all()
        if self.world.network.listening.get(self.place.node, (None,))[0] is self:
            del self.world.network.listening[self.place.node]
        self.main.cancel()
        [ended] = await asyncio.gather(self.main, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            self.world.fail(f"{self.place.node}: the daemon had ended: {ended!r}")
        await asyncio.sleep(GRACE_S)
        self.world.network.stop_serving(self)
        await self.cluster.close()
        await self.flights.close()
        self.checksums.close()

    def leftovers(self) -> list[LeftoverEntry]:
        """What the next daemon finds in this one's index."""
        entries, _ = self.cache.views.page(None, 1 << 20)
        return [
            LeftoverEntry(each.key, each.content, each.extent, each.checksum or 0, 1, False, number)
            for number, each in enumerate(entries)
        ]
