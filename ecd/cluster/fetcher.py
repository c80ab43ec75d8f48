"""Brings entries from other nodes: one flight a key, however many wait for it.

A flight asks one node after the other for a lease, reads the entry into a reservation of its own,
verifies it, and commits it as any writer does. Whatever ends it early leaves no reservation here
and no lease there; an extent that a read may still write to is set aside until the read is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from ecd.cluster.background import Background
from ecd.cluster.checksum import fold
from ecd.cluster.directory import Candidate, Found
from ecd.cluster.engine import Engine, ReadFailed, Reading, Source
from ecd.cluster.link import PeerLease, PeerUnavailable
from ecd.cluster.peers import Peers
from ecd.core.cache import Cache
from ecd.core.types import (
    Aborted,
    AlreadyStored,
    BeingWritten,
    Committed,
    Key,
    Reserved,
    SessionId,
    Wakeup,
)
from ecd_proto.contract import MAX_HINTS
from ecd_proto.mapping import Mapping

logger = logging.getLogger(__name__)

MAX_FLIGHTS = 1024
"""Keys on their way here; more are misses."""
MAX_SOURCES = 4
"""Nodes that one flight asks for a lease before it gives up."""
RETRY_PAUSE_S = 0.1
"""Between attempts at a read whose pieces failed more often than connections can have died."""

FETCHED, MISSING, LOCAL = "fetched", "missing", "written here"
UNREACHABLE, FAILED, CORRUPT, STALE = "unreachable", "read failed", "corrupt", "stale"
NO_ROOM, LATE, REFUSED = "no room", "late", "too many"
OUTCOMES = FETCHED, MISSING, LOCAL, UNREACHABLE, FAILED, CORRUPT, STALE, NO_ROOM, LATE, REFUSED
_FINAL = {FETCHED, LOCAL, NO_ROOM}
"""Outcomes of one node after which no other is asked."""


class _Failed(Exception):
    """One node did not deliver; the first argument is the outcome."""


@dataclass(frozen=True)
class _Flight:
    key: Key
    hints: Sequence[str]
    started_s: float


@dataclass
class FetchCounters:
    """What happened since the start."""

    outcomes: Counter[str]
    retries: int = 0
    set_aside: int = 0
    set_aside_bytes: int = 0  # now


class Fetcher:
    """One per daemon, on its event loop."""

    def __init__(
        self,
        cache: Cache,
        session: SessionId,
        memory: Mapping,
        engine: Engine,
        peers: Peers,
        find: Callable[[Sequence[Key]], Awaitable[Found]],
        deliver: Callable[[Iterable[Wakeup]], None],
        observe: Callable[[float, int], None],
        zone: str,
        timeout_s: float,
    ) -> None:
        """`session` owns the reservations; `observe` is told seconds and bytes of each fetch."""
        self.counters = FetchCounters(Counter(dict.fromkeys(OUTCOMES, 0)))
        self._cache, self._session, self._memory = cache, session, memory
        self._engine, self._peers, self._find = engine, peers, find
        self._deliver, self._observe = deliver, observe
        self._zone, self.timeout_s = zone, timeout_s
        self._flights: dict[Key, asyncio.Task[None]] = {}
        self._lookups: dict[Key, asyncio.Future[Sequence[Candidate]]] = {}
        self._background = Background()

    @property
    def flights(self) -> int:
        return len(self._flights)

    def want(self, key: Key, hints: Sequence[str]) -> None:
        """Try to bring the key here, unless it is here or on its way."""
        if not self._cache.wants(key):
            return
        if len(self._flights) >= MAX_FLIGHTS:
            self.counters.outcomes[REFUSED] += 1
            return
        self._cache.expect(key)
        flight = _Flight(key, hints[:MAX_HINTS], time.perf_counter())
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
        finally:
            deadline.cancel()
            del self._flights[flight.key]
            self.counters.outcomes[outcome] += 1
            self._deliver(self._cache.stop_expecting(flight.key))

    async def _bring(self, flight: _Flight) -> str:
        """Ask the hinted nodes, then those that the directory knows; how that went."""
        asked: set[str] = set()
        outcome = MISSING
        for source in (self._hinted, self._looked_up):
            for node in await source(flight):
                if node in asked:
                    continue
                if len(asked) == MAX_SOURCES:
                    return outcome
                asked.add(node)
                try:
                    found = await self._bring_from(node, flight)
                except PeerUnavailable as error:
                    logger.debug("%s: %s", flight.key.mm_hash, error)
                    found = UNREACHABLE
                except _Failed as error:
                    found = str(error)
                    logger.warning("%s from %s: %s", flight.key.mm_hash, node, found)
                if found in _FINAL:
                    return found
                outcome = found if found != MISSING else outcome
        return outcome

    async def _hinted(self, flight: _Flight) -> Sequence[str]:
        return flight.hints

    async def _looked_up(self, flight: _Flight) -> Sequence[str]:
        """Nodes that the directory knows, this zone's first, the least busy first."""
        if not self._lookups:
            asyncio.get_running_loop().call_soon(self._look_up)
        answer = self._lookups[flight.key] = asyncio.get_running_loop().create_future()
        candidates = await answer

        def rank(candidate: Candidate) -> tuple[bool, int, int]:
            elsewhere = bool(self._zone) and candidate.zone != self._zone
            return elsewhere, self._peers.get(candidate.node).in_flight, candidate.load

        return [candidate.node for candidate in sorted(candidates, key=rank)]

    def _look_up(self) -> None:
        """One question to the directory for all that was asked in this turn of the loop."""
        lookups, self._lookups = self._lookups, {}

        async def answer() -> None:
            found = await self._find(list(lookups))
            for key, waiting in lookups.items():
                if not waiting.done():
                    waiting.set_result(found.get(key, ()))

        self._background.spawn(answer())

    async def _bring_from(self, node: str, flight: _Flight) -> str:
        """Raises PeerUnavailable and _Failed."""
        link = await self._peers.link(node)
        lease = await link.lease(flight.key, self.timeout_s)
        if lease is None:
            return MISSING
        try:
            now_s = time.monotonic()
            outcome = self._cache.reserve(self._session, flight.key, lease.content, now_s)
            match outcome:
                case Reserved():
                    await self._copy(lease, outcome)
                    seconds = time.perf_counter() - flight.started_s
                    self._observe(seconds, lease.content.nbytes)
                    return FETCHED
                case AlreadyStored() | BeingWritten():
                    return LOCAL
                case _:
                    return NO_ROOM
        finally:
            link.release(lease.id)

    # -- one entry -----------------------------------------------------------------------------

    async def _copy(self, lease: PeerLease, reserved: Reserved) -> None:
        """Read, verify and commit what was leased. Raises _Failed."""
        peer = lease.link.peer
        reading: Reading | None = None
        committed = False
        try:
            while True:
                reading = self._read(lease, reserved)
                either = reading.ended, lease.link.gone
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not lease.link.alive:
                    raise _Failed(FAILED)
                if lease.ran_out:
                    peer.last_error = "its lease ran out during a read"
                    raise _Failed(STALE)
                try:
                    pieces = reading.ended.result()
                    break
                except ReadFailed as error:
                    peer.last_error = str(error)
                await asyncio.sleep(RETRY_PAUSE_S)
            if fold(pieces) != lease.checksum:
                peer.last_error = f"sent {reserved.extent.nbytes} bytes that are not the entry's"
                raise _Failed(CORRUPT)
            outcome = self._cache.commit(
                self._session, reserved.entry, time.monotonic(), lease.checksum
            )
            committed = True
            assert isinstance(outcome, Committed)
            self._deliver(outcome.woken)
        finally:
            if not committed:
                self._give_up(reserved, reading)
        peer.reads += 1
        peer.read_bytes += reserved.extent.nbytes

    def _read(self, lease: PeerLease, reserved: Reserved) -> Reading:
        peer, described = lease.link.peer, lease.link.description
        source = Source(
            described.engine,
            lease.address,
            reserved.extent.nbytes,
            described.identity_address,
            bytes.fromhex(described.incarnation),
        )
        reading = self._engine.read(source, self._memory.address + reserved.extent.offset)
        peer.in_flight += 1

        def over(ended: asyncio.Future[list[int]]) -> None:
            ended.exception()
            peer.in_flight -= 1
            peer.failed_reads += reading.failures
            self.counters.retries += reading.failures

        reading.ended.add_done_callback(over)
        return reading

    def _give_up(self, reserved: Reserved, reading: Reading | None) -> None:
        """The reservation comes to nothing; its extent is free when no read can write to it."""
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
