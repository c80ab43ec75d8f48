"""`ecd-cli slow`: what took long lately, and where its time went."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ecd_client import clock
from ecd_client.cli import render
from ecd_client.cli.context import AsJson, Options, errors, out
from ecd_client.cli.render import escape
from ecd_proto import tables
from ecd_proto.contract import size_text
from ecd_proto.v1 import cache_pb2 as pb


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
        tables.show(out, _table(reply))
    kept, total = len(reply.events), reply.total
    least = f"{reply.slow_s:g} s, of fetches {reply.slow_fetch_s:g} s (ECD_SLOW_LOG_S)"
    errors.print(f"{kept:,} of {total:,} since the start; slow is what takes {least}.")


def _table(reply: pb.SlowReply) -> Table:
    table = tables.unframed(
        *("began", "kind", "took", "of it", "key", "namespace", "size", "peer", "outcome")
    )
    for event in reply.events:
        spent = sorted(event.stages.items(), key=lambda each: -each[1])
        more = f" +{event.keys - 1:,}" if event.keys > 1 else ""
        table.add_row(
            f"{clock.local(event.unix_s):%m-%d %H:%M:%S}",
            escape(event.kind),
            f"{event.seconds:.3f} s",
            escape(", ".join(f"{stage} {s:.3f} s" for stage, s in spent if s >= 0.0005)),
            escape(render.short(event.mm_hash) + more),
            escape(render.short_namespace(event.namespace)),
            size_text(event.nbytes) if event.nbytes else "",
            escape(event.peer),
            escape(event.outcome),
        )
    return table
