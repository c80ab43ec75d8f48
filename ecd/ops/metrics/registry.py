"""Prometheus metrics: figures read at scrape, call latencies, and the loop's lag."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)

from ecd.base.clock import Clock
from ecd.core.counters import SIZE_BOUNDS_BYTES
from ecd.live.slow_log import DISK_READ, FETCH
from ecd.ops.http_port import HttpPort, by_path, with_head
from ecd.ops.metrics.cluster import EventsCollector, PeersCollector
from ecd.ops.metrics.core import CoreCollector, TraceCollector
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

LATENCY_BUCKETS_S = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 5.0),
)
LAG_PERIOD_S = 0.25


class MetricsError(Exception):
    """The metrics port cannot be bound; the message says what to change."""


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
            "Time that the daemon took to answer a call, by method.",
            ["method"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._lag_seconds = Histogram(
            "ecd_event_loop_lag_seconds",
            "How late the daemon's event loop runs what is due.",
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
        info = Gauge(
            "ecd_build_info",
            "The daemon's version; the value is always 1.",
            ["version"],
            registry=self.registry,
        )
        info.labels(version).set(1)
        self._connections_refused = Counter(
            "ecd_http_refused",
            "Connections to the metrics port that were closed, because too many were open.",
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
        server.set_app(by_path({"/metrics": with_head(make_wsgi_app(self.registry)), **answers}))
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
        self.registry.register(CoreCollector(status, lambda: self._loop))

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
        self.registry.register(PeersCollector(status, hints, never_reached, lambda: self._loop))

    def watch_events(self, figures: Callable[[], Mapping[str, int]]) -> None:
        """Export the counters of published events."""
        self.registry.register(EventsCollector(figures, lambda: self._loop))

    def watch_trace(self, lost: Callable[[], float]) -> None:
        """Export how many records the trace misses."""
        self.registry.register(TraceCollector(lost))

    async def watch_loop(self) -> None:
        """Measure the event loop's lag, until cancelled."""
        while True:
            due_s = self._clock.now_s() + LAG_PERIOD_S
            await self._clock.sleep(LAG_PERIOD_S)
            self._lag_seconds.observe(max(0.0, self._clock.now_s() - due_s))

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
