"""`ecd-cli`: look after a daemon.

Exit codes: 0, 1 failed, 2 usage, 3 nothing answers.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its retries are not the user's business

from ecd_client.calls import resolve
from ecd_client.cli import daemon, entries, routing
from ecd_client.cli.context import FAILED, UNREACHABLE, USAGE, AsJson, Options, errors
from ecd_client.errors import DaemonUnavailable, EcdError, InvalidArgument
from ecd_proto.contract import DISTRIBUTION

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
app.command("ls")(entries.list_entries)
app.command()(entries.namespaces)
app.command()(entries.get)
app.command()(entries.put)
app.command()(entries.evict)
app.command()(daemon.doctor)
app.command()(daemon.bench)
app.command()(daemon.top)
app.command()(routing.locate)
app.command()(routing.watch)


def main() -> None:
    try:
        app()
    except EcdError as error:
        errors.print(f"ecd-cli: {error}", markup=False)
        codes = {DaemonUnavailable: UNREACHABLE, InvalidArgument: USAGE}
        sys.exit(codes.get(type(error), FAILED))


if __name__ == "__main__":
    main()
