"""`ecd-cli`: look after a daemon.

Exit codes: 0 done, 1 failed, 2 usage, 3 nothing answers. With --json, errors are JSON on stderr.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from itertools import islice
from typing import Annotated

import typer

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its retries are not the user's business

from ecd_client.cli import clients, daemon, entries, keeping, render, routing
from ecd_client.cli.context import (
    FAILED,
    UNREACHABLE,
    USAGE,
    AsJson,
    CommandFailed,
    Options,
    errors,
)
from ecd_client.errors import DaemonTooOld, DaemonUnavailable, EcdError, InvalidArgument
from ecd_client.session.channel import resolve
from ecd_proto import tables
from ecd_proto.contract import DISTRIBUTION

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's UsageError, or that of the copy of click that newer versions of typer have."""

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(version(DISTRIBUTION))
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    address: Annotated[
        str | None, typer.Option(help="The daemon's socket; by default ECD_ADDRESS or the user's.")
    ] = None,
    as_json: AsJson = False,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    context.obj = Options(resolve(address), as_json)


app.command()(daemon.status)
app.command()(daemon.peers)
app.add_typer(clients.app, name="clients")
app.command("ls")(entries.list_entries)
app.command()(entries.namespaces)
app.command()(entries.get)
app.command()(entries.put)
app.command()(entries.evict)
app.command()(keeping.keep)
app.command()(keeping.unkeep)
app.command()(daemon.doctor)
app.command()(daemon.bench)
app.command()(daemon.top)
app.command()(routing.locate)
app.command()(routing.encoders)
app.command()(routing.watch)
app.command()(daemon.slow)


@app.command("help")
def show_help(
    command: Annotated[str | None, typer.Argument(help="The command that is asked about.")] = None,
) -> None:
    """Show what a command does, and its options."""
    app([*([command] if command else []), "--help"], standalone_mode=False)


@app.command("version")
def show_version() -> None:
    """Print the version."""
    typer.echo(version(DISTRIBUTION))


def _address_first(arguments: list[str]) -> list[str]:
    """Move --address before the command's name, wherever it stands."""
    first, rest, left = list[str](), list[str](), iter(arguments)
    for argument in left:
        if argument == "--":
            rest += [argument, *left]
        elif argument == "--address":
            first += [argument, *islice(left, 1)]
        else:
            (first if argument.startswith("--address=") else rest).append(argument)
    return first + rest


def main() -> None:
    arguments = _address_first(sys.argv[1:])
    as_json = "--json" in arguments
    try:
        with tables.printing():
            sys.exit(app(arguments, standalone_mode=not as_json))
    except CommandFailed as error:
        code, text = error.code, f"ecd-cli: {error}"
    except DaemonTooOld:
        code, text = FAILED, "ecd-cli: the daemon is older than this command: upgrade it"
    except EcdError as error:
        codes = {DaemonUnavailable: UNREACHABLE, InvalidArgument: USAGE}
        code, text = codes.get(type(error), FAILED), f"ecd-cli: {error}"
    except USAGE_ERROR as error:
        code, text = USAGE, str(error)
    except typer.Abort:
        code, text = FAILED, "aborted"
    except tables.CannotPrint as error:
        code, text = FAILED, f"ecd-cli: {error}"
    if as_json:
        render.as_json(errors, {"error": text.removeprefix("ecd-cli: "), "exit_code": code})
    else:
        errors.print(render.legible_lines(text), markup=False)
    sys.exit(code)


if __name__ == "__main__":
    main()
