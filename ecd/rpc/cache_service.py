"""The Cache service: translate, call the core, translate back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc

from ecd.core.cache import Cache
from ecd.core.types import (
    Aborted,
    Acquisition,
    Committed,
    Content,
    EntryId,
    Key,
    LeaseId,
    MakingRoom,
    Reservation,
    Reserved,
    SessionId,
)
from ecd.rpc.convert import (
    SessionOver,
    selection_from,
    to_acquire_outcome,
    to_entry_info,
    to_failure,
    to_reserve_outcome,
)
from ecd.rpc.sessions import Context, Sessions
from ecd.turns import Pace
from ecd.wire import (
    InvalidRequest,
    check_batch,
    content_from,
    hints_from,
    key_from,
    seconds_from,
)
from ecd_proto.contract import MAX_PAGE, Hint
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

MAKING_ROOM_S = 2.0
"""How long a reservation makes room, where others take what it frees: less than a client waits."""
TRIM_BATCH = 32
"""Entries evicted, or looked at for an eviction, before the event loop gets its turn."""

TURNS_TO_ASK = 2
"""Turns of the event loop in which questions to other nodes go out, before the rest is done."""

DEFAULT_PAGE = 100

T = TypeVar("T")
Ctx = grpc.aio.ServicerContext[Any, Any]


class OtherNodes(Protocol):
    """What the service needs of the nodes around this one."""

    def want(self, key: Key, hints: Sequence[Hint]) -> None:
        """Somebody waits for the key: bring it here, if it is not here or on its way."""

    def offer(self, keys: Sequence[Key], nodes: Sequence[str]) -> None:
        """Tell these nodes of these keys, as soon as they are stored here."""

    def changed(self) -> None:
        """Something was stored here, or evicted."""

    def status(self) -> pb.PeersReply: ...


class NoOtherNodes:
    """A daemon that serves its node alone."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def want(self, key: Key, hints: Sequence[Hint]) -> None:
        pass

    def offer(self, keys: Sequence[Key], nodes: Sequence[str]) -> None:
        pass

    def status(self) -> pb.PeersReply:
        return pb.PeersReply(directory=pb.DirectoryStatus(kind="none", up=True))


