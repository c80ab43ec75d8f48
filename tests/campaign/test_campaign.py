"""Slices of the campaign; `make campaign` runs longer ones (docs/testing.md)."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from campaign.bugs import BUGS
from campaign.content import STRICT_S
from campaign.kinds import KINDS
from campaign.run import OWN_LANES, SHARED_LANES
from support.processes import child
from support.waiting import HANG_S

SECONDS = float(os.environ.get("ECD_CAMPAIGN_S", "45"))
LENIENT = {} if "ECD_CAMPAIGN_S" in os.environ else {"ECD_CAMPAIGN_SLACK_S": str(HANG_S)}
"""A short slice, beside other tests, asks only that each request ends."""
BUG_SECONDS = 300
"""Of faults in a slice, and in one with a bug at most: it ends when that is found."""
SEEDS = 23, *(pytest.param(seed, marks=pytest.mark.night) for seed in (301, None))
"""The first has three nodes; the last is drawn."""
BUG_SEED = 301
CAGE = "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"
"""The kernel ends all that a command has started, when the command ends or is killed."""
pytestmark = pytest.mark.timeout(SECONDS + BUG_SECONDS + 180)


def campaign(
    directory: Path, seed: int, seconds: float, *about: str
) -> tuple[int, str, dict[str, Any]]:
    """Run it; returns its exit code, what it printed, and its result."""
    result = directory / "result.json"
    about += ("--seed", str(seed), "--minutes", str(seconds / 60), "--json", str(result))
    with child(
        [*CAGE, sys.executable, "-m", "campaign", *about, "--directory", str(directory / "world")],
        cwd=Path(__file__).parents[1],
        env=os.environ | LENIENT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        printed, _ = process.communicate()
    print(printed)
    return process.returncode, printed, json.loads(result.read_text())


@pytest.mark.night  # when it is found is a matter of luck
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, tmp_path: Path) -> None:
    code, printed, said = campaign(tmp_path, BUG_SEED, BUG_SECONDS, "--bug", bug)
    assert code == 1, f"not found: {printed}"
    assert "wrong" in {each["kind"] for each in said["violations"]}, printed


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slice_of_the_campaign(seed: int | None, tmp_path: Path) -> None:
    seed = secrets.randbits(20) if seed is None else seed
    code, printed, said = campaign(tmp_path, seed, SECONDS)
    print(f"{said['total']['late']} requests more than {STRICT_S:.0f} s late")
    assert code == 0, f"`make campaign SEED={seed} MINUTES=2`:\n{printed}"
    assert said["violations"] == []
    assert said["total"]["checks"] > 0
    acted = {kind.lane for kind in KINDS if said["kinds"].get(kind.name, {}).get("faults")}
    assert acted == {*OWN_LANES, *SHARED_LANES}
