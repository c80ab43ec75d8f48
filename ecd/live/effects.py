"""Effects of the core's operations, on the event loop.

Waits that ended are told at once, and a pool that gets full is trimmed in the turns that follow.
The timer of the next deadline is set once for all operations of a turn that took no memory, and at
once for the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ecd.base.clock import Clock
from ecd.core.cache import Cache
from ecd.core.model.outcomes import Wakeup
from ecd.core.model.types import Key, LeaseId, SessionId
from ecd.live.background import Background
from ecd.live.turns import PIECE, Turns

EVICTED_AT_A_TIME = 32
"""Entries evicted, or examined for an eviction, in one turn of the event loop."""


class SessionOwner(Protocol):
    """The owner of sessions, which receives their events between calls."""

    def wait_ended(self, wakeup: Wakeup) -> None: ...

    def leases_ended(self, session: SessionId, leases: Sequence[LeaseId]) -> None:
        """These leases ran out."""


class Changes:
    """The changes that one follower has not received yet; of each key only the last."""

    def __init__(self, share: Callable[[], None], clock: Clock) -> None:
        """`share` gives every follower what the core has noted."""
        self._share, self._clock = share, clock
        self._waiting = asyncio.Event()
        self._pending: dict[Key, bool] = {}
        self._is_asking = False

    @property
    def is_idle(self) -> bool:
        """Whether the follower has dealt with every change and waits for another."""
        return self._is_asking and not self._waiting.is_set()

    def note(self) -> None:
        """Wake the follower: something has changed."""
        self._waiting.set()

    def add(self, changes: Mapping[Key, bool]) -> None:
        if changes:
            self._pending.update(changes)
            self._waiting.set()

    async def next(self, collect_s: float = 0.0) -> dict[Key, bool]:
        """Wait for a change, and collect more for this long: keys stored (True) or evicted."""
        self._is_asking = True
        await self._waiting.wait()
        self._is_asking = False
        await self._clock.sleep(collect_s)
        self._share()
        self._waiting.clear()
        taken, self._pending = self._pending, {}
        return taken


class Effects:
    """Carries out the consequences of every operation of the core."""

    def __init__(self, cache: Cache, turns: Turns, clock: Clock) -> None:
        self._cache, self._turns, self._clock = cache, turns, clock
        self._subscribers: dict[SessionId, SessionOwner] = {}
        self._woken: deque[Wakeup] = deque()  # not told yet
        self._followers: list[Changes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._is_due = self._is_trimming = False
        self._background = Background()

    @property
    def is_idle(self) -> bool:
        """Whether every ended wait is reported and no pool is being trimmed."""
        return not self._woken and not self._is_trimming

    def subscribe(self, session: SessionId, subscriber: SessionOwner) -> None:
        self._subscribers[session] = subscriber

    def unsubscribe(self, session: SessionId) -> None:
        self._subscribers.pop(session, None)

    def after(self, woken: Iterable[Wakeup] = (), changed: bool = False) -> None:
        """Follow an operation that ended these waits, and may have stored or evicted entries."""
        if woken:
            self._deliver(woken)
        if changed:
            self._note_change()
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._follow)

    def after_filling(self, woken: Iterable[Wakeup] = ()) -> None:
        """As `after`, of an operation that took memory."""
        if woken:
            self._deliver(woken)
        self._note_change()
        self._arm()
        if not self._is_trimming and self._cache.evictor.needs_trim():
            self._is_trimming = True
            self._background.spawn(self._trim())

    def follow_changes(self) -> Changes:
        """A new follower of the keys that are stored and evicted from now on."""
        self._share_changes()
        self._followers.append(Changes(self._share_changes, self._clock))
        return self._followers[-1]

    def _share_changes(self) -> None:
        changes = self._cache.take_changes()
        for follower in self._followers:
            follower.add(changes)

    def _note_change(self) -> None:
        for follower in self._followers:
            follower.note()

    def _follow(self) -> None:
        self._is_due = False
        self._arm()

    # -- waits ---------------------------------------------------------------------------------

    def _deliver(self, woken: Iterable[Wakeup]) -> None:
        is_telling = bool(self._woken)
        self._woken.extend(woken)
        if not is_telling:
            self._tell_some()

    def _tell_some(self) -> None:
        """Report some of the ended waits, the rest in the next turns: a thousand may end at once.

        A session that has left is not notified.
        """
        for _ in range(min(PIECE, len(self._woken))):
            wakeup = self._woken.popleft()
            if subscriber := self._subscribers.get(wakeup.session):
                subscriber.wait_ended(wakeup)
        if self._woken:
            asyncio.get_running_loop().call_soon(self._tell_some)

    # -- deadlines -----------------------------------------------------------------------------

    def _arm(self) -> None:
        """Set the timer to the core's next deadline, if that is nearer than the timer's."""
        next_s = self._cache.next_deadline_s()
        if next_s is None or (self._timer is not None and self._timer_s <= next_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = next_s
        delay_s = max(0.0, next_s - self._clock.now_s())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        expired, overdue = self._cache.expire(self._clock.now_s())
        ended: dict[SessionId, list[LeaseId]] = {}
        for lease in expired:
            ended.setdefault(lease.session, []).append(lease.lease)
        for session, leases in ended.items():
            if subscriber := self._subscribers.get(session):
                subscriber.leases_ended(session, leases)
        self.after(overdue, changed=self._cache.retention.rules.has_ttls)

    # -- room ----------------------------------------------------------------------------------

    async def _trim(self) -> None:
        """Make room ahead of need."""
        pace = self._turns.pace()
        try:
            goes_on = True
            while goes_on:
                await pace.turn()
                goes_on = self._cache.evictor.trim(EVICTED_AT_A_TIME, self._clock.now_s())
                self._note_change()
        finally:
            self._is_trimming = False
