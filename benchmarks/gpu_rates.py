"""What `gpu.py` measures of memory: the rates of copies, registration, the stalls beside it."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from common import MIB, timed_us
from gpu_common import GIB, POOL_BYTES, Row, daemon_of, new_tensor, wait_pinned

from ecd_client import Client
from ecd_client.device.pinned import PIECE_BYTES, PinnedPool
from ecd_client.values import Parts
from ecd_proto.mapped_file import HUGE_BYTES, MappedFile

SIZES = {f"{kib} KiB": kib << 10 for kib in (64, 256)} | {
    f"{mib} MiB": mib * MIB for mib in (1, 4, 8, 32, 128)
}
LARGEST = max(SIZES.values())
POOL, RIVAL, UNREGISTERED = "the pinned pool", "pin_memory", "the pool, not registered"
BATCH_BYTES, MOST_COPIES = 256 * MIB, 200
"""Copies of one measurement, queued one behind the other."""
ROUNDS = 9
REGISTERED = (GIB, 4 * GIB, 16 * GIB)
STALL_ROUNDS = 5
LAUNCHES = 256
"""Launches between two waits for the GPU, so that its queue is never full."""


# -- copies ----------------------------------------------------------------------------------------


def copies() -> list[Row]:
    """Rates from and to the pool as a client has it, pinned and mapped, beside pin_memory."""
    from ecd_client.device import driver

    with daemon_of(POOL_BYTES) as (_, address), Client(address) as client:
        wait_pinned(client)
        pool = client._connection.session().pools.granted
        assert pool._pinned is not None
        mapped = pool._map_writable()
        mapped.populate(0, LARGEST)
        rival = torch.zeros(LARGEST, dtype=torch.uint8, pin_memory=True)
        places: dict[str, Callable[[int], Parts]] = {
            POOL: partial(pool._pinned.parts, 0),  # no copy crosses two registrations
            RIVAL: lambda nbytes: [(rival.data_ptr(), nbytes)],
            UNREGISTERED: lambda nbytes: [(mapped.address, nbytes)],
        }
        stream = torch.cuda.Stream()
        device = new_tensor(LARGEST)
        torch.cuda.synchronize()
        rows = []
        with driver.on(torch.cuda.current_device()):
            for name, nbytes in SIZES.items():
                rates = _rates(places, device.data_ptr(), nbytes, stream.cuda_stream)
                rows += [_rate_row(way, name, nbytes, each) for way, each in rates.items()]
    return rows


def _rates(
    places: dict[str, Callable[[int], Parts]], device: int, nbytes: int, stream: int
) -> dict[str, dict[str, float]]:
    """GB/s by direction and place of the host memory, which a size has in parts."""
    from ecd_client.device import driver

    number = max(1, min(MOST_COPIES, BATCH_BYTES // nbytes))
    took: dict[tuple[str, str], list[float]] = defaultdict(list)

    def copy(way: str, parts: Parts) -> None:
        for _ in range(number):
            at = device
            for address, part in parts:
                to, source = (at, address) if way == "H2D" else (address, at)
                driver.copy(to, source, part, stream)
                at += part
        driver.Event(torch.cuda.current_device(), stream).wait()

    for _ in range(ROUNDS + 1):
        for place, parts_of in places.items():
            for way in ("H2D", "D2H"):
                took[way, place].append(timed_us(partial(copy, way, parts_of(nbytes))))
    return {
        way: {p: number * nbytes / median(took[way, p][1:]) / 1e3 for p in places}
        for way in ("H2D", "D2H")
    }


def _rate_row(way: str, name: str, nbytes: int, rates: dict[str, float]) -> Row:
    ratio = rates[POOL] / rates[RIVAL]
    is_judged = nbytes >= 4 * MIB
    return Row(
        f"{way} {name}, {POOL}",
        f"{rates[POOL]:.1f} GB/s, {ratio:.2f} of {RIVAL}",
        f"{RIVAL} {rates[RIVAL]:.1f}; not registered {rates[UNREGISTERED]:.1f}",
        ">= 0.97" if is_judged else "",
        ratio >= 0.97 if is_judged else None,
        rates,
    )


# -- registration ----------------------------------------------------------------------------------


def registration() -> list[Row]:
    rows = []
    for nbytes in REGISTERED:
        size = f"{nbytes // GIB} GiB"
        if nbytes + 4 * GIB > _available_bytes():
            rows.append(Row(f"registration of {size}", "left out: too little memory is free"))
            continue
        rival_s = _alloc_host_s(nbytes)
        for is_huge in (False, True):
            took = _register_s(nbytes, is_huge)
            if took is None:
                rows.append(Row(f"registration of {size}, huge pages", "left out: none to be had"))
                continue
            pin_s, unpin_s = took
            each_s = pin_s / (nbytes / GIB)
            rows.append(
                Row(
                    f"registration of {size}, {'huge' if is_huge else 'small'} pages",
                    f"{each_s:.3f} s/GiB; undone in {unpin_s / (nbytes / GIB):.3f} s/GiB",
                    f"cuMemHostAlloc {rival_s / (nbytes / GIB):.3f} s/GiB",
                    "<= 0.15 s/GiB",
                    each_s <= 0.15,
                    {"bytes": nbytes, "pin_s": pin_s, "unpin_s": unpin_s, "alloc_s": rival_s},
                )
            )
    return rows


def _available_bytes() -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return int(found[1]) << 10 if found else 0


def _register_s(nbytes: int, is_huge: bool) -> tuple[float, float] | None:
    """Seconds to register shared memory in pieces, and to undo that. None: no huge pages."""
    from ecd_client.device import driver

    mapping = MappedFile.of_memory(nbytes)
    if is_huge:
        for at in range(0, nbytes, HUGE_BYTES):
            mapping.populate(at, 4096)
        if not mapping.collapse(0, nbytes):
            return None
    else:
        mapping.populate(0, nbytes)
    pieces = [(at, min(PIECE_BYTES, nbytes - at)) for at in range(0, nbytes, PIECE_BYTES)]
    with driver.on(torch.cuda.current_device()):
        started = time.perf_counter()
        for at, piece in pieces:
            driver.register(mapping.address + at, piece)
        registered = time.perf_counter()
        for at, _ in pieces:
            driver.unregister(mapping.address + at)
        return registered - started, time.perf_counter() - registered


def _alloc_host_s(nbytes: int) -> float:
    from cuda.bindings import driver as cuda

    from ecd_client.device import driver

    with driver.on(torch.cuda.current_device()):
        started = time.perf_counter()
        result, memory = cuda.cuMemHostAlloc(nbytes, 0)
        took_s = time.perf_counter() - started
        assert result == cuda.CUresult.CUDA_SUCCESS, result
        cuda.cuMemFreeHost(memory)
    return took_s


def stalls() -> list[Row]:
    """The longest pause between two launches while a pool of 4 GiB is pinned, or unpinned.

    As a client does it, and in calls of 1 GiB without a pause.
    """
    from ecd_client.device import driver

    device, nbytes = torch.cuda.current_device(), 4 * GIB
    idle_ms = _longest_stall_ms(lambda: time.sleep(1.0))
    rows = [Row("longest stall of a launch loop, beside nothing", f"{idle_ms:.2f} ms")]
    fd = os.memfd_create("ecd-bench")
    os.ftruncate(fd, nbytes)
    mapping = MappedFile(fd, nbytes, writable=True)
    mapping.populate(0, nbytes)
    began: list[PinnedPool] = []

    def pin() -> None:
        began.append(PinnedPool(fd, nbytes, device))
        assert began[-1].wait() == nbytes, began[-1].outcome

    def each_gib(do: Callable[[int], None]) -> None:
        with driver.on(device):
            for at in range(mapping.address, mapping.address + nbytes, GIB):
                do(at)

    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "": (pin, lambda: began.pop().unregister()),
        ", in calls of 1 GiB": (
            partial(each_gib, lambda at: driver.register(at, GIB)),
            partial(each_gib, driver.unregister),
        ),
    }
    for how, both in ways.items():
        ms: tuple[list[float], list[float]] = ([], [])
        for _ in range(STALL_ROUNDS):
            for each, beside in zip(ms, both, strict=True):
                each.append(_longest_stall_ms(beside))
        for verb, each in zip(("pinning", "unpinning"), ms, strict=True):
            rows.append(
                Row(
                    f"the same, beside {verb} {nbytes // GIB} GiB{how}",
                    f"{median(each):.2f} ms, at most {max(each):.2f}",
                    f"{idle_ms:.2f} ms",
                    numbers={"stall_ms": each, "idle_ms": idle_ms},
                )
            )
    os.close(fd)
    return rows


def _longest_stall_ms(beside: Callable[[], None]) -> float:
    tensor = new_tensor(MIB // 16)
    thread = threading.Thread(target=beside)
    longest_s = 0.0
    thread.start()
    while thread.is_alive():
        torch.cuda.synchronize()
        last_s = time.perf_counter()
        for _ in range(LAUNCHES):
            tensor.add_(1)
            now_s = time.perf_counter()
            longest_s = max(longest_s, now_s - last_s)
            last_s = now_s
    thread.join()
    return longest_s * 1e3
