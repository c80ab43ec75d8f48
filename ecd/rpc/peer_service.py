"""The Peer service: leases for the daemons of other nodes, each on a link of its own."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, Protocol

import grpc

from ecd.core.cache import Cache
from ecd.core.types import (
    Extent,
    Key,
    Leased,
    LeaseId,
    LimitReached,
    SessionId,
    Ticket,
    Waiting,
    Wakeup,
)
from ecd.rpc.listener import Listener
from ecd.rpc.sessions import HELLO_TIMEOUT_S, Sessions
from ecd.turns import Pace
from ecd.wire import (
    InvalidRequest,
    check_batch,
    key_from,
    places_from,
    seconds_from,
    to_content,
    to_extents,
)
from ecd_proto.contract import CONTRACT_VERSION, MAX_MESSAGE_BYTES, NODE_PATTERN, Hint, proof
from ecd_proto.v1 import cache_pb2
from ecd_proto.v1 import peer_pb2 as pb
from ecd_proto.v1 import peer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
MAX_UNREAD_REPLIES = 10_000
"""Replies a peer may leave unread before its link is ended."""
MAX_LINKS = 2048
"""Links of peers, of the 4,096 sessions that a daemon has: the rest is for its engines."""
PEER_LINKS = "peer_links"
"""The cause for which those beyond are refused."""
TURN = 64
"""Keys of one request before the event loop gets its turn."""
HASHED_IN_TURN = 8
"""Of these, those whose checksum is yet to be computed, of up to INLINE_BYTES each."""
CLOCKS_APART_S = 300.0
"""How much the clocks of two nodes may differ, and how old a proof may be."""

Ctx = grpc.aio.ServicerContext[Any, Any]


class PeerServerError(Exception):
    """The address for peers cannot be had; the message says what to change."""


class Memory(Protocol):
    """What the service needs to know of the memory that peers read."""

    def describe(self) -> pb.NodeDescription: ...

    def address_of(self, extent: Extent) -> int: ...

    def checksum_of(self, leased: Leased) -> int | Awaitable[int]:
        """At once where it is known."""

    def is_guessed(self, key: Key) -> bool:
        """Whether it is being written, but by a read that no other node has confirmed as yet."""

    async def offered(self, found: Mapping[Key, Hint]) -> None:
        """A node has these keys and expects us to want them."""


class _Link:
    """One peer's link, from its hello to its end."""

    def __init__(
        self, cache: Cache, sessions: Sessions, memory: Memory, session: SessionId, node: str
    ) -> None:
        self.session, self.node = session, node
        self.outbox: asyncio.Queue[pb.LinkReply | None] = asyncio.Queue(MAX_UNREAD_REPLIES)
        self._cache, self._sessions, self._memory = cache, sessions, memory
        self._waits: dict[Ticket, int] = {}
        self._hashing: set[asyncio.Task[None]] = set()
        sessions.redirect(session, self._woken)

    def end(self) -> None:
        for task in self._hashing:
            task.cancel()
        self._sessions.redirect(self.session, None)
        self._sessions.deliver(self._cache.leave_session(self.session))
        self._sessions.close(self.session)  # peers never write here

    async def take(self, request: pb.LinkRequest) -> None:
        """Act on one request, in turns with others. Raises InvalidRequest."""
        match request.WhichOneof("request"):
            case "lease":
                await self._lease(request.lease)
            case "release":
                check_batch(request.release.leases)
                await self._sessions.turns.pace().each(
                    lambda lease: self._cache.release(self.session, LeaseId(lease)),
                    request.release.leases,
                )
            case "find":
                await self._find(request.find)
            case "offer":
                check_batch(request.offer.keys)
                keys = [key_from(key) for key in request.offer.keys]
                places = places_from(request.offer.extents, len(keys))
                await self._memory.offered(
                    {key: Hint(self.node, *at) for key, at in zip(keys, places, strict=True)}
                )
            case _:
                raise InvalidRequest("an unknown request on a link")

    async def _find(self, request: pb.FindKeys) -> None:
        check_batch(request.keys)
        keys = [key_from(key) for key in request.keys]
        reply = pb.FoundKeys(ticket=request.ticket)
        pace = self._sessions.turns.pace()
        await self._look_for(keys, pace)
        for start in range(0, len(keys), TURN):
            if start > 0:
                await pace.turn()
            turn = keys[start : start + TURN]
            reply.found.extend(map(self._has, turn))
            reply.extents.extend(to_extents(map(self._cache.extent, turn)))
        self._post(pb.LinkReply(found=reply))

    async def _look_for(self, keys: Sequence[Key], pace: Pace) -> None:
        """Learn, once for these keys, what was put a moment ago and what is being put."""
        if not all(map(self._cache.contains, keys)):
            self._sessions.hear()
        if not all(map(self._cache.contains, keys)):
            await pace.through(self._cache.look_at_claims())

    def _has(self, key: Key) -> bool:
        """Whether it is here, or being written here, after `_look_for`."""
        return self._cache.contains(key) or (
            self._cache.is_being_written(key, looked=True) and not self._memory.is_guessed(key)
        )

    async def _lease(self, request: pb.LeaseKeys) -> None:
        check_batch(request.keys)
        asked = [
            (item.ticket, key_from(item.key), seconds_from(item.wait_s, "wait_s"))
            for item in request.keys
        ]
        pace = self._sessions.turns.pace()
        await self._look_for([key for _, key, _ in asked], pace)
        for start in range(0, len(asked), TURN):
            if start > 0:
                await pace.turn()
            await self._lease_in_turn(asked[start : start + TURN], pace)

    async def _lease_in_turn(self, asked: Sequence[tuple[int, Key, float]], pace: Pace) -> None:
        """Lease what is here before the event loop gets a turn; hash what is leased after that."""
        now_s = time.monotonic()
        known: list[pb.LeaseOutcome] = []
        unhashed: list[tuple[int, Leased]] = []
        for ticket, key, wait_s in asked:
            # What this node fetches itself, it may be fetching from there: that is not had.
            if not self._has(key):
                known.append(pb.LeaseOutcome(ticket=ticket, missing=cache_pb2.Missing()))
                continue
            wait_s = min(wait_s, MAX_WAIT_S)
            outcome = self._cache.acquire(
                self.session, key, now_s, wait_s, only_if_written=True, looked=True
            )
            if isinstance(outcome, Waiting):
                self._waits[outcome.ticket] = ticket
            elif not isinstance(outcome, Leased):
                known.append(_refused(ticket, outcome))
            elif outcome.checksum is None:
                unhashed.append((ticket, outcome))
            else:
                known.append(self._outcome(ticket, outcome, outcome.checksum))
        self._sessions.arm()
        self._say(known)
        for start in range(0, len(unhashed), HASHED_IN_TURN):
            if start > 0:
                await pace.turn()
            turn = unhashed[start : start + HASHED_IN_TURN]
            self._say([said for ticket, leased in turn for said in self._granted(ticket, leased)])

    def _woken(self, wakeup: Wakeup) -> None:
        ticket = self._waits.pop(wakeup.ticket)
        if isinstance(wakeup.outcome, Leased):
            self._say(self._granted(ticket, wakeup.outcome))
        else:
            self._say([_refused(ticket, wakeup.outcome)])

    def _say(self, outcomes: Sequence[pb.LeaseOutcome]) -> None:
        if outcomes:
            self._post(pb.LinkReply(leases=pb.LeaseOutcomes(outcomes=outcomes)))

    def _granted(self, ticket: int, leased: Leased) -> list[pb.LeaseOutcome]:
        """What to say of a lease now: nothing, while its checksum is being computed."""
        checksum = self._memory.checksum_of(leased)
        if isinstance(checksum, int):
            return [self._outcome(ticket, leased, checksum)]
        task = asyncio.ensure_future(self._say_later(ticket, leased, checksum))
        self._hashing.add(task)
        task.add_done_callback(self._hashing.discard)
        return []

    async def _say_later(self, ticket: int, leased: Leased, checksum: Awaitable[int]) -> None:
        try:
            self._say([self._outcome(ticket, leased, await checksum)])
        except Exception:
            logger.exception("what peer %s leased cannot be hashed", self.node)
            self._cache.release(self.session, leased.lease)
            self._say([_refused(ticket, None)])

    def _outcome(self, ticket: int, leased: Leased, checksum: int) -> pb.LeaseOutcome:
        return pb.LeaseOutcome(
            ticket=ticket,
            leased=pb.PeerLeased(
                lease=leased.lease,
                content=to_content(leased.content),
                address=self._memory.address_of(leased.extent),
                checksum=checksum,
            ),
        )

    def _post(self, reply: pb.LinkReply) -> None:
        if self.outbox.full():
            logger.warning("peer %s leaves its replies unread: its link ends", self.node)
            self.outbox.get_nowait()
            self.outbox.put_nowait(None)
            return
        self.outbox.put_nowait(reply)