class CacheService(pb_grpc.CacheServicer):
    """One instance per daemon, on the event loop that owns the core."""

    def __init__(
        self,
        cache: Cache,
        sessions: Sessions,
        others: OtherNodes,
        incarnation: str,
        now_s: Callable[[], float],
        status: Callable[[], pb.StatusReply],
        observe: Callable[[str, float], None],
    ) -> None:
        self._cache = cache
        self._sessions = sessions
        self._others = others
        self._incarnation = incarnation
        self._now_s = now_s
        self._status = status
        self._observe = observe
        self.grant: Callable[[SessionId, int], None] = lambda *_: None
        """Told what a session reserved by a call: it may put more of that size without one."""
        self.settle: Callable[[Sequence[Key] | None], Awaitable[None]] | None = None
        """Finds out what of these keys, or of all, the daemon before this one has left."""
        self._trimming: asyncio.Task[None] | None = None
        self._turns = sessions.turns
        self._undoing: set[asyncio.Task[Any]] = set()
        self._exchanged: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "reserve": self.Reserve,
            "commit": self.Commit,
            "abort": self.Abort,
            "acquire": self.Acquire,
            "release": self.Release,
            "contains": self.Contains,
        }

    async def Session(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request_iterator: Any, context: Context
    ) -> None:
        await self._sessions.run(request_iterator, context)

    async def Reserve(self, request: pb.ReserveRequest, context: Ctx) -> pb.ReserveReply:
        session = self._sessions.attached(request.session)
        check_batch(request.items)
        pace = self._turns.pace()
        items = await pace.each(_wanted, request.items)
        await self._settle([key for key, _ in items])
        reply = pb.ReserveReply(incarnation=self._incarnation)
        reserved: list[EntryId] = []
        size: int | None = None
        try:
            with self._cache.reserving() as look:
                await pace.through(look)
                for key, content in items:
                    await pace.step()
                    outcome = await self._reserve(session, key, content, pace)
                    if isinstance(outcome, Reserved):
                        reserved.append(outcome.entry)
                        size = content.nbytes
                    reply.outcomes.append(to_reserve_outcome(outcome))
        except BaseException:  # nobody is told of them
            self._undo(lambda entry: self._abort(session, entry), reserved)
            raise
        if size is not None:
            self.grant(session, size)
        self.trim_soon()
        self._others.changed()
        return reply

    async def _reserve(
        self, session: SessionId, key: Key, content: Content, pace: Pace
    ) -> Reservation:
        until_s = self._now_s() + MAKING_ROOM_S
        while (now_s := self._now_s()) < until_s:
            outcome = self._cache.reserve(session, key, content, now_s, looked=True)
            if not isinstance(outcome, MakingRoom):
                return outcome
            await pace.turn()
        return self._cache.no_room(content.nbytes)

    async def Commit(self, request: pb.CommitRequest, context: Ctx) -> pb.CommitReply:
        session = self._sessions.attached(request.session)
        check_batch(request.reservations)

        def commit(reservation: int) -> bool:
            outcome = self._cache.commit(session, EntryId(reservation), self._now_s())
            if isinstance(outcome, Committed):
                self._sessions.deliver(outcome.woken)
            return isinstance(outcome, Committed)

        try:
            committed = await self._turns.pace().each(commit, request.reservations)
        finally:
            self._sessions.arm()
            self._others.changed()
        return pb.CommitReply(incarnation=self._incarnation, committed=committed)

    async def Abort(self, request: pb.AbortRequest, context: Ctx) -> pb.AbortReply:
        session = self._sessions.attached(request.session)
        check_batch(request.reservations)
        aborted = await self._turns.pace().each(
            lambda reservation: self._abort(session, EntryId(reservation)), request.reservations
        )
        return pb.AbortReply(incarnation=self._incarnation, aborted=aborted)

    def _abort(self, session: SessionId, reservation: EntryId) -> bool:
        outcome = self._cache.abort(session, reservation)
        if isinstance(outcome, Aborted):
            self._sessions.deliver(outcome.woken)
        return isinstance(outcome, Aborted)

    async def Acquire(self, request: pb.AcquireRequest, context: Ctx) -> pb.AcquireReply:
        session = self._sessions.attached(request.session)
        check_batch(request.keys)
        check_batch(request.hints)
        pace = self._turns.pace()
        wait_s = seconds_from(request.wait_s, "wait_s")
        keys = await pace.each(key_from, request.keys)
        await self._settle(keys)
        if wait_s > 0.0:
            hints = dict(await pace.each(_hints_of, request.hints))
            for index, key in enumerate(keys):
                await pace.step()
                self._others.want(key, hints.get(index, ()))
            for _ in range(TURNS_TO_ASK):
                await asyncio.sleep(0)
            if request.only_if_written:
                await pace.through(self._cache.look_at_claims())
        how = wait_s, request.only_if_written, request.to_pin
        outcomes: list[Acquisition] = []
        try:
            for key in keys:
                await pace.step()
                now_s = self._now_s()
                outcomes.append(self._cache.acquire(session, key, now_s, *how, looked=True))
            self._sessions.arm()
            outcomes = await self._sessions.hold(session, outcomes)
            reply = pb.AcquireReply(incarnation=self._incarnation)
            for outcome in outcomes:
                await pace.step()
                reply.outcomes.append(to_acquire_outcome(outcome))
        except BaseException:  # nobody is told of them
            self._sessions.arm()
            self._undo(lambda outcome: self._sessions.drop(session, outcome), outcomes)
            raise
        return reply

    async def Release(self, request: pb.ReleaseRequest, context: Ctx) -> pb.ReleaseReply:
        session = self._sessions.attached(request.session)
        check_batch(request.leases)
        released = await self._turns.pace().each(
            lambda lease: self._cache.release(session, LeaseId(lease)), request.leases
        )
        return pb.ReleaseReply(incarnation=self._incarnation, released=released)

    def _undo(self, undo: Callable[[T], object], items: Sequence[T]) -> None:
        """Take back, in turns, what a call has done that was cancelled on its way."""
        if items:
            task = asyncio.ensure_future(self._turns.pace().each(undo, list(items)))
            self._undoing.add(task)
            task.add_done_callback(self._undoing.discard)

    async def Exchange(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request_iterator: AsyncIterator[pb.ExchangeRequest], context: Ctx
    ) -> None:
        async for request in request_iterator:
            started_s = time.perf_counter()
            await self._sessions.catch_up()
            name = request.WhichOneof("call")
            try:
                if name is None:
                    raise InvalidRequest("an exchange without a call")
                answer = await self._exchanged[name](getattr(request, name), context)
                reply = pb.ExchangeReply(**{name: answer})
            except (InvalidRequest, SessionOver) as error:
                reply = pb.ExchangeReply(failure=to_failure(error))
            await context.write(reply)
            if name is not None:
                self._observe(name.title(), time.perf_counter() - started_s)

    async def Contains(self, request: pb.ContainsRequest, context: Ctx) -> pb.ContainsReply:
        check_batch(request.keys)
        pace = self._turns.pace()
        keys = await pace.each(key_from, request.keys)
        await self._settle(keys)
        contained = await pace.each(self._cache.contains, keys)
        return pb.ContainsReply(incarnation=self._incarnation, contained=contained)

    async def Evict(self, request: pb.EvictRequest, context: Ctx) -> pb.EvictReply:
        selection = selection_from(request)
        await self._settle(None if selection.key is None else [selection.key])
        reply = pb.EvictReply(incarnation=self._incarnation)
        pace = self._turns.pace()
        after: EntryId | None = EntryId(0)
        await self._look_at_pins(pace)
        while after is not None:
            report = self._cache.evict(selection, self._now_s(), TRIM_BATCH, after, request.dry_run)
            reply.entries += report.entries
            reply.nbytes += report.nbytes
            reply.leased += report.leased
            after = report.next_after
            self._others.changed()
            await pace.turn()
            if not self._cache.is_settled:
                await self._look_at_pins(pace)
                await pace.turn()
        return reply

    async def _look_at_pins(self, pace: Pace) -> None:
        while not self._cache.look_at_pins():
            await pace.turn()

    async def List(self, request: pb.ListRequest, context: Ctx) -> pb.ListReply:
        limit = min(request.limit or DEFAULT_PAGE, MAX_PAGE)
        reply = pb.ListReply(incarnation=self._incarnation)
        pace = self._turns.pace()
        after: EntryId | None = EntryId(request.after)
        while after is not None and len(reply.entries) < limit:
            page, after = self._cache.page(after, min(TRIM_BATCH, limit - len(reply.entries)))
            reply.entries.extend(
                to_entry_info(info, self._now_s()) for info in page if _is_listed(info.key, request)
            )
            await pace.turn()
        reply.next_after = after or 0
        return reply

    async def Status(self, request: pb.StatusRequest, context: Ctx) -> pb.StatusReply:
        return self._status()

    async def Offer(self, request: pb.OfferRequest, context: Ctx) -> pb.OfferReply:
        check_batch(request.keys)
        keys = await self._turns.pace().each(key_from, request.keys)
        self._others.offer(keys, request.nodes)
        return pb.OfferReply(incarnation=self._incarnation)

    async def Peers(self, request: pb.PeersRequest, context: Ctx) -> pb.PeersReply:
        reply = self._others.status()
        reply.incarnation = self._incarnation
        return reply

    async def _settle(self, keys: Sequence[Key] | None) -> None:
        if self.settle is not None:
            await self.settle(keys)

    def trim_soon(self) -> None:
        """Make room ahead of need, if it is getting short."""
        if self._trimming is None and self._cache.needs_trim():
            self._trimming = asyncio.ensure_future(self._trim())

    async def _trim(self) -> None:
        pace = self._turns.pace()
        try:
            goes_on = True
            while goes_on:
                await pace.turn()
                goes_on = self._cache.trim(TRIM_BATCH, self._now_s())
                self._others.changed()
        finally:
            self._trimming = None


def _wanted(item: pb.ReserveItem) -> tuple[Key, Content]:
    return key_from(item.key), content_from(item.content)


def _hints_of(message: pb.Hint) -> tuple[int, list[Hint]]:
    return message.index, hints_from(message)


def _is_listed(key: Key, request: pb.ListRequest) -> bool:
    namespace = request.namespace if request.HasField("namespace") else key.namespace
    mm_hash = request.mm_hash if request.HasField("mm_hash") else key.mm_hash
    return key == (namespace, mm_hash)
