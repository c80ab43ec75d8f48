"""Costs: the seconds that entries take to encode, fitted to what their producers report."""

from __future__ import annotations

from collections import OrderedDict
from statistics import median
from typing import NamedTuple

from ecd.core.counters import Counters
from ecd.core.model.entry import MAX_COST_S
from ecd.core.model.types import Content

GUESS_S, GUESS_PER_ROW_S = 10e-3, 15e-6
"""The cost of an entry, and of each row more, while no producer has reported any."""
MAX_GROUPS = 256
"""Pairs of namespace and modality whose costs are remembered; the one reported longest ago goes."""
FIRST_REPORTS = 7
"""Reports of which the median is taken until there is a fit: up to three may be absurd."""
CLIPPED_TO = 4.0
"""A report counts as no more than this multiple of the fit, and no less than this part of it."""
BOUNDS_S = (1e-6, MAX_COST_S)
"""No report counts as less or more."""
KEPT_WEIGHT = 0.999
"""The weight of all earlier reports after each new one."""
GUESSED_ROWS = (64.0, 4096.0)
"""Where the scaled guess counts as one report each: a fit to entries of one size needs them."""
MAX_MODALITY_BYTES = 32
_JSON = b'\x01{"'
"""The beginning of placeholder metadata (`ecd_proto.placeholders`); the modality follows."""


class Cost(NamedTuple):
    """The seconds to encode an entry; `is_known` if a producer of its group reported any."""

    seconds: float
    is_known: bool


class Costs:
    """One fit a namespace and modality. Every operation is O(1)."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._fits: OrderedDict[tuple[str, bytes], _Fit] = OrderedDict()

    def learn(self, namespace: str, content: Content) -> None:
        """Include the content's cost in the fit, if its producer reported one."""
        if content.cost_s <= 0.0 or not _rows(content):
            return
        group = namespace, _modality(content)
        fit = self._fits.get(group)
        if fit is None:
            if len(self._fits) >= MAX_GROUPS:
                self._fits.popitem(last=False)
                self._counters.costs_forgotten += 1
            fit = self._fits[group] = _Fit()
        self._fits.move_to_end(group)
        fit.learn(_rows(content), content.cost_s)

    def of(self, namespace: str, content: Content) -> Cost:
        """The fit for the content's rows, whatever its own producer reported."""
        fit = self._fits.get((namespace, _modality(content)))
        rows = _rows(content)
        return Cost(_guess_s(rows), False) if fit is None else Cost(fit.seconds(rows), True)


class _Fit:
    """Seconds as a + b * rows with a, b >= 0: least squares of the relative errors.

    Each report has the weight 1 / guess^2, so that a video does not outweigh a hundred thumbnails.
    """

    def __init__(self) -> None:
        self._first: list[tuple[float, float]] = []
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._a = self._b = 0.0

    def seconds(self, rows: float) -> float:
        return self._a + self._b * rows

    def learn(self, rows: float, seconds: float) -> None:
        least_s, most_s = BOUNDS_S
        seconds = min(max(seconds, least_s), most_s)
        if len(self._first) < FIRST_REPORTS:
            self._first.append((rows, seconds))
            scale = median(seconds / _guess_s(rows) for rows, seconds in self._first)
            self._a, self._b = scale * GUESS_S, scale * GUESS_PER_ROW_S
            if len(self._first) < FIRST_REPORTS:
                return
            for report in self._first:
                self._add(*report)
        else:
            self._add(rows, seconds)
        self._solve()

    def _add(self, rows: float, seconds: float) -> None:
        fit_s = max(self.seconds(rows), BOUNDS_S[0])
        seconds = min(max(seconds, fit_s / CLIPPED_TO), fit_s * CLIPPED_TO)
        weight = _guess_s(rows) ** -2
        self._n = KEPT_WEIGHT * self._n + weight
        self._x = KEPT_WEIGHT * self._x + weight * rows
        self._y = KEPT_WEIGHT * self._y + weight * seconds
        self._xx = KEPT_WEIGHT * self._xx + weight * rows * rows
        self._xy = KEPT_WEIGHT * self._xy + weight * rows * seconds

    def _solve(self) -> None:
        scale = self._y / (GUESS_S * self._n + GUESS_PER_ROW_S * self._x)
        n, x, y, xx, xy = self._n, self._x, self._y, self._xx, self._xy
        for rows in GUESSED_ROWS:
            weight, seconds = _guess_s(rows) ** -2, scale * _guess_s(rows)
            n, x, y = n + weight, x + weight * rows, y + weight * seconds
            xx, xy = xx + weight * rows * rows, xy + weight * rows * seconds
        self._b = max(0.0, (n * xy - x * y) / (n * xx - x * x))
        self._a = (y - self._b * x) / n
        if self._a < 0.0:
            self._a, self._b = 0.0, xy / xx


def _guess_s(rows: float) -> float:
    return GUESS_S + GUESS_PER_ROW_S * rows


def _rows(content: Content) -> float:
    """The embeddings of an entry; an entry without bytes has none, whatever its shape."""
    return float(min(content.shape[0] if content.shape else 1, content.nbytes))


def _modality(content: Content) -> bytes:
    """The modality that the placeholder metadata names, or nothing."""
    start, found = len(_JSON), content.metadata
    if not found.startswith(_JSON):
        return b""
    return found[start : max(start, found.find(b'"', start, start + MAX_MODALITY_BYTES))]
