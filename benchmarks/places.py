"""The daemon, directory or servers between the processes that a peer serves."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import MIB, end_daemon, open_store, start_daemon
from peers import ALONE, ECD, EXAMPLE, FILES, REDIS


@contextlib.contextmanager
def open_place(name: str, nbytes: int) -> Iterator[str]:
    """Open the peer's place, with room for `nbytes`; yields the address of it."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if name == ECD:
            daemon, address = start_daemon(directory, "ecd", nbytes)
            stack.callback(end_daemon, daemon)
            yield address
        elif name in (FILES, ALONE, EXAMPLE):
            files = tempfile.mkdtemp(dir="/dev/shm", prefix="ecd-bench-")
            stack.callback(shutil.rmtree, files)
            yield files
        elif name == REDIS:
            path = directory / "redis.sock"
            limits = ["--maxmemory", str(nbytes), "--maxmemory-policy", "allkeys-lru"]
            stack.callback(
                _end,
                subprocess.Popen(
                    ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", *limits],
                    cwd=directory,
                    stdout=subprocess.DEVNULL,
                ),
            )
            _wait_for(path.exists)
            yield str(path)
        else:
            yield _start_store(directory, nbytes, stack)


def _start_store(directory: Path, nbytes: int, stack: contextlib.ExitStack) -> str:
    """A master, and a process that has the memory: this one."""
    import mooncake

    rpc, metrics = (_free_port() for _ in range(2))
    binary = Path(mooncake.__file__).parent / "mooncake_master"
    ports = [f"--rpc_port={rpc}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"]
    with (directory / "master.log").open("wb") as log:
        stack.callback(_end, subprocess.Popen([binary, *ports], stdout=log, stderr=log))
    _wait_for(lambda: _answers(rpc))
    segment_bytes = 4 * nbytes  # as it refuses puts before it has evicted
    host = open_store(f"127.0.0.1:{rpc}", segment_bytes)
    stack.callback(host.close)
    filler = bytes(16 * MIB)  # its memory is touched, as it is after some hours
    for number in range(segment_bytes * 9 // 10 // len(filler)):
        assert host.put(f"filler/{number}", filler) == 0
    assert host.remove_all() >= 0
    return f"127.0.0.1:{rpc}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _wait_for(ready: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline_s, "it does not start"
        time.sleep(0.05)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
