"""The device pool of a real daemon, by clients on the stand-in's GPUs: docs/gpu-rules.md.

Tests that need no control page run on a GPU too, with ECD_TEST_CUDA=device.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ecd_client import Client
from support.cuda.processes import Cuda
from support.cuda.standin import Control, Hold, environment, physical_bytes
from support.daemon import Daemon, changed
from support.processes import run as run_command
from support.waiting import HANG_S, eventually

SCENARIOS = Path(__file__).with_name("scenarios.py")
STRESS = Path(__file__).parents[1] / "support/cuda/dma_stress.py"
MIB = 1 << 20
Scenario = Callable[..., dict]
MakeNear = Callable[..., Daemon]
IMPATIENT = changed("from ecd.memory import device", "device.MEMORY_WAIT_S = 1.0")
"""A daemon that waits 1 s for memory of a GPU."""
PATIENT = changed("from ecd.memory import device", "device.MEMORY_WAIT_S = 1e6")
"""A daemon that waits for it for as long as it runs."""


@pytest.fixture
def make_near(cuda: Cuda, make_daemon: Callable[..., Daemon]) -> MakeNear:
    """Make a daemon with a device pool on each of some GPUs."""

    def make(nbytes: str = "16MiB", devices: int = 1, **settings: str) -> Daemon:
        variables = cuda.environment(devices)
        if devices == 1:
            variables["ECD_DEVICES"] = "0"
        return make_daemon(**variables, ECD_DEVICE_POOL_BYTES=nbytes, **settings)

    return make


@pytest.fixture
def near(make_near: MakeNear) -> Daemon:
    return make_near().start()


def run(cuda: Cuda, name: str, daemon: Daemon, **variables: str) -> dict:
    done = cuda.run(SCENARIOS, name, daemon.address, **variables)
    return json.loads(done.stdout.splitlines()[-1])


def status_of(daemon: Daemon) -> str:
    command = [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address, "status"]
    environment = {**os.environ, "COLUMNS": "200"}
    return run_command(command, capture_output=True, text=True, env=environment).stdout


def test_a_second_engine_loads_what_the_first_has_put_from_the_device(
    cuda: Cuda, near: Daemon
) -> None:
    put, loaded = run(cuda, "puts_near", near), run(cuda, "loads_near", near)
    assert (put.pop("stored"), put.pop("copies"), loaded.pop("right")) == (True, 3, True)
    host, device = near.status().pools
    assert (host.kind, device.kind) == ("host", "device")
    assert re.fullmatch("GPU-[0-9a-f-]{36}", device.path)
    assert (device.pool_bytes, device.used_bytes) == (16 * MIB, 3 * MIB)
    assert re.search(r"with --gpu-memory-utilization 0\.\d\d or less", near.text())
    if cuda.is_standin:
        assert put == {
            "device to device": 2 * MIB,
            "host to device": 0,
            "host to device later": MIB,
        }
        assert loaded == {"host to device": 0, "device to device": 4 * MIB}
        assert device.device_bytes == 64 << 30
        assert "with --gpu-memory-utilization 0.99 or less" in near.text()
    assert near.status().entries == 3
    shown = status_of(near)
    assert f"16 MiB on {device.path}" in shown
    assert "3 copies made in device pools" in shown
    assert 'ecd_pool_used_bytes{pool="device"} 3.145728e+06' in near.metrics()
    near.check_nothing_leaked()


@pytest.mark.parametrize(("nbytes", "load", "step"), [("0", 7, 10), ("16MiB", 6, 9)])
def test_a_step_makes_few_calls_of_the_driver(
    cuda: Cuda, make_near: MakeNear, nbytes: str, load: int, step: int
) -> None:
    daemon = make_near(nbytes).start()
    found = run(cuda, "calls_are_counted", daemon)
    near = nbytes != "0"
    copying = {"ecd-put": 8} | ({"ecd-promote": 8} if near else {})
    assert found == {
        "load": {"caller": load, "ecd-ends": 1},
        "put": {"caller": 5} | copying,
        "step of four": {"caller": step, "ecd-ends": 1},
        "near": near,
    }


def test_doctor_looks_for_entries_in_the_hosts_pool_alone(near: Daemon) -> None:
    command = [sys.executable, "-m", "ecd_client.cli.main", "--address", near.address]
    done = run_command([*command, "doctor", "--json"], capture_output=True, text=True)
    found = {finding["check"]: finding["found"] for finding in json.loads(done.stdout)}
    assert found["pool"] == "64 MiB, 0% in use"
    host = near.status().pools[0]
    share = host.huge_bytes / (host.populated_bytes // (2 * MIB) * (2 * MIB))
    assert found["huge pages"].startswith(f"{share:.0%} of the pool")


def test_a_hit_brings_an_entry_into_the_device_pool(cuda: Cuda, near: Daemon) -> None:
    assert run(cuda, "promoted_by_a_hit", near) == {"right": True, "host to device": 0}
    near.check_nothing_leaked()


def test_a_device_pool_that_is_too_small_evicts_copies_alone(cuda: Cuda, near: Daemon) -> None:
    found = run(cuda, "more_than_it_holds", near)
    assert found == {"right": True, "faults": 0}
    near.check_nothing_leaked()


@pytest.mark.usefixtures("control")
def test_a_copy_is_loaded_into_memory_that_torch_keeps_for_loads(cuda: Cuda, near: Daemon) -> None:
    found = run(cuda, "memory_is_left_for_loads", near)
    assert found == {"right": True, "device to device": MIB}
    near.check_nothing_leaked()


def test_an_item_gets_its_own_bytes_where_its_key_has_others_by_now(
    cuda: Cuda, near: Daemon
) -> None:
    assert run(cuda, "another_entry_of_the_key", near) == {"old": True, "new": True}
    near.check_nothing_leaked()
    found = run(cuda, "another_entry_of_the_key", near, WITHOUT="the second look")
    assert found == {"old": False, "new": True}, "the look is needed"
    near.check_nothing_leaked()


@pytest.mark.parametrize("without", ["", "the hold"])
def test_a_copy_of_a_tensor_is_of_no_entry_but_its_own(
    cuda: Cuda, near: Daemon, without: str
) -> None:
    found = run(cuda, "put_again_before_the_copy", near, WITHOUT=without)
    right = not without
    assert found == {"by calls": right, "into granted memory": right}
    near.check_nothing_leaked()


def test_a_view_holds_its_memory_until_its_last_use_is_over(cuda: Cuda, near: Daemon) -> None:
    found = run(cuda, "views", near)
    is_early = found.pop("early")  # on a GPU that work is over at once
    assert found == {
        "none yet": True,
        "copies": 0,
        "right": True,
        "l": ["torch.uint8", [16], True],
    }
    assert not (cuda.is_standin and is_early)
    near.check_nothing_leaked()


@pytest.mark.usefixtures("control")
def test_a_view_may_be_dropped_by_any_thread(cuda: Cuda, near: Daemon) -> None:
    found = run(cuda, "view_dropped_by_another_thread", near)
    assert found == {"held": True, "early": False}
    near.check_nothing_leaked()


def test_a_view_may_be_dropped_amid_a_capture(cuda: Cuda, near: Daemon) -> None:
    found = run(cuda, "view_dropped_amid_a_capture", near)
    assert found["warnings"] == []
    for code, is_early, is_over in found["found"]:
        assert (code, is_early) == ("CUDA_SUCCESS", False)
        assert not (cuda.is_standin and is_over), "the work from before the capture is held"
    assert len(found["found"]) == 2
    near.check_nothing_leaked()


def test_the_daemon_has_its_memory_and_no_context(cuda: Cuda, near: Daemon) -> None:
    assert near.status().pools[1].populated_bytes == 16 * MIB
    if not cuda.is_standin:
        assert near.pid not in cuda.processes_with_contexts()
        return
    assert physical_bytes(cuda.control) == 16 * MIB
    assert cuda.control.counters().contexts == 0
    near.terminate()
    assert physical_bytes(cuda.control) == 0


@pytest.mark.usefixtures("control")
def test_an_engine_that_may_not_import_the_pool_uses_the_hosts(cuda: Cuda, near: Daemon) -> None:
    found = run(cuda, "import_is_refused", near)
    assert (found["right"], found["near"]) == (True, False)
    [warning] = found["warnings"]
    assert "cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE" in warning


def test_each_engine_uses_the_pool_of_its_own_gpu(cuda: Cuda, make_near: MakeNear) -> None:
    daemon = make_near(devices=2).start()
    assert [pool.kind for pool in daemon.status().pools] == ["host", "device", "device"]
    both = cuda.environment(2)
    put = run(cuda, "puts_near", daemon, **both, GPU="1")
    assert (put["stored"], put["copies"]) == (True, 3)
    _, first, second = daemon.status().pools
    assert (first.used_bytes, second.used_bytes) == (0, 3 * MIB)
    assert run(cuda, "loads_near", daemon, **both, GPU="1")["host to device"] == 0
    daemon.check_nothing_leaked()


def test_gpus_are_chosen_by_uuid_or_number(cuda: Cuda, make_near: MakeNear) -> None:
    daemon = make_near(devices=2, ECD_DEVICES="1").start()
    [_, device] = daemon.status().pools
    found = run(cuda, "has_no_pool_of_its_own", daemon, **cuda.environment(2))
    assert found == {"right": True, "near": False}
    again = make_near(devices=2, ECD_DEVICES=f"{device.path}, 0").start()
    assert [pool.path for pool in again.status().pools][1] == device.path
    refused = make_near(devices=2, ECD_DEVICES="7")
    assert "there is no GPU 7; known are 0 (GPU-" in why_not(refused)


def why_not(daemon: Daemon) -> str:
    """What a daemon says that does not start."""
    daemon.start(wait=False)
    assert daemon._process is not None
    assert daemon._process.wait(HANG_S) != 0
    return daemon.text()


def test_a_daemon_without_a_gpu_refuses_to_have_a_device_pool(
    make_daemon: Callable[..., Daemon],
) -> None:
    """It finds no driver, or one that hides its GPUs."""
    said = why_not(make_daemon(ECD_DEVICE_POOL_BYTES="16MiB", CUDA_VISIBLE_DEVICES=""))
    assert "ECD_DEVICE_POOL_BYTES needs a GPU" in said
    assert "Traceback" not in said


def test_a_gpu_that_stays_full_leaves_the_host_pool(
    cuda: Cuda, control: Control, make_near: MakeNear
) -> None:
    control.device_bytes = 8 * MIB
    daemon = make_near()
    daemon.command = IMPATIENT
    daemon.start()
    eventually(lambda: "until the next start" in daemon.status().pools[1].problem)
    _, device = daemon.status().pools
    assert (device.pool_bytes, device.populated_bytes) == (16 * MIB, 0)
    why = "no memory until the next start (cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY)"
    assert f"16 MiB on {device.path}: {why}" in status_of(daemon)
    assert f"no device pool on 16 MiB of {device.path}: {why}. Start the daemon" in daemon.text()
    assert 'ecd_pool_populated_bytes{pool="device"} 0.0' in daemon.metrics()
    control.device_bytes = 0
    found = run(cuda, "has_no_pool_of_its_own", daemon)
    assert found == {"right": True, "near": False}


def test_a_refusal_with_an_unknown_code_leaves_the_host_pool(
    control: Control, make_near: MakeNear
) -> None:
    control.fail({"cuMemCreate": 123456})
    daemon = make_near().start()
    assert "cuMemCreate: unknown: " in daemon.status().pools[1].problem
    control.fail({"cuDeviceGetCount": 123456})
    said = why_not(make_near(ECD_NAME="another"))
    assert "ECD_DEVICE_POOL_BYTES needs a GPU: cuDeviceGetCount: unknown: " in said
    assert "Traceback" not in said


def test_memory_of_a_full_gpu_is_waited_for_while_the_host_pool_serves(
    cuda: Cuda, control: Control, make_near: MakeNear
) -> None:
    control.device_bytes = 8 * MIB
    daemon = make_near().start()
    [_, device] = daemon.status().pools
    why = "waiting for memory (cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY)"
    assert f"16 MiB on {device.path}: {why}" in status_of(daemon)
    found = run(cuda, "before_and_after_the_memory_came", daemon)
    assert found == {"right": True, "had it before": False}
    assert daemon.status().pools[1].problem == ""
    assert f"16 MiB on {device.path}" in status_of(daemon)
    daemon.check_nothing_leaked()
    daemon.terminate()
    eventually(lambda: physical_bytes(control) == 0)


def test_a_start_waits_a_little_for_memory_that_is_being_given_back(
    control: Control, make_near: MakeNear
) -> None:
    control.device_bytes = 8 * MIB
    daemon = make_near()
    daemon.command = changed("from ecd import daemon", f"daemon.DEVICE_WAIT_S = {HANG_S}")
    daemon.start(wait=False)
    eventually(lambda: "waiting for memory" in daemon.text())
    control.device_bytes = 0
    daemon.wait_serving()
    assert daemon.status().pools[1].populated_bytes == 16 * MIB


def test_a_daemon_that_waits_for_memory_stops_at_once(
    control: Control, make_near: MakeNear
) -> None:
    control.device_bytes = 8 * MIB
    daemon = make_near()
    daemon.command = PATIENT
    daemon.start()
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.text()


@pytest.mark.usefixtures("control")
def test_a_device_that_fails_leaves_the_host_pool(cuda: Cuda, near: Daemon) -> None:
    found = run(cuda, "copies_near_fail", near)
    assert found == {"copies": 0, "kept": [True]}
    assert near.status().pools[1].reserved_bytes == 0
    near.check_nothing_leaked()


@pytest.mark.usefixtures("control")
def test_a_lost_device_takes_nothing_from_the_host(cuda: Cuda, near: Daemon) -> None:
    found = run(cuda, "device_is_lost_near", near)
    assert found == {"errors": ["DeviceError"] * 2, "on the host": True}
    with Client(near.address) as client:  # the daemon has no context that could have failed
        assert client.put_bytes("after all that", b"right", "uint8", (5,))
        assert client.contains(["k", "after all that"]) == [True, True]
    near.check_nothing_leaked()


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord"])
def test_a_load_that_fails_on_the_device_pool_comes_from_the_host(
    cuda: Cuda, near: Daemon, call: str
) -> None:
    found = run(cuda, "loads_near_fail", near, CALL=call)
    [warning] = found.pop("warnings")
    assert warning.startswith(f"the device pool is not used any more: {call}")
    assert found == {"right": True, "from the host": MIB, "near again": False}
    near.check_nothing_leaked()


def test_an_engine_killed_amid_a_promotion_leaves_nothing(
    cuda: Cuda, control: Control, make_near: MakeNear, tmp_path: Path
) -> None:
    grace_is_over = tmp_path / "grace is over"
    near = start_without("", make_near, "16MiB", DMA_GRACE_UNTIL=str(grace_is_over))
    variables = cuda.environment(afterlife=True) | {"HELD": "yes"}
    died = cuda.run(SCENARIOS, "dies_amid_a_promotion", near.address, check=False, **variables)
    assert died.returncode == -9
    assert near.status().pools[1].reserved_bytes == MIB * 3 // 2, "the device may still write there"
    control.hold = Hold.NOTHING
    grace_is_over.touch()
    eventually(lambda: near.status().pools[1].reserved_bytes == 0)
    assert run(cuda, "puts_near", near)["stored"]
    assert run(cuda, "loads_near", near)["right"]
    near.check_nothing_leaked()


def test_an_engine_goes_on_while_the_daemon_is_killed_and_started(cuda: Cuda, near: Daemon) -> None:
    engine = cuda.start(SCENARIOS, "goes_on_through_restarts", near.address)
    assert engine.stdout is not None
    assert engine.stdout.readline() == "ready\n"
    for _ in range(3):
        eventually(lambda: near.status().counters.copies > 3)
        near.kill()
        near.start()
    eventually(lambda: near.status().counters.copies > 3)
    if cuda.is_standin:
        eventually(lambda: physical_bytes(cuda.control) < 40 * MIB, what="the old pools are gone")
    output, _ = engine.communicate("\n", timeout=HANG_S)
    assert json.loads(output.splitlines()[-1]) == {"wrong": 0, "some": True, "faults": 0}
    near.terminate()
    if cuda.is_standin:
        eventually(lambda: physical_bytes(cuda.control) == 0)


# -- the rules, kept and left out ------------------------------------------------------------------


def start_without(step: str, make_near: MakeNear, nbytes: str = "2MiB", **settings: str) -> Daemon:
    """A daemon with the smallest device pool; "" leaves out no step.

    With DMA_GRACE_UNTIL a dead engine's copies count as under way until that file is there.
    """
    daemon = make_near(nbytes, **settings)
    daemon.command = (sys.executable, str(STRESS), "--daemon", "--without", step)
    return daemon.start()


@pytest.mark.parametrize("without", ["", "recheck"])
def test_a_copy_that_is_displaced_before_it_is_pinned_is_not_read(
    cuda: Cuda, make_near: MakeNear, without: str
) -> None:
    daemon = start_without("", make_near)
    found = run(cuda, "displaced_before_its_pin", daemon, WITHOUT=without)
    assert found == {"right": not without}


@pytest.mark.parametrize("without", ["", "copies"])
def test_no_copy_outlives_its_entry(cuda: Cuda, make_near: MakeNear, without: str) -> None:
    daemon = start_without(without, make_near)
    assert run(cuda, "next_entry_of_the_key", daemon) == {"right": not without}


@pytest.mark.parametrize("without", ["", "original"])
def test_no_copy_is_committed_after_its_entry_has_gone(
    cuda: Cuda, make_near: MakeNear, without: str
) -> None:
    daemon = start_without(without, make_near)
    assert run(cuda, "committed_after_its_original", daemon) == {"right": not without}


@pytest.mark.parametrize("without", ["", "the reference", "the wait"])
def test_a_tensor_keeps_its_memory_and_value_until_its_copy_is_made(
    cuda: Cuda, near: Daemon, without: str
) -> None:
    if without:
        assert cuda.control, "only a copy that is held shows that something is missing"
    found = run(cuda, "copied_from_a_tensor", near, WITHOUT=without)
    assert found == {"ended": without != "the reference", "written": without != "the wait"}


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize("without", ["", "R4"])
@pytest.mark.parametrize("use", ["view", "copy"])
def test_the_pool_stays_mapped_for_as_long_as_it_is_used(
    cuda: Cuda, near: Daemon, use: str, without: str
) -> None:
    found = run(cuda, "closed_amid_use", near, USE=use, WITHOUT=without)
    assert found == {"right": not without}


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize("without", ["", "D1"])
def test_a_dead_engines_memory_is_not_reused_while_its_copy_may_go_on(
    cuda: Cuda, make_near: MakeNear, tmp_path: Path, without: str
) -> None:
    grace_is_over = tmp_path / "grace is over"
    daemon = start_without(without, make_near, DMA_GRACE_UNTIL=str(grace_is_over))
    engine = cuda.start(SCENARIOS, "copies_after_a_death", daemon.address)
    assert engine.stdin is not None
    assert engine.stdout is not None
    assert engine.stdout.readline() == "ready\n"
    dead = Control(tmp_path / "cuda-dead")
    variables = environment(dead, afterlife=True) | {"HELD": "yes"}
    cuda.run(SCENARIOS, "dies_amid_a_promotion", daemon.address, check=False, **variables)
    engine.stdin.write("\n")
    engine.stdin.flush()
    assert engine.stdout.readline() == "tried\n"
    dead.hold = Hold.NOTHING
    eventually(lambda: dead.counters().finished == dead.counters().copies)
    grace_is_over.touch()
    output, _ = engine.communicate("\n", timeout=HANG_S)
    assert json.loads(output.splitlines()[-1]) == {"right": not without}
