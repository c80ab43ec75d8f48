"""The cluster's logic on a simulated clock and network: no seed breaks it, each bug is found.

The simulation runs in a process of its own, with a fixed hash seed: one seed is one run there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.bugs import BUGS
from simulation.run import shrink
from simulation.scenario import draw

FIRST_SEED = int(os.environ.get("SEED", "0"))
PARTS, RUNS, SECONDS, FEWEST = 3, 100_000, 40, 50
"""Slices, the seeds of each, how long each is run at most, and how many runs that has to be."""
FAILED_ONCE = (80002374, 10005139, 30024315)


def simulate(*arguments: object) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-m", "simulation", *map(str, arguments)]
    return subprocess.run(
        command, cwd=tests, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_breaks_an_invariant(part: int) -> None:
    ended = simulate(FIRST_SEED + part * RUNS, "--runs", RUNS, "--seconds", SECONDS)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [runs] = re.findall(r"^(\d+) runs from seed", ended.stdout, re.MULTILINE)
    assert int(runs) >= FEWEST


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_a_seed_that_failed_once_passes(seed: int) -> None:
    ended = simulate(seed)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    ended = simulate(0, "--runs", BUGS[bug].seeds, "--bug", bug)
    assert ended.returncode == 1, f"not found: {ended.stdout}{ended.stderr}"
    assert "1 violations" in ended.stdout, ended.stdout + ended.stderr


def test_a_seed_is_one_run() -> None:
    first, second = (simulate(3).stdout for _ in range(2))
    assert first == second
    assert "digest" in first


def test_shrinking_leaves_the_actions_that_matter() -> None:
    scenario = draw(1)
    needed = scenario.actions[2], scenario.actions[-1]
    smallest = shrink(scenario, lambda some: all(each in some.actions for each in needed))
    assert smallest.actions == needed
