"""The commands that show, copy and evict entries."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from ecd_client import clock
from ecd_client.cli import files, names, render, render_entries
from ecd_client.cli.context import (
    DEFAULT_NAMESPACE,
    FAILED,
    OTHER_NAMESPACES,
    AsJson,
    CommandFailed,
    MmHash,
    Namespace,
    Options,
    confirm,
    errors,
    fail,
    known_namespaces,
    out,
    seconds,
)
from ecd_client.client import Client
from ecd_client.errors import DaemonUnavailable
from ecd_client.item import Item
from ecd_client.session.channel import CALL_TIMEOUT_S, late
from ecd_proto.contract import count_text
from ecd_proto.findings import directory_down
from ecd_proto.plain import plain
from ecd_proto.v1 import cache_pb2 as pb

MAX_NAMED = 3
"""Nodes that do not answer, in one message."""
STDOUT = "-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"
"""Names of standard output for `get`: its own line must not follow the bytes."""
STORED_BEFORE = "already stored, and not replaced: `ecd-cli evict` it first to store it anew"


class Order(str, Enum):
    """The order of a list of entries."""

    STORED = "stored"
    SIZE = "size"
    HITS = "hits"
    IDLE = "idle"


_EVICTED = [name for name in pb.EvictReply.DESCRIPTOR.fields_by_name if name != "incarnation"]
"""The counts of an answer."""
_BY: dict[Order, Callable[[pb.EntryInfo], Any]] = {
    Order.SIZE: lambda entry: entry.content.nbytes,
    Order.HITS: lambda entry: entry.hits,
    Order.IDLE: lambda entry: entry.idle_s,
}


def list_entries(
    context: typer.Context,
    namespace: Namespace = None,
    prefix: Annotated[str, typer.Option(help="Only keys that begin with this.")] = "",
    sort: Annotated[Order, typer.Option(help="Sort by this, the largest first.")] = Order.STORED,
    kept: Annotated[bool, typer.Option("--kept", help="Only what `keep` keeps.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 1000,
    after: Annotated[
        int, typer.Option(min=0, help="Go on after the list whose `next_after` was this.")
    ] = 0,
    whole: Annotated[
        bool, typer.Option("--wide", "--no-trunc", help="Show whole keys, as in a pipe.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the entries, by default in the order in which they were stored."""
    options: Options = context.obj
    if namespace is not None:
        namespace = names.whole_namespace(options, namespace)
    if after and sort is not Order.STORED:
        raise typer.BadParameter("--after goes on in the order of storing: leave --sort out")

    def matching(after: int = 0) -> Iterator[pb.EntryInfo]:
        request = pb.ListRequest(namespace=namespace, mm_hash_prefix=prefix, after=after)
        for entry in options.entries(request):  # an older daemon knows no prefix
            if entry.key.mm_hash.startswith(prefix) and (entry.kept or not kept):
                yield entry

    with errors.status("reading entries ..."):
        entries = matching(after)
        if sort is not Order.STORED:
            entries = iter(heapq.nlargest(limit + 1, entries, key=_BY[sort]))
        found = list(islice(entries, limit))
        more = next(entries, None) is not None
        status = options.call("Status", pb.StatusRequest())
        total: int | None = len(found)
        if more or after:
            is_filtered = namespace is not None or prefix or kept
            total = None if is_filtered else status.entries
    next_after = found[-1].entry if more and sort is Order.STORED else None
    if as_json or options.as_json:
        rows = [plain(entry) for entry in found]
        head = {"schema": "ecd.entries/1", "total": total, "next_after": next_after}
        render.as_json(out, head | {"entries": rows})
        return
    pools = render.names_of_pools(status)
    render_entries.entries(out, found, pools, whole or not out.is_terminal)
    if not found:
        errors.print("No entries.")
    elif more:
        go_on = f", --after {next_after} the next ones" if next_after else ""
        of = "entries, not all" if total is None else f"of {count_text(total, 'entry')}"
        errors.print(f"{len(found):,} {of}: --limit shows more{go_on}.")


