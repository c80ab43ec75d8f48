"""The simulation's engines read each other's memory as Mooncake's do, over tcp.

Left out is time: the stand-in's delays are drawn by lot, and nothing here says how long Mooncake
takes to notice that a peer has died, stands still or is cut off (`test_mooncake.py` does). So is
the number of transfers that fail before one arrives: after a peer's end each of Mooncake's
connections fails one. The stand-in may do more than Mooncake was seen to do: reads requested at
one time begin in any order, and a transfer that was half served by one life of a peer may get the
rest from the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Protocol

from ecd_proto.mapped_file import MappedFile
from simulation.clock import Process, VirtualLoop
from simulation.engine import Engines, SimulatedEngine
from simulation.network import Network
from support import engine_steps, processes, waiting
from support.engine_steps import NBYTES, EngineSteps
from support.nodes import Node
from support.waiting import HANG_S, value_of

MIB, PAGE = 1 << 20, 4096
HOST = "127.0.77.1"
PORTS = {"peer": "18200-18201", "reader": "18300-18331", "another reader": "18400-18431"}
PATIENT = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": f"{HANG_S:.0f}",
    "MC_TCP_STATUS_TIMEOUT_SEC": f"{HANG_S:.0f}",
    # An engine that asks a peer anew which stands still closes only after a minute.
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "3600",
}
REGIONS = [0, 9 * MIB], [9 * MIB, 2 * MIB]
"""What a peer registers; the rest of its memory is not to be read."""


class World(Protocol):
    def start(self, name: str, letter: str, endpoint: str = "") -> list[Any]: ...
    def ask(self, name: str, step: str, *about: Any) -> Any: ...
    def stop(self, name: str) -> None: ...
    def go_on(self, name: str) -> None: ...
    def kill(self, name: str) -> None: ...


class Simulated:
    def __init__(self) -> None:
        rng = Random(1)
        self._loop = VirtualLoop(rng)
        self._engines = Engines(Network(self._loop, rng))
        self._memory: dict[str, MappedFile] = {}
        self._nodes: dict[str, tuple[Process, SimulatedEngine, EngineSteps]] = {}

    def start(self, name: str, letter: str, endpoint: str = "") -> list[Any]:
        process, identity = Process(), MappedFile.of_memory(PAGE, b"i" * 16)
        memory = self._memory.setdefault(name, MappedFile.of_memory(NBYTES))
        engine = SimulatedEngine(self._engines, process, name, f"{name}:18200", identity)
        self._nodes[name] = process, engine, EngineSteps(engine, engine, memory.address)
        return self.ask(name, "start", letter)

    def ask(self, name: str, step: str, *about: Any) -> Any:
        return self._loop.run_until_complete(getattr(self._nodes[name][2], step)(*about))

    def stop(self, name: str) -> None:
        self._nodes[name][0].is_paused = True

    def go_on(self, name: str) -> None:
        self._nodes[name][0].is_paused = False

    def kill(self, name: str) -> None:
        process, engine, _ = self._nodes[name]
        process.alive = False
        del self._engines.answering[engine.endpoint]

    def close(self) -> None:
        self._loop.close()


class Real:
    def __init__(self, node: Node, log: Path) -> None:
        self._node, self._log = node, log
        self._processes: dict[str, subprocess.Popen[str]] = {}
        # Ports of the life before are free at once, instead of after a minute.
        node.run("sysctl", "-qw", "net.ipv4.tcp_max_tw_buckets=0", "net.ipv4.tcp_fin_timeout=1")

    def start(self, name: str, letter: str, endpoint: str = "") -> list[Any]:
        script = Path(engine_steps.__file__)
        path = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
        with self._log.open("a") as log:
            self._processes[name] = processes.start(
                [*self._node.prefix, sys.executable, script, HOST, PORTS[name], endpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **PATIENT, "PYTHONPATH": path},
            )
        return self.ask(name, "start", letter)

    def ask(self, name: str, step: str, *about: Any) -> Any:
        process = self._processes[name]
        print(json.dumps([step, *about]), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, f"{name}, {step}: {self._log.read_text()[-2000:]}"
        return json.loads(answer)

    def stop(self, name: str) -> None:
        waiting.stop(self._processes[name].pid)

    def go_on(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def kill(self, name: str) -> None:
        processes.end(self._processes[name])

    def close(self) -> None:
        for process in self._processes.values():
            processes.end(process)


def story(world: World) -> Iterator[Any]:
    """Steps of a peer and its readers, and what each has answered."""
    endpoint, base, page = world.start("peer", "a")
    world.start("reader", "-")

    def transfer(source: int, nbytes: int) -> list[Any]:
        return world.ask("reader", "transfer", endpoint, source, nbytes)

    def read(letter: str, *extents: tuple[int, int], identity: int = base) -> list[Any]:
        found = [[endpoint, base + start, nbytes, identity] for start, nbytes in extents]
        return world.ask("reader", "read", letter, *found)

    yield "not registered yet", transfer(base, PAGE), transfer(page, 16)
    yield "registered", world.ask("peer", "register", *REGIONS)
    yield "the identity", transfer(page, 16)
    for start, nbytes in REGIONS:
        yield "the borders", transfer(base + start, 1), transfer(base + start + nbytes - 1, 1)
        yield "all of it", transfer(base + start, nbytes)
        yield "before it", transfer(base + start - 1, PAGE)
        yield "beyond it", transfer(base + start + nbytes - 1, 2)
        yield "more than it", transfer(base + start, nbytes + 1)
    yield "nothing of it", transfer(base + 11 * MIB, PAGE)
    yield "registered again", [world.ask("peer", "register", each) for each in REGIONS]
    yield "more memory", world.ask("peer", "register", [11 * MIB, MIB])
    yield "that is refused", transfer(base + 11 * MIB, PAGE)
    yield "what was before", transfer(base, PAGE)
    yield "at once", read("a", (0, 9 * MIB), (MIB, MIB), (10 * MIB, 100), (3, 5))
    yield "one of them fails", read("a", (0, PAGE), (11 * MIB, PAGE), (PAGE, PAGE))
    yield "another's", read("b", (0, PAGE))
    yield "an identity nowhere", read("a", (0, PAGE), identity=base + 11 * MIB)[0][1]
    extents = [[endpoint, base + start * MIB, 2 * MIB, base] for start in range(5)]
    world.start("another reader", "-")
    for name in ("reader", "another reader"):
        yield "before it stands still", world.ask(name, "read", "a", *extents)
    world.stop("peer")
    for name in ("reader", "another reader"):
        world.ask(name, "begin", "a", *extents)
    yield "given up, under way", world.ask("reader", "give_up")
    world.ask("another reader", "close")
    world.go_on("peer")
    yield "given up, over", world.ask("reader", "given_up")
    yield "again", read("a", (0, PAGE))
    yield "the reader has closed", world.ask("another reader", "left")
    world.stop("peer")
    world.ask("reader", "begin", "a", *extents)
    world.ask("reader", "give_up")
    world.kill("peer")
    yield "died meanwhile", world.ask("reader", "given_up")
    yield "gone", transfer(base, PAGE)
    assert world.start("peer", "b", endpoint)[:2] == [endpoint, base]
    yield "not registered in this life", transfer(base, PAGE)
    yield "another life", world.ask("peer", "register", *REGIONS)
    arrived = lambda: (told := transfer(base, PAGE))[0] == "ARRIVED" and told  # noqa: E731
    yield "its memory", value_of(arrived, "a transfer from the new life")
    yield "not the life before", read("a", (0, PAGE), (PAGE, PAGE))
    yield "this life", read("b", (0, PAGE), (0, 2 * MIB))


def test_they_read_as_mooncake_does(tmp_path: Path) -> None:
    with contextlib.closing(Simulated()) as world:
        simulated = list(story(world))
    with (
        contextlib.closing(Node(1)) as node,
        contextlib.closing(Real(node, tmp_path / "log")) as world,
    ):
        assert simulated == list(story(world))
