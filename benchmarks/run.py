"""put, get and contains between two processes: ecd beside its peers and a plain copy.

    python benchmarks/run.py [--peer NAME ...] [--rounds N] [--processes N] [--output FILE.md]
        [--plot FILE.png]

One process writes, another reads, the peer lies between. Every round times a plain copy and the
operation one after the other, over buffers that rotate, so that neither finds its bytes in the
processor's caches; what copies nothing is timed in a loop of its own. Each is done by several
processes in turn; the medians of their medians, and the ratio of these to the plain copy's in the
same run, are printed. LMCache's engine keeps what it has for its own process: there the reader
reads what it has put itself.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from common import MIB, machine, markdown, show, timed_us
from peers import ALONE, PEERS, open_place, run_for
from rich.console import Console

from ecd_proto.mapping import Mapping

SIZES = {"64 KiB": 64 << 10, "1 MiB": MIB, "8 MiB": 8 * MIB, "32 MiB": 32 * MIB}
POOL_BYTES = 1 << 30
RING_BYTES = POOL_BYTES // 2
SHORT_ROUNDS = 400
"""Of what copies nothing."""
OPERATIONS = {
    "put": "until another process can get it",
    "get, private copy": "into memory of the reader's own",
    "get, handle": "found and held, no byte copied",
    "contains": "one key",
}
PLAIN = "plain copy"


class Ring:
    """Buffers in turn, more of them than the caches hold."""

    def __init__(self, nbytes: int, shared: bool = False) -> None:
        """`shared` memory is what the pool is made of: its pages are small ones."""
        count = max(2, RING_BYTES // nbytes)
        if shared:
            memory = torch.frombuffer(
                Mapping.of_memory(count * nbytes).view(0, count * nbytes), dtype=torch.uint8
            )
            self._buffers = list(memory.split(nbytes))
        else:
            self._buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
        for number, buffer in enumerate(self._buffers):
            buffer.fill_(number % 251)
        self._next = 0

    def take(self) -> torch.Tensor:
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next]


def rounds_of(rounds: int, nbytes: int) -> int:
    return max(20, rounds // max(1, nbytes // MIB))


def write(peer: str, place: str, nbytes: int, rounds: int, turn: int) -> dict[str, float]:
    """Puts, each with a plain copy before it."""
    torch.set_num_threads(1)
    client = PEERS[peer](place, nbytes)
    time.sleep(2.0)  # page tables fill in the background
    sources, targets = Ring(nbytes), Ring(nbytes, shared=True)
    copies, puts = [], []
    for index in range(rounds_of(rounds, nbytes)):
        target, source = targets.take(), sources.take()
        copies.append(timed_us(lambda t=target, s=source: t.copy_(s)))
        source = sources.take()
        puts.append(timed_us(lambda i=index, s=source: client.put(f"{turn}-{i}", s)))
        if hasattr(client, "tidy"):
            client.tidy()
    return {f"{PLAIN}, writer": median(copies), "put": median(puts)}


def read(peer: str, place: str, nbytes: int, rounds: int, turn: int) -> dict[str, float]:
    """What this turn's writer left, in the order of its last puts."""
    torch.set_num_threads(1)
    client = PEERS[peer](place, nbytes)
    total = rounds_of(rounds, nbytes)
    if peer == ALONE:  # nobody else can get what it keeps
        for index in range(total):
            client.put(f"{turn}-{index}", torch.full((nbytes,), index % 251, dtype=torch.uint8))
    here = [key for i in range(total) if client.contains(key := f"{turn}-{i}")][-200:]
    assert here, f"{peer} has kept nothing"
    time.sleep(2.0)
    sources, targets = Ring(nbytes), Ring(nbytes)
    took: dict[str, list[float]] = {PLAIN: [], "get, private copy": []}
    for step in range(total):
        key = here[step % len(here)]
        target, source = targets.take(), sources.take()
        took[PLAIN].append(timed_us(lambda t=target, s=source: t.copy_(s)))
        target = targets.take()
        took["get, private copy"].append(timed_us(lambda k=key, t=target: client.copy(k, t)))
    for name, action in (("get, handle", client.hold), ("contains", client.contains)):
        if action is not None:
            keys = (here * SHORT_ROUNDS)[:SHORT_ROUNDS]
            took[name] = [timed_us(partial(action, key)) for key in keys]
    return {name: median(values) for name, values in took.items()}


