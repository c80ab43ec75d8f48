"""Entries for people: a row for each, or the sums of their namespaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from rich.console import Console
from rich.table import Table

from ecd_client.cli import render
from ecd_client.cli.render import escape
from ecd_proto import tables
from ecd_proto.contract import duration_text, size_text
from ecd_proto.v1 import cache_pb2 as pb

MAX_WIDTH = 10_000
"""Columns of a table whose rows are whole, for programs that read lines."""
LEFT_OUT = ("dtype", "shape", "pool", "leases", "age", "idle", "hits")
"""Columns that a narrow terminal does without, one after the other."""


def entries(out: Console, found: list[pb.EntryInfo], pools: Mapping[int, str], whole: bool) -> None:
    """Show entries, a row each, their keys `whole` or shortened; `pools` names their pools."""
    if not found:
        return
    table = tables.unframed(
        *("namespace", "mm_hash", "pool", "dtype", "shape", "size"),
        *("leases", "hits", "age", "idle"),
        *(["left"] if any(entry.HasField("expires_in_s") for entry in found) else []),
        *(["kept"] if any(entry.kept for entry in found) else []),
    )
    headers = {column.header for column in table.columns}
    for column in table.columns:
        column.no_wrap = True
    key, space = (str, str) if whole else (render.short, render.short_namespace)
    for entry in found:
        table.add_row(
            escape(space(entry.key.namespace)),
            escape(key(entry.key.mm_hash)),
            escape(pools.get(entry.pool, str(entry.pool))),
            escape(entry.content.dtype),
            "x".join(map(str, entry.content.shape)) or "scalar",
            size_text(entry.content.nbytes),
            str(entry.leases),
            str(entry.hits),
            duration_text(entry.age_s),
            duration_text(entry.idle_s),
            *(text for name, text in _terms(entry) if name in headers),
        )
    if whole:
        wide = Console(file=out.file, highlight=False, emoji=False, width=MAX_WIDTH)
        tables.show(wide, table)
    else:
        tables.show(out, _fitting(table, out))


def _fitting(table: Table, out: Console) -> Table:
    """The table, or one without as many of its columns as the others need to be whole."""
    wide = out.options.update(width=MAX_WIDTH)
    for name in LEFT_OUT:
        if out.measure(table, options=wide).maximum <= out.width:
            break
        kept = [column for column in table.columns if column.header != name]
        table = tables.unframed(*(str(column.header) for column in kept))
        for column in table.columns:
            column.no_wrap = True
        for row in zip(*(column.cells for column in kept), strict=True):
            table.add_row(*row)
    return table


@dataclass
class NamespaceRow:
    """The number, the bytes and the least age of a namespace's entries, its rules and lookups."""

    entries: int = 0
    nbytes: int = 0
    newest_s: float | None = None  # age of the entry that was stored last
    quota_bytes: int | None = None
    ttl_s: float | None = None
    reused: int | None = None
    handed_over: int | None = None
    misses: int | None = None
    saved_s: float | None = None
    evictions: int | None = None
    refused: int | None = None

    def rule(self, ruled: pb.NamespaceStatus | pb.NamespaceCounters) -> None:
        """Fill in the namespace's quota and TTL."""
        self.quota_bytes = ruled.quota_bytes if ruled.HasField("quota_bytes") else None
        self.ttl_s = ruled.ttl_s if ruled.HasField("ttl_s") else None

    def count(self, counted: pb.NamespaceCounters) -> None:
        """Fill in the lookups since the daemon's start, and the rules."""
        self.rule(counted)
        self.reused, self.handed_over = round(counted.reused), round(counted.handed_over)
        self.misses, self.saved_s = counted.misses, counted.saved_s
        self.evictions, self.refused = counted.evictions, counted.refused

    def add(self, entry: pb.EntryInfo) -> None:
        self.entries += 1
        self.nbytes += entry.content.nbytes
        self.newest_s = min(inf if self.newest_s is None else self.newest_s, entry.age_s)


def namespaces(out: Console, found: dict[str, NamespaceRow]) -> None:
    if not found:
        return
    quotas = any(each.quota_bytes is not None for each in found.values())
    ttls = any(each.ttl_s is not None for each in found.values())
    table = tables.unframed(
        "namespace", "entries", "size", "last stored", "reused", "misses", "saved"
    )
    table.columns[0].overflow = "fold"
    for name in ["quota"] * quotas + ["TTL"] * ttls:
        table.add_column(name)
    for name, total in found.items():
        newest = "" if total.newest_s is None else f"{duration_text(total.newest_s)} ago"
        more = [
            *("" if each is None else f"{each:,}" for each in (total.reused, total.misses)),
            "" if total.saved_s is None else duration_text(total.saved_s),
            *(["" if total.quota_bytes is None else size_text(total.quota_bytes)] * quotas),
            *(["" if total.ttl_s is None else duration_text(total.ttl_s)] * ttls),
        ]
        table.add_row(escape(name), f"{total.entries:,}", size_text(total.nbytes), newest, *more)
    tables.show(out, table)


def _terms(entry: pb.EntryInfo) -> list[tuple[str, str]]:
    """The cells of what operators have set: the time left, and whether the entry is kept."""
    kept = f"for {duration_text(entry.kept_for_s)}" if entry.kept_for_s else "kept"
    left = duration_text(entry.expires_in_s) if entry.HasField("expires_in_s") else ""
    return [("left", left), ("kept", kept if entry.kept else "")]
