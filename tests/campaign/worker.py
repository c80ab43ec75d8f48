"""Clients of one node, each a process: what they do by themselves, and what the campaign asks.

    python worker.py DIRECTORY ADDRESS SHM PEERS

A line NAME SEED THREADS forks one, from a process that has imported all and made no client. Each
counts in DIRECTORY/NAME.ledger, says what went wrong in DIRECTORY/complaints, and answers on
DIRECTORY/NAME.sock. Ends of clients are lines PID CODE on standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaign.asked import ASKED
from campaign.content import (
    CALL_TIMEOUT_S,
    NAMESPACES,
    SLACK_S,
    STRICT_S,
    Found,
    Known,
    Ledger,
    WrongBytes,
    current,
    put,
)
from ecd_client import Client, EcdError, LeaseExpired

WAIT_S = 0.3
REFUSED_PAUSE_S = 0.1
HELD, PRESSES, PRESSED = 6, 4, (256 << 10, 1 << 20)
"""Entries held at one time, entries put meanwhile, and their sizes in bytes."""


class Worker:
    """One client process."""

    def __init__(self, directory: Path, address: str, shm: str, peers: list[str]) -> None:
        self.directory, self.address, self.shm, self.peers = directory, address, shm, peers
        self.client: Client
        self.paused = threading.Event()
        self.idle: list[threading.Event] = []

    def run(self, name: str, seed: str, threads: int) -> None:
        self.name, self.seed = name, seed
        self.ledger = Ledger(self.directory / f"{name}.ledger")
        commands = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        commands.bind(str(self.directory / f"{name}.sock"))
        self.connect()
        for thread in range(threads):
            self.idle.append(threading.Event())
            threading.Thread(target=self.load, args=(thread,), daemon=True).start()
        while True:
            asked = json.loads(commands.recv(65536))
            threading.Thread(target=self.answer, args=(asked,), daemon=True).start()

    def connect(self) -> None:
        self.client = Client(
            self.address, name=self.name, connect_timeout=0, call_timeout=CALL_TIMEOUT_S
        )

    def complain(self, kind: str, text: str) -> None:
        said = {"kind": kind, "client": self.name, "text": text}
        fd = os.open(self.directory / "complaints", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, (json.dumps(said) + "\n").encode())
        os.close(fd)

    # -- load ----------------------------------------------------------------------------------

    def load(self, thread: int) -> None:
        chance = random.Random(f"{self.seed} {thread}")
        while True:
            if self.paused.is_set():
                self.idle[thread].set()
                time.sleep(0.02)
                continue
            is_refused = self.request(thread, chance)
            time.sleep(chance.uniform(0.0, REFUSED_PAUSE_S if is_refused else 0.012))

    def request(self, thread: int, chance: random.Random) -> bool:
        """One request, which ends within its deadline: as it should, or in an error of ecd's.

        Returns whether that was an error.
        """
        is_refused = False
        wait_s = chance.choice((0.0, 0.0, WAIT_S))
        limit_s = wait_s + CALL_TIMEOUT_S + SLACK_S
        [act] = chance.choices(ACTS, [weight for _, weight in ACTS])
        started_s = time.monotonic()
        self.ledger.begin(thread, limit_s)
        try:
            act[0](self, chance, wait_s)
        except LeaseExpired:
            pass
        except EcdError:
            is_refused = True
            self.ledger.add("refused")
        except WrongBytes as wrong:
            self.complain("wrong", f"{act[0].__name__}: {wrong}")
        except Exception:
            self.complain("an error that is not ecd's", traceback.format_exc())
        self.ledger.begin(thread, 0.0)
        self.ledger.add("requests")
        took_s = time.monotonic() - started_s
        if took_s > limit_s - SLACK_S + STRICT_S:
            self.ledger.add("late")
        if took_s > limit_s:
            late = {"act": act[0].__name__, "from": started_s, "took": took_s, "limit": limit_s}
            self.complain("late", json.dumps(late))
        return is_refused

    def put(self, chance: random.Random, wait_s: float) -> None:
        if put(self.client, current(chance), chance.choice((0.01, 0.1, 1.0))):
            self.ledger.add("puts")

    def get(self, chance: random.Random, wait_s: float) -> None:
        key = current(chance)
        nodes = chance.choice(([], self.peers, [chance.choice(self.peers)]))
        with contextlib.closing(Found(self.ledger, key)) as found:
            found.item = self.client.get(
                key.mm_hash, wait_s, namespace=key.namespace, nodes=nodes if wait_s else ()
            )
            found.look()

    def hold(self, chance: random.Random, wait_s: float) -> None:
        """The bytes stay what they are for as long as they are held."""
        key = current(chance)
        with contextlib.closing(Found(self.ledger, key)) as found:
            found.item = self.client.get(key.mm_hash, namespace=key.namespace)
            for _ in range(3):
                found.look()
                time.sleep(chance.uniform(0.0, 0.04))
            found.look()

    def press(self, chance: random.Random, wait_s: float) -> None:
        """What is held stays what it is while other entries want its memory."""
        with contextlib.ExitStack() as held:
            found = [Found(self.ledger, current(chance)) for _ in range(HELD)]
            for each in found:
                held.enter_context(contextlib.closing(each))
                each.item = self.client.get(each.key.mm_hash, namespace=each.key.namespace)
                each.look()
            try:
                for _ in range(PRESSES):
                    one_of_many = Known("press", f"{chance.random()}", chance.randrange(*PRESSED))
                    put(self.client, one_of_many, chance.choice((1.0, 10.0)))
            finally:
                for each in found:
                    each.look()

    def get_many(self, chance: random.Random, wait_s: float) -> None:
        namespace = chance.choice(NAMESPACES)
        keys = [key for key in (current(chance) for _ in range(8)) if key.namespace == namespace]
        futures = self.client.get_async(
            [key.mm_hash for key in keys],
            wait_s,
            namespace=namespace,
            only_if_written=chance.random() < 0.5,
            nodes=[chance.choice(([], self.peers)) for _ in keys],
        )
        refused: EcdError | None = None
        for key, future in zip(keys, futures, strict=True):
            try:
                with contextlib.closing(Found(self.ledger, key)) as found:
                    found.item = future.result(wait_s + CALL_TIMEOUT_S + SLACK_S)
                    found.look()
            except EcdError as error:
                refused = error
        if refused is not None:
            raise refused

    def ask(self, chance: random.Random, wait_s: float) -> None:
        """What nobody ever puts is nowhere; what is said to be here is right."""
        key = current(chance)
        asked = [key.mm_hash, f"never {chance.random()}"]
        said = self.client.contains(asked, namespace=key.namespace)
        if said[1]:
            self.complain("wrong", f"{asked[1]} is said to be here")
        item = self.client.get(asked[1], wait_s, namespace=key.namespace, nodes=self.peers)
        if item is not None:
            self.complain("wrong", f"{asked[1]} was found")

    def tell(self, chance: random.Random, wait_s: float) -> None:
        """Hints, offers and where entries are: advice that is never an error."""
        keys = [current(chance).mm_hash for _ in range(4)]
        namespace = chance.choice(NAMESPACES)
        self.client.hint(keys[0], namespace=namespace)
        self.client.offer(keys, self.peers, namespace=namespace)
        self.client.locate(keys, namespace=namespace)

    # -- what the campaign asks -----------------------------------------------------------------

    def answer(self, asked: dict[str, Any]) -> None:
        try:
            said = ASKED[asked["do"]](self, **asked["with"])
        except EcdError as error:
            said = f"{type(error).__name__}: {error}"
        except Exception:
            self.complain("an error that is not ecd's", f"{asked}: {traceback.format_exc()}")
            said = "failed"
        reply = json.dumps({"id": asked["id"], "said": said}).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.connect(str(self.directory / "replies.sock"))
            to.send(reply)


Act = Callable[[Worker, random.Random, float], None]
ACTS: list[tuple[Act, int]] = [
    *((Worker.put, 33), (Worker.get, 35), (Worker.hold, 12), (Worker.press, 5)),
    *((Worker.get_many, 6), (Worker.ask, 6), (Worker.tell, 3)),
]


def main() -> None:
    directory, address, shm, *peers = sys.argv[1:]

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                os.write(1, f"{ended[0]} {os.waitstatus_to_exitcode(ended[1])}\n".encode())

    signal.signal(signal.SIGCHLD, reap)
    os.write(1, b"ready\n")
    while line := sys.stdin.readline():
        name, seed, threads = line.split()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            with (Path(directory) / "clients.log").open("ab") as log:
                os.dup2(log.fileno(), 2)
            os.dup2(os.open("/dev/null", os.O_RDWR), 0)
            try:
                Worker(Path(directory), address, shm, peers).run(name, seed, int(threads))
            finally:
                traceback.print_exc()
                os._exit(9)
        os.write(1, f"forked {pid}\n".encode())


if __name__ == "__main__":
    main()
