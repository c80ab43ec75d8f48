"""Slices of the campaign; `make campaign` runs longer ones (docs/reliability.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from campaign.bugs import BUGS

pytestmark = pytest.mark.timeout(200)
SEEDS = 23, 301, 402
"""Of them the first has three nodes."""
SECONDS, BUG_SECONDS = 45, 120
"""Of a slice, starts included, and of one with a bug, which ends when that is found."""


def campaign(
    directory: Path, seed: int, seconds: float, *about: str
) -> tuple[int, str, dict[str, Any]]:
    """Run it; returns its exit code, what it printed, and its result."""
    result = directory / "result.json"
    about += ("--seed", str(seed), "--minutes", str(seconds / 60), "--json", str(result))
    done = subprocess.run(
        [sys.executable, "-m", "campaign", *about, "--directory", str(directory / "world")],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        timeout=190,
    )
    print(done.stdout)
    return done.returncode, done.stdout, json.loads(result.read_text())


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, tmp_path: Path) -> None:
    code, printed, said = campaign(tmp_path, SEEDS[1], BUG_SECONDS, "--bug", bug)
    assert code == 1, f"not found: {printed}"
    assert "wrong" in {each["kind"] for each in said["violations"]}, printed


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slice_of_the_campaign(seed: int, tmp_path: Path) -> None:
    code, printed, said = campaign(tmp_path, seed, SECONDS)
    assert code == 0, f"`make campaign SEED={seed} MINUTES=2`:\n{printed}"
    assert said["violations"] == []
    assert said["total"]["checks"] > 0
    assert sum(kind["faults"] > 0 for kind in said["kinds"].values()) >= 20
