"""An engine on a simulated node: it stores and reads entries by the calls of the Cache service.

It checks every byte that it reads under a lease, and how long every call takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from ecd.core.model.types import Key
from ecd.memory.disk.disk_files import KNOWN_S, REMOVAL_S
from ecd.rpc.cache.cache_service import MAKING_ROOM_S
from ecd.rpc.cache.convert import SessionOver
from ecd.rpc.cache.stream import Stream
from ecd_proto.v1 import cache_pb2 as pb
from simulation.clock import OUTSIDE
from simulation.daemon import Daemon, DaemonGone
from simulation.scenario import SIZES, Action, bytes_of, key_of

if TYPE_CHECKING:
    from simulation.world import Run

SLACK_S = 0.25
"""How much later than it should a call may end: turns of the loop, and what runs beside it."""
ENCODE_S = 0.1
LONG_ENCODE_S = 4.0
EVICT_S = KNOWN_S + 2 * REMOVAL_S
"""How long files on disk may hold an eviction up."""


class Session:
    """One session of a client with one daemon."""

    def __init__(self, run: Run, daemon: Daemon) -> None:
        self.run, self.daemon = run, daemon
        stream = daemon.context.run(daemon.node.streams.open, "an engine")
        assert isinstance(stream, Stream)
        self.stream, self.is_open = stream, True
        self.waits: dict[int, asyncio.Future[pb.AcquireOutcome]] = {}
        self.lost: set[int] = set()  # leases that have ended, as the daemon said
        self.calls: set[asyncio.Task[Any]] = set()
        self.locked: set[Key] = set()
        daemon.files.locked.add(stream.session)
        OUTSIDE.run(asyncio.get_running_loop().create_task, self._follow())

    async def _follow(self) -> None:
        while (event := await self.stream.outbox.get()) is not None:
            if isinstance(event, pb.WaitEnded):
                ended = self.wait(event.ticket)
                if not ended.done():
                    ended.set_result(event.outcome)
            elif event.HasField("leases_ended"):
                self.lost.update(event.leases_ended.leases)
        self.end()

    def wait(self, ticket: int) -> asyncio.Future[pb.AcquireOutcome]:
        if ticket not in self.waits:
            self.waits[ticket] = asyncio.get_running_loop().create_future()
        return self.waits[ticket]

    def end(self) -> None:
        """The stream ends, and with it the process: its lock drops a moment later."""
        if not self.is_open:
            return
        self.is_open = False
        for call in self.calls:
            call.cancel()
        for wait in self.waits.values():
            wait.cancel()
        self.stream.outbox.put_nowait(None)
        if self.daemon.alive:
            self.daemon.context.run(self.daemon.node.streams.end, self.stream)
        lock = self.stream.session
        loop = asyncio.get_running_loop()
        loop.call_later(0.003, self.daemon.files.locked.discard, lock, context=OUTSIDE)
        for key in self.locked:
            loop.call_later(0.003, self.daemon.files.locked_keys.discard, key, context=OUTSIDE)

    def lock(self, key: Key) -> bool:
        """As `Client.lock`; for as long as the session lasts."""
        taken = self.daemon.files.locked_keys
        if key in taken and key not in self.locked:
            return False
        taken.add(key)
        self.locked.add(key)
        return True

    def unlock(self, key: Key) -> None:
        if key in self.locked:
            self.locked.discard(key)
            self.daemon.files.locked_keys.discard(key)

    async def call(self, work: Coroutine[Any, Any, Any], within_s: float) -> Any:
        """One call of the service. Raises DaemonGone."""
        if not self.daemon.is_serving or not self.is_open:
            work.close()
            raise DaemonGone
        task = self.daemon.start(work)
        self.calls.add(task)
        try:
            return await self.in_time(asyncio.shield(task), self.moment(), within_s, str(work))
        except (asyncio.CancelledError, SessionOver):
            raise DaemonGone from None
        finally:
            self.calls.discard(task)

    def moment(self) -> tuple[float, float]:
        """Now, and for how long the daemon had been stopped until now."""
        return self.run.loop.now_s, self.daemon.paused_s

    async def in_time(
        self, future: Any, since: tuple[float, float], within_s: float, what: str
    ) -> Any:
        """The future's result, which is to come in time, apart from pauses of the daemon."""
        result = await future
        (then_s, paused_then_s), (now_s, paused_s) = since, self.moment()
        took_s = now_s - then_s - (paused_s - paused_then_s)
        if took_s > within_s + SLACK_S and self.daemon.alive:
            self.run.fail(f"{what} took {took_s:.3f} s, not {within_s} s")
        return result


