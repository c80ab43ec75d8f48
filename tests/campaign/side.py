"""A node of a campaign: its daemon, its clients, and what is asked of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from campaign.clients import CLIENTS, THREADS, Client
from campaign.content import RECOVERY_LIMIT_S, WORDS
from ecd_proto.v1 import cache_pb2 as pb
from support.nodes import Node, NodeDaemon
from support.processes import child
from support.waiting import HANG_S

if TYPE_CHECKING:
    from campaign.engines import Served
    from campaign.world import World

TESTS = Path(__file__).parents[1]
LIAR = "10.77.0.9"
TOKEN = "a secret of the test"


def command(start: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"{start}from ecd.__main__ import main; main()", "serve")


def outages(*sides: Side) -> int | None:
    """How many of their daemons' outages are over; None while there is one."""
    counts = [side.outages for side in sides]
    return None if any(count % 2 for count in counts) else sum(counts)


class Side:
    """A node with its daemon and its clients."""

    def __init__(self, name: str, node: Node, daemon: NodeDaemon, world: World) -> None:
        self.name, self.node, self.daemon, self.world = name, node, daemon, world
        self.lock = threading.RLock()
        """Held while the daemon is acted on, or is not to be."""
        self.outages = 0
        """Begins and ends of the daemon's outages: odd while there is one."""
        self.clients: list[Client] = []
        self.expected_ends: set[int] = set()
        self.worked_s: deque[float] = deque(maxlen=1000)
        """When puts and gets of the probe have worked."""
        self.starts_s: list[float] = []
        """How long starts of the daemon took until it served."""
        daemon.command = command(world.start)
        self._numbers = itertools.count()
        self.engine: Served | None = None
        self._cut_off = 0
        self._life = contextlib.ExitStack()

    def start(self, peers: list[str]) -> None:
        command = [*self.node.prefix, "setpriv", "--pdeathsig", "KILL", sys.executable, "-m"]
        command += ["campaign.worker", str(self.world.directory), self.daemon.address]
        with (self.world.directory / "clients.log").open("ab") as log:
            running = child(
                [*command, str(self.daemon.shm), *peers],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env={**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"},
            )
            self._zygote = self._life.enter_context(running)
        self._forked: queue.Queue[int] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        assert self._forked.get(timeout=HANG_S) == 0
        self.probe = self.fork("probe", 0)
        clients = CLIENTS // len(self.world.sides)
        self.clients = [self.fork("client", THREADS) for _ in range(clients)]

    def _listen(self) -> None:
        assert self._zygote.stdout is not None
        for line in self._zygote.stdout:
            word, _, rest = line.strip().partition(" ")
            if word in ("ready", "forked"):
                self._forked.put(int(rest or 0))
            elif int(word) not in self.expected_ends:
                self.world.violation("client ended", f"{self.name}: {line.strip()}")

    def fork(self, kind: str, threads: int) -> Client:
        name = f"{self.name}-{kind}-{next(self._numbers)}"
        (self.world.directory / f"{name}.ledger").write_bytes(bytes(8 * WORDS))
        with self.world.forking:
            assert self._zygote.stdin is not None
            print(name, f"{self.world.seed}-{name}", threads, file=self._zygote.stdin)
            pid = self._forked.get(timeout=HANG_S)
        self.world.log(f"{name} is process {pid}")
        return Client(name, pid, threads, self.world.directory)

    def kill(self, client: Client, what: int = signal.SIGKILL) -> None:
        """End a client and forget it, but for what it counted."""
        self.expected_ends.add(client.pid)
        client.signal(what)
        self.bury(client)

    def bury(self, client: Client) -> None:
        self.world.count(client)
        for suffix in (".sock", ".ledger"):
            (self.world.directory / f"{client.name}{suffix}").unlink(missing_ok=True)

    def works(self, key: str) -> float:
        """Wait until a put and a get work here; returns when, or -1 for never."""
        said = self.world.replies.ask(self.probe, "works", RECOVERY_LIMIT_S + 10.0, key=key)
        if not isinstance(said, float) or said < 0.0:
            return -1.0
        self.worked_s.append(said)
        return said

    def found_across(self, other: Side, key: str, hinted: bool) -> float:
        """Wait until the other node gets what was put here; returns when, or -1 for never.

        Time in which one of both daemons is away does not count against them. Where there is a
        third node, the entry moves on to it, once this one has lost it.
        """
        ask, left_s = self.world.replies.ask, RECOVERY_LIMIT_S
        nodes = [self.node.peer] if hinted else []
        while left_s > 0:
            before, begun_s = outages(self, other), time.monotonic()
            ask(self.probe, "keep", 5.0, key=key, cost=100.0)
            if ask(other.probe, "kept", 9.0, key=key, wait_s=0.5, nodes=nodes) is True:
                found_s = time.monotonic()
                for third in self.world.sides:
                    if third not in (self, other):
                        self._move_on(other, third, key)
                return found_s
            time.sleep(0.05)
            if before is not None and before == outages(self, other):
                left_s -= time.monotonic() - begun_s
        return -1.0

    def _move_on(self, holder: Side, asking: Side, key: str) -> None:
        ask, counts, left_s = self.world.replies.ask, self.world.counts, RECOVERY_LIMIT_S
        try:
            self.daemon.evict(pb.Key(namespace="probe", mm_hash=key))
        except grpc.RpcError:
            return  # the daemon is away
        nodes = [holder.node.peer]
        while left_s > 0:
            before, begun_s = outages(holder, asking), time.monotonic()
            if ask(asking.probe, "kept", 9.0, key=key, wait_s=0.5, nodes=nodes) is True:
                counts["moved on"] += 1
                return
            if ask(holder.probe, "kept", 9.0, key=key, wait_s=0.0, nodes=[]) is False:
                counts["gone before it moved on"] += 1
                return
            time.sleep(0.05)
            if before is not None and before == outages(holder, asking):
                left_s -= time.monotonic() - begun_s
        counts["not moved on"] += 1
        self.world.violation("no recovery", f"{key}: {asking.name} asks {holder.name}")

    @contextlib.contextmanager
    def acting(self, is_outage: bool) -> Iterator[None]:
        """Acts on the daemon; nothing else does meanwhile."""
        with self.lock:
            self.outages += is_outage
            try:
                yield
            finally:
                self.outages += is_outage

    def serve(self, *options: str, start: str | None = None) -> float:
        """Start the daemon; returns when it serves.

        `start` is the Python that starts it, if not as always.
        """
        daemon = self.daemon
        daemon.command = (*command(self.world.start if start is None else start), *options)
        self.begin()
        started_s = time.monotonic()
        while b"serving on" not in self._new_log():
            if daemon._process is None or daemon._process.poll() is not None:
                if b"cannot be used" in self._new_log():
                    self.world.counts["refused disks"] += 1
                else:
                    self.world.violation("daemon ended", f"at its start\n{self.last_lines()}")
                self.begin()
            if time.monotonic() > started_s + HANG_S:
                self.world.violation("daemon does not start", self.last_lines())
                break
            time.sleep(0.01)
        self.starts_s.append(time.monotonic() - started_s)
        return time.monotonic()

    def begin(self) -> None:
        self._cut_off = self.daemon.log.stat().st_size if self.daemon.log.exists() else 0
        self.daemon.start(wait=False)

    def _new_log(self) -> bytes:
        with self.daemon.log.open("rb") as log:
            log.seek(self._cut_off)
            return log.read()

    def last_lines(self, count: int = 30) -> str:
        return "\n".join(self.daemon.text().splitlines()[-count:])

    def watch(self) -> None:
        """Has the daemon ended by itself? Is a request overdue?"""
        if self.lock.acquire(blocking=False):
            try:
                process = self.daemon._process
                if process is not None and process.poll() is not None:
                    said = f"{self.name}: code {process.returncode}\n{self.last_lines()}"
                    self.world.violation("daemon ended", said)
                    self.serve()
            finally:
                self.lock.release()
        for client in list(self.clients):
            overdue_s = client.ledger.overdue_s(client.threads)
            if client.is_stopped or time.monotonic() - client.stopped_s < overdue_s + 10.0:
                continue
            if overdue_s > 10.0:
                client.stopped_s = time.monotonic()
                self.world.violation("request hangs", f"{client.name}: {overdue_s:.1f} s overdue")

    def close(self) -> None:
        self._life.close()
