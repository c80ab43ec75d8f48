"""`ecd-cli doctor` on a machine with a GPU, whose driver's files stand in a directory here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from ecd_client.cli import doctor_gpu
from ecd_proto.findings import Finding
from ecd_proto.v1 import cache_pb2 as pb
from support.daemon import Daemon
from support.processes import run

DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
Examine = Callable[..., dict[str, Finding]]


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """What the checks find on a machine with a device, and with a driver that says `driver`."""
    monkeypatch.setattr(doctor_gpu, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(doctor_gpu, "DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()

    def run(driver: str | None = DRIVER, status: pb.StatusReply | None = None) -> dict:
        if driver is not None:
            (tmp_path / "version").write_text(driver)
        found = list(doctor_gpu.examine_gpu(status))
        assert all(bool(finding.advice) == (finding.state != "ok") for finding in found)
        return {finding.check: finding for finding in found}

    return run


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has a GPU")
def test_one_line_says_that_there_is_no_gpu(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address]
    done = run([*command, "doctor", "--json"], capture_output=True, text=True)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert found["GPU"]["found"] == "no NVIDIA GPU on this machine: nothing to pin"
    assert not {"cuda-bindings", "ECD_PIN", "killed engines"} & set(found)


def test_all_is_well_with_driver_and_bindings(examine: Examine) -> None:
    found = examine()
    assert [finding.state for finding in found.values()] == ["ok"] * 4, found
    assert found["GPU"].found == "NVIDIA driver 580.95.05"
    assert "free 1 s after" in found["killed engines"].found


def test_the_daemons_container_may_have_no_device(examine: Examine, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").unlink()
    found = examine()["GPU"]
    assert (found.state, "no device here" in found.found) == ("ok", True)


def test_a_device_without_its_driver_is_doubtful(examine: Examine) -> None:
    found = examine(driver=None)["GPU"]
    assert (found.state, "nvidia-smi" in found.advice) == ("look", True)


@pytest.mark.parametrize(("installed", "says"), [(None, "is missing"), ("12.9.0", "is too old")])
def test_bindings_that_are_missing_or_old_are_named(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, installed: str | None, says: str
) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(doctor_gpu, "version", version)
    found = examine()["cuda-bindings"]
    assert found.state == "look"
    assert says in found.found
    assert "pip install 'cuda-bindings>=12.9.1'" in found.advice


@pytest.mark.parametrize(
    ("value", "state", "says"),
    [("off", "look", "pin nothing"), ("of", "look", "counts as auto"), ("Auto", "ok", "auto")],
)
def test_the_setting_is_read(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, value: str, state: str, says: str
) -> None:
    monkeypatch.setenv("ECD_PIN", value)
    found = examine()["ECD_PIN"]
    assert (found.state, says in found.found) == (state, True)


def test_an_older_kernel_keeps_a_killed_engines_memory_for_longer(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_gpu, "SO_PEERPIDFD", 9999)  # no kernel has it
    found = examine(status=pb.StatusReply(waiting_for_dma=2))["killed engines"]
    assert (found.state, "Linux 6.5" in found.advice) == ("look", True)
    assert found.found == "their memory is free 10 s after their end; 2 of them wait now"


def test_a_server_of_mps_is_named(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert "MPS" not in examine()
    (tmp_path / "control").touch()
    found = examine()["MPS"]
    assert (found.state, str(tmp_path) in found.found) == ("look", True)
    assert "kept 60 s" in found.advice


def test_a_device_pool_that_could_not_be_had_is_told_of(examine: Examine) -> None:
    pool = pb.PoolStatus(kind="device", path="GPU-1", pool_bytes=2 << 30, populated_bytes=2 << 30)
    found = examine(status=pb.StatusReply(pools=[pool]))["device pool"]
    assert (found.state, found.found) == ("ok", "2 GiB on GPU-1")
    pool.device_bytes = 80 << 30
    found = examine(status=pb.StatusReply(pools=[pool]))["device pool"]
    advice = (
        "start an engine there with --gpu-memory-utilization 0.96 or less, and as much less as its "
        "log says for loads"
    )
    assert (found.state, found.found) == ("ok", f"2 GiB on GPU-1; {advice}")
    pool.populated_bytes = 0
    found = examine(status=pb.StatusReply(pools=[pool]))["device pool"]
    assert found.state != "ok"
    assert found.found == "2 GiB on GPU-1: no memory; engines use the host pool"
    pool.problem = "waiting for memory (why)"
    found = examine(status=pb.StatusReply(pools=[pool]))["device pool"]
    assert found.found == "2 GiB on GPU-1: waiting for memory (why); engines use the host pool"
    assert "ECD_DEVICE_POOL_BYTES" in found.advice
