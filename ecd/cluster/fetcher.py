"""Brings entries from other nodes, for the flights: which nodes are asked, and how patiently.

A flight asks one node after the other, until one delivers the entry (`deliveries`).

Of a key that no node has, the directory notes that this one makes it, if a client here does. If
another node makes it already, the flight asks that node for a lease, and so waits until it is
stored there. Its deadline is later then by as long as the client waits. It waits no longer than a
client that makes the key is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ecd.cluster.deliveries import Ask, Deliveries
from ecd.cluster.directory.directory import Candidate
from ecd.cluster.peers.admission import Admitted
from ecd.cluster.peers.candidates import Candidates
from ecd.cluster.peers.link import Elsewhere
from ecd.core.model.types import Key
from ecd.live.flights import Flight, Outcome
from ecd.live.live import LiveCache
from ecd.live.slow_log import Stage
from ecd_proto.contract import Hint

MAX_SOURCES = 4
"""Nodes that one flight asks for a lease before it gives up."""
MAX_HINTED = 2
"""Hinted nodes that are asked before the directory's: hints may be wrong."""
MAX_SENT_ON = 16
"""How often a flight may be redirected from a busy node to a node that has the key by then."""
PATIENCE = 0.5
"""The share of a flight's remaining time for which it waits at a node to which it was sent."""
MAX_AWAITED = 256
"""Flights that wait for another node to make their key; beyond, this node makes it."""
PAUSES_S = (0.25, 0.5, 1.0)
"""Pauses, each up to twice as long, before a patient flight asks a busy node again."""
MAX_PAUSING = 256
"""Flights, of 1,024, that may pause: the rest stays free for others. Beyond, none pauses."""


class _Lineup:
    """The nodes that one flight may ask, in their order.

    Where clients come meanwhile, nodes that they name are next; those that only requests name are
    last, as they may be made up, and silent.
    """

    def __init__(self, candidates: Candidates, flight: Flight, first: int) -> None:
        """`first` hinted nodes come before those of the directory."""
        self.is_silent = False  # the directory, which may answer soon
        self._candidates, self._flight, self._first = candidates, flight, first
        self._next: deque[Admitted] = deque()
        self._last: deque[Admitted] = deque()
        self._is_begun = self._has_asked = False
        self._asked: set[str] = set()
        self._joined: set[str] = set()

    async def next(self) -> Admitted | None:
        """The node to ask now; None at the end."""
        if not self._is_begun:
            self._is_begun, self._flight.followed = True, 0
            hinted = await self._admitted(self._flight.hints)
            self._next.extend(hinted[: self._first])
            self._last.extend(hinted[self._first :])
        while True:
            if self._flight.followed < len(self._flight.joined):
                await self._follow(self._flight.joined[self._flight.followed])
            elif self._next:
                node = self._next.popleft()
                if self._is_new(node.hint.node):
                    return node
            elif not self._has_asked:
                await self._ask_directory()
            elif self._last:
                self._next, self._last = self._last, self._next
            else:
                return None

    async def _follow(self, hints: Sequence[Hint]) -> None:
        """Queue the nodes that a further client names."""
        self._flight.followed += 1
        hinted = await self._admitted(hints)
        self._joined.update(each.hint.node for each in hinted[:MAX_SOURCES])
        self._next.extendleft(each for each in hinted if not each.hinted)
        self._last.extend(each for each in hinted if each.hinted)

    async def _ask_directory(self) -> None:
        self._has_asked = True
        with Stage("directory", self._flight.clock):
            known = await self._candidates.known(self._flight.key)
        self.is_silent = known is None
        self._next.extend(known or ())

    async def _admitted(self, hints: Sequence[Hint]) -> Sequence[Admitted]:
        with Stage("directory", self._flight.clock):
            return await self._candidates.hinted(hints)

    def _is_new(self, node: str) -> bool:
        """Whether to ask the node: it was not asked, nor were MAX_SOURCES besides those joined."""
        is_one_more = node in self._joined or len(self._asked - self._joined) < MAX_SOURCES
        if node in self._asked or not is_one_more:
            return False
        self._asked.add(node)
        return True


