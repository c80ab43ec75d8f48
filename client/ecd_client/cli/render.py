"""One result, two renderings: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from ecd_client.cli.bench import Measured
from ecd_proto import tables
from ecd_proto.contract import count_text, duration_text, pool_names, size_text
from ecd_proto.findings import BAD, DOUBTFUL, GOOD, Finding, disk_rests, populated, refusal
from ecd_proto.plain import plain
from ecd_proto.v1 import cache_pb2 as pb

MODEL_CHARS = 40
"""Most letters of a namespace's beginning that tables show."""


def legible(text: str) -> str:
    """The text, with characters that a terminal would act on written as in Python's literals."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def legible_lines(text: str) -> str:
    """The same of each line."""
    return "\n".join(map(legible, text.split("\n")))


def escape(text: str) -> str:
    """Text from anywhere for a console: it has no markup, and a terminal acts on none of it."""
    return escape_markup(legible(text))


def as_json(out: Console, result: Message | dict[str, Any] | list[dict[str, Any]]) -> None:
    out.print_json(json.dumps(plain(result) if isinstance(result, Message) else result))


def status(out: Console, reply: pb.StatusReply, address: str) -> None:
    counters = reply.counters
    state = plain(reply)["state"]
    if state == "populating":
        state += f" {populated(reply)}"
    lookups, reused = counters.hits + counters.misses, counters.hits - counters.handed_over
    encodes = reused + counters.misses
    names = names_of_pools(reply)
    rows = [
        ("daemon", f"{reply.version}, contract {reply.contract_version}, pid {reply.pid}"),
        ("address", address),
        ("name", reply.name),
        ("node", reply.node or "alone"),
        *([("other nodes", _counts(reply.peers))] if reply.node else ()),
        ("incarnation", reply.incarnation[:12]),
        ("state", f"{state}, up {duration_text(reply.uptime_s)}{_at_work(reply)}"),
        *(row for pool in reply.pools for row in _pool(names[pool.pool], pool)),
        ("entries", f"{reply.entries:,}" + _recovered(counters)),
        *(_disk(reply.disk) if reply.HasField("disk") else ()),
        ("clients", ", ".join(count_text(*each) for each in _held(reply))),
        *_engines(reply),
        *_gpus(reply),
        (
            "hits",
            f"{counters.hits:,} of {count_text(lookups, 'lookup')} "
            f"({share(counters.hits, lookups)}), {size_text(counters.bytes_out)}; "
            f"{reused:,} reused, {counters.handed_over:,} handed over"
            if lookups
            else "no lookups yet",
        ),
        (
            "saved",
            f"{reused:,} of {count_text(encodes, 'encode')} ({share(reused, encodes)}), "
            f"{duration_text(counters.saved_s)}"
            if encodes
            else "no encodes yet",
        ),
        (
            "puts",
            f"{counters.puts:,}, {size_text(counters.bytes_in)}; "
            f"{count_text(counters.duplicates, 'duplicate')}, {counters.aborts:,} given up",
        ),
        ("evictions", _counts(counters.evictions)),
        ("refused", "; ".join(_refused(counters)) or "none"),
        *_apart(reply),
    ]
    _facts(out, rows)


WORK = {
    "drained": "storing puts",
    "hashed": "hashing",
    "settled": "fetching from other nodes or telling them",
    "written": "writing to disk",
}
"""The work of each part of `Status.idle` while the part is not idle."""


def _refused(counters: pb.Counters) -> list[str]:
    causes = sorted(counters.refused.items())
    return [refusal(cause).text(count) for cause, count in causes if count]


def _at_work(reply: pb.StatusReply) -> str:
    """The work of the parts that are not idle; "" of a daemon too old to report them."""
    work = [said for part, said in WORK.items() if not getattr(reply.idle, part)]
    if not reply.idle.drained:  # until then the daemon says of none that it is done
        work = work[:1]
    return f"; {', '.join(work)}" if work and reply.HasField("idle") else ""


def _recovered(counters: pb.Counters) -> str:
    said = count_text(counters.recovered, "entry")
    return f"; {said} taken over from the last daemon" if counters.recovered else ""


def _held(reply: pb.StatusReply) -> list[tuple[int, str]]:
    return [(reply.sessions, "session"), (reply.leases, "lease"), (reply.waits, "wait")]


def _engines(reply: pb.StatusReply) -> list[tuple[str, str]]:
    """A row for each engine that has said what it is, whatever number of sessions it has."""
    rows: dict[str, tuple[str, str]] = {}
    for each in reply.engines:
        engine = each.engine
        verb = "shares" if engine.stores == engine.loads else "stores" if engine.stores else "loads"
        said = (
            f"pid {each.pid}, {engine.model}: {verb} {engine.shares}; namespace {engine.namespace}"
        )
        rows.setdefault(engine.id, ("engine", said))
    return list(rows.values())


def _apart(reply: pb.StatusReply) -> list[tuple[str, str]]:
    """Rows for what hits and puts leave out, where there has been some."""
    leases, puts = reply.counters.peer_leases, reply.bench.puts
    rows = [("for peers", count_text(leases, "lease"))] if leases else []
    return rows + ([("bench", f"{count_text(puts, 'put')} by ecd-cli bench")] if puts else [])


def _gpus(reply: pb.StatusReply) -> list[tuple[str, str]]:
    """A row for daemons whose clients have GPUs, or had."""
    said = [f"{reply.pinning} of {reply.sessions} sessions have pinned the pool"]
    if reply.waiting_for_dma:
        said.append(f"{reply.waiting_for_dma} ended, which GPUs may still copy for")
    if any(pool.kind == "device" for pool in reply.pools):
        said.append(f"{reply.counters.copies:,} copies made in device pools")
    is_of_use = reply.pinning or len(said) > 1
    return [("GPUs", "; ".join(said))] if is_of_use else []


def names_of_pools(reply: pb.StatusReply) -> dict[int, str]:
    """Names of the daemon's pools by their numbers, as in its metrics."""
    return pool_names({pool.pool: pool.kind for pool in reply.pools})


