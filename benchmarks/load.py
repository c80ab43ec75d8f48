"""Several clients at once: gets and puts in a mix, throughput, tails and what the daemon spends.

    python benchmarks/load.py [--clients N] [--gets 0.9] [--kib 64] [--seconds S] [--output FILE.md]

Each client is a process of its own. A get takes an entry that some client has put, reads its first
and last byte and lets it go; a put stores a new one, so that the pool, once full, evicts all the
time. Percentiles are over all operations of all clients. First the clients do what they can, then
the same with `--rate` operations a second together.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from common import MIB, end_daemon, machine, markdown, show, start_daemon, write_page
from rich.console import Console

from ecd_client import Client

POOL_BYTES = 512 * MIB
PERCENTILES = (50, 99, 99.9)
PAUSE_S = 0.002
"""How far a client that is held back gets ahead before it sleeps."""


def work(
    address: str,
    number: int,
    clients: int,
    gets: float,
    nbytes: int,
    seconds: float,
    rate: float,
    start: Any,
) -> dict[str, list[float]]:
    """One client, doing `rate` operations a second (0: what it can); durations in microseconds."""
    chance, data = random.Random(number), bytes([number]) * nbytes
    took: dict[str, list[float]] = {"get": [], "put": [], "miss": []}
    with Client(address, namespace="load") as client:
        for index in range(200):
            client.put_bytes(f"{number}-{index}", data, "uint8", (nbytes,))
        latest = 200
        time.sleep(1.0)
        start.wait()
        deadline_s = time.perf_counter() + seconds
        due_s = time.perf_counter()
        while (started_s := time.perf_counter()) < deadline_s:
            due_s += 1 / rate if rate else 0.0
            if rate and due_s - started_s > PAUSE_S:
                time.sleep(PAUSE_S)
                started_s = time.perf_counter()
            if chance.random() < gets:
                # Everybody stores at about the same pace, so others have what we had by now.
                index = chance.randrange(max(0, latest - 400), latest)
                item = client.get(f"{chance.randrange(clients)}-{index}")
                if item is None:
                    took["miss"].append((time.perf_counter() - started_s) * 1e6)
                    continue
                with item:
                    view = item.view
                    assert view[0] == view[-1]
                took["get"].append((time.perf_counter() - started_s) * 1e6)
            else:
                client.put_bytes(f"{number}-{latest}", data, "uint8", (nbytes,))
                took["put"].append((time.perf_counter() - started_s) * 1e6)
                latest += 1
    return took


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def main(
    clients: Annotated[int, typer.Option(help="Processes.")] = 4,
    gets: Annotated[float, typer.Option(help="Share of gets, 0 to 1.")] = 0.9,
    kib: Annotated[int, typer.Option(help="Size of an entry.")] = 64,
    seconds: Annotated[float, typer.Option(help="How long.")] = 10.0,
    rate: Annotated[float, typer.Option(help="Operations a second of the second run.")] = 22_000.0,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    out, progress = Console(highlight=False, width=120), Console(stderr=True)
    found, text = [], f"{machine()}.\n"
    for limit in (0.0, rate):
        progress.print(f"{clients} clients, {seconds:g} s ...")
        took, cpu = run(clients, gets, kib << 10, seconds, limit)
        total = sum(map(len, took.values())) / seconds
        pace = f"held back to {limit:,.0f} operations a second" if limit else "what they can"
        title = f"{clients} clients, {gets:.0%} gets, entries of {kib} KiB: {pace}."
        each: dict[str, Any] = {"rate": limit, "operations_per_s": total, "daemon_cores": cpu}
        rows = [["", "a second", *(f"p{percent:g}" for percent in PERCENTILES)]]
        for name, values in took.items():
            tails = [percentile(values, percent) for percent in PERCENTILES]
            each[name] = {f"p{p:g}_us": tail for p, tail in zip(PERCENTILES, tails, strict=True)}
            cells = [f"{tail:,.0f} us" for tail in tails]
            rows.append([name, f"{len(values) / seconds:,.0f}", *cells])
        rows.append(["all", f"{total:,.0f}", "", "", ""])
        rows.append(["daemon", f"{cpu:.0%} of a core", "", "", ""])
        found.append(each)
        text += f"\n{title}\n\n{markdown(rows)}"
        if not as_json:
            show(out, title, rows)
    if as_json:
        out.print_json(json.dumps({"machine": machine(), "runs": found}))
    if output is not None:
        write_page(output, text)


def run(
    clients: int, gets: float, nbytes: int, seconds: float, rate: float
) -> tuple[dict[str, list[float]], float]:
    """Durations by operation, in microseconds, and the cores that the daemon took."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        daemon, address = start_daemon(Path(directory), "load", POOL_BYTES)
        try:
            with context.Manager() as manager, context.Pool(clients) as pool:
                start = manager.Barrier(clients + 1)
                how = (clients, gets, nbytes, seconds, rate / clients, start)
                running = [pool.apply_async(work, (address, n, *how)) for n in range(clients)]
                start.wait()
                process = psutil.Process(daemon.pid)
                before = sum(process.cpu_times()[:2])
                time.sleep(seconds)
                cpu = (sum(process.cpu_times()[:2]) - before) / seconds
                results = [each.get() for each in running]
        finally:
            end_daemon(daemon)
    return {name: [us for each in results for us in each[name]] for name in results[0]}, cpu


if __name__ == "__main__":
    typer.run(main)
