"""`ecd-cli top`: a daemon's rates, hottest and biggest entries and peers, second by second."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from ecd_client.cli import render
from ecd_proto.contract import size_text
from ecd_proto.v1 import cache_pb2 as pb

MAX_LISTED = 20_000
"""Entries among which the biggest and the hottest are sought."""
ENTRIES_PERIOD_S = 5.0
"""Seconds for which a list of entries is shown again."""


@dataclass(frozen=True)
class Rates:
    """The daemon's counters per second, between two samples."""

    hits: float
    misses: float
    puts: float
    evictions: float
    refused: float
    bytes_in: float
    bytes_out: float
    saved_s: float
    given_up_s: float

    @property
    def hit_ratio(self) -> float | None:
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None


@dataclass
class Top:
    """Samples a daemon, and shows the difference to the sample before."""

    call: Callable[[str, Any], Any]
    entries: Callable[[], Iterator[pb.EntryInfo]]
    rows: int
    _before: tuple[float, pb.StatusReply] | None = None
    _found: list[pb.EntryInfo] = field(default_factory=list)
    _found_s: float = float("-inf")

    def sample(self) -> tuple[pb.StatusReply, pb.PeersReply, Rates | None]:
        """Ask the daemon. The rates are None the first time, and after a restart of the daemon."""
        now_s = time.monotonic()
        status = self.call("Status", pb.StatusRequest())
        peers = self.call("Peers", pb.PeersRequest())
        if now_s - self._found_s >= ENTRIES_PERIOD_S:
            self._found = list(islice(self.entries(), MAX_LISTED))
            self._found_s = now_s
        before, self._before = self._before, (now_s, status)
        if before is None or before[1].incarnation != status.incarnation:
            return status, peers, None
        return status, peers, _rates(before[1], status, now_s - before[0])

    def biggest(self) -> list[pb.EntryInfo]:
        return heapq.nlargest(self.rows, self._found, key=lambda entry: entry.content.nbytes)

    def hottest(self) -> list[pb.EntryInfo]:
        return heapq.nlargest(self.rows, self._found, key=lambda entry: entry.hits)

    def as_json(self) -> dict[str, Any]:
        status, peers, rates = self.sample()
        ratio = None if rates is None else rates.hit_ratio
        return {
            "status": render.plain(status),
            "peers": render.plain(peers),
            "per_second": None if rates is None else vars(rates) | {"hit_ratio": ratio},
            "biggest": [render.plain(entry) for entry in self.biggest()],
            "hottest": [render.plain(entry) for entry in self.hottest()],
        }

    def frame(self) -> RenderableType:
        status, peers, rates = self.sample()
        return Group(
            _head(status, rates),
            Columns([_entries("hottest", self.hottest()), _entries("biggest", self.biggest())]),
            *([render.peers_table(peers)] if peers.peers else []),
            *(
                [f"Hottest and biggest among the first {MAX_LISTED:,} entries."]
                if len(self._found) == MAX_LISTED
                else []
            ),
        )


def _rates(before: pb.StatusReply, now: pb.StatusReply, seconds: float) -> Rates:
    old, new = before.counters, now.counters

    def rate(name: str) -> float:
        return float(getattr(new, name) - getattr(old, name)) / seconds

    def rate_of_all(name: str) -> float:
        return float(sum(getattr(new, name).values()) - sum(getattr(old, name).values())) / seconds

    def rate_of_pools(name: str) -> float:
        gone, there = (sum(getattr(pool, name) for pool in s.pools) for s in (before, now))
        return float(there - gone) / seconds

    return Rates(
        *(rate(name) for name in ("hits", "misses", "puts")),
        *(rate_of_all(name) for name in ("evictions", "refused")),
        *(rate(name) for name in ("bytes_in", "bytes_out", "saved_s")),
        *(rate_of_pools(name) for name in ("given_up_s",)),
    )


def _head(status: pb.StatusReply, rates: Rates | None) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    state = render.plain(status)["state"]
    table.add_row(escape(status.name), escape(f"{state}, {status.version}, pid {status.pid}"))
    names = render.names_of_pools(status)
    for pool in status.pools:
        used = f"{size_text(pool.used_bytes)} of {size_text(pool.pool_bytes)}"
        table.add_row(
            escape(f"{names[pool.pool]} pool"),
            f"{used} ({render.share(pool.used_bytes, pool.pool_bytes)}), "
            f"{size_text(pool.leased_bytes)} leased, fragmentation {pool.fragmentation:.0%}"
            + (f", worth {render.duration(pool.worth_s)} of encoding" if pool.worth_s else ""),
        )
    table.add_row(
        "now",
        f"{status.entries:,} entries, {status.sessions} sessions, {status.leases} leases, "
        f"{status.waits} waits",
    )
    if rates is None:
        table.add_row("per second", "at the next look")
        return table
    ratio = "-" if rates.hit_ratio is None else f"{rates.hit_ratio:.1%}"
    table.add_row(
        "lookups/s", f"{rates.hits:,.0f} hits, {rates.misses:,.0f} misses, hit ratio {ratio}"
    )
    table.add_row(
        "served/s", f"{size_text(rates.bytes_out)}, {rates.saved_s:.2f} s of encoding saved"
    )
    table.add_row(
        "stored/s",
        f"{rates.puts:,.0f} puts, {size_text(rates.bytes_in)}; {rates.evictions:,.0f} evicted, "
        f"{rates.given_up_s:.2f} s of encoding given up for room, {rates.refused:,.0f} refused",
    )
    return table


def _entries(title: str, found: list[pb.EntryInfo]) -> Table:
    table = Table("mm_hash", "namespace", "size", "hits", "idle", title=title)
    for entry in found:
        table.add_row(
            escape(render.short(entry.key.mm_hash)),
            escape(render.short(entry.key.namespace)),
            size_text(entry.content.nbytes),
            f"{entry.hits:,}",
            render.duration(entry.idle_s),
        )
    return table
