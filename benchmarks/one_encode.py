"""How many encodes a cluster saves where a node waits for another that encodes the same picture.

    python benchmarks/one_encode.py [--output FILE.md]

Sends the accesses of `workloads.py` to nodes as routers do, and computes when each node's encoder,
which encodes one item after the other, has stored what nobody had. An access at a node while
another node encodes its item is an encode saved: without the wait, that node encodes it as well. A
second access at the same node is not counted, as the lock of one node is enough for it. Pools are
as large as all items, so nothing is encoded again, and all times follow from the accesses: each
figure is the same every time. Some seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from common import markdown, show, write_page
from rich.console import Console
from rich.progress import track
from workloads import WORKLOADS, workload

from ecd.replay.reading import Accesses

SEEDS = (1, 2, 3)
NODES = (2, 8)
BUSY = (0.3, 0.7)
"""The share of time that encoders work, on average, if each item is encoded once."""
WITHIN = (0.5, 0.9)
"""The part of the accesses that is looked at; what was asked for before is stored."""
Router = Callable[[int, int, list[float]], int]
"""The node of an access, by its number, its item's key and when each node's encoder is free."""


def round_robin(number: int, key: int, free_s: list[float]) -> int:
    """As vLLM's example proxy, vllm-router and Dynamo deal items to encoders."""
    return number % len(free_s)


def least_busy(number: int, key: int, free_s: list[float]) -> int:
    """As vllm-ascend's proxy chooses, by what is under way."""
    return free_s.index(min(free_s))


def by_chance(number: int, key: int, free_s: list[float]) -> int:
    """As requests come that routers choose a node for by something else, such as their text."""
    return random.Random(f"{number} {key}").randrange(len(free_s))


ROUTERS: dict[str, Router] = {
    "round robin": round_robin,
    "least busy": least_busy,
    "by chance": by_chance,
}


def saved(found: Accesses, nodes: int, busy: float, route: Router) -> float:
    """The share of all encodes that waiting for other nodes saves."""
    begun, ended = (int(len(found.order) * share) for share in WITHIN)
    stored_s = dict.fromkeys(found.order[:begun], 0.0)
    new = set(found.order[begun:ended]).difference(stored_s)
    encoder_s = sum(found.items[item].cost_s for item in new)
    begin_s, end_s = found.times_s[begun], found.times_s[ended]
    pace = encoder_s / ((end_s - begin_s) * nodes * busy)  # of the workload's own times
    free_s = [0.0] * nodes
    made_at: dict[int, set[int]] = {}
    saved = 0
    for number in range(begun, ended):
        item, now_s = found.order[number], (found.times_s[number] - begin_s) * pace
        node = route(number, found.items[item].key, free_s)
        if item not in stored_s:
            free_s[node] = stored_s[item] = max(now_s, free_s[node]) + found.items[item].cost_s
            made_at[item] = {node}
        elif now_s < stored_s[item] and node not in made_at[item]:
            made_at[item].add(node)
            saved += 1
    return saved / (len(new) + saved)


def main(output: Annotated[Path | None, typer.Option(help="Write a page there.")] = None) -> None:
    head = ["workload", *(f"{n} nodes, {b:.0%} busy" for n in NODES for b in BUSY)]
    out = Console(highlight=False, width=100)
    tables = {name: [head] for name in ROUTERS}
    for name in track(WORKLOADS, "workloads", console=Console(stderr=True)):
        traces = [workload(name, seed) for seed in SEEDS]
        for router, route in ROUTERS.items():
            shares = [
                mean(saved(found, nodes, busy, route) for found in traces)
                for nodes in NODES
                for busy in BUSY
            ]
            tables[router].append([name, *(f"{share:.2%}" for share in shares)])
    for router, table in tables.items():
        show(out, f"Encodes saved, {router}", table)
    if output is not None:
        parts = [f"## {router}\n\n{markdown(table)}" for router, table in tables.items()]
        write_page(output, "\n\n".join(parts))


if __name__ == "__main__":
    typer.run(main)
