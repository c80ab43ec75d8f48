"""A slice of the campaign; `make campaign` runs longer ones (docs/reliability.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SEED = 23
MINUTES = 1.2


@pytest.mark.timeout(400)
def test_a_slice_of_the_campaign(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    about = ("--seed", str(SEED), "--minutes", str(MINUTES), "--json", str(result))
    done = subprocess.run(
        [sys.executable, "-m", "campaign", *about, "--directory", str(tmp_path / "world")],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, f"`make campaign SEED={SEED} MINUTES={MINUTES}`:\n{done.stdout}"
    said = json.loads(result.read_text())
    assert said["violations"] == []
    assert said["total"]["checks"] > 0
    assert sum(kind["faults"] > 0 for kind in said["kinds"].values()) >= 20
