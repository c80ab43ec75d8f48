"""`ecd serve` and `ecd config`."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Callable
from importlib.metadata import version
from inspect import Parameter, Signature, signature
from logging.handlers import SysLogHandler
from pathlib import Path
from typing import Annotated

import grpc
import typer
import uvloop
from pythonjsonlogger.json import JsonFormatter
from rich.console import Console
from rich.table import Table

from ecd.cluster.cluster import ClusterError
from ecd.cluster.engine import EngineError
from ecd.config import Config, ConfigError, load, unknown_variables, without_password
from ecd.daemon import Daemon, StartError
from ecd.memory import host
from ecd.memory.host import PoolError
from ecd.metrics import MetricsError
from ecd.rpc.peer_service import PeerServerError
from ecd.rpc.socket import SocketError

CANNOT_START = (
    *(SocketError, PoolError, MetricsError, StartError),
    *(ClusterError, EngineError, PeerServerError),
)

app = typer.Typer(help="The encoder cache daemon.", no_args_is_help=True, add_completion=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

_FIELDS = Config.model_fields
File = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each setting beside its own options."""
    flags = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(help=setting.description)],
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
        errors.print(f"[red]configuration:[/] {error}", markup=True)
        raise typer.Exit(2) from None


class _ToJournal(logging.Formatter):
    """Lines as journald takes them: their severity before them (sd-daemon(3)), and no time."""

    def format(self, record: logging.LogRecord) -> str:
        names = SysLogHandler.priority_map
        priority = SysLogHandler.priority_names[names.get(record.levelname, "warning")]
        return f"<{priority}>" + super().format(record).replace("\n", f"\n<{priority}>")


def _abandoned_answer(record: logging.LogRecord) -> bool:
    """A line, and no traceback, for an answer whose caller was gone before it could be sent.

    gRPC itself leaves it out where it hears of the end of the call first.
    """
    if record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError):
        record.msg, record.args = f"an answer was not sent: {record.getMessage()}", ()
        record.exc_info = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


def _log_to_stderr(settings: Config) -> None:
    handler = logging.StreamHandler()
    stderr = os.fstat(handler.stream.fileno())
    if settings.log_format == "json":
        names = {"levelname": "level", "name": "logger", "asctime": "time"}
        handler.setFormatter(
            JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=names)
        )
    elif os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}":
        handler.setFormatter(_ToJournal("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.getLogger("grpc").setLevel(logging.WARNING)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_abandoned_answer)


@app.command()
@_with_flags
def serve(
    config: File = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Take over nothing of what the last daemon left.")
    ] = False,
    **flags: str | None,
) -> None:
    """Run the daemon until SIGTERM or SIGINT. SIGHUP reads the file of --config anew."""
    settings, _ = _load(config, **flags)
    reload = None if config is None else lambda: load(flags, config)[0]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each peer may take 32 connections
    _log_to_stderr(settings)
    for variable in unknown_variables():
        logging.getLogger("ecd").warning("%s is not a setting of ecd; see `ecd config`", variable)
    try:
        uvloop.run(Daemon(settings, reload, cold).run())
    except CANNOT_START as error:
        errors.print(f"ecd cannot serve: {error}", markup=False)
        raise typer.Exit(1) from None


@app.command()
def clear(config: File = None) -> None:
    """Remove what a daemon left for the next one: its memory is free again."""
    settings, _ = _load(config)
    try:
        nbytes = host.clear(settings.shm_dir, settings.name)
    except PoolError as error:
        errors.print(f"nothing is removed: {error}", markup=False)
        raise typer.Exit(1) from None
    Console(highlight=False).print(f"removed {nbytes / (1 << 30):.2f} GiB")


@app.command("config")
def show_config(
    config: File = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print the effective settings and where each came from."""
    settings, origins = _load(config)
    values = settings.model_dump(mode="json")
    values["directory"] = without_password(settings.directory)
    for variable in unknown_variables():
        errors.print(f"{variable} is set, but is not a setting of ecd")
    out = Console(highlight=False)
    if as_json:
        rows = {name: {"value": values[name], "origin": origins[name]} for name in values}
        out.print_json(json.dumps(rows))
        return
    table = Table("setting", "value", "from", "meaning")
    table.columns[0].no_wrap = True
    table.columns[1].overflow = "fold"
    for name, value in values.items():
        meaning = _FIELDS[name].description or ""
        table.add_row(name, "" if value is None else str(value), origins[name], meaning)
    out.print(table)


@app.command("version")
def show_version() -> None:
    """Print the version."""
    Console(highlight=False).print(version("ecd"))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
