"""`ecd-cli top`: what the daemon's status page shows, and its hottest and biggest entries."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table

from ecd_client import clock
from ecd_client.cli import render
from ecd_client.cli.render import escape
from ecd_proto import tables
from ecd_proto.contract import NEVER_ASKED, count_text, duration_text, size_text
from ecd_proto.findings import GOOD, POOL_CAUSES, examine, refusal
from ecd_proto.plain import plain, status_document
from ecd_proto.v1 import cache_pb2 as pb

MAX_LISTED = 20_000
"""Entries among which the biggest and the hottest are sought."""
ENTRIES_PERIOD_S = 5.0
"""Seconds for which a list of more than FEW entries is shown again."""
FEW = 1000
NAMESPACE_LESS = 57
"""Columns that a row of an entry takes besides the beginning of its namespace."""
BAR_CELLS = 24


@dataclass(frozen=True)
class Rates:
    """The daemon's counters per second, between two samples."""

    hits: float
    handed_over: float
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

    @property
    def saved_ratio(self) -> float | None:
        return _saved_ratio(self.hits - self.handed_over, self.misses)

    @property
    def document(self) -> dict[str, float | None]:
        return vars(self) | {"hit_ratio": self.hit_ratio, "saved_ratio": self.saved_ratio}


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
        now_s = clock.now_s()
        status = self.call("Status", pb.StatusRequest())
        peers = self.call("Peers", pb.PeersRequest())
        if len(self._found) <= FEW or now_s - self._found_s >= ENTRIES_PERIOD_S:
            self._found = list(islice(self.entries(), MAX_LISTED))
            self._found_s = now_s
        before, self._before = self._before, (now_s, status)
        if before is None or before[1].incarnation != status.incarnation:
            return status, peers, None
        return status, peers, _rates(before[1], status, now_s - before[0])

    @property
    def is_cut(self) -> bool:
        """Whether there may be hotter and bigger entries, which were not listed."""
        return len(self._found) == MAX_LISTED

    def biggest(self) -> list[pb.EntryInfo]:
        largest = heapq.nlargest(self.rows, self._found, key=lambda entry: entry.content.nbytes)
        return self._aged(largest)

    def hottest(self) -> list[pb.EntryInfo]:
        used = (entry for entry in self._found if entry.hits)
        return self._aged(heapq.nlargest(self.rows, used, key=lambda entry: entry.hits))

    def _aged(self, listed: list[pb.EntryInfo]) -> list[pb.EntryInfo]:
        """The entries as if listed now."""
        since_s, found = clock.now_s() - self._found_s, [pb.EntryInfo() for _ in listed]
        for entry, before in zip(found, listed, strict=True):
            entry.CopyFrom(before)
            entry.age_s, entry.idle_s = before.age_s + since_s, before.idle_s + since_s
        return found

    def as_json(self) -> dict[str, Any]:
        status, peers, rates = self.sample()
        return {
            "status": status_document(status),
            "peers": plain(peers),
            "per_second": None if rates is None else rates.document,
            "biggest": [plain(entry) for entry in self.biggest()],
            "hottest": [plain(entry) for entry in self.hottest()],
        }

    def frame(self, width: int | None = 120) -> RenderableType:
        """The tables for people: on a terminal of `width` columns, or plain, without one.

        On a terminal the lists stand side by side where they fit.
        """
        chars = max(12, min(render.MODEL_CHARS, (width or tables.PIPE_WIDTH) - NAMESPACE_LESS))
        status, peers, rates = self.sample()
        head = _head(status, rates, has_bars=width is not None)
        shown: list[RenderableType] = [head, *_trouble(status, peers), ""]
        lists = [
            _entries("hottest", self.hottest(), chars),
            _entries("biggest", self.biggest(), chars),
            _namespaces(status, self.rows),
        ]
        listed = [table for table in lists if table.row_count]
        if width is None:
            shown += [Padding(table, (0, 0, 1, 0)) for table in listed]
        else:
            shown.append(Columns(listed, padding=(0, 4, 1, 0)))
        if asked := [peer for peer in peers.peers if peer.state != NEVER_ASKED]:
            shown += [render.peers_table(asked), *render.peers_errors(asked)]
        return Group(*shown)


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
        *(rate(name) for name in ("hits", "handed_over", "misses", "puts")),
        *(rate_of_all(name) for name in ("evictions", "refused")),
        *(rate(name) for name in ("bytes_in", "bytes_out", "saved_s")),
        *(rate_of_pools(name) for name in ("given_up_s",)),
    )