class Client:
    """One engine; after its daemon or its process has died it begins a new session."""

    def __init__(self, run: Run, node: int) -> None:
        self._run, self._node = run, node
        self._session: Session | None = None

    @property
    def _loop(self) -> Any:
        return self._run.loop

    def _open(self) -> Session:
        """The session with the daemon that serves now. Raises DaemonGone."""
        daemon = self._run.daemons[self._node]
        if not daemon.is_serving:
            raise DaemonGone
        session = self._session
        if session is None or not session.is_open or session.daemon is not daemon:
            self.die()
            session = self._session = Session(self._run, daemon)
        return session

    def die(self) -> None:
        """SIGKILL."""
        if self._session is not None:
            self._session.end()

    leave = die

    # -- writing -------------------------------------------------------------------------------

    async def put(self, number: int, seconds: float, choice: float) -> None:
        """Store a key; sometimes think better of it, or leave the reservation to the daemon."""
        try:
            session = self._open()
            key, data = key_of(number), bytes_of(number)
            item = pb.ReserveItem(
                key=pb.Key(namespace=key.namespace, mm_hash=key.mm_hash),
                content=pb.Content(
                    dtype="uint8", shape=[len(data)], nbytes=len(data), cost_s=0.05 * number
                ),
            )
            token, service = session.stream.token, session.daemon.service
            request = pb.ReserveRequest(session=token, items=[item])
            reply = await session.call(service.Reserve(request, None), MAKING_ROOM_S)
            [outcome] = reply.outcomes
            if not outcome.HasField("reserved"):
                return
            at, memory = outcome.reserved.extent, session.daemon.place.pool
            half = len(data) // 2
            for start, end in ((0, half), (half, len(data))):
                await asyncio.sleep(seconds / 20)
                if not (session.is_open and session.daemon.alive):
                    return
                memory.view(at.offset + start, end - start)[:] = data[start:end]
            reservations = [outcome.reserved.reservation]
            if choice > 0.95:
                abort = pb.AbortRequest(session=token, reservations=reservations)
                await session.call(service.Abort(abort, None), 0.0)
                return
            commit = pb.CommitRequest(session=token, reservations=reservations)
            reply = await session.call(service.Commit(commit, None), 0.0)
            if list(reply.committed) != [True]:
                self._run.fail(f"{key.mm_hash} was reserved and is not committed")
            if bytes(memory.view(at.offset, len(data))) != data:
                self._check_stored(session, number, at)
            self._run.note_place(self._node, number, at)
        except DaemonGone:
            return

    def _check_stored(self, session: Session, number: int, at: pb.Extent) -> None:
        """What was written is overwritten: only right if it has been evicted since."""
        info = session.daemon.cache.views.info(key_of(number))
        if info is not None and info.extent.offset == at.offset:
            self._run.fail(f"k{number}: somebody else wrote where it is stored")

    # -- reading -------------------------------------------------------------------------------

    async def get(self, action: Action, is_maker: bool = False) -> None:
        """Get a key with hints, right and wrong ones, and hold it; a maker makes it if it must."""
        try:
            session = self._open()
            key, choice = key_of(action.key), action.choice
            wait_s = 0.0 if choice < 0.05 else action.seconds
            request = pb.AcquireRequest(
                session=session.stream.token,
                keys=[pb.Key(namespace=key.namespace, mm_hash=key.mm_hash)],
                wait_s=wait_s,
                only_if_written=choice > 0.3,
            )
            if int(choice * 100) % 2 or self._run.scenario.directory == "none":
                hint = request.hints.add(index=0)
                self._hint(hint, action)
            if is_maker:
                request.makes.add(index=0, wait_s=0.0 if choice < 0.4 else action.seconds)
            begun = session.moment()
            acquire = session.daemon.service.Acquire(request, None)
            reply = await session.call(acquire, 0.0)
            [outcome] = reply.outcomes
            if outcome.HasField("waiting"):
                if not session.is_open:  # it died as it was answered
                    raise DaemonGone
                ended = session.wait(outcome.waiting.ticket)
                try:
                    outcome = await session.in_time(ended, begun, wait_s, "a wait")
                except asyncio.CancelledError:
                    raise DaemonGone from None
            if outcome.HasField("leased"):
                await self._read(session, action, outcome.leased)
            elif is_maker and outcome.HasField("missing"):
                await self._make(session, action)
        except DaemonGone:
            return

    def _hint(self, hint: pb.Hint, action: Action) -> None:
        """Hint at a node that holds the key, or at any, with the key's place now or once."""
        run, key = self._run, key_of(action.key)
        holders = [d for d in run.holders(action.key) if d.place is not run.places[self._node]]
        other = run.daemons[action.other]
        if holders and action.choice < 0.9:
            other = holders[action.other % len(holders)]
        hint.nodes.append(other.place.node)
        now_there = other.cache.views.info(key)
        places = run.known_places.get((other.place.node, action.key), [])
        if now_there is not None and action.choice < 0.4:
            pool, offset, nbytes = now_there.extent
            hint.extents.add(pool=pool, offset=offset, nbytes=nbytes)
        elif places and action.choice < 0.8:
            pool, offset, nbytes = places[action.other % len(places)]
            hint.extents.add(pool=pool, offset=offset, nbytes=nbytes)
        if action.choice > 0.85:
            hint.nodes.append(f"10.0.9.{action.key}:9470")

    async def _read(self, session: Session, action: Action, leased: pb.Leased) -> None:
        memory, at = session.daemon.place.pool, leased.extent
        self._run.note_place(self._node, action.key, at)
        if leased.content.nbytes != SIZES[action.key]:
            self._run.fail(f"k{action.key} has {leased.content.nbytes} bytes at its reader")
            return
        for pause_s in (0.0, action.seconds / 2, action.seconds / 2):
            await asyncio.sleep(pause_s)
            is_held = self._loop.now_s < leased.expires_s and leased.lease not in session.lost
            if not (is_held and session.is_open and session.daemon.alive):
                return
            if bytes(memory.view(at.offset, at.nbytes)) != bytes_of(action.key):
                self._run.fail(f"k{action.key}: wrong bytes at a reader of node {self._node}")
                return
        token = session.stream.token
        release = pb.ReleaseRequest(session=token, leases=[leased.lease])
        await session.call(session.daemon.service.Release(release, None), 0.0)

    async def _make(self, session: Session, action: Action) -> None:
        if action.choice > 0.9:
            stop = session.daemon.flights.stop_making
            session.daemon.context.run(stop, session.stream.session, [key_of(action.key)])
            return
        key = key_of(action.key)
        session.lock(key)
        is_long = action.choice > 0.8
        await asyncio.sleep(LONG_ENCODE_S if is_long else ENCODE_S * action.choice)
        await self.put(action.key, action.seconds, 0.0)
        session.unlock(key)

    # -- the rest ------------------------------------------------------------------------------

    async def offer(self, number: int, node: str) -> None:
        try:
            session = self._open()
            keys = [pb.Key(namespace="n", mm_hash=f"k{number}")]
            request = pb.OfferRequest(keys=keys, nodes=[node])
            await session.call(session.daemon.service.Offer(request, None), 0.0)
        except DaemonGone:
            return

    async def evict(self, number: int | None) -> None:
        try:
            session = self._open()
            request = pb.EvictRequest()
            if number is not None:
                request.key.namespace, request.key.mm_hash = "n", f"k{number}"
            await session.call(session.daemon.service.Evict(request, None), EVICT_S)
        except DaemonGone:
            return

    async def locate(self, number: int) -> None:
        try:
            session = self._open()
            request = pb.LocateRequest(keys=[pb.Key(namespace="n", mm_hash=f"k{number}")])
            await session.call(session.daemon.service.Locate(request, None), 1.0)
        except DaemonGone:
            return
