"""Session streams: one for each client, open as long as its session.

The end of a stream is the end of its session. Memory that the client may still touch is taken back
only when the kernel says that its process has dropped the session's lock, and what a device may
still write for a dead client only when the device's copies are over (`attach.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

import grpc

from ecd.base.identity import NodeIdentity
from ecd.base.wire import InvalidRequest, key_from
from ecd.core.model.outcomes import LimitReached, Wakeup
from ecd.core.model.types import LeaseId, SessionId, Ticket
from ecd.live.background import first_of
from ecd.live.flights import Flights
from ecd.live.live import LiveCache
from ecd.live.makings import KeyLocks
from ecd.rpc.cache.attach import DmaProcesses, Process
from ecd.rpc.cache.convert import SessionOver, to_acquire_outcome
from ecd.rpc.cache.engines import Engines
from ecd.rpc.cache.long_poll import HeldAnswers
from ecd.rpc.cache.stream import Event, Stream, merged
from ecd_proto.backoff import Backoff
from ecd_proto.contract import CONTRACT_VERSION, MAX_BATCH, MAX_NAMESPACE_BYTES, shown
from ecd_proto.encoders import MAX_ENCODERS, RegisteredEncoder
from ecd_proto.engines import MAX_ENGINES, Engine
from ecd_proto.shm.session_page import DMA_OUTLASTS
from ecd_proto.v1 import cache_pb2 as pb

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
MAX_REFUSALS = 64
"""Clients of another contract that the log names."""
RENEWED_AT_A_TIME = 64
"""Leases: each takes less than 1 us, and a client may have 65,536."""
ENDED = "the daemon ended this session at an operator's request: connect anew"
RECHECK = Backoff(0.01, 0.1)
"""First and longest pause between checks of the lock of a session whose stream ended."""

Context = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionEvent]
SessionIterator = AsyncIterator[pb.SessionRequest]


class OpenedFiles(KeyLocks, Protocol):
    """The files that a client opens at the start of its session."""

    def pool_files(self) -> list[pb.PoolFile]: ...

    def index_file(self, session: SessionId) -> pb.IndexFile | None: ...

    def lock_path(self) -> str: ...

    def attach_path(self) -> str: ...

    def is_session_locked(self, offset: int) -> bool: ...

    def dma_word(self, session: SessionId) -> int: ...

    def pinned_bytes(self, session: SessionId) -> int: ...

    def note_namespace(self, session: SessionId, namespace: str) -> None: ...


class SessionStreams:
    """All open streams, and sessions whose stream has ended while their process still lives."""

    def __init__(
        self, live: LiveCache, flights: Flights, files: OpenedFiles, identity: NodeIdentity
    ) -> None:
        self.identity = identity
        self.has_disk = False
        self.held = HeldAnswers(live)
        self.engines = Engines(live.clock, identity.node)
        self._live, self._flights, self._files = live, flights, files
        self._by_token: dict[str, Stream] = {}
        self._by_session: dict[SessionId, Stream] = {}
        self._processes = DmaProcesses()
        self._refusals: set[str] = set()
        self._stopping = False
        self._leaving: dict[SessionId, Stream] = {}

    @property
    def clients(self) -> int:
        """Sessions of clients, open or leaving, without the daemon's own and its peers'."""
        return len(self._by_session) + len(self._leaving)

    @property
    def waiting_for_dma(self) -> int:
        """Leaving sessions whose lock has dropped and to whose memory a device may still write."""
        return self._processes.waiting

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

    def attach(self, token: str, pidfd: int | None) -> bool:
        """Let the client of an open session copy by DMA, and take charge of its process's pidfd.

        Without a pidfd nothing tells when the process has ended. False: no open session has this
        name.
        """
        stream = self._by_token.get(token)
        if stream is None:
            return False
        self._processes.attach(stream.session, pidfd)
        return True

    def introduce(self, token: str, process: Process) -> None:
        """Note the process of an open session's client."""
        stream = self._by_token.get(token)
        if stream is not None:
            stream.process = process

    def each(self) -> Iterator[tuple[Stream, pb.ClientInfo.State.ValueType]]:
        """The streams of all sessions of clients, the oldest first, and the state of each."""
        states = pb.ClientInfo.State
        for session in sorted((*self._by_session, *self._leaving)):
            stream = self._by_session.get(session)
            if stream is not None:
                yield stream, states.STATE_OPEN
            elif self._processes.is_waited_for(session):
                yield self._leaving[session], states.STATE_WAITING_FOR_DMA
            else:
                yield self._leaving[session], states.STATE_ENDED

    def pinned_bytes(self, session: SessionId) -> int:
        """Bytes of the pools that the session's client says it has pinned for its GPUs."""
        return self._files.pinned_bytes(session)

    async def end_client(self, session: SessionId) -> bool:
        """End an open session as if its client had disconnected. False: there is none."""
        stream = self._by_session.get(session)
        if stream is None:
            return False
        stream.is_over.set()
        await stream.has_ended.wait()
        return True

    # -- what happens between calls ------------------------------------------------------------

    def wait_ended(self, wakeup: Wakeup) -> None:
        if not self.held.take(wakeup):
            outcome = to_acquire_outcome(wakeup.outcome)
            self._post(wakeup.session, pb.WaitEnded(ticket=wakeup.ticket, outcome=outcome))

    def leases_ended(self, session: SessionId, leases: Sequence[LeaseId]) -> None:
        self._post(session, pb.SessionEvent(leases_ended=pb.LeasesEnded(leases=leases)))

    # -- streams -------------------------------------------------------------------------------

    async def run(self, requests: SessionIterator, context: Context) -> None:
        """Serve one stream until it ends."""
        hello = await self._hello(requests, context)
        stream = self.open(shown(hello.client), hello.pid, hands_over=not hello.uses_puts)
        if isinstance(stream, LimitReached):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the daemon has its limit of {stream.limit} sessions",
            )
            return
        try:
            welcome = self._stamp(pb.SessionEvent(welcome=self._welcome(stream)))
            if len(hello.namespace.encode()) <= MAX_NAMESPACE_BYTES:  # no key lies in another
                self._files.note_namespace(stream.session, hello.namespace)
            talk = self._talk(stream, welcome, requests, context)
            await first_of(talk, stream.is_over.wait())
        finally:
            self.end(stream)
        if stream.is_over.is_set():
            logger.warning("%s: an operator has ended its session (ecd-cli clients)", stream)
            await context.abort(grpc.StatusCode.UNAVAILABLE, ENDED)

    def open(self, client: str, pid: int = 0, *, hands_over: bool = False) -> Stream | LimitReached:
        """Open a session, and record its stream."""
        opened = self._live.cache.open_session(hands_over=hands_over)
        if isinstance(opened, LimitReached):
            return opened
        clock = self._live.clock
        stream = Stream(opened, clock.secret(16).hex(), client, pid, clock.now_s())
        self._by_token[stream.token] = self._by_session[opened] = stream
        self._live.subscribe(opened, self)
        logger.debug("session %d opened by %s", opened, stream)
        return stream

    def end_all(self) -> None:
        """End every stream, as the daemon stops."""
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
            refusal = (
                f"{shown(hello.client) or 'the client'} speaks contract {hello.contract_version}, "
                f"{self.identity.daemon} speaks contract {CONTRACT_VERSION}: upgrade the older one"
            )
            if refusal not in self._refusals and len(self._refusals) < MAX_REFUSALS:
                self._refusals.add(refusal)  # its client asks again four times a second
                logger.warning("%s. Until then its gets are misses", refusal)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        return hello

    def _welcome(self, stream: Stream) -> pb.Welcome:
        index = self._files.index_file(stream.session)
        return pb.Welcome(
            session=stream.token,
            contract_version=CONTRACT_VERSION,
            daemon=self.identity.daemon,
            lease_ttl_s=self._live.cache.views.lease_ttl_s,
            now_s=self._live.clock.now_s(),
            pools=self._files.pool_files(),
            lock_path=self._files.lock_path(),
            lock_offset=stream.session,
            index=index,
            node=self.identity.node,
            attach_path="" if index is None else self._files.attach_path(),
            has_disk=self.has_disk,
            takes_engine=True,
            takes_looks=True,
            takes_encoder=True,
        )

    async def _talk(
        self,
        stream: Stream,
        welcome: pb.SessionEvent,
        requests: SessionIterator,
        context: Context,
    ) -> None:
        await context.write(welcome)
        await first_of(self._read(stream, requests), self._write(stream, context))

    async def _read(self, stream: Stream, requests: SessionIterator) -> None:
        most = self._live.cache.limits.leases_per_session
        async for request in requests:
            match request.WhichOneof("request"):
                case "renew" if len(request.renew.leases) <= most:
                    await self._renew(stream, request.renew)
                case "cancel_waits" if len(request.cancel_waits.tickets) <= MAX_BATCH:
                    pace = self._live.turns.pace()
                    for ticket in map(Ticket, request.cancel_waits.tickets):
                        await pace.step()
                        self._live.cancel_wait(stream.session, ticket)
                case "stop_making" if len(request.stop_making.keys) <= MAX_BATCH:
                    pace = self._live.turns.pace()
                    try:
                        keys = await pace.each(key_from, request.stop_making.keys)
                    except InvalidRequest as error:
                        self._pass_over(stream, error)
                    else:
                        self._flights.stop_making(stream.session, keys)
                case "engine":
                    self._describe(stream, request.engine)
                case "encoder":
                    self._register(stream, request.encoder)
                case "hello" | "renew":  # whose answer the client would take for another's
                    logger.warning("%s broke the session's protocol", stream)
                    return
                case kind:
                    self._pass_over(stream, f"{kind or 'a request'} is too long, or not known here")

    def _pass_over(self, stream: Stream, cause: object) -> None:
        """Note that a message of the client's has no effect; it does not end the session."""
        if not stream.has_erred:
            stream.has_erred = True
            logger.warning("%s sends what is passed over: %s", stream, cause)

    def _describe(self, stream: Stream, message: pb.Engine) -> None:
        """Store an engine's description; report to it, or to others, an unintended difference."""
        engine = Engine.of(message, stream.pid)
        if engine is None:  # a newer client may say more than this daemon knows
            if not stream.is_misread:
                logger.warning("%s describes its engine in a form that is not known", stream)
            stream.is_misread = True
        elif not self.engines.describe(stream.session, engine):
            self._live.refuse("engines", MAX_ENGINES)
        else:
            self._files.note_namespace(stream.session, engine.namespace)
            if not stream.is_described:
                stream.is_described = True
                for session, apart in self.engines.told_by_arrival(stream.session):
                    self._post(session, pb.SessionEvent(engine_apart=apart.status))

    def _register(self, stream: Stream, message: pb.Encoder) -> None:
        encoder = RegisteredEncoder.of(message)
        if encoder is None:
            self._pass_over(stream, f"an encoder's URL of another form: {shown(message.url)}")
        elif not self.engines.register(stream.session, encoder):
            self._live.refuse("encoders", MAX_ENCODERS)

    async def _renew(self, stream: Stream, renew: pb.Renew) -> None:
        leases, lost = list(map(LeaseId, renew.leases)), []
        pace = self._live.turns.pace()
        expires_s, _ = self._live.renew(stream.session, ())  # when the first of them runs out
        for start in range(0, len(leases), RENEWED_AT_A_TIME):
            await pace.step()
            some = leases[start : start + RENEWED_AT_A_TIME]
            lost += self._live.renew(stream.session, some)[1]
        if lost:
            self.leases_ended(stream.session, lost)
        self._post(stream.session, pb.SessionEvent(renewed=pb.Renewed(expires_s=expires_s)))

    async def _write(self, stream: Stream, context: Context) -> None:
        """Write the events in the outbox, until one ends the stream."""
        while True:
            events = [await stream.outbox.get()]
            while not stream.outbox.empty() and len(events) < MAX_BATCH:
                events.append(stream.outbox.get_nowait())
            for event in merged(events):
                if event is None:
                    return
                await context.write(self._stamp(event))

    def _post(self, session: SessionId, event: Event) -> None:
        stream = self._by_session.get(session)
        if stream is None:
            return
        try:
            stream.outbox.put_nowait(event)
        except asyncio.QueueFull:
            logger.warning("%s leaves its events unread: its session ends", stream)
            self._close_outbox(stream)

    def _close_outbox(self, stream: Stream) -> None:
        while stream.outbox.full():
            stream.outbox.get_nowait()
        stream.outbox.put_nowait(None)

    def _stamp(self, event: pb.SessionEvent) -> pb.SessionEvent:
        event.incarnation = self.identity.incarnation
        return event

    # -- the end of a session ------------------------------------------------------------------

    def end(self, stream: Stream) -> None:
        """End the stream's session, and reclaim its memory once its lock is free."""
        del self._by_token[stream.token]
        del self._by_session[stream.session]
        self.engines.forget(stream.session)
        self._flights.leave_session(stream.session)
        self._live.leave_session(stream.session)
        self._leaving[stream.session] = stream
        stream.has_ended.set()
        self._take_back(stream.session, RECHECK.after())

    def _take_back(self, session: SessionId, pause_s: float) -> None:
        if self._stopping:
            return  # the pool goes as a whole; clients keep what they have mapped
        if self._files.is_session_locked(session) or self._may_copy(session):
            loop = asyncio.get_running_loop()
            loop.call_later(pause_s, self._take_back, session, RECHECK.after(pause_s))
            return
        del self._leaving[session]
        self._processes.forget(session)
        self._live.close_session(session)

    def _may_copy(self, session: SessionId) -> bool:
        """Whether a device may still write for the session, whose lock has dropped."""
        word = self._files.dma_word(session)
        if not word:
            return False
        return self._processes.may_copy(session, self._live.clock.now_s(), word == DMA_OUTLASTS)


async def anext_(iterator: SessionIterator) -> pb.SessionRequest:
    """`anext`, as a coroutine that `wait_for` takes on Python 3.10 too."""
    return await iterator.__anext__()
