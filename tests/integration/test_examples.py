"""The examples of the documentation run as they stand."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.daemon import Daemon
from support.processes import run

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def said_by(script: str, *arguments: str, **environ: str) -> str:
    command = [sys.executable, EXAMPLES / script, *arguments]
    done = run(command, env={**os.environ, **environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_put_get(daemon: Daemon) -> None:
    said = said_by("put_get.py", ECD_ADDRESS=daemon.address)
    assert said.splitlines() == [
        "stored",
        "bfloat16 (192, 128) b'{\"grid\": [1, 24, 32]}'",
        "[True, False]",
        "[True, True, True]",
    ]


def test_a_tensor_of_another_kind_goes_from_stage_to_stage(daemon: Daemon) -> None:
    with ThreadPoolExecutor() as side:
        stages = [
            side.submit(said_by, "stages.py", stage, ECD_ADDRESS=daemon.address)
            for stage in ("talker", "thinker")
        ]
    assert [stage.result() for stage in stages] == [
        "".join(f"step {n}: (32, 2048), torch.bfloat16, sum {65536 * n}\n" for n in range(4)),
        "",
    ]


def test_demo() -> None:
    said = said_by("demo.py")
    assert "8 of 8 are byte for byte what the producer encoded" in said
    for line in ("plain copy", "put  ", "get, zero copy", "entries"):
        assert line in said.lower()


def test_sizing_says_what_its_page_says() -> None:
    *tables, figures = said_by("sizing.py").splitlines()
    page = (EXAMPLES.parent / "sizing.md").read_text()
    assert all(line in page for line in tables)
    assert all(f"{int(figure):,}" in page for figure in figures.split(": ")[-1].split())
