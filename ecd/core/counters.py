"""The cache's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from ecd.core.outcomes import LimitReached
from ecd.core.pool import REASONS

CAUSES = (
    "pool_full",
    "entry_too_large",
    "sessions",
    "peer_links",
    "reservations",
    "leases",
    "waits",
    "makings",
)
"""Why requests are refused."""


@dataclass
class Counters:
    """Events since the start, of all pools together. Every counter only grows."""

    hits: int = 0
    misses: int = 0
    puts: int = 0
    duplicates: int = 0
    aborts: int = 0
    copies: int = 0  # made in pools that hold copies
    bytes_in: int = 0
    bytes_out: int = 0
    saved_s: float = 0.0  # encoding time that the hits saved
    leases_expired: int = 0
    waits_expired: int = 0
    costs_forgotten: int = 0  # of a namespace and modality: there are too many
    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))

    def refuse(self, cause: str, limit: int) -> LimitReached:
        """Count a request that met a bound of `Limits`."""
        self.refused[cause] += 1
        return LimitReached(cause, limit)
