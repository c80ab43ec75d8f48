"""Metric families of rows, and figures for them that are taken on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ecd.ops.on_loop import NoAnswer, on_loop

Loop = Callable[[], asyncio.AbstractEventLoop | None]
"""Gives the daemon's event loop, while it runs."""
SCRAPE_S = 1.0

Figures = TypeVar("Figures")
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
Row = tuple[str, str, float]
"""A metric's name without its prefix, its help text, its value."""


class OnLoop(Generic[Figures]):
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

        async def take() -> Figures:
            return self._take()

        with contextlib.suppress(NoAnswer):
            self._last = on_loop(loop, take, SCRAPE_S)
        return self._last


def counters(rows: Iterable[Row], prefix: str = "ecd_") -> Iterable[CounterMetricFamily]:
    for name, text, value in rows:
        yield CounterMetricFamily(prefix + name, text, value=value)


def gauges(rows: Iterable[Row], prefix: str = "ecd_") -> Iterable[GaugeMetricFamily]:
    for name, text, value in rows:
        yield GaugeMetricFamily(prefix + name, text, value=value)


def counter_by(
    label: str, name: str, text: str, values: Iterable[tuple[str, float]]
) -> CounterMetricFamily:
    """A counter with one series for each value of its label."""
    return _filled(CounterMetricFamily(name, text, labels=[label]), values)


def gauge_by(
    label: str, name: str, text: str, values: Iterable[tuple[str, float]]
) -> GaugeMetricFamily:
    """A gauge with one series for each value of its label."""
    return _filled(GaugeMetricFamily(name, text, labels=[label]), values)


def _filled(family: Family, values: Iterable[tuple[str, float]]) -> Family:
    for which, value in values:
        family.add_metric([which], value)
    return family


def histogram(
    name: str, text: str, bounds: Iterable[float], classes: Iterable[int], total: float
) -> HistogramMetricFamily:
    """A histogram of counts per class; the last class has no upper bound."""
    uppers = (*map(float, bounds), "+Inf")
    buckets = [
        (str(upper), count) for upper, count in zip(uppers, accumulate(classes), strict=False)
    ]
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total)