def namespaces(context: typer.Context, as_json: AsJson = False) -> None:
    """Show each namespace's entries: how many, how large, when the last was stored.

    Also lookups since the daemon's start, and the seconds of encoding saved, of the first 50 that
    had any, even if they have no entries. Quotas and TTLs are those of these and of the 50 largest.
    """
    options: Options = context.obj
    found: dict[str, render_entries.NamespaceRow] = {}
    with errors.status("reading every entry ...") as progress:
        for number, entry in enumerate(options.entries(pb.ListRequest()), 1):
            found.setdefault(entry.key.namespace, render_entries.NamespaceRow()).add(entry)
            if number % 10_000 == 0:
                progress.update(f"reading every entry: {number:,} so far ...")
    status = options.call("Status", pb.StatusRequest())
    for counted in status.traffic:
        found.setdefault(counted.namespace, render_entries.NamespaceRow()).count(counted)
    for ruled in status.namespaces:  # an older daemon names the rules only here
        if total := found.get(ruled.namespace):
            total.rule(ruled)
    if as_json or options.as_json:
        render.as_json(out, [{"namespace": name, **vars(each)} for name, each in found.items()])
        return
    render_entries.namespaces(out, found)
    if not found:
        errors.print("No entries.")
    elif status.other_namespaces.entries:
        largest = f"the {len(status.namespaces)} largest namespaces"
        errors.print(f"Quotas and TTLs are shown of {largest} and of those with lookups.")


