"""Prometheus metrics: the core's figures read at scrape, call latencies, and the loop's lag."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ecd.base.clock import Clock
from ecd.core.counters import IDLE_BOUNDS_S, SIZE_BOUNDS_BYTES
from ecd.live.slow_log import DISK_READ, FETCH
from ecd.ops.http_port import HttpPort, by_path
from ecd_proto.contract import pool_names
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

LATENCY_BUCKETS_S = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 5.0),
)
LAG_PERIOD_S = 0.25
OTHERS = "other"
"""The label of all namespaces that have none of their own."""
Loop = Callable[[], asyncio.AbstractEventLoop | None]
"""Gives the daemon's event loop, while it runs."""
SCRAPE_S = 1.0


class MetricsError(Exception):
    """The metrics port cannot be had; the message says what to change."""


Figures = TypeVar("Figures")


class _OnLoop(Generic[Figures]):
    """Figures for the scraper's thread, taken on the event loop: nothing changes meanwhile.

    If the loop does not come round within SCRAPE_S, the last figures are told again.
    """

    def __init__(self, take: Callable[[], Figures], loop: Loop) -> None:
        self._take, self._loop = take, loop
        self._last: Figures | None = None

    def get(self) -> Figures | None:
        loop = self._loop()
        if loop is None:
            return self._take()
        taken: Future[Figures] = Future()

        def take() -> None:
            try:
                taken.set_result(self._take())
            except Exception as error:
                taken.set_exception(error)

        with contextlib.suppress(FutureTimeoutError, RuntimeError):  # of a loop that is closed
            loop.call_soon_threadsafe(take)
            self._last = taken.result(SCRAPE_S)
        return self._last


