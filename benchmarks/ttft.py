"""Time to the first token at a consumer engine: ecd, vLLM's file-based example connector, nothing.

    python benchmarks/ttft.py [--rounds N] [--version 0.32.0] [--output FILE.md]

Real vLLM engines, all alive at once, each in a process of its own: for ecd and for the example
connector one that encodes and one that consumes, one engine that knows neither, and one with ecd
that encodes for itself and finds nothing to reuse. Every round takes a new picture of each size
through all of them, one after the other and each first in its turn; the time is that of the last
request, from the call to the first token. The models are tiny and random: what is compared is what
sharing costs, not what encoding does. Needs `make vllm`.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from common import MIB, end_daemon, report, start_daemon
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from e2e.engines import Engine, make_model, python_of

SIZES = ("112x112", "224x224", "448x448", "896x896")
SAVE_S = 0.3
"""Between the producer's answer and the consumer's request: no save is waited for."""
ECD, EXAMPLE, ALONE, NO_REUSE = "ecd", "ECExampleConnector", "no connector", "ecd, nothing reused"


def connector(name: str, role: str, place: str) -> dict:
    if name == EXAMPLE:
        kind = {"ec_connector": name, "ec_connector_extra_config": {"shared_storage_path": place}}
    else:
        kind = {
            "ec_connector": "EcdConnector",
            "ec_connector_module_path": "ecd_client.vllm",
            "ec_connector_extra_config": {"ecd_address": place},
        }
    return {**kind, "ec_role": role}


def start(
    version: str, model: Path, directory: Path, daemon: str
) -> tuple[dict[str, Engine], dict[str, Engine]]:
    """Those that encode for others, and those whose first token is timed."""
    place = {ECD: daemon, EXAMPLE: str(directory / "files")}
    Path(place[EXAMPLE]).mkdir()

    def engine(name: str, role: str | None) -> Engine:
        setup: dict = {"model": str(model), "engine": {"enable_prefix_caching": False}}
        if role is not None:
            setup["connector"] = connector(name, role, place.get(name, daemon))
        log = directory / f"{name}-{role}.log".replace(" ", "-")
        return Engine(version, log, setup).wait_ready()

    producers = {name: engine(name, "ec_producer") for name in (ECD, EXAMPLE)}
    timed = {name: engine(name, "ec_consumer") for name in (ECD, EXAMPLE)}
    timed[ALONE] = engine(ALONE, None)
    timed[NO_REUSE] = engine(NO_REUSE, "ec_both")
    return producers, timed


def ask(size: str, seed: int) -> dict:
    width, height = map(int, size.split("x"))
    return {"text": "what is in this picture?", "images": [[width, height, seed]]}


def main(
    rounds: Annotated[int, typer.Option(help="Pictures of each size.")] = 15,
    version: Annotated[str, typer.Option(help="Of vLLM.")] = "0.32.0",
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    if not python_of(version).exists():
        raise SystemExit(f"vLLM {version} is not installed: run make vllm")
    progress = Console(stderr=True)
    took: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ecd-bench-") as name:
        directory = Path(name)
        daemon, address = start_daemon(directory, "ecd", 512 * MIB)
        progress.print("starting six engines ...")
        model = make_model(version, "qwen2_5_vl", directory / "model")
        producers, timed = start(version, model, directory, address)
        try:
            seed = random.randrange(1 << 20)
            for number in range(rounds + 1):
                progress.print(f"round {number} ...")
                for size in SIZES:
                    seed += 2
                    for each in producers.values():
                        each.generate([ask(size, seed)], max_tokens=1)
                    time.sleep(SAVE_S)
                    turn = number % len(timed)
                    for way in [*list(timed)[turn:], *list(timed)[:turn]]:
                        picture = ask(size, seed + (way == NO_REUSE))  # nobody has seen that one
                        reply = timed[way].generate([picture], max_tokens=1)
                        # What was shared may have come late, or this measures something else.
                        assert reply["encoded"] == (way in (ALONE, NO_REUSE)), (way, reply)
                        if number:
                            took.setdefault(way, {}).setdefault(size, []).append(reply["seconds"])
        finally:
            for engine in (*producers.values(), *timed.values()):
                engine.close()
            end_daemon(daemon)
    rows = [["", *SIZES]]
    for way, sizes in took.items():
        cells = []
        for size, values in sizes.items():
            pairs = zip(values, took[ALONE][size], strict=True)
            ratio = median(mine / plain for mine, plain in pairs)
            cells.append(f"{median(values) * 1e3:.1f} ms ({ratio:.2f}x)")
        rows.append([way, *cells])
    title = (
        "Time to the first token, medians; in brackets the median of the ratio to the engine "
        "without a connector, round by round."
    )
    report(title, rows, output, width=140, where=f", vLLM {version}")


if __name__ == "__main__":
    typer.run(main)
