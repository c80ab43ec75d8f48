"""Copies between GPUs and the pool, by a client of a real daemon: docs/gpu-rules.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ecd_client import Client
from ecd_proto.cuda import CudaError, result_of
from ecd_proto.shm.session_page import DMA, DMA_OUTLASTS
from support.cuda.dma_stress import COPY_STEPS, KINDS, LATE_KINDS, RULES
from support.cuda.processes import Cuda
from support.cuda.standin import Control, Hold, environment
from support.daemon import Daemon
from support.processes import child
from support.waiting import HANG_S, eventually, stopped

Scenario = Callable[..., dict]
STRESS = Path(__file__).parents[1] / "support/cuda/dma_stress.py"
SCENARIOS = Path(__file__).with_name("scenarios.py")
STRESS_S = float(os.environ.get("ECD_STRESS_S", "4"))
NIGHT = pytest.mark.night
FOUND_S = 3 * HANG_S
"""How long a run looks for what a rule that was left out must show; it ends when that is found."""
BY_DAY = "W2", "R1", "scan"
"""Of a save, a load and the daemon one; the others are left out at night."""
MIB = 1 << 20


def by_day(rules: Iterable[str]) -> list[object]:
    return [rule if rule in BY_DAY else pytest.param(rule, marks=NIGHT) for rule in rules]


def stress(seconds: float, *arguments: str) -> dict:
    command = [sys.executable, str(STRESS), "--seconds", str(seconds), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with child(command, grace=True, **pipes) as process:
        output, errors = process.communicate()
    assert output, errors
    return json.loads(output)


@pytest.mark.parametrize("kind", KINDS)
def test_no_byte_is_wrong_however_late_copies_are(cuda: Cuda, kind: str) -> None:
    if kind in LATE_KINDS:
        assert cuda.control, "a GPU's copies are not so late"
    found = stress(STRESS_S, "--kind", kind)
    assert (found["wrong"], found["faults"], found.get("ended")) == (0, 0, None)
    assert found["evictions"] > 20
    assert (found["copies near"] > 0) == (kind == "near")
    assert found.get("amid", 0) > 3 or kind != "doomed"


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize("step", by_day(["W2", "R1", "R2", *COPY_STEPS]))
def test_without_this_step_copies_in_a_device_pool_are_wrong(step: str) -> None:
    found = stress(FOUND_S, "--kind", "near", "--without", step)
    assert found["wrong"] > 0 or found["faults"] > 0


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize("rule", by_day(RULES))
def test_without_this_rule_there_are_wrong_bytes_or_a_fault(rule: str) -> None:
    found = stress(FOUND_S, "--without", rule)
    assert found["wrong"] > 0 or found["faults"] > 0
    assert "ended" not in found or found["faults"], found["ended"]


DIRECTED = pytest.mark.usefixtures("control")
"""Its scenario makes the driver fail, or holds or counts copies, which a GPU cannot do."""


@pytest.fixture
def scenario(cuda: Cuda, unused_daemon: Daemon) -> Scenario:
    """Run one of `scenarios.py` against a daemon; nothing may be left in the pool after it."""

    def run(name: str, **variables: str) -> dict:
        done = cuda.run(SCENARIOS, name, unused_daemon.address, **variables)
        unused_daemon.check_nothing_leaked()
        return json.loads(done.stdout.splitlines()[-1])

    return run


@DIRECTED
def test_neither_a_load_nor_a_save_holds_up_its_caller(scenario: Scenario) -> None:
    assert scenario("nothing_waits") == {
        "put returned before its copy": True,
        "stored before its copy": False,
        "load returned before its copy": True,
        "waits": 0,
        "right": True,
        "pageable": 0,
        "registered after": 0,
    }


@DIRECTED
@pytest.mark.parametrize(
    ("code", "meaning"), [("2", "CUDA_ERROR_OUT_OF_MEMORY$"), ("123456", "unknown: .*123456")]
)
def test_a_pool_that_cannot_be_pinned_is_used_all_the_same(
    scenario: Scenario, code: str, meaning: str
) -> None:
    found = scenario("registration_is_refused", CODE=code)
    assert (found["stored"], found["right"]) == (True, True)
    assert re.search(f"^cuMemHostRegister: {meaning}", found["failure"])
    [warning] = found["warnings"]
    assert found["failure"] in warning


@DIRECTED
def test_a_pool_may_be_pinned_in_part(scenario: Scenario) -> None:
    found = scenario("half_of_it_is_refused")
    assert found == {"right": True, "pinned": True, "faults": 0, "registered after": 0}


def test_no_copy_crosses_from_one_registration_into_the_next(
    scenario: Scenario,
) -> None:
    found = scenario("pieces_are_not_crossed")
    assert found == {"right": True, "split": 0, "pageable": 0, "faults": 0}


def test_pinning_can_be_turned_off(scenario: Scenario) -> None:
    assert scenario("pinning_is_off") == {"right": True, "registered": 0}


def test_a_process_pins_a_pool_once(scenario: Scenario) -> None:
    found = scenario("two_clients_pin_once")
    assert found == {"calls": 2, "right": True, "still": True, "warnings": []}, "64 MiB"


def start_to_pin(cuda: Cuda, daemon: Daemon, pinning: Path, **about: str) -> subprocess.Popen[str]:
    """An engine that pins the pool once it is told to."""
    engine = cuda.start(SCENARIOS, "pins_in_turn", daemon.address, PINNING=str(pinning), **about)
    assert engine.stdout is not None
    assert engine.stdout.readline() == "ready\n"
    return engine


def tell(engine: subprocess.Popen[str]) -> None:
    assert engine.stdin is not None
    engine.stdin.write("\n")
    engine.stdin.flush()


def test_engines_pin_in_turn(cuda: Cuda, daemon: Daemon, tmp_path: Path) -> None:
    """The driver's locks are the node's: calls of one engine hold up the launches of all."""
    pinning = tmp_path / "pinning"
    both = [start_to_pin(cuda, daemon, pinning, PATIENT="yes") for _ in range(2)]
    if cuda.is_standin:  # whose calls take no time by themselves
        cuda.control.register_delay_us = 2000
    for engine in both:
        tell(engine)
    outputs = [engine.communicate(timeout=HANG_S)[0] for engine in both]
    assert [json.loads(output)["calls"] for output in outputs] == [64, 64]
    engines = pinning.read_text().split()
    assert len(engines) == 2 * 2 * 64
    assert engines[::2] == engines[1::2], "each call ends before the next one begins"


def test_an_engine_that_is_stopped_as_it_pins_stops_no_other(
    cuda: Cuda, control: Control, daemon: Daemon, tmp_path: Path
) -> None:
    stuck, other = (start_to_pin(cuda, daemon, tmp_path / "pinning") for _ in range(2))
    control.register_delay_us, before = int(HANG_S * 1e6), control.counters().register_calls
    tell(stuck)
    eventually(lambda: control.counters().register_calls > before)
    with stopped(stuck.pid):
        control.register_delay_us = 0
        output, _ = other.communicate("\n", timeout=HANG_S)
    assert json.loads(output)["calls"] == 64


def test_operators_see_which_clients_have_pinned_the_pool(
    scenario: Scenario,
) -> None:
    assert scenario("shown_to_operators") == {"before": 0}


@DIRECTED
def test_a_client_may_be_closed_amid_its_copies(scenario: Scenario) -> None:
    found = scenario("closed_amid_copies")
    assert found == {"closed early": True, "right": True, "faults": 0}


@DIRECTED
@pytest.mark.parametrize("name", ["interrupted_put", "interrupted_in_a_pause"])
def test_an_interrupted_put_waits_for_its_copy(scenario: Scenario, name: str) -> None:
    assert scenario(name) == {"interrupted": True, "copy had ended": True}


@pytest.mark.parametrize("raised", ["exit", "timeout"])
def test_a_put_interrupted_before_it_waits_does_so_all_the_same(
    scenario: Scenario, raised: str
) -> None:
    found = scenario("interrupted_before_the_wait", RAISED=raised)
    assert found == {"interrupted": True, "copy had ended": True}


@DIRECTED
def test_a_code_that_the_bindings_do_not_know_is_a_failed_call(scenario: Scenario) -> None:
    found = scenario("codes_are_unknown")
    assert re.search("^cuEventSynchronize: unknown: .*123456", found.pop("says"))
    assert found == {"save": "DeviceError", "right": True, "put again": True}


@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_bindings_of_every_version_tell_of_a_code_that_they_do_not_know(
    kind: type[Exception],
) -> None:
    """cuda-bindings 12.9 and 13.0 raise KeyError, later ones ValueError."""

    def cuEventQuery(_: int) -> tuple[Any, ...]:  # noqa: N802
        raise kind(123456)

    with pytest.raises(CudaError, match="cuEventQuery: unknown: 123456"):
        result_of(cuEventQuery, 1)


@DIRECTED
def test_a_save_that_cannot_be_waited_for_keeps_its_memory(scenario: Scenario) -> None:
    found = scenario("waiting_is_refused_for_a_while")
    assert found == {"stored early": False, "wrong": [], "stored": True, "right": True}


@DIRECTED
def test_a_load_that_cannot_be_waited_for_keeps_its_entry(scenario: Scenario) -> None:
    found = scenario("loads_cannot_be_waited_for")
    assert found == {"right": [True, True], "faults": 0}


def test_copies_do_not_break_the_capture_of_a_graph(scenario: Scenario) -> None:
    found = scenario("graph_is_captured")
    assert found == {"stored": True, "right": True, "unpinned": True}


def test_two_threads_may_use_one_item(scenario: Scenario) -> None:
    found = scenario("item_of_two_threads")
    assert found["wrong"] == 0
    assert found["right"] >= 30
    assert found["right"] + found["refused"] == 45


def test_a_process_may_run_out_of_threads(scenario: Scenario) -> None:
    found = scenario("threads_run_out")
    refused = ["ecd-attach", "ecd-ends", "ecd-pin", "ecd-put"]
    assert found == {"refused": refused, "right": True, "held": False, "registered": 0}


@DIRECTED
def test_a_load_that_breaks_off_is_waited_for(scenario: Scenario) -> None:
    found = scenario("load_breaks_off")
    assert found == {"errors": [["DeviceBusy", True]] * 2, "faults": 0, "registered": 0}


def test_loads_of_a_step_are_whole_at_its_end(scenario: Scenario) -> None:
    assert scenario("loads_of_a_step") == {"right": [True] * 4, "faults": 0}


def test_holds_of_a_step_wake_no_thread_before_its_end(scenario: Scenario) -> None:
    found = scenario("holds_of_a_step_end_after_it")
    within, after, and_after_an_error, when_many = [0, 0, 0], 1, [1, 2], 3
    assert found == {
        "given": [*within, after, *and_after_an_error, when_many],
        "records": 1,
        "right": True,
    }


@DIRECTED
def test_a_load_is_held_though_one_of_its_step_has_ended(scenario: Scenario) -> None:
    assert scenario("end_is_asked_amid_a_step") == {"early": False, "right": True}


@DIRECTED
@pytest.mark.parametrize(("code", "error"), [("900", "DeviceBusy"), ("1", "DeviceError")])
def test_a_load_that_fails_takes_no_other_of_its_step_with_it(
    scenario: Scenario, code: str, error: str
) -> None:
    found = scenario("one_load_of_a_step_fails", CODE=code)
    assert found == {"errors": [error], "right": [True, True], "faults": 0}


@DIRECTED
def test_a_step_whose_end_cannot_be_marked_waits_for_its_loads(scenario: Scenario) -> None:
    assert scenario("end_of_a_step_fails") == {
        "the wait alone": ["", True, [True, True]],
        "all of it": ["cuEventRecord: CUDA_ERROR_INVALID_VALUE", True, [True, True]],
    }


def test_memory_may_lack_to_make_a_tensor_dense(scenario: Scenario) -> None:
    assert scenario("no_memory_to_make_it_dense") == {"error": "CUDA out of memory"}


@DIRECTED
def test_a_load_takes_memory_that_torch_keeps_for_the_model(scenario: Scenario) -> None:
    assert scenario("memory_is_left_for_the_model") == {"waited for": False, "right": True}


@DIRECTED
def test_a_failed_device_has_its_time_once(scenario: Scenario) -> None:
    assert scenario("holds_of_a_failed_device") == {"times": 1.0, "warnings": 1}


def test_the_default_stream_is_torchs(scenario: Scenario) -> None:
    assert scenario("default_stream_is_named") == {"streams": [1]}


def test_nobody_waits_for_a_pool_to_be_unpinned(scenario: Scenario) -> None:
    found = scenario("unpinning_takes_long")
    assert found == {"closed and forked meanwhile": True, "waits": 0}


def test_an_item_may_be_collected_amid_its_load(scenario: Scenario) -> None:
    assert scenario("collected_amid_a_load") == {"right": True, "faults": 0}


def test_a_process_that_forks_says_that_its_copies_may_outlast_it(scenario: Scenario) -> None:
    found = scenario("copies_outlast_their_process")
    assert found == {"words": [0, DMA, DMA_OUTLASTS, DMA_OUTLASTS, 0, DMA_OUTLASTS]}


def test_under_mps_copies_may_outlast_their_process(scenario: Scenario, tmp_path: Path) -> None:
    (tmp_path / "control").touch()
    found = scenario("copies_outlast_their_process", CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))
    assert found == {"words": [0, *[DMA_OUTLASTS] * 3, 0, DMA_OUTLASTS]}


def test_a_child_is_refused_a_client_though_its_parent_has_none_left(scenario: Scenario) -> None:
    assert scenario("child_after_its_parents_client") == {"right": True, "child": 0}


@DIRECTED
def test_a_lost_device_is_an_error_and_the_host_goes_on(scenario: Scenario) -> None:
    found = scenario("device_is_lost")
    assert found["errors"] == ["DeviceError", "DeviceError"]
    assert found["on the host"]


@DIRECTED
def test_a_copy_that_faults_stores_nothing(scenario: Scenario) -> None:
    assert scenario("copies_fail") == {
        "error": "DeviceError",
        "stored": True,
        "contained": [True, False, True],
    }


def test_a_process_uses_its_own_gpu_alone(scenario: Scenario, cuda: Cuda) -> None:
    variables = {**cuda.environment(devices=2), "GPU": "1"}
    assert scenario("second_gpu", **variables) == {"right": True, "contexts": 1}


def test_a_child_ends_nothing_of_its_parents_copies(scenario: Scenario) -> None:
    found = scenario("forked_amid_copies")
    assert found == {"child": 0, "right": True, "again": True, "faults": 0}


def test_only_a_process_that_the_daemon_knows_writes_by_dma(scenario: Scenario, cuda: Cuda) -> None:
    found = scenario("daemon_refuses_attaching")
    pageable = found.pop("pageable saves"), found.pop("pageable loads")
    assert found == {"stored": True, "right": True, "word": 1}
    assert pageable == (1, 0) or not cuda.is_standin


def test_tensors_come_back_as_they_were(scenario: Scenario) -> None:
    assert all(scenario("tensors_of_all_kinds")["right"])


RESTARTS = """
import sys, torch
sys.argv[1:] = ["", sys.argv[1]]
from scenarios import *
with Client(sys.argv[2]) as client:
    for number in range(3):
        client.wait_connected(HANG_S)
        pin(client)
        put(client, str(number), number)
        print(is_right(load(client, str(number)), number), flush=True)
        eventually(lambda: not client.connected and not pinned._pools and not pinned._leaving)
        assert control.counters().registrations == 1
        print("unpinned", flush=True)
        sys.stdin.readline()  # the daemon is there again
