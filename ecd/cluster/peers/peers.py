"""Other nodes: a link to each that is in use, made and checked when it is first needed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any

import grpc

from ecd.base.clock import Clock
from ecd.base.identity import NodeIdentity
from ecd.cluster.peers.link import ADDRESSES, Link
from ecd.cluster.peers.peer import Peer, PeerUnavailable
from ecd.cluster.transport.handshake import probe
from ecd.live.background import Background, within
from ecd.settings.config import MAX_ZONE_LENGTH, Config
from ecd_proto.contract import (
    CONTRACT_VERSION,
    MAX_MESSAGE_BYTES,
    MAX_POOLS,
    NEVER_ASKED,
    NODE_PATTERN,
    proof,
)
from ecd_proto.v1 import peer_pb2 as pb
from ecd_proto.v1 import peer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
MAX_PEERS = 1024
"""Nodes remembered; a node that is not in use is forgotten to make room for another."""
TRIED_TOGETHER = 16
"""Nodes of the settings that are tried at one time, without a request."""
MAX_STRANGERS = 256
"""Nodes remembered that only hints named and that were never reached."""
MAX_STRANGERS_TRIED = 64
"""Links being made to nodes that were never reached."""
MAX_WAITING_FOR_STRANGERS = 256
"""Flights, of 1,024, that wait for such links."""
MAX_LEASE_TTL_S = 3600.0
"""The longest time to live of leases that the settings allow."""
MAX_DESCRIPTION_BYTES = 16 << 10
"""Longest description that a node may give of itself. An honest one has some 200 bytes, and 30 for
each pool."""
NO_CONNECTION = "Failed to connect to remote host: "
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def open_channel(node: str, credentials: grpc.ChannelCredentials | None) -> Any:
    """A channel to the node's Peer service, connected with its first call."""
    if credentials is None:
        return grpc.aio.insecure_channel(node, OPTIONS)
    return grpc.aio.secure_channel(node, credentials, OPTIONS)


async def _check(node: str, said: pb.NodeDescription) -> None:
    """Check the description. Raises PeerUnavailable: it cannot be this node's."""
    if not (
        re.fullmatch(r"[0-9a-f]{32}", said.incarnation)
        and re.fullmatch(NODE_PATTERN, said.engine)
        and said.identity_address
        and len(said.zone) <= MAX_ZONE_LENGTH
        and said.ByteSize() <= MAX_DESCRIPTION_BYTES
        and len(said.pools) <= MAX_POOLS
        and all(pool.address + pool.nbytes <= ADDRESSES for pool in said.pools)
        and 0.0 < said.lease_ttl_s <= MAX_LEASE_TTL_S
    ):
        raise PeerUnavailable("it describes itself as no node does")
    host, engine_host = (name.rpartition(":")[0] for name in (node, said.engine))
    if engine_host != host and not await _addresses(engine_host) & await _addresses(host):
        raise PeerUnavailable(f"its engine is on {engine_host}, another machine")


