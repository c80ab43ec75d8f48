"""Other nodes: one link each, who they say they are, and how they have been doing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from ecd.cluster.background import Background
from ecd.cluster.handshake import probe
from ecd.core.types import Content, Key
from ecd.wire import InvalidRequest, content_from, to_key
from ecd_proto.contract import CONTRACT_VERSION, MAX_BATCH, MAX_MESSAGE_BYTES, NODE_PATTERN, proof
from ecd_proto.v1 import peer_pb2 as pb
from ecd_proto.v1 import peer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 1.0
"""How long a peer may take to answer, waits apart, before the link to it is given up."""
BACKOFF_S = (0.25, 10.0)
"""First and longest time for which a peer that did not answer is not asked again."""
RELEASE_PAUSE_S = 0.05
"""How long the ends of leases are collected before they are told."""
MAX_UNSENT = 1024
"""Requests that wait for a peer to read; offers beyond are dropped."""
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


class PeerUnavailable(Exception):
    """The node cannot be asked now; the message says why."""


@dataclass(frozen=True)
class PeerLease:
    """An entry that a peer keeps for us; `until_s`, on our monotonic clock, is never too late."""

    link: Link
    id: int
    content: Content
    address: int
    checksum: int
    until_s: float

    @property
    def ran_out(self) -> bool:
        return time.monotonic() >= self.until_s


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


class Link:
    """One conversation with a peer, from its description until it breaks: then `gone` is done."""

    def __init__(self, peer: Peer, channel: Any, call: Any, description: pb.NodeDescription):
        self.peer, self.description = peer, description
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel, self._call = channel, call
        self._tickets = itertools.count(1)
        self._open: dict[int, tuple[asyncio.Future[Any], float]] = {}
        self._leases: list[pb.LeaseKey] = []
        self._releases: list[int] = []
        self._others: deque[pb.LinkRequest] = deque()
        self._something = asyncio.Event()
        self._background = Background()
        self._tasks = [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read())]

    @property
    def alive(self) -> bool:
        return not self.gone.done()

    async def lease(self, key: Key, wait_s: float) -> PeerLease | None:
        """A lease on the key, waiting for whoever is writing it there. Raises PeerUnavailable."""
        asked_s = time.monotonic()
        ticket, answer = self._ask()
        self._leases.append(pb.LeaseKey(ticket=ticket, key=to_key(key), wait_s=wait_s))
        self._something.set()
        outcome = await self._answer(answer, wait_s)
        if outcome.WhichOneof("outcome") != "leased":
            return None
        leased = outcome.leased
        try:
            content = content_from(leased.content)
        except InvalidRequest as error:
            self.release(leased.lease)
            raise PeerUnavailable(f"{self.peer.node} leased what cannot be: {error}") from None
        until_s = asked_s + self.description.lease_ttl_s
        return PeerLease(self, leased.lease, content, leased.address, leased.checksum, until_s)

    async def find(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Which of the keys are there, or on their way. Raises PeerUnavailable."""
        found: list[bool] = []
        for start in range(0, len(keys), MAX_BATCH):
            ticket, answer = self._ask()
            batch = map(to_key, keys[start : start + MAX_BATCH])
            self._send(pb.LinkRequest(find=pb.FindKeys(ticket=ticket, keys=batch)))
            found.extend((await self._answer(answer, 0.0)).found)
        return found

    def release(self, lease: int) -> None:
        """End a lease, soon: nobody waits for that, and a message costs as much as for many."""
        if not self._releases:
            asyncio.get_running_loop().call_later(RELEASE_PAUSE_S, self._send_releases)
        self._releases.append(lease)

    def _send_releases(self) -> None:
        ended, self._releases = self._releases, []
        for start in range(0, len(ended), MAX_BATCH):
            batch = pb.ReleaseLeases(leases=ended[start : start + MAX_BATCH])
            self._send(pb.LinkRequest(release=batch))

    def offer(self, keys: Sequence[Key]) -> None:
        if len(self._others) < MAX_UNSENT:
            self._send(pb.LinkRequest(offer=pb.OfferKeys(keys=map(to_key, keys))))

    async def close(self) -> None:
        """End the conversation; what is asked for ends with PeerUnavailable."""
        if self.alive:
            self.gone.set_result(None)
            self.peer.link = None
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            for answer, _ in self._open.values():
                if not answer.done():
                    answer.set_exception(PeerUnavailable(f"{self.peer.node} went away"))
                    answer.exception()  # whoever asked may have gone
            self._open.clear()
            self._call.cancel()
            await self._channel.close()

    def _ask(self) -> tuple[int, asyncio.Future[Any]]:
        if not self.alive:
            raise PeerUnavailable(f"{self.peer.node} went away")
        ticket = next(self._tickets)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[ticket] = answer, time.monotonic()
        return ticket, answer

    async def _answer(self, answer: asyncio.Future[Any], wait_s: float) -> Any:
        """What is answered, in time. Raises PeerUnavailable."""
        loop = asyncio.get_running_loop()
        late = loop.call_later(wait_s + ANSWER_TIMEOUT_S, self._give_up, answer)
        try:
            return await answer
        finally:
            late.cancel()

    def _give_up(self, answer: asyncio.Future[Any]) -> None:
        """A peer that leaves one question unanswered has all others taken back."""
        if not answer.done():
            answer.set_exception(PeerUnavailable(f"{self.peer.node} does not answer"))
            self.peer.failed("it did not answer in time")
            self._background.spawn(self.close())

    def _send(self, request: pb.LinkRequest) -> None:
        self._others.append(request)
        self._something.set()

    async def _write(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await self._something.wait()
                self._something.clear()
                while (request := self._next_request()) is not None:
                    await self._call.write(request)
        await self.close()

    def _next_request(self) -> pb.LinkRequest | None:
        if self._leases:
            batch, self._leases = self._leases[:MAX_BATCH], self._leases[MAX_BATCH:]
            return pb.LinkRequest(lease=pb.LeaseKeys(keys=batch))
        return self._others.popleft() if self._others else None

    async def _read(self) -> None:
        cause = "it ended the conversation"
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                match reply.WhichOneof("reply"):
                    case "leases":
                        for outcome in reply.leases.outcomes:
                            self._leased(outcome)
                    case "found":
                        self._settle(reply.found.ticket, reply.found)
        except grpc.RpcError as error:
            cause = error.details() or error.code().name
        if self.alive:
            self.peer.failed(cause)
        await self.close()

    def _leased(self, outcome: pb.LeaseOutcome) -> None:
        if not self._settle(outcome.ticket, outcome) and outcome.WhichOneof("outcome") == "leased":
            self.release(outcome.leased.lease)

    def _settle(self, ticket: int, result: object) -> bool:
        answer, asked_s = self._open.pop(ticket, (None, 0.0))
        if answer is None or answer.done():
            return False  # nobody waits for it any more
        self.peer.round_trip_s = time.monotonic() - asked_s
        answer.set_result(result)
        return True


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
