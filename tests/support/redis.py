"""A real Redis for a test."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import pairs
from support.daemon import changed
from support.processes import child, run
from support.waiting import HANG_S, eventually, stopped

PATIENCE = (
    "from ecd.cluster.directory import redis_lookup, redis_publisher as at",
    f"redis_lookup.LOOKUP_TIMEOUT_S = at.LOOKUP_TIMEOUT_S = at.WRITE_TIMEOUT_S = {HANG_S}",
)
PATIENT = changed(*PATIENCE)
"""A daemon that takes a halt of this machine for no silence of Redis, which costs misses."""
LONG_PATIENCE = (
    *("from ecd.base import wire", "wire.MAX_WAIT_S = 600.0"),
    *(*PATIENCE, *pairs.PATIENCE),
)
LONG_PATIENT = changed(*LONG_PATIENCE)
"""As PATIENT, and no wait for a peer ends by time."""
UNHURRIED = changed(
    *("from ecd_proto import contract", "contract.MAKING_S = 600.0"), *LONG_PATIENCE
)
"""As LONG_PATIENT, and a client makes a key for as long as it does not say otherwise."""
_ports = itertools.count(16400)


def free_port() -> int:
    """A port of 127.0.0.1 that no process uses, and no later test is given."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


class RedisServer:
    """`redis-server` on an address and port of its own, keeping nothing on disk."""

    def __init__(
        self,
        directory: Path,
        host: str = "127.0.0.1",
        port: int | None = None,
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
        cli: Sequence[str] = (),
    ) -> None:
        if shutil.which("redis-server") is None:
            pytest.fail("redis-server is not installed: `make system` installs it")
        self.host, self.port = host, port or free_port()
        self._directory, self._prefix, self._cli = directory, list(prefix), list(cli)
        self._command = ["redis-server", "--bind", host, "--port", str(self.port), "--save", ""]
        self._command += ["--appendonly", "no", "--dir", str(directory), *options]
        self._life, self._halt = contextlib.ExitStack(), contextlib.ExitStack()

    def start(self) -> RedisServer:
        with (self._directory / f"redis-{self.port}.log").open("ab") as log:
            running = child([*self._prefix, *self._command], stdout=log, stderr=log)
            self._process = self._life.enter_context(running)
        eventually(lambda: self.ask("ping") == "PONG", "redis-server starts")
        return self

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    def ask(self, *command: str) -> str:
        """Run one command by redis-cli; returns its output."""
        at = ["redis-cli", "-h", self.host, "-p", str(self.port), *self._cli]
        done = run([*self._prefix, *at, *command], capture_output=True, text=True)
        return done.stdout.strip()

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        """Within the block it accepts connections and says nothing (SIGSTOP)."""
        return stopped(self._process.pid)

    def stop(self) -> None:
        self._halt.enter_context(self.stopped())

    def go_on(self) -> None:
        self._halt.close()

    def kill(self) -> None:
        self.go_on()
        self._life.close()
