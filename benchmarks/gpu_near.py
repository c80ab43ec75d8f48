"""What `gpu.py` measures of device pools: what they cost, and loads from them."""

from __future__ import annotations

import os
import subprocess
import time
from collections import defaultdict
from statistics import median

import torch
from common import MIB, timed_us
from gpu_client import ITEM_BYTES, ITEMS
from gpu_common import POOL_BYTES, Row, daemon_of, new_tensor, wait_pinned
from gpu_rates import BATCH_BYTES, MOST_COPIES, ROUNDS, SIZES

from ecd_client import Client
from ecd_client.device.pool import DevicePool

NEAR_BYTES = 1 << 30
SETTINGS = {"ECD_DEVICE_POOL_BYTES": str(NEAR_BYTES)}
MOST_MORE_BYTES = 16 * MIB
"""What the daemon may take of the GPU beside its pool: a context would be 500 MiB."""


def near() -> list[Row]:
    """The daemon's memory on the GPU, and rates and times of loads from its device pool."""
    before = _used_bytes()
    with daemon_of(POOL_BYTES, **SETTINGS) as (_, address):
        more = _used_bytes() - before - NEAR_BYTES
        rows = [
            Row(
                "the daemon's memory on the GPU, beside its pool",
                f"{more / MIB:.0f} MiB",
                f"the pool: {NEAR_BYTES // MIB} MiB",
                f"<= {MOST_MORE_BYTES // MIB} MiB",
                more <= MOST_MORE_BYTES,
            )
        ]
        with Client(address) as client:
            wait_pinned(client)
            started_s = time.monotonic()
            pool = _near_of(client)
            rows.append(Row("the device pool is mapped", f"{time.monotonic() - started_s:.3f} s"))
            rows += _rates(pool)
            rows += _hits(client, pool)
    return rows


def _used_bytes() -> int:
    """Bytes of the first GPU that are in use."""
    said = subprocess.run(
        ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(said.stdout) * MIB


def _near_of(client: Client) -> DevicePool:
    deadline_s = time.monotonic() + 30.0
    while (pool := client._connection.session().near) is None:
        assert time.monotonic() < deadline_s, (
            f"process {os.getpid()} has no device pool: see its log"
        )
        time.sleep(0.001)
    return pool


def _rates(pool: DevicePool) -> list[Row]:
    """Copies from the pool as an engine maps it, beside those from a tensor of torch's."""
    from ecd_client.device import driver

    stream = torch.cuda.Stream()
    largest = max(SIZES.values())
    target, rival = new_tensor(largest), new_tensor(largest)
    rows = []
    with driver.on(pool.device):
        for name, nbytes in SIZES.items():
            number = max(1, min(MOST_COPIES, BATCH_BYTES // nbytes))
            took: dict[str, list[float]] = defaultdict(list)

            def copy(source: int, number: int = number, nbytes: int = nbytes) -> None:
                for _ in range(number):
                    driver.copy(target.data_ptr(), source, nbytes, stream.cuda_stream)
                driver.Event(pool.device, stream.cuda_stream).wait()

            for _ in range(ROUNDS + 1):
                took["pool"].append(timed_us(lambda: copy(pool._readable)))
                took["torch"].append(timed_us(lambda: copy(rival.data_ptr())))
            ratio = median(took["torch"][1:]) / median(took["pool"][1:])
            rates = {p: number * nbytes / median(each[1:]) / 1e3 for p, each in took.items()}
            is_judged = nbytes >= MIB
            rows.append(
                Row(
                    f"D2D {name}, the device pool",
                    f"{rates['pool']:.0f} GB/s, {ratio:.2f} of torch's memory",
                    f"torch's {rates['torch']:.0f}",
                    ">= 0.98" if is_judged else "",
                    ratio >= 0.98 if is_judged else None,
                    rates,
                )
            )
    return rows


def _hits(client: Client, pool: DevicePool) -> list[Row]:
    """How long a load of a copy holds its caller, and when it is over, beside one of the host's."""
    client.put("near", new_tensor(ITEM_BYTES))
    deadline_s = time.monotonic() + 10.0
    took: dict[str, list[float]] = defaultdict(list)
    wrong = 0
    with client.get("near") as item:
        while item.device_view("cuda") is None:
            assert time.monotonic() < deadline_s, "no copy was made"
            time.sleep(0.01)
        session = client._connection.session()
        for _ in range(ITEMS):
            for way in ("near", "host"):
                session._dma.near = pool if way == "near" else None
                torch.cuda.synchronize()
                started = time.perf_counter()
                copy = item.to("cuda", non_blocking=True)
                took[f"{way} held"].append((time.perf_counter() - started) * 1e6)
                torch.cuda.synchronize()
                took[f"{way} usable"].append((time.perf_counter() - started) * 1e6)
                wrong += int((copy != 1).sum())
            took["view"].append(timed_us(lambda: item.device_view("cuda")))
        session._dma.near = pool
    us = {name: median(each) for name, each in took.items()}
    load = f"a load of {ITEM_BYTES // MIB} MiB from the device pool"
    return [
        Row(
            f"{load}, host time",
            f"{us['near held']:.0f} us, {wrong} wrong bytes",
            f"from the host pool {us['host held']:.0f} us; a view {us['view']:.0f} us",
            "<= 60 us, 0",
            us["near held"] <= 60 and wrong == 0,
            us,
        ),
        Row(
            f"{load}, until usable",
            f"{us['near usable']:.0f} us",
            f"from the host pool {us['host usable']:.0f} us",
        ),
    ]
