"""The connector on a GPU: vLLM's own hooks, the stand-in for CUDA's driver, a real daemon."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from e2e.engines import HERE, environment, python_of
from support.cuda import standin
from support.daemon import Daemon, eventually


@pytest.fixture
def steps(
    version: str,
    model_of: Callable[[str], Path],
    make_daemon: Callable[..., Daemon],
    tmp_path: Path,
) -> dict:
    daemon, model = make_daemon().start(), model_of("qwen2_5_vl")
    control = standin.Control(tmp_path / "control")
    found = find_spec("cuda.bindings")  # which vLLM's environment here lacks, as it has no CUDA
    assert found is not None
    assert found.origin is not None
    bindings = tmp_path / "bindings"
    bindings.mkdir()
    (bindings / "cuda").symlink_to(Path(found.origin).parents[1])
    own = environment(version)
    paths = [own.get("PYTHONPATH"), str(HERE.parent), str(bindings)]
    own["PYTHONPATH"] = ":".join(filter(None, paths))
    run = subprocess.run(
        list(map(str, (python_of(version), HERE / "gpu_order.py", daemon.address, model))),
        env={**own, **standin.environment(control)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    [line] = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    eventually(lambda: daemon.status().leases == 0)
    daemon.check_nothing_leaked(within_s=15.0)
    return json.loads(line.removeprefix("RESULT "))


def test_no_step_waits_for_a_copy(version: str, steps: dict) -> None:
    """Neither a load nor a save, with either model runner, and in an aborted request's step."""
    runners = ["first"] if version == "0.28.0" else ["first", "second"]
    at_once = {"waits": 0, "pageable": 0, "waited": False, "loads under way": 0}
    for runner in runners:
        encoded, loaded = steps[runner]["encoded"], steps[runner]["loaded"]
        assert (
            encoded == {"promised": False, "loaded": False, "right": True, "stored": True} | at_once
        )
        assert loaded == {"promised": True, "loaded": True, "right": True} | at_once
        assert steps[runner]["aborted"] == {"promised": True, "loaded": True} | at_once
        assert steps[runner]["again"] == loaded
    assert steps["faults"] == 0
    if version != "0.28.0":
        assert steps["stats"]["loads"] == 6
        assert steps["stats"]["saves"] == 2
        assert "pin_failures" not in steps["stats"]
