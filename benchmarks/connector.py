"""The cost of a connector to a real vLLM engine under load: ecd, vLLM's example connector, none.

    python benchmarks/connector.py [--rounds N] [--size WxH] [--json] [--output FILE.md]

Each hook that the engine calls is timed, in the scheduler and in the worker, and so is the step.
The engine runs as vLLM runs it on a CPU, scheduler and worker each in a process of its own, with
eight requests at a time, each with a picture. Some pictures are stored, others are new, and the
encoder cache is too small to keep them. All ways run in one engine, in turn (`timed.py`); another
engine has no connector. The model is tiny and random, so a step is short. Needs `make vllm`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from common import MIB, end_daemon, machine, markdown, show, start_daemon, write_page
from rich.console import Console
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from e2e.engines import PATHS, Engine, make_model, python_of

VERSION = "0.32.0"
ECD, EXAMPLE, NOTHING, NONE = "EcdConnector", "ECExampleConnector", "Nothing", "none"
NAMES = {
    ECD: "ecd",
    EXAMPLE: "vLLM's ECExampleConnector",
    NOTHING: "a connector that does nothing",
    NONE: "an engine without a connector",
}
AT_ONCE = 8
STORED = 32
"""Pictures that come back, in a ring: more than the encoder cache keeps."""
ROUND = (24, 8)
"""Requests of one way in one round: with stored pictures, and with new ones."""
TOKENS = (4, 20)
"""The least and most tokens of an answer; requests that end one by one begin one by one."""
CACHE_TOKENS = 2048
"""Of a step, and of the encoder cache: vLLM takes one number for both."""
KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "loads one stored item": lambda step: step["stored"] == 1 and step["encoded"] == 0,
    "encodes one item": lambda step: step["stored"] == 0 and step["encoded"] == 1,
    "has no item": lambda step: step["stored"] == 0 and step["encoded"] == 0 and step["tokens"],
}
ROLES = ("scheduler", "worker")
WARM_STEPS = 60
"""The first of each way, which store the pictures and warm the engine up, are left out."""
COPY = "the copy"
"""Stands among a worker's hooks, and is a part of them."""
OWN = "own"
"""What hooks took of a processor, without waits."""
Found = dict[str, dict[str, Any]]


class Load:
    """The requests of both engines, and where each stands in the ring of stored pictures."""

    def __init__(self, size: str) -> None:
        self._size = list(map(int, size.split("x")))
        self._new = count(random.randrange(1 << 20, 1 << 29))
        self._stored = [next(self._new) for _ in range(STORED)]
        self._next: dict[Engine, int] = {}

    def prepare(self, engine: Engine, way: str) -> None:
        engine.generate([self._ask(way, seed, 1) for seed in self._stored])

    def run(self, engine: Engine, way: str) -> None:
        first, (stored, new) = self._next.get(engine, 0), ROUND
        self._next[engine] = first + stored
        seeds = [self._stored[(first + index) % STORED] for index in range(stored)]
        for _ in range(new):
            seeds.insert(random.randrange(len(seeds) + 1), next(self._new))
        engine.generate([self._ask(way, seed, random.randint(*TOKENS)) for seed in seeds])

    def _ask(self, way: str, seed: int, tokens: int) -> dict[str, Any]:
        return {
            "text": "what is in this picture?",
            "images": [[*self._size, seed]],
            "ec_transfer_params": None if way == NONE else {"way": way},
            "max_tokens": tokens,
        }


