"""The cluster's logic on a simulated clock and network: no seed breaks it, each bug is found.

The simulation runs in a process of its own, with a fixed hash seed: one seed is one run there.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from simulation.__main__ import ENDED
from simulation.bugs import BUGS
from simulation.run import shrink
from simulation.scenario import draw
from support.processes import child

PARTS, SECONDS = 2, float(os.environ.get("ECD_SIMULATE_S", "30"))
"""Slices, and how long each may take: on a slow machine it runs fewer seeds."""
BY_DAY = SECONDS <= 30
RUNS = 400 if BY_DAY else 100_000
"""The seeds of a slice, which take 16 s of a processor; a longer slice ends with its time."""
FIRST_SEED = int(os.environ.get("SEED") or (0 if BY_DAY else secrets.randbits(30)))
FAILED_ONCE = (80002374, 10005139, 30024315)


class Ended(NamedTuple):
    failed: int
    output: str


Simulate = Callable[..., Ended]


@pytest.fixture(scope="module")
def simulate() -> Iterator[Simulate]:
    """Run `python -m simulation` with these arguments, in a fork of one that has imported all."""
    with child(
        [sys.executable, "-m", "simulation", "-"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    ) as process:

        def run(*arguments: object) -> Ended:
            assert process.stdin is not None
            assert process.stdout is not None
            print(*arguments, sep="\t", file=process.stdin)
            lines = []
            for line in process.stdout:
                if line.startswith(ENDED):
                    return Ended(int(line.removeprefix(ENDED)), "".join(lines))
                print(line, end="")
                lines.append(line)
            raise AssertionError("the simulation has ended")

        yield run


@pytest.mark.timeout(SECONDS + 90)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_breaks_an_invariant(part: int, simulate: Simulate) -> None:
    first = FIRST_SEED + part * RUNS
    ended = simulate(first, "--runs", RUNS, "--seconds", SECONDS)
    assert ended.failed == 0
    [runs] = re.findall(r"^(\d+) runs from seed", ended.output, re.MULTILINE)
    assert int(runs) > 0


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_a_seed_that_failed_once_passes(seed: int, simulate: Simulate) -> None:
    assert simulate(seed).failed == 0


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, simulate: Simulate) -> None:
    ended = simulate(BUGS[bug].first, "--runs", BUGS[bug].seeds, "--bug", bug)
    assert ended.failed == 1
    assert "1 violations" in ended.output


def test_a_seed_is_one_run(simulate: Simulate) -> None:
    first, second = (simulate(3).output for _ in range(2))
    assert first == second
    assert "digest" in first


def test_shrinking_leaves_the_actions_that_matter() -> None:
    scenario = draw(1)
    needed = scenario.actions[2], scenario.actions[-1]
    smallest = shrink(scenario, lambda some: all(each in some.actions for each in needed))
    assert smallest.actions == needed
