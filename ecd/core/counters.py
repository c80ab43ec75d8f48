"""The cache's counters: users' traffic, and `ecd-cli bench` apart from it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from ecd.core.model.outcomes import LimitReached
from ecd.core.pool.pool import FOR_ROOM, REASONS

CAUSES = (
    "pool_full",
    "entry_too_large",
    "quota_full",
    "kept",
    "sessions",
    "peer_links",
    "peer_turns",
    "long_peer_turns",
    "reservations",
    "leases",
    "waits",
    "makings",
    "engines",
)
"""Why requests are refused."""
IDLE_BOUNDS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0)
"""Upper ends of the classes into which evicted entries fall, by how long they were not used.

As in `ecd_proto.contract`, like the next.
"""
SIZE_BOUNDS_BYTES = tuple(1 << power for power in range(12, 33, 2))
"""Upper ends of the classes into which entries fall by their size."""
BENCH = "ecd-cli bench "
"""How the namespaces of `ecd-cli bench` begin (`ecd_proto.contract.BENCH_NAMESPACE`)."""


@dataclass
class Counters:
    """Events since the start, of all pools together. Every counter only grows.

    `puts + recovered` are the entries that there are and those that were evicted.
    """

    hits: int = 0
    handed_over: int = 0  # those that saved no encode, as the entry had been encoded for them
    misses: int = 0
    peer_leases: int = 0  # for other nodes: no hits here
    puts: int = 0
    recovered: int = 0  # entries taken over from an earlier incarnation
    duplicates: int = 0
    aborts: int = 0
    copies: int = 0  # made in pools that hold replicas
    bytes_in: int = 0
    bytes_out: int = 0
    saved_s: float = 0.0  # encoding time that the other hits saved
    leases_expired: int = 0
    waits_expired: int = 0
    costs_forgotten: int = 0  # of a namespace and modality: there are too many
    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    idle_evictions: list[int] = field(default_factory=lambda: [0] * (len(IDLE_BOUNDS_S) + 1))
    """Evictions for room in each class of IDLE_BOUNDS_S, and beyond the last."""
    idle_evictions_s: float = 0.0  # the sum of how long they were not used
    evicted_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    put_sizes: list[int] = field(default_factory=lambda: [0] * (len(SIZE_BOUNDS_BYTES) + 1))
    """Puts in each class of SIZE_BOUNDS_BYTES, and beyond the last."""
    hit_sizes: list[int] = field(default_factory=lambda: [0] * (len(SIZE_BOUNDS_BYTES) + 1))
    """The same of hits; of those without a call only the latest are known."""
    hit_sizes_bytes: int = 0  # the sum of their sizes
    bench: Counters | None = field(default=None, repr=False)

    def of(self, namespace: str) -> Counters:
        """The counters for events of this namespace."""
        return self.bench if self.bench and namespace.startswith(BENCH) else self

    def put(self, nbytes: int) -> None:
        """Count an entry that was stored."""
        self.puts += 1
        self.bytes_in += nbytes
        self.put_sizes[bisect_left(SIZE_BOUNDS_BYTES, nbytes)] += 1

    def note_hit(self, nbytes: int) -> None:
        """Count the size of an entry that a reader found."""
        self.hit_sizes[bisect_left(SIZE_BOUNDS_BYTES, nbytes)] += 1
        self.hit_sizes_bytes += nbytes

    def evicted(self, reason: str, idle_s: float, nbytes: int) -> None:
        """Count an eviction of an entry of `nbytes` that was not used for `idle_s`."""
        self.evictions[reason] += 1
        self.evicted_bytes[reason] += nbytes
        if reason in FOR_ROOM:
            self.idle_evictions[bisect_left(IDLE_BOUNDS_S, idle_s)] += 1
            self.idle_evictions_s += idle_s

    def figures(self) -> dict[str, Any]:
        """Every counter by its name, those of the bench apart."""
        return {name: value for name, value in vars(self).items() if name != "bench"}

    def refuse(self, cause: str, limit: int) -> LimitReached:
        """Count a request that met a bound of `Limits`."""
        self.refused[cause] += 1
        return LimitReached(cause, limit)
