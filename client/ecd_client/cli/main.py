"""`ecd-cli`: look after a daemon.

Exit codes: 0, 1 failed, 2 usage, 3 nothing answers.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.live import Live

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its retries are not the user's business

from ecd_client.calls import call, open_channel, resolve
from ecd_client.cli import files, render
from ecd_client.cli.bench import measure
from ecd_client.cli.doctor import BAD, examine
from ecd_client.cli.top import Top
from ecd_client.client import Client
from ecd_client.errors import DaemonUnavailable, EcdError, InvalidArgument
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

FAILED, USAGE, UNREACHABLE = 1, 2, 3

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)
out = Console(highlight=False, width=None if sys.stdout.isatty() else 400)  # whole lines to pipes
errors = Console(stderr=True, highlight=False, soft_wrap=True)

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Namespace = Annotated[str | None, typer.Option(help="The key's namespace.")]
MmHash = Annotated[str, typer.Argument(metavar="KEY", help="The item's mm_hash.")]


@dataclass
class Options:
    address: str
    as_json: bool

    def stub(self) -> Any:
        return pb_grpc.CacheStub(open_channel(self.address))

    def call(self, method: str, request: Any) -> Any:
        return call(getattr(self.stub(), method), request, self.address)


@app.callback()
def options(
    context: typer.Context,
    address: Annotated[
        str | None, typer.Option(help="The daemon's socket; by default ECD_ADDRESS or the user's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    context.obj = Options(resolve(address), as_json)


@app.command()
def status(context: typer.Context, as_json: AsJson = False) -> None:
    """How the daemon is: state, pool, clients, hits."""
    options: Options = context.obj
    reply = options.call("Status", pb.StatusRequest())
    if as_json or options.as_json:
        render.as_json(out, reply)
    else:
        render.status(out, reply, options.address)


@app.command()
def peers(context: typer.Context, as_json: AsJson = False) -> None:
    """The other nodes: who is reached, over what, and how reads from them go."""
    options: Options = context.obj
    reply = options.call("Peers", pb.PeersRequest())
    if as_json or options.as_json:
        render.as_json(out, reply)
    else:
        render.peers(out, reply)


@app.command("ls")
def list_entries(
    context: typer.Context,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """The entries, in the order in which they were stored."""
    options: Options = context.obj
    found: list[pb.EntryInfo] = []
    more = False
    for entry in _entries(options, pb.ListRequest(namespace=namespace)):
        if len(found) == limit:
            more = True
            break
        found.append(entry)
    if as_json or options.as_json:
        render.as_json(out, [render.plain(entry) for entry in found])
    else:
        render.entries(out, found, more)


@app.command()
def namespaces(context: typer.Context, as_json: AsJson = False) -> None:
    """The namespaces: how many entries each has, how large they are, when the last was stored."""
    options: Options = context.obj
    found: dict[str, render.NamespaceSum] = {}
    with errors.status("looking at every entry ...") as progress:
        for number, entry in enumerate(_entries(options, pb.ListRequest()), 1):
            found.setdefault(entry.key.namespace, render.NamespaceSum()).add(entry)
            if number % 10_000 == 0:
                progress.update(f"looking at every entry: {number:,} so far ...")
    if as_json or options.as_json:
        render.as_json(out, [{"namespace": name, **vars(each)} for name, each in found.items()])
    else:
        render.namespaces(out, found)


@app.command()
def get(
    context: typer.Context,
    key: MmHash,
    output: Annotated[Path, typer.Option("--output", "-o", help="A safetensors file to write.")],
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Copy an entry into a safetensors file."""
    options: Options = context.obj
    namespace = namespace or _only_namespace(options, key)
    with Client(options.address, namespace=namespace, name="ecd-cli") as client:
        item = client.get(key)
        if item is None:
            _fail(FAILED, f"no entry {key!r} in the namespace {namespace!r}")
        with item:
            files.write(output, item)
            result = {
                "file": str(output),
                "namespace": namespace,
                "mm_hash": key,
                "dtype": item.dtype,
                "shape": list(item.shape),
                "nbytes": item.nbytes,
            }
    _show(options, as_json, result, f"{output}: {result['dtype']} {result['shape']}")


