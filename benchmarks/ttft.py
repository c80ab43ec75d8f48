"""Time to the first token at a consumer engine: ecd, vLLM's file-based example connector, nothing.

    python benchmarks/ttft.py [--rounds N] [--version 0.32.0] [--output FILE.md]

Real vLLM engines, each in a process of its own: one that encodes for others, one that consumes, one
that does both, and one that knows no connector. The first three switch from way to way
(`switching.py`), so that ways are compared within one process. The consumer is asked for the same
pictures again and again, and forgets their embeddings each time; what is not reused is new each
time. Requests go one after the other in random order; the time is from the call to the first token.
The models are tiny and random: what is compared is what sharing costs, not what encoding does.
Needs `make vllm`.
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
from e2e.engines import PATHS, Engine, make_model, python_of

SIZES = ("112x112", "224x224", "448x448", "896x896")
PICTURES = 8
"""Of each size, that come back."""
SAVE_S = 1.0
"""Between the producer's last answer and the first request: no save is waited for."""
ECD, EXAMPLE, NOTHING = "EcdConnector", "ECExampleConnector", "Nothing"
CONSUMER, BOTH, PLAIN = "ec_consumer", "ec_both", "no connector"
TIMED = {
    "ecd": (CONSUMER, ECD),
    "ECExampleConnector": (CONSUMER, EXAMPLE),
    "nothing": (CONSUMER, NOTHING),
    "ecd, nothing reused": (BOTH, ECD),
    "nothing, in that engine": (BOTH, NOTHING),
    "an engine without a connector": (PLAIN, NOTHING),
}
"""The engine and the way."""
COMPARED = {
    "ecd : ECExampleConnector": ("ecd", "ECExampleConnector"),
    "ecd, nothing reused : nothing": ("ecd, nothing reused", "nothing, in that engine"),
}
TURNS = (
    (COMPARED["ecd : ECExampleConnector"], (32, 32, 32, 64)),
    (("nothing",), (8, 8, 4, 4)),
    ((*COMPARED["ecd, nothing reused : nothing"], "an engine without a connector"), (16, 12, 8, 4)),
)
"""What is asked for in turn, and how many turns of each size a round has."""
RESAMPLES = 1000

Took = dict[str, dict[str, list[float]]]
"""Seconds by way and size, in order of turns."""


def start(version: str, model: Path, directory: Path, daemon: str) -> dict[str, Engine]:
    files = directory / "files"
    files.mkdir()
    extra = {"ecd_address": daemon, "shared_storage_path": str(files)}
    path = os.pathsep.join(map(str, [*PATHS, Path(__file__).parent]))

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
    """Ask an engine that has no embedding of its own for the first token."""
    width, height = map(int, size.split("x"))
    request = {
        "text": "what is in this picture?",
        "images": [[width, height, seed]],
        "ec_transfer_params": {"way": way},
    }
    engine.send({"do": "forget"})
    engine.receive()
    return engine.generate([request], max_tokens=1)


def encode(producer: Engine, seeds: Iterator[int]) -> dict[str, list[int]]:
    """Pictures of each size that have been encoded, and saved in both ways."""
    pictures = {size: [next(seeds) for _ in range(PICTURES)] for size in SIZES}
    for size in SIZES:
        for seed in pictures[size]:
            for way in (ECD, EXAMPLE):
                assert ask(producer, way, size, seed)["encoded"]
    time.sleep(SAVE_S)
    return pictures


def nothing_yet() -> Took:
    return {name: {size: [] for size in SIZES} for name in TIMED}


def one_round(
    engines: dict[str, Engine], pictures: dict[str, list[int]], seeds: Iterator[int]
) -> Took:
    """All turns, in random order, and in random order within each."""
    took = nothing_yet()
    turns = [
        (ways, size)
        for ways, counts in TURNS
        for size, count in zip(SIZES, counts, strict=True)
        for _ in range(count)
    ]
    for ways, size in random.sample(turns, len(turns)):
        old = random.choice(pictures[size])
        for name in random.sample(ways, len(ways)):
            engine, way = TIMED[name]
            reply = ask(engines[engine], way, size, old if engine == CONSUMER else next(seeds))
            shared = engine == CONSUMER and way != NOTHING
            # What was shared may have come late, or this measures something else.
            assert reply["encoded"] == (not shared), (name, reply)
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
    rounds: Annotated[int, typer.Option(help="Of all TURNS.")] = 24,
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
            pictures = encode(engines["ec_producer"], seeds)
            for number in range(rounds + 1):
                progress.print(f"round {number} ...")
                for way, sizes in one_round(engines, pictures, seeds).items():
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
