"""A real daemon for a test: started, waited for by its own health service, always cleaned up."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import IO

import grpc
import psutil

from ecd_client import Client
from ecd_client.session.channel import open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support import warm
from support.processes import end, run, start
from support.waiting import HANG_S, eventually, stopped

WITHOUT_HUGE_PAGES = (
    sys.executable,
    "-c",
    "import ctypes, os, sys;"
    "ctypes.CDLL(None).prctl(41, 1, 0, 0, 0);"  # PR_SET_THP_DISABLE
    "os.execv(sys.argv[1], sys.argv[1:])",
)
"""A prefix: the daemon's pool has small pages, as on kernels that cannot do better."""


def changed(*lines: str) -> tuple[str, ...]:
    """The command of a daemon that runs these lines of Python before it begins."""
    script = "\n".join((*lines, "from ecd.__main__ import main", "main()"))
    return sys.executable, "-c", script, "serve"


IMPORTED = (
    *("grpc.aio", "grpc_health.v1.health_pb2_grpc", "grpc_reflection.v1alpha.reflection"),
    *("msgspec.inspect", "prometheus_client.exposition", "pydantic_settings"),
    *("pythonjsonlogger.json", "rich.progress", "rich.table", "systemd_watchdog", "typer"),
    *("uvloop", "xxhash", "zmq"),
)
"""By the Python that is forked for daemons: what of a start is not ecd's, half a second."""
RUN = uuid.uuid4().hex[:8]
"""A process's id is another's, too, where each has a namespace of its own."""
_one_at_a_time = threading.Lock()  # of those that tests start from several threads


def node_of(prefix: Sequence[str]) -> int | None:
    """The process whose network and mounts a Node's prefix enters, 0 without one, else None."""
    match [*prefix]:
        case []:
            return 0
        case ["nsenter", "-t", process, "-n", "-m", "--"]:
            return int(process)
        case _:
            return None


_closing = contextlib.ExitStack()
atexit.register(_closing.close)


@cache
def _interpreter() -> warm.Interpreter:
    directory = _closing.enter_context(tempfile.TemporaryDirectory(prefix="ecd-warm-"))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ECD_")}
    made = warm.Interpreter(sys.executable, IMPORTED, Path(directory, "log"), environ)
    return _closing.enter_context(contextlib.closing(made))


@contextlib.contextmanager
def memory_of(place: Path, size: str) -> Iterator[Path]:
    """A file system in memory of this size, such as 64m, at a new directory for ECD_SHM_DIR."""
    place.mkdir()
    run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], check=True)
    try:
        yield place
    finally:
        run(["umount", "--lazy", place], check=True)


def cool() -> None:
    """End the Python that was forked for daemons, which have ended."""
    _closing.close()
    _interpreter.cache_clear()


