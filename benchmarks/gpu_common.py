"""Helpers of `gpu.py` and its parts: rows of its table, daemons, tensors, pools in a process."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import end_daemon, start_daemon

from ecd_client import Client
from ecd_client.device.pool import DevicePool

GIB = 1 << 30
POOL_BYTES = 2 * GIB
NEAR_BYTES = GIB
NEAR = {"ECD_DEVICE_POOL_BYTES": str(NEAR_BYTES)}
"""The setting of a daemon with a device pool."""


def gpu_name() -> str:
    said = smi("-i", "0", "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max")
    name, version, generation, width = (said.split(", ") + [""] * 4)[:4]
    if not version:
        return torch.cuda.get_device_name(0)
    return f"{name}, driver {version}, PCIe {generation} x{width}"


def smi(*asked: str) -> str:
    """What nvidia-smi says; "" where there is none."""
    try:
        command = ["nvidia-smi", *asked, "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


@dataclass
class Row:
    """One line of the table; `is_met` is None where there is no target."""

    measure: str
    found: str
    against: str = ""
    target: str = ""
    is_met: bool | None = None
    numbers: dict[str, Any] = field(default_factory=dict)


@contextmanager
def daemon_of(pool_bytes: int, **settings: str) -> Iterator[tuple[int, str]]:
    """A daemon of its own: its process, and its address."""
    with tempfile.TemporaryDirectory() as directory:
        name = Path(directory).name  # two run at one time
        daemon, address = start_daemon(Path(directory), name, pool_bytes, **settings)
        try:
            yield daemon.pid, address
        finally:
            end_daemon(daemon)


def new_tensor(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8, device="cuda")


def wrong_bytes(tensor: torch.Tensor) -> int:
    """How many bytes are not those of `new_tensor`, after the work queued on the current stream."""
    return int((tensor != 1).sum())


def used_bytes() -> int:
    """Memory of the current GPU that is in use, by all processes; this one has its context then."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def held_and_over_us(queue: Callable[[], object]) -> tuple[float, float]:
    """How long `queue` holds this thread, and until what it queues on the current stream is over.

    The GPU is idle when it begins.
    """
    over = torch.cuda.Event()
    torch.cuda.synchronize()
    started = time.perf_counter()
    queued = queue()  # referred to until the end
    held = time.perf_counter()
    over.record()
    while not over.query():
        pass
    took = time.perf_counter() - started
    del queued
    return (held - started) * 1e6, took * 1e6


def near_of(client: Client) -> DevicePool:
    """The device pool, once this process has mapped it."""
    torch.cuda.init()
    client.pin()
    deadline_s = time.monotonic() + 60.0
    while (pool := client._connection.session().near) is None:
        assert time.monotonic() < deadline_s, f"process {os.getpid()} has no device pool: see log"
        time.sleep(0.001)
    return pool


def wait_near(client: Client, key: str) -> None:
    """Wait until the device pool has a copy of the entry."""
    near_of(client)
    deadline_s = time.monotonic() + 30.0
    while True:
        item = client.get(key, timeout=10.0)  # anew: the daemon may list it only now
        assert item is not None
        with item:
            if item.device_view("cuda") is not None:  # else it has one made
                return
        assert time.monotonic() < deadline_s, f"no copy of {key} was made"
        time.sleep(0.01)


def wait_pinned(client: Client) -> float:
    """Pin the daemon's pool in this process; how many seconds it took."""
    torch.cuda.init()
    client.pin()
    deadline_s = time.monotonic() + 60.0
    while not (pinning := client.pinning).nbytes:
        assert pinning.failure is None, pinning.failure
        assert time.monotonic() < deadline_s, f"process {os.getpid()} pins nothing: see the log"
        time.sleep(0.001)
    dma = client._connection.session().pools.granted._dma
    assert dma is not None
    assert dma.may_write, "the daemon did not attach this process: see the log"
    return pinning.took_s
