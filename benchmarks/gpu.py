"""ecd on a machine with a GPU: correctness first, then what pinning and asynchronous copies bring.

    python benchmarks/gpu.py [--only SECTION]... [--output FILE.md] [--output-json FILE.json]
    python benchmarks/gpu.py --standin

The second needs no GPU: the time of an engine's thread, on the stand-in for CUDA's driver.

Takes less than 20 minutes. A section that fails is a row of the table, and the others go on.
Medians of many, each beside its rival in the same round. Needs torch with CUDA, cuda-bindings,
pytest, 8 GiB of the GPU's memory (33 for the largest device pool), 6 GiB of /dev/shm and, for the
largest registration, 20 GiB of other memory; for vLLM's section a vLLM for CUDA, here or as
.venvs/vllm-0.32.0. Exits with 2 where there is no GPU, and with 1 if a row misses its target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated

import gpu_host
import gpu_kills
import torch
import typer
from common import MIB, machine, report
from gpu_client import loads, puts
from gpu_common import POOL_BYTES, Row, daemon_of, gpu_name, new_tensor, smi, wait_pinned
from gpu_engines import engines
from gpu_near import attach, near
from gpu_rates import copies, registration, stalls
from gpu_vllm import vllm

from ecd_client import Client

ROOT = Path(__file__).parents[1]
BUDGET_S = 14 * 60.0
"""Time after which no section begins: the longest take some 5 minutes."""
TESTS_S = 300.0
SMALL_POOL_BYTES = 256 * MIB
LATE_MS = 500.0
"""Most that a dead process's copies may go on: half of the grace that the daemon gives them."""


# -- correctness -----------------------------------------------------------------------------------


def tests() -> list[Row]:
    """Those of tests/gpu, four at a time; where they take too long, the output says which did."""
    options = "-q", "-n", "4", "--run-limit", str(TESTS_S), "-p", "no:cacheprovider"
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu"]
    environment = {**os.environ, "ECD_TEST_CUDA": "device"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    last = (run.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    said = {"output": run.stdout[-20_000:], "errors": run.stderr[-5_000:]}
    return [Row("tests/gpu on this GPU", last, "", "all pass", run.returncode == 0, said)]


def daemon() -> list[Row]:
    """A daemon whose client pins the pool and copies has no context, and no driver."""
    with daemon_of(POOL_BYTES) as (pid, address), Client(address) as client:
        wait_pinned(client)
        client.put("k", new_tensor(MIB))
        shown = smi("--query-compute-apps=pid").split()
        maps = Path(f"/proc/{pid}/maps").read_text()
        opened = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    devices = sorted(each for each in opened if "nvidia" in each)
    if str(os.getpid()) in shown:
        seen = f"nvidia-smi shows {'it' if str(pid) in shown else 'only its client'}"
    else:
        seen = "nvidia-smi shows no process from here"
    is_free = "libcuda" not in maps and not devices and str(pid) not in shown
    found = f"{'no' if is_free else 'A'} context; {seen}; {len(devices)} devices open"
    return [Row("the daemon of a client that copies", found, "", "no context", is_free)]


def kills() -> list[Row]:
    """How long a killed writer's copies go on, and whether a byte is ever wrong."""
    watched = gpu_kills.watch()
    after_lock = [max(0.0, each.last_change - each.lock_free) for each in watched]
    after_end = [max(0.0, each.last_change - each.process_ended) for each in watched]
    numbers = {"ms_after_the_kill": [each._asdict() for each in watched]}
    with daemon_of(SMALL_POOL_BYTES) as (_, address):
        survived = gpu_kills.survive(address)
    return [
        Row(
            f"bytes change after the lock is free, {len(watched)} kills",
            f"at most {max(after_lock):.1f} ms, median {median(after_lock):.1f}",
            numbers=numbers,
        ),
        Row(
            f"bytes change after the process's end, {len(watched)} kills",
            f"at most {max(after_end):.1f} ms, median {median(after_end):.1f}",
            "the grace of D1: 1 s",
            f"<= {LATE_MS:.0f} ms",
            max(after_end) <= LATE_MS,
        ),
        Row(
            f"wrong bytes, {survived['kills']} kills of engines within saves",
            f"{survived['wrong']} of {survived['checked']:,} entries",
            "",
            "0",
            survived["wrong"] == 0 and survived["kills"] > 0,
            survived,
        ),
    ]


# -- all of it -------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], list[Row]]] = {
    each.__name__: each
    for each in (
        *(tests, daemon, kills, copies, registration, stalls, loads, puts),
        *(gpu_host.host, near, attach, engines, vllm),
    )
}


def why_not() -> str | None:
    """What this environment lacks."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device here: there is nothing to measure"
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError as error:
        return f"cuda-bindings cannot be loaded: {error}. Install it: pip install cuda-bindings"
    return None


def run(name: str) -> list[Row]:
    """A section's rows; one that says what failed."""
    typer.echo(f"{name} ...", err=True)
    try:
        return SECTIONS[name]()
    except Exception as error:
        traceback.print_exc()
        numbers = {"traceback": traceback.format_exc()}
        return [Row(name, f"failed: {type(error).__name__}: {error}", "", "", False, numbers)]


def shown(rows: list[Row]) -> list[list[str]]:
    marks = {True: "yes", False: "NO", None: ""}
    cells = [[r.measure, r.found, r.against, r.target, marks[r.is_met]] for r in rows]
    return [["measure", "found", "against", "target", "met"]] + [
        [cell.replace("|", "/").replace("\n", " ")[:200] for cell in row] for row in cells
    ]


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SECTIONS)}.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write all numbers here.")] = None,
    standin: Annotated[bool, typer.Option("--standin", help="Without a GPU: host alone.")] = False,
) -> None:
    if standin:
        gpu_host.use_standin()
        only = ["host"]
    elif lacks := why_not():
        typer.echo(lacks, err=True)
        raise typer.Exit(2)
    if unknown := set(only or ()) - set(SECTIONS):
        raise typer.BadParameter(f"no such section: {', '.join(sorted(unknown))}")
    gpu = "the stand-in for CUDA's driver" if standin else gpu_name()
    started_s, rows = time.monotonic(), []
    for name in SECTIONS:
        if only and name not in only:
            continue
        if time.monotonic() - started_s > BUDGET_S:
            rows.append(Row(name, "left out: no time is left"))
        else:
            rows += run(name)
        if output_json is not None:  # after each section, as the machine may be taken away
            found = {"machine": machine(), "gpu": gpu, "rows": [asdict(row) for row in rows]}
            output_json.write_text(json.dumps(found, indent=1))
    took_s = time.monotonic() - started_s
    report(f"{gpu}; {took_s:.0f} s.", shown(rows), output, 170)
    raise typer.Exit(1 if any(row.is_met is False for row in rows) else 0)


if __name__ == "__main__":
    typer.run(main)
