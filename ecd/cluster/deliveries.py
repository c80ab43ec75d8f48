"""One node's entry brought into a reservation here, for the fetcher.

The node is asked for a lease, the entry is read into the reservation, verified, and committed as
any writer does. If a hint says where a small entry lies, it is read speculatively, while the lease
is asked for: the bytes count only if that place is then leased, and if their checksum is right.
Where nothing says where it lies, a small entry comes with its lease. A delivery that ends early
leaves no reservation here and no lease there. An extent that a read may still write to is set aside
until the read is over.

An entry that takes longer to read, at the peer's measured rate, than to encode is left to the
clients here, if all that want it can make it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ecd.base.checksum import digests, fold
from ecd.base.wire import BYTES_WITH_LEASE, SPECULATIVE_BYTES
from ecd.cluster.peers.admission import Admitted
from ecd.cluster.peers.candidates import Candidates
from ecd.cluster.peers.link import Elsewhere, Link, PeerLease, Question
from ecd.cluster.peers.peer import PeerFull, PeerUnavailable
from ecd.cluster.transport.pool_reads import PoolReads
from ecd.cluster.transport.reads import ReadFailed, Reading
from ecd.core.model.outcomes import (
    AlreadyStored,
    BeingWritten,
    Committed,
    LimitReached,
    Reservation,
    Reserved,
)
from ecd.core.model.types import Content, Key
from ecd.live.background import within
from ecd.live.flights import Flight, MadeElsewhere, Outcome
from ecd.live.live import LiveCache
from ecd.live.slow_log import Stage, waited
from ecd.live.turns import Pace, Turns
from ecd_proto.contract import Hint, shown

logger = logging.getLogger(__name__)

READ_FIRST_BYTES = 1 << 20
"""Entries of this size or more are read before the peer is asked: reading takes longer."""
TURNS_TO_ASK = 2
"""Turns of the event loop until a question to the peer is on its way."""
RETRY_PAUSE_S = 0.1
"""Pause before a read is tried again, after more failures than connections that can have died."""


class _Failed(Exception):
    """One node did not deliver."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class _Place(NamedTuple):
    """Where a hint says that an entry lies in the peer's memory."""

    address: int
    nbytes: int


def _place(link: Link, hint: Hint) -> _Place | None:
    pools = {pool.pool: pool for pool in link.description.pools}
    pool = pools.get(hint.pool)
    if pool is None or hint.offset + hint.nbytes > pool.nbytes:
        return None
    return _Place(pool.address + hint.offset, hint.nbytes)


@dataclass
class _Arrival:
    """A reservation, and the read from the peer's memory that fills it."""

    reserved: Reserved
    address: int
    asked_s: float  # when its lease was asked for
    reading: Reading | None = None

    def is_of(self, lease: PeerLease) -> bool:
        read = self.address, self.reserved.extent.nbytes
        return read == (lease.address, lease.content.nbytes)


@dataclass
class FetchCounters:
    """Counts since the start."""

    retries: int = 0
    speculative: int = 0  # reads begun before their lease
    speculative_used: int = 0
    set_aside: int = 0
    set_aside_bytes: int = 0  # now


class Ask(NamedTuple):
    """How one node is asked for a lease."""

    made_within_s: float | None
    """The node makes the key; how long to wait for that."""
    or_elsewhere: bool
    """The node may name another, to be asked in its place."""
    patience_s: float | None
    """Longest wait for the lease."""