def _pool(name: str, pool: pb.PoolStatus) -> list[tuple[str, str]]:
    if pool.kind != "device":
        about = f"in {pool.path}, {share(pool.huge_bytes, pool.pool_bytes)} in huge pages"
    elif pool.populated_bytes:
        about = f"on {pool.path}"
    else:
        about = f"on {pool.path}: {pool.problem or 'no memory'}"
    return [
        (f"{name} pool", f"{size_text(pool.pool_bytes)} {about}"),
        ("used", f"{size_text(pool.used_bytes)} ({share(pool.used_bytes, pool.pool_bytes)})"),
        (
            "of which",
            f"{size_text(pool.leased_bytes)} leased, "
            f"{size_text(pool.reserved_bytes)} being written"
            + (
                f", {size_text(pool.kept_bytes)} kept ({count_text(pool.kept, 'entry')}; at most "
                f"{size_text(pool.kept_most_bytes)})"
                if pool.kept
                else ""
            ),
        ),
        (
            "free",
            f"{size_text(pool.free_bytes)}, the largest piece "
            f"{size_text(pool.largest_free_bytes)}, fragmentation {pool.fragmentation:.0%}",
        ),
    ]


def _disk(disk: pb.DiskStatus) -> list[tuple[str, str]]:
    resting = disk_rests(disk)
    return [
        ("disk tier", f"{size_text(disk.pool_bytes)} in {disk.path}"),
        (
            "on disk",
            f"{count_text(disk.entries, 'entry')}, {size_text(disk.used_bytes)} "
            f"({share(disk.used_bytes, disk.pool_bytes)}); "
            f"{disk.kept:,} of {disk.kept + disk.lost:,} evicted from memory",
        ),
        (
            "disk traffic",
            f"{count_text(disk.reads, 'read')}, {size_text(disk.read_bytes)}; "
            f"{count_text(disk.writes, 'write')}, "
            f"{size_text(disk.written_bytes)}; failures {_counts(disk.failures)}"
            + (f"; {resting}" if resting else ""),
        ),
    ]


def _facts(out: Console, rows: list[tuple[str, str]]) -> None:
    """Print a table of names and values. Values may come from anywhere: no markup is read."""
    table = tables.unframed()
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(escape(name), escape(text))
    tables.show(out, table)


