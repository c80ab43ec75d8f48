"""This node among others: engine, peers, directory and fetches, made from the settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Mapping as MappingOf

import grpc

from ecd.cluster.admission import Admission, Admitted
from ecd.cluster.background import Background
from ecd.cluster.checksum import TURN, Checksums
from ecd.cluster.directory import Directory, NoDirectory, StaticDirectory
from ecd.cluster.engine import Engine
from ecd.cluster.fetcher import Fetcher
from ecd.cluster.link import PeerUnavailable
from ecd.cluster.peers import Peers
from ecd.cluster.redis_directory import RedisDirectory
from ecd.config import Config
from ecd.core.cache import Cache
from ecd.core.types import EntryId, Extent, Key, Leased, LimitReached, Wakeup
from ecd_proto.contract import CONTRACT_VERSION, MAX_HINTS, Hint
from ecd_proto.mapping import Mapping
from ecd_proto.v1 import cache_pb2, peer_pb2

logger = logging.getLogger(__name__)

MAX_OFFERS = 4096
OFFER_TTL_S = 60.0
"""How long an offer of a key that is not stored yet is kept."""
PUBLISH_BATCH = 256


class ClusterError(Exception):
    """This node cannot join; the message says what to change."""


class Cluster:
    """One per daemon that has peers, on its event loop."""

    def __init__(
        self,
        config: Config,
        cache: Cache,
        checksums: Checksums,
        readable: Mapping,
        writable: Mapping,
        incarnation: str,
        daemon: str,
        deliver: Callable[[Iterable[Wakeup]], None],
        observe: Callable[[float, int], None],
    ) -> None:
        """Start the engine, for `start`. Blocking, for some milliseconds.

        `readable` is what other nodes may read, `writable` what they never can write to. Raises
        ClusterError and EngineError.
        """
        assert config.peer_address is not None
        self.node = config.peer_address
        self._config, self._cache, self._observe = config, cache, observe
        self._checksums = checksums
        self._incarnation, self._daemon = incarnation, daemon
        self._changed = asyncio.Event()
        self._offers: OrderedDict[Key, tuple[Sequence[Admitted], float]] = OrderedDict()
        self._background = Background()
        session = cache.open_session()
        assert not isinstance(session, LimitReached)
        self.server_credentials, credentials = _credentials(config)
        host = self.node.rpartition(":")[0]
        self._engine = Engine(
            host,
            config.protocol,
            config.device,
            config.engine_ports,
            config.mooncake,
            bytes.fromhex(incarnation),
        )
        # Over tcp a peer could write to whatever is registered; the kernel lets it only read this.
        self._registered = readable if config.protocol == "tcp" else writable
        self._peers = Peers(self.node, daemon, config.protocol, config.token, credentials)
        self._peers.configured = config.peers
        self._directory = self._make_directory()
        self._admission = Admission(self.node, config, self._peers, self._directory)
        self._fetcher = Fetcher(
            cache,
            session,
            writable,
            self._engine.reads,
            self._peers,
            self._admission.admit,
            self._directory.find,
            deliver,
            self._note_fetch,
            config.zone,
            config.fetch_timeout_s,
        )
        cache.take_changes()  # from here on they are noted

    async def start(self) -> None:
        """Let other nodes read the pool, which is populated, for `run`. Raises EngineError."""
        await self._engine.verify(self._config.protocol)
        await self._engine.register(self._registered)

    def reload(self, config: Config) -> None:
        """Take over what may change at any time: the peers asked, hints followed, the deadline."""
        self._config = config
        self._admission.reload(config)
        self._peers.configured = config.peers
        self._fetcher.timeout_s = config.fetch_timeout_s
        if isinstance(self._directory, StaticDirectory):
            self._directory.nodes = self._other_nodes()

    def _other_nodes(self) -> Sequence[str]:
        return [node for node in self._config.peers if node != self.node]

    async def run(self) -> None:
        """Tell the directory and other nodes what changes here, until cancelled."""
        logger.info(
            "peers on %s, engine on %s over %s, directory %s",
            *(self.node, self._engine.endpoint, self._engine.protocol, self._directory.state.kind),
        )
        await asyncio.gather(self._directory.run(), self._publish(), self._engine.reads.failed)

    async def close(self) -> None:
        await self._fetcher.close()
        await self._directory.close()
        await self._peers.close()
        await self._background.close()
        self._engine.close()

    def _make_directory(self) -> Directory:
        config = self._config
        match config.directory_kind:
            case "none":
                return NoDirectory()
            case "static":
                return StaticDirectory(self._other_nodes(), self._ask)
            case _:
                assert config.directory is not None
                return RedisDirectory(
                    config.directory,
                    config.cluster,
                    self.node,
                    self._incarnation,
                    config.zone,
                    lambda: self._cache.leases,
                    self._page,
                    self._cache.extent,
                )

    # -- what engines on this node ask for -----------------------------------------------------

    def want(self, key: Key, hints: Sequence[Hint]) -> None:
        """Somebody waits for the key: bring it here, if it is not here or on its way."""
        self._fetcher.want(key, hints)

    def offer(self, keys: Sequence[Key], nodes: Sequence[str]) -> None:
        """Tell these nodes of these keys: now, or when they are stored."""
        self._background.spawn(self._offer(keys, [Hint(node) for node in nodes[:MAX_HINTS]]))

    async def _offer(self, keys: Sequence[Key], nodes: Sequence[Hint]) -> None:
        admitted = await self._admission.admit(nodes)
        if not admitted:
            return
        until_s = time.monotonic() + OFFER_TTL_S
        stored = [key for key in keys if self._cache.contains(key)]
        for key in set(keys).difference(stored):
            self._offers[key] = admitted, until_s
            self._offers.move_to_end(key)
        while self._offers and (
            len(self._offers) > MAX_OFFERS
            or next(iter(self._offers.values()))[1] < time.monotonic()
        ):
            self._offers.popitem(last=False)
        if stored:
            await asyncio.gather(*(self._send_offer(to, stored) for to in admitted))

    def changed(self) -> None:
        """Something was stored here, or evicted."""
        self._changed.set()

    def _note_fetch(self, seconds: float, nbytes: int) -> None:
        self._observe(seconds, nbytes)
        self.changed()

    # -- what other nodes ask for --------------------------------------------------------------

    def describe(self) -> peer_pb2.NodeDescription:
        return peer_pb2.NodeDescription(
            contract_version=CONTRACT_VERSION,
            daemon=self._daemon,
            node=self.node,
            incarnation=self._incarnation,
            zone=self._config.zone,
            engine=self._engine.endpoint,
            protocol=self._engine.protocol,
            identity_address=self._engine.identity_address,
            lease_ttl_s=self._cache.lease_ttl_s,
            leases=self._cache.leases,
            pool_address=self._registered.address,
            pool_bytes=self._registered.nbytes,
        )

    def address_of(self, extent: Extent) -> int:
        return self._registered.address + extent.offset

    def checksum_of(self, leased: Leased) -> int | Awaitable[int]:
        """Of a leased entry; at once where it is known."""
        return self._checksums.of(leased)

    def is_guessed(self, key: Key) -> bool:
        return key in self._fetcher.guessed

    async def offered(self, found: MappingOf[Key, Hint]) -> None:
        """A node has these keys and expects us to want them."""
        for number, (key, hint) in enumerate(found.items()):
            self._fetcher.want(key, [hint])
            if number % TURN == 0:
                await asyncio.sleep(0)

    # -- the background ------------------------------------------------------------------------

    async def _publish(self) -> None:
        """Hash what is stored, offer it to whom it was promised, tell the directory."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            changes = list(self._cache.take_changes().items())
            for start in range(0, len(changes), PUBLISH_BATCH):
                batch = dict(changes[start : start + PUBLISH_BATCH])
                for number, (key, stored) in enumerate(batch.items()):
                    if stored:
                        self._offer_stored(key)
                        await self._checksums.note(key)
                    if number % TURN == 0:
                        await asyncio.sleep(0)
                self._directory.publish(batch)
                await asyncio.sleep(0)

    def _offer_stored(self, key: Key) -> None:
        nodes, until_s = self._offers.pop(key, ((), 0.0))
        if time.monotonic() < until_s:
            for node in nodes:
                self._background.spawn(self._send_offer(node, [key]))

    async def _send_offer(self, to: Admitted, keys: Sequence[Key]) -> None:
        try:
            link = await self._peers.link(to.hint.node, to.hinted)
            link.offer({key: self._cache.extent(key) for key in keys})
        except PeerUnavailable as error:
            logger.debug("an offer is lost: %s", error)

    async def _ask(self, node: str, keys: Sequence[Key]) -> Sequence[Hint | None]:
        try:
            return await (await self._peers.link(node)).find(keys)
        except PeerUnavailable as error:
            self._directory.state.errors += 1
            self._directory.state.last_error = str(error)
            return ()

    def _page(self, after: EntryId, limit: int) -> tuple[list[Key], EntryId | None]:
        entries, next_after = self._cache.page(after, limit)
        return [entry.key for entry in entries], next_after

    # -- for operators -------------------------------------------------------------------------

    def hints(self) -> tuple[int, int]:
        """Those ignored, and those refused as there are too many."""
        return self._admission.ignored, self._peers.refused

    def never_reached(self) -> set[str]:
        """Nodes that hints or the directory name, the settings do not, and that never answered."""
        configured = self._config.peers
        return {p.node for p in self._peers if not p.was_reached and p.node not in configured}

    def status(self) -> cache_pb2.PeersReply:
        state, counters = self._directory.state, self._fetcher.counters
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
            ),
            fetches=counters.outcomes,
            flights=self._fetcher.flights,
            set_aside_bytes=counters.set_aside_bytes,
            set_aside=counters.set_aside,
            read_retries=counters.retries,
            reads_ahead=counters.ahead,
            reads_ahead_used=counters.ahead_used,
            peers=[
                cache_pb2.PeerStatus(
                    node=peer.node,
                    state=peer.state,
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
                )
                for peer in self._peers
            ],
        )


def _credentials(
    config: Config,
) -> tuple[grpc.ServerCredentials | None, grpc.ChannelCredentials | None]:
    """Mutual TLS for both directions, or neither. Raises ClusterError."""
    paths = (config.peer_tls_ca, config.peer_tls_key, config.peer_tls_cert)
    if not all(paths):
        return None, None
    try:
        ca, key, cert = (path.read_bytes() for path in paths if path is not None)
    except OSError as error:
        raise ClusterError(f"cannot read {error.filename}: {error.strerror}") from None
    server = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
    return server, grpc.ssl_channel_credentials(ca, key, cert)
