"""Time to the first token at a consumer engine: ecd, vLLM's file-based example connector, nothing.

    python benchmarks/ttft.py [--rounds N] [--version 0.32.0] [--output FILE.md]

Real vLLM engines, each in a process of its own: one that encodes for others, one that consumes, one
that does both, and one that knows no connector. The first three switch from way to way
(`switching.py`), so that ways are compared within one process. Every way gets new pictures of each
size, one after the other in random order; the time is from the call to the first token. The models
are tiny and random: what is compared is what sharing costs, not what encoding does. Needs `make
vllm`.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from common import MIB, end_daemon, report, start_daemon
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from e2e.engines import HERE, Engine, make_model, python_of

SIZES = {"112x112": 16, "224x224": 12, "448x448": 8, "896x896": 4}
"""Pictures of each size in a round, for each way."""
SAVE_S = 0.3
"""Between the producer's last answer and the first request: no save is waited for."""
ECD, EXAMPLE, NOTHING = "EcdConnector", "ECExampleConnector", "Nothing"
CONSUMER, BOTH, PLAIN = "ec_consumer", "ec_both", "no connector"
TIMED = {
    "ecd": (CONSUMER, ECD, True),
    "ECExampleConnector": (CONSUMER, EXAMPLE, True),
    "nothing": (CONSUMER, NOTHING, False),
    "ecd, nothing reused": (BOTH, ECD, False),
    "nothing, in that engine": (BOTH, NOTHING, False),
    "an engine without a connector": (PLAIN, NOTHING, False),
}
"""The engine, the way, and whether the picture was encoded elsewhere before."""
COMPARED = {
    "ecd : ECExampleConnector": ("ecd", "ECExampleConnector"),
    "ecd : nothing": ("ecd", "nothing"),
    "ecd, nothing reused : nothing": ("ecd, nothing reused", "nothing, in that engine"),
}
RESAMPLES = 1000

Took = dict[str, dict[str, list[float]]]
"""Seconds by way and size, in order of turns; each turn has one of each way."""


def start(version: str, model: Path, directory: Path, daemon: str) -> dict[str, Engine]:
    files = directory / "files"
    files.mkdir()
    extra = {"ecd_address": daemon, "shared_storage_path": str(files)}
    path = os.pathsep.join([str(HERE / "site"), str(Path(__file__).parent)])

    def engine(role: str) -> Engine:
        setup: dict = {"model": str(model), "engine": {"enable_prefix_caching": False}}
        if role != PLAIN:
            setup["connector"] = {
                "ec_connector": "Switching",
                "ec_connector_module_path": "switching",
                "ec_connector_extra_config": extra,
                "ec_role": role,
            }
        log = directory / f"{role}.log".replace(" ", "-")
        return Engine(version, log, setup, PYTHONPATH=path).wait_ready()

    return {role: engine(role) for role in ("ec_producer", CONSUMER, BOTH, PLAIN)}


def ask(engine: Engine, way: str, size: str, seed: int) -> dict:
    width, height = map(int, size.split("x"))
    request = {
        "text": "what is in this picture?",
        "images": [[width, height, seed]],
        "ec_transfer_params": {"way": way},
    }
    return engine.generate([request], max_tokens=1)


def nothing_yet() -> Took:
    return {name: {size: [] for size in SIZES} for name in TIMED}


def one_round(engines: dict[str, Engine], seeds: Iterator[int]) -> Took:
    """Some pictures of each size for each way."""
    took = nothing_yet()
    turns = []
    for size, count in SIZES.items():
        for _ in range(count):
            turn = [(name, size, next(seeds)) for name in TIMED]
            random.shuffle(turn)
            turns.append(turn)
    random.shuffle(turns)
    requests = [request for turn in turns for request in turn]
    for name, size, seed in requests:
        _, way, encoded_before = TIMED[name]
        if encoded_before:
            ask(engines["ec_producer"], way, size, seed)
    time.sleep(SAVE_S)
    for name, size, seed in requests:
        engine, way, encoded_before = TIMED[name]
        reply = ask(engines[engine], way, size, seed)
        # What was shared may have come late, or this measures something else.
        assert reply["encoded"] == (not encoded_before), (name, reply)
        took[name][size].append(reply["seconds"])
    return took


def ratio(took: Took, sizes: Sequence[str], ways: tuple[str, str]) -> str:
    """The median of the ratio turn by turn, and the middle 95 % of that in resamples.

    Of several sizes: each counts by what it takes.
    """
    pairs = {size: list(zip(*(took[way][size] for way in ways), strict=True)) for size in sizes}

    def once(resample: bool) -> float:
        one_s = other_s = 0.0
        for size in sizes:
            chosen = random.choices(pairs[size], k=len(pairs[size])) if resample else pairs[size]
            base_s = median(other for _, other in chosen)
            one_s += base_s * median(one / other for one, other in chosen)
            other_s += base_s
        return one_s / other_s

    resampled = sorted(once(True) for _ in range(RESAMPLES))
    low, high = resampled[RESAMPLES // 40], resampled[-RESAMPLES // 40 - 1]
    return f"{once(False):.3f} ({low:.3f} to {high:.3f})"


def main(
    rounds: Annotated[int, typer.Option(help="Of the pictures in SIZES, for each way.")] = 12,
    version: Annotated[str, typer.Option(help="Of vLLM.")] = "0.32.0",
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    if not python_of(version).exists():
        raise SystemExit(f"vLLM {version} is not installed: run make vllm")
    progress = Console(stderr=True)
    took = nothing_yet()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ecd-bench-") as name:
        directory = Path(name)
        daemon, address = start_daemon(directory, "ecd", 512 * MIB)
        progress.print("starting four engines ...")
        model = make_model(version, "qwen2_5_vl", directory / "model")
        engines = start(version, model, directory, address)
        seeds = iter(range(random.randrange(1 << 20), 1 << 30))
        try:
            for number in range(rounds + 1):
                progress.print(f"round {number} ...")
                for way, sizes in one_round(engines, seeds).items():
                    for size, seconds in sizes.items():
                        took[way][size] += seconds if number else []  # the first warms up
        finally:
            for engine in engines.values():
                engine.close()
            end_daemon(daemon)
    rows = [["", *SIZES, "one of each size"]]
    for way, sizes in took.items():
        each = [median(values) * 1e3 for values in sizes.values()]
        rows.append([way, *(f"{ms:.1f} ms" for ms in (*each, sum(each)))])
    for title, ways in COMPARED.items():
        columns = [*([size] for size in SIZES), list(SIZES)]
        rows.append([title, *(ratio(took, sizes, ways) for sizes in columns)])
    title = (
        "Time to the first token, medians; then medians of the ratio turn by turn, in brackets the "
        "middle 95 % of these in resamples (bootstrap)."
    )
    report(title, rows, output, width=170, where=f", vLLM {version}")


if __name__ == "__main__":
    typer.run(main)