def peers(out: Console, reply: pb.PeersReply) -> None:
    if not reply.node:
        out.print("This daemon serves its node alone: set ECD_PEER_ADDRESS to join others.")
        return
    directory = reply.directory
    known = f"{directory.kind}, {'up' if directory.up else 'DOWN: ' + directory.last_error}"
    if directory.nodes:
        known += f", {count_text(directory.nodes, 'node')} with this one"
    if directory.unpublished:
        known += f", {directory.unpublished:,} changes untold for {duration_text(directory.lag_s)}"
    rows = [
        ("node", reply.node),
        ("engine", f"{reply.engine} over {reply.protocol}"),
        ("directory", known),
        ("fetches", f"{_counts(reply.fetches)}; {reply.flights:,} under way"),
        (
            "set aside",
            f"{size_text(reply.set_aside_bytes)}; {count_text(reply.set_aside, 'time')} so far",
        ),
        ("retries", count_text(reply.read_retries, "read")),
        (
            "speculative",
            f"{count_text(reply.speculative_reads, 'read')}, "
            f"{reply.speculative_reads_used:,} of use",
        ),
    ]
    _facts(out, rows)
    tables.show(out, peers_table(reply.peers))
    for line in peers_errors(reply.peers):
        out.print(line, soft_wrap=True)
    if (left_out := directory.nodes - 1 - len(reply.peers)) > 0:
        out.print(f"{count_text(left_out, 'more node')} of the directory: never asked.")


def peers_table(peers: Iterable[pb.PeerStatus]) -> Table:
    table = tables.unframed(
        *("peer", "state", "incarnation", "over", "zone", "round trip", "reads", "bytes", "failed")
    )
    for peer in peers:
        table.add_row(
            *map(escape, (peer.node, peer.state, peer.incarnation[:12], peer.protocol, peer.zone)),
            f"{peer.round_trip_s * 1e3:.1f} ms" if peer.round_trip_s else "",
            f"{peer.reads:,}",
            size_text(peer.read_bytes),
            f"{peer.failed_reads:,}",
        )
    return table


def peers_errors(peers: Iterable[pb.PeerStatus]) -> list[str]:
    """A line for each peer that has failed: an error would not leave the table's columns room."""
    failed = [peer for peer in peers if peer.last_error]
    return [f"[bold]{escape(peer.node)}[/]: {escape(peer.last_error)}" for peer in failed]


def short(text: str) -> str:
    """A key for people: the same in every table."""
    return text if len(text) <= 20 else f"{text[:9]}..{text[-9:]}"


def short_namespace(text: str, chars: int = MODEL_CHARS) -> str:
    """A namespace for people, by its model: the beginning up to a bar, and the last letters."""
    model, _, _ = text.partition("|")
    shortened = f"{model[:chars]}..{text[-4:]}"
    return text if len(text) <= max(20, len(shortened)) else shortened


COLOURS = {GOOD: "green", DOUBTFUL: "yellow", BAD: "red"}


def finding(out: Console, found: Finding) -> None:
    colour = COLOURS[found.state]
    out.print(f"[{colour}]{found.state:>4}[/]  [bold]{found.check}[/]: {escape(found.found)}")
    if found.advice:
        out.print(f"      {escape(found.advice)}")


def measured(out: Console, rows: list[Measured]) -> None:
    table = tables.unframed("", *(row.size for row in rows))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, what in (
        ("put_us", "put"),
        ("read_us", "get, copied out"),
        ("copy_us", "a copy within this process"),
        ("get_us", "get, handle only"),
        ("contains_us", "contains"),
    ):
        table.add_row(what, *(f"{getattr(row, name):,.0f} us" for row in rows))
    tables.show(out, table)
    out.print("Medians. Every byte came back as it was put in.")


def evicted(out: Console, reply: pb.EvictReply, dry_run: bool) -> None:
    out.print(f"{'Would evict' if dry_run else 'Evicted'} {describe(reply)}.")


def describe(reply: pb.EvictReply) -> str:
    text = f"{count_text(reply.entries, 'entry')}, {size_text(reply.nbytes)}"
    if reply.kept:
        text += f"; {reply.kept:,} of them kept"
    if reply.leased:
        text += f"; {reply.leased:,} of them when their leases end"
    if reply.disk_entries:
        text += f"; {reply.disk_entries:,} on disk, {size_text(reply.disk_bytes)}"
    return text


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def words(name: str) -> str:
    """A name in snake_case for people."""
    return name.replace("_", " ")


def _counts(counts: Any) -> str:
    return ", ".join(f"{n:,} {words(name)}" for name, n in sorted(counts.items()) if n) or "none"