@app.command()
def put(
    context: typer.Context,
    key: MmHash,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A safetensors file.")],
    tensor: Annotated[str | None, typer.Option(help="Which, if the file has several.")] = None,
    namespace: Annotated[str, typer.Option(help="The key's namespace.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Store a tensor of a safetensors file."""
    options: Options = context.obj
    content = files.read(file, tensor)
    with Client(options.address, namespace=namespace, name="ecd-cli") as client:
        stored = client.put_bytes(
            key,
            content.data,
            content.dtype,
            content.shape,
            metadata=content.metadata,
            cost=content.cost_s,
        )
    result = {"namespace": namespace, "mm_hash": key, "stored": stored}
    _show(options, as_json, result, "stored" if stored else "was there already")


@app.command()
def evict(
    context: typer.Context,
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="One item's mm_hash.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Only of this namespace.")] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only stored at least so long ago: 30s, 10m, 2h, 1d.")
    ] = None,
    unused_for: Annotated[
        str | None, typer.Option(help="Only not used for so long: 30s, 10m, 2h, 1d.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every entry.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Evict entries: one, or all that meet every condition given. Leased ones go when released."""
    options: Options = context.obj
    conditions = (key, namespace, older_than, unused_for)
    if everything == any(condition is not None for condition in conditions):
        raise typer.BadParameter("say which: KEY, --namespace, --older-than, --unused-for or --all")
    request = pb.EvictRequest(
        namespace=namespace, age_s=_seconds(older_than), idle_s=_seconds(unused_for)
    )
    if key is not None:
        request.key.mm_hash = key
        request.key.namespace = namespace or _only_namespace(options, key)
    elif not (dry_run or yes):
        _confirm(options, request)
    request.dry_run = dry_run
    reply = options.call("Evict", request)
    if as_json or options.as_json:
        render.as_json(out, reply)
    else:
        render.evicted(out, reply, dry_run)
    if key is not None and reply.entries == 0:
        _fail(FAILED, f"no entry {key!r} meets the conditions")


@app.command()
def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Look for what may be wrong, and say what to do about it. 1 if something is."""
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


@app.command()
def bench(
    context: typer.Context,
    rounds: Annotated[int, typer.Option(min=1, help="Of each size; the medians are shown.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Put and get entries of the daemon's own, and check every byte. Evicts nothing else."""
    options: Options = context.obj
    room_bytes = options.call("Status", pb.StatusRequest()).pool.largest_free_bytes

    def evict(namespace: str) -> None:
        options.call("Evict", pb.EvictRequest(namespace=namespace))

    with errors.status("putting and getting ...") as progress:
        rows = []
        for row in measure(options.address, room_bytes, rounds, evict):
            rows.append(row)
            progress.update(f"{row.size} is done ...")
    if not rows:
        _fail(FAILED, "there is no room for it without evicting anything: ecd-cli evict first")
    if as_json or options.as_json:
        render.as_json(out, [vars(row) for row in rows])
    else:
        render.measured(out, rows)


@app.command()
def top(
    context: typer.Context,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 1.0,
    rows: Annotated[int, typer.Option(min=1, help="Entries shown of each kind.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="One look, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """What happens now: rates, hit ratio, hottest and biggest entries, peers. Ctrl-C ends it."""
    options: Options = context.obj
    look = Top(options.call, lambda: _entries(options, pb.ListRequest(limit=1000)), rows)
    if as_json or options.as_json or once or not out.is_terminal:
        look.look()
        time.sleep(interval)
        if as_json or options.as_json:
            render.as_json(out, look.as_json())
        else:
            out.print(look.frame())
        return
    over = threading.Event()

    def stop(*_: object) -> None:
        over.set()  # an exception in a finalizer goes nowhere
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    with contextlib.suppress(KeyboardInterrupt), Live(look.frame(), console=out) as live:
        while not over.is_set():
            time.sleep(interval)
            live.update(look.frame(), refresh=True)


def _confirm(options: Options, request: pb.EvictRequest) -> None:
    """Ask before more than one named entry goes."""
    would = pb.EvictRequest()
    would.CopyFrom(request)
    would.dry_run = True
    described = render.describe(options.call("Evict", would))
    if not sys.stdin.isatty():
        _fail(USAGE, f"this would evict {described}; say --yes where nobody can be asked")
    typer.confirm(f"Evict {described}?", abort=True, err=True)


def _seconds(duration: str | None) -> float:
    if duration is None:
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", duration)
    if match is None:
        raise typer.BadParameter(f"{duration!r} is not a duration: 30s, 10m, 2h or 1d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _entries(options: Options, request: pb.ListRequest) -> Iterator[pb.EntryInfo]:
    stub = options.stub()
    while True:
        page = call(stub.List, request, options.address)
        yield from page.entries
        if not page.next_after:
            return
        request.after = page.next_after


def _only_namespace(options: Options, key: str) -> str:
    """The one namespace that has the key."""
    found = {entry.key.namespace for entry in _entries(options, pb.ListRequest(mm_hash=key))}
    if not found:
        _fail(FAILED, f"no entry {key!r} in any namespace")
    if len(found) > 1:
        names = "\n".join(f"  --namespace {name!r}" for name in sorted(found))
        _fail(USAGE, f"{key!r} is in several namespaces; say which:\n{names}")
    return found.pop()


def _show(options: Options, as_json: bool, result: dict[str, Any], text: str) -> None:
    if as_json or options.as_json:
        render.as_json(out, result)
    else:
        out.print(text)


def _fail(code: int, text: str) -> NoReturn:
    errors.print(text, markup=False)
    raise typer.Exit(code)


def main() -> None:
    try:
        app()
    except (DaemonUnavailable, InvalidArgument, files.FileError, EcdError) as error:
        errors.print(f"ecd-cli: {error}", markup=False)
        codes = {DaemonUnavailable: UNREACHABLE, InvalidArgument: USAGE}
        sys.exit(codes.get(type(error), FAILED))


if __name__ == "__main__":
    main()
