"""One new picture that every node wants at once: who serves it, and how long until the last has it.

    python benchmarks/hot.py [--nodes N] [--output FILE.md] [--plot FILE.svg]

ecd's own daemons run on the simulated clock and network of tests/simulation. The reads from one
node share its link, as flows of TCP do, and Redis answers one command at a time. The picture and
all bandwidths are SCALE times smaller than said, so that a thousand pools fit into memory: times
are as said.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import logging
import os
import sys
from math import ceil, log2
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, NamedTuple
from unittest import mock

import typer
from common import markdown, show, write_page
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console

from ecd.config import Config

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulation.client import Client
from simulation.clock import OUTSIDE, VirtualLoop, virtual_time
from simulation.engine import Engines, Transfer
from simulation.network import Network, Weather
from simulation.redis import Client as RedisClient
from simulation.redis import SimulatedRedis
from simulation.run import _abandon, small
from simulation.scenario import SIZES, Action, Scenario
from simulation.stream import Pipe
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
REDIS_S = {"eval": 37e-6, "hset": 3.3e-6, "set": 35e-6, "exists": 20e-6}
"""What a command costs Redis (docs/benchmarks/directory.md); `exists` as half a lookup."""


class Uplink:
    """A node's link to the others: the reads under way get equal parts of it."""

    def __init__(self, loop: VirtualLoop, bytes_per_s: float) -> None:
        self._loop, self._bytes_per_s = loop, bytes_per_s
        self._each = 0.0  # bytes that a read would have got if it had been there from the start
        self._since_s = 0.0
        self._reads: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self._timer: Any = None

    def add(self, nbytes: int, done: Any) -> None:
        self._go_on()
        heapq.heappush(self._reads, (self._each + nbytes, next(self._numbers), done))
        self._wait()

    def _go_on(self) -> None:
        now_s = self._loop.now_s
        if self._reads:
            self._each += (now_s - self._since_s) * self._bytes_per_s / len(self._reads)
        self._since_s = now_s

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._reads:
            left_s = (self._reads[0][0] - self._each) * len(self._reads) / self._bytes_per_s
            self._timer = self._loop.call_later(max(left_s, 0.0), self._over, context=OUTSIDE)

    def _over(self) -> None:
        self._go_on()
        while self._reads and self._reads[0][0] <= self._each + 0.5:
            heapq.heappop(self._reads)[2]()
        self._wait()


class Links(Engines):
    """Engines whose transfers share the link of the node that is read."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.uplinks: dict[str, Uplink] = {}
        self.read_bytes: dict[str, int] = {}
        self.readers: dict[str, dict[str, int]] = {}
        self.most_readers: dict[str, int] = {}

    def begin(self, transfer: Transfer) -> None:
        network, name = self.network, transfer.engine
        transfer.may_write = lambda: None
        if name not in self.uplinks:
            self.uplinks[name] = Uplink(network.loop, network.weather.bytes_per_s)
        readers = self.readers.setdefault(name, {})
        reader = transfer.reader.endpoint
        is_large = transfer.nbytes > 16
        if is_large:
            readers[reader] = readers.get(reader, 0) + 1
            self.most_readers[name] = max(self.most_readers.get(name, 0), len(readers))

        def served() -> None:
            if is_large:
                readers[reader] -= 1
                if not readers[reader]:
                    del readers[reader]
            self.read_bytes[name] = self.read_bytes.get(name, 0) + transfer.nbytes
            self._serve(transfer, 0, transfer.nbytes, True)

        def arrive() -> None:
            self.uplinks[name].add(transfer.nbytes, served)

        network.loop.call_later(2 * network.delay_s(), arrive, context=OUTSIDE)


class BusyRedis(SimulatedRedis):
    """A Redis that takes its time for each command, one after the other."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.busy_s = self.free_s = 0.0

    def client(self, url: str, timeout_s: float) -> RedisClient:
        return BusyClient(self, timeout_s)


class BusyClient(RedisClient):
    async def send(self, commands: list[Any]) -> list[Any]:
        redis: Any = self._redis
        took_s = sum(REDIS_S.get(name, 3.3e-6) for name, *_ in commands)
        redis.busy_s += took_s
        redis.free_s = max(redis.free_s, redis.network.loop.now_s) + took_s
        await asyncio.sleep(redis.free_s - redis.network.loop.now_s)
        return await super().send(commands)


