"""Processes that use CUDA, on the stand-in or on a GPU, as ECD_TEST_CUDA says."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import warm
from support.cuda.standin import (
    Control,
    Hold,
    NotBuilt,
    environment,
    library_path,
    physical_bytes,
)
from support.processes import child, run
from support.waiting import HANG_S, eventually

TESTS = Path(__file__).parents[2]
IMPORTED = "torch.utils.dlpack", "grpc", "ecd_client.tensors", "ecd_proto.v1.cache_pb2_grpc"
"""By the Python that is forked for scripts: nothing that looks for a driver."""
LOST = 999  # CUDA_ERROR_UNKNOWN
COUNT_GPUS = """
from support.cuda.calls import call, cu
call(cu.cuInit, 0)
print(call(cu.cuDeviceGetCount))
"""

WITH_CONTEXT = """
from support.cuda.calls import say, use_device
use_device()
say("here")
"""
NVIDIA_SMI = "nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"


@contextlib.contextmanager
def warm_interpreter(directory: Path) -> Iterator[warm.Interpreter | None]:
    """A Python that has imported torch, which takes 2 s, and whose forks find the stand-in."""
    if os.environ.get("ECD_TEST_CUDA") == "device":
        yield None
        return
    environ = scripts_environment() | {"LD_LIBRARY_PATH": library_path(), "OMP_NUM_THREADS": "1"}
    interpreter = warm.Interpreter(sys.executable, IMPORTED, directory / "warm.log", environ)
    yield interpreter
    interpreter.close()


def scripts_environment() -> dict[str, str]:
    """This process's, without ecd's variables, and with what tests import."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ECD_")}
    paths = [str(TESTS), *filter(None, [own.get("PYTHONPATH")])]
    return own | {"PYTHONPATH": ":".join(paths)}


class Cuda:
    """Runs a test's scripts where CUDA's driver is found; all of them end with the test."""

    def __init__(self, directory: Path, interpreter: warm.Interpreter | None = None) -> None:
        """Fails the test where the stand-in is to be used and is not built.

        The interpreter, if there is one, is forked for scripts that are files.
        """
        self._interpreter = interpreter
        kind = os.environ.get("ECD_TEST_CUDA", "standin")
        if kind not in ("standin", "device"):
            pytest.fail(f"ECD_TEST_CUDA is standin or device, not {kind}")
        self.is_standin = kind == "standin"
        self._control = Control(directory / "cuda-control") if self.is_standin else None
        self._life = contextlib.ExitStack()
        if self._control is not None:
            try:
                environment(self._control)
            except NotBuilt as error:
                pytest.fail(str(error))

    @property
    def control(self) -> Control:
        """The stand-in's control page. Skips the test on a GPU."""
        if self._control is None:
            pytest.skip("a GPU can neither be directed nor watched as the stand-in is")
        return self._control

    def environment(self, devices: int = 1, afterlife: bool = False) -> dict[str, str]:
        """What a process needs to find the driver, to be added to the test's own variables.

        A real driver has no `afterlife`, and no more devices than the machine: with what it lacks
        the test is skipped there.
        """
        if self._control is not None or afterlife:
            return environment(self.control, devices, afterlife)
        return {} if devices == 1 else self._first_gpus(devices)

    def _first_gpus(self, number: int) -> dict[str, str]:
        """The variable that hides all GPUs but the first. Skips the test where they are fewer."""
        count = self._gpus
        if count < number:
            pytest.skip(f"needs {number} GPUs, and finds {count}")
        own = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = own.split(",") if own else [str(each) for each in range(count)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[:number])}

    @functools.cached_property
    def _gpus(self) -> int:
        """How many GPUs the driver finds."""
        return int(self.run(COUNT_GPUS).stdout)

    def processes_with_contexts(self) -> set[int]:
        """Those that nvidia-smi shows. Skips the test where it shows none from here."""
        known = self.start(WITH_CONTEXT)
        assert known.stdout is not None
        assert known.stdout.readline() == "here\n"
        try:
            asked = run(NVIDIA_SMI, capture_output=True, text=True, check=True)
        except OSError as error:
            pytest.skip(f"there is no nvidia-smi: {error}")
        shown = {int(pid) for pid in asked.stdout.split() if pid.isdigit()}
        if known.pid not in shown:
            pytest.skip("nvidia-smi shows no process from here")
        return shown

    def run(
        self, script: Path | str, *arguments: object, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script, which is a file or its text, to its end; its output is captured.

        Fails the test if the script fails, unless `check` is false. `variables` are added to the
        environment. What a file's script says on both outputs may stand in one.
        """
        if self._interpreter is not None and isinstance(script, Path):
            command = [str(script), *map(str, arguments)]
            with tempfile.TemporaryFile() as out:
                environ = {**self.environment(), **variables}
                code = warm.Fork(self._interpreter, command, out, **environ).end(HANG_S)
                out.seek(0)
                text = out.read().decode()
            assert not check or code == 0, text
            return subprocess.CompletedProcess(command, code, text, text)
        process = self._popen(script, arguments, variables, stderr=subprocess.PIPE)
        output, errors = process.communicate(timeout=HANG_S)
        done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
        assert not check or done.returncode == 0, errors
        return done

    def start(
        self, script: Path | str, *arguments: object, **variables: str
    ) -> subprocess.Popen[str]:
        """Start a script, with pipes to its standard input and from its standard output."""
        return self._popen(script, arguments, variables, stderr=None)

    def _popen(
        self,
        script: Path | str,
        arguments: tuple[object, ...],
        variables: dict[str, str],
        **kw: Any,
    ) -> subprocess.Popen[str]:
        what = [str(script)] if isinstance(script, Path) else ["-c", script]
        running = child(
            [sys.executable, *what, *map(str, arguments)],
            env={**scripts_environment(), **self.environment(), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **kw,
        )
        return self._life.enter_context(running)

    def close(self) -> None:
        """End all scripts, and their copies. Fails the test if device memory is left."""
        self._life.close()
        if self._control is not None:
            control = self._control
            control.hold, control.lost = Hold.NOTHING, LOST
            eventually(lambda: physical_bytes(control) == 0, what="device memory freed")
