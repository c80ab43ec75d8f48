"""The commands that show how a daemon is, and measure it."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from ecd_client import clock
from ecd_client.cli import render
from ecd_client.cli.bench import BENCH_KEYS, SIZES, cut_by_quota, fits, measure
from ecd_client.cli.context import FAILED, AsJson, Options, errors, fail, out, seconds
from ecd_client.cli.doctor import examine
from ecd_client.cli.keys import keys
from ecd_client.cli.render import escape
from ecd_client.cli.top import MAX_LISTED, Top
from ecd_client.errors import DaemonUnavailable, EcdError
from ecd_proto import tables
from ecd_proto.contract import BENCH_NAMESPACE, size_text
from ecd_proto.findings import BAD
from ecd_proto.plain import status_document
from ecd_proto.v1 import cache_pb2 as pb

LEAST_INTERVAL_S = 0.2
CUT = f"Hottest and biggest among the first {MAX_LISTED:,} entries."


def status(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the daemon's state, pool, clients and hits."""
    options: Options = context.obj
    with errors.status("asking the daemon ..."):
        reply = options.call("Status", pb.StatusRequest())
    if as_json or options.as_json:
        render.as_json(out, status_document(reply, options.address))
    else:
        render.status(out, reply, options.address)


def peers(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the other nodes: whether they are reached, by which transport, and how reads go."""
    options: Options = context.obj
    with errors.status("asking the daemon ..."):
        reply = options.call("Peers", pb.PeersRequest())
    if as_json or options.as_json:
        render.as_json(out, reply)
    else:
        render.peers(out, reply)


def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Look for faults, and say what to do about them. Exit code 1 if there is one to fix."""
    options: Options = context.obj
    found = []
    for finding in examine(options.address, options.call):
        found.append(finding)
        if not (as_json or options.as_json):
            render.finding(out, finding)
    if as_json or options.as_json:
        render.as_json(out, [vars(finding) for finding in found])
    if any(finding.state == BAD for finding in found):
        raise typer.Exit(FAILED)


def bench(
    context: typer.Context,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each size.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Put and get entries of its own, and check every byte.

    Evicts nothing else, and is no part of the daemon's counters of hits and puts.
    """
    options: Options = context.obj
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))  # its entries are evicted at the end
    before = options.call("Status", pb.StatusRequest())
    room_bytes = before.pools[0].largest_free_bytes if before.pools else 0
    quota = ""

    def evict(namespace: str) -> None:
        options.call("Evict", pb.EvictRequest(namespace=namespace))

    with errors.status("putting and getting ...") as progress:
        rows = []
        try:
            for row in measure(options.address, room_bytes, rounds, evict):
                rows.append(row)
                progress.update(f"{row.size} is done ...")
        except EcdError:
            after = options.call("Status", pb.StatusRequest())
            if cut_by_quota(after) == cut_by_quota(before):
                raise
            need = size_text(2 * BENCH_KEYS * max(SIZES.values()))
            quota = (
                "a quota evicts or refuses its entries: "
                f'add "{BENCH_NAMESPACE}*={need}" to ECD_NAMESPACE_QUOTAS'
            )
    if quota and not rows:
        fail(FAILED, quota)
    if not rows:
        fail(FAILED, "there is no room for it without evicting anything: ecd-cli evict first")
    if as_json or options.as_json:
        render.as_json(out, [vars(row) for row in rows])
    else:
        render.measured(out, rows)
    if quota:
        errors.print(f"Not measured: {', '.join([*SIZES][len(rows) :])}; {quota}.")
    elif left_out := ", ".join(
        size for size, nbytes in SIZES.items() if not fits(nbytes, room_bytes)
    ):
        room = size_text(room_bytes)
        errors.print(
            f"Not measured for lack of room: {left_out}. The largest free piece has {room}; "
            f"a size takes {2 * BENCH_KEYS} entries."
        )


def top(
    context: typer.Context,
    interval: Annotated[
        str, typer.Option(help="Time between looks: 500ms, 2s, 1m; 2 is 2s.")
    ] = "1s",
    rows: Annotated[int, typer.Option(min=1, help="Entries shown of each kind.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what happens now: health, rates, hit ratio, namespaces, entries, peers, until q.

    With --json one object a line, until Ctrl-C.
    """
    options: Options = context.obj
    is_number = interval.replace(".", "", 1).isdigit()
    interval_s = seconds("--interval", f"{interval}s" if is_number else interval)
    if interval_s < LEAST_INTERVAL_S:
        raise typer.BadParameter(f"--interval must be at least 200ms, got {interval!r}")
    shown = Top(options.call, lambda: options.entries(pb.ListRequest(limit=1000)), rows)
    if as_json or options.as_json:
        with contextlib.suppress(KeyboardInterrupt):
            _print_lines(shown, interval_s, once)
        return
    if once or not out.is_terminal:
        shown.sample()
        clock.sleep(interval_s)
        tables.show(out, shown.frame(out.width if out.is_terminal else None))
        if shown.is_cut:
            errors.print(CUT)
        return
    over = threading.Event()

    def frame() -> RenderableType:
        try:
            return Group(shown.frame(out.width), *([CUT] if shown.is_cut else []))
        except DaemonUnavailable as error:
            return f"[bold red]no answer[/]  {render.escape(str(error))}\nThis asks again."

    def stop(*_: object) -> None:
        over.set()  # an exception in a finalizer goes nowhere
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    with (
        contextlib.suppress(KeyboardInterrupt),
        keys() as key,
        Live(frame(), console=out) as live,
    ):
        looked_s = clock.now_s()
        while not over.is_set():
            pressed = key(max(0.0, looked_s + interval_s - clock.now_s()))
            if pressed in ("q", "Q"):
                return
            if not pressed:
                live.update(frame(), refresh=True)
                looked_s = clock.now_s()


def _print_lines(shown: Top, interval: float, once: bool) -> None:
    """Print one object a line, as many as `once` says or without an end."""
    shown.sample()
    while True:
        clock.sleep(interval)
        head = {"schema": "ecd.top/1", "time": clock.now_text()}
        typer.echo(json.dumps(head | shown.as_json()))
        if once:
            return


def slow(
    context: typer.Context,
    clear: Annotated[bool, typer.Option("--clear", help="Forget what is shown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the last calls, puts, fetches and disk reads that took long, the newest first."""
    options: Options = context.obj
    reply = options.call("Slow", pb.SlowRequest(clear=clear))
    if as_json or options.as_json:
        render.as_json(out, reply)
        return
    if reply.events:
        tables.show(out, _slow_table(reply))
    kept, total = len(reply.events), reply.total
    least = f"{reply.slow_s:g} s, of fetches {reply.slow_fetch_s:g} s (ECD_SLOW_LOG_S)"
    errors.print(f"{kept:,} of {total:,} since the start; slow is what takes {least}.")


def _slow_table(reply: pb.SlowReply) -> Table:
    table = tables.unframed(
        *("began", "kind", "took", "of it", "key", "namespace", "size", "peer", "outcome")
    )
    for event in reply.events:
        spent = sorted(event.stages.items(), key=lambda each: -each[1])
        more = f" +{event.keys - 1:,}" if event.keys > 1 else ""
        table.add_row(
            f"{clock.local(event.unix_s):%m-%d %H:%M:%S}",
            escape(render.words(event.kind)),
            f"{event.seconds:.3f} s",
            escape(", ".join(f"{stage} {s:.3f} s" for stage, s in spent if s >= 0.0005)),
            escape(render.short(event.mm_hash) + more),
            escape(render.short_namespace(event.namespace)),
            size_text(event.nbytes) if event.nbytes else "",
            escape(event.peer),
            escape(render.words(event.outcome)),
        )
    return table
