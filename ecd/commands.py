"""`ecd serve`, `ecd clear` and `ecd config`; `ecd replay` is in `ecd/replay/command.py`."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from inspect import Parameter, Signature, signature
from logging.handlers import SysLogHandler
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import grpc
import typer
import uvloop
from google.protobuf.message import DecodeError
from pydantic.fields import FieldInfo
from pythonjsonlogger.json import JsonFormatter
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ecd.cluster.peers.tls import ClusterError
from ecd.cluster.transport.engine import EngineError, end_process
from ecd.daemon import Daemon
from ecd.holdings import StartError
from ecd.memory.clearing import Left, clear, left_by
from ecd.memory.disk.disk_dir import DiskError
from ecd.memory.pool_dir import PoolError
from ecd.ops.events import EventsError
from ecd.ops.metrics.registry import MetricsError
from ecd.replay.command import replay
from ecd.rpc.peer.peer_server import PeerServerError
from ecd.rpc.socket import SocketError
from ecd.settings.config import ENV_PREFIX, SECRETS, Config, ConfigError
from ecd.settings.config_sources import load, unknown_variables
from ecd.settings.redaction import without_secrets
from ecd_proto import tables
from ecd_proto.contract import DISTRIBUTION, size_text
from ecd_proto.leftovers import leftovers
from ecd_proto.shm.files import IN_MEMORY, filesystem

CANNOT_START = (
    *(SocketError, PoolError, DiskError, MetricsError, EventsError, StartError),
    *(ClusterError, EngineError, PeerServerError),
)

app = typer.Typer(
    help="The encoder cache daemon. `ecd-cli` looks after one that runs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

_FIELDS = Config.model_fields
_DEFAULTS = {"address": "unix:///run/ecd/ecd.sock for root, else in $XDG_RUNTIME_DIR"}
"""Defaults that the environment makes, in words: its values are no defaults."""
File = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]


def _help(name: str, setting: FieldInfo) -> str:
    """The setting's description, its variable, and its default if there is one to show."""
    default = _DEFAULTS.get(name) or setting.get_default(call_default_factory=True)
    shown = "" if default in (None, "", (), {}) else f", default {default}"
    return f"{setting.description} ({ENV_PREFIX}{name.upper()}{shown})"


def _panel(name: str) -> str:
    names = list(_FIELDS)
    if name.startswith(("peer_token", "peer_tls", "peer_insecure", "hint_networks")):
        return "Several nodes: who may connect"
    return "Several nodes" if names.index(name) >= names.index("peer_address") else "This node"


def _metavar(name: str, setting: FieldInfo) -> str:
    """The form of a flag's value."""
    allowed = [
        get_args(each) or (each,) for each in (setting.annotation, *get_args(setting.annotation))
    ]
    if any(bool in each for each in allowed):
        return "true|false|auto" if setting.default is None else "true|false"
    if get_origin(setting.annotation) is Literal:
        return "|".join(get_args(setting.annotation))
    forms = {"_bytes": "SIZE", "_per_s": "SIZE", "_s": "DURATION", "_address": "HOST:PORT"}
    for suffix, form in forms.items():
        if name.endswith(suffix):
            return form
    return "TEXT"


def _flag(name: str, setting: FieldInfo) -> Any:
    """The option for a setting; that of a secret is unseen, and refuses what it is given."""
    if name in SECRETS:
        return typer.Option(hidden=True, callback=_refuse_secret)
    return typer.Option(
        help=_help(name, setting), rich_help_panel=_panel(name), metavar=_metavar(name, setting)
    )


