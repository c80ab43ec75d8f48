"""The limits of the disk tier: pauses after failures, the time of a read."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from ecd.base.clock import Clock

logger = logging.getLogger(__name__)

FAILURES = 3
"""Failures in a row after which reads, or writes, pause for REST_S."""
REST_S = 30.0
SMALL_BYTES = 256 << 10
"""Reads of fewer bytes measure the constant, the others the rate."""
WEIGHT = 1 / 20
FIRST_S, FIRST_BYTE_S = 1e-3, 1e-9
"""The assumed time of a read, and of each byte, until the first read."""
HALVED_IN_S = 30.0

FAILURE_KINDS = ("read", "write", "full", "slow", "corrupt", "remove")
SKIP_CAUSES = ("budget", "evicted", "slower", "waiting")


@dataclass
class DiskCounters:
    """Events since the start, as `DiskStatus` has them."""

    reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    writes: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    evictions: int = 0
    kept: int = 0
    lost: int = 0
    expired: int = 0
    failures: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(FAILURE_KINDS, 0)))
    skipped: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(SKIP_CAUSES, 0)))


class Breaker:
    """Allows nothing for REST_S after FAILURES failures in a row."""

    def __init__(self, what: str, counters: DiskCounters, clock: Clock) -> None:
        self._what, self._counters, self._clock = what, counters, clock
        self._failures, self._until_s = 0, 0.0
        self.cause = ""
        """The kind of the last failure."""

    @property
    def is_resting(self) -> bool:
        return self._clock.now_s() < self._until_s

    def worked(self) -> None:
        self._failures = 0

    def failed(self, kind: str, error: object) -> None:
        """Count a failure of one of FAILURE_KINDS."""
        self._counters.failures[kind] += 1
        self._failures += 1
        self.cause = kind
        if self._failures >= FAILURES and not self.is_resting:
            self._until_s = self._clock.now_s() + REST_S
            logger.warning(
                "%s failed %d times in a row and rest for %.0f s: %s. Memory serves as before",
                self._what,
                self._failures,
                REST_S,
                error,
            )


class ReadTime:
    """The time of a read: a constant and as much for each byte, each averaged over some twenty.

    A slowness that was measured counts half after HALVED_IN_S: no read is made of a disk that seems
    slow, so that nothing would be learned of it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._constant_s, self._byte_s = FIRST_S, FIRST_BYTE_S
        self._learned_s = 0.0

    def seconds(self, nbytes: int) -> float:
        constant_s, byte_s = self._now()
        return constant_s + nbytes * byte_s

    def learn(self, nbytes: int, seconds: float) -> None:
        constant_s, byte_s = self._now()
        if nbytes < SMALL_BYTES:
            constant_s += WEIGHT * (max(0.0, seconds - nbytes * byte_s) - constant_s)
        else:
            byte_s += WEIGHT * (max(0.0, seconds - constant_s) / nbytes - byte_s)
        self._constant_s, self._byte_s = constant_s, byte_s
        self._learned_s = self._clock.now_s()

    def _now(self) -> tuple[float, float]:
        left = 0.5 ** ((self._clock.now_s() - self._learned_s) / HALVED_IN_S)
        return (
            self._constant_s - (1.0 - left) * max(0.0, self._constant_s - FIRST_S),
            self._byte_s - (1.0 - left) * max(0.0, self._byte_s - FIRST_BYTE_S),
        )