class Daemon:
    """`ecd serve` in a directory of its own, with a name that no other test uses."""

    count = 0
    prefix: tuple[str, ...] | list[str] = ()  # what runs the daemon somewhere else
    command: tuple[str, ...] = (sys.executable, "-m", "ecd", "serve")

    def __init__(self, directory: Path, pool: str = "64MiB", **settings: str) -> None:
        Daemon.count += 1
        self.directory = directory
        self.name = f"test-{os.getpid()}-{RUN}-{Daemon.count}"
        self.address = f"unix://{directory}/ecd-{Daemon.count}.sock"
        self.log = directory / f"daemon-{Daemon.count}.log"
        self.shm = Path("/dev/shm") / f"ecd-{self.name}"
        self.pool = pool
        self._settings = settings
        self._process: subprocess.Popen[bytes] | warm.Fork | None = None

    # -- life ----------------------------------------------------------------------------------

    def start(self, wait: bool = True) -> Daemon:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ECD_")}
        environment |= {
            "ECD_ADDRESS": self.address,
            "ECD_NAME": self.name,
            "ECD_HOST_POOL_BYTES": self.pool,
            "ECD_METRICS_ADDRESS": "127.0.0.1:0",
            "ECD_LOG_LEVEL": "debug",
            **self._settings,
        }
        with self.log.open("ab") as log:
            self._process = self._forked(environment, log) or start(
                [*self.prefix, *self.command], env=environment, stdout=log, stderr=log
            )
        if wait:
            self.wait_serving()
        return self

    def _forked(self, environment: dict[str, str], log: IO[bytes]) -> warm.Fork | None:
        """The daemon as a fork of a warm Python; None if it has to begin as a program does."""
        node, (python, *arguments) = node_of(self.prefix), self.command
        of_ecd = all(name.startswith("ECD_") for name in self._settings)  # libraries read others
        if node is None or python != sys.executable or not of_ecd:
            return None
        with _one_at_a_time:
            return warm.Fork(_interpreter(), arguments, log, node=node, **environment)

    def wait_serving(self) -> None:
        """Block until the daemon serves; its own channel does the waiting."""
        with open_channel(self.address) as channel:
            stub = pb_grpc.CacheStub(channel)

            def is_serving() -> bool:
                assert self._process is not None
                assert self._process.poll() is None, f"the daemon ended:\n{self.text()}"
                try:
                    status = stub.Status(pb.StatusRequest(), timeout=1.0, wait_for_ready=True)
                    return status.state == pb.StatusReply.STATE_SERVING
                except grpc.RpcError:
                    return False

            try:
                eventually(is_serving)
            except AssertionError:
                if self._process is None or self._process.poll() is not None:
                    raise
                took = psutil.Process(self.pid).cpu_times()
                said = f"not serving, after {took.user + took.system:.1f} s of its CPU"
                raise AssertionError(f"{said}:\n{self.text()}") from None

    def wait_for_clients(self, sessions: int) -> None:
        """Block until so many sessions are open, and each client has confirmed its own by a call.

        It needs a daemon that has just been started.
        """

        def are_used() -> bool:
            return self.status().sessions == sessions and self.calls("Release") >= sessions

        eventually(are_used, f"{sessions} sessions of the engines")

    def wait_idle(self, *parts: str) -> None:
        """Block until these parts of the daemon (see the message Idle) have nothing left to do.

        All of them, if none is named.
        """
        names = parts or tuple(field.name for field in pb.Idle.DESCRIPTOR.fields)

        def is_idle() -> bool:
            idle = self.status().idle
            return all(getattr(idle, name) for name in names)

        eventually(is_idle, f"the daemon is idle: {', '.join(names)}")

    def stopped(self) -> AbstractContextManager[None]:
        """The daemon's process stands still (SIGSTOP) within the block."""
        return stopped(self.pid)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, as the kernel's out-of-memory killer would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(HANG_S)

    def close(self) -> None:
        """Leave nothing behind, whatever state the test left it in."""
        if self._process is not None:
            end(self._process, grace=True)
        for path in self.shm.glob("*"):
            path.unlink()
        if self.shm.exists():
            self.shm.rmdir()

    # -- looking in ----------------------------------------------------------------------------

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def status(self) -> pb.StatusReply:
        with open_channel(self.address) as channel:
            about = {"timeout": HANG_S, "wait_for_ready": True}
            return pb_grpc.CacheStub(channel).Status(pb.StatusRequest(), **about)

    def peers(self) -> pb.PeersReply:
        with open_channel(self.address) as channel:
            return pb_grpc.CacheStub(channel).Peers(pb.PeersRequest(), timeout=HANG_S)

    def entries(self) -> list[pb.EntryInfo]:
        """The first page of them."""
        with open_channel(self.address) as channel:
            stub = pb_grpc.CacheStub(channel)
            return list(stub.List(pb.ListRequest(), timeout=HANG_S).entries)

    def names(self) -> list[str]:
        """Of the first page of entries, the newest last."""
        return [e.key.mm_hash for e in sorted(self.entries(), key=lambda entry: entry.entry)]

    def crowd(self, mib: int = 100) -> None:
        """Put more than the pool holds, so that all goes which is neither held nor often used."""
        with Client(self.address, namespace=f"crowd {uuid.uuid4()}") as client:
            for number in range(mib):
                client.put_bytes(f"{number}", bytes(1 << 20), "uint8", (1 << 20,))

    def evict(self, key: pb.Key) -> pb.EvictReply:
        with open_channel(self.address) as channel:
            return pb_grpc.CacheStub(channel).Evict(pb.EvictRequest(key=key), timeout=HANG_S)

    def evict_all(self) -> pb.EvictReply:
        with open_channel(self.address) as channel:
            about = {"timeout": HANG_S, "wait_for_ready": True}
            return pb_grpc.CacheStub(channel).Evict(pb.EvictRequest(), **about)

    def check_nothing_leaked(self) -> None:
        """Once all entries are evicted, each pool is one free extent again."""

        def is_empty() -> bool:
            self.evict_all()
            pools = self.status().pools
            return all(pool.largest_free_bytes == pool.pool_bytes for pool in pools)

        eventually(is_empty, "each pool is one free extent again")

    def check_unused(self) -> None:
        """Nobody uses the daemon, all that was put has been evicted, and each pool is free."""

        def is_unused() -> bool:
            status = self.status()
            return not (status.sessions or status.leases or status.waits)

        eventually(is_unused, "no session, lease or wait is left")
        self.check_nothing_leaked()
        counters = self.status().counters
        came, went = counters.puts + counters.recovered, sum(counters.evictions.values())
        assert came == went, f"{came} entries were stored, {went} evicted, none is left"

    def calls(self, method: str) -> int:
        """How many calls of this method it has answered."""
        found = re.search(rf'ecd_call_seconds_count{{method="{method}"}} (\S+)', self.metrics())
        return int(float(found[1])) if found else 0

    def metrics_url(self) -> str:
        [line] = [line for line in self.text().splitlines() if "metrics on" in line][-1:]
        return line.split("metrics on ")[1]

    def metrics(self) -> str:
        with urllib.request.urlopen(self.metrics_url()) as answer:
            return answer.read().decode()


def close_all(daemons: Iterable[Daemon]) -> None:
    """Close them at one time: Mooncake takes a second and a half to end."""
    with ThreadPoolExecutor() as side:
        list(side.map(Daemon.close, daemons))
