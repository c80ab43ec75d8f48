"""The checks of `ecd-cli doctor` where the machine has a GPU of NVIDIA's."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ecd_client.device.accelerator import BINDINGS_SINCE
from ecd_client.device.dma import is_wanted, mps_place
from ecd_proto.findings import DOUBTFUL, GOOD, Finding, device_pool
from ecd_proto.shm.session_page import (
    DMA_BLIND_GRACE_S,
    DMA_GRACE_S,
    DMA_LIMIT_S,
    SO_PEERPIDFD,
)
from ecd_proto.v1 import cache_pb2 as pb

DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")


def examine_gpu(status: pb.StatusReply | None) -> Iterator[Finding]:
    """Check whether engines of this environment can pin the pool; one line without a GPU."""
    has_devices = any(DEVICES.glob("nvidia[0-9]*"))
    if not (DRIVER.exists() or has_devices):
        yield Finding("GPU", GOOD, "no NVIDIA GPU on this machine: nothing to pin")
        return
    yield _driver(has_devices)
    yield _bindings()
    yield _setting()
    yield _killed_engines(0 if status is None else status.waiting_for_dma)
    if place := mps_place():
        yield _mps(place)
    for pool in () if status is None else status.pools:
        if pool.kind == "device":
            yield device_pool(pool)


def _driver(has_devices: bool) -> Finding:
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text())
    except OSError:
        advice = "load the driver's kernel module: nvidia-smi says what is wrong"
        return Finding("GPU", DOUBTFUL, f"a device, but no {DRIVER}", advice)
    driver = f"NVIDIA driver {found[0] if found else 'of an unknown version'}"
    if not has_devices:
        driver += ", no device here; run ecd-cli of the engines' environment to check it"
    return Finding("GPU", GOOD, driver)


def _bindings() -> Finding:
    """Check for the package by which engines pin memory; the daemon needs none."""
    wanted = ".".join(map(str, BINDINGS_SINCE))
    install = f"in the engines' environment: pip install 'cuda-bindings>={wanted}'"
    try:
        installed = version("cuda-bindings")
    except PackageNotFoundError:
        if find_spec("torch") is None:
            found = "not in this environment; run ecd-cli of the engines' one to check it"
            return Finding("cuda-bindings", GOOD, found)
        return Finding("cuda-bindings", DOUBTFUL, "is missing: nothing is pinned", install)
    try:
        import_module("cuda.bindings.driver")
    except Exception as error:  # such as an extension that was built for another Python
        return Finding("cuda-bindings", DOUBTFUL, f"{installed} does not load: {error}", install)
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < BINDINGS_SINCE:
        found = f"{installed} is too old: nothing is pinned"
        return Finding("cuda-bindings", DOUBTFUL, found, install)
    return Finding("cuda-bindings", GOOD, installed)


def _setting() -> Finding:
    value = os.environ.get("ECD_PIN")
    if not is_wanted():
        found = f"{value}: engines of this environment pin nothing, and their copies are slower"
        return Finding("ECD_PIN", DOUBTFUL, found, "unset it, unless that is meant")
    if value is not None and value.strip().lower() != "auto":
        return Finding("ECD_PIN", DOUBTFUL, f"{value!r} counts as auto", "set it to auto or off")
    return Finding("ECD_PIN", GOOD, "auto: engines pin the pool")


def _killed_engines(waiting: int) -> Finding:
    """Check how long memory is kept that a killed engine's GPU may still write (rule D1)."""
    waits = f"; {waiting} of them wait now" if waiting else ""
    if _has_peer_pidfds():
        found = f"their memory is free {DMA_GRACE_S:.0f} s after their end{waits}"
        return Finding("killed engines", GOOD, found)
    found = f"their memory is free {DMA_BLIND_GRACE_S:.0f} s after their end{waits}"
    advice = f"Linux 6.5 or newer, which shows their end: {DMA_GRACE_S:.0f} s"
    return Finding("killed engines", DOUBTFUL, found, advice)


def _mps(place: str) -> Finding:
    """Warn of CUDA's MPS, whose server has the work of engines that were killed."""
    found = f"{place} has a server: copies of a killed engine may go on there, without a known end"
    advice = f"run engines without MPS; their memory is kept {DMA_LIMIT_S:.0f} s after their end"
    return Finding("MPS", DOUBTFUL, found, advice)


def _has_peer_pidfds() -> bool:
    """Whether this kernel gives a pidfd of a socket's peer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError as error:
            return error.errno != errno.ENOPROTOOPT
    return True
