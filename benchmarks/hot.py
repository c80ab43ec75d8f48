"""One new picture that every node wants at once: who serves it, and how long until the last has it.

    python benchmarks/hot.py [--nodes N] [--output FILE.md] [--plot FILE.svg]

ecd's own daemons run on the simulated clock and network of tests/simulation, with the links and the
Redis of hot_model.py. The picture and all bandwidths are SCALE times smaller than said, so that a
thousand pools fit into memory: times are as said.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import sys
from ipaddress import IPv4Network
from math import ceil, log2
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple
from unittest import mock

import typer
from common import markdown, show, write_page
from hot_model import REDIS_WINDOW_S, BusyPipe, BusyRedis, Links, Reader
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console

from ecd.settings.config import Config
from simulation.clock import VirtualLoop
from simulation.network import Weather
from simulation.run import _abandon, small
from simulation.scenario import SIZES, Action, Scenario
from simulation.world import Run

PICTURE_BYTES = 32 << 20
KEY = len(SIZES) - 1
SCALE = PICTURE_BYTES / SIZES[KEY]
LINKS = (1.25e9, 10e9)  # bytes a second
ALL = 1 << 30
TIMEOUT_S = 5.0
BEATS_S = 3.0
"""Over which the nodes start: their signs of life are spread."""
DELAY_S = (50e-6, 100e-6)
"""How long a message takes, one way."""
MESSAGE_S = 0.2e-3
"""What a message costs the daemon that receives it (docs/benchmarks/directory.md)."""


class Outcome(NamedTuple):
    """What became of one picture."""

    has_s: list[float]  # since it was asked for, or made, sorted
    most_readers: int  # of one node at a time
    copies: float  # that the producer sent
    links: int  # at the producer
    redis_s: float
    redis_commands: int
    redis_peak: float  # commands a second
    redis_longest_s: float  # that a command waited and took
    late_lookups: int
    refused: int  # links, by all nodes


WAYS = {
    "directory": "stored, asked for in Redis",
    "hints": "stored, named by hints",
    "made": "made by one node while all ask",
}


def hot(
    nodes: int,
    bytes_per_s: float,
    readers: int,
    way: str,
    message_s: float = 0.0,
    over_s: float = 0.0,
) -> Outcome:
    """Have every node want the picture that one has, or makes, one after the other in `over_s`."""
    loop = VirtualLoop(Random(nodes))
    asyncio.set_event_loop(loop)
    weather = Weather(delay_s=DELAY_S, bytes_per_s=bytes_per_s / SCALE)
    about = "redis", 256 << 10, 30.0, TIMEOUT_S, False, weather, 0.0, None, 0.0, (), readers
    networks = (IPv4Network("10.0.0.0/16"),) if way == "hints" else ()
    config = Config(peer_address="10.0.0.1:9470", peer_insecure=True, hint_networks=networks)
    BusyPipe.message_s = message_s
    gc.disable()
    try:
        with (
            small(),
            mock.patch("simulation.clock.TURN_S", 1e-9),  # one node's turns take no other's time
            mock.patch("simulation.stream.Pipe", BusyPipe),
            mock.patch("simulation.world._config", return_value=config),
        ):
            return _run(loop, Scenario(nodes, nodes, *about), way, over_s)
    finally:
        BusyPipe.free_s = {}
        _abandon(loop)
        asyncio.set_event_loop(None)
        gc.enable()


def _run(loop: VirtualLoop, scenario: Scenario, way: str, over_s: float) -> Outcome:
    run = Run(loop, scenario)
    run.engines, run.redis = engines, redis = Links(run.network), BusyRedis(run.network)
    outcome = loop.run_until_complete(_hot(run, engines, redis, way, over_s))
    assert not [*run.violations, *loop.errors], (run.violations, loop.errors)
    return outcome


async def _hot(run: Run, engines: Links, redis: BusyRedis, way: str, over_s: float) -> Outcome:
    loop, is_made = run.loop, way == "made"
    for number in range(run.scenario.nodes):
        run.start(number, is_warm=False)
        await asyncio.sleep(BEATS_S / run.scenario.nodes)
    await asyncio.sleep(0.5)
    clients = [Reader(run, number) for number in range(run.scenario.nodes)]
    if not is_made:
        await clients[0].put(KEY, 0.001, 0.0)
        await asyncio.sleep(0.5)
    start_s = loop.now_s
    redis.begin()
    choice = {"hints": 0.21, "directory": 0.2, "made": 0.5}[way]  # who cannot make it waits
    action = Action(0.0, "", 0, 0, KEY, TIMEOUT_S, choice)
    wanting = clients if is_made else clients[1:]

    async def get(number: int, client: Reader) -> None:
        await asyncio.sleep(over_s * number / len(wanting))
        await client.get(action, is_made)

    await asyncio.gather(*(get(number, client) for number, client in enumerate(wanting)))
    stored_s, producer = min(
        (each.stored_s, number) for number, each in enumerate(clients) if each.stored_s is not None
    )
    start_s = max(start_s, stored_s)
    daemon = run.daemons[producer]
    return Outcome(
        sorted(each.has_s - start_s for each in wanting if each.has_s is not None),
        max(engines.most_readers.values(), default=0),
        engines.read_bytes.get(daemon.engine.endpoint, 0) * SCALE / PICTURE_BYTES,
        len(daemon.peers._links),
        redis.busy_s,
        redis.commands.total(),
        max(redis.commands.values(), default=0) / REDIS_WINDOW_S,
        redis.longest_s,
        sum(each.cluster._directory.state.errors for each in run.daemons),
        sum(each.cache.counters.refused["peer_links"] for each in run.daemons),
    )


def bound_s(nodes: int, bytes_per_s: float, message_s: float = 0.0, questions: int = 0) -> float:
    """A broadcast of whole entries: those that have it double in each round.

    Binomial tree, ceil(log2 p)(alpha + n beta): Thakur et al., IJHPCA 19(1), 2005. With each
    question comes a hello. The node that has the entry takes in all of them, and the last to ask
    then reads.
    """
    round_s = DELAY_S[0] + message_s + PICTURE_BYTES / bytes_per_s
    return max(ceil(log2(nodes)) * round_s, 2 * questions * message_s + round_s)


# -- the page --------------------------------------------------------------------------------------

HEAD = ["readers", "have it within 5 s", "half", "last", "bound", "last : bound"]
HEAD += ["most that read from one node", "copies from the producer"]
AT_A_TIME = (ALL, 2, 1)
POINTS = 60
"""Of each line that is drawn."""


def row(nodes: int, least_s: float, readers: int, outcome: Outcome) -> list[str]:
    others = nodes - 1
    half, last = (
        outcome.has_s[count - 1] if len(outcome.has_s) >= count else None
        for count in (others // 2, others)
    )
    return [
        "all" if readers == ALL else str(readers),
        f"{len(outcome.has_s):,} of {others:,}",
        *("never" if at is None else f"{1e3 * at:,.0f} ms" for at in (half, last)),
        f"{1e3 * least_s:,.0f} ms",
        "" if last is None else f"{last / least_s:.2f}",
        f"{outcome.most_readers:,}",
        f"{outcome.copies:,.0f}",
    ]


def draw(plot: Path, nodes: int, outcomes: dict[str, dict[float, Outcome]]) -> None:
    """How many nodes have it, over time, beside the bound."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, bytes_per_s in zip(
        figure.subplots(1, 2, sharex=True, sharey=True), LINKS, strict=True
    ):
        for label, by_link in outcomes.items():
            has_s = by_link[bytes_per_s].has_s
            label = label if has_s else f"{label}: none within {TIMEOUT_S:g} s"
            some = [(1e3 * at_s, count) for count, at_s in enumerate(has_s, 1)]
            some = [*some[:: ceil(len(some) / POINTS) or 1], *some[-1:]]
            axes.plot([at for at, _ in some], [count for _, count in some], label=label)
        rounds = [1e3 * bound_s(2**n, bytes_per_s) for n in range(1, ceil(log2(nodes)) + 1)]
        have = [min(2**n, nodes) - 1 for n in range(1, len(rounds) + 1)]
        axes.step(rounds, have, "k--", where="post", label="bound: binomial tree")
        axes.set_title(f"links of {bytes_per_s / 1e9:g} GB/s", fontsize=10)
        axes.set_xscale("log")
        axes.set_xticks(ticks := (3, 10, 30, 100, 300, 1000, 3000), map("{:,}".format, ticks))
        axes.set_xticks([], minor=True)
        axes.set_xlabel("ms since the picture was asked for")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel(f"of {nodes:,} nodes, those that have it")
    figure.axes[0].legend(fontsize=8)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ecd"}):
        figure.savefig(plot, metadata={"Date": None})