def start(model: Path, directory: Path, daemon: str, *, plain: bool) -> Engine:
    """An engine that writes what it finds, and its log, to the directory."""
    directory.mkdir()
    setup: dict[str, Any] = {
        "model": str(model),
        "engine": {
            "enable_prefix_caching": False,
            "max_num_seqs": AT_ONCE,
            "max_num_batched_tokens": CACHE_TOKENS,
        },
    }
    if plain:
        setup["engine"]["scheduler_cls"] = "timed.Scheduler"
    else:
        files = directory / "files"
        files.mkdir()
        setup["connector"] = {
            "ec_connector": "Timed",
            "ec_connector_module_path": "timed",
            "ec_connector_extra_config": {
                "ecd_address": daemon,
                "shared_storage_path": str(files),
            },
            "ec_role": "ec_both",
        }
    environ = {
        "PYTHONPATH": os.pathsep.join(map(str, [*PATHS, Path(__file__).parent])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "BENCH_STEPS": str(directory),
    }
    return Engine(VERSION, directory / "log", setup, **environ).wait_ready()


def found_in(directory: Path) -> Iterator[dict[str, Any]]:
    """The steps of an engine that has ended, each with what its hooks took, if it had any."""
    hooks = {
        name: json.loads((directory / f"{name}.json").read_text())
        for role in ROLES
        for name in (role, f"{role} {OWN}")
        if role == "scheduler" or (directory / "files").exists()
    }
    for step in json.loads((directory / "steps.json").read_text()):
        for name in (*ROLES, *(f"{role} {OWN}" for role in ROLES)):
            step[name] = hooks.get(name, {}).get(str(step["number"]), {})
        step[COPY] = step["worker"].pop(COPY, 0)
        yield step


def measure(
    rounds: int, size: str, directory: Path, progress: Console
) -> tuple[list[dict[str, Any]], int]:
    """Every step of every round, and the bytes of an item."""
    daemon, address = start_daemon(directory, "ecd", 512 * MIB)
    places = directory / "timed", directory / "plain"
    engines: list[Engine] = []
    try:
        progress.print("starting two engines ...")
        model = make_model(VERSION, "qwen2_5_vl", directory / "model")
        for place in places:
            engines.append(start(model, place, address, plain=place is places[1]))
        load = Load(size)
        ways = [(engines[0], way) for way in (ECD, EXAMPLE, NOTHING)] + [(engines[1], NONE)]
        for engine, way in ways:
            load.prepare(engine, way)
        for number in range(rounds):
            progress.print(f"round {number} ...")
            for engine, way in random.sample(ways, len(ways)):
                load.run(engine, way)
    finally:
        for engine in engines:
            engine.close()
        end_daemon(daemon)
    timed, plain = (list(found_in(place)) for place in places)
    file = next((places[0] / "files").rglob("*.safetensors"))
    nbytes = load_file(file)["ec_cache"].nbytes
    return timed + [step | {"way": NONE} for step in plain], nbytes


def by_kind(steps: list[dict[str, Any]]) -> Found:
    found: Found = {}
    warm = {way: [step for step in steps if step["way"] == way][WARM_STEPS:] for way in NAMES}
    for kind, belongs in KINDS.items():
        for way in NAMES:
            if these := [step for step in warm[way] if belongs(step)]:
                found.setdefault(kind, {})[way] = figures(these)
    return found


def figures(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Microseconds, of steps that had the same to do in the same way."""
    by_hook = {
        f"{role}: {hook}": {
            **spread([step[role].get(hook, 0) / 1e3 for step in steps]),
            OWN: fmean(step[f"{role} {OWN}"].get(hook, 0) / 1e3 for step in steps),
        }
        for role in ROLES
        for hook in sorted({hook for step in steps for hook in step[role]})
    }
    own_us = [sum(sum(step[f"{role} {OWN}"].values()) for role in ROLES) / 1e3 for step in steps]
    by_role = {role: [sum(step[role].values()) / 1e3 for step in steps] for role in ROLES}
    each = [sum(roles) for roles in zip(*by_role.values(), strict=True)]
    step_us = [step["step_ns"] / 1e3 for step in steps]
    return {
        "steps": len(steps),
        "requests": fmean(step["requests"] for step in steps),
        "hooks": spread(each),
        **{role: spread(values) for role, values in by_role.items()},
        COPY: spread([step[COPY] / 1e3 for step in steps]),
        OWN: spread(own_us),
        "step": spread(step_us),
        "share": median(hooks / step for hooks, step in zip(each, step_us, strict=True)),
        "by_hook": by_hook,
    }


def spread(values: list[float]) -> dict[str, float]:
    p99 = sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]
    return {"mean": fmean(values), "median": median(values), "p99": p99}


def tables(found: Found) -> tuple[list[list[str]], list[list[str]]]:
    """The sums, and what each hook has of them."""
    columns = ("hooks", OWN, "scheduler", "worker", COPY)
    sums = [["a step that", "with", "steps", "hooks", "p99", *columns[1:], "the step", "share"]]
    hooks = [["a step that", "with", "hook", "mean", OWN, "p99"]]
    for kind, ways in found.items():
        for way, took in ways.items():
            row = [kind, NAMES[way], f"{took['steps']:,}"]
            if way == NONE:
                row += ["-"] * (len(columns) + 1)
            else:
                medians = [us(took[column]["median"]) for column in columns]
                row += [medians[0], us(took["hooks"]["p99"]), *medians[1:]]
            row += [us(took["step"]["median"]), "-" if way == NONE else f"{took['share']:.2%}"]
            sums.append(row)
            if way in (ECD, EXAMPLE):
                for hook, of in took["by_hook"].items():
                    times = [us(of[name]) for name in ("mean", OWN, "p99")]
                    hooks.append([kind, NAMES[way], hook, *times])
    return sums, hooks


def us(value: float) -> str:
    return f"{value:,.1f} us"


def main(
    rounds: Annotated[int, typer.Option(help="Of all ways, in random order.")] = 60,
    size: Annotated[str, typer.Option(help="Of a picture.")] = "448x448",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    if not python_of(VERSION).exists():
        raise SystemExit(f"vLLM {VERSION} is not installed: run make vllm")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ecd-bench-") as name:
        steps, nbytes = measure(rounds, size, Path(name), Console(stderr=True))
    found = by_kind(steps)
    out = Console(highlight=False, width=170)
    if as_json:
        out.print_json(json.dumps({"machine": machine(), "item_bytes": nbytes, "steps": found}))
        return
    titles = (
        f"All hooks of one step, medians and their p99; {rounds} rounds, each item {nbytes:,} B. "
        "Own: of a processor, without waits.",
        "By hook; a hook that a step did not call counts as 0.",
    )
    text = f"{machine()}, vLLM {VERSION}.\n"
    for title, rows in zip(titles, tables(found), strict=True):
        show(out, title, rows)
        text += f"{title}\n\n{markdown(rows)}\n"
    if output is not None:
        write_page(output, text)


if __name__ == "__main__":
    typer.run(main)