class BusyPipe(Pipe):
    """A stream's direction whose receiver takes in one message after the other."""

    message_s = 0.0
    free_s: ClassVar[dict[str, float]] = {}

    def put(self, message: object) -> None:
        _, receiver = self._way
        loop = self._network.loop
        at_s = max(loop.now_s, self.free_s.get(receiver, 0.0)) + self.message_s
        self.free_s[receiver] = at_s
        loop.call_at(at_s, super().put, message, context=OUTSIDE)


class Reader(Client):
    """An engine that notes when it has stored the picture, and when it has it from another node."""

    stored_s = has_s = None

    async def put(self, number: int, seconds: float, choice: float) -> None:
        await super().put(number, seconds, choice)
        self.stored_s = self._loop.now_s

    async def _read(self, session: Any, action: Action, leased: Any) -> None:
        self.has_s = self._loop.now_s
        await super()._read(session, action._replace(seconds=0.0), leased)


class Outcome(NamedTuple):
    """What became of one picture."""

    has_s: list[float]  # since it was asked for, or made, sorted
    most_readers: int  # of one node at a time
    copies: float  # that the producer sent
    links: int  # at the producer
    redis_s: float


WAYS = {
    "directory": "stored, asked for in Redis",
    "hints": "stored, named by hints",
    "made": "made by one node while all ask",
}


def hot(nodes: int, bytes_per_s: float, readers: int, way: str, message_s: float = 0.0) -> Outcome:
    """Have every node want the picture that one has, or makes."""
    rng = Random(nodes)
    loop = VirtualLoop(rng)
    asyncio.set_event_loop(loop)
    weather = Weather(delay_s=DELAY_S, bytes_per_s=bytes_per_s / SCALE)
    about = "redis", 256 << 10, 30.0, TIMEOUT_S, False, weather, 0.0, None, 0.0, (), readers
    networks = "10.0.0.0/16" if way == "hints" else ()
    config = Config(peer_address="10.0.0.1:9470", peer_insecure=True, hint_networks=networks)
    BusyPipe.message_s = message_s
    gc.disable()
    try:
        with (
            virtual_time(loop, rng),
            small(),
            mock.patch("simulation.clock.TURN_S", 1e-9),  # one node's turns take no other's time
            mock.patch("simulation.stream.Pipe", BusyPipe),
            mock.patch("simulation.world._config", return_value=config),
        ):
            return _run(loop, Scenario(nodes, nodes, *about), way)
    finally:
        BusyPipe.free_s = {}
        _abandon(loop)
        asyncio.set_event_loop(None)
        gc.enable()


def _run(loop: VirtualLoop, scenario: Scenario, way: str) -> Outcome:
    run = Run(loop, scenario)
    run.engines, run.redis = Links(run.network), BusyRedis(run.network)
    outcome = loop.run_until_complete(_hot(run, way))
    assert not [*run.violations, *loop.errors], (run.violations, loop.errors)
    return outcome


async def _hot(run: Run, way: str) -> Outcome:
    loop, is_made = run.loop, way == "made"
    for number in range(run.scenario.nodes):
        run.start(number, is_warm=False)
        await asyncio.sleep(BEATS_S / run.scenario.nodes)
    await asyncio.sleep(0.5)
    clients = [Reader(run, number) for number in range(run.scenario.nodes)]
    if not is_made:
        await clients[0].put(KEY, 0.001, 0.0)
        await asyncio.sleep(0.5)
    start_s, run.redis.busy_s = loop.now_s, 0.0
    choice = 0.51 if way == "hints" else 0.5
    action = Action(0.0, "", 0, 0, KEY, TIMEOUT_S, choice)
    wanting = clients if is_made else clients[1:]
    await asyncio.gather(*(each.get(action, is_made) for each in wanting))
    stored_s, producer = min(
        (each.stored_s, number) for number, each in enumerate(clients) if each.stored_s is not None
    )
    start_s = max(start_s, stored_s)
    engines, daemon = run.engines, run.daemons[producer]
    return Outcome(
        sorted(each.has_s - start_s for each in wanting if each.has_s is not None),
        max(engines.most_readers.values()),
        engines.read_bytes.get(daemon.engine.endpoint, 0) * SCALE / PICTURE_BYTES,
        len(daemon.peers._links),
        run.redis.busy_s,
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
