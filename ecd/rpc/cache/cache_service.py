"""The Cache service: translate, call the core, translate back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from ecd.base.wire import (
    MAX_WAIT_S,
    InvalidRequest,
    check_batch,
    content_from,
    hints_from,
    key_from,
    seconds_from,
)
from ecd.core.model.outcomes import Aborted, Acquisition, Committed, Reserved, Waiting
from ecd.core.model.types import Answer, Content, EntryId, Key, LeaseId, WaitFor
from ecd.live.background import Background
from ecd.live.effects import EVICTED_AT_A_TIME
from ecd.live.flights import Flights, Maker
from ecd.live.live import LiveCache
from ecd.live.slow_log import SlowLog, Stage, time_stages
from ecd.rpc.cache.clients import Clients
from ecd.rpc.cache.convert import (
    SessionOver,
    copies_pool,
    selection_from,
    to_acquire_outcome,
    to_entry_info,
    to_failure,
    to_holder,
    to_keep_reply,
    to_promote_reply,
    to_reserve_outcome,
)
from ecd.rpc.cache.origins import DiskEntries, OtherNodes, Recovering
from ecd.rpc.cache.refused import RefusedPuts
from ecd.rpc.cache.sessions import Context, SessionStreams
from ecd_proto.contract import MAX_BATCH, MAX_PAGE, Hint
from ecd_proto.encoders import MAX_ENCODERS
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

MAKING_ROOM_S = 2.0
"""How long a reservation makes room while others take it: less than a client waits."""
TURNS_TO_ASK = 2
"""Turns of the event loop in which questions to other nodes are sent before other work."""
_ANSWERS = {
    (False, False): Answer.LEASE,
    (True, False): Answer.PIN,
    (False, True): Answer.LOOK_LEASE,
    (True, True): Answer.LOOK,
}
"""The form of an answer, by `to_pin` and `is_look` of the AcquireRequest."""
DEFAULT_PAGE = 100

T = TypeVar("T")
Ctx = grpc.aio.ServicerContext[Any, Any]
Observe = Callable[..., None]
"""Receives for each call its method and seconds, its request or the put, and its reply."""


@dataclass(frozen=True)
class Monitor:
    """The operators' view: the daemon's status, and how long each kind of call takes."""

    status: Callable[[], pb.StatusReply]
    observe: Observe
    slow_log: SlowLog


class CacheService(pb_grpc.CacheServicer):
    """Answers the engines of this node; one per daemon, on its event loop."""

    def __init__(
        self,
        live: LiveCache,
        streams: SessionStreams,
        flights: Flights,
        others: OtherNodes,
        recovery: Recovering,
        disk: DiskEntries,
        monitor: Monitor,
    ) -> None:
        self._live, self._streams, self._flights = live, streams, flights
        self._others, self._recovery, self._disk = others, recovery, disk
        self._monitor = monitor
        self._incarnation = streams.identity.incarnation
        self._clients = Clients(live, streams)
        self._refused = RefusedPuts(live.clock)
        self._undoing = Background()
        self._exchanged: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "reserve": self.Reserve,
            "commit": self.Commit,
            "abort": self.Abort,
            "acquire": self.Acquire,
            "release": self.Release,
            "contains": self.Contains,
        }

    # -- writing -------------------------------------------------------------------------------

    async def Reserve(self, request: pb.ReserveRequest, context: Ctx) -> pb.ReserveReply:
        session = self._streams.attached(request.session)
        check_batch(request.items)
        pace = await self._live.begin()
        items = await pace.each(_wanted, request.items)
        await self._settle([key for key, _ in items])
        reply = pb.ReserveReply(incarnation=self._incarnation)
        reserved: list[EntryId] = []
        try:
            async with self._live.reserving(session, pace, MAKING_ROOM_S) as reserve:
                for key, content in items:
                    await pace.step()
                    outcome = await reserve(key, content)
                    self._refused.note(key.namespace, outcome)
                    if isinstance(outcome, Reserved):
                        reserved.append(outcome.entry)
                    reply.outcomes.append(to_reserve_outcome(outcome))
        except BaseException:  # the client is not told of them
            self._undo(lambda entry: self._live.abort(session, entry), reserved)
            raise
        return reply

    async def Commit(self, request: pb.CommitRequest, context: Ctx) -> pb.CommitReply:
        session = self._streams.attached(request.session)
        check_batch(request.reservations)
        pace = await self._live.begin()

        def commit(reservation: int) -> bool:
            return isinstance(self._live.commit(session, EntryId(reservation)), Committed)

        committed = await pace.each(commit, request.reservations)
        return pb.CommitReply(incarnation=self._incarnation, committed=committed)

    async def Abort(self, request: pb.AbortRequest, context: Ctx) -> pb.AbortReply:
        session = self._streams.attached(request.session)
        check_batch(request.reservations)
        pace = await self._live.begin()

        def abort(reservation: int) -> bool:
            return isinstance(self._live.abort(session, EntryId(reservation)), Aborted)

        aborted = await pace.each(abort, request.reservations)
        return pb.AbortReply(incarnation=self._incarnation, aborted=aborted)

    async def Promote(self, request: pb.PromoteRequest, context: Ctx) -> pb.PromoteReply:
        session = self._streams.attached(request.session)
        key = key_from(request.key)
        pool = copies_pool(self._live.cache.pools, request.pool)
        await self._live.begin()
        outcome = self._live.reserve_replica(session, key, EntryId(request.entry), pool)
        return to_promote_reply(outcome, self._incarnation)

    async def _settle(self, keys: Sequence[Key] | None) -> None:
        """Have these keys, or all, verified if the last daemon left them."""
        with Stage("verifying", self._live.clock):
            await self._recovery.settle(keys)

    # -- reading -------------------------------------------------------------------------------

    async def Acquire(self, request: pb.AcquireRequest, context: Ctx) -> pb.AcquireReply:
        session = self._streams.attached(request.session)
        check_batch(request.keys)
        check_batch(request.hints)
        wait_s, makes = seconds_from(request.wait_s, "wait_s"), _makes_of(request)
        pace = await self._live.begin()
        keys = await pace.each(key_from, request.keys)
        await self._settle(keys)
        if wait_s > 0.0:
            hints = dict(await pace.each(_hints_of, request.hints))
            for index, key in enumerate(keys):
                await pace.step()
                make_s = makes.get(index)
                maker = None if make_s is None else Maker(session, make_s)
                is_patient = not request.only_if_written
                self._flights.want(key, hints.get(index, ()), maker, is_patient=is_patient)
            for _ in range(TURNS_TO_ASK):
                await self._live.clock.sleep(0)
            if request.only_if_written:
                await self._live.learn(keys, pace)
        wait_for = WaitFor.WRITER if request.only_if_written else WaitFor.ANY
        answer = _ANSWERS[request.to_pin, request.is_look]
        outcomes: list[Acquisition] = []
        try:
            for index, key in enumerate(keys):
                await pace.step()
                outcome = self._live.acquire(session, key, wait_s, wait_for, answer)
                outcomes.append(outcome)
                if isinstance(outcome, Waiting) and makes.get(index) == 0.0:
                    self._flights.waits_for_nobody(key, session, outcome.ticket)
            outcomes = await self._streams.held.hold(session, outcomes)
            reply = pb.AcquireReply(incarnation=self._incarnation)
            for outcome in outcomes:
                await pace.step()
                reply.outcomes.append(to_acquire_outcome(outcome))
        except BaseException:  # the client is not told of them
            self._undo(lambda outcome: self._live.drop(session, outcome), outcomes)
            raise
        return reply

    async def Release(self, request: pb.ReleaseRequest, context: Ctx) -> pb.ReleaseReply:
        session = self._streams.attached(request.session)
        check_batch(request.leases)
        if not request.leases:
            self._live.welcome(session)
        pace = await self._live.begin()
        released = await pace.each(
            lambda lease: self._live.cache.release(session, LeaseId(lease)), request.leases
        )
        return pb.ReleaseReply(incarnation=self._incarnation, released=released)

    async def Contains(self, request: pb.ContainsRequest, context: Ctx) -> pb.ContainsReply:
        check_batch(request.keys)
        pace = await self._live.begin()
        keys = await pace.each(key_from, request.keys)
        await self._settle(keys)
        contained = await pace.each(self._live.cache.views.contains, keys)
        return pb.ContainsReply(incarnation=self._incarnation, contained=contained)

    def _undo(self, undo: Callable[[T], object], items: Sequence[T]) -> None:
        """Undo, in turns, the finished items of a call that was cancelled."""
        if items:
            self._undoing.spawn(self._live.turns.pace().each(undo, list(items)))

    # -- streams -------------------------------------------------------------------------------

    async def Session(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request_iterator: Any, context: Context
    ) -> None:
        await self._streams.run(request_iterator, context)

    async def Exchange(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request_iterator: AsyncIterator[pb.ExchangeRequest], context: Ctx
    ) -> None:
        async for request in request_iterator:
            started_s = self._live.clock.now_s()
            name = request.WhichOneof("call")
            asked = answer = None
            time_stages()
            try:
                if name is None:
                    raise InvalidRequest("an exchange without a call")
                asked = getattr(request, name)
                answer = await self._exchanged[name](asked, context)
                reply = pb.ExchangeReply(**{name: answer})
            except (InvalidRequest, SessionOver) as error:
                reply = pb.ExchangeReply(failure=to_failure(error))
            await context.write(reply)
            if name is not None:
                took_s = self._live.clock.now_s() - started_s
                self._monitor.observe(name.title(), took_s, asked, answer)

    # -- for operators -------------------------------------------------------------------------

    async def Evict(self, request: pb.EvictRequest, context: Ctx) -> pb.EvictReply:
        selection = selection_from(request)
        pace = await self._live.begin()
        await self._settle(None if selection.key is None else [selection.key])
        with Stage("disk", self._live.clock):
            erased, failures = await self._disk.erase(selection, request.dry_run)
        report = await self._live.operators.evict(selection, request.dry_run, pace)
        if not request.dry_run:
            # Again, for what was written, or being read, until its entry was evicted.
            again, failures = await self._disk.erase(selection, False)
            erased = {**erased, **again}
        return pb.EvictReply(
            incarnation=self._incarnation,
            entries=report.entries,
            nbytes=report.nbytes,
            leased=report.leased,
            disk_entries=len(erased),
            disk_bytes=sum(erased.values()),
            disk_failures=0 if request.dry_run else failures,
            kept=report.kept,
        )

    async def Keep(self, request: pb.KeepRequest, context: Ctx) -> pb.KeepReply:
        key = key_from(request.key)
        for_s = seconds_from(request.for_s, "for_s") or None
        await self._live.begin()
        await self._settle([key])
        if not request.stop:
            reply = to_keep_reply(self._live.operators.keep(key, for_s))
        elif self._live.cache.retention.unkeep(key):
            reply = pb.KeepReply(outcome=pb.KeepReply.OUTCOME_STOPPED)
        else:
            is_there = self._live.cache.views.contains(key)
            missing, not_kept = pb.KeepReply.OUTCOME_MISSING, pb.KeepReply.OUTCOME_NOT_KEPT
            reply = pb.KeepReply(outcome=not_kept if is_there else missing)
        reply.incarnation = self._incarnation
        return reply

    async def List(self, request: pb.ListRequest, context: Ctx) -> pb.ListReply:
        limit = min(request.limit or DEFAULT_PAGE, MAX_PAGE)
        reply = pb.ListReply(incarnation=self._incarnation)
        pace = await self._live.begin()
        after: EntryId | None = EntryId(request.after)
        while after is not None and len(reply.entries) < limit:
            count = min(EVICTED_AT_A_TIME, limit - len(reply.entries))
            page, after = self._live.cache.views.page(after, count)
            now_s = self._live.clock.now_s()
            reply.entries.extend(
                to_entry_info(info, now_s) for info in page if _is_listed(info.key, request)
            )
            await pace.turn()
        reply.next_after = after or 0
        return reply

    async def Status(self, request: pb.StatusRequest, context: Ctx) -> pb.StatusReply:
        await self._live.count_uses(await self._live.begin())
        return self._monitor.status()

    async def Slow(self, request: pb.SlowRequest, context: Ctx) -> pb.SlowReply:
        slow_log = self._monitor.slow_log
        return pb.SlowReply(
            incarnation=self._incarnation,
            events=slow_log.newest(request.clear),
            total=slow_log.total,
            slow_s=slow_log.slow_s,
            slow_fetch_s=slow_log.slow_fetch_s,
        )

    async def Clients(self, request: pb.ClientsRequest, context: Ctx) -> pb.ClientsReply:
        return await self._clients.all(await self._live.begin())

    async def EndClients(self, request: pb.EndClientsRequest, context: Ctx) -> pb.EndClientsReply:
        check_batch(request.ids)
        ended = await self._clients.end(request.ids)
        return pb.EndClientsReply(incarnation=self._incarnation, ended=ended)

    async def Offer(self, request: pb.OfferRequest, context: Ctx) -> pb.OfferReply:
        check_batch(request.keys)
        pace = await self._live.begin()
        keys = await pace.each(key_from, request.keys)
        self._others.offer(keys, request.nodes)
        return pb.OfferReply(incarnation=self._incarnation)

    async def Locate(self, request: pb.LocateRequest, context: Any) -> pb.LocateReply:
        check_batch(request.keys)
        pace = await self._live.begin()
        keys = await pace.each(key_from, request.keys)
        await self._settle(keys)
        with Stage("other nodes", self._live.clock):
            elsewhere, is_whole = await self._others.locate(keys)
        reply = pb.LocateReply(incarnation=self._incarnation, is_partial=not is_whole)
        node, now_s = self._streams.identity.holder, self._live.clock.now_s()
        for key in keys:
            await pace.step()
            info = self._live.cache.views.info(key)
            own = [] if info is None else [to_holder(node, info, now_s)]
            others = [
                pb.Holder(node=at.hint.node, nbytes=at.hint.nbytes, metadata=at.metadata)
                for at in elsewhere.get(key, ())
            ]
            reply.located.add(holders=own + others)
        return reply

    async def Encoders(self, request: pb.EncodersRequest, context: Ctx) -> pb.EncodersReply:
        namespace, own = request.namespace, self._streams.engines.encoders()
        found = [*own, *await self._others.encoders_elsewhere()]
        asked = [each.message for each in found if namespace in ("", each.namespace)]
        reply = pb.EncodersReply(incarnation=self._incarnation, node=self._streams.identity.holder)
        reply.encoders.extend(asked[: MAX_ENCODERS if namespace else MAX_BATCH])
        return reply

    async def Peers(self, request: pb.PeersRequest, context: Ctx) -> pb.PeersReply:
        reply = self._others.status()
        reply.incarnation = self._incarnation
        return reply


def _wanted(item: pb.ReserveItem) -> tuple[Key, Content]:
    return key_from(item.key), content_from(item.content)


def _hints_of(message: pb.Hint) -> tuple[int, list[Hint]]:
    return message.index, hints_from(message)


def _makes_of(request: pb.AcquireRequest) -> dict[int, float]:
    """How long the client waits for another node, by the index of each key that it makes."""
    makes: dict[int, float] = {}
    for make in request.makes:
        if make.index >= len(request.keys):
            raise InvalidRequest(f"makes names key {make.index} of {len(request.keys)} keys")
        if make.index in makes:
            raise InvalidRequest(f"makes names key {make.index} twice")
        makes[make.index] = min(seconds_from(make.wait_s, "wait_s"), MAX_WAIT_S)
    return makes


def _is_listed(key: Key, request: pb.ListRequest) -> bool:
    namespace = request.namespace if request.HasField("namespace") else key.namespace
    mm_hash = request.mm_hash if request.HasField("mm_hash") else key.mm_hash
    return key == (namespace, mm_hash) and key.mm_hash.startswith(request.mm_hash_prefix)
