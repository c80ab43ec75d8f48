"""What a kind of fault is, and what several kinds need."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from campaign.side import Side

CGROUPS = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Kind:
    """`lane` says what it acts on, `probe` whose recovery is measured: local (outage: that of
    a daemon that was away), across or redis."""

    name: str
    lane: str
    weight: float
    probe: str
    act: Callable[[Side, Random], float]


KINDS: list[Kind] = []
Act = TypeVar("Act", bound=Callable[[Side, Random], float])


def kind(name: str, lane: str, weight: float = 1.0, probe: str = "local") -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        KINDS.append(Kind(name, lane, weight, probe, act))
        return act

    return add


def healed() -> float:
    return time.monotonic()


def some_ms(chance: Random, least: float, most: float) -> None:
    time.sleep(chance.uniform(least, most) / 1e3)


def other_end(side: Side, chance: Random) -> Side:
    """The node on the other end of a fault between two: the first that is drawn of its chance."""
    return chance.choice([each for each in side.world.sides if each is not side])


def new_group(name: str) -> Path:
    """Another campaign may have one of this name, or have been killed and have left it."""
    return Path(tempfile.mkdtemp(prefix=f"ecd-campaign-{name}-", dir=CGROUPS))


@contextlib.contextmanager
def little_memory(pid: int, name: str) -> Iterator[None]:
    """The process gets next to no more memory: the kernel kills it when it asks for some."""
    group = new_group(name)
    try:
        (group / "memory.limit_in_bytes").write_text("64K")
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):
            (group / "memory.limit_in_bytes").write_text("-1")
        until_s = time.monotonic() + 5
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                for left in (group / "cgroup.procs").read_text().split():
                    (CGROUPS / "cgroup.procs").write_text(left)
                group.rmdir()
                break
            time.sleep(0.01)


def available(with_engines: bool) -> tuple[list[Kind], list[str]]:
    """The kinds that this machine can make, and the names of the others."""
    kinds = [each for each in KINDS if with_engines or each.lane != "engine"]
    try:
        new_group("none").rmdir()
    except OSError:
        return [each for each in kinds if "cgroup" not in each.name], [
            each.name for each in kinds if "cgroup" in each.name
        ]
    return kinds, []