def _refused(ticket: int, outcome: object) -> pb.LeaseOutcome:
    if isinstance(outcome, LimitReached):
        reached = cache_pb2.LimitReached(what=outcome.what, limit=outcome.limit)
        return pb.LeaseOutcome(ticket=ticket, limit_reached=reached)
    return pb.LeaseOutcome(ticket=ticket, missing=cache_pb2.Missing())


class PeerService(pb_grpc.PeerServicer):
    """One instance per daemon, on the event loop that owns the core."""

    def __init__(
        self, cache: Cache, sessions: Sessions, memory: Memory, node: str, token: str | None
    ) -> None:
        self._cache, self._sessions, self._memory = cache, sessions, memory
        self._node, self._token = node, token
        self._links: set[_Link] = set()
        cache.counters.refused[PEER_LINKS] = 0

    async def Describe(self, request: pb.DescribeRequest, context: Ctx) -> pb.NodeDescription:
        await self._authenticate(context)
        return self._memory.describe()

    async def Link(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request_iterator: AsyncIterator[pb.LinkRequest], context: Ctx
    ) -> None:
        hello = await self._hello(request_iterator, context)
        await self._authenticate(context)  # a refusal before the first read never arrives
        session = self._open_session()
        if isinstance(session, LimitReached):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the daemon has its limit of {session.limit} {session.what}",
            )
            return
        link = _Link(self._cache, self._sessions, self._memory, session, hello.node)
        self._links.add(link)
        logger.info("peer %s opened a link", hello.node)
        try:
            await context.write(pb.LinkReply(welcome=self._memory.describe()))
            reader = asyncio.ensure_future(_read(link, request_iterator))
            writer = asyncio.ensure_future(_write(link, context))
            try:
                await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (reader, writer):
                    task.cancel()
                await asyncio.gather(reader, writer, return_exceptions=True)
        finally:
            self._links.discard(link)
            link.end()

    def _open_session(self) -> SessionId | LimitReached:
        if len(self._links) < MAX_LINKS:
            return self._cache.open_session()
        self._cache.counters.refused[PEER_LINKS] += 1
        return LimitReached("links of peers", MAX_LINKS)

    def end_all(self) -> None:
        """Make every link end, as the daemon stops."""
        for link in self._links:
            if link.outbox.full():
                link.outbox.get_nowait()
            link.outbox.put_nowait(None)

    async def _hello(self, requests: AsyncIterator[pb.LinkRequest], context: Ctx) -> pb.LinkHello:
        try:
            first = await asyncio.wait_for(requests.__anext__(), HELLO_TIMEOUT_S)
        except (StopAsyncIteration, asyncio.TimeoutError):
            first = pb.LinkRequest()
        if first.WhichOneof("request") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a link starts with LinkHello")
        if not re.fullmatch(NODE_PATTERN, first.hello.node):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "LinkHello.node is not host:port")
        if first.hello.contract_version != CONTRACT_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{first.hello.daemon[:256] or 'the peer'} speaks contract "
                f"{first.hello.contract_version}, {self._memory.describe().daemon} speaks contract "
                f"{CONTRACT_VERSION}: upgrade the older one",
            )
        return first.hello

    async def _authenticate(self, context: Ctx) -> None:
        """With a token: the caller proves that it has it, and so do we."""
        if self._token is None:
            return
        said = {str(name): value for name, value in context.invocation_metadata() or ()}
        nonce, when = str(said.get("ecd-nonce", "")), str(said.get("ecd-time", ""))
        expected = proof(self._token, "ask", self._node, nonce, when)
        fresh = when.isdecimal() and abs(time.time() - int(when)) <= CLOCKS_APART_S
        if not hmac.compare_digest(expected, str(said.get("ecd-proof", ""))):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"no proof of the cluster's token for {self._node}: set the same ECD_PEER_TOKEN on "
                "every node, and name nodes as their ECD_PEER_ADDRESS does",
            )
        if not fresh:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the proof is of another time: clocks may differ by {CLOCKS_APART_S:.0f} s",
            )
        answer = proof(self._token, "answer", self._node, nonce)
        await context.send_initial_metadata((("ecd-proof", answer),))


