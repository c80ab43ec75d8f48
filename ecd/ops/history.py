"""The daemon's figures over the last hours, for its status page. The memory is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ecd.base.clock import Clock

PERIOD_S = 10.0
KEPT_SAMPLES = 2160
"""Samples kept: six hours of them, some 0.5 MiB."""
LOT = 360
"""Samples in one answer: a JSON encoder does not let other threads run."""


class Sample(NamedTuple):
    """Sums since the start, `at_s` seconds after it, and the bytes that entries then took."""

    number: int
    at_s: float
    hits: int
    handed_over: int
    misses: int
    saved_s: float
    used_bytes: int


class Figures(NamedTuple):
    """The figures of one sample, and the counts of refused requests by cause."""

    hits: int
    handed_over: int
    misses: int
    saved_s: float
    used_bytes: int
    refused: Mapping[str, int]


class History:
    """Samples of one daemon, and the time of each cause's last refusal. Used on its event loop."""

    def __init__(self, read: Callable[[], Figures], clock: Clock) -> None:
        self._read, self._clock, self._started_s = read, clock, clock.now_s()
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._refused = dict(read().refused)
        self._refused_at_s: dict[str, float] = {}
        self._number = 0

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.sample()
            await self._clock.sleep(PERIOD_S)

    def sample(self) -> None:
        figures = self._read()
        self._note(figures.refused)
        at_s = round(self._clock.now_s() - self._started_s, 1)
        lookups = figures.hits, figures.handed_over, figures.misses
        saved_s = round(figures.saved_s, 3)
        self._samples.append(Sample(self._number, at_s, *lookups, saved_s, figures.used_bytes))
        self._number += 1

    def _note(self, refused: Mapping[str, int]) -> None:
        for cause, count in refused.items():
            if count != self._refused.get(cause, 0):
                self._refused_at_s[cause] = self._clock.now_s()
        self._refused = dict(refused)

    def refused_s_ago(self) -> dict[str, float]:
        """Seconds since each cause's last refusal; up to PERIOD_S more if no caller asked since."""
        self._note(self._read().refused)
        now_s = self._clock.now_s()
        return {cause: now_s - at_s for cause, at_s in self._refused_at_s.items()}

    def samples(self) -> list[Sample]:
        """All samples, the oldest first."""
        return list(self._samples)


def lot(samples: list[Sample], number: int) -> list[Sample]:
    """The first LOT samples whose number is not below this."""
    first = max(0, number - samples[0].number) if samples else 0
    return samples[first : first + LOT]
