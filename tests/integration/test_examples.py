"""The examples of the documentation run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import Daemon

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(script: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_put_get(daemon: Daemon) -> None:
    said = run("put_get.py", ECD_ADDRESS=daemon.address)
    assert said.splitlines() == [
        "stored",
        "bfloat16 (192, 128) b'{\"grid\": [1, 24, 32]}'",
        "[True, False]",
        "[True, True, True]",
    ]


@pytest.mark.timeout(150)
def test_demo() -> None:
    said = run("demo.py")
    assert "8 of 8 are byte for byte what the producer encoded" in said
    for line in ("plain copy", "put  ", "get, zero copy", "entries"):
        assert line in said.lower()


def test_sizing_says_what_its_page_says() -> None:
    *tables, figures = run("sizing.py").splitlines()
    page = (EXAMPLES.parent / "sizing.md").read_text()
    assert all(line in page for line in tables)
    assert all(f"{int(figure):,}" in page for figure in figures.split(": ")[-1].split())
