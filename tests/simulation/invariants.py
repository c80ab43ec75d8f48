"""What must hold in every daemon of a simulated world whenever time moves."""

from __future__ import annotations

from ecd.base.wire import MAX_WAIT_S
from ecd.core.model.states import EntryState
from ecd.live.flights import Outcome
from simulation.daemon import Daemon
from simulation.world import Run

LATE_S = 0.05
"""How much longer than its deadline a flight may take: turns of the loop."""


class Watch:
    """Checks the daemons in which something has changed since the last look."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[str, tuple[object, ...]] = {}
        self.figures: tuple[object, ...] = ()

    def check(self) -> None:
        self.figures = ()
        for daemon in self._run.daemons:
            if daemon.alive:
                figures = _figures(daemon)
                self.figures += figures
                if self._seen.get(daemon.incarnation) != figures:
                    self._seen[daemon.incarnation] = figures
                    self._check_cache(daemon)
                self._check_turns(daemon)
                if len(daemon.flights):
                    self._check_flights(daemon)

    def _check_cache(self, daemon: Daemon) -> None:
        try:
            daemon.cache.check()
        except AssertionError as error:
            self._fail(daemon, f"the cache does not agree with itself: {error!r}")
        deliveries, flights = daemon.deliveries, daemon.flights
        disk = daemon.disk
        sources = {deliveries._session, None if disk is None else disk.reads._session}
        aside_bytes = 0
        for entry in daemon.cache._entries:
            if entry.state is EntryState.ORPHANED and entry.writer == deliveries._session:
                aside_bytes += entry.content.nbytes
            is_reserved = entry.state is EntryState.RESERVED and entry.writer in sources
            if is_reserved and entry.key not in flights._flights:
                self._fail(daemon, f"{entry.mm_hash} is reserved for a flight that is over")
        if aside_bytes != deliveries.counters.set_aside_bytes:
            self._fail(daemon, f"{aside_bytes} bytes are set aside, not as many as counted")
        outcomes = flights.outcomes
        if outcomes[Outcome.CORRUPT] and not self._run.may_corrupt:
            self._fail(daemon, "a flight took other bytes for the entry's, and blames a good peer")
        if outcomes[Outcome.ERROR]:
            self._fail(daemon, "a flight ended with an error of the daemon's own")
        if daemon.watched.wrong:
            self._fail(daemon, daemon.watched.wrong)

    def _check_turns(self, daemon: Daemon) -> None:
        """No more nodes read an entry than may, and none waits but for others, or its own read."""
        serving, waiting = daemon.peers.serving, 0
        most = daemon.config.readers_per_entry
        for entry, line in serving.lines.items():
            waiting += len(line.waiting)
            if len(line.reading) > most:
                self._fail(daemon, f"{len(line.reading)} nodes read entry {entry} at a time")
            if line.waiting.keys() - line.reading.keys() and len(line.reading) < most:
                self._fail(daemon, f"a node waits for entry {entry}, which nobody reads")
        if waiting != serving.waiting:
            self._fail(daemon, f"{waiting} nodes wait for turns, not as many as counted")

    def _check_flights(self, daemon: Daemon) -> None:
        now_s = self._run.loop.now_s
        most_s = daemon.config.fetch_timeout_s + LATE_S
        awaited = set()
        for flight in daemon.flights._flights.values():
            late_s = most_s + min(flight.patience_s, MAX_WAIT_S)
            if now_s - flight.started_s - daemon.paused_s > late_s:
                self._fail(daemon, f"the flight of {flight.key.mm_hash} is past its deadline")
            if flight.is_awaited:
                awaited.add(flight.key)
        if awaited != daemon.files.made_elsewhere:
            self._fail(daemon, "clients are not told the truth about what other nodes make")

    def _fail(self, daemon: Daemon, what: str) -> None:
        self._run.fail(f"{daemon.place.node}: {what}")


def _figures(daemon: Daemon) -> tuple[object, ...]:
    """What changes whenever the cache or the fetcher does."""
    cache, readers = daemon.cache, daemon.cache.readers
    return (
        cache._entries._last_id,
        daemon.pool.allocator.used_bytes,
        daemon.pool.reserved_bytes,
        readers.leases._last,
        len(readers.leases),
        readers.waits._last,
        len(readers.waits),
        daemon.deliveries.counters.set_aside_bytes,
        sum(daemon.flights.outcomes.values()),
    )
