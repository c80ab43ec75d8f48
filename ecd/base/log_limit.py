"""Lines of the log for what may happen often: one a minute of each kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable

from ecd.base.clock import Clock

LOG_PERIOD_S = 60.0
"""Interval in which at most one line of a kind is logged, however many events there are."""
MAX_KINDS = 256
"""Kinds with lines of their own, as clients can make up namespaces; all others share one."""


class LogLimit:
    """Decides which events are logged, and counts the others for the next line of their kind."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_s: dict[Hashable, float] = {}  # the kind that was logged last comes last
        self._unlogged: Counter[Hashable] = Counter()

    def take(self, kind: Hashable = "") -> str | None:
        """The end of the event's line, which counts those left out; None if it gets no line."""
        now_s = self._clock.now_s()
        if kind not in self._logged_s and len(self._logged_s) >= MAX_KINDS:
            oldest = next(iter(self._logged_s))
            if now_s - self._logged_s[oldest] < LOG_PERIOD_S:
                kind = None
            else:
                del self._logged_s[oldest], self._unlogged[oldest]
        if now_s - self._logged_s.get(kind, -math.inf) < LOG_PERIOD_S:
            self._unlogged[kind] += 1
            return None
        self._logged_s.pop(kind, None)
        self._logged_s[kind] = now_s
        count = self._unlogged.pop(kind, 0)
        return f" ({count:,} more since the last such line)" if count else ""
