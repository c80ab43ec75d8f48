"""A clock that tests set."""

from __future__ import annotations

from ecd.base.clock import Clock


class SetClock(Clock):
    """Time stands still until `at_s` is set."""

    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def unix_s(self) -> float:
        return 2e9 + self.at_s