def main(
    nodes: Annotated[int, typer.Option(help="Of the largest cluster.")] = 1000,
    output: Annotated[Path | None, typer.Option(help="A Markdown page for the tables.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of the largest cluster.")] = None,
) -> None:
    """Measure one hot picture, before turns and with them, in a simulated cluster."""
    logging.getLogger("ecd").setLevel(logging.ERROR)  # fetches that are late are counted
    drawn: dict[str, dict[float, Outcome]] = {}
    rows, with_cpu = ([["link", "the picture is", *HEAD]] for _ in range(2))
    for bytes_per_s, way in itertools.product(LINKS, WAYS):
        about = [f"{bytes_per_s / 1e9:g} GB/s", WAYS[way]]
        for readers in AT_A_TIME:
            outcome = hot(nodes, bytes_per_s, readers, way)
            rows.append([*about, *row(nodes, bound_s(nodes, bytes_per_s), readers, outcome)])
            typer.echo(f"{rows[-1]}, Redis busy {outcome.redis_s:.3f} s, {outcome.links} links")
            if way == "directory":
                label = "all read at once" if readers == ALL else f"{readers} read at a time"
                drawn.setdefault(label, {})[bytes_per_s] = outcome
        outcome = hot(nodes, bytes_per_s, 2, way, MESSAGE_S)
        questions = 0 if way == "made" else nodes - 1  # then many are asked before it is made
        least_s = bound_s(nodes, bytes_per_s, MESSAGE_S, questions)
        with_cpu.append([*about, *row(nodes, least_s, 2, outcome)])
        if way == "directory":
            drawn.setdefault("2 at a time, with the daemons' CPU", {})[bytes_per_s] = outcome
    fewer = [["nodes", *HEAD]]
    for count, readers in itertools.product((3, 5, 50, 200), AT_A_TIME):
        outcome = hot(count, LINKS[0], readers, "directory")
        fewer.append([str(count), *row(count, bound_s(count, LINKS[0]), readers, outcome)])
    tables = {
        f"{nodes:,} nodes; messages cost no CPU.": rows,
        f"{nodes:,} nodes; a message costs its receiver {1e3 * MESSAGE_S:g} ms.": with_cpu,
        f"Fewer nodes, {LINKS[0] / 1e9:g} GB/s, asked for in Redis; messages cost no CPU.": fewer,
    }
    for title, table in tables.items():
        show(Console(width=200), title, table)
    if output is not None:
        text = (f"{title}\n\n{markdown(table)}" for title, table in tables.items())
        write_page(output, "\n".join(text))
    if plot is not None:
        draw(plot, nodes, drawn)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # or the order in sets differs from run to run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    typer.run(main)
