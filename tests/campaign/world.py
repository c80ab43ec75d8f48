"""The world of a campaign: nodes, a Redis, and who watches all of them."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

from campaign.clients import Client, Replies
from campaign.content import COUNTS
from campaign.engines import SESSIONS, Engines
from campaign.side import LIAR, Side
from support.nodes import Node, NodeDaemon
from support.processes import run
from support.redis import RedisServer
from support.waiting import HANG_S, eventually

TESTS = Path(__file__).parents[1]
POOL = "12MiB"
ENGINE_PORTS = "18200-18455"
"""Each start of a daemon takes two, which rest for a minute after its end."""
OTHER_COUNTS = (
    *("kept", "lies: hit", "lies: miss", "lies: refused", "refused disks"),
    *("moved on", "not moved on", "gone before it moved on"),
    *("engine answers", "engine requests failed", "engines lost", "pictures", "pictures encoded"),
    "pictures taken",
)
"""Counted by the campaign itself, not by clients."""
SWITCH = 250
"""The number of the namespace that is a switch between the nodes."""
PRELOADED = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
BAD = "Traceback", "Fatal Python", "*** SIG"


class World:
    """Two or three nodes, as the seed says, a Redis on the first, and what was found wrong."""

    def __init__(self, directory: Path, seed: int, start: str = "") -> None:
        """`start` is Python that each daemon runs first."""
        self.directory, self.seed, self.is_closed = directory, seed, False
        self.start = start
        self.forking, self._counting = threading.Lock(), threading.Lock()
        self.counts: Counter[str] = Counter()
        self.violations: list[dict[str, str]] = []
        self.started_s = time.monotonic()
        self.stops: list[tuple[str, float, float]] = []
        """Which client was stopped from when until when."""
        self._read = Counter[Path]()
        self._log, self._log_lock = (directory / "faults.log").open("w"), threading.Lock()
        self.replies = Replies(directory)
        self.engines: Engines | None = None
        library = directory / "faults.so"
        source = TESTS / "support" / "disk_faults.c"
        run(["gcc", *PRELOADED, "-o", library, source, "-ldl"], check=True)
        nodes = [Node(number + 1) for number in range(Random(f"{seed} nodes").choice((2, 3)))]
        self._switch = Node(SWITCH)
        self._switch.switch(nodes)
        nodes[1].run("ip", "addr", "add", f"{LIAR}/24", "dev", "eth0")
        options = "--protected-mode", "no"
        self.redis = RedisServer(directory, nodes[0].address, 6379, options, nodes[0].prefix)
        self.redis.start()
        self.sides = [
            self._side(name, node, library) for name, node in zip("abc", nodes, strict=False)
        ]

    def begin(self, with_engines: bool) -> None:
        """Start daemons and clients; `close` ends them, also where this fails."""
        for side in self.sides:
            side.begin()
        if with_engines:
            self.engines = Engines(self)
        for side in self.sides:
            side.daemon.wait_serving()
            side.start([other.node.peer for other in self.sides if other is not side])

    def _side(self, name: str, node: Node, library: Path) -> Side:
        faults, disk = self.directory / f"faults-{name}", self.directory / f"disk-{name}"
        faults.mkdir()
        disk.mkdir()
        node.run("mount", "-t", "tmpfs", "-o", "size=48m", "none", str(disk))
        daemon = NodeDaemon(
            node,
            self.directory,
            POOL,
            LD_PRELOAD=str(library),
            DISK_FAULTS=str(faults),
            ECD_DISK_DIR=str(disk),
            ECD_DISK_POOL_BYTES="40MiB",
            ECD_DISK_WRITE_BYTES_PER_S="1GB",
            ECD_DIRECTORY=f"redis://{self.redis.host}:{self.redis.port}",
            ECD_FETCH_TIMEOUT_S="2",
            ECD_ENGINE_PORTS=ENGINE_PORTS,
            ECD_LOG_LEVEL="info",
            ECD_WARM_RESTART="true",
        )
        return Side(name, node, daemon, self)

    def path_on(self, side: Side, path: str) -> Path:
        """A path of a node's own file systems, from here."""
        return Path(f"/proc/{side.node._holder.pid}/root{path}")

    def log(self, text: str) -> None:
        with self._log_lock:
            self._log.write(f"{time.monotonic() - self.started_s:9.3f} {text}\n")
            self._log.flush()

    # -- what was seen -------------------------------------------------------------------------

    def violation(self, kind: str, text: str) -> None:
        at_s = time.monotonic() - self.started_s
        print(f"VIOLATION at {at_s:.2f} s: {kind}: {text}", flush=True)
        self.violations.append({"at_s": f"{at_s:.2f}", "kind": kind, "text": text})

    def count(self, client: Client) -> None:
        with self._counting:
            self.counts.update(client.ledger.counts())

    def total(self) -> dict[str, int]:
        living = Counter(self.counts)
        for side in self.sides:
            for client in (*side.clients, side.probe):
                living.update(client.ledger.counts())
        if self.engines is not None:
            living.update(self.engines.counts())
        return {count: living[count] for count in (*COUNTS, *OTHER_COUNTS)}

    def watch(self) -> None:
        """Look at everything once."""
        for side in self.sides:
            side.watch()
        for line in self._new_lines(self.directory / "complaints"):
            said = json.loads(line)
            if said["kind"] != "late" or not self._was_stopped(said["client"], said["text"]):
                self.violation(said["kind"], f"{said['client']}: {said['text']}")
        daemons = [side.daemon.log for side in self.sides]
        engines = [] if self.engines is None else [each.engine.log for each in self.engines.served]
        for log in (*daemons, *engines, self.directory / "clients.log"):
            if any(line.startswith(BAD) for line in self._new_lines(log)):
                text = log.read_text(errors="replace").splitlines()[-60:]
                self.violation("traceback", f"{log.name}: " + "\n".join(text))

    def _new_lines(self, path: Path) -> list[str]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[path])
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read[path] += len(whole)
        return whole.decode(errors="replace").splitlines()

    def _was_stopped(self, client: str, text: str) -> bool:
        """Whether a late request is late by no more than its client was stopped."""
        late = json.loads(text)
        end_s = late["from"] + late["took"]
        stopped_s = sum(
            max(0.0, min(until_s, end_s) - max(from_s, late["from"]))
            for name, from_s, until_s in list(self.stops)
            if name == client
        )
        return bool(late["took"] - stopped_s <= late["limit"])

    # -- rest ----------------------------------------------------------------------------------

    def rest(self) -> None:
        """Once all faults are healed: pause all clients, and see that nothing has leaked."""
        if self.engines is not None:
            self.engines.rest()
        for side in self.sides:
            for client in side.clients:
                self.replies.ask(client, "pause", HANG_S)
        for side in self.sides:
            try:
                side.daemon.check_nothing_leaked()
                most = len(side.clients) + 1 + (SESSIONS if side.engine is not None else 0)
                eventually(
                    lambda side=side, most=most: side.daemon.status().sessions <= most,
                    "sessions end",
                )
            except Exception as error:
                self.violation("leak", f"{side.name}: {error}\n{side.daemon.status().pools}")
        self.watch()

    def go_on(self) -> None:
        if self.engines is not None:
            self.engines.go_on()
        for side in self.sides:
            for client in side.clients:
                self.replies.ask(client, "go_on", HANG_S)

    def close(self) -> None:
        """End everything; nothing may be left in memory."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.engines is not None:
            self.engines.close()
        begun = [side for side in self.sides if side.daemon._process is not None]
        for side in begun:
            side.daemon._process.send_signal(signal.SIGCONT)
            side.daemon._process.send_signal(signal.SIGINT)
        for side in begun:
            try:
                side.daemon._process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                self.violation("daemon does not stop", side.last_lines())
                side.daemon.kill()
            side.daemon._process = None
            left = [path.name for path in self.path_on(side, "/dev/shm").glob("**/*")]
            if left:
                self.violation("left in /dev/shm", f"{side.name}: {left}")
            side.close()
        for _ in range(2):
            self.watch()
        self.redis.kill()
        for side in self.sides:
            side.node.close()
        self._switch.close()
