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
from typing import NamedTuple

import torch
from common import MIB, timed_us
from gpu_common import GIB, POOL_BYTES, Row, daemon_of, new_tensor, wait_pinned

from ecd_client import Client
from ecd_client.device.pinned import PINNED_PIECE_BYTES, PinnedPool
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
LONG_MS = 1.0
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
    pieces = [
        (at, min(PINNED_PIECE_BYTES, nbytes - at)) for at in range(0, nbytes, PINNED_PIECE_BYTES)
    ]
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


class Stalls(NamedTuple):
    """Pauses between two launches of a loop."""

    longest_ms: float
    most_ms: float
    """What 99.99 % of them are below."""
    long_per_s: float
    """Pauses above LONG_MS in a second."""


def stalls() -> list[Row]:
    """The pauses between two launches while a pool of 4 GiB is pinned, or unpinned.

    As a client does it, and in calls of 1 GiB without a pause. The machine's own pauses are those
    beside nothing; a loop that has a core of its own has fewer of them.
    """
    from ecd_client.device import driver

    device, nbytes = torch.cuda.current_device(), 4 * GIB
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

    ways: dict[str, Callable[[], None]] = {
        "nothing": lambda: time.sleep(1.0),
        f"pinning {nbytes // GIB} GiB": pin,
        f"unpinning {nbytes // GIB} GiB": lambda: began.pop().unregister(),
        "pinning it in calls of 1 GiB": partial(each_gib, lambda at: driver.register(at, GIB)),
        "unpinning it in calls of 1 GiB": partial(each_gib, driver.unregister),
    }
    rows = []
    for has_own_core in (False, True):
        found: dict[str, list[Stalls]] = defaultdict(list)
        for _ in range(STALL_ROUNDS):
            for name, beside in ways.items():
                found[name].append(_stalls(beside, has_own_core))
        where = ", on a core of its own" if has_own_core else ""
        rows += [_stall_row(name, where, each, found["nothing"]) for name, each in found.items()]
    os.close(fd)
    return rows


def _stall_row(name: str, where: str, each: list[Stalls], idle: list[Stalls]) -> Row:
    def text(of: list[Stalls]) -> str:
        longest, most, long_per_s = (median(values) for values in zip(*of, strict=True))
        highest = max(each.longest_ms for each in of)
        return (
            f"99.99 % below {most:.2f} ms, {long_per_s:.1f}/s above {LONG_MS:.0f} ms, "
            f"longest {longest:.2f} (at most {highest:.2f})"
        )

    return Row(
        f"pauses of a launch loop{where}, beside {name}",
        text(each),
        "" if each is idle else f"beside nothing: {text(idle)}",
        numbers={"rounds": [stalls._asdict() for stalls in each]},
    )


def _stalls(beside: Callable[[], None], has_own_core: bool) -> Stalls:
    tensor = new_tensor(MIB // 16)
    cores = os.sched_getaffinity(0)
    own = {max(cores)} if has_own_core else cores

    def run_beside() -> None:
        os.sched_setaffinity(0, cores - own or cores)  # of this thread, and those that it starts
        beside()

    thread = threading.Thread(target=run_beside)
    pauses_s: list[float] = []
    began_s = time.perf_counter()
    thread.start()
    os.sched_setaffinity(0, own)
    while thread.is_alive():
        torch.cuda.synchronize()
        last_s = time.perf_counter()
        for _ in range(LAUNCHES):
            tensor.add_(1)
            now_s = time.perf_counter()
            pauses_s.append(now_s - last_s)
            last_s = now_s
    took_s = time.perf_counter() - began_s
    os.sched_setaffinity(0, cores)
    thread.join()
    pauses_s.sort()
    long = sum(pause_s * 1e3 > LONG_MS for pause_s in pauses_s)
    most_s = pauses_s[int(0.9999 * (len(pauses_s) - 1))]
    return Stalls(pauses_s[-1] * 1e3, most_s * 1e3, long / took_s)
