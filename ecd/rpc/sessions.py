"""Session streams: each client's life, and the answers that come later.

A stream's end starts the end of its session. What the client may still touch is taken back only
when the kernel says that its process has dropped the session's lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import grpc

from ecd.core.cache import Cache
from ecd.core.types import (
    Acquisition,
    Leased,
    LeaseId,
    LimitReached,
    Missing,
    SessionId,
    Stored,
    Ticket,
    Waiting,
    Wakeup,
)
from ecd.rpc.convert import SessionOver, to_acquire_outcome
from ecd.turns import PIECE, Turns
from ecd.wire import InvalidRequest
from ecd_proto.contract import CONTRACT_VERSION, MAX_BATCH
from ecd_proto.v1 import cache_pb2 as pb

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
HOLD_S = 0.005
"""How long an Acquire that can only wait is left unanswered: most fetches take less."""
MAX_UNREAD_EVENTS = 100_000
"""Events a client may leave unread before its session is ended."""
RENEWED_AT_A_TIME = 64
"""Leases: each takes less than 1 us, and a client may have 65,536."""
RECHECK_S = (0.01, 0.1)
"""First and longest pause between two looks at the lock of a session whose stream ended."""

Context = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionEvent]
SessionIterator = AsyncIterator[pb.SessionRequest]


class SessionFiles(Protocol):
    """What a session needs to know of the pool's files."""

    def pool_file(self) -> pb.PoolFile: ...

    def index_file(self, session: SessionId) -> pb.IndexFile | None: ...

    def lock_path(self) -> str: ...

    def is_session_locked(self, offset: int) -> bool: ...


class PutsWithoutCalls(Protocol):
    """What was put where memory was granted, and is to become entries."""

    def hear(self) -> None:
        """Take some of it."""

    async def catch_up(self) -> None:
        """Take all that had been put when this was called."""

    def take_last(self, session: SessionId) -> None:
        """Take all that this session has put."""


class NoPuts:
    """Every put is a call."""

    def hear(self) -> None:
        pass

    async def catch_up(self) -> None:
        pass

    def take_last(self, session: SessionId) -> None:
        pass


@dataclass(eq=False)
class Stream:
    """One open session stream."""

    session: SessionId
    token: str
    client: str
    outbox: asyncio.Queue[pb.SessionEvent | None] = field(
        default_factory=lambda: asyncio.Queue(MAX_UNREAD_EVENTS)
    )
    attached: bool = False  # its client was seen to hold the session's lock


