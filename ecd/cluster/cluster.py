"""This node among others: engine, peers, directory and fetches, made from the settings."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import grpc

from ecd.base.identity import NodeIdentity
from ecd.cluster.deliveries import Deliveries
from ecd.cluster.directory.directory import (
    Candidate,
    Directory,
    Found,
    NoDirectory,
    StaticDirectory,
)
from ecd.cluster.fetcher import Fetcher
from ecd.cluster.peers.admission import Admission
from ecd.cluster.peers.candidates import Candidates
from ecd.cluster.peers.encoders import Encoders
from ecd.cluster.peers.offers import Offers
from ecd.cluster.peers.peer import Peer, PeerUnavailable
from ecd.cluster.peers.peers import Peers, open_channel
from ecd.cluster.peers.tls import credentials
from ecd.cluster.transport.engine import EngineSettings, ReadEngine
from ecd.cluster.transport.handshake import probe
from ecd.cluster.transport.pool_reads import PoolReads
from ecd.core.model.outcomes import Leased
from ecd.core.model.types import Extent, Key
from ecd.live.flights import Flights
from ecd.live.live import LiveCache
from ecd.settings.config import Config
from ecd_proto.contract import CONTRACT_VERSION, GONE, NEVER_ASKED, Hint
from ecd_proto.mapped_file import MappedFile
from ecd_proto.v1 import cache_pb2, peer_pb2

logger = logging.getLogger(__name__)

PUBLISH_BATCH = 256
"""Changes published to the directory at a time."""
LOCATE_S = 1.0
"""How long the directory may be asked for the holders of one request's keys."""
LOCATED = 64
"""Keys looked up in the directory at a time: more would block the event loop."""
TRY_S = 10.0
"""How often nodes that have no link are tried, without a request."""
TURN = 8
"""Small entries hashed, and keys wanted, before the event loop gets its turn."""


class EntryChecksums(Protocol):
    """Computes the checksums of stored entries, each once."""

    def of(self, leased: Leased) -> int | Awaitable[int]: ...

    async def note(self, key: Key) -> None: ...


class SharedPool(Protocol):
    """One pool's memory, as other nodes may read it and as only this one may write it."""

    @property
    def readable(self) -> MappedFile: ...

    @property
    def writable(self) -> MappedFile: ...


class PoolMemory(NamedTuple):
    """The pools by their numbers, and the checksums of the entries in them."""

    pools: Mapping[int, SharedPool]
    checksums: EntryChecksums


def connect(url: str, timeout_s: float) -> Any:
    """A client of Redis, whose import takes a sixth of a daemon's start."""
    from ecd.cluster.directory.redis_rows import connect

    return connect(url, timeout_s)


class Outside(NamedTuple):
    """The makers of all that a node uses outside its process; a simulation brings its own."""

    engine: Callable[[EngineSettings, bytes], ReadEngine] = ReadEngine
    channel: Callable[[str, grpc.ChannelCredentials | None], Any] = open_channel
    probe: Callable[[str], Awaitable[str]] = probe
    redis: Callable[[str, float], Any] = connect


