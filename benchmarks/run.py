"""put, get and contains between two processes, beside a plain copy of the same bytes.

    python benchmarks/run.py [--rounds N] [--output FILE.md]

One process writes, another reads, a real daemon lies between. Every round times a plain copy and
the operation one after the other, over buffers that rotate, so that neither finds its bytes in
the processor's caches; the medians and their ratio are printed.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from common import MIB, machine, markdown, show, start_daemon, timed_us
from rich.console import Console

from ecd_client import Client
from ecd_client.calls import call, open_channel
from ecd_proto.mapping import Mapping
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

SIZES = {"64 KiB": 64 << 10, "1 MiB": MIB, "8 MiB": 8 * MIB, "32 MiB": 32 * MIB}
POOL_BYTES = 1 << 30
RING_BYTES = POOL_BYTES
PROCESSES = 5
COMPARED = {
    "put": "plain copy (writer)",
    "get, private copy": "allocate and copy (reader)",
}
"""What each operation's ratio is to: the same bytes, to memory of the same kind."""


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


def write(address: str, name: str, nbytes: int, rounds: int) -> dict[str, float]:
    """Puts, each with a plain copy before it. Leaves the last entries for the reader."""
    with Client(address, namespace=name, prefault=True) as client:
        call(
            pb_grpc.CacheStub(open_channel(address)).Evict, pb.EvictRequest(namespace=name), address
        )
        time.sleep(2.0)  # its page tables fill in the background
        sources, targets = Ring(nbytes), Ring(nbytes, shared=True)
        copies, puts = [], []
        for index in range(rounds_of(rounds, nbytes)):
            target, source = targets.take(), sources.take()
            copies.append(timed_us(lambda t=target, s=source: t.copy_(s)))
            source = sources.take()
            puts.append(timed_us(lambda i=index, s=source: client.put(f"k{i}", s)))
    return {"plain copy (writer)": median(copies), "put": median(puts)}


def read(address: str, name: str, nbytes: int, rounds: int) -> dict[str, float]:
    """Gets of what the writer left, as a view and as a private copy, and contains."""
    with Client(address, namespace=name, prefault=True) as client:
        total = rounds_of(rounds, nbytes)
        here = [i for i in range(total) if client.contains([f"k{i}"])[0]]
        time.sleep(2.0)
        sources, targets = Ring(nbytes), Ring(nbytes)
        copies, clones, views, gets, contains = [], [], [], [], []

        def view(key: str) -> None:
            with client.get(key) as item:
                _ = item.tensor

        def private(key: str) -> None:
            with client.get(key) as item:
                item.to()

        for step in range(total):
            key = f"k{here[step % len(here)]}"
            target, source = targets.take(), sources.take()
            copies.append(timed_us(lambda t=target, s=source: t.copy_(s)))
            clones.append(timed_us(sources.take().clone))
            views.append(timed_us(lambda k=key: view(k)))
            gets.append(timed_us(lambda k=key: private(k)))
            contains.append(timed_us(lambda k=key: client.contains([k])))
    return {
        "plain copy (reader)": median(copies),
        "allocate and copy (reader)": median(clones),
        "get, view": median(views),
        "get, private copy": median(gets),
        "contains": median(contains),
    }


def in_processes(work: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    """Medians over some processes: where its memory lies makes one differ from another."""
    medians = []
    for _ in range(PROCESSES):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            medians.append(pool.apply(work, arguments))
    return {name: median(each[name] for each in medians) for name in medians[0]}


def main(
    rounds: Annotated[int, typer.Option(help="Rounds for sizes up to 1 MiB.")] = 400,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    torch.set_num_threads(1)
    out, progress = Console(highlight=False, width=120), Console(stderr=True)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        daemon, address = start_daemon(Path(directory), "ecd", POOL_BYTES)
        try:
            for name, nbytes in SIZES.items():
                progress.print(f"{name} ...")
                results[name] = in_processes(write, address, name, nbytes, rounds)
                results[name] |= in_processes(read, address, name, nbytes, rounds)
        finally:
            daemon.terminate()
            daemon.wait()
    if as_json:
        out.print_json(json.dumps({"machine": machine(), "medians_us": results}))
    rows = [["", *results]]
    for operation in next(iter(results.values())):
        cells = []
        for medians in results.values():
            text = f"{medians[operation]:,.0f} us"
            if operation in COMPARED:
                text += f" ({medians[operation] / medians[COMPARED[operation]]:.1f}x)"
            cells.append(text)
        rows.append([operation, *cells])
    title = "Medians; in brackets the ratio to the same copy without ecd."
    if not as_json:
        show(out, title, rows)
    if output is not None:
        output.write_text(f"{machine()}.\n{title}\n\n{markdown(rows)}")


if __name__ == "__main__":
    typer.run(main)