def _refuse_secret(parameter: typer.CallbackParam, value: str | None) -> None:
    """Say where a secret belongs, as no other flag is meant by one for it."""
    if value is not None:
        raise typer.BadParameter(
            f"every user of this machine can read it there: set {ENV_PREFIX}"
            f"{str(parameter.name).upper()}, or {parameter.name} in the file of --config"
        )


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each setting beside its own options."""
    flags = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, _flag(name, setting)],
        )
        for name, setting in _FIELDS.items()
    ]
    own = [p for p in signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    command.__signature__ = Signature([*own, *flags])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
    return command


def _load(file: Path | None, **flags: object) -> tuple[Config, dict[str, str]]:
    try:
        return load(flags, file)
    except ConfigError as error:
        _fail(str(error), "configuration: ")


def _fail(why: str, about: str = "") -> NoReturn:
    """End the command for wrong usage."""
    if "--json" in sys.argv:
        errors.print_json(json.dumps({"error": why, "exit_code": 2}))
    else:
        errors.print(Text.assemble((about, "red"), why))
    raise typer.Exit(2) from None


class _ToStderr(logging.Formatter):
    """Lines that no text from outside can break, forge or colour; a traceback has more than one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line = super().formatMessage(record)
        return line if line.isprintable() else "".join(map(_printable, line))


def _printable(char: str) -> str:
    return char if char.isprintable() else ascii(char)[1:-1]


class _ToJournal(_ToStderr):
    """Lines as journald takes them: their severity before them (sd-daemon(3)), and no time."""

    def format(self, record: logging.LogRecord) -> str:
        names = SysLogHandler.priority_map
        priority = SysLogHandler.priority_names[names.get(record.levelname, "warning")]
        return f"<{priority}>" + super().format(record).replace("\n", f"\n<{priority}>")


def _others_errors(record: logging.LogRecord) -> bool:
    """Make one line, without a traceback, of what a caller did and gRPC reports as our error.

    An answer has no caller any more (gRPC itself is silent where it hears of the end of the call
    first), or what came is no message.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, grpc.aio.InternalError):
        record.msg = f"an answer was not sent: {record.getMessage()}"
    elif isinstance(error, DecodeError | UnicodeDecodeError):
        record.msg = f"what came is no message: {error}"
    else:
        return True
    record.args, record.exc_info = (), None
    record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


def _log_to_stderr(settings: Config) -> None:
    handler = logging.StreamHandler()
    stderr = os.fstat(handler.stream.fileno())
    if settings.log_format == "json":
        names = {"levelname": "level", "name": "logger"}
        fields = "%(levelname)s %(name)s %(message)s"
        handler.setFormatter(JsonFormatter(fields, rename_fields=names, timestamp="time"))
    elif os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}":
        handler.setFormatter(_ToJournal("%(name)s: %(message)s"))
    else:
        handler.setFormatter(_ToStderr("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.getLogger("grpc").setLevel(logging.WARNING)
    for name in ("grpc._cython.cygrpc", "grpc._common"):
        logging.getLogger(name).addFilter(_others_errors)


@app.command()
@_with_flags
def serve(
    config: File = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Ignore what the last daemon left in memory.")
    ] = False,
    warm: Annotated[
        bool, typer.Option("--warm", help="Leave the pool for the next start: warm_restart=true.")
    ] = False,
    **flags: str | None,
) -> None:
    """Run the daemon until SIGTERM or SIGINT. SIGHUP reads the file of --config again."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the daemon listens to it
    os.umask(os.umask(0o022) | 0o022)  # nobody else connects before the socket has its mode
    if warm:
        flags["warm_restart"] = "true"
    settings, _ = _load(config, **flags)
    is_file = config is not None and config.is_file()  # a pipe cannot be read again
    reload = (lambda: load(flags, config)[0]) if is_file else None
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each peer may take 32 connections
    _log_to_stderr(settings)
    for unknown in unknown_variables():
        logging.getLogger("ecd").warning(unknown)
    if (kind := filesystem(settings.shm_dir)) and kind not in IN_MEMORY:
        logging.getLogger("ecd").warning(
            "shm_dir %s is on %s, not in memory: puts and gets wait for a disk; name a tmpfs",
            settings.shm_dir,
            kind,
        )
    code = 0
    try:
        uvloop.run(Daemon(settings, reload, cold).run())
    except CANNOT_START as error:
        errors.print(f"ecd cannot serve: {error}", markup=False)
        code = 1
    end_process(code)
    raise typer.Exit(code)


