"""Other nodes: one link each, who they say they are, and how they have been doing."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import grpc

from ecd.cluster.background import Background
from ecd.cluster.handshake import probe
from ecd.cluster.link import Link, PeerUnavailable
from ecd_proto.contract import CONTRACT_VERSION, MAX_MESSAGE_BYTES, NODE_PATTERN, proof
from ecd_proto.v1 import peer_pb2 as pb
from ecd_proto.v1 import peer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
BACKOFF_S = (0.25, 10.0)
"""First and longest time for which a peer that did not answer is not asked again."""
MAX_PEERS = 1024
"""Nodes remembered; the one not used for longest is forgotten."""
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

    def failed(self, why: object) -> None:
        self.last_error = str(why)
        first_s, longest_s = BACKOFF_S
        self.backoff_s = min(max(2 * self.backoff_s, first_s), longest_s)
        self.retry_at_s = time.monotonic() + self.backoff_s


def _check(said: pb.NodeDescription) -> None:
    """Raises PeerUnavailable: the description is not one."""
    if not (
        re.fullmatch(r"[0-9a-f]{32}", said.incarnation)
        and re.fullmatch(NODE_PATTERN, said.engine)
        and said.identity_address
    ):
        raise PeerUnavailable("it describes itself as no node does")


class Peers:
    """Every node this one has heard of, by the host:port of its Peer service."""

    def __init__(
        self, node: str, daemon: str, protocol: str, token: str | None, credentials: Any
    ) -> None:
        self._node, self._daemon, self._protocol = node, daemon, protocol
        self._token, self._credentials = token, credentials
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._background = Background()

    def __iter__(self) -> Any:
        return iter(list(self._peers.values()))

    def get(self, node: str) -> Peer:
        peer = self._peers.get(node)
        if peer is None:
            peer = self._peers[node] = Peer(node)
            if len(self._peers) > MAX_PEERS:
                _, forgotten = self._peers.popitem(last=False)
                if forgotten.link is not None:
                    self._background.spawn(forgotten.link.close())
        self._peers.move_to_end(node)
        return peer

    async def link(self, node: str) -> Link:
        """The link to a node, made if need be. Raises PeerUnavailable, within CONNECT_TIMEOUT_S."""
        if node == self._node:
            raise PeerUnavailable("that is this node")
        peer = self.get(node)
        if peer.link is not None:
            return peer.link
        if peer.connecting is None:
            if time.monotonic() < peer.retry_at_s:
                raise PeerUnavailable(f"{node} did not answer lately: {peer.last_error}")
            peer.connecting = asyncio.ensure_future(self._connect(peer))
            # Whoever asked may have gone when it fails.
            peer.connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(peer.connecting)

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
        _check(description)
        if description.protocol != self._protocol:
            raise PeerUnavailable(
                f"its engine uses {description.protocol}, this node's {self._protocol}: set "
                "ECD_PROTOCOL alike"
            )
        if await probe(description.engine) != self._protocol:
            raise PeerUnavailable(f"its engine on {description.engine} is another one")
        return Link(peer, channel, call, description)
