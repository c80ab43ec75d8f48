"""ecd on a machine with a GPU: correctness first, then what pinning and asynchronous copies bring.

    python benchmarks/gpu.py [--only SECTION]... [--output FILE.md] [--output-json FILE.json]

Takes less than 20 minutes. A section that fails is a row of the table, and the others go on.
Medians of many, each beside its rival in the same round. Needs torch with CUDA, cuda-bindings,
pytest, 2 GiB of the GPU's memory, 4 GiB of /dev/shm and, for the largest registration, 20 GiB of
other memory; for vLLM's section a vLLM for CUDA, here or as .venvs/vllm-0.32.0. Exits with 2 where
there is no GPU, and with 1 if a row misses its target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import gpu_kills
import torch
import typer
from common import MIB, machine, report
from gpu_client import loads, puts
from gpu_common import POOL_BYTES, Row, daemon_of, new_tensor, wait_pinned
from gpu_near import near
from gpu_rates import copies, registration, stalls

from ecd_client import Client

ROOT = Path(__file__).parents[1]
BUDGET_S = 16 * 60.0
"""Time after which no section begins: the longest take some 3 minutes."""
TESTS_S = 300.0
SMALL_POOL_BYTES = 256 * MIB
LATE_MS = 500.0
"""Most that a dead process's copies may go on: half of the grace that the daemon gives them."""
VLLM = "0.32.0"
PICTURES = 8


# -- correctness -----------------------------------------------------------------------------------


def tests() -> list[Row]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    environment = {**os.environ, "ECD_TEST_CUDA": "device"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TESTS_S
    )
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


# -- vLLM ------------------------------------------------------------------------------------------


def vllm() -> list[Row]:
    """Two engines with the tiny model: the second loads what the first has encoded."""
    python = _python_of_vllm()
    if python is None:
        return [Row("vLLM", "left out: no vLLM for CUDA in this environment or .venvs")]
    sys.path.append(str(ROOT / "tests"))
    from e2e import engines

    engines.python_of = lambda version: python
    requests = [
        {"text": "what is in this picture?", "images": [[448, 448, seed]], "max_tokens": 8}
        for seed in range(PICTURES)
    ]
    with tempfile.TemporaryDirectory() as name, daemon_of(POOL_BYTES) as (_, address):
        directory = Path(name)
        model = engines.make_model(VLLM, "qwen2_5_vl", directory / "model")
        setup = {
            "model": str(model),
            "role": "ec_both",
            "extra": {"ecd_address": address},
            "engine": {"gpu_memory_utilization": 0.3, "enable_prefix_caching": False},
        }
        environ = {"VLLM_CACHE_ROOT": name, "PYTHONPATH": str(engines.HERE / "site")}
        answers: list[list[dict[str, Any]]] = []
        for log in ("first.log", "second.log"):
            engine = engines.Engine(VLLM, directory / log, setup, **environ).wait_ready()
            try:
                answers.append([engine.generate([request]) for request in requests])
                counters = engine.metrics()
            finally:
                engine.close()
    tokens = [[each["outputs"][0]["tokens"] for each in engine] for engine in answers]
    encoded = [sum(each["encoded"] for each in engine) for engine in answers]
    took_ms = [median(each["seconds"] for each in engine[1:]) * 1e3 for engine in answers]
    is_equal = tokens[0] == tokens[1]
    found = f"{encoded[0]} and {encoded[1]} encoded, tokens {'equal' if is_equal else 'DIFFER'}"
    return [
        Row(
            "vLLM: a second engine loads what the first has encoded",
            found,
            f"{took_ms[1]:.1f} ms a request; encoding {took_ms[0]:.1f} ms",
            f"{PICTURES} and 0, equal, pinned",
            is_equal and encoded == [PICTURES, 0] and counters.get("pinned_bytes", 0) > 0,
            {"counters of the second": counters},
        )
    ]


def _python_of_vllm() -> Path | None:
    ask = "from vllm.platforms import current_platform as p; raise SystemExit(not p.is_cuda())"
    for python in (Path(sys.executable), ROOT / f".venvs/vllm-{VLLM}/bin/python"):
        if (
            python.exists()
            and not subprocess.run([python, "-c", ask], capture_output=True).returncode
        ):
            return python
    return None


# -- all of it -------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], list[Row]]] = {
    each.__name__: each
    for each in (tests, daemon, kills, copies, registration, stalls, loads, puts, near, vllm)
}


def gpu_name() -> str:
    said = smi("-i", "0", "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max")
    name, version, generation, width = (said.split(", ") + [""] * 4)[:4]
    if not version:
        return torch.cuda.get_device_name(0)
    return f"{name}, driver {version}, PCIe {generation} x{width}"


def smi(*asked: str) -> str:
    """What nvidia-smi says; "" where there is none."""
    try:
        command = ["nvidia-smi", *asked, "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


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
) -> None:
    if lacks := why_not():
        typer.echo(lacks, err=True)
        raise typer.Exit(2)
    if unknown := set(only or ()) - set(SECTIONS):
        raise typer.BadParameter(f"no such section: {', '.join(sorted(unknown))}")
    gpu, started_s, rows = gpu_name(), time.monotonic(), []
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