def measure(
    peer: str, rounds: int, processes: int, progress: Console
) -> dict[str, dict[str, float]]:
    """By size, the medians over some writers and readers, in microseconds."""
    results = {}
    with open_place(peer, POOL_BYTES) as place:
        for name, nbytes in SIZES.items():
            progress.print(f"{peer}, {name} ...")
            turns = []
            for turn in range(processes):
                written = run_for(peer, "run", "write", peer, place, nbytes, rounds, turn)
                turns.append(
                    written | run_for(peer, "run", "read", peer, place, nbytes, rounds, turn)
                )
            results[name] = {key: median(each[key] for each in turns) for key in turns[0]}
    return results


def plot(results: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Each peer's put and private copy, as a ratio to the plain copy in its run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    width = 0.8 / len(results)
    for axis, operation in zip(axes, ("put", "get, private copy"), strict=True):
        for number, (peer, sizes) in enumerate(results.items()):
            ratios = [
                medians[operation] / medians[plain_of(operation)] for medians in sizes.values()
            ]
            places = [place + number * width for place in range(len(sizes))]
            axis.bar(places, ratios, width, label=peer)
        axis.set_xticks([i + 0.4 - width / 2 for i in range(len(SIZES))], SIZES)
        axis.set_yscale("log")
        axis.set_title(f"{operation}: times a plain copy")
        axis.axhline(1.0, color="grey", linewidth=0.8)
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plain_of(operation: str) -> str:
    return f"{PLAIN}, writer" if operation == "put" else PLAIN


def rows_of(results: dict[str, dict[str, dict[str, float]]]) -> list[list[str]]:
    rows = [["", "", *SIZES]]
    for operation in OPERATIONS:
        for peer, sizes in results.items():
            cells = []
            for medians in sizes.values():
                if operation not in medians:
                    cells.append("-")
                    continue
                text = f"{medians[operation]:,.0f} us"
                if operation != "contains" and operation != "get, handle":
                    text += f" ({medians[operation] / medians[plain_of(operation)]:.2f}x)"
                else:
                    text = f"{medians[operation]:,.1f} us"
                cells.append(text)
            rows.append([operation, peer, *cells])
    for name in (f"{PLAIN}, writer", PLAIN):
        of_size = [
            [sizes[size][name] for sizes in results.values() if size in sizes] for size in SIZES
        ]
        cells = [f"{min(values):,.0f} to {max(values):,.0f} us" for values in of_size]
        rows.append([name, "in each run", *cells])
    return rows


def main(
    peer: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds for sizes up to 1 MiB.")] = 400,
    processes: Annotated[int, typer.Option(help="Writers, and readers, one after another.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Write a PNG here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    out, progress = Console(highlight=False, width=140), Console(stderr=True)
    results = {name: measure(name, rounds, processes, progress) for name in peer or PEERS}
    title = (
        "Medians; in brackets the ratio to a plain copy of the same bytes in the same run: of a "
        "put to a copy into touched shared memory, of a get to one into touched private memory."
    )
    rows = rows_of(results)
    if as_json:
        out.print_json(json.dumps({"machine": machine(), "medians_us": results}))
    else:
        show(out, title, rows)
    if output is not None:
        output.write_text(f"{machine()}.\n{title}\n\n{markdown(rows)}")
    if picture is not None:
        plot(results, picture)


if __name__ == "__main__":
    typer.run(main)
