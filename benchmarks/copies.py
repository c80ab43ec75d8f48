"""Puts copied by one thread and by torch's (`ECD_COPY_THREADS`), with idle and with busy cores.

    python benchmarks/copies.py [--rounds N] [--threads N] [--output FILE.md]

By turns, as an engine lives, and beside a plain copy by one thread into touched shared memory:
before each 64 MiB of other memory are written, and 5 ms pass. A busy core has a process that does
nothing but count. A model is a process whose steps multiply matrices with as many threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from common import MIB, end_daemon, report, shared_memory, start_daemon, timed_us
from life import pause
from rich.console import Console

from ecd_client import Client

SIZES = {f"{mib} MiB": mib * MIB for mib in (24, 32, 64, 128)}
WAYS = ("plain copy", "1", "torch")
COUNT = "while True: pass"
MODEL = """
import mmap, sys, torch
torch.set_num_threads(int(sys.argv[1]))
steps = memoryview(mmap.mmap(int(sys.argv[2]), 4096)).cast("Q")
a, b = torch.randn(256, 1024), torch.randn(1024, 1024)
while True:
    a @ b
    steps[0] += 1
"""
"""Counts its steps in shared memory."""


def measured(client: Client, nbytes: int, rounds: int, steps: memoryview) -> list[str]:
    """Cells: a plain copy, and puts by both ways, with what a model's steps take meanwhile."""
    took: dict[str, list[float]] = defaultdict(list)
    step: dict[str, list[float]] = defaultdict(list)
    target = shared_memory(nbytes)
    for number in range(rounds):
        for way in WAYS:
            os.environ["ECD_COPY_THREADS"] = way
            tensor = torch.full((nbytes,), number % 100, dtype=torch.uint8)
            put = partial(client.put, f"{nbytes} {number} {way}", tensor)
            pause()
            copy = partial(ctypes.memmove, target.data_ptr(), tensor.data_ptr(), nbytes)
            before, started_s = steps[0], time.perf_counter()
            took[way].append(timed_us(copy if way == WAYS[0] else put))
            if done := steps[0] - before:
                step[way].append(1e6 * (time.perf_counter() - started_s) / done)
    plain, one, several = (median(took[way]) for way in WAYS)
    cells = [f"{us:,.0f} us" for us in (plain, one, several)] + [f"{several / one:.2f}"]
    return cells + [f"{median(step[way]):,.0f} us" if step[way] else "-" for way in WAYS[1:]]


def main(
    rounds: Annotated[int, typer.Option(help="Copies of each kind; medians are shown.")] = 24,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0: as many as cores.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    torch.set_num_threads(threads or os.cpu_count() or 1)
    progress = Console(stderr=True)
    title = f"Puts copied by one thread and by {torch.get_num_threads()} of torch, medians."
    rows = [["busy", "size", "plain copy", "put, one thread", "put, torch", "torch / one"]]
    rows[0] += ["model's step, one", "step, torch"]
    shared = os.memfd_create("steps", 0)
    os.ftruncate(shared, mmap.PAGESIZE)
    steps = memoryview(mmap.mmap(shared, mmap.PAGESIZE)).cast("Q")
    model = [sys.executable, "-c", MODEL, str(torch.get_num_threads()), str(shared)]
    with tempfile.TemporaryDirectory() as directory:
        daemon, address = start_daemon(Path(directory), "copies", 1024 * MIB)
        try:
            with Client(address) as client:
                for busy, command in (
                    ("no core", [sys.executable, "-c", ""]),
                    ("one core", [sys.executable, "-c", COUNT]),
                    ("a model", model),
                ):
                    process = subprocess.Popen(command, pass_fds=[shared])
                    try:
                        time.sleep(3.0)  # it imports torch
                        for name, nbytes in SIZES.items():
                            progress.print(f"busy: {busy}, {name}")
                            rows.append([busy, name, *measured(client, nbytes, rounds, steps)])
                    finally:
                        process.kill()
                        process.wait()
        finally:
            end_daemon(daemon)
    report(title, rows, output, 120)


if __name__ == "__main__":
    typer.run(main)
