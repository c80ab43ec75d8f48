"""Real vLLM engines in processes of their own, driven by the tests."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from support import warm
from support.daemon import Daemon, node_of
from support.processes import end, start
from support.waiting import HANG_S

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VERSIONS = ("0.32.0", "0.28.0")
NEXT = "0.33.0"
"""The vLLM that has no build for CPUs: its Python runs over the kernels of VERSIONS[0]."""
NIGHTLY = pytest.param(NEXT, marks=pytest.mark.night)
PATHS = HERE / "site", HERE.parent, HERE, ROOT / "client", ROOT / "proto", ROOT / ".venvs/models"
"""What vLLM's processes import besides; the last has what some models need and vLLM lacks."""
START_S = 480.0
"""How long vLLM may take to start: its processes import it anew, beside other tests' processes."""
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Else an engine's first request compiles what counts logprobs: 15 s."""

IMPORTED = (
    *("vllm.entrypoints.llm", "vllm.engine.arg_utils", "vllm.v1.engine.llm_engine"),
    *("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.entrypoints.openai.api_server"),
    *("vllm.model_executor.models.qwen2_5_vl", "vllm.model_executor.models.qwen3_vl"),
    *("e2e.preload", "ecd_client.vllm"),
)
"""By the Python that is forked for engines, which takes ten seconds."""
SPREAD = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""An engine with workers in processes of their own, which share the cores."""


def last_words(log: str) -> str:
    """The end of a log, after its lines of errors: a child's stand far before its parent's."""
    errors = [line for line in log.splitlines() if re.search(r"ERROR|Error: ", line)]
    return "\n".join([*errors[:40], "[...]", log[-6000:]])


def python_of(version: str) -> Path:
    return ROOT / ".venvs" / f"vllm-{version}" / "bin" / "python"


def installed(version: str) -> str:
    """The version, if it is installed. A missing one skips the test, or fails it if required."""
    require(f"vllm-{version}")
    return version


def require(name: str) -> None:
    """Skip the test, or fail it if all are required, unless an environment is there."""
    if not (ROOT / ".venvs" / name / ".ready").exists():
        if os.environ.get("ECD_REQUIRE_VLLM"):
            pytest.fail(f"{name} is not installed, and ECD_REQUIRE_VLLM is set")
        pytest.skip(f"{name} IS NOT INSTALLED: `make vllm` says why")


@cache
def scratch() -> str:
    """A directory for vLLM's sockets, stores and compiled code, removed with this process."""
    directory = tempfile.mkdtemp(prefix="ecd-vllm-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def environment(version: str, **extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ECD_", "PYTHON", "VLLM"))}
    return kept | {
        "PYTHONPATH": ":".join(map(str, PATHS)),
        "TMPDIR": scratch(),
        "VLLM_CACHE_ROOT": str(python_of(version).parents[1] / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **extra,
    }


_warm: dict[str, warm.Interpreter] = {}
_keepers: list[Sequence[str]] = []


@contextlib.contextmanager
def kept_warm(*more: str) -> Iterator[None]:
    """Within the block each version's interpreter, once started, stays for further forks.

    One that starts there imports `more` modules.
    """
    _keepers.append(more)
    try:
        yield
    finally:
        _keepers.pop()
        _cool()


def _cool() -> None:
    for version, each in list(_warm.items()):
        if not _keepers and not each.forks:
            _warm.pop(version).close()


class Fork(warm.Fork):
    """A script run by a fork of a Python which has imported this vLLM."""

    def __init__(self, version: str, *args: Any, **how: Any) -> None:
        if version not in _warm:
            python, log = python_of(version), Path(scratch()) / f"warm-{version}.log"
            modules = [*IMPORTED, *(each for more in _keepers for each in more)]
            _warm[version] = warm.Interpreter(python, modules, log, environment(version, **EAGER))
        super().__init__(_warm[version], *args, **how)

    def wait(self, timeout: float = HANG_S) -> int:
        code = super().wait(timeout)
        _cool()
        return code


def output_of(version: str, script: str, *arguments: str, **environ: str) -> str:
    """Run a script of this directory in a vLLM environment; returns its output."""
    with tempfile.TemporaryFile() as out:
        ran = Fork(version, [str(HERE / script), *arguments], out, **environ)
        code = ran.end(START_S)
        out.seek(0)
        text = out.read().decode(errors="replace")
    assert code == 0, text[-9000:]
    return text


def make_model(version: str, kind: str, directory: Path) -> Path:
    output_of(version, "tiny_models.py", kind, str(directory))
    return directory


def result_of(version: str, script: str, *arguments: str, **environ: str) -> Any:
    """The JSON that a script prints behind RESULT."""
    printed = output_of(version, script, *arguments, **environ).splitlines()
    [line] = [line for line in printed if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def shared_memory_of(group: int) -> set[Path]:
    """The files in /dev/shm through which a group of vLLM's processes talk to each other."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                names = r"/dev/shm/(?:vllm_dist|psm_|sem\.mp-)\S+"
                found |= set(map(Path, re.findall(names, (process / "maps").read_text())))
    return found


class Engine:
    """One engine. It is started at once, and the first command waits until it is ready."""

    def __init__(
        self, version: str, log: Path, setup: dict, prefix: Sequence[str] = (), **environ: str
    ) -> None:
        """`prefix` is a Node's; `PYTHONPATH` among `environ` has the engine import vLLM anew."""
        self.log = log
        reader, writer = os.pipe()
        script, told = str(HERE / "engine_process.py"), json.dumps(setup)
        sizes = "tensor_parallel_size", "pipeline_parallel_size"
        ranks = prod(setup.get("engine", {}).get(size, 1) for size in sizes)
        self._process: subprocess.Popen[bytes] | Fork
        with log.open("wb") as out:
            if "PYTHONPATH" in environ:
                self._process = start(
                    [*prefix, str(python_of(version)), script, str(writer), told],
                    env=environment(version, **environ),
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    pass_fds=[writer],
                )
            else:
                node = node_of(prefix)
                assert node is not None, prefix
                is_apart = environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1"
                spares = [1, ranks] if ranks > 1 else [1] if is_apart else []
                how = {"node": node, "spares": spares}
                self._process = Fork(version, [script, told], out, writer, **how, **environ)
        os.close(writer)
        self._replies = os.fdopen(reader)
        self._ready = False
        self.closed = False
        self.owes = 0
        """Replies that it has not been asked for."""
        self.daemon: Daemon | None = None

    def wait_ready(self) -> Engine:
        if not self._ready:
            assert self._read(START_S) == {"ready": True}
            self._ready = True
        return self

    def send(self, command: dict) -> None:
        self.wait_ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        self.owes += 1

    def receive(self, timeout: float = START_S) -> dict:
        reply = self._read(timeout)
        self.owes -= 1
        return reply

    def do(self, what: str, **more: object) -> dict:
        self.send({"do": what, **more})
        return self.receive()

    def generate(self, requests: list[dict], **options: object) -> dict:
        return self.do("generate", requests=requests, **options)

    def metrics(self) -> dict[str, int]:
        return {k.removeprefix("vllm:ecd_"): v for k, v in self.do("metrics").items()}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL; there is nothing to close then."""
        self.closed = True
        end_of(self._process)
        self._replies.close()

    def close(self) -> None:
        """End the engine. It has to end without an error, whatever is loaded into it."""
        if self.closed:
            return
        self.closed = True
        shared = shared_memory_of(self._process.pid)
        ended = end_of(self._process, HANG_S)
        self._replies.close()
        for file in shared:  # vLLM's ranks leave theirs behind
            file.unlink(missing_ok=True)
        assert ended == 0 or not self._ready, (
            f"the engine's end: {ended}\n{last_words(self.text())}"
        )

    def _read(self, timeout: float) -> dict:
        """The next reply. An engine that ends closes its end of the pipe."""
        is_there = select.select([self._replies], [], [], timeout)[0]
        assert is_there, f"no answer within {timeout:.0f} s:\n{last_words(self.text())}"
        line = self._replies.readline()
        assert line, f"the engine ended:\n{last_words(self.text())}"
        return json.loads(line)


def end_of(process: subprocess.Popen[bytes] | Fork, grace_s: float = 0.0) -> int:
    """End a process, which may end by itself in `grace_s` as its input does; returns its code."""
    if isinstance(process, Fork):
        return process.end(grace_s)
    with contextlib.suppress(BrokenPipeError, AttributeError):  # it has none
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    end(process)
    return process.returncode
