"""The connector on a GPU: vLLM's own hooks, the stand-in for CUDA's driver, a real daemon."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from e2e.engines import HERE, result_of
from e2e.shared import CONTRACT
from support.cuda import standin
from support.daemon import Daemon
from support.waiting import eventually

pytestmark = pytest.mark.timeout(600)

NBYTES = 8 * 128 * 2
"""Of the picture that `gpu_order.py` encodes."""


@pytest.fixture(params=["host", "device", "views"])
def place(request: pytest.FixtureRequest) -> str:
    """Where loads come from."""
    return str(request.param)


@pytest.fixture
def steps(
    version: str,
    place: str,
    model_of: Callable[[str], Path],
    make_daemon: Callable[..., Daemon],
    tmp_path: Path,
) -> dict:
    settings = {}
    if place != "host":
        settings = standin.environment(standin.Control(tmp_path / "daemon's control"))
        settings["ECD_DEVICE_POOL_BYTES"] = "16MiB"
    daemon, model = make_daemon(**settings).start(), model_of("qwen2_5_vl")
    found = find_spec("cuda.bindings")  # which vLLM's environment here lacks, as it has no CUDA
    assert found is not None
    assert found.origin is not None
    bindings = tmp_path / "bindings"
    bindings.mkdir()
    (bindings / "cuda").symlink_to(Path(found.origin).parents[1])
    done = result_of(
        version,
        "with_standin.py",
        *map(str, (standin.LIBRARY, bindings, HERE / "gpu_order.py")),
        *map(str, (daemon.address, model, place)),
        **standin.environment(standin.Control(tmp_path / "control")),
    )
    eventually(lambda: daemon.status().leases == 0)
    daemon.check_nothing_leaked()
    return done


@CONTRACT
def test_no_step_waits_for_a_copy(version: str, place: str, steps: dict) -> None:
    """Neither a load nor a save, with either model runner, and in an aborted request's step.

    A load is one copy from the host or within the device, or none where copies are viewed.
    """
    runners = ["first"] if version == "0.28.0" else ["first", "second"]
    at_once = {"waits": 0, "pageable": 0, "waited": False, "loads under way": 0}
    no_copy = {"from the host": 0, "within the device": 0}
    is_made = {"host": {"from the host": NBYTES}, "device": {"within the device": NBYTES}}
    load = {"promised": True, "loaded": True} | at_once | no_copy | is_made.get(place, {})
    save = {"promised": False, "loaded": False, "stored": True} | at_once | no_copy
    for runner in runners:
        encoded, loaded = steps[runner]["encoded"], steps[runner]["loaded"]
        assert encoded == save | {"right": True}
        assert loaded == load | {"right": True}
        assert steps[runner]["aborted"] == load
        assert steps[runner]["again"] == loaded
        calls = {"host": 10, "device": 9, "views": 4}[place]
        many = {"right": [True] * 4, "under way": 0}
        assert steps[runner]["many"] == {"at once": many | {"calls": calls}, "again": many}
    assert steps["faults"] == 0
    if version != "0.28.0":
        assert steps["stats"]["loads"] == 22
        assert steps["stats"].get("device_loads", 0) >= (0 if place == "host" else 22)
        assert steps["stats"]["saves"] == 10
        assert "pin_failures" not in steps["stats"]
