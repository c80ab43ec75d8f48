"""Brings entries from other nodes: one flight a key, however many wait for it.

A flight asks one node after the other for a lease, reads the entry into a reservation of its own,
verifies it, and commits it as any writer does. A small entry is read while the lease is asked for,
where a hint says where it lies: what arrives counts only if that is the place that is then leased,
and if it adds up. Whatever ends a flight early leaves no reservation here and no lease there; an
extent that a read may still write to is set aside until the read is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from ecd.cluster.admission import Admitted
from ecd.cluster.background import Background
from ecd.cluster.checksum import fold
from ecd.cluster.directory import Candidate, Found
from ecd.cluster.lineup import Reading, Source
from ecd.cluster.link import Link, PeerLease, PeerUnavailable
from ecd.cluster.peers import Peers
from ecd.cluster.reads import ReadFailed, Reads
from ecd.core.cache import Cache
from ecd.core.types import (
    Aborted,
    AlreadyStored,
    BeingWritten,
    Committed,
    Content,
    Key,
    MakingRoom,
    Reservation,
    Reserved,
    SessionId,
    Wakeup,
)
from ecd.turns import Turns
from ecd_proto.contract import Hint
from ecd_proto.mapping import Mapping

logger = logging.getLogger(__name__)

MAX_FLIGHTS = 1024
"""Keys on their way here; more are misses."""
MAX_SOURCES = 4
"""Nodes that one flight asks for a lease before it gives up."""
MAX_HINTED = 2
"""Of these, those of hints that come before the directory's: whoever hints may be wrong."""
AHEAD_BYTES = 8 << 20
"""Up to here an entry is read before it is leased: beyond, the lease takes a tenth of the time."""
READ_FIRST_BYTES = 1 << 20
"""From here on to read takes longer than to lease, and is begun before the question goes out."""
TURNS_TO_ASK = 2
"""Turns of the event loop in which a question goes out."""
RETRY_PAUSE_S = 0.1
"""Between attempts at a read whose pieces failed more often than connections can have died."""

FETCHED, MISSING, LOCAL = "fetched", "missing", "written here"
UNREACHABLE, FAILED, CORRUPT, STALE = "unreachable", "read failed", "corrupt", "stale"
NO_ROOM, LATE, REFUSED, ERROR = "no room", "late", "too many", "error"
OUTCOMES = (
    *(FETCHED, MISSING, LOCAL, UNREACHABLE, FAILED, CORRUPT, STALE),
    *(NO_ROOM, LATE, REFUSED, ERROR),
)
_FINAL = {FETCHED, LOCAL, NO_ROOM}
"""Outcomes of one node after which no other is asked."""


class _Failed(Exception):
    """One node did not deliver; the first argument is the outcome."""


@dataclass(frozen=True)
class _Flight:
    key: Key
    hints: Sequence[Hint]
    started_s: float


@dataclass
class _Arrival:
    """A reservation, and what is being read into it from which of the peer's addresses."""

    reserved: Reserved
    address: int
    asked_s: float  # when its lease was asked for
    reading: Reading | None = None

    def is_of(self, lease: PeerLease) -> bool:
        read = self.address, self.reserved.extent.nbytes
        return read == (lease.address, lease.content.nbytes)


@dataclass
class FetchCounters:
    """What happened since the start."""

    outcomes: Counter[str]
    retries: int = 0
    ahead: int = 0  # reads begun before their lease
    ahead_used: int = 0
    set_aside: int = 0
    set_aside_bytes: int = 0  # now


