"""Runs tests while random processes of theirs stand still: what trembles shows itself.

    make shake ONLY='tests/integration -k events' SEED=1

Each halt takes one process, or now and then all but pytest's first, for 10 ms to 2 s, as a
machine with too few cores does. The kernel's freezer holds them, which nobody sees: a test would
take SIGSTOP for its own. Needs root, and the freezer of cgroup v1 or v2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from support.processes import child

SHORTEST_S, MEAN_S, LONGEST_S = 0.01, 0.5, 2.0
ALL = 0.05
"""The part of halts that take all processes."""
V1, V2 = Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup")


class Group:
    """A cgroup whose processes can stand still."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir()

    def add(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            (self._path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self._path / "cgroup.procs").read_text().split()]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    def _set(self, is_frozen: bool) -> None:
        v1 = self._path / "freezer.state"
        if v1.exists():
            v1.write_text("FROZEN" if is_frozen else "THAWED")
        else:
            (self._path / "cgroup.freeze").write_text(str(int(is_frozen)))

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # a process of it lives still
            self._path.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="gives the halts, not whom they meet")
    parser.add_argument("--pause", type=float, default=0.3, help="mean seconds between halts")
    parser.add_argument("pytest", nargs="*", help="pytest's arguments, after --")
    asked = parser.parse_args()
    chosen = random.Random(asked.seed)
    root = V1 if V1.is_dir() else V2
    try:
        free = Group(root / f"ecd-shake-{os.getpid()}")
    except OSError as error:
        parser.error(f"cannot make a cgroup under {root}, which needs root: {error}")
    halted = Group(root / f"ecd-shake-{os.getpid()}-halted")
    halts, halted_s = 0, 0.0
    with child([sys.executable, "-m", "pytest", *asked.pytest], grace=True) as begun:
        free.add(begun.pid)
        while begun.poll() is None:
            time.sleep(chosen.expovariate(1 / asked.pause))
            others = [pid for pid in free.pids() if pid != begun.pid]
            if not others:
                continue
            taken = others if chosen.random() < ALL else [chosen.choice(others)]
            for pid in taken:
                halted.add(pid)
            for_s = min(LONGEST_S, chosen.expovariate(1 / MEAN_S) + SHORTEST_S)
            with halted.held():
                time.sleep(for_s)
            while left := halted.pids():  # with what they have started
                for pid in left:
                    free.add(pid)
            halts, halted_s = halts + 1, halted_s + for_s
    halted.remove()
    free.remove()
    print(f"seed {asked.seed}: {halts} halts, {halted_s:.0f} s in all", flush=True)
    return int(begun.returncode)


if __name__ == "__main__":
    sys.exit(main())
