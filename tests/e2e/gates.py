"""Places in other processes where they wait until a test lets them pass, so that it makes order."""

from __future__ import annotations

import os
from pathlib import Path

from support.waiting import eventually

MANY = 1024


def pass_gate(path: Path) -> None:
    """Say that this process is at the gate and wait to be let through, if there is a gate."""
    try:
        pipe = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    with path.with_name(f"{path.name}.{os.getpid()}").open("a") as came:
        came.write("x")
    os.read(pipe, 1)
    os.close(pipe)


class Gate:
    """A pipe that is there while the gate is shut: each process that comes reads a byte of it."""

    def __init__(self, path: Path) -> None:
        """The gate is open."""
        self.path = path
        self._pipe: int | None = None
        self._lets = 0

    def shut(self) -> None:
        """Have the processes that come from now on wait; those that have come are forgotten."""
        for each in self.path.parent.glob(f"{self.path.name}.*"):
            each.unlink()
        self._lets = 0
        os.mkfifo(self.path)
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def let(self, times: int = 1) -> None:
        """Let as many through."""
        assert self._pipe is not None
        self._lets += times
        os.write(self._pipe, b"x" * times)

    def open(self) -> None:
        if self._pipe is not None:
            self.path.unlink()
            self.let(MANY)
            os.close(self._pipe)
            self._pipe = None

    def _came(self) -> list[int]:
        """How often each process has come."""
        found = self.path.parent.glob(f"{self.path.name}.*[0-9]")
        return [each.stat().st_size for each in found]

    def here(self) -> int:
        """How many are at the gate."""
        return max(0, sum(self._came()) - self._lets)

    def waiting(self) -> int:
        """How many wait for one that has come, and not at the gate."""
        return len(list(self.path.parent.glob(f"{self.path.name}.*-waits")))

    def await_seen(self, here: int = 1, waiting: int = 0) -> None:
        what = f"{here} at the gate, {waiting} waiting for them"
        eventually(lambda: (self.here(), self.waiting()) == (here, waiting), what)
