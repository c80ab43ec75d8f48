"""Processes that are killed in the middle of copies from a GPU to shared memory.

`watch` tells how long bytes still change after the kill: it settles the grace of rule D1. `survive`
kills engines of a real daemon and compares every byte that the daemon serves meanwhile. Only
`gpu.py` runs this file; as a script it is one of the processes that are killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from common import MIB
from gpu_common import wait_pinned

from ecd_client import Client, EcdError
from ecd_proto.mapped_file import MappedFile
from ecd_proto.shm.files import is_byte_locked, lock_byte

WATCHED_BYTES = 64 * MIB
QUEUED = 500
"""Copies of that size that a writer has asked for ahead: 0.6 s of work at 50 GB/s."""
KILLS = 30
WATCHED_S = 2.0
"""How long bytes are watched after the process's end."""
STEP = MIB // 8
"""Words from one that is watched to the next."""
KEYS = 250
ENTRY_BYTES = 4 * MIB
ENGINES = 3
SURVIVED_S = 60.0


class Kill(NamedTuple):
    """Milliseconds from a SIGKILL to what followed it."""

    lock_free: float
    process_ended: float
    last_change: float


# -- how long bytes change -------------------------------------------------------------------------


def watch() -> list[Kill]:
    """Kill writers, each in the middle of its copies."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ecd-bench-") as directory:
        path = Path(directory) / "file"
        with path.open("xb") as file:
            file.truncate(WATCHED_BYTES)
        path.with_suffix(".lock").touch()
        return [_watch_one(path) for _ in range(KILLS)]


def _watch_one(path: Path) -> Kill:
    with contextlib.ExitStack() as stack:
        fds = [os.open(each, os.O_RDWR) for each in (path, path.with_suffix(".lock"))]
        for fd in fds:
            stack.callback(os.close, fd)
        words = MappedFile(fds[0], WATCHED_BYTES, writable=False).view(0, WATCHED_BYTES).cast("Q")
        watched = words[::STEP]
        command = [sys.executable, __file__, "write", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"copying\n", "the writer failed"
            time.sleep(0.05 + random.random() * 0.2)
            pidfd = os.pidfd_open(process.pid)
            stack.callback(os.close, pidfd)
            process.kill()
            return _follow(watched, fds[1], pidfd)


def _follow(watched: memoryview, lock_fd: int, pidfd: int) -> Kill:
    """Look at the words, the lock and the process again and again, until nothing can follow."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    killed_s = changed_s = time.monotonic()
    free_s: float | None = None
    ended_s: float | None = None
    last = watched.tobytes()
    while True:
        now_s = time.monotonic()
        if (seen := watched.tobytes()) != last:
            last, changed_s = seen, now_s
        if free_s is None and not is_byte_locked(lock_fd, 0):
            free_s = now_s
        if ended_s is None and poll.poll(0):
            ended_s = now_s
        if free_s is not None and ended_s is not None and now_s - ended_s > WATCHED_S:
            return Kill(*((each - killed_s) * 1e3 for each in (free_s, ended_s, changed_s)))


def write(path: str) -> None:
    """Copy two contents by turns to a file until this process is killed; one of those processes."""
    from cuda.bindings import driver as cuda

    from ecd_client.device import driver

    fd = os.open(path, os.O_RDWR)
    target = MappedFile(fd, WATCHED_BYTES, writable=True)
    with driver.on(0):
        driver.register(target.address, target.nbytes)
        result, stream = cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        assert result == cuda.CUresult.CUDA_SUCCESS, result
        sources = []
        for byte in (0x55, 0xAA):
            result, source = cuda.cuMemAlloc(WATCHED_BYTES)
            assert result == cuda.CUresult.CUDA_SUCCESS, result
            cuda.cuMemsetD8Async(source, byte, WATCHED_BYTES, stream)
            sources.append(int(source))
        # As in an engine: the lock's file is opened after the GPU's, and so is closed after them.
        lock_byte(os.open(Path(path).with_suffix(".lock"), os.O_RDWR), 0)
        asked: deque[driver.Event] = deque()
        for number in range(sys.maxsize):
            driver.copy(target.address, sources[number % 2], WATCHED_BYTES, int(stream))
            asked.append(driver.Event(0, int(stream)))
            if number == 1:
                asked[0].wait()
                print("copying", flush=True)
            if len(asked) > QUEUED:
                asked.popleft().wait()


# -- no wrong byte ---------------------------------------------------------------------------------


def survive(address: str) -> dict[str, int]:
    """Kill engines within their saves, and use their memory again by the CPU at once."""
    found = {"kills": 0, "checked": 0, "wrong": 0}
    with Client(address, namespace="kills") as client, _nurseries(address) as nurseries:
        until_s = time.monotonic() + SURVIVED_S
        while time.monotonic() < until_s:
            number = random.randrange(KEYS)
            content = bytes([number]) * ENTRY_BYTES
            with contextlib.suppress(EcdError):  # full of what the dead have held
                if (item := client.get(str(number))) is None:
                    client.put_bytes(str(number), content, "uint8", (ENTRY_BYTES,))
                    continue
                with item:
                    found["checked"] += 1
                    found["wrong"] += item.view.tobytes() != content
        for nursery in nurseries:
            assert nursery.poll() is None, "an engine failed"
            os.killpg(nursery.pid, signal.SIGKILL)  # its engine, too, has the pipe
            assert nursery.stdout is not None
            found["kills"] += nursery.stdout.read().count(b"killed\n")
    return found


@contextlib.contextmanager
def _nurseries(address: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, __file__, "raise_engines", address]
    nurseries = [
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(ENGINES)
    ]
    try:
        yield nurseries
    finally:
        for nursery in nurseries:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(nursery.pid, signal.SIGKILL)
            nursery.wait()


def raise_engines(address: str) -> None:
    """Fork engines, which begin quickly, and kill each within its saves; one of those processes."""
    import_module("torch")
    while True:
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(told)
            random.seed(os.getpid())
            _save_without_end(address, tell)
        os.close(tell)
        assert os.read(told, 1), "the engine failed"
        time.sleep(random.random() * 0.3)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        print("killed", flush=True)


def _save_without_end(address: str, tell: int) -> None:
    import torch

    with Client(address, namespace="kills") as client:
        wait_pinned(client)
        while True:
            number = random.randrange(KEYS)
            tensor = torch.full((ENTRY_BYTES,), number, dtype=torch.uint8, device="cuda")
            with contextlib.suppress(EcdError):
                client.put_async(str(number), tensor)
                os.write(tell, b".")
            time.sleep(0.0005)


if __name__ == "__main__":
    {"write": write, "raise_engines": raise_engines}[sys.argv[1]](sys.argv[2])
