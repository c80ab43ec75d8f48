"""Puts copied by one thread and by torch's (`ECD_COPY_THREADS`), with idle and with busy cores.

    python benchmarks/copies.py [--rounds N] [--threads N] [--output FILE.md]

Both ways by turns, as an engine lives: before each put 64 MiB of other memory are written, and
5 ms pass. A busy core has a process that does nothing but count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from common import MIB, end_daemon, report, start_daemon, timed_us
from rich.console import Console
from steps import pause

from ecd_client import Client

SIZES = {f"{mib} MiB": mib * MIB for mib in (24, 32, 64, 128)}
WAYS = ("1", "torch")


def medians(client: Client, nbytes: int, rounds: int) -> list[float]:
    """The medians of puts for each of WAYS, in us."""
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS:
            os.environ["ECD_COPY_THREADS"] = way
            tensor = torch.full((nbytes,), number, dtype=torch.uint8)
            put = partial(client.put, f"{nbytes} {number} {way}", tensor)
            pause()
            taken[way].append(timed_us(put))
    return [median(taken[way]) for way in WAYS]


def main(
    rounds: Annotated[int, typer.Option(help="Puts of each kind; medians are shown.")] = 24,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0: as many as cores.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    torch.set_num_threads(threads or os.cpu_count() or 1)
    progress = Console(stderr=True)
    rows = [["busy cores", "size", "one thread", "torch's threads", "ratio"]]
    with tempfile.TemporaryDirectory() as directory:
        daemon, address = start_daemon(Path(directory), "copies", 1024 * MIB)
        busy: list[subprocess.Popen[bytes]] = []
        try:
            with Client(address) as client:
                for _ in range(2):
                    for name, nbytes in SIZES.items():
                        progress.print(f"{len(busy)} cores busy, {name}")
                        one, several = medians(client, nbytes, rounds)
                        cells = f"{one:,.0f} us", f"{several:,.0f} us", f"{several / one:.2f}"
                        rows.append([str(len(busy)), name, *cells])
                    busy.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        finally:
            for process in busy:
                process.kill()
                process.wait()
            end_daemon(daemon)
    title = f"Puts copied by one thread and by {torch.get_num_threads()} of torch, medians."
    report(title, rows, output, 100)


if __name__ == "__main__":
    typer.run(main)
