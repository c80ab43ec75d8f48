"""The cache's counters: users' traffic, and `ecd-cli bench` apart from it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isclose
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
    "peer_proofs",
    "peer_turns",
    "long_peer_turns",
    "reservations",
    "leases",
    "waits",
    "makings",
    "engines",
    "encoders",
)
"""Why requests are refused."""
NO_ROOM = ("pool_full", "entry_too_large", "quota_full")
"""Those of puts."""
IDLE_BOUNDS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0)
"""Upper ends of the classes into which evicted entries fall, by how long they were not used.

As in `ecd_proto.contract`, like the next.
"""
SIZE_BOUNDS_BYTES = tuple(1 << power for power in range(12, 33, 2))
"""Upper ends of the classes into which entries fall by their size."""
PARTS = ("namespaces", "other_namespaces", "unnamed", "seen", "seen_s", "bench")
"""Fields of `Counters` that are no counters of all events."""
BENCH = "ecd-cli bench "
"""How the namespaces of `ecd-cli bench` begin (`ecd_proto.contract.BENCH_NAMESPACE`)."""


COUNTED_NAMESPACES = 50
"""Namespaces that are counted by name, the first to have events: each is a set of time series."""
QUIET_S = 3600.0
"""Time without events after which a namespace without entries may lose its name to another one."""


@dataclass
class NamespaceCounters:
    """A namespace's part of `Counters`.

    Fractions: of a burst of reads without a call only the latest are known.
    """

    reused: float = 0.0
    handed_over: float = 0.0
    misses: int = 0
    evictions: int = 0
    refused: int = 0  # puts: too large, or no room for them
    saved_s: float = 0.0

    @property
    def events(self) -> float:
        """Its events, which only grow."""
        return self.reused + self.handed_over + self.misses + self.evictions + self.refused

    def add(self, other: NamespaceCounters) -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


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
    namespaces: dict[str, NamespaceCounters] = field(default_factory=dict, repr=False)
    """The first COUNTED_NAMESPACES that had events."""
    other_namespaces: NamespaceCounters = field(default_factory=NamespaceCounters, repr=False)
    unnamed: NamespaceCounters = field(default_factory=NamespaceCounters, repr=False)
    """The counts of namespaces that have lost their names, which no status or metric shows."""
    seen: dict[str, float] = field(default_factory=dict, repr=False)
    """The events of each counted namespace at `seen_s`."""
    seen_s: float = field(default=0.0, repr=False)
    bench: Counters | None = field(default=None, repr=False)

    def of(self, namespace: str) -> Counters:
        """The counters for events of this namespace."""
        return self.bench if self.bench and namespace.startswith(BENCH) else self

    def namespace(self, name: str) -> NamespaceCounters:
        """The part of this namespace, or of all that came too late for one of their own."""
        found = self.namespaces.get(name)
        if found is not None:
            return found
        is_counted = name and len(self.namespaces) < COUNTED_NAMESPACES
        if not is_counted or (self.bench and name.startswith(BENCH)):
            return self.other_namespaces
        return self.namespaces.setdefault(name, NamespaceCounters())

    def drop_silent(self, now_s: float, has_entries: Callable[[str], bool]) -> None:
        """If all names are in use, drop those of silent namespaces without entries.

        Looks once in QUIET_S, for namespaces without an event since the last look. One that comes
        back counts from 0, which a time series takes for a restart. Its counts do not move to
        `other_namespaces`, where they would be new events.
        """
        if now_s - self.seen_s < QUIET_S:
            return
        if len(self.namespaces) == COUNTED_NAMESPACES:
            for name, part in list(self.namespaces.items()):
                if part.events == self.seen.get(name) and not has_entries(name):
                    self.unnamed.add(self.namespaces.pop(name))
        self.seen, self.seen_s = {name: of.events for name, of in self.namespaces.items()}, now_s

    def put(self, nbytes: int) -> None:
        """Count an entry that was stored."""
        self.puts += 1
        self.bytes_in += nbytes
        self.put_sizes[bisect_left(SIZE_BOUNDS_BYTES, nbytes)] += 1

    def hit(self, namespace: str, nbytes: int, is_handover: bool, saves_s: float) -> None:
        """Count a lookup that found an entry; unless it is a hand-over it saves `saves_s`."""
        self.note_hit(nbytes)
        self.bytes_out += nbytes
        self.hits += 1
        self.handed_over += is_handover
        self.note_use(namespace, is_handover, saves_s)

    def note_use(
        self, namespace: str, is_handover: bool, saves_s: float, times: float = 1.0
    ) -> None:
        """Count in the namespace what hits were, and what they saved: a hand-over saves nothing."""
        part = self.namespace(namespace)
        if is_handover:
            part.handed_over += times
            return
        saved_s = times * saves_s
        part.reused += times
        part.saved_s += saved_s
        self.saved_s += saved_s

    def miss(self, namespace: str, count: int = 1) -> None:
        """Count lookups that found nothing."""
        self.misses += count
        self.namespace(namespace).misses += count

    def note_hit(self, nbytes: int) -> None:
        """Count the size of an entry that a reader found."""
        self.hit_sizes[bisect_left(SIZE_BOUNDS_BYTES, nbytes)] += 1
        self.hit_sizes_bytes += nbytes

    def evicted(self, namespace: str, reason: str, idle_s: float, nbytes: int) -> None:
        """Count an eviction of an entry of `nbytes` that was not used for `idle_s`."""
        self.namespace(namespace).evictions += 1
        self.evictions[reason] += 1
        self.evicted_bytes[reason] += nbytes
        if reason in FOR_ROOM:
            self.idle_evictions[bisect_left(IDLE_BOUNDS_S, idle_s)] += 1
            self.idle_evictions_s += idle_s

    def figures(self) -> dict[str, Any]:
        """Every counter by its name, those of the bench and of single namespaces apart."""
        return {name: value for name, value in vars(self).items() if name not in PARTS}

    def refuse(self, cause: str, limit: int) -> LimitReached:
        """Count a request that met a bound of `Limits`."""
        self.refused[cause] += 1
        return LimitReached(cause, limit)

    def refuse_put(self, namespace: str, cause: str) -> None:
        """Count a put for which there is no room."""
        counted = self.of(namespace)
        counted.refused[cause] += 1
        counted.namespace(namespace).refused += 1

    def check(self) -> None:
        """Raise AssertionError unless sums and parts agree."""
        for_room = sum(self.evictions[reason] for reason in FOR_ROOM)
        assert for_room == sum(self.idle_evictions)
        assert self.idle_evictions_s >= 0.0
        assert sum(self.put_sizes) == self.puts
        each = (*self.namespaces.values(), self.other_namespaces, self.unnamed)
        assert sum(part.evictions for part in each) == sum(self.evictions.values())
        assert sum(part.misses for part in each) == self.misses
        assert sum(part.refused for part in each) == sum(self.refused[cause] for cause in NO_ROOM)
        hits = sum(part.reused + part.handed_over for part in each)
        assert isclose(hits, self.hits, rel_tol=1e-6, abs_tol=1e-6)
        assert isclose(sum(part.saved_s for part in each), self.saved_s, rel_tol=1e-6, abs_tol=1e-6)