def get(
    context: typer.Context,
    key: MmHash,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="A safetensors file to write; - for standard output."),
    ],
    namespace: Namespace = None,
    timeout: Annotated[
        str | None,
        typer.Option(help="Fetch it from another node or the disk tier within 5s, 1m, ..."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy an entry into a safetensors file.

    Looks in this node's memory alone, unless --timeout lets the daemon fetch the entry. The
    namespace is by default the one in which this node has the key, or `default` if it has none.
    """
    options: Options = context.obj
    is_piped = str(output) in STDOUT
    if is_piped and (as_json or options.as_json):
        raise typer.BadParameter(f"--json and -o {output} would both print: leave one out")
    if is_piped and out.is_terminal:
        raise typer.BadParameter(f"-o {output} prints bytes: not for a terminal")
    within_s = seconds("--timeout", timeout)
    is_named = namespace is not None
    namespace, key = names.whole_key(options, key, namespace, default=DEFAULT_NAMESPACE)
    with (
        Client(options.address, namespace=namespace, name="ecd-cli") as client,
        errors.status(f"copying {render.short(key)} ..."),
    ):
        was_here, began_s = client.contains([key]) == [True], clock.now_s()
        item = _fetched(client, key, within_s) if within_s else client.get(key, is_use=False)
        took_s = clock.now_s() - began_s
        if item is None:
            if not within_s:
                where = f"the namespace {namespace!r}" if is_named else "any namespace"
                more = "of this node's memory; --timeout 5s looks further"
                fail(FAILED, f"no entry {key!r} in {where} {more}")
            text = f"no entry {key!r} in the namespace {namespace!r}"
            if took_s >= within_s:
                fail(FAILED, f"{text} came within {timeout}; it may come later: ask again")
            text += f": {_why_missing(options.call('Peers', pb.PeersRequest()))}"
            fail(FAILED, text if is_named else f"{text}\n{OTHER_NAMESPACES}")
        with item:
            if is_piped:
                sys.stdout.buffer.write(files.packed(item))
                sys.stdout.flush()
            else:
                files.write(output, item)
            result = {
                "file": str(output),
                "namespace": namespace,
                "mm_hash": key,
                "dtype": item.dtype,
                "shape": list(item.shape),
                "nbytes": item.nbytes,
                "fetched": not was_here,
            }
    how = "" if was_here else f", fetched in {took_s:.3f} s"
    if not is_piped:
        options.show(as_json, result, f"{output}: {result['dtype']} {result['shape']}{how}")


def _fetched(client: Client, key: str, within_s: float) -> Item | None:
    """The entry, brought here if need be. None as soon as no place has it. Raises EcdError."""
    [answer] = client.get_async([key], within_s, only_if_written=True, is_use=False)
    try:
        return answer.result(within_s + CALL_TIMEOUT_S)
    except FutureTimeoutError:
        raise DaemonUnavailable(late(client.address)) from None


def _why_missing(peers: pb.PeersReply) -> str:
    """The likely cause of a fetch in vain: a setting, the directory, silent nodes, or no holder."""
    directory = peers.directory
    if not peers.node:
        return "this daemon serves its node alone; ECD_PEER_ADDRESS joins it with others"
    if directory.kind == "none":
        return "this daemon has no list of nodes to ask; set ECD_DIRECTORY or ECD_PEERS"
    if not directory.up:
        found, advice = directory_down(directory)
        return f"{found.rstrip('.')}; {advice}"
    if away := [peer.node for peer in peers.peers if peer.state == "unreachable"]:
        more = f" and {len(away) - MAX_NAMED:,} more" if len(away) > MAX_NAMED else ""
        return f"no other node delivers it; no answer from {', '.join(away[:MAX_NAMED])}{more}"
    known = max(len(peers.peers), directory.nodes - 1)
    if not known:
        return "no other node is known"
    return f"no other node delivers it, of {known:,} known"


def put(
    context: typer.Context,
    key: MmHash,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A safetensors file.")],
    tensor: Annotated[str | None, typer.Option(help="Which of the file's tensors.")] = None,
    namespace: Annotated[str, typer.Option(help="The key's namespace.")] = DEFAULT_NAMESPACE,
    as_json: AsJson = False,
) -> None:
    """Store a tensor of a safetensors file."""
    options: Options = context.obj
    content = files.read(file, tensor)
    with (
        Client(options.address, namespace=namespace, name="ecd-cli") as client,
        errors.status(f"copying {render.short(key)} ..."),
    ):
        stored = client.put_bytes(
            key,
            content.data,
            content.dtype,
            content.shape,
            metadata=content.metadata,
            cost=content.cost_s,
        )
    result = {"namespace": namespace, "mm_hash": key, "stored": stored}
    options.show(as_json, result, "stored" if stored else STORED_BEFORE)


def evict(
    context: typer.Context,
    typed: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY",
            help="Items' mm_hash: whole, as tables show it, or 6 or more first digits of a digest.",
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            *("--namespace", "-n"),
            help="Only entries of this namespace.",
            autocompletion=known_namespaces,
        ),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only stored at least this long ago: 30s, 10m, 2h, 1d.")
    ] = None,
    unused_for: Annotated[
        str | None, typer.Option(help="Only unused for this long: 30s, 10m, 2h, 1d.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every entry.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only show what would be evicted.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask. Names must be whole.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evict entries by their keys, or all that meet the conditions. Leased ones go once released.

    Asks before it evicts by conditions, and by a name that was not typed whole.
    """
    options: Options = context.obj
    keys = dict.fromkeys(typed or ())
    is_limited = keys or any(each is not None for each in (namespace, older_than, unused_for))
    if everything and is_limited:
        raise typer.BadParameter("--all takes no condition: leave it out, or the others")
    if not everything and not is_limited:
        raise typer.BadParameter("say which: KEY, --namespace, --older-than, --unused-for or --all")
    limits = pb.EvictRequest(
        age_s=seconds("--older-than", older_than), idle_s=seconds("--unused-for", unused_for)
    )
    requests, missing, is_typed = list[pb.EvictRequest](), list[str](), True
    for key in keys:
        try:
            where, mm_hash = names.whole_key(options, key, namespace, completes=not yes)
        except CommandFailed as error:
            if error.code != FAILED:
                raise
            missing.append(str(error))
            continue
        is_typed &= mm_hash == key and namespace in (None, where)
        requests.append(pb.EvictRequest(key=pb.Key(namespace=where, mm_hash=mm_hash)))
    if not keys:
        completes = namespace is not None and not yes
        name = names.whole_namespace(options, namespace or "") if completes else namespace
        is_typed = name == namespace
        requests.append(pb.EvictRequest(namespace=name))
    for request in requests:
        request.MergeFrom(limits)
    if requests and not (dry_run or yes or (keys and is_typed)):
        _confirm(options, requests, is_typed)
    total = pb.EvictReply()
    with errors.status("evicting ..."):
        for request in requests:
            reply = _evict(options, request, total, dry_run)
            if request.HasField("key") and not reply.entries + reply.disk_entries:
                missing.append(f"no entry {request.key.mm_hash!r} meets the conditions")
    if requests and (as_json or options.as_json):
        render.as_json(out, total)
    elif requests:
        render.evicted(out, total, dry_run)
    if failures := total.disk_failures:
        missing.append(f"{failures:,} files of the disk tier could not be removed: see the log")
    if missing:
        fail(FAILED, "\n".join(missing))


def _evict(
    options: Options, request: pb.EvictRequest, total: pb.EvictReply, dry_run: bool
) -> pb.EvictReply:
    """Make one request, and add its answer to the total."""
    asked = pb.EvictRequest(dry_run=dry_run)
    asked.MergeFrom(request)
    reply: pb.EvictReply = options.call("Evict", asked)
    total.incarnation = reply.incarnation
    for name in _EVICTED:
        setattr(total, name, getattr(total, name) + getattr(reply, name))
    return reply


def _confirm(options: Options, requests: list[pb.EvictRequest], is_typed: bool) -> None:
    """Ask before more goes than entries whose names were typed whole."""
    would = pb.EvictReply()
    for request in requests:
        _evict(options, request, would, dry_run=True)
    described = render.describe(would)
    if not is_typed:
        pairs = ((each.key.namespace or each.namespace, each.key.mm_hash) for each in requests)
        described += ", of " + ", ".join(" ".join(map(repr, filter(None, pair))) for pair in pairs)
    advice = "add --yes" if is_typed else "type the whole name"
    refusal = f"this would evict {described}; not a terminal: {advice}"
    confirm(f"Evict {described}?", refusal)
