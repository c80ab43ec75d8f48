"""Other nodes: one link each, who they say they are, and how they have been doing."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import grpc

from ecd.cluster.background import Background
from ecd.cluster.handshake import probe
from ecd.cluster.link import ADDRESSES, Link, PeerUnavailable
from ecd_proto.contract import CONTRACT_VERSION, MAX_MESSAGE_BYTES, NODE_PATTERN, proof
from ecd_proto.v1 import peer_pb2 as pb
from ecd_proto.v1 import peer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
BACKOFF_S = (0.25, 10.0)
"""First and longest time for which a peer that did not answer is not asked again."""
MAX_PEERS = 1024
"""Nodes remembered; one that is not in use is forgotten for another."""
MAX_STRANGERS = 256
"""Of these, nodes that only hints name and that were never reached."""
MAX_STRANGERS_TRIED = 64
"""Of these, nodes that a link is being made to."""
MAX_WAITING_FOR_STRANGERS = 256
"""Flights, of 1,024, that wait for such links."""
MAX_LEASE_TTL_S = 3600.0
"""The longest that the settings allow."""
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


@dataclass(eq=False)
class Peer:
    """What is known of one node."""

    node: str
    hinted: bool = False  # only requests name it
    link: Link | None = None
    connecting: asyncio.Task[Link] | None = None
    last: pb.NodeDescription = field(default_factory=pb.NodeDescription)
    last_error: str = ""
    backoff_s: float = 0.0
    retry_at_s: float = 0.0
    round_trip_s: float = 0.0
    reads: int = 0
    read_bytes: int = 0
    failed_reads: int = 0
    in_flight: int = 0

    @property
    def state(self) -> str:
        if self.link is not None:
            return "connected"
        if self.connecting is not None:
            return "connecting"
        return "unreachable" if self.last_error else "idle"

    @property
    def was_reached(self) -> bool:
        return bool(self.last.incarnation)

    @property
    def is_stranger(self) -> bool:
        return self.hinted and not self.was_reached

    @property
    def is_in_use(self) -> bool:
        is_asked = self.link is not None and self.link.is_asked
        return is_asked or self.connecting is not None or self.in_flight > 0

    def failed(self, why: object) -> None:
        self.last_error = str(why)
        first_s, longest_s = BACKOFF_S
        self.backoff_s = min(max(2 * self.backoff_s, first_s), longest_s)
        self.retry_at_s = time.monotonic() + self.backoff_s


async def _check(node: str, said: pb.NodeDescription) -> None:
    """Raises PeerUnavailable: the description is not one of this node."""
    if not (
        re.fullmatch(r"[0-9a-f]{32}", said.incarnation)
        and re.fullmatch(NODE_PATTERN, said.engine)
        and said.identity_address
        and said.pool_address + said.pool_bytes <= ADDRESSES
        and 0.0 < said.lease_ttl_s <= MAX_LEASE_TTL_S
    ):
        raise PeerUnavailable("it describes itself as no node does")
    host, engine_host = (name.rpartition(":")[0] for name in (node, said.engine))
    if engine_host != host and not await _addresses(engine_host) & await _addresses(host):
        raise PeerUnavailable(f"its engine is on {engine_host}, another machine")


async def _addresses(host: str) -> set[str]:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


class Peers:
    """Every node this one has heard of, by the host:port of its Peer service."""

    def __init__(
        self, node: str, daemon: str, protocol: str, token: str | None, credentials: Any
    ) -> None:
        self._node, self._daemon, self._protocol = node, daemon, protocol
        self._token, self._credentials = token, credentials
        self.configured: Collection[str] = ()
        """Never forgotten."""
        self.refused = 0
        """Hints not followed, as too many lead to nodes that were never reached."""
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._strangers_tried = self._waiting_for_strangers = 0
        self._background = Background()

    def __iter__(self) -> Any:
        return iter(list(self._peers.values()))

    def is_connected(self, node: str) -> bool:
        peer = self._peers.get(node)
        return peer is not None and peer.link is not None

    def in_flight(self, node: str) -> int:
        """Reads from that node that are under way."""
        peer = self._peers.get(node)
        return 0 if peer is None else peer.in_flight

    async def link(self, node: str, hinted: bool = False) -> Link:
        """The link to a node, made if need be; `hinted`: only a request names the node.

        Raises PeerUnavailable, within CONNECT_TIMEOUT_S.
        """
        if node == self._node:
            raise PeerUnavailable("that is this node")
        if hinted and node not in self._peers:
            self._check_strangers_tried()
        peer = self._get(node, hinted)
        if peer.link is not None:
            return peer.link
        is_stranger = peer.is_stranger
        if is_stranger and self._waiting_for_strangers >= MAX_WAITING_FOR_STRANGERS:
            raise self._refused(f"{MAX_WAITING_FOR_STRANGERS} others wait for nodes of hints")
        connecting = self._connecting(peer)
        self._waiting_for_strangers += is_stranger
        try:
            return await asyncio.shield(connecting)
        finally:
            self._waiting_for_strangers -= is_stranger

    def _connecting(self, peer: Peer) -> asyncio.Task[Link]:
        """What makes its link. Raises PeerUnavailable: it is not tried now."""
        if peer.connecting is not None:
            return peer.connecting
        if time.monotonic() < peer.retry_at_s:
            raise PeerUnavailable(f"{peer.node} did not answer lately: {peer.last_error}")
        is_stranger = peer.is_stranger
        if is_stranger:
            self._check_strangers_tried()
        self._strangers_tried += is_stranger

        def over(task: asyncio.Task[Link]) -> None:
            self._strangers_tried -= is_stranger
            if not task.cancelled():
                task.exception()  # whoever asked may have gone when it fails

        peer.connecting = asyncio.ensure_future(self._connect(peer))
        peer.connecting.add_done_callback(over)
        return peer.connecting

    def _get(self, node: str, hinted: bool) -> Peer:
        """Raises PeerUnavailable: there is no room for another one."""
        peer = self._peers.get(node)
        if peer is None:
            self._make_room(node, hinted)
            peer = self._peers[node] = Peer(node, hinted)
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
        idle = [peer for peer in crowd if not (peer.is_in_use or peer.node in self.configured)]
        if not idle:
            if node in self.configured:
                return  # there are as many as the configuration says
            raise self._refused(f"{MAX_PEERS} other nodes are in use")
        forgotten = min(idle, key=lambda peer: (peer.link is not None, not peer.is_stranger))
        del self._peers[forgotten.node]
        if forgotten.link is not None:
            self._background.spawn(forgotten.link.close())

    def _check_strangers_tried(self) -> None:
        if self._strangers_tried >= MAX_STRANGERS_TRIED:
            raise self._refused(f"{MAX_STRANGERS_TRIED} nodes of hints are being tried")

    def _refused(self, why: str) -> PeerUnavailable:
        self.refused += 1
        return PeerUnavailable(why)

    async def close(self) -> None:
        for peer in self:
            if peer.connecting is not None:
                peer.connecting.cancel()
            if peer.link is not None:
                await peer.link.close()

    async def _connect(self, peer: Peer) -> Link:
        channel = (
            grpc.aio.insecure_channel(peer.node, OPTIONS)
            if self._credentials is None
            else grpc.aio.secure_channel(peer.node, self._credentials, OPTIONS)
        )
        try:
            link = await asyncio.wait_for(self._greet(peer, channel), CONNECT_TIMEOUT_S)
        except BaseException as error:
            await channel.close()
            if isinstance(error, grpc.RpcError):
                why = error.details() or error.code().name
            elif isinstance(error, asyncio.TimeoutError):
                why = f"no answer within {CONNECT_TIMEOUT_S} s"
            elif isinstance(error, PeerUnavailable | OSError):
                why = str(error)
            elif isinstance(error, Exception):
                why = f"it cannot be understood: {error}"
                logger.exception("peer %s", peer.node)
            else:
                raise
            peer.failed(why)
            logger.info("peer %s: %s", peer.node, why)
            raise PeerUnavailable(f"{peer.node}: {why}") from None
        finally:
            peer.connecting = None
        peer.link, peer.last, peer.last_error = link, link.description, ""
        peer.backoff_s = 0.0
        logger.info("peer %s: connected, incarnation %s", peer.node, peer.last.incarnation)
        return link

    async def _greet(self, peer: Peer, channel: Any) -> Link:
        nonce, now = secrets.token_hex(16), str(int(time.time()))
        metadata = [("ecd-nonce", nonce), ("ecd-time", now)]
        if self._token is not None:
            said = proof(self._token, "ask", peer.node, nonce, now)
            metadata.append(("ecd-proof", said))
        asked_s = time.monotonic()
        stub: Any = pb_grpc.PeerStub(channel)
        call = stub.Link(metadata=metadata)
        hello = pb.LinkHello(
            contract_version=CONTRACT_VERSION, daemon=self._daemon, node=self._node
        )
        await call.write(pb.LinkRequest(hello=hello))
        reply = await call.read()
        if reply is grpc.aio.EOF:
            raise PeerUnavailable(await call.details() or "it hung up")
        if reply is None:
            raise PeerUnavailable("it sent what is no message")
        peer.round_trip_s = time.monotonic() - asked_s
        if self._token is not None:
            answered = dict(await call.initial_metadata()).get("ecd-proof")
            if answered != proof(self._token, "answer", peer.node, nonce):
                raise PeerUnavailable("it does not know the cluster's token")
        description = reply.welcome
        if description.contract_version != CONTRACT_VERSION:
            raise PeerUnavailable(
                f"it speaks contract {description.contract_version}, this node "
                f"{CONTRACT_VERSION}: upgrade the older one"
            )
        await _check(peer.node, description)
        if description.protocol != self._protocol:
            raise PeerUnavailable(
                f"its engine uses {description.protocol}, this node's {self._protocol}: set "
                "ECD_PROTOCOL alike"
            )
        if await probe(description.engine) != self._protocol:
            raise PeerUnavailable(f"its engine on {description.engine} is another one")
        return Link(peer, channel, call, description)
