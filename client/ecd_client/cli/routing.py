"""The commands that show what routers are told: holders of keys, changes as they come, encoders."""

from __future__ import annotations

import contextlib
import json
from base64 import b64encode
from typing import Annotated, Any

import typer

from ecd_client import clock
from ecd_client.cli import names, render
from ecd_client.cli.context import (
    DEFAULT_NAMESPACE,
    FAILED,
    OTHER_NAMESPACES,
    USAGE,
    AsJson,
    Namespace,
    Options,
    errors,
    fail,
    out,
)
from ecd_client.cli.render import escape, legible
from ecd_client.locate import Located, located
from ecd_proto import tables
from ecd_proto.contract import duration_text, size_text
from ecd_proto.v1 import cache_pb2 as pb

NO_ENCODERS = (
    "No encoder is registered. An engine that stores (ec_producer, ec_both) registers itself if "
    "its server has --middleware ecd_client.vllm.ReuseMiddleware."
)


def locate(
    context: typer.Context,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Items' mm_hashes.")],
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show which nodes hold these keys. Exit code 1 if no node holds one of them.

    The namespace is by default the one in which this node has a key, or `default` if it has none.
    """
    options: Options = context.obj
    for key in keys:
        if not key.isprintable():
            fail(USAGE, f"{key!r} cannot be a key of an item")
    if namespace is not None:
        namespace = names.whole_namespace(options, namespace)
    pairs = [names.found(options, key, namespace) for key in keys]
    keys = [of_key[0][0] if of_key else key for key, of_key in zip(keys, pairs, strict=True)]
    is_guessed = False
    if namespace is None:
        namespace = _namespace_of(pairs)
        is_guessed, namespace = namespace is None, namespace or DEFAULT_NAMESPACE
    request = pb.LocateRequest(keys=[pb.Key(namespace=namespace, mm_hash=key) for key in keys])
    found = located(options.call("Locate", request))
    if as_json or options.as_json:
        holders = {
            key: [
                {**holder._asdict(), "metadata": b64encode(holder.metadata).decode() or None}
                for holder in of_key
            ]
            for key, of_key in zip(keys, found.holders, strict=True)
        }
        shown = {"namespace": namespace, "is_partial": found.is_partial, "located": holders}
        render.as_json(out, shown)
    else:
        _show(keys, found)
    if not all(found.holders):
        if is_guessed:
            fail(FAILED, f"looked in the namespace {namespace!r}.\n{OTHER_NAMESPACES}")
        raise typer.Exit(FAILED)


def _namespace_of(pairs: list[list[tuple[str, str]]]) -> str | None:
    """The namespace of the first key that this node has; several of it end the command."""
    for (key, namespace), *others in filter(None, pairs):
        if others:
            fail(USAGE, f"{key!r} is in several namespaces: choose one with --namespace")
        return namespace
    return None


def _show(keys: list[str], found: Located) -> None:
    table = tables.unframed("mm_hash", "node", "size", "stored")
    for key, holders in zip(keys, found.holders, strict=True):
        for holder in holders:
            size = "" if holder.nbytes is None else size_text(holder.nbytes)
            age = "" if holder.age_s is None else f"{duration_text(holder.age_s)} ago"
            table.add_row(*map(escape, (key, holder.node, size, age)))
        if not holders:
            table.add_row(*map(escape, (key, "nowhere")))
    tables.show(out, table)
    if found.is_partial:
        out.print("The directory or a node did not answer, or there is none: others may hold more.")


def encoders(context: typer.Context, as_json: AsJson = False) -> None:
    """List the encoders that have registered themselves, this node's first, and their load."""
    options: Options = context.obj
    with errors.status("asking the daemon ..."):
        reply = options.call("Encoders", pb.EncodersRequest())
    found = [_plain_encoder(each, reply.node) for each in reply.encoders]
    if as_json or options.as_json:
        render.as_json(out, {"node": reply.node, "encoders": found})
        return
    if not found:
        out.print(NO_ENCODERS, soft_wrap=True)
        return
    table = tables.unframed("url", "node", "role", "namespace", "requests", "registered")
    for each in found:
        node = f"{each['node']} (this one)" if each["own"] else each["node"]
        short = render.short_namespace(each["namespace"])
        age = f"{duration_text(each['age_s'])} ago"
        active = str(each["active"])
        table.add_row(*map(escape, (each["url"], node, each["role"], short, active, age)))
    tables.show(out, table)


def _plain_encoder(encoder: pb.Encoder, own_node: str) -> dict[str, Any]:
    return {
        "url": encoder.url,
        "node": encoder.node or own_node,
        "own": not encoder.node,
        "namespace": encoder.namespace,
        "role": "ec_both" if encoder.loads else "ec_producer",
        "engine": encoder.engine,
        "active": encoder.active,
        "age_s": round(encoder.age_s, 3),
    }


def watch(context: typer.Context, as_json: AsJson = False) -> None:
    """Print what this daemon holds, then its changes as they come, until Ctrl-C.

    With --json one object a line; `nbytes` is null where an entry was removed.
    """
    options: Options = context.obj
    status = options.call("Status", pb.StatusRequest())
    if not status.events:
        fail(FAILED, "this daemon publishes no events: start it with ECD_EVENTS_ADDRESS")
    try:
        from ecd_client.events import Change, Subscriber
    except ImportError as error:
        fail(FAILED, f"{error}: pip install 'encoder-cache-daemon[events]'")

    def line(change: Change) -> str:
        now = clock.now_text()
        if as_json or options.as_json:
            return json.dumps({"time": now, **change._asdict()})
        stored = change.nbytes is not None
        what = f"stored   {size_text(change.nbytes or 0)}" if stored else "removed"
        return f"{now} {what:<20} {legible(change.namespace)} {legible(change.mm_hash)}"

    with (
        contextlib.suppress(KeyboardInterrupt),
        Subscriber([(status.events, status.events_replay)]) as subscriber,
    ):
        was_current = True
        while True:
            for change in subscriber.changes(timeout=1.0):
                typer.echo(line(change))
            if was_current and not subscriber.is_current:
                typer.echo("the daemon is silent: what it holds now is not known", err=True)
            was_current = subscriber.is_current
