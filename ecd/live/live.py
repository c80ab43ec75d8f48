"""The core on the event loop: the front door for all that has effects.

A call begins with `begin`, which stores what clients have put without a call, as its operations may
depend on that. After each operation come its effects: waits that ended are told, the timer of
the next deadline is set, changes are announced, and a pool that gets full is trimmed. Callers
remember no effect.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from ecd.base.clock import Clock
from ecd.core.cache import Cache
from ecd.core.model.outcomes import (
    Aborted,
    Abortion,
    Acquisition,
    Commitment,
    Committed,
    EntryTooLarge,
    Leased,
    MakingRoom,
    Missing,
    PoolFull,
    Reservation,
    Reserved,
    Waiting,
    Wakeup,
)
from ecd.core.model.types import (
    Answer,
    Content,
    EntryId,
    Key,
    LeaseId,
    SessionId,
    Ticket,
    WaitFor,
)
from ecd.core.pool.pool import Pool
from ecd.live.background import Background, until_first
from ecd.live.effects import Changes, Effects, SessionOwner
from ecd.live.intake import Intake, NoPuts, Taken
from ecd.live.makings import MAX_MAKINGS, Makings, Wait
from ecd.live.operators import Operators
from ecd.live.slow_log import Stage
from ecd.live.turns import Pace, Turns
from ecd_proto.contract import MAKING_S

SCAN_S = 0.25
"""Longest pause between two scans of reads without a call."""
LOOKING_SHARE = 0.05
"""Share of a core for checking the locks of lasting makings, however many locks the kernel has."""

Reserve = Callable[[Key, Content], Awaitable[Reservation]]
"""Reserves space for one entry, within `LiveCache.reserving`."""


class LiveCache:
    """The core, its clock and its effects; one per daemon.

    What needs no time, and from which nothing follows, goes to `cache` itself.
    """

    def __init__(self, cache: Cache, clock: Clock, intake: Intake | None = None) -> None:
        self.cache, self.clock = cache, clock
        self.turns = Turns(clock)
        self.makings = Makings(clock)
        self._intake: Intake = NoPuts() if intake is None else intake
        self._effects = Effects(cache, self.turns, clock)
        self.operators = Operators(cache, self._effects, self.turns, clock)
        self._is_draining = False
        self._background = Background()

    async def run(self) -> None:
        """Store puts as clients ring, and look at what they do without a call, until cancelled."""
        self._intake.listen(self.drain)
        await until_first(self._scan_on(), self._look_on())

    async def _scan_on(self) -> None:
        while True:
            await self.clock.sleep(SCAN_S)
            settled = self.scan()
            while not settled:
                await self.turns.next()
                settled = self.cache.pins.step()

    async def _look_on(self) -> None:
        """End makings that nobody works on any more, SCAN_S later or more where looking takes long.

        The kernel walks through the locks of all clients for each.
        """
        pause_s = SCAN_S
        while True:
            await self.clock.sleep(pause_s)
            pace, looked_s = self.turns.pace(), 0.0
            for key in list(self.makings.lasting(MAKING_S)):
                await pace.step()
                begun_s = self.clock.now_s()
                self._end_making(key)
                looked_s += self.clock.now_s() - begun_s
            pause_s = max(SCAN_S, looked_s / LOOKING_SHARE)

    def _end_making(self, key: Key) -> None:
        """End a making that has lasted for a while, unless a client works on it still."""
        if self.cache.views.contains(key):
            self.makings.take([key])  # whoever waited has the key
        else:
            self._unmade(self.makings.take_past(key))

    def scan(self) -> bool:
        """Count reads without a call, and scan some pins. False: pins are left."""
        return self.cache.evictor.scan(self.clock.now_s())

    async def count_uses(self, pace: Pace) -> None:
        """Count all reads without a call until now, in turns, and scan some pins."""
        self.scan()
        for _ in range(self.cache.limits.sessions):  # or readers that go on would keep us here
            if self.cache.evictor.drain_uses(self.clock.now_s()):
                return
            await pace.turn()

    # -- before an operation -------------------------------------------------------------------

    async def begin(self) -> Pace:
        """Begin a call: all puts made before it are stored. The call's pace, for its pieces."""
        self.drain()
        last = self._intake.collected
        if self._intake.taken < last:
            with Stage("puts before it", self.clock):
                while self._intake.taken < last:
                    await self.clock.sleep(0)
        return self.turns.pace()

    def drain(self) -> None:
        """Store some of the puts made without a call, the rest in the next turns."""
        self._intake.collect()
        if not self._is_draining:
            self._drain_some()

    def _drain_some(self) -> None:
        self._is_draining = False
        if self._intake.is_pending:
            taken = self._intake.step(self.clock.now_s())
            self._intake.grant_next(self.clock.now_s())
            self._effects.after_filling(taken.woken)  # a grant may have evicted, too
        if self._intake.is_pending:
            self._is_draining = True
            asyncio.get_running_loop().call_soon(self._drain_some)

    @property
    def is_drained(self) -> bool:
        """Whether all puts that clients have rung for are stored, with their consequences."""
        return not self._intake.is_pending and self._effects.is_idle

    def _took(self, taken: Taken) -> None:
        if taken.puts:
            self._effects.after_filling(taken.woken)

    async def learn(self, keys: Sequence[Key], pace: Pace) -> None:
        """Store recent puts and scan claims, once for all of these keys."""
        if not all(map(self.cache.views.contains, keys)):
            self.drain()
        if not all(map(self.cache.views.contains, keys)):
            await pace.through(self.cache.scan_claims())

    # -- changes -------------------------------------------------------------------------------

    def follow_changes(self) -> Changes:
        """A new follower of the keys that are stored and evicted from now on."""
        return self._effects.follow_changes()

    # -- sessions ------------------------------------------------------------------------------

    def welcome(self, session: SessionId) -> None:
        """Grant memory for first puts to a session whose client holds its lock, if much is free."""
        self._intake.welcome(session, self.clock.now_s())

    def refuse(self, cause: str, limit: int) -> None:
        """Count a session that met a bound of its service, under one of the core's CAUSES."""
        self.cache.counters.refuse(cause, limit)

    def subscribe(self, session: SessionId, subscriber: SessionOwner) -> None:
        """Notify the subscriber how the session's waits and leases end, until it leaves."""
        self._effects.subscribe(session, subscriber)

    def leave_session(self, session: SessionId) -> None:
        """End the session for its client, whose process may still touch the memory."""
        self._took(self._intake.take_last(session, self.clock.now_s()))
        self._unmade(self.makings.take_session(session))
        self._effects.unsubscribe(session)
        self._effects.after(self.cache.leave_session(session))

    def close_session(self, session: SessionId) -> None:
        """Take back, in turns, all memory of a session whose process cannot touch it any more.

        A put that began before the session's stream ended may have been finished since.
        """
        self._took(self._intake.take_last(session, self.clock.now_s()))
        self._background.spawn(self._close_session(session))

    async def _close_session(self, session: SessionId) -> None:
        is_closed = False
        while not is_closed:
            await self.turns.any()
            is_closed = self.cache.close_session(session)

    # -- writing -------------------------------------------------------------------------------

    @asynccontextmanager
    async def reserving(
        self, session: SessionId, pace: Pace, patience_s: float, pool: Pool | None = None
    ) -> AsyncIterator[Reserve]:
        """Reserve for a client, with one scan of the claims for all that is reserved within.

        Room for one reservation is made for at most `patience_s`: others may take what it frees.
        At the end the client may be granted memory, for more of what it reserved last, unless
        the caller has chosen the `pool`: grants lie in one pool only.
        """
        last_bytes: int | None = None

        async def reserve(key: Key, content: Content) -> Reservation:
            nonlocal last_bytes
            until_s = self.clock.now_s() + patience_s
            outcome = await self._reserve(session, key, content, pool, pace, until_s)
            if isinstance(outcome, Reserved) and pool is None:
                last_bytes = content.nbytes
            elif isinstance(outcome, PoolFull | EntryTooLarge):
                self._unmade(self.makings.take([key]))
            return outcome

        try:
            with self.cache.reserving() as scan:
                self._intake.hurry()
                await pace.through(scan)
                yield reserve
            if last_bytes is not None:
                self._intake.grant(session, last_bytes, self.clock.now_s())
        finally:
            self._effects.after_filling()

    async def reserve(
        self, session: SessionId, key: Key, content: Content, pace: Pace, pool: Pool | None = None
    ) -> Reservation:
        """Reserve for a fetch, making room until its flight ends."""
        async with self._reserving(pace):
            return await self._reserve(session, key, content, pool, pace, math.inf)

    async def reserve_spare(
        self, session: SessionId, key: Key, content: Content, pace: Pace
    ) -> Reservation | None:
        """Reserve for a fetch that may be in vain; None if that needed an eviction."""
        async with self._reserving(pace):
            if not self.cache.views.has_spare(key.namespace, content.nbytes):
                return None
            return await self._reserve(session, key, content, None, pace, -math.inf)

    @asynccontextmanager
    async def _reserving(self, pace: Pace) -> AsyncIterator[None]:
        """For a block that reserves: what readers hold is known, and what follows is done."""
        try:
            with self.cache.reserving() as scan:
                self._intake.hurry()
                await pace.through(scan)
                yield
        finally:
            self._effects.after_filling()

    async def _reserve(
        self,
        session: SessionId,
        key: Key,
        content: Content,
        pool: Pool | None,
        pace: Pace,
        until_s: float,
    ) -> Reservation:
        while True:
            now_s = self.clock.now_s()
            outcome = self.cache.reserve(session, key, content, now_s, pool)
            if not isinstance(outcome, MakingRoom):
                return outcome
            if now_s >= until_s:
                return self.cache.no_room(key.namespace, content.nbytes, pool)
            with Stage("room", self.clock):
                await pace.turn()

    def reserve_replica(
        self, session: SessionId, key: Key, original: EntryId, pool: Pool
    ) -> Reservation | Missing:
        outcome = self.cache.reserve_replica(session, key, original, pool, self.clock.now_s())
        self._effects.after_filling()
        return outcome

    def commit(
        self,
        session: SessionId,
        reservation: EntryId,
        checksum: int | None = None,
        content: Content | None = None,
        refetch_s: float = math.inf,
        age_s: float = 0.0,
        is_handover: bool = False,
    ) -> Commitment:
        now_s = self.clock.now_s()
        outcome = self.cache.commit(
            session, reservation, now_s, checksum, content, refetch_s, age_s, is_handover
        )
        if isinstance(outcome, Committed):
            self._effects.after(outcome.woken, changed=True)
            if self.cache.retention.is_over_quota:
                self._effects.after_filling()
        return outcome

    def abort(self, session: SessionId, reservation: EntryId) -> Abortion:
        return self._stopped(self.cache.abort(session, reservation))

    def abandon(self, session: SessionId, reservation: EntryId) -> Abortion:
        return self._stopped(self.cache.abandon(session, reservation))

    def _stopped(self, outcome: Abortion) -> Abortion:
        if isinstance(outcome, Aborted):
            self._effects.after(outcome.woken)
        return outcome

    def stop_expecting(self, key: Key) -> None:
        self._effects.after(self.cache.readers.stop_expecting(key))

    # -- making --------------------------------------------------------------------------------

    def make(self, session: SessionId, key: Key) -> None:
        """Note that the session makes the key, so that other nodes wait for it.

        No effect if the session has ended meanwhile.
        """
        if not self.cache.is_open(session):
            self.not_made(key)
        elif not self.makings.begin(session, key):
            self.not_made(key)
            self.refuse("makings", MAX_MAKINGS)

    def not_made(self, key: Key) -> None:
        """End the waits of clients that expected the key to be made here."""
        self._unmade(self.makings.take_early(key))

    def stop_making(self, session: SessionId, keys: Iterable[Key]) -> None:
        self._unmade(self.makings.take(keys, session))

    def _unmade(self, waits: list[Wait]) -> None:
        """End waits for keys that are not made after all, in turns: a thousand nodes may wait."""
        if waits:
            cancel = self.turns.pace().each(lambda wait: self.cancel_wait(*wait), waits)
            self._background.spawn(cancel)

    # -- reading -------------------------------------------------------------------------------

    def acquire(
        self,
        session: SessionId,
        key: Key,
        wait_s: float = 0.0,
        wait_for: WaitFor = WaitFor.ANY,
        answer: Answer = Answer.LEASE,
    ) -> Acquisition:
        """As `Cache.acquire`; with `WaitFor.WRITER` after `learn`."""
        now_s = self.clock.now_s()
        outcome = self.cache.acquire(session, key, now_s, wait_s, wait_for, answer)
        if isinstance(outcome, Waiting):
            self._intake.hurry()
        self._effects.after()
        return outcome

    def renew(self, session: SessionId, leases: Iterable[LeaseId]) -> tuple[float, list[LeaseId]]:
        return self.cache.renew(session, leases, self.clock.now_s())

    def cancel_wait(self, session: SessionId, ticket: Ticket) -> None:
        """End the wait with Missing, unless it has ended: then its outcome is on the way."""
        if self.cache.cancel_wait(session, ticket):
            self._effects.after([Wakeup(session, ticket, Missing())])

    def drop(self, session: SessionId, outcome: Acquisition) -> None:
        """Undo an acquisition whose outcome cannot be delivered."""
        if isinstance(outcome, Leased):
            self.cache.release(session, outcome.lease)
        elif isinstance(outcome, Waiting):
            self.cache.cancel_wait(session, outcome.ticket)
