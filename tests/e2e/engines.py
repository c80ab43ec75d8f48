"""Real vLLM engines in processes of their own, driven by the tests."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VERSIONS = ("0.32.0", "0.28.0")
START_S = 480.0
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Else an engine's first request compiles what counts logprobs: 15 s."""


def python_of(version: str) -> Path:
    return ROOT / ".venvs" / f"vllm-{version}" / "bin" / "python"


def installed(version: str) -> str:
    """The version, if it is installed. A missing one skips the test, or fails it if required."""
    if not (python_of(version).parents[1] / ".ready").exists():
        if os.environ.get("ECD_REQUIRE_VLLM"):
            pytest.fail(f"vLLM {version} is not installed, and ECD_REQUIRE_VLLM is set")
        pytest.skip(f"vLLM {version} IS NOT INSTALLED: `make vllm` says why")
    return version


@cache
def scratch() -> str:
    """A directory for vLLM's sockets, stores and compiled code, removed with this process."""
    directory = tempfile.mkdtemp(prefix="ecd-vllm-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def environment(version: str, **extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ECD_", "PYTHON", "VLLM"))}
    return kept | {
        "PYTHONPATH": str(HERE / "site"),
        "TMPDIR": scratch(),
        "VLLM_CACHE_ROOT": str(python_of(version).parents[1] / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **extra,
    }


@cache
def warm_interpreter(version: str) -> socket.socket:
    """The process that forks others with this vLLM imported; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, (Path(scratch()) / f"warm-{version}.log").open("wb") as log:
        subprocess.Popen(
            [str(python_of(version)), str(HERE / "warm_interpreter.py"), str(theirs.fileno())],
            env=environment(version, **EAGER),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours


class Fork:
    """A script run by a fork of a warm interpreter, with the part of Popen that is used here."""

    def __init__(
        self, version: str, command: Sequence[str], out: IO[bytes], *passed: int, **environ: str
    ) -> None:
        """The numbers of the descriptors `passed` become the script's first arguments."""
        self._ended, tell = os.pipe()
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        message = json.dumps([command, environ]).encode()
        descriptors = [read, out.fileno(), tell, *passed]
        socket.send_fds(warm_interpreter(version), [message], descriptors)
        os.close(read)
        os.close(tell)
        told = os.read(self._ended, 4)
        assert told, (Path(scratch()) / f"warm-{version}.log").read_text()[-6000:]
        (self.pid,) = struct.unpack("i", told)
        self._code: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            (self._code,) = struct.unpack("i", os.read(self._ended, 4))
            os.close(self._ended)
        return self._code


def output_of(version: str, script: str, *arguments: str) -> str:
    """Run a script of this directory in a vLLM environment; returns its output."""
    with tempfile.TemporaryFile() as out:
        ran = Fork(version, [str(HERE / script), *arguments], out)
        ran.stdin.close()
        code = ran.wait(300)
        out.seek(0)
        text = out.read().decode(errors="replace")
    assert code == 0, text[-9000:]
    return text


def make_model(version: str, kind: str, directory: Path) -> Path:
    output_of(version, "tiny_models.py", kind, str(directory))
    return directory


def result_of(version: str, script: str, *arguments: str) -> Any:
    """The JSON that a script prints behind RESULT."""
    printed = output_of(version, script, *arguments).splitlines()
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
    """One engine. `start` returns at once, the first command waits until it is ready."""

    def __init__(
        self, version: str, log: Path, setup: dict, prefix: Sequence[str] = (), **environ: str
    ) -> None:
        """`prefix` is what runs the engine on another node."""
        self.log = log
        reader, writer = os.pipe()
        script, told = str(HERE / "engine_process.py"), json.dumps(setup)
        self._process: subprocess.Popen[bytes] | Fork
        with log.open("wb") as out:
            if prefix or "PYTHONPATH" in environ:  # a fork is on this node, and has its path
                self._process = subprocess.Popen(
                    [*prefix, str(python_of(version)), script, str(writer), told],
                    env=environment(version, **environ),
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    pass_fds=[writer],
                    start_new_session=True,
                )
            else:
                self._process = Fork(version, [script, told], out, writer, **environ)
        os.close(writer)
        self._replies = os.fdopen(reader)
        self._ready = False

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

    def receive(self, timeout: float = 120.0) -> dict:
        return self._read(timeout)

    def generate(self, requests: list[dict], **options: object) -> dict:
        self.send({"do": "generate", "requests": requests, **options})
        return self.receive()

    def metrics(self) -> dict[str, int]:
        self.send({"do": "metrics"})
        return {k.removeprefix("vllm:ecd_"): v for k, v in self.receive().items()}

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """End the engine. It has to end without an error, whatever is loaded into it."""
        shared = shared_memory_of(self._process.pid)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        ended = self._process.poll()
        if ended is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._replies.close()
        for file in shared:  # vLLM's ranks leave theirs behind
            file.unlink(missing_ok=True)
        assert ended == 0 or not self._ready, f"the engine's end: {ended}\n{self.text()[-6000:]}"

    def _read(self, timeout: float) -> dict:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if select.select([self._replies], [], [], 0.5)[0]:
                line = self._replies.readline()
                assert line, f"the engine ended:\n{self.text()[-6000:]}"
                return json.loads(line)
            assert self.alive, f"the engine ended:\n{self.text()[-6000:]}"
        raise AssertionError(f"no answer within {timeout} s:\n{self.text()[-6000:]}")