async def _read(link: _Link, requests: AsyncIterator[pb.LinkRequest]) -> None:
    async for request in requests:
        try:
            await link.take(request)
        except InvalidRequest as error:
            logger.warning("peer %s broke the protocol: %s", link.node, error)
            return
        except Exception:
            logger.exception("peer %s asked for what fails: its link ends", link.node)
            return


async def _write(link: _Link, context: Ctx) -> None:
    while (reply := await link.outbox.get()) is not None:
        await context.write(reply)


class PeerServer:
    """The gRPC server that other nodes reach."""

    def __init__(self, service: PeerService, credentials: grpc.ServerCredentials | None) -> None:
        self._service, self._credentials = service, credentials
        self._listener: Listener | None = None

    def bind(self, address: str) -> None:
        """Take the address, for `start`. Raises PeerServerError."""
        try:
            self._listener = Listener(lambda: self._make(address))
        except RuntimeError:
            raise PeerServerError(
                f"cannot listen for peers on {address}: it is not an address of this machine, or "
                "something listens there. ECD_PEER_ADDRESS is where other nodes reach this one"
            ) from None

    def _make(self, address: str) -> Any:
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 3_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ]
        )
        pb_grpc.add_PeerServicer_to_server(self._service, server)
        if self._credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, self._credentials)
        return server

    async def start(self) -> None:
        assert self._listener is not None
        await self._listener.start()

    async def stop(self, grace_s: float) -> None:
        self._service.end_all()
        if self._listener is not None:
            await self._listener.stop(grace_s)
