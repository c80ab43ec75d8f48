"""Exponential backoff: the pauses between attempts, without a clock of its own."""

from __future__ import annotations

from typing import NamedTuple


class Backoff(NamedTuple):
    """The first pause and the longest one, in seconds."""

    first_s: float
    longest_s: float

    def after(self, pause_s: float = 0.0) -> float:
        """The pause that follows one of `pause_s` seconds (0: none yet): twice as long."""
        return min(max(self.first_s, 2 * pause_s), self.longest_s)
