"""A real Redis for a test."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.daemon import changed

PATIENT = changed("from ecd.cluster import redis_directory as at", "at.LOOKUP_TIMEOUT_S = 2.0")
"""A daemon that takes a halt of this machine for no silence of Redis, which costs misses."""


class RedisServer:
    """`redis-server` on an address and port of its own, keeping nothing on disk."""

    def __init__(
        self,
        directory: Path,
        host: str = "127.0.0.1",
        port: int = 16379,
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
        cli: Sequence[str] = (),
    ) -> None:
        if shutil.which("redis-server") is None:
            pytest.fail("redis-server is not installed: `make system` installs it")
        self.host, self.port = host, port
        self._directory, self._prefix, self._cli = directory, list(prefix), list(cli)
        self._command = ["redis-server", "--bind", host, "--port", str(port), "--save", ""]
        self._command += ["--appendonly", "no", "--dir", str(directory), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        with (self._directory / f"redis-{self.port}.log").open("ab") as log:
            command = [*self._prefix, *self._command]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while self.ask("ping") != "PONG":
            assert time.monotonic() < deadline, "redis-server does not start"
            time.sleep(0.05)
        return self

    def ask(self, *command: str) -> str:
        """Run one command by redis-cli; returns its output."""
        at = ["redis-cli", "-h", self.host, "-p", str(self.port), *self._cli]
        done = subprocess.run([*self._prefix, *at, *command], capture_output=True, text=True)
        return done.stdout.strip()

    def stop(self) -> None:
        """SIGSTOP: it accepts connections and says nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