class _CoreCollector(Collector):
    """The core's figures, one line of `ecd-cli status` at a time."""

    def __init__(self, status: Callable[[], pb.StatusReply], loop: Loop) -> None:
        self._figures = _OnLoop(status, loop)

    def collect(self) -> Iterable[Metric]:
        status = self._figures.get()
        if status is None:
            return
        counters, apart = status.counters, status.bench
        bench = {
            "puts": apart.puts,
            "evictions": sum(apart.evictions.values()),
            "duplicates": apart.duplicates,
            "hits": apart.hits,
            "misses": apart.misses,
        }
        names = pool_names({pool.pool: pool.kind for pool in status.pools})
        for name, text, value in (
            ("hits", "Entries that readers found, by lease or pin.", counters.hits),
            ("peer_leases", "Entries leased to other nodes: no hits here.", counters.peer_leases),
            ("misses", "Lookups and waits that ended without an entry.", counters.misses),
            ("puts", "Entries stored by clients and by fetches.", counters.puts),
            ("recovered", "Entries taken over from an earlier incarnation.", counters.recovered),
            ("duplicates", "Writers told that the entry was there.", counters.duplicates),
            ("aborts", "Reservations given up, dead writers' included.", counters.aborts),
            ("copies", "Copies of entries made in device pools.", counters.copies),
            ("bytes_in", "Bytes of committed entries.", counters.bytes_in),
            ("bytes_out", "Bytes of entries that readers found.", counters.bytes_out),
            (
                "saved_seconds",
                "What the hits had cost to encode: as reported, else by the fit.",
                counters.saved_s,
            ),
            ("leases_expired", "Leases that ran out unrenewed.", counters.leases_expired),
            ("waits_expired", "Waits that ran out.", counters.waits_expired),
            (
                "costs_forgotten",
                "Namespaces' costs of a modality that gave way to others': there are too many.",
                counters.costs_forgotten,
            ),
        ):
            yield CounterMetricFamily(f"ecd_{name}", text, value=value)
        for name, text, label, values in (
            ("evictions", "Entries evicted, by reason.", "reason", counters.evictions),
            ("evicted_bytes", "Bytes of these entries.", "reason", counters.evicted_bytes),
            ("refused", "Requests refused, by cause.", "cause", counters.refused),
            ("bench", "Events of `ecd-cli bench`, left out elsewhere.", "event", bench),
        ):
            family = CounterMetricFamily(f"ecd_{name}", text, labels=[label])
            for which, value in values.items():
                family.add_metric([which], value)
            yield family
        for name, text, bounds, classes, total in (
            (
                "eviction_idle_seconds",
                "How long entries that were evicted for room had not been used.",
                IDLE_BOUNDS_S,
                counters.idle_evictions,
                counters.idle_evictions_s,
            ),
            (
                "put_bytes",
                "Sizes of entries stored by clients and by fetches.",
                SIZE_BOUNDS_BYTES,
                counters.put_sizes,
                counters.bytes_in,
            ),
            (
                "hit_bytes",
                "Sizes of entries that readers found; of a client's burst the last 512 reads.",
                SIZE_BOUNDS_BYTES,
                counters.hit_sizes,
                counters.hit_sizes_bytes,
            ),
        ):
            yield HistogramMetricFamily(
                f"ecd_{name}",
                text,
                buckets=[
                    (str(bound), value)
                    for bound, value in zip(
                        (*map(float, bounds), "+Inf"), accumulate(classes), strict=False
                    )
                ],
                sum_value=total,
            )
        yield from _namespaces(status)
        for name, text in (
            ("pool_bytes", "Size of the pool."),
            ("populated_bytes", "Bytes of the pool that are there: 0 for a GPU that had none."),
            ("used_bytes", "Bytes in extents."),
            ("granted_bytes", "Bytes given to clients ahead of need."),
            ("reserved_bytes", "Bytes of the pool that are being written."),
            ("leased_bytes", "Bytes of the pool that a client reads."),
            (
                "worth_seconds",
                "Seconds to have the pool's entries again, by encoding or fetching.",
            ),
            (
                "frequency_exponent",
                "How much an entry's uses weigh when room is made: 0 not at all.",
            ),
            (
                "density_exponent",
                "How much its seconds per byte weigh; LRU where both are 0.",
            ),
            ("free_bytes", "Bytes in no extent; those granted are among them."),
            ("largest_free_bytes", "Largest free extent."),
            ("kept_bytes", "Bytes of entries that operators keep."),
        ):
            full_name = f"ecd_pool_{name.removeprefix('pool_')}"
            gauge = GaugeMetricFamily(full_name, text, labels=["pool"])
            for pool in status.pools:
                field = name.replace("_seconds", "_s")
                gauge.add_metric([names[pool.pool]], getattr(pool, field))
            yield gauge
        for name, text, field in (
            ("evictions", "Entries and copies evicted from the pool.", "evictions"),
            (
                "given_up_seconds",
                "Seconds to have again what was evicted for room, whether or not it is wanted.",
                "given_up_s",
            ),
        ):
            family = CounterMetricFamily(f"ecd_pool_{name}", text, labels=["pool"])
            for pool in status.pools:
                family.add_metric([names[pool.pool]], getattr(pool, field))
            yield family
        for name, text, value in (
            ("entries", "Committed entries.", status.entries),
            ("unlisted_entries", "Entries that are not in the mapped index.", status.unlisted),
            ("sessions", "Sessions of clients, open or leaving.", status.sessions),
            ("leases", "Leases and pins held.", status.leases),
            ("waits", "Clients' waits for a commit.", status.waits),
            (
                "sessions_waiting_for_dma",
                "Sessions of dead clients to whose memory a device may still write.",
                status.waiting_for_dma,
            ),
            (
                "pinning_sessions",
                "Sessions whose clients have pinned the pool for their GPUs.",
                status.pinning,
            ),
        ):
            yield GaugeMetricFamily(f"ecd_{name}", text, value=value)
        if status.HasField("disk"):
            yield from _of_disk(status.disk)


