"""The options of `ecd replay`, which every `ecd` loads; the modules that replay are not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ecd.replay.policies import POLICIES


def replay(
    trace: Annotated[Path, typer.Argument(help="Of ECD_TRACE, or a CSV of time, id, size, cost.")],
    pool: Annotated[
        str | None,
        typer.Option(help="Pools to try: 8GiB,16GiB or shares of all keys' bytes, 5%,10%."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help=f"Policies to try: {', '.join(POLICIES)}. Default: all.")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(help="Size of a disk tier below each pool, such as 200GiB.")
    ] = None,
    disk_write_bytes_per_s: Annotated[str, typer.Option(help="The disk's write budget.")] = "20MB",
    disk_read_bytes_per_s: Annotated[str, typer.Option(help="How fast the disk reads.")] = "1GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot seconds saved over pool size: FILE.svg or .png."),
    ] = None,
) -> None:
    """Replay a trace and compare its evictions, or try other pools and policies on it.

    --pool, --policy and --disk say what to try, and the table what it would have saved. Without
    them the exit code is 1 if an eviction differs from the recorded one.
    """
    from ecd.replay.report import report  # `ecd serve` needs none of it

    rates = {
        "--disk-write-bytes-per-s": disk_write_bytes_per_s,
        "--disk-read-bytes-per-s": disk_read_bytes_per_s,
    }
    report(trace, pool, policy, as_json, plot, disk, rates)