class Cluster:
    """The engine, peers, directory and fetches of one node, on its daemon's event loop."""

    def __init__(
        self,
        config: Config,
        live: LiveCache,
        flights: Flights,
        memory: PoolMemory,
        identity: NodeIdentity,
        observe: Callable[[float, int], None],
        outside: Outside,
    ) -> None:
        """Start the engine, for `start`. Blocking, for some milliseconds.

        `observe` is told the seconds and bytes of each fetch. Raises ClusterError and EngineError.
        """
        self.node = identity.node
        self._config, self._live, self._identity = config, live, identity
        self._flights = flights
        self._checksums = memory.checksums
        self.server_credentials, channel_credentials = credentials(config)
        host = self.node.rpartition(":")[0]
        settings = EngineSettings(host, config.protocol, config.engine_ports, config.device)
        self._engine = outside.engine(settings, bytes.fromhex(identity.incarnation))
        readable = {number: pool.readable for number, pool in memory.pools.items()}
        writable = {number: pool.writable for number, pool in memory.pools.items()}
        # Over tcp a peer could write to all registered memory; the kernel lets it only read this.
        self._registered = readable if config.protocol == "tcp" else writable
        self._peers = Peers(
            config, identity, channel_credentials, live.clock, outside.channel, outside.probe
        )
        self._directory = self._make_directory(outside)
        self._admission = Admission(self.node, config, self._peers, self._directory)
        self._candidates = Candidates(self._peers, self._admission, self._directory, config.zone)
        self.encoders = Encoders(self.node, config, self._peers, self._directory, live.clock)
        self.told_encoders, self.encoders_elsewhere = self.encoders.told, self.encoders.elsewhere
        self._offers = Offers(live.cache, self._candidates, live.clock)
        reads = PoolReads(self._engine.reads, writable)
        self._deliveries = Deliveries(
            live, reads, self._candidates, observe, config.fetch_timeout_s
        )
        self._fetcher = Fetcher(live, self._candidates, self._deliveries)
        flights.sources.append(self._fetcher)
        self._changes = live.follow_changes()

    async def start(self) -> None:
        """Let other nodes read the pools, which are populated, for `run`. Raises EngineError."""
        await self._engine.verify(self._config.protocol)
        await self._engine.register(*self._registered.values())

    def reload(self, config: Config) -> None:
        """Apply settings that may change at any time: peers asked, hints followed, the deadline."""
        self._config = config
        self._admission.reload(config)
        self.encoders.reload(config)
        self._peers.reload(config.peers)
        self._deliveries.timeout_s = config.fetch_timeout_s
        self._directory.reload(self._other_nodes())

    def _other_nodes(self) -> Sequence[str]:
        return [node for node in self._config.peers if node != self.node]

    async def run(self) -> None:
        """Publish changes to the directory and to other nodes, until cancelled."""
        logger.info(
            "peers on %s, engine on %s over %s, directory %s",
            self.node,
            self._engine.endpoint,
            self._engine.protocol,
            self._directory.state.kind,
        )
        await asyncio.gather(
            self._directory.run(),
            self._publish(),
            self._try_unlinked(),
            self._engine.reads.failed,
        )

    async def close(self) -> None:
        await self._candidates.close()
        await self._directory.close()
        await self._peers.close()
        await self._offers.close()
        self._engine.close()

    def _make_directory(self, outside: Outside) -> Directory:
        match self._config.directory_kind:
            case "none":
                return NoDirectory()
            case "static":
                return StaticDirectory(self._other_nodes(), self._ask, self._live.clock)
            case _:
                from ecd.cluster.directory.redis_directory import RedisDirectory  # see `connect`

                live = self._live
                return RedisDirectory(
                    self._config,
                    self._identity,
                    live.cache,
                    live.clock,
                    outside.redis,
                    live.makings.lasting,
                    lambda: bool(self.encoders.told()),
                )

    async def _ask(self, node: str, keys: Sequence[Key]) -> Sequence[Candidate | None]:
        try:
            return await (await self._peers.link(node)).find(keys)
        except PeerUnavailable as error:
            self._directory.state.failed(error)
            return ()

    # -- for engines on this node --------------------------------------------------------------

    def offer(self, keys: Sequence[Key], nodes: Sequence[str]) -> None:
        """Offer these keys to these nodes: now, or when they are stored."""
        self._offers.offer(keys, nodes)

    # -- for routers ---------------------------------------------------------------------------

    async def locate(self, keys: Sequence[Key]) -> tuple[Found, bool]:
        """The other nodes that hold these keys, and whether all answered within LOCATE_S."""
        state, found = self._directory.state, dict[Key, Sequence[Candidate]]()
        before, until_s = (state.errors, state.skipped), self._live.clock.now_s() + LOCATE_S
        for start in range(0, len(keys), LOCATED):
            left_s = until_s - self._live.clock.now_s()
            if left_s <= 0:
                return found, False
            some = await self._directory.find(keys[start : start + LOCATED], left_s)
            found.update(some or {})
        was_heard = state.up and before == (state.errors, state.skipped)
        return found, was_heard and state.kind != "none"

    # -- for other nodes -----------------------------------------------------------------------

    def describe(self) -> peer_pb2.NodeDescription:
        return peer_pb2.NodeDescription(
            contract_version=CONTRACT_VERSION,
            daemon=self._identity.daemon,
            node=self.node,
            incarnation=self._identity.incarnation,
            zone=self._config.zone,
            engine=self._engine.endpoint,
            protocol=self._engine.protocol,
            identity_address=self._engine.identity_address,
            lease_ttl_s=self._live.cache.views.lease_ttl_s,
            leases=self._live.cache.views.leases,
            pools=[
                peer_pb2.PeerPool(pool=number, address=memory.address, nbytes=memory.nbytes)
                for number, memory in self._registered.items()
            ],
            takes_find_encoders=True,
        )

    def address_of(self, extent: Extent) -> int:
        return self._registered[extent.pool].address + extent.offset

    def bytes_of(self, extent: Extent) -> bytes:
        return bytes(self._registered[extent.pool].view(extent.offset, extent.nbytes))

    def checksum_of(self, leased: Leased) -> int | Awaitable[int]:
        """The checksum of a leased entry; at once where it is known."""
        return self._checksums.of(leased)

    def is_speculative(self, key: Key) -> bool:
        """Whether the key is being written by a speculative read, which no node has confirmed."""
        return self._deliveries.is_speculative(key)

    def is_beginning_to_make(self, key: Key) -> bool:
        """Whether the directory is being told that this node makes the key."""
        return self._fetcher.is_beginning_to_make(key)

    def is_local(self, key: Key) -> bool:
        """Whether the key may lie on this node's disk."""
        return self._flights.is_local(key)

    def want_near(self, key: Key) -> None:
        """Bring the key from this node's disk, without asking other nodes."""
        self._flights.want(key, is_local=True)

    async def offered(self, found: Mapping[Key, Hint]) -> None:
        """Accept an offer: a node has these keys and expects this one to want them."""
        for number, (key, hint) in enumerate(found.items()):
            self._flights.want(key, [hint])
            if number % TURN == 0:
                await self._live.clock.sleep(0)

    # -- the background ------------------------------------------------------------------------

    async def _publish(self) -> None:
        """Hash and offer stored entries, and publish all changes to the directory."""
        while True:
            changes = list((await self._changes.next()).items())
            for start in range(0, len(changes), PUBLISH_BATCH):
                batch = dict(changes[start : start + PUBLISH_BATCH])
                for number, (key, is_stored) in enumerate(batch.items()):
                    if is_stored:
                        self._offers.stored(key)
                        await self._checksums.note(key)
                    if number % TURN == 0:
                        await self._live.clock.sleep(0)
                self._directory.publish(batch)
                await self._live.clock.sleep(0)

    async def _try_unlinked(self) -> None:
        """Link to other nodes without a request: operators see which are dead, or are back."""
        while True:
            state = self._directory.state
            known = {p.node for p in self._peers if not (p.hinted or state.has_left(p.node))}
            living = state.living
            await self._peers.try_unlinked(() if living is None else known.union(living))
            await self._live.clock.sleep(TRY_S)

    # -- for operators -------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether every change is published, and no read may write here any more."""
        is_told = self.is_hashed and self._directory.is_told and self._offers.is_idle
        return is_told and not self._deliveries.counters.set_aside_bytes

    @property
    def is_hashed(self) -> bool:
        """Whether each entry that was stored has its checksum."""
        return self._changes.is_idle

    def hints(self) -> tuple[int, int]:
        """Hints that were ignored, and hints that were refused because there are too many."""
        return self._admission.ignored, self._peers.refused

    def never_reached(self) -> set[str]:
        """Nodes that hints or the directory name, the settings do not, and that never answered."""
        return self._peers.never_reached()

    def status(self) -> cache_pb2.PeersReply:
        state, counters = self._directory.state, self._deliveries.counters
        return cache_pb2.PeersReply(
            node=self.node,
            engine=self._engine.endpoint,
            protocol=self._engine.protocol,
            directory=cache_pb2.DirectoryStatus(
                kind=state.kind,
                up=state.up,
                last_error=state.last_error,
                lookups=state.lookups,
                errors=state.errors,
                unpublished=state.unpublished,
                lag_s=state.lag_s,
                nodes=state.nodes,
            ),
            fetches={outcome.value: n for outcome, n in self._flights.outcomes.items()},
            flights=len(self._flights),
            set_aside_bytes=counters.set_aside_bytes,
            set_aside=counters.set_aside,
            read_retries=counters.retries,
            speculative_reads=counters.speculative,
            speculative_reads_used=counters.speculative_used,
            peers=[self._status_of(peer) for peer in self._peers]
            + [cache_pb2.PeerStatus(node=node, state=NEVER_ASKED) for node in self._never_asked()],
        )

    def peer_states(self) -> Mapping[str, int]:
        """How many nodes of `status` have each state."""
        states = Counter(self._state_of(peer) for peer in self._peers)
        states[NEVER_ASKED] += len(self._never_asked())
        return +states

    def _never_asked(self) -> list[str]:
        """The nodes that the directory lists and this one has not asked."""
        asked = {self.node, *(peer.node for peer in self._peers)}
        return sorted(node for node in self._directory.state.listed if node not in asked)

    def _state_of(self, peer: Peer) -> str:
        """The state of `Peers`, or that the node has left the directory that named it."""
        state = self._peers.state(peer.node)
        is_named = self._peers.is_configured(peer.node) or peer.hinted
        is_gone = not is_named and self._directory.state.has_left(peer.node)
        return GONE if is_gone and state == "unreachable" else state

    def _status_of(self, peer: Peer) -> cache_pb2.PeerStatus:
        return cache_pb2.PeerStatus(
            node=peer.node,
            state=self._state_of(peer),
            configured=self._peers.is_configured(peer.node),
            incarnation=peer.last.incarnation,
            engine=peer.last.engine,
            protocol=peer.last.protocol,
            zone=peer.last.zone,
            last_error=peer.last_error,
            round_trip_s=peer.round_trip_s,
            reads=peer.reads,
            read_bytes=peer.read_bytes,
            failed_reads=peer.failed_reads,
            in_flight=peer.in_flight,
            bytes_per_s=peer.rate.bytes_per_s(self._live.clock.now_s()),
        )
