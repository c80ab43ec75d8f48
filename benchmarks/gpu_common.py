"""Helpers of `gpu.py` and its parts: rows of its table, daemons, tensors, a pinned pool."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import end_daemon, start_daemon

from ecd_client import Client

GIB = 1 << 30
POOL_BYTES = 2 * GIB


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
        daemon, address = start_daemon(Path(directory), "gpu", pool_bytes, **settings)
        try:
            yield daemon.pid, address
        finally:
            end_daemon(daemon)


def new_tensor(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8, device="cuda")


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