def _of_disk(disk: pb.DiskStatus) -> Iterable[Metric]:
    """The figures of the disk tier."""
    for name, text, count in (
        ("reads", "Entries brought from disk into memory.", disk.reads),
        ("read_bytes", "Bytes of entries brought from disk.", disk.read_bytes),
        ("read_seconds", "Time that bringing them took.", disk.read_s),
        ("writes", "Entries written to disk.", disk.writes),
        ("written_bytes", "Bytes written, of the write budget.", disk.written_bytes),
        ("write_seconds", "Time that writing took.", disk.write_s),
        ("evictions", "Files removed for room.", disk.evictions),
        ("kept", "Entries evicted from memory that were on disk.", disk.kept),
        ("lost", "Entries evicted from memory that were not on disk.", disk.lost),
        ("expired", "Files removed as their entries' time was over.", disk.expired),
    ):
        yield CounterMetricFamily(f"ecd_disk_{name}", text, value=count)
    for name, text, label, counts in (
        ("failures", "What failed on disk, by kind.", "kind", disk.failures),
        ("skipped", "Reads and writes that were left out, by cause.", "cause", disk.skipped),
    ):
        family = CounterMetricFamily(f"ecd_disk_{name}", text, labels=[label])
        for which, value in counts.items():
            family.add_metric([which], value)
        yield family
    for name, text, figure in (
        ("pool_bytes", "Size of the disk tier.", disk.pool_bytes),
        ("used_bytes", "Bytes of its files.", disk.used_bytes),
        ("entries", "Entries on disk.", disk.entries),
        ("write_bytes_per_second", "The write budget.", disk.write_bytes_per_s),
    ):
        yield GaugeMetricFamily(f"ecd_disk_{name}", text, value=figure)
    text = "Whether reads or writes rest after failures."
    resting = GaugeMetricFamily("ecd_disk_resting", text, labels=["of"])
    resting.add_metric(["reads"], disk.reads_rest)
    resting.add_metric(["writes"], disk.writes_rest)
    yield resting


def _namespaces(status: pb.StatusReply) -> Iterable[Metric]:
    """The namespaces' sizes; a namespace that is called OTHERS counts among the others."""
    named = [each for each in status.namespaces if each.namespace != OTHERS]
    entries, nbytes = status.entries, status.other_namespaces.nbytes
    nbytes += sum(each.nbytes for each in status.namespaces)
    by_entries = GaugeMetricFamily(
        "ecd_namespace_entries", "Entries of the namespace.", labels=["namespace"]
    )
    by_bytes = GaugeMetricFamily(
        "ecd_namespace_bytes", "Bytes of its entries.", labels=["namespace"]
    )
    for each in named:
        by_entries.add_metric([each.namespace], each.entries)
        by_bytes.add_metric([each.namespace], each.nbytes)
        entries, nbytes = entries - each.entries, nbytes - each.nbytes
    by_entries.add_metric([OTHERS], entries)
    by_bytes.add_metric([OTHERS], nbytes)
    quotas = GaugeMetricFamily(
        "ecd_namespace_quota_bytes",
        "Bytes that it may have, where it has a quota.",
        labels=["namespace"],
    )
    for each in named:
        if each.HasField("quota_bytes"):
            quotas.add_metric([each.namespace], each.quota_bytes)
    return by_entries, by_bytes, quotas


