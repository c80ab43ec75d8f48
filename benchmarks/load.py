"""Several clients at once: gets and puts in a mix, throughput, tails and what the daemon spends.

    python benchmarks/load.py [--clients N] [--gets 0.9] [--kib 64] [--seconds S] [--output FILE.md]

Each client is a process of its own. A get takes an entry that some client has put, reads its first
and last byte and lets it go; a put stores a new one, so that the pool, once full, evicts all the
time. Percentiles are over all operations of all clients. First the clients do what they can, then
the same with `--rate` operations a second together, then `--many` clients with `--many-rate`.

Fairness: a light client does 50 operations a second, alone and beside one, four and 16 clients
that do what they can. The machine's cores are shared, so beside it stands how late the light
client is woken from a sleep.

Refusals: eight clients hold what they put until the pool is full of held entries, and go on for a
second. The table has each answer that a put got, and how often.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from common import (
    MIB,
    cpu_s,
    end_daemon,
    machine,
    markdown,
    processes,
    show,
    start_daemon,
    timed_us,
    write_page,
)
from rich.console import Console

from ecd_client import Client, EcdError

POOL_BYTES = 512 * MIB
ENTRIES = 800
"""Put before the start by all clients together; twice as many are asked for then."""
PERCENTILES = (50, 99, 99.9)
PAUSE_S = 0.002
"""How far a client that is held back gets ahead before it sleeps."""
LIGHT_S = 0.02
"""What the light client sleeps between two operations."""
START_S = 120.0
"""How long clients may take until all are there."""
NUMBERS = re.compile(r"\d[\d,.]*( [KMG]iB)?")


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
        first = latest = max(1, ENTRIES // clients)
        for index in range(first):
            client.put_bytes(f"{number}-{index}", data, "uint8", (nbytes,))
        time.sleep(1.0)
        start.wait(START_S)
        deadline_s = time.perf_counter() + seconds
        due_s = time.perf_counter()
        while (started_s := time.perf_counter()) < deadline_s:
            due_s += 1 / rate if rate else 0.0
            if rate and due_s - started_s > PAUSE_S:
                time.sleep(due_s - started_s)
                started_s = time.perf_counter()
            if chance.random() < gets:
                # Everybody stores at about the same pace, so others have what we had by now.
                index = chance.randrange(max(0, latest - 2 * first), latest)
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
    many: Annotated[int, typer.Option(help="Processes of the third run.")] = 64,
    many_rate: Annotated[float, typer.Option(help="Operations a second of that run.")] = 4_000.0,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    out, progress = Console(highlight=False, width=120), Console(stderr=True)
    found, text = [], f"{machine()}.\n"
    for count, limit in ((clients, 0.0), (clients, rate), (many, many_rate)):
        progress.print(f"{count} clients, {seconds:g} s ...")
        took, cpu = run(count, gets, kib << 10, seconds, limit)
        total = sum(map(len, took.values())) / seconds
        pace = f"held back to {limit:,.0f} operations a second" if limit else "what they can"
        title = f"{count} clients, {gets:.0%} gets, entries of {kib} KiB: {pace}."
        each: dict[str, Any] = {
            "clients": count,
            "rate": limit,
            "operations_per_s": total,
            "daemon_cores": cpu,
        }
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
    tables = {
        "A light client beside clients that do what they can": fairness(seconds, progress),
        "What is refused where all of the pool is held": refusals(),
    }
    for title, rows in tables.items():
        text += f"\n{title}.\n\n{markdown(rows)}"
        if not as_json:
            show(out, title, rows)
    if as_json:
        out.print_json(json.dumps({"machine": machine(), "runs": found, **tables}))
    if output is not None:
        write_page(output, text)


def light(address: str, seconds: float, ready: Any) -> dict[str, list[float]]:
    """A client that does little; microseconds of its operations, and how late it was woken."""
    took: dict[str, list[float]] = {"get": [], "put": [], "woken late": []}
    data = bytes(64 << 10)
    with Client(address, namespace="light") as client:
        client.put_bytes("0", data, "uint8", (len(data),))
        ready.wait(START_S)
        deadline_s = time.perf_counter() + seconds
        number = 0
        while (started_s := time.perf_counter()) < deadline_s:
            time.sleep(LIGHT_S)
            took["woken late"].append((time.perf_counter() - started_s - LIGHT_S) * 1e6)
            key = f"{number}"
            number += 1
            took["put"].append(
                timed_us(lambda n=number: client.put_bytes(f"{n}", data, "uint8", (len(data),)))
            )
            started_s = time.perf_counter()
            if item := client.get(key):
                item.close()
                took["get"].append((time.perf_counter() - started_s) * 1e6)
    return took


def fairness(seconds: float, progress: Console) -> list[list[str]]:
    context, rows = processes(), [["beside", "operation", "p50", "p99"]]
    for heavy in (0, 1, 4, 16):
        progress.print(f"a light client beside {heavy} ...")
        with tempfile.TemporaryDirectory() as directory:
            daemon, address = start_daemon(Path(directory), f"light-{heavy}", POOL_BYTES)
            try:
                with context.Manager() as manager, context.Pool(heavy + 1) as pool:
                    start = manager.Barrier(heavy + 1)
                    how = (max(heavy, 1), 0.9, 64 << 10, seconds, 0.0, start)
                    for number in range(heavy):
                        pool.apply_async(work, (address, number, *how))
                    took = pool.apply_async(light, (address, seconds - 1, start)).get()
            finally:
                end_daemon(daemon)
        for name, values in took.items():
            tails = [f"{percentile(values, percent):,.0f} us" for percent in (50, 99)]
            rows.append([f"{heavy} clients", name, *tails])
    return rows


def hold(address: str, number: int, start: Any) -> dict[str, int]:
    """Put and hold entries of 1 MiB; how often each answer came."""
    answers: dict[str, int] = {}
    data, held = bytes(MIB), []
    with Client(address, namespace="hold") as client:
        start.wait(START_S)
        deadline_s = time.perf_counter() + 1.0
        for index in itertools.count():
            if time.perf_counter() > deadline_s:
                break
            try:
                client.put_bytes(f"{number}-{index}", data, "uint8", (MIB,), timeout=0.05)
                held.append(client.get(f"{number}-{index}"))
                answer = "stored"
            except EcdError as error:
                answer = f"{type(error).__name__}: {NUMBERS.sub('N', str(error))}"
            answers[answer] = answers.get(answer, 0) + 1
        for item in filter(None, held):
            item.close()
    return answers


def refusals() -> list[list[str]]:
    context, counts = processes(), Counter[str]()
    with tempfile.TemporaryDirectory() as directory:
        daemon, address = start_daemon(Path(directory), "hold", 128 * MIB)
        try:
            with context.Manager() as manager, context.Pool(8) as pool:
                start = manager.Barrier(8)
                running = [pool.apply_async(hold, (address, n, start)) for n in range(8)]
                for each in running:
                    counts.update(each.get())
        finally:
            end_daemon(daemon)
    return [["answer", "times"], *([answer, f"{n:,}"] for answer, n in counts.most_common())]


def run(
    clients: int, gets: float, nbytes: int, seconds: float, rate: float
) -> tuple[dict[str, list[float]], float]:
    """Durations by operation, in microseconds, and the cores that the daemon took."""
    context = processes()
    with tempfile.TemporaryDirectory() as directory:
        daemon, address = start_daemon(Path(directory), "load", POOL_BYTES)
        try:
            with context.Manager() as manager, context.Pool(clients) as pool:
                start = manager.Barrier(clients + 1)
                how = (clients, gets, nbytes, seconds, rate / clients, start)
                running = [pool.apply_async(work, (address, n, *how)) for n in range(clients)]
                start.wait(START_S)
                process = psutil.Process(daemon.pid)
                before_s = cpu_s(process)
                time.sleep(seconds)
                cpu = (cpu_s(process) - before_s) / seconds
                results = [each.get() for each in running]
        finally:
            end_daemon(daemon)
    return {name: [us for each in results for us in each[name]] for name in results[0]}, cpu


if __name__ == "__main__":
    typer.run(main)
