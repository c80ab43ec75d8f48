"""Clients that put and get without end, to be killed at any moment (crashing_client.py)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.daemon import Daemon
from support.processes import child
from support.waiting import HANG_S

SCRIPT = Path(__file__).parents[1] / "integration" / "crashing_client.py"


class Nursery:
    """Forks such clients."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def fork(self, seeds: range) -> list[int]:
        """The process ids of a client for each seed, once they work."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for seed in seeds:
            print(seed, file=self._process.stdin)
        return [int(self._process.stdout.readline()) for _ in seeds]

    def close(self) -> None:
        """Check what all of them read."""
        said, _ = self._process.communicate(timeout=HANG_S)
        assert said == "", "every byte read was right"


@contextlib.contextmanager
def nursery(daemon: Daemon) -> Iterator[Nursery]:
    with child(
        [sys.executable, SCRIPT, daemon.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        yield Nursery(process)
