"""The Peer service: leases for the daemons of other nodes, each on a link of its own."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import grpc

from ecd.base.wire import MAX_WAIT_S, InvalidRequest
from ecd.core.model.outcomes import LimitReached
from ecd.core.model.types import SessionId
from ecd.live.background import first_of, within
from ecd.live.live import LiveCache
from ecd.rpc.cache.sessions import HELLO_TIMEOUT_S
from ecd.rpc.peer.inbound_link import InboundLink, Memory
from ecd.rpc.peer.peer_token import TokenCheck
from ecd.rpc.peer.serving import Serving
from ecd_proto.contract import CONTRACT_VERSION, NODE_PATTERN
from ecd_proto.v1 import peer_pb2 as pb
from ecd_proto.v1 import peer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

MAX_LINKS = 2048
"""Links of peers, of the 4,096 sessions that a daemon has: the rest is for its engines."""

Ctx = grpc.aio.ServicerContext[Any, Any]


class PeerService(pb_grpc.PeerServicer):
    """Answers the daemons of other nodes; one per daemon, on its event loop."""

    def __init__(
        self, live: LiveCache, memory: Memory, token: TokenCheck, readers_per_entry: int
    ) -> None:
        self._live, self._memory, self._token = live, memory, token
        self.serving = Serving(readers_per_entry, live.refuse, live.clock)
        self._links: OrderedDict[InboundLink, float] = OrderedDict()
        """When each link was last used, in that order."""

    async def Describe(self, request: pb.DescribeRequest, context: Ctx) -> pb.NodeDescription:
        await self._token.check(context)
        return self._memory.describe()

    async def Link(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request_iterator: AsyncIterator[pb.LinkRequest], context: Ctx
    ) -> None:
        hello = await self._hello(request_iterator, context)
        # A refusal before the first read never arrives.
        await self._token.check(context)
        session = self._open_session()
        if isinstance(session, LimitReached):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the daemon has its limit of {session.limit} {session.what}",
            )
            return
        link = InboundLink(self._live, self._memory, self.serving, session, hello.node)
        self._use(link)
        about = {"peer": hello.node}
        logger.info("peer %s opened a link", hello.node, extra=about)
        try:
            welcome = context.write(pb.LinkReply(welcome=self._memory.describe()))
            await within(HELLO_TIMEOUT_S, welcome)  # written before the end: gRPC fails otherwise
            reading, writing = self._read(link, request_iterator), _write(link, context)
            await first_of(reading, writing, link.hung_up)
        except asyncio.TimeoutError:
            logger.warning("peer %s does not read the answer to its hello", link.node, extra=about)
        finally:
            self._links.pop(link, None)
            link.end()

    def _open_session(self) -> SessionId | LimitReached:
        if len(self._links) < MAX_LINKS or self._end_idle():
            return self._live.cache.open_session()
        self._live.refuse("peer_links", MAX_LINKS)
        return LimitReached("links of peers", MAX_LINKS)

    def _use(self, link: InboundLink) -> None:
        self._links[link] = self._live.clock.now_s()
        self._links.move_to_end(link)

    def _end_idle(self) -> bool:
        """Close the least recently used link, if no question on it can still be answered."""
        link, used_s = next(iter(self._links.items()))
        if self._live.clock.now_s() - used_s < MAX_WAIT_S + self._live.cache.views.lease_ttl_s:
            return False
        del self._links[link]
        link.hang_up()
        return True

    async def _read(self, link: InboundLink, requests: AsyncIterator[pb.LinkRequest]) -> None:
        async for request in requests:
            self._use(link)
            try:
                await link.take(request)
                await link.outbox.room()
            except InvalidRequest as error:
                about = {"peer": link.node}
                logger.warning("peer %s broke the protocol: %s", link.node, error, extra=about)
                return
            except Exception:
                why = "asked for what fails: its link ends"
                logger.exception("peer %s %s", link.node, why, extra={"peer": link.node})
                return

    def end_all(self) -> None:
        """Close every link, as the daemon stops."""
        for link in self._links:
            link.hang_up()

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


async def _write(link: InboundLink, context: Ctx) -> None:
    while True:
        await context.write(await link.outbox.get())