class Fetcher:
    """One per daemon, on its event loop."""

    def __init__(
        self,
        cache: Cache,
        session: SessionId,
        memory: Mapping,
        reads: Reads,
        peers: Peers,
        admit: Callable[[Sequence[Hint]], Awaitable[Sequence[Admitted]]],
        find: Callable[[Sequence[Key]], Awaitable[Found]],
        deliver: Callable[[Iterable[Wakeup]], None],
        observe: Callable[[float, int], None],
        zone: str,
        timeout_s: float,
    ) -> None:
        """`session` owns the reservations; `observe` is told seconds and bytes of each fetch."""
        self.counters = FetchCounters(Counter(dict.fromkeys(OUTCOMES, 0)))
        self._cache, self._session, self._memory = cache, session, memory
        self._reads, self._peers, self._admit, self._find = reads, peers, admit, find
        self._deliver, self._observe = deliver, observe
        self._zone, self.timeout_s = zone, timeout_s
        self.guessed: set[Key] = set()
        """Read before they are leased: two nodes may guess the same key at each other."""
        self._flights: dict[Key, asyncio.Task[None]] = {}
        self._lookups: dict[Key, asyncio.Future[Sequence[Candidate]]] = {}
        self._turns = Turns()
        self._background = Background()

    @property
    def flights(self) -> int:
        return len(self._flights)

    def want(self, key: Key, hints: Sequence[Hint]) -> None:
        """Try to bring the key here, unless it is here or on its way.

        Hints are from whoever sends requests: those that `admit` lets pass are followed.
        """
        if not self._cache.wants(key):
            return
        if len(self._flights) >= MAX_FLIGHTS:
            self.counters.outcomes[REFUSED] += 1
            return
        self._cache.expect(key)
        flight = _Flight(key, hints, time.perf_counter())
        self._flights[key] = self._background.spawn(self._fly(flight))

    async def close(self) -> None:
        await self._background.close()

    # -- one flight ----------------------------------------------------------------------------

    async def _fly(self, flight: _Flight) -> None:
        outcome = LATE
        task = asyncio.current_task()
        assert task is not None
        deadline = asyncio.get_running_loop().call_later(self.timeout_s, task.cancel)
        try:
            outcome = await self._bring(flight)
        except asyncio.CancelledError:
            logger.warning("%s was not fetched in time", flight.key.mm_hash)
        except Exception:
            outcome = ERROR
            logger.exception("%s was not fetched", flight.key.mm_hash)
        finally:
            deadline.cancel()
            del self._flights[flight.key]
            self.counters.outcomes[outcome] += 1
            self._deliver(self._cache.stop_expecting(flight.key))

    async def _bring(self, flight: _Flight) -> str:
        """Ask the hinted nodes, then those that the directory knows; how that went."""
        asked: set[str] = set()
        outcome = MISSING
        hints = await self._admit(flight.hints)
        for some in (hints[:MAX_HINTED], None, hints[MAX_HINTED:]):
            for hint, hinted in await self._looked_up(flight) if some is None else some:
                if hint.node in asked:
                    continue
                if len(asked) == MAX_SOURCES:
                    return outcome
                asked.add(hint.node)
                try:
                    found = await self._bring_from(hint, hinted, flight)
                except PeerUnavailable as error:
                    logger.debug("%s: %s", flight.key.mm_hash, error)
                    found = UNREACHABLE
                except _Failed as error:
                    found = str(error)
                    logger.warning("%s from %s: %s", flight.key.mm_hash, hint.node, found)
                if found in _FINAL:
                    return found
                outcome = found if found != MISSING else outcome
        return outcome

    async def _looked_up(self, flight: _Flight) -> Sequence[Admitted]:
        """Nodes that the directory knows, this zone's first, the least busy first."""
        if not self._lookups:
            asyncio.get_running_loop().call_soon(self._look_up)
        answer = self._lookups[flight.key] = asyncio.get_running_loop().create_future()
        candidates = await answer

        def rank(candidate: Candidate) -> tuple[bool, int, int]:
            elsewhere = bool(self._zone) and candidate.zone != self._zone
            return elsewhere, self._peers.in_flight(candidate.hint.node), candidate.load

        return [Admitted(candidate.hint) for candidate in sorted(candidates, key=rank)]

    def _look_up(self) -> None:
        """One question to the directory for all that was asked in this turn of the loop."""
        lookups, self._lookups = self._lookups, {}

        async def answer() -> None:
            found: Found = {}
            try:
                found = await self._find(list(lookups))
            finally:
                for key, waiting in lookups.items():
                    if not waiting.done():
                        waiting.set_result(found.get(key, ()))

        self._background.spawn(answer())

    async def _bring_from(self, hint: Hint, hinted: bool, flight: _Flight) -> str:
        """Raises PeerUnavailable and _Failed."""
        link = await self._peers.link(hint.node, hinted)
        question = link.ask_lease(flight.key, self.timeout_s)
        arrival: _Arrival | None = None
        try:
            arrival = await self._read_ahead(link, hint, flight.key, question.asked_s)
            lease = await link.lease(question)
            self.guessed.discard(flight.key)
            if lease is None:
                return MISSING
            content = lease.content
            if arrival is not None and not arrival.is_of(lease):
                self._give_up(arrival)
                arrival = None
            if arrival is None:
                outcome = await self._reserve(flight.key, content)
                if isinstance(outcome, AlreadyStored | BeingWritten):
                    return LOCAL
                if not isinstance(outcome, Reserved):
                    return NO_ROOM
                arrival = _Arrival(outcome, lease.address, question.asked_s)
            await self._take_in(arrival, link, lease)
            self._observe(time.perf_counter() - flight.started_s, content.nbytes)
            arrival = None
            return FETCHED
        finally:
            self.guessed.discard(flight.key)
            if arrival is not None:
                self._give_up(arrival)
            link.end(question)

    # -- one entry -----------------------------------------------------------------------------

    async def _read_ahead(
        self, link: Link, hint: Hint, key: Key, asked_s: float
    ) -> _Arrival | None:
        """Begin to read what the hint says: a small entry once the node has been asked."""
        described = link.description
        fits = hint.offset + hint.nbytes <= described.pool_bytes
        if not (fits and 0 < hint.nbytes <= AHEAD_BYTES):
            return None
        is_first = hint.nbytes >= READ_FIRST_BYTES
        for _ in range(0 if is_first else TURNS_TO_ASK):
            await asyncio.sleep(0)
        unknown = Content("uint8", (hint.nbytes,), hint.nbytes)
        outcome = await self._reserve(key, unknown)
        if not isinstance(outcome, Reserved):
            return None
        self.counters.ahead += 1
        self.guessed.add(key)
        arrival = _Arrival(outcome, described.pool_address + hint.offset, asked_s)
        self._begin(arrival, link)
        if is_first:
            time.sleep(0)  # or the thread that reads waits until the question has gone out
        return arrival

    async def _reserve(self, key: Key, content: Content) -> Reservation:
        """In turns: a thousand flights may have been answered in one message."""
        await self._turns.any()
        pace = self._turns.pace()
        with self._cache.reserving() as look:
            await pace.through(look)
            while True:
                now_s = time.monotonic()
                outcome = self._cache.reserve(self._session, key, content, now_s, looked=True)
                if not isinstance(outcome, MakingRoom):
                    return outcome
                await pace.turn()

    async def _take_in(self, arrival: _Arrival, link: Link, lease: PeerLease) -> None:
        """Read, verify and commit what was leased. Raises _Failed."""
        peer, reserved = link.peer, arrival.reserved
        ahead = arrival.reading is not None
        while True:
            if arrival.reading is None:
                self._begin(arrival, link)
            assert arrival.reading is not None
            ended = arrival.reading.ended
            if not ended.done():
                await asyncio.wait((ended, link.gone), return_when=asyncio.FIRST_COMPLETED)
            if not link.alive:
                raise _Failed(FAILED)
            if lease.ran_out:
                peer.last_error = "its lease ran out during a read"
                raise _Failed(STALE)
            try:
                if fold(ended.result()) == lease.checksum:
                    break
                if not ahead:
                    nbytes = reserved.extent.nbytes
                    peer.last_error = f"sent {nbytes} bytes that are not the entry's"
                    raise _Failed(CORRUPT)
                # It was not all there as yet.
            except ReadFailed as error:
                peer.last_error = str(error)
                await asyncio.sleep(RETRY_PAUSE_S)
            arrival.reading, ahead = None, False
        self.counters.ahead_used += ahead
        outcome = self._cache.commit(
            self._session, reserved.entry, time.monotonic(), lease.checksum, lease.content
        )
        assert isinstance(outcome, Committed)
        self._deliver(outcome.woken)
        peer.reads += 1
        peer.read_bytes += reserved.extent.nbytes

    def _begin(self, arrival: _Arrival, link: Link) -> None:
        peer, described, extent = link.peer, link.description, arrival.reserved.extent
        source = Source(
            described.engine,
            arrival.address,
            extent.nbytes,
            described.identity_address,
            bytes.fromhex(described.incarnation),
        )
        target = self._memory.address + extent.offset
        reading = self._reads.read(source, target, arrival.asked_s)
        peer.in_flight += 1

        def over(ended: asyncio.Future[list[int]]) -> None:
            ended.exception()
            peer.in_flight -= 1
            peer.failed_reads += reading.failures
            self.counters.retries += reading.failures

        reading.ended.add_done_callback(over)
        arrival.reading = reading

    def _give_up(self, arrival: _Arrival) -> None:
        """The reservation comes to nothing; its extent is free when no read can write to it."""
        reserved, reading = arrival.reserved, arrival.reading
        if reading is None or reading.ended.done():
            outcome = self._cache.abort(self._session, reserved.entry)
        else:
            outcome = self._cache.abandon(self._session, reserved.entry)
            self.counters.set_aside += 1
            self.counters.set_aside_bytes += reserved.extent.nbytes
            reading.give_up()
            reading.ended.add_done_callback(lambda _: self._reclaim(reserved))
        if isinstance(outcome, Aborted):
            self._deliver(outcome.woken)

    def _reclaim(self, reserved: Reserved) -> None:
        self.counters.set_aside_bytes -= reserved.extent.nbytes
        self._cache.reclaim(self._session, reserved.entry)