class Fetcher:
    """The other nodes, as the last source that a flight asks."""

    is_local = False

    def __init__(self, live: LiveCache, candidates: Candidates, deliveries: Deliveries) -> None:
        self.deliveries = deliveries
        self._live, self._candidates = live, candidates
        self._beginning: set[Key] = set()
        self._awaited = self._pausing = 0  # flights

    def is_beginning_to_make(self, key: Key) -> bool:
        """Whether the directory is being told that this node makes the key."""
        return key in self._beginning

    def may_have(self, key: Key) -> bool:  # noqa: ARG002
        return True

    # -- one flight ----------------------------------------------------------------------------

    async def bring(self, flight: Flight) -> Outcome:
        """Bring an entry that a node has or makes, or leave it to its makers; the outcome."""
        outcome = await self._bring_stored(flight)
        if outcome.is_final or outcome is Outcome.SLOWER:
            return outcome
        void = ""
        while flight.makers:
            self._beginning.add(flight.key)
            try:
                with Stage("directory", self._live.clock):
                    other = await self._candidates.begin_making(flight.key, void)
            finally:
                self._beginning.discard(flight.key)
            if other is None:
                return Outcome.MADE if flight.makers else outcome
            self._live.not_made(flight.key)
            left_s = flight.patience_left_s
            if left_s <= 0.0 or self._awaited >= MAX_AWAITED:
                return outcome
            begun_s = self._live.clock.now_s()
            found = await self._wait_for(other.node, flight, left_s)
            if found.is_final or found is Outcome.SLOWER:
                return found
            is_by_time = found is Outcome.MISSING and self._live.clock.now_s() - begun_s >= left_s
            if not (is_by_time and flight.patience_left_s > 0.0):  # of a maker that came meanwhile
                void = other.incarnation
        return outcome

    async def _wait_for(self, maker: Candidate, flight: Flight, wait_s: float) -> Outcome:
        """Wait until another node has made the entry, and bring it; clients here can see the wait.

        Returns the outcome.
        """
        self._awaited += 1
        flight.is_awaited = True
        try:
            flight.end_within(self.deliveries.timeout_s + flight.patience_s)
            self._live.makings.locks.note_elsewhere(flight.key, is_made=True)
            flight.let_go(self._live)
            found = await self._ask(Admitted(maker.hint), flight, made_within_s=wait_s)
            if found is Outcome.STALE:
                found = await self._ask(Admitted(maker.hint), flight)
            return found
        finally:
            self._live.makings.locks.note_elsewhere(flight.key, is_made=False)
            self._awaited -= 1
            flight.is_awaited = False

    async def _bring_stored(self, flight: Flight) -> Outcome:
        """Bring what a node has; the outcome.

        A node that takes no more links has been asked by many, so others have the key soon. A
        directory that has failed of late may answer again. Only clients that wait in any case wait
        for that.
        """
        outcome, may_come = await self._ask_nodes(flight, MAX_HINTED)
        for shortest_s in PAUSES_S:
            if not (may_come and flight.is_patient) or flight.makers:
                break
            if self._pausing >= MAX_PAUSING:
                break
            pause_s = self._live.clock.uniform(shortest_s, 2 * shortest_s)
            if pause_s >= flight.left_s:
                break
            self._pausing += 1
            flight.is_pausing = True
            self._live.stop_expecting(flight.key)  # all others go on without
            try:
                with Stage("pause before asking again", self._live.clock):
                    await self._live.clock.sleep(pause_s)
            finally:
                self._pausing -= 1
                flight.is_pausing = False
            if self._live.cache.views.contains(flight.key):
                return Outcome.LOCAL
            self._live.cache.readers.expect(flight.key)
            outcome, may_come = await self._ask_nodes(flight, 0)
        return outcome

    async def _ask_nodes(self, flight: Flight, first: int) -> tuple[Outcome, bool]:
        """Ask `first` hinted nodes, those of the directory, the other hinted ones.

        The outcome, and whether to ask again is of use: FULL if a node took no more links, SILENT
        if the directory may answer soon. SLOWER if a node would deliver it more slowly than clients
        here encode it.
        """
        outcome, lineup = Outcome.MISSING, _Lineup(self._candidates, flight, first)
        while (node := await lineup.next()) is not None:
            found = await self._ask(node, flight)
            if found.is_final:
                return found, False
            is_kept = outcome in (Outcome.SLOWER, Outcome.FULL)
            if found is Outcome.SLOWER or (found is not Outcome.MISSING and not is_kept):
                outcome = found
        if lineup.is_silent and outcome is Outcome.MISSING:
            return Outcome.SILENT, True
        may_come = outcome is not Outcome.SLOWER and (lineup.is_silent or outcome is Outcome.FULL)
        return outcome, may_come

    async def _ask(
        self, candidate: Admitted, flight: Flight, made_within_s: float | None = None
    ) -> Outcome:
        """Ask one node, and bring what it leases; the outcome.

        With `made_within_s` the node makes the key, and is waited for so long.
        """
        asked, sent_on = candidate, 0
        while True:
            patience_s = None
            if asked is not candidate:  # or one that has stopped takes all the time that is left
                patience_s = max(0.0, flight.left_s * PATIENCE)
            terms = Ask(made_within_s, sent_on < MAX_SENT_ON, patience_s)
            found = await self.deliveries.bring(asked, flight, terms)
            if isinstance(found, Elsewhere):
                made_within_s = None
                with Stage("directory", self._live.clock):
                    named = await self._candidates.hinted([Hint(found.node)])
                if named:
                    asked, sent_on = named[0], sent_on + 1
                    continue
            elif asked is candidate or found.is_final or found is Outcome.SLOWER:
                return found
            asked, sent_on = candidate, MAX_SENT_ON  # it was sent in vain: wait there instead