def _head(status: pb.StatusReply, rates: Rates | None, has_bars: bool) -> Table:
    table = tables.unframed()
    table.add_column(style="bold")
    state = plain(status)["state"]
    colour = "green" if state == "serving" else "yellow"
    table.add_row(
        f"[cyan]{escape(status.name)}[/]",
        f"[bold {colour}]{state}[/], {escape(status.version)}, "
        f"up {duration_text(status.uptime_s)}, pid {status.pid}",
    )
    names = render.names_of_pools(status)
    for pool in status.pools:
        more = f"{size_text(pool.leased_bytes)} leased, fragmentation {pool.fragmentation:.0%}"
        if pool.worth_s:
            more += f", worth {duration_text(pool.worth_s)} of encoding"
        used = _used(pool.used_bytes, pool.pool_bytes, has_bars)
        table.add_row(escape(f"{names[pool.pool]} pool"), used)
        table.add_row("", more)
    if status.HasField("disk"):
        disk, of = status.disk, count_text(status.disk.entries, "entry")
        used = _used(disk.used_bytes, disk.pool_bytes, has_bars, f", {of}")
        table.add_row("disk tier", used)
    held = ((status.sessions, "session"), (status.leases, "lease"), (status.waits, "wait"))
    table.add_row(
        "now", ", ".join(count_text(*each) for each in ((status.entries, "entry"), *held))
    )
    counters = status.counters
    saved = _saved_ratio(counters.hits - counters.handed_over, counters.misses)
    table.add_row(
        "in all", f"{_ratio(saved)} of encodes saved, {duration_text(counters.saved_s)} of encoding"
    )
    if rates is None:
        table.add_row("per second", "at the next look")
        return table
    table.add_row(
        "lookups/s",
        f"{rates.hits:,.0f} hits, {rates.handed_over:,.0f} of them handed over, "
        f"{rates.misses:,.0f} misses; {_ratio(rates.saved_ratio)} of encodes saved",
    )
    table.add_row(
        "served/s", f"{size_text(rates.bytes_out)}, {rates.saved_s:.2f} s of encoding saved"
    )
    refused = f"{rates.refused:,.0f} refused"
    table.add_row(
        "stored/s",
        f"{rates.puts:,.0f} puts, {size_text(rates.bytes_in)}, "
        + (f"[red]{refused}[/]" if rates.refused else refused),
    )
    table.add_row(
        "evicted/s",
        f"{rates.evictions:,.0f} entries, {rates.given_up_s:.2f} s of encoding given up for room",
    )
    return table


def _used(used_bytes: int, pool_bytes: int, has_bar: bool, more: str = "") -> RenderableType:
    """The bytes in use in words, behind a bar if it `has_bar`."""
    share = render.share(used_bytes, pool_bytes)
    said = f"{size_text(used_bytes)} of {size_text(pool_bytes)} ({share}){more}"
    if not has_bar:
        return said
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(max(1, pool_bytes), used_bytes, BAR_CELLS, complete_style="blue")
    row.add_row(bar, said)
    return row


def _saved_ratio(reused: float, misses: float) -> float | None:
    """Reused entries as a share of the encodes that there would have been without them."""
    return reused / (reused + misses) if reused + misses else None


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"[bold green]{ratio:.1%}[/]"


def _trouble(status: pb.StatusReply, peers: pb.PeersReply) -> list[RenderableType]:
    """The findings that ask for something, and what was refused: nothing if all is well."""
    lines: list[RenderableType] = []
    for found in examine(status, peers):
        if found.state != GOOD:
            state = f"[bold {render.COLOURS[found.state]}]{found.state:>4}[/]"
            lines.append(f"{state}  [bold]{found.check}[/]: {escape(found.found)}")
            lines.append(f"      [dim]{escape(found.advice)}[/]")
    for cause, count in sorted(status.counters.refused.items()):
        if count and cause not in POOL_CAUSES:  # of which the finding tells
            words = refusal(cause)
            lines.append(f"[bold yellow]look[/]  {escape(words.text(count))}")
            lines.append(f"      [dim]{words.advice}[/]")
    return ["", *lines] if lines else []


def _entries(title: str, found: list[pb.EntryInfo], chars: int) -> Table:
    table = _table(title, "mm_hash", "namespace", "size", "hits", "idle")
    for entry in found:
        table.add_row(
            escape(render.short(entry.key.mm_hash)),
            escape(render.short_namespace(entry.key.namespace, chars)),
            size_text(entry.content.nbytes),
            f"{entry.hits:,}",
            duration_text(entry.idle_s),
        )
    return table


def _namespaces(status: pb.StatusReply, rows: int) -> Table:
    """The largest namespaces, and all others together."""
    table = _table("namespaces", "namespace", "entries", "size")
    named, others = status.namespaces[:rows], status.other_namespaces
    for each in named:
        name = escape(render.short_namespace(each.namespace))
        table.add_row(name, f"{each.entries:,}", size_text(each.nbytes))
    entries = others.entries + sum(each.entries for each in status.namespaces[rows:])
    nbytes = others.nbytes + sum(each.nbytes for each in status.namespaces[rows:])
    if entries:
        table.add_row("[dim]others[/]", f"{entries:,}", size_text(nbytes))
    return table


def _table(title: str, *heads: str) -> Table:
    table = tables.unframed(*heads)
    table.title, table.title_style, table.title_justify = title, "bold cyan", "left"
    for column in table.columns:
        is_name = column.header in ("mm_hash", "namespace")
        column.justify, column.no_wrap = "left" if is_name else "right", True
    return table