class _PeersCollector(Collector):
    """The figures of other nodes, one line of `ecd-cli peers` at a time."""

    def __init__(
        self,
        status: Callable[[], pb.PeersReply],
        hints: Callable[[], tuple[int, int]],
        never_reached: Callable[[], Collection[str]],
        loop: Loop,
    ) -> None:
        self._figures = _OnLoop(lambda: (status(), hints(), never_reached()), loop)

    def collect(self) -> Iterable[Metric]:
        figures = self._figures.get()
        if figures is None:
            return
        status, (ignored, refused), never_reached = figures
        peers = [peer for peer in status.peers if peer.node not in never_reached]
        fetches = CounterMetricFamily(
            "ecd_fetches", "Entries that were to come from another node.", labels=["outcome"]
        )
        for outcome, count in status.fetches.items():
            fetches.add_metric([outcome], count)
        yield fetches
        directory = status.directory
        for name, text, value in (
            ("hints_ignored", "Hints to nodes that nothing allows to ask.", ignored),
            (
                "hints_refused",
                "Hints and offers not followed: too many lead to nodes never reached.",
                refused,
            ),
            ("read_retries", "Reads that failed and were tried again.", status.read_retries),
            (
                "speculative_reads",
                "Speculative reads: begun by a hint, before their lease.",
                status.speculative_reads,
            ),
            (
                "speculative_reads_used",
                "Speculative reads that brought the entry.",
                status.speculative_reads_used,
            ),
            ("set_aside", "Reads given up while they were under way.", status.set_aside),
            ("directory_lookups", "Keys asked of the directory.", directory.lookups),
            (
                "directory_errors",
                "Questions the directory did not answer in time.",
                directory.errors,
            ),
        ):
            yield CounterMetricFamily(f"ecd_{name}", text, value=value)
        for name, text, gauge in (
            ("flights", "Fetches under way.", status.flights),
            (
                "set_aside_bytes",
                "Bytes of fetches given up to which a read may still write.",
                status.set_aside_bytes,
            ),
            ("directory_up", "Whether the directory answers.", directory.up),
            (
                "directory_unpublished",
                "Changes the directory was not yet told.",
                directory.unpublished,
            ),
            ("directory_lag_seconds", "Age of the oldest change not yet told.", directory.lag_s),
            (
                "peers_never_reached",
                "Nodes that hints or the directory name, and that never answered.",
                len(never_reached),
            ),
        ):
            yield GaugeMetricFamily(f"ecd_{name}", text, value=float(gauge))
        for name, text, field in (
            ("peer_reads", "Entries read from a peer.", "reads"),
            ("peer_read_bytes", "Bytes read from a peer.", "read_bytes"),
            (
                "peer_failed_reads",
                "Reads from a peer that failed; most are tried again.",
                "failed_reads",
            ),
        ):
            family = CounterMetricFamily(f"ecd_{name}", text, labels=["peer"])
            for peer in peers:
                family.add_metric([peer.node], getattr(peer, field))
            yield family
        connected = GaugeMetricFamily(
            "ecd_peer_connected", "Whether there is a link to the peer.", labels=["peer"]
        )
        text = "Bandwidth of reads from a peer, as measured; 0 while it is unknown."
        bandwidth = GaugeMetricFamily("ecd_peer_read_bytes_per_second", text, labels=["peer"])
        for peer in peers:
            connected.add_metric([peer.node], float(peer.state == "connected"))
            bandwidth.add_metric([peer.node], peer.bytes_per_s)
        yield connected
        yield bandwidth


class _EventsCollector(Collector):
    """The figures of the stream of stored and removed entries."""

    def __init__(self, figures: Callable[[], Mapping[str, int]], loop: Loop) -> None:
        self._figures = _OnLoop(figures, loop)

    def collect(self) -> Iterable[Metric]:
        figures = self._figures.get()
        for field, name, text in (
            ("events", "events", "Keys published as stored or removed."),
            ("batches", "event_batches", "Messages in which they were published."),
            ("losses", "event_losses", "Times that a slow subscriber began to lose messages."),
            ("replays", "event_replays", "Requests for lost messages."),
            ("snapshots", "event_snapshots", "Requests for all entries."),
            ("refused", "event_requests_refused", "Requests without sense, or one too many."),
            ("given_up", "event_answers_given_up", "Answers that were not taken in time."),
        ):
            if figures is not None:
                yield CounterMetricFamily(f"ecd_{name}", text, value=figures[field])


