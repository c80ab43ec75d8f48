"""`ecd serve` and `ecd config`."""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from ecd.config import Config, ConfigError, load, unknown_variables
from ecd.daemon import Daemon, StartError
from ecd.memory.host import PoolError
from ecd.metrics import MetricsError
from ecd.rpc.socket import SocketError

app = typer.Typer(help="The encoder cache daemon.", no_args_is_help=True, add_completion=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

_FIELDS = Config.model_fields
File = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Address = Annotated[str | None, typer.Option(help=_FIELDS["address"].description)]
Name = Annotated[str | None, typer.Option(help=_FIELDS["name"].description)]
ShmDir = Annotated[str | None, typer.Option(help=_FIELDS["shm_dir"].description)]
PoolBytes = Annotated[str | None, typer.Option(help=_FIELDS["host_pool_bytes"].description)]
Group = Annotated[str | None, typer.Option(help=_FIELDS["group"].description)]
MetricsAddress = Annotated[str | None, typer.Option(help=_FIELDS["metrics_address"].description)]
LeaseTtl = Annotated[float | None, typer.Option(help=_FIELDS["lease_ttl_s"].description)]
LogLevel = Annotated[str | None, typer.Option(help=_FIELDS["log_level"].description)]


def _load(file: Path | None, **flags: object) -> tuple[Config, dict[str, str]]:
    try:
        return load(flags, file)
    except ConfigError as error:
        errors.print(f"[red]configuration:[/] {error}", markup=True)
        raise typer.Exit(2) from None


@app.command()
def serve(
    config: File = None,
    address: Address = None,
    name: Name = None,
    shm_dir: ShmDir = None,
    host_pool_bytes: PoolBytes = None,
    group: Group = None,
    metrics_address: MetricsAddress = None,
    lease_ttl_s: LeaseTtl = None,
    log_level: LogLevel = None,
) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    settings, _ = _load(
        config,
        address=address,
        name=name,
        shm_dir=shm_dir,
        host_pool_bytes=host_pool_bytes,
        group=group,
        metrics_address=metrics_address,
        lease_ttl_s=lease_ttl_s,
        log_level=log_level,
    )
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("grpc").setLevel(logging.WARNING)
    for variable in unknown_variables():
        logging.getLogger("ecd").warning("%s is not a setting of ecd; see `ecd config`", variable)
    try:
        uvloop.run(Daemon(settings).run())
    except (SocketError, PoolError, MetricsError, StartError) as error:
        errors.print(f"ecd cannot serve: {error}", markup=False)
        raise typer.Exit(1) from None


@app.command("config")
def show_config(
    config: File = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print the effective settings and where each came from."""
    settings, origins = _load(config)
    values = settings.model_dump(mode="json")
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