@dataclass(eq=False)
class _Held:
    """Waits of one call that is not answered yet."""

    waiting: set[Ticket]
    over: asyncio.Future[None]
    ended: dict[Ticket, Leased | Stored | Missing | LimitReached] = field(default_factory=dict)

    def end(self, wakeup: Wakeup) -> None:
        self.ended[wakeup.ticket] = wakeup.outcome
        if len(self.ended) == len(self.waiting):
            self.let_go()

    def let_go(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class Sessions:
    """Every open stream, the timer of the core's deadlines and the sessions that are leaving."""

    def __init__(
        self,
        cache: Cache,
        files: SessionFiles,
        incarnation: str,
        daemon: str,
        node: str,
        now_s: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._files = files
        self._incarnation = incarnation
        self._daemon, self._node = daemon, node
        self._now_s = now_s
        self.turns = Turns()
        self.puts: PutsWithoutCalls = NoPuts()
        self._by_token: dict[str, Stream] = {}
        self._by_session: dict[SessionId, Stream] = {}
        self._elsewhere: dict[SessionId, Callable[[Wakeup], None]] = {}
        self._held: dict[Ticket, _Held] = {}
        self._woken: deque[Wakeup] = deque()  # not told as yet
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._stopping = False
        self._leaving = 0

    @property
    def clients(self) -> int:
        """Sessions of clients, open or leaving; the daemon's own and its peers' apart."""
        return len(self._by_session) + self._leaving

    def hear(self) -> None:
        """Take some of what was put without a call."""
        self.puts.hear()

    async def catch_up(self) -> None:
        """Take what was put without a call: before anything is answered that could depend on it."""
        await self.puts.catch_up()

    # -- for the batch calls -------------------------------------------------------------------

    def attached(self, token: str) -> SessionId:
        """The open session of this name, whose client holds its lock.

        Raises SessionOver and InvalidRequest.
        """
        stream = self._by_token.get(token)
        if stream is None:
            raise SessionOver
        if not stream.attached:
            if not self._files.is_session_locked(stream.session):
                raise InvalidRequest(
                    "the session's lock is not held: lock the byte at Welcome.lock_offset of "
                    "Welcome.lock_path first"
                )
            stream.attached = True
        return stream.session

    def redirect(self, session: SessionId, tell: Callable[[Wakeup], None] | None) -> None:
        """A session without a stream here is told of its waits by `tell`; None: no more."""
        if tell is None:
            self._elsewhere.pop(session, None)
        else:
            self._elsewhere[session] = tell

    def drop(self, session: SessionId, outcome: Acquisition) -> None:
        """Nobody is told of this outcome: neither its lease nor its wait is for anything."""
        if isinstance(outcome, Leased):
            self._cache.release(session, outcome.lease)
        elif isinstance(outcome, Waiting):
            self._cache.cancel_wait(session, outcome.ticket)

    async def hold(self, session: SessionId, outcomes: list[Acquisition]) -> list[Acquisition]:
        """The outcomes, some moments later if all there is are waits that may end soon.

        An answer that says "wait", and another that says what came of it, cost more than that.
        """
        waiting = {outcome.ticket for outcome in outcomes if isinstance(outcome, Waiting)}
        if not waiting or any(isinstance(outcome, Leased | Stored) for outcome in outcomes):
            return outcomes
        loop = asyncio.get_running_loop()
        held = _Held(waiting, loop.create_future())
        self._held |= dict.fromkeys(waiting, held)
        late = loop.call_later(HOLD_S, held.let_go)
        try:
            await held.over
        except BaseException:
            for ended in held.ended.values():
                self.drop(session, ended)
            raise
        finally:
            late.cancel()
            for ticket in waiting:
                self._held.pop(ticket, None)
        return [
            held.ended.get(outcome.ticket, outcome) if isinstance(outcome, Waiting) else outcome
            for outcome in outcomes
        ]

    def deliver(self, woken: Iterable[Wakeup]) -> None:
        """Tell the waiting sessions how their waits ended."""
        is_telling = bool(self._woken)
        self._woken.extend(woken)
        if not is_telling:
            self._tell_some()

    def _tell_some(self) -> None:
        """A piece of them, and the rest in the next turns: a thousand may wait for one key."""
        for _ in range(min(PIECE, len(self._woken))):
            self._tell(self._woken.popleft())
        if self._woken:
            asyncio.get_running_loop().call_soon(self._tell_some)

    def _tell(self, wakeup: Wakeup) -> None:
        if tell := self._elsewhere.get(wakeup.session):
            tell(wakeup)
        elif held := self._held.pop(wakeup.ticket, None):
            held.end(wakeup)
        else:
            ended = pb.WaitEnded(ticket=wakeup.ticket, outcome=to_acquire_outcome(wakeup.outcome))
            self._post(wakeup.session, pb.SessionEvent(wait_ended=ended))

    def close(self, session: SessionId) -> None:
        """Take back, in turns, what a session had whose process can touch the memory no more."""
        closing = asyncio.ensure_future(self._close(session))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, session: SessionId) -> None:
        is_closed = False
        while not is_closed:
            await self.turns.any()
            is_closed = self._cache.close_session(session)
        logger.debug("session %d closed", session)

    def arm(self) -> None:
        """Look at the core's next deadline: call after whatever may have brought it nearer."""
        next_s = self._cache.next_deadline_s()
        if next_s is None or (self._timer is not None and self._timer_s <= next_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = next_s
        delay_s = max(0.0, next_s - self._now_s())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        expired, overdue = self._cache.expire(self._now_s())
        ended: dict[SessionId, list[LeaseId]] = {}
        for lease in expired:
            ended.setdefault(lease.session, []).append(lease.lease)
        for session, leases in ended.items():
            self._post(session, pb.SessionEvent(leases_ended=pb.LeasesEnded(leases=leases)))
        self.deliver(overdue)
        self.arm()

    # -- streams -------------------------------------------------------------------------------

    async def run(self, requests: SessionIterator, context: Context) -> None:
        """Serve one stream until it ends."""
        hello = await self._hello(requests, context)
        opened = self._cache.open_session()
        if isinstance(opened, LimitReached):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the daemon has its limit of {opened.limit} sessions",
            )
            return
        stream = Stream(opened, secrets.token_hex(16), f"{hello.client} pid {hello.pid}")
        self._by_token[stream.token] = self._by_session[opened] = stream
        logger.debug("session %d opened by %s", opened, stream.client)
        writer: asyncio.Future[None] | None = None
        try:
            await context.write(self._stamp(pb.SessionEvent(welcome=self._welcome(stream))))
            writer = asyncio.ensure_future(self._write(stream, context))
            reader = asyncio.ensure_future(self._read(stream, requests))
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        finally:
            if writer is not None:
                writer.cancel()
            self._end(stream)

    def end_all(self) -> None:
        """Make every stream end, as the daemon stops."""
        self._stopping = True
        for stream in self._by_session.values():
            self._close_outbox(stream)

    async def _hello(self, requests: SessionIterator, context: Context) -> pb.Hello:
        try:
            first = await asyncio.wait_for(anext_(requests), HELLO_TIMEOUT_S)
        except (StopAsyncIteration, asyncio.TimeoutError):
            raise InvalidRequest("a session starts with Hello") from None
        if first.WhichOneof("request") != "hello":
            raise InvalidRequest("a session starts with Hello")
        hello = first.hello
        if hello.contract_version != CONTRACT_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{hello.client or 'the client'} speaks contract {hello.contract_version}, "
                f"{self._daemon} speaks contract {CONTRACT_VERSION}: upgrade the older one",
            )
        return hello

    def _welcome(self, stream: Stream) -> pb.Welcome:
        return pb.Welcome(
            session=stream.token,
            contract_version=CONTRACT_VERSION,
            daemon=self._daemon,
            lease_ttl_s=self._cache.lease_ttl_s,
            now_s=self._now_s(),
            pool=self._files.pool_file(),
            lock_path=self._files.lock_path(),
            lock_offset=stream.session,
            index=self._files.index_file(stream.session),
            node=self._node,
        )

    async def _read(self, stream: Stream, requests: SessionIterator) -> None:
        most = self._cache.limits.leases_per_session
        async for request in requests:
            match request.WhichOneof("request"):
                case "renew" if len(request.renew.leases) <= most:
                    await self._renew(stream, request.renew)
                case "cancel_waits" if len(request.cancel_waits.tickets) <= MAX_BATCH:
                    pace = self.turns.pace()
                    for ticket in map(Ticket, request.cancel_waits.tickets):
                        await pace.step()
                        if self._cache.cancel_wait(stream.session, ticket):
                            self.deliver([Wakeup(stream.session, ticket, Missing())])
                case _:
                    logger.warning("%s broke the session's protocol", stream.client)
                    return

    async def _renew(self, stream: Stream, renew: pb.Renew) -> None:
        leases, lost, pace = list(map(LeaseId, renew.leases)), [], self.turns.pace()
        expires_s, _ = self._cache.renew(stream.session, (), self._now_s())  # of the first of them
        for start in range(0, len(leases), RENEWED_AT_A_TIME):
            await pace.step()
            some = leases[start : start + RENEWED_AT_A_TIME]
            lost += self._cache.renew(stream.session, some, self._now_s())[1]
        renewed = pb.Renewed(expires_s=expires_s)
        if lost:
            self._post(stream.session, pb.SessionEvent(leases_ended=pb.LeasesEnded(leases=lost)))
        self._post(stream.session, pb.SessionEvent(renewed=renewed))

    async def _write(self, stream: Stream, context: Context) -> None:
        """What has piled up goes together, as far as it is of one kind."""
        while True:
            events = [await stream.outbox.get()]
            while not stream.outbox.empty() and len(events) < MAX_BATCH:
                events.append(stream.outbox.get_nowait())
            for ends_wait, group in groupby(events, _ends_wait):
                for event in [self._together(group)] if ends_wait else group:
                    if event is None:
                        return
                    await context.write(event)

    def _together(self, events: Iterable[pb.SessionEvent | None]) -> pb.SessionEvent:
        ended = [event.wait_ended for event in events if event is not None]
        return self._stamp(pb.SessionEvent(waits_ended=pb.WaitsEnded(ended=ended)))

    def _post(self, session: SessionId, event: pb.SessionEvent) -> None:
        stream = self._by_session.get(session)
        if stream is None:
            return
        try:
            stream.outbox.put_nowait(self._stamp(event))
        except asyncio.QueueFull:
            logger.warning("%s leaves its events unread: its session ends", stream.client)
            self._close_outbox(stream)

    def _close_outbox(self, stream: Stream) -> None:
        while stream.outbox.full():
            stream.outbox.get_nowait()
        stream.outbox.put_nowait(None)

    def _stamp(self, event: pb.SessionEvent) -> pb.SessionEvent:
        event.incarnation = self._incarnation
        return event

    # -- the end of a session ------------------------------------------------------------------

    def _end(self, stream: Stream) -> None:
        self.puts.take_last(stream.session)
        del self._by_token[stream.token]
        del self._by_session[stream.session]
        self.deliver(self._cache.leave_session(stream.session))
        self._leaving += 1
        self._take_back(stream.session, RECHECK_S[0])

    def _take_back(self, session: SessionId, pause_s: float) -> None:
        if self._stopping:
            return  # the pool goes as a whole; clients keep what they have mapped
        if self._files.is_session_locked(session):
            pause_s = min(pause_s, RECHECK_S[1])
            loop = asyncio.get_running_loop()
            loop.call_later(pause_s, self._take_back, session, pause_s * 2)
            return
        self._leaving -= 1
        self.puts.take_last(session)  # a put that began before the stream's end may be over since
        self.close(session)


def _ends_wait(event: pb.SessionEvent | None) -> bool:
    return event is not None and event.HasField("wait_ended")


async def anext_(iterator: SessionIterator) -> pb.SessionRequest:
    """`anext`, as a coroutine that `wait_for` takes on Python 3.10 too."""
    return await iterator.__anext__()