class Metrics:
    """The registry of one daemon's metrics, and its port."""

    def __init__(self, version: str, clock: Clock) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series a histogram
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._call_seconds = Histogram(
            "ecd_call_seconds",
            "Time the daemon took to answer a call.",
            ["method"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._lag_seconds = Histogram(
            "ecd_event_loop_lag_seconds",
            "How late the event loop runs what is due.",
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._fetch_seconds = Histogram(
            "ecd_fetch_seconds",
            "Time from wanting an entry of another node to having it, but for its encode.",
            buckets=LATENCY_BUCKETS_S,
            registry=None,
        )
        self._fetch_bytes = Histogram(
            "ecd_fetch_bytes",
            "Sizes of entries brought from other nodes.",
            buckets=SIZE_BOUNDS_BYTES,
            registry=None,
        )
        self._slow = Counter(
            "ecd_slow",
            "Events that took as long as slow_log_s says, by kind.",
            ["kind"],
            registry=self.registry,
        )
        for kind in (DISK_READ, FETCH):  # or there would be no series before the first
            self._slow.labels(kind)
        info = Gauge("ecd_info", "Always 1.", ["version"], registry=self.registry)
        info.labels(version).set(1)
        self._connections_refused = Counter(
            "ecd_http_refused",
            "Connections to this port that were turned away, as too many were open.",
            registry=self.registry,
        )
        self._port: HttpPort | None = None

    def listen(
        self, address: str, answers: Mapping[str, WSGIApplication] = MappingProxyType({})
    ) -> str:
        """Serve /metrics of this event loop; the address in use, with its port.

        `answers` serve other paths, on threads of the port. Raises MetricsError.
        """
        self._loop = asyncio.get_running_loop()
        host, _, port = address.rpartition(":")
        try:
            refused = self._connections_refused.inc
            server = HttpPort(host.strip("[]"), int(port), refused, self._clock)
        except (OSError, OverflowError) as error:
            raise MetricsError(
                f"cannot serve metrics on {address}: {error}. Choose another address with "
                "ECD_METRICS_ADDRESS or --metrics-address; port 0 takes any free one"
            ) from None
        self._port = server
        server.set_app(by_path({"/metrics": make_wsgi_app(self.registry), **answers}))
        server.start()
        return f"{host}:{server.server_port}"

    def observe_call(self, method: str, seconds: float) -> None:
        self._call_seconds.labels(method).observe(seconds)

    def count_slow(self, kind: str) -> None:
        self._slow.labels(kind).inc()

    def observe_fetch(self, seconds: float, nbytes: int) -> None:
        self._fetch_seconds.observe(seconds)
        self._fetch_bytes.observe(nbytes)

    def watch_core(self, status: Callable[[], pb.StatusReply]) -> None:
        """Export the core's figures."""
        self.registry.register(_CoreCollector(status, lambda: self._loop))

    def watch_peers(
        self,
        status: Callable[[], pb.PeersReply],
        hints: Callable[[], tuple[int, int]],
        never_reached: Callable[[], Collection[str]],
    ) -> None:
        """Export the figures of other nodes.

        `hints` counts hints that were ignored and hints that were refused. A node that was
        `never_reached` has no label of its own: anybody could make up its name.
        """
        for histogram in (self._fetch_seconds, self._fetch_bytes):
            self.registry.register(histogram)
        self.registry.register(_PeersCollector(status, hints, never_reached, lambda: self._loop))

    def watch_events(self, figures: Callable[[], Mapping[str, int]]) -> None:
        """Export the counters of published events."""
        self.registry.register(_EventsCollector(figures, lambda: self._loop))

    def watch_trace(self, lost: Callable[[], float]) -> None:
        """Export how many records the trace misses."""
        text = "Records missing in the trace."
        Gauge("ecd_trace_lost_records", text, registry=self.registry).set_function(lost)

    async def watch_loop(self) -> None:
        """Measure the event loop's lag, until cancelled."""
        while True:
            due_s = self._clock.now_s() + LAG_PERIOD_S
            await self._clock.sleep(LAG_PERIOD_S)
            self._lag_seconds.observe(max(0.0, self._clock.now_s() - due_s))

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