"""


def test_a_client_pins_again_after_a_restart(cuda: Cuda, daemon: Daemon) -> None:
    own = str(SCENARIOS.parent)
    path = ":".join([own, str(SCENARIOS.parents[1])])
    process = cuda.start(RESTARTS, daemon.address, PYTHONPATH=path)
    for _ in range(3):
        assert process.stdout.readline() == "True\n"
        daemon.kill()
        assert process.stdout.readline() == "unpinned\n"
        daemon.start()
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait(HANG_S) == 0


def test_the_daemon_has_no_context(cuda: Cuda, make_daemon: Callable[..., Daemon]) -> None:
    """Nor has it loaded the driver, which it could: its environment is that of an engine."""
    daemon = make_daemon(**cuda.environment()).start()
    done = cuda.run(SCENARIOS, "nothing_waits", daemon.address)
    assert done.returncode == 0
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "libcuda" not in maps
    if cuda.is_standin:
        contexts = cuda.control.counters().contexts
        assert contexts == 1, "of the client, which did not release it at its end"


def test_a_stopped_engine_amid_a_save_keeps_its_memory(
    cuda: Cuda, control: Control, daemon: Daemon
) -> None:
    """SIGSTOP stops the process and not its copies: nothing of its memory is reused."""
    process = cuda.start(
        "import sys; sys.argv[1:] = ['', sys.argv[1]]\n"
        "from scenarios import *\n"
        "with Client(sys.argv[2]) as client:\n"
        "    pin(client); put(client, 'first', 1)\n"
        "    control.hold = Hold.MIDDLE\n"
        "    stored = client.put_async('k', gpu.encode(SHAPE, torch.uint8, 2))\n"
        "    print('copying', flush=True)\n"
        "    print(stored.result(HANG_S), is_right(load(client, 'k'), 2), flush=True)\n",
        daemon.address,
        PYTHONPATH=":".join([str(SCENARIOS.parent), str(SCENARIOS.parents[1])]),
    )
    assert process.stdout.readline() == "copying\n"
    with Client(daemon.address) as client:
        with stopped(process.pid):
            for number in range(200):
                client.put_bytes(str(number), bytes([7]) * MIB, "uint8", (MIB,))
            control.hold = Hold.NOTHING
        assert process.stdout.readline() == "True True\n"
        for number in range(150, 200):
            if item := client.get(str(number)):
                with item:
                    assert set(item.view.tobytes()) == {7}
    assert process.wait(HANG_S) == 0


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize("without", ["", "D1"])
def test_a_dead_engines_save_lands_in_no_other_entry(
    cuda: Cuda, make_daemon: Callable[..., Daemon], tmp_path: Path, without: str
) -> None:
    """Its copy ends after another put lies there, if memory of the dead is given to others."""
    grace_is_over = tmp_path / "grace is over"
    daemon = make_daemon("8MiB", DMA_GRACE_UNTIL=str(grace_is_over))
    daemon.command = (sys.executable, str(STRESS), "--daemon", "--without", without)
    daemon.start()
    dead = Control(tmp_path / "cuda-dead")
    variables = environment(dead, afterlife=True)
    died = cuda.run(SCENARIOS, "dies_amid_a_save", daemon.address, check=False, **variables)
    [second_half] = re.findall(r"its second half lies at (\d+)", died.stdout)
    nbytes, keys = MIB // 4, [str(number) for number in range(200)]

    def is_given_back() -> bool:
        status = daemon.status()
        [pool] = status.pools
        return not (status.sessions or pool.granted_bytes or pool.reserved_bytes)

    if without:
        eventually(is_given_back)
    with Client(daemon.address) as client:

        def lies_there(key: str) -> bool:
            client.put_bytes(key, bytes([5]) * nbytes, "uint8", (nbytes,))
            with client.get(key) as item:
                return 0 <= item._hold.extent.offset - int(second_half) < MIB // 2

        assert any(map(lies_there, keys)) == bool(without)
        dead.hold = Hold.NOTHING
        eventually(lambda: dead.counters().finished == dead.counters().copies)
        contents = set()
        for item in filter(None, map(client.get, keys)):
            with item:
                contents |= set(item.view.tobytes())
    assert contents == ({5, 7} if without else {5})
    grace_is_over.touch()
    eventually(is_given_back)


WITHOUT_CUDA = """
import sys, torch
from support.waiting import HANG_S
torch.version.cuda, torch.version.hip = None, sys.argv[2] or None
torch.cuda.is_initialized = lambda: True
from ecd_client import Client
from ecd_proto.shm.session_page import DMA_WORD
with Client(sys.argv[1]) as client:
    tensor = torch.arange(1000)
    assert client.put("k", tensor)
    client.pin()
    with client.get("k") as item:
        assert torch.equal(item.to("cpu", non_blocking=True), tensor)
        assert item.to("meta").shape == (1000,)
    assert client.put_async("l", tensor).result(HANG_S)
    word = client._connection.session()._dma._words[DMA_WORD : DMA_WORD + 1]
    assert word[0] == 0

    class Elsewhere(torch.Tensor):
        is_cpu = property(lambda self: False)

    assert client.put_async("m", tensor.as_subclass(Elsewhere)).result(HANG_S)
    assert word[0] == 1  # a device may have copied it
    with client.get("m") as item:
        assert torch.equal(item.tensor, tensor)
assert "ecd_client.device.driver" not in sys.modules
"""


@pytest.mark.parametrize("hip", ["", "6.0"])
def test_without_cuda_none_of_it_is_loaded_and_torch_copies(
    cuda: Cuda, daemon: Daemon, hip: str
) -> None:
    """`meta` and a tensor that says it is elsewhere stand for other accelerators."""
    cuda.run(WITHOUT_CUDA, daemon.address, hip)