async def _addresses(host: str) -> set[str]:
    """The host's IPv4 addresses. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


async def _is_alias(node: str, own: str) -> bool:
    """Whether all that the node's name leads to is what this node's `own` name leads to."""
    (host, _, port), (own_host, _, own_port) = node.rpartition(":"), own.rpartition(":")
    if port != own_port or all(re.fullmatch(r"[0-9.]+", name) for name in (host, own_host)):
        return False
    with contextlib.suppress(OSError, UnicodeError):
        return await _addresses(host) <= await _addresses(own_host)
    return False


class ThisNode(PeerUnavailable):
    """The name is another one of this node."""


class Peers:
    """Every node this one has heard of, by the host:port of its Peer service."""

    def __init__(
        self,
        config: Config,
        identity: NodeIdentity,
        credentials: grpc.ChannelCredentials | None,
        clock: Clock,
        channel: Callable[[str, grpc.ChannelCredentials | None], Any] = open_channel,
        probe: Callable[[str], Awaitable[str]] = probe,
    ) -> None:
        """`channel` opens a node's Peer service, `probe` asks for its engine's protocol."""
        self.refused = 0
        """Hints not followed, because too many lead to nodes that were never reached."""
        self._identity, self._credentials = identity, credentials
        self._channel, self._probe, self._clock = channel, probe, clock
        self._protocol, self._token = config.protocol, config.token
        self._configured: dict[str, None] = {}
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._links: dict[str, Link] = {}  # some may be gone
        self._connecting: dict[str, asyncio.Task[Link]] = {}
        self._strangers_tried = self._waiting_for_strangers = 0
        self._background = Background()
        self.reload(config.peers)

    def reload(self, configured: Collection[str]) -> None:
        """Replace the nodes of the settings, which are known from the start and never forgotten."""
        before, self._configured = self._configured, dict.fromkeys(configured)
        self._configured.pop(self._identity.node, None)
        self._own_names = {self._identity.node}
        for node in self._configured:
            self._get(node, hinted=False)
        for node in before.keys() - self._configured.keys():
            if not (self.is_connected(node) or self._is_in_use(self._peers[node])):
                del self._peers[node]

    async def try_unlinked(self, may_live: Collection[str]) -> None:
        """Link to nodes that have no link, a few at a time.

        They are those of the settings, and those of `may_live` whose links have failed.
        """
        nodes = [
            peer.node
            for peer in self
            if not self.is_connected(peer.node)
            and (peer.node in self._configured or (peer.last_error and peer.node in may_live))
        ]
        for start in range(0, len(nodes), TRIED_TOGETHER):
            await asyncio.gather(*map(self._try, nodes[start : start + TRIED_TOGETHER]))

    async def _try(self, node: str) -> None:
        if node not in self._peers:
            return  # a reload has removed it since
        with contextlib.suppress(PeerUnavailable):  # the peer's row says why
            await self.link(node)

    def is_configured(self, node: str) -> bool:
        return node in self._configured

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def is_connected(self, node: str) -> bool:
        return self._link(node) is not None

    def state(self, node: str) -> str:
        """`connected`, `connecting`, `unreachable`, `idle` or `never asked`."""
        if self.is_connected(node):
            return "connected"
        peer = self._peers[node]
        if peer.last_error:
            return "unreachable"  # also while it is tried again
        if node in self._connecting:
            return "connecting"
        return "idle" if peer.was_reached else NEVER_ASKED

    def never_reached(self) -> set[str]:
        """Nodes that the settings do not name, and that never answered."""
        return {p.node for p in self if not p.was_reached and p.node not in self._configured}

    def in_flight(self, node: str) -> int:
        """Reads from that node that are under way."""
        peer = self._peers.get(node)
        return 0 if peer is None else peer.in_flight

    def _link(self, node: str) -> Link | None:
        link = self._links.get(node)
        return link if link is not None and link.alive else None

    def _is_in_use(self, peer: Peer) -> bool:
        link = self._link(peer.node)
        is_asked = link is not None and link.is_asked
        return is_asked or peer.node in self._connecting or peer.in_flight > 0

    async def link(self, node: str, hinted: bool = False) -> Link:
        """The link to a node, made if need be; `hinted` if only a request names the node.

        Raises PeerUnavailable, within CONNECT_TIMEOUT_S.
        """
        if node in self._own_names:
            raise ThisNode("that is this node")
        if hinted and node not in self._peers:
            self._check_strangers_tried()
        peer = self._get(node, hinted)
        link = self._link(node)
        if link is not None:
            return link
        is_stranger = peer.is_stranger
        if is_stranger and self._waiting_for_strangers >= MAX_WAITING_FOR_STRANGERS:
            raise self._refused(f"{MAX_WAITING_FOR_STRANGERS} others wait for nodes of hints")
        connecting = self._connect_to(peer)
        self._waiting_for_strangers += is_stranger
        try:
            return await asyncio.shield(connecting)
        finally:
            self._waiting_for_strangers -= is_stranger

    def _connect_to(self, peer: Peer) -> asyncio.Task[Link]:
        """The task that makes the peer's link. Raises PeerUnavailable: it is not tried now."""
        if peer.node in self._connecting:
            return self._connecting[peer.node]
        if self._clock.now_s() < peer.retry_at_s:
            raise peer.unavailable(f" did not answer lately: {peer.last_error}")
        is_stranger = peer.is_stranger
        if is_stranger:
            self._check_strangers_tried()
        self._strangers_tried += is_stranger

        def over(task: asyncio.Task[Link]) -> None:
            self._strangers_tried -= is_stranger
            if not task.cancelled():
                task.exception()  # the callers may have gone when it fails

        connecting = self._connecting[peer.node] = asyncio.ensure_future(self._connect(peer))
        connecting.add_done_callback(over)
        return connecting

    def _get(self, node: str, hinted: bool) -> Peer:
        """The node's peer, new if need be. Raises PeerUnavailable: there is no room for it."""
        peer = self._peers.get(node)
        if peer is None:
            self._make_room(node, hinted)
            peer = self._peers[node] = Peer(node, self._clock, hinted)
        peer.hinted &= hinted
        self._peers.move_to_end(node)
        return peer

    def _make_room(self, node: str, hinted: bool) -> None:
        """Forget a node if there are too many: never one in use, or one that is configured.

        Nodes that were never reached go first, those with a link last. Raises PeerUnavailable.
        """
        strangers = [peer for peer in self._peers.values() if peer.is_stranger]
        crowd = strangers if hinted and len(strangers) >= MAX_STRANGERS else self
        if crowd is self and len(self._peers) < MAX_PEERS:
            return
        idle = [
            peer for peer in crowd if not (self._is_in_use(peer) or peer.node in self._configured)
        ]
        if not idle:
            if node in self._configured:
                return  # there are as many as the configuration says
            raise self._refused(f"{MAX_PEERS} other nodes are in use")
        forgotten = min(idle, key=lambda peer: (self.is_connected(peer.node), not peer.is_stranger))
        del self._peers[forgotten.node]
        link = self._links.pop(forgotten.node, None)
        if link is not None:
            self._background.spawn(link.close())

    def _check_strangers_tried(self) -> None:
        if self._strangers_tried >= MAX_STRANGERS_TRIED:
            raise self._refused(f"{MAX_STRANGERS_TRIED} nodes of hints are being tried")

    def _refused(self, why: str) -> PeerUnavailable:
        self.refused += 1
        return PeerUnavailable(why)

    async def close(self) -> None:
        for connecting in self._connecting.values():
            connecting.cancel()
        for link in list(self._links.values()):
            await link.close()

    async def _connect(self, peer: Peer) -> Link:
        channel = self._channel(peer.node, self._credentials)
        try:
            link = await within(CONNECT_TIMEOUT_S, self._greet(peer, channel))
        except BaseException as error:
            await channel.close()
            is_full, about = False, {"peer": peer.node}
            if isinstance(error, ThisNode) and peer.node in self._configured:
                logger.info("peer %s: that is this node", peer.node, extra=about)
                self._own_names.add(peer.node)
                self._configured.pop(peer.node)
                self._peers.pop(peer.node, None)
                raise
            if isinstance(error, grpc.RpcError):
                is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                why = error.details() or error.code().name
                why = why.rpartition(NO_CONNECTION)[2]  # the cause, without gRPC's names for it
            elif isinstance(error, asyncio.TimeoutError):
                why = f"no answer within {CONNECT_TIMEOUT_S} s"
            elif isinstance(error, PeerUnavailable | OSError):
                why = str(error)
            elif isinstance(error, Exception):
                why = f"it cannot be understood: {error}"
                logger.exception("peer %s", peer.node, extra=about)
            else:
                raise
            why = " ".join(why.split())  # it may be the node's own words: one line of log is ours
            peer.failed(why, is_full)
            level = logging.DEBUG  # the log has it, and the node is tried again and again
            if peer.is_stranger:
                level = logging.INFO  # nobody fills the log with warnings
            elif why != peer.warned:
                level, peer.warned = logging.WARNING, why
            logger.log(level, "peer %s: %s", peer.node, why, extra=about)
            raise peer.unavailable(f": {why}") from None
        finally:
            del self._connecting[peer.node]
        self._links[peer.node] = link
        link.gone.add_done_callback(lambda _: self._forget(link))
        peer.connected(link.description)
        about, incarnation = {"peer": peer.node}, peer.last.incarnation
        logger.info("peer %s: connected, incarnation %s", peer.node, incarnation, extra=about)
        return link

    def _forget(self, link: Link) -> None:
        if self._links.get(link.peer.node) is link:
            del self._links[link.peer.node]

    async def _greet(self, peer: Peer, channel: Any) -> Link:
        own = self._identity
        if peer.node in self._configured and await _is_alias(peer.node, own.node):
            raise ThisNode("that is this node")
        nonce, now = self._clock.secret(16).hex(), str(int(self._clock.unix_s()))
        metadata = [("ecd-nonce", nonce), ("ecd-time", now)]
        if self._token is not None:
            said = proof(self._token, "ask", peer.node, nonce, now)
            metadata.append(("ecd-proof", said))
        asked_s = self._clock.now_s()
        stub: Any = pb_grpc.PeerStub(channel)
        call = stub.Link(metadata=metadata)
        hello = pb.LinkHello(
            contract_version=CONTRACT_VERSION,
            daemon=self._identity.daemon,
            node=self._identity.node,
        )
        await call.write(pb.LinkRequest(hello=hello))
        reply = await call.read()
        if reply is grpc.aio.EOF:
            raise PeerUnavailable(await call.details() or "it hung up")
        if reply is None:
            raise PeerUnavailable("it sent what is no message")
        peer.answered(self._clock.now_s() - asked_s)
        if self._token is not None:
            answered = dict(await call.initial_metadata()).get("ecd-proof")
            if answered != proof(self._token, "answer", peer.node, nonce):
                raise PeerUnavailable(
                    "it does not know the cluster's token: set one ECD_PEER_TOKEN on every node"
                )
        description = reply.welcome
        if description.contract_version != CONTRACT_VERSION:
            raise PeerUnavailable(
                f"it speaks contract {description.contract_version}, this node "
                f"{CONTRACT_VERSION}: upgrade the older one"
            )
        if description.incarnation == own.incarnation:
            raise ThisNode("that is this node")
        await _check(peer.node, description)
        if description.protocol != self._protocol:
            raise PeerUnavailable(
                f"its engine uses {description.protocol}, this node's {self._protocol}: set "
                "ECD_PROTOCOL alike"
            )
        if await self._probe(description.engine) != self._protocol:
            raise PeerUnavailable(f"its engine on {description.engine} is another one")
        return Link(peer, channel, call, description)