@app.command("clear")
def clear_left(
    config: File = None,
    name: Annotated[str | None, typer.Option(help="Default: the configured one.")] = None,
    every: Annotated[bool, typer.Option("--all", help="What every ended daemon left.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before --all.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Remove what a daemon left for the next one, in memory and on disk.

    With --all, also what daemons left that may come back, so that it asks first.
    """
    settings, _ = _load(config, name=name)
    places = settings.shm_dir, settings.disk_dir
    names = [left.name for left in leftovers(settings.shm_dir)] if every else [settings.name]
    if every and not (dry_run or yes):
        would, _ = _of_each(lambda name: left_by(*places, name), names)
        _confirm_removal(would)
    act: Callable[..., Iterable[Left]] = left_by if dry_run else clear
    found, refused = _of_each(lambda name: act(*places, name), names)
    out = Console(highlight=False, soft_wrap=True)
    if as_json:
        rows: list[dict[str, object]] = [
            {
                "name": left.name,
                "path": str(left.path),
                "nbytes": left.nbytes,
                "freed_bytes": 0 if dry_run else left.nbytes,
            }
            for left in found
        ]
        out.print_json(json.dumps(rows + [{"name": k, "error": v} for k, v in refused.items()]))
    else:
        done = "would remove" if dry_run else "removed"
        for left in found:
            out.print(f"{done} {left}", markup=False)
        for why in refused.values():
            errors.print(f"not removed: {why}", markup=False)
        if len(found) > 1:
            out.print(f"{done} {size_text(sum(left.nbytes for left in found))} in all")
        elif not found and not refused:
            out.print("there was nothing to remove")
    if refused:
        raise typer.Exit(1)


def _of_each(
    act: Callable[[str], Iterable[Left]], names: list[str]
) -> tuple[list[Left], dict[str, str]]:
    """Run the act for each daemon's name: all that it lists, and the errors by name."""
    found: list[Left] = []
    refused: dict[str, str] = {}
    for name in names:
        try:
            for left in act(name):
                found.append(left)  # as it is removed, also before an error
        except (PoolError, DiskError) as error:
            refused[name] = str(error)
    return found, refused


def _confirm_removal(would: list[Left]) -> None:
    """Ask before what several daemons left goes; a daemon that has just ended may come back."""
    if not would:
        return
    total = size_text(sum(left.nbytes for left in would))
    if not sys.stdin.isatty():
        paths = ", ".join(str(left.path) for left in would)
        _fail(f"this would remove {total}: {paths}. Not a terminal: add --yes")
    for left in would:
        errors.print(str(left), markup=False)
    typer.confirm(f"Remove {total}?", abort=True, err=True)


@app.command("config")
def show_config(
    config: File = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print each setting's meaning, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Print the effective settings and where each came from."""
    settings, origins = _load(config)
    values = without_secrets(settings.model_dump(mode="json"))
    for unknown in unknown_variables():
        errors.print(unknown, markup=False)
    out = tables.console()
    if as_json:
        rows = {name: {"value": values[name], "origin": origins[name]} for name in values}
        out.print_json(json.dumps(rows))
        return
    table = tables.unframed("setting", "value", "from")
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    table.columns[1].overflow = "fold"
    for name, value in values.items():
        row = name, Text("" if value is None else str(value)), Text(origins[name])
        if verbose:
            one = tables.unframed()
            one.add_row(*row)
            tables.show(out, one)
            meaning = Text(_FIELDS[name].description or "", style="dim")
            tables.show(out, Padding(meaning, (0, 0, 1, 4)))
        else:
            table.add_row(*row)
    if not verbose:
        tables.show(out, table)


app.command("replay")(replay)


@app.command("version")
def show_version() -> None:
    """Print the version."""
    Console(highlight=False).print(version(DISTRIBUTION))


def _show_version(asked: bool) -> None:
    if asked:
        show_version()
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass
