"""Flights: each brings one key into memory, however many clients wait for it.

A flight asks its sources in order, the disk before other nodes, until one has brought the key. The
key is expected meanwhile: readers wait for it as for a writer. A flight has a deadline, and leaves
no reservation behind when it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from ecd.base.clock import Clock
from ecd.core.model.types import Key, SessionId, Ticket
from ecd.live.background import Background
from ecd.live.live import LiveCache
from ecd.live.slow_log import DISK_READ, FETCH, SlowLog, Stage, time_stages
from ecd_proto.contract import Hint, shown

logger = logging.getLogger(__name__)

MAX_JOINED = 8
"""Clients whose hints one flight follows, besides those that it began with."""
MAX_FLIGHTS = 1024
"""Keys on their way here; further keys are misses."""


class Outcome(str, Enum):
    """How a flight ended, or what one of its sources answered; counted by these names."""

    FETCHED = "fetched"
    MISSING = "missing"
    LOCAL = "written_here"
    READ = "read_from_disk"
    UNREACHABLE = "unreachable"
    FAILED = "read_failed"
    CORRUPT = "corrupt"
    STALE = "stale"
    NO_ROOM = "no_room"
    LATE = "late"
    REFUSED = "too_many"
    ERROR = "error"
    MADE = "made_here"
    SLOWER = "slower_than_encoding"
    FULL = "full"
    SILENT = "directory_silent"

    @property
    def is_final(self) -> bool:
        """Whether no other source is asked after it."""
        return self in _FINAL


_FINAL = {Outcome.FETCHED, Outcome.LOCAL, Outcome.READ, Outcome.NO_ROOM}


class Maker(NamedTuple):
    """A session that makes a key which no node has; it waits for another node that makes it."""

    session: SessionId
    wait_s: float


@dataclass
class Flight:
    """One key on its way here."""

    key: Key
    hints: Sequence[Hint]
    is_local: bool  # only this node's own sources are asked
    clock: Clock
    started_s: float
    makers: dict[SessionId, None] = field(default_factory=dict)
    """Sessions that make the key if no node has it, in the order in which they announced it."""
    patience_s: float = 0.0  # from its start, until no maker waits for another node any more
    task: asyncio.Task[None] | None = None
    is_needed: bool = False  # by a client that has not said that it makes the key
    is_patient: bool = False  # a client waits until anybody has the key
    is_pausing: bool = False  # before nodes are asked again: the key is not expected
    is_remote: bool = False  # other nodes are asked
    is_awaited: bool = False  # another node makes the key, or has just made it
    is_waiting: bool = False  # for that node's encode
    is_left: bool = False  # by its last maker, as it waited so
    awaited_s: float = 0.0  # it has waited so: no time of a fetch
    peer: str = ""  # the node that was asked last
    nbytes: int = 0  # as far as known
    impatient: list[tuple[SessionId, Ticket]] = field(default_factory=list)
    """Waits to be ended once the flight waits for another node's encode."""
    joined: list[Sequence[Hint]] = field(default_factory=list)
    """Hints of clients that joined later, to be followed before the flight ends."""
    followed: int = 0  # of those
    deadline: asyncio.TimerHandle | None = None
    until_s: float = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until its deadline."""
        return self.until_s - self.clock.now_s()

    @property
    def patience_left_s(self) -> float:
        """Seconds that a maker still waits for another node's encode, at most; 0 or less: none."""
        return self.started_s + self.patience_s - self.clock.now_s()

    def join(self, maker: Maker | None) -> None:
        """Note a client that wants the key: one that makes it if no node has it, or cannot."""
        if maker is None:
            self.is_needed = True
        else:
            self.makers[maker.session] = None
            waited_s = self.clock.now_s() - self.started_s
            self.patience_s = max(self.patience_s, waited_s + maker.wait_s)

    def join_hints(self, hints: Sequence[Hint]) -> None:
        """Note the hints of a further client: the first one's may be made up."""
        if hints and len(self.joined) < MAX_JOINED:
            self.joined.append(hints)

    def leave(self, session: SessionId) -> None:
        """Note that the session no longer makes the key.

        Without a maker the flight ends, instead of waiting for another node's encode.
        """
        if session in self.makers:
            del self.makers[session]
            if not self.makers and self.is_waiting:
                assert self.task is not None
                self.is_left = True
                self.task.cancel()

    def end_within(self, seconds: float) -> None:
        """Set its deadline, counted from its start."""
        self.until_s = self.started_s + seconds
        if self.deadline is not None:
            self.deadline.cancel()
        assert self.task is not None
        loop = asyncio.get_running_loop()
        self.deadline = loop.call_later(self.left_s, self.task.cancel)

    def let_go(self, live: LiveCache) -> None:
        """End the waits of clients that do not wait for another node's encode."""
        waits, self.impatient = self.impatient, []
        for session, ticket in waits:
            live.cancel_wait(session, ticket)


class MadeElsewhere(Stage):
    """A stage in which a flight waits for the encode of another node."""

    __slots__ = ("_flight",)

    def __init__(self, flight: Flight) -> None:
        super().__init__("made elsewhere", flight.clock)
        self._flight = flight

    def __enter__(self) -> None:
        super().__enter__()
        self._flight.is_waiting = True

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._flight.is_waiting = False
        self._flight.awaited_s += self._clock.now_s() - self._started_s


class Source(Protocol):
    """Where flights look for a key."""

    is_local: bool
    """Whether it is this node's own."""

    def may_have(self, key: Key) -> bool:
        """Whether the source may have the key."""

    async def bring(self, flight: Flight) -> Outcome:
        """Store the key here, if it can be had. May be cancelled at any time."""


class Flights:
    """All flights of one daemon, on its event loop."""

    def __init__(
        self, live: LiveCache, timeout_s: float = 5.0, slow_log: SlowLog | None = None
    ) -> None:
        self.sources: list[Source] = []
        """Sources in the order in which flights ask them."""
        self.outcomes: Counter[Outcome] = Counter(dict.fromkeys(Outcome, 0))
        """Counts of flights since the start."""
        self._live, self._timeout_s = live, timeout_s
        self._slow_log = slow_log or SlowLog(live.clock)
        self._flights: dict[Key, Flight] = {}
        self._background = Background()

    def __len__(self) -> int:
        return len(self._flights)

    def reload(self, timeout_s: float) -> None:
        """Set the deadline of flights that begin from now on."""
        self._timeout_s = timeout_s

    def is_local(self, key: Key) -> bool:
        """Whether a source of this node's own may have the key, and no flight has left them.

        Two nodes would wait for each other's flights otherwise.
        """
        flight = self._flights.get(key)
        if flight is not None and flight.is_remote:
            return False
        return any(source.is_local and source.may_have(key) for source in self.sources)

    def want(
        self,
        key: Key,
        hints: Sequence[Hint] = (),
        maker: Maker | None = None,
        is_local: bool = False,
        is_patient: bool = False,
    ) -> None:
        """Try to bring the key here, unless it is here or on its way.

        The maker, if there is one, makes the key if no node has it. With `is_local` other nodes are
        not asked. With `is_patient` they are asked again, if need be: the client waits until
        anybody has the key.
        """
        flight = self._flights.get(key)
        if flight is not None:
            flight.is_patient |= is_patient
            flight.join_hints(hints)
            flight.is_local = flight.is_local and is_local
            if maker is None or not flight.is_pausing:
                flight.join(maker)
            if flight.is_pausing:
                return
        if not self._live.cache.readers.wants(key):
            return
        if not any(s.may_have(key) for s in self.sources if s.is_local or not is_local):
            return
        if len(self._flights) >= MAX_FLIGHTS:
            self.outcomes[Outcome.REFUSED] += 1
            return
        self._live.cache.readers.expect(key)
        clock = self._live.clock
        flight = self._flights[key] = Flight(key, hints, is_local, clock, clock.now_s())
        flight.join(maker)
        flight.is_patient = is_patient
        flight.task = self._background.spawn(self._fly(flight))

    def waits_for_nobody(self, key: Key, session: SessionId, ticket: Ticket) -> None:
        """End this wait as soon as the flight of the key waits for another node's encode."""
        flight = self._flights.get(key)
        if flight is not None:
            flight.impatient.append((session, ticket))
            if flight.is_awaited:
                flight.let_go(self._live)

    def stop_making(self, session: SessionId, keys: Iterable[Key]) -> None:
        """Note that the session does not make these keys, or no longer makes them."""
        keys = list(keys)
        for key in keys:
            if (flight := self._flights.get(key)) is not None:
                flight.leave(session)
        self._live.stop_making(session, keys)

    def leave_session(self, session: SessionId) -> None:
        """Note that the session, which has ended, makes no key."""
        for flight in self._flights.values():
            flight.leave(session)

    async def close(self) -> None:
        await self._background.close()

    async def _fly(self, flight: Flight) -> None:
        outcome, name = Outcome.LATE, shown(flight.key.mm_hash)
        time_stages()
        flight.end_within(self._timeout_s)
        try:
            outcome = await self._bring(flight)
        except asyncio.CancelledError:
            if flight.is_left:
                outcome = Outcome.MISSING
            else:
                logger.warning("%s was not fetched in time", name, extra=flight.key._asdict())
        except Exception:
            outcome = Outcome.ERROR
            logger.exception("%s was not fetched", name, extra=flight.key._asdict())
        finally:
            assert flight.deadline is not None
            flight.deadline.cancel()
            del self._flights[flight.key]
            self.outcomes[outcome] += 1
            took_s = self._live.clock.now_s() - flight.started_s
            self._slow_log.flight(
                FETCH if flight.is_remote else DISK_READ,
                took_s,
                flight.key,
                flight.nbytes,
                flight.peer,
                outcome.value,
                awaited_s=flight.awaited_s,
            )
            if outcome is Outcome.MADE:
                self._live.make(next(iter(flight.makers)), flight.key)
            else:
                self._live.not_made(flight.key)
            self._live.stop_expecting(flight.key)

    async def _bring(self, flight: Flight) -> Outcome:
        outcome = await self._ask(flight)
        is_over = outcome.is_final or outcome is Outcome.MADE
        has_hints = len(flight.joined) > flight.followed
        if (outcome is Outcome.SLOWER and flight.is_needed) or (has_hints and not is_over):
            outcome = await self._ask(flight)  # somebody came who needs it, or knows where it is
        return outcome

    async def _ask(self, flight: Flight) -> Outcome:
        outcome = Outcome.MISSING
        for source in self.sources:
            if (source.is_local or not flight.is_local) and source.may_have(flight.key):
                flight.is_remote = not source.is_local
                found = await source.bring(flight)
                outcome = found if found is not Outcome.MISSING else outcome
                if outcome.is_final or outcome is Outcome.MADE:
                    break
        return outcome