class Deliveries:
    """Brings entries, each from one node into a reservation of this one; one per daemon."""

    def __init__(
        self,
        live: LiveCache,
        reads: PoolReads,
        candidates: Candidates,
        observe: Callable[[float, int], None],
        timeout_s: float,
    ) -> None:
        """`observe` is told the seconds and bytes of each entry that is brought.

        The seconds are without the wait for its encode.
        """
        self.counters = FetchCounters()
        self.timeout_s = timeout_s
        self._live, self._reads, self._candidates = live, reads, candidates
        self._observe = observe
        session = live.cache.open_session()  # it owns the reservations
        assert not isinstance(session, LimitReached)
        self._session = session
        self._speculative: set[Key] = set()
        self._turns = Turns(live.clock)

    def is_speculative(self, key: Key) -> bool:
        """Whether the key is being read without a lease: two nodes may do so from each other."""
        return key in self._speculative

    async def bring(self, candidate: Admitted, flight: Flight, terms: Ask) -> Outcome | Elsewhere:
        """Bring the flight's entry from this node, if it leases it, or the node that it names."""
        try:
            return await self._bring(candidate, flight, terms)
        except PeerUnavailable as error:
            logger.debug("%s: %s", shown(flight.key.mm_hash), error)
            return Outcome.FULL if isinstance(error, PeerFull) else Outcome.UNREACHABLE
        except _Failed as error:
            name, node = shown(flight.key.mm_hash), candidate.hint.node
            about = {**flight.key._asdict(), "peer": node}
            logger.warning("%s from %s: %s", name, node, error.outcome.value, extra=about)
            return error.outcome

    async def _bring(self, candidate: Admitted, flight: Flight, terms: Ask) -> Outcome | Elsewhere:
        """As `bring`. Raises PeerUnavailable and _Failed."""
        flight.peer = candidate.hint.node
        with Stage("connecting", self._live.clock):
            link = await self._candidates.link(candidate)
        place = _place(link, candidate.hint)
        bytes_up_to = 0 if candidate.hint.nbytes else BYTES_WITH_LEASE
        if_made = terms.made_within_s is not None
        if if_made and not flight.makers:
            return Outcome.MISSING  # they left while it connected
        bounds_s = (terms.patience_s, terms.made_within_s, self.timeout_s)
        wait_s = next(each for each in bounds_s if each is not None)
        question = link.ask_lease(
            flight.key, wait_s, bytes_up_to, if_made=if_made, or_elsewhere=terms.or_elsewhere
        )
        arrival: _Arrival | None = None
        is_stored = False
        try:
            arrival = await self._read_speculatively(link, place, flight, question.asked_s)
            with MadeElsewhere(flight) if if_made else Stage("lease", self._live.clock):
                lease = await self._lease(link, question, terms.patience_s)
            self._speculative.discard(flight.key)
            if isinstance(lease, Elsewhere):
                return lease
            if lease is None or self._live.cache.retention.is_expired(
                flight.key.namespace, lease.age_s
            ):
                return Outcome.MISSING
            if if_made and lease.is_late:
                return Outcome.STALE
            content = lease.content
            flight.nbytes = content.nbytes
            if place == _Place(lease.address, content.nbytes):
                link.peer.prove_hint()
            if arrival is not None and not arrival.is_of(lease):
                self._give_up(arrival)
                arrival = None
            if arrival is None:
                if self._is_slower(link, flight, lease):
                    return Outcome.SLOWER
                outcome = await self._reserve(flight.key, content)
                if isinstance(outcome, AlreadyStored | BeingWritten):
                    return Outcome.LOCAL
                if not isinstance(outcome, Reserved):
                    return Outcome.NO_ROOM
                arrival = _Arrival(outcome, lease.address, question.asked_s)
            await self._take_in(arrival, link, lease)
            if self._live.cache.retention.is_expired(flight.key.namespace, lease.age_s):
                return Outcome.MISSING  # its time ended on the way
            self._commit(arrival, link, lease)
            took_s = self._live.clock.now_s() - flight.started_s - flight.awaited_s
            self._observe(took_s, content.nbytes)
            arrival, is_stored = None, True
            return Outcome.FETCHED
        finally:
            self._speculative.discard(flight.key)
            if arrival is not None:
                self._give_up(arrival)
            link.end(question, is_stored)

    @staticmethod
    async def _lease(
        link: Link, question: Question, patience_s: float | None
    ) -> PeerLease | Elsewhere | None:
        """As `Link.lease`, for at most `patience_s`. Raises PeerUnavailable then, too."""
        if patience_s is None:
            return await link.lease(question)
        try:
            return await within(patience_s, link.lease(question))
        except asyncio.TimeoutError:
            raise PeerUnavailable(f"{link.peer.node} has not answered yet") from None

    # -- one entry -----------------------------------------------------------------------------

    async def _read_speculatively(
        self, link: Link, place: _Place | None, flight: Flight, asked_s: float
    ) -> _Arrival | None:
        """Begin to read the hinted place: of a small entry once the question has gone out.

        An entry that might be left to be encoded is leased first. Nothing is evicted: whoever
        sends requests may have made the place up.
        """
        key = flight.key
        if place is None or not 0 < place.nbytes <= SPECULATIVE_BYTES:
            return None
        if not flight.is_needed and link.peer.is_slow(place.nbytes):
            return None
        if not link.peer.read_ahead(place.nbytes):
            return None
        is_first = place.nbytes >= READ_FIRST_BYTES
        for _ in range(0 if is_first else TURNS_TO_ASK):
            await self._live.clock.sleep(0)
        unknown = Content("uint8", (place.nbytes,), place.nbytes)
        pace = await self._pace()
        outcome = await self._live.reserve_spare(self._session, key, unknown, pace)
        if not isinstance(outcome, Reserved):
            return None
        self.counters.speculative += 1
        self._speculative.add(key)
        arrival = _Arrival(outcome, place.address, asked_s)
        self._begin(arrival, link)
        if is_first:
            self._live.clock.block(0)  # or the thread that reads waits for the question to go out
        return arrival

    def _is_slower(self, link: Link, flight: Flight, lease: PeerLease) -> bool:
        """Whether encoding the entry is quicker, for the clients that want it, than reading it."""
        if flight.is_needed or lease.data:
            return False
        known_s = self._live.cache.views.encode_s(flight.key, lease.content)
        cost_s = lease.content.cost_s if known_s is None else known_s
        return cost_s > 0.0 and link.peer.is_slower(lease.content.nbytes, cost_s)

    async def _reserve(self, key: Key, content: Content) -> Reservation:
        return await self._live.reserve(self._session, key, content, await self._pace())

    async def _pace(self) -> Pace:
        """The pace of a reservation, in its turn: one message may answer a thousand flights."""
        with Stage("turns", self._live.clock):
            await self._turns.any()
        return self._turns.pace()

    async def _take_in(self, arrival: _Arrival, link: Link, lease: PeerLease) -> None:
        """Read and verify what was leased; to be committed before another turn. Raises _Failed."""
        peer, reserved = link.peer, arrival.reserved
        is_speculative = arrival.reading is not None
        if lease.data and not is_speculative:
            if lease.ran_out:  # the peer may have hashed and sent what took the entry's place
                peer.blame("its lease had run out when it came")
                raise _Failed(Outcome.STALE)
            if fold(digests(memoryview(lease.data))) != lease.checksum:
                raise self._corrupt(arrival, link)
            self._reads.fill(reserved.extent, lease.data)
            return
        while True:
            if arrival.reading is None:
                self._begin(arrival, link)
            assert arrival.reading is not None
            ended = arrival.reading.ended
            if not ended.done():
                await self._wait_for_read(arrival.reading, link)
            if not link.alive:
                raise _Failed(Outcome.FAILED)
            if lease.ran_out:
                peer.blame("its lease ran out during a read")
                raise _Failed(Outcome.STALE)
            try:
                if fold(ended.result()) == lease.checksum:
                    break
                if not is_speculative:
                    raise self._corrupt(arrival, link)
                # The speculative read came before the peer had written all of it.
            except ReadFailed as error:
                peer.blame(error)
                with Stage("pause after a failure", self._live.clock):
                    await self._live.clock.sleep(RETRY_PAUSE_S)
            arrival.reading, is_speculative = None, False
        self.counters.speculative_used += is_speculative

    async def _wait_for_read(self, reading: Reading, link: Link) -> None:
        """Wait until the read is over, or the link; time its turn in the queue apart."""
        waits_s = self._live.clock.now_s()
        try:
            await asyncio.wait((reading.ended, link.gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            now_s = self._live.clock.now_s()
            begun_s = min(now_s, max(waits_s, reading.read.begun_s or now_s))
            waited("read queue", begun_s - waits_s)
            waited("reading", now_s - begun_s)

    def _commit(self, arrival: _Arrival, link: Link, lease: PeerLease) -> None:
        reserved = arrival.reserved
        read_s = link.peer.read_s(reserved.extent.nbytes)
        refetch_s = inf if read_s is None else read_s
        outcome = self._live.commit(
            self._session,
            reserved.entry,
            lease.checksum,
            lease.content,
            refetch_s,
            lease.age_s,
            lease.is_handover,
        )
        assert isinstance(outcome, Committed)
        link.peer.brought(reserved.extent.nbytes)

    def _corrupt(self, arrival: _Arrival, link: Link) -> _Failed:
        link.peer.blame(f"sent {arrival.reserved.extent.nbytes} bytes that are not the entry's")
        return _Failed(Outcome.CORRUPT)

    def _begin(self, arrival: _Arrival, link: Link) -> None:
        reading = arrival.reading = self._reads.begin(
            link.description, arrival.address, arrival.reserved.extent, arrival.asked_s
        )
        nbytes = arrival.reserved.extent.nbytes
        link.peer.read_began(nbytes)

        def over(ended: asyncio.Future[list[int]]) -> None:
            is_whole = not ended.cancelled() and ended.exception() is None
            link.peer.read_ended(nbytes, reading.failures, is_whole)
            self.counters.retries += reading.failures

        reading.ended.add_done_callback(over)

    def _give_up(self, arrival: _Arrival) -> None:
        """Give the reservation up; its extent is free once no read can write to it."""
        reserved, reading = arrival.reserved, arrival.reading
        if reading is None or reading.ended.done():
            self._live.abort(self._session, reserved.entry)
        else:
            self._live.abandon(self._session, reserved.entry)
            self.counters.set_aside += 1
            self.counters.set_aside_bytes += reserved.extent.nbytes
            reading.give_up()
            reading.ended.add_done_callback(lambda _: self._reclaim(reserved))

    def _reclaim(self, reserved: Reserved) -> None:
        self.counters.set_aside_bytes -= reserved.extent.nbytes
        self._live.cache.reclaim(self._session, reserved.entry)
