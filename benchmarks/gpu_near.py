"""What `gpu.py` measures of device pools: their memory, copies from them, and whole loads."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from common import MIB, timed_us
from gpu_client import BUSY_CYCLES, ITEM_BYTES, ITEMS
from gpu_common import (
    GIB,
    NEAR,
    NEAR_BYTES,
    POOL_BYTES,
    Row,
    daemon_of,
    held_and_over_us,
    near_of,
    new_tensor,
    used_bytes,
    wait_near,
    wait_pinned,
    wrong_bytes,
)
from gpu_rates import BATCH_BYTES, MOST_COPIES, ROUNDS, SIZES

from ecd_client import Client
from ecd_client.device.pool import DevicePool

SMALL_POOL_BYTES = 64 * MIB
MOST_MORE_BYTES = 16 * MIB
"""What the daemon may take of the GPU beside its pool: a context would be 500 MiB."""
WAITED_US = 10_000.0
"""A call that takes longer has waited for the GPU, which has 50 ms of work queued."""
SETTLED_S = 0.002
"""The end of the last load's hold, on a thread of its own, is over by then."""
ATTACHED = (GIB, 8 * GIB, 32 * GIB)
ATTACHES = 5


def near() -> list[Row]:
    """The daemon's memory on the GPU, and rates and times of loads from its device pool."""
    before = used_bytes()
    with daemon_of(POOL_BYTES, **NEAR) as (_, address):
        more = used_bytes() - before - NEAR_BYTES
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
            pool = near_of(client)
            rows += _rates(pool)
            rows += _hits(client, pool)
    return rows


def _rates(pool: DevicePool) -> list[Row]:
    """Copies from the pool to a tensor, beside torch's own between two tensors."""
    from ecd_client.device import driver

    largest = max(SIZES.values())
    target, rival = new_tensor(largest), new_tensor(largest)
    stream = torch.cuda.current_stream().cuda_stream
    places = {"pool": pool._readable, "rival": rival.data_ptr()}
    rows = []
    for name, nbytes in SIZES.items():
        number = max(1, min(MOST_COPIES, BATCH_BYTES // nbytes))
        to, source = target[:nbytes], rival[:nbytes]
        took: dict[str, list[float]] = defaultdict(list)

        def batch(copy: Callable[[], object], number: int = number) -> None:
            for _ in range(number):
                copy()
            torch.cuda.synchronize()

        with driver.on(pool.device):
            for _ in range(ROUNDS + 1):
                for place, at in places.items():
                    copy = partial(driver.copy, to.data_ptr(), at, nbytes, stream)
                    took[place].append(timed_us(partial(batch, copy)))
                took["torch"].append(timed_us(partial(batch, partial(to.copy_, source))))
        rates = {p: number * nbytes / median(each[1:]) / 1e3 for p, each in took.items()}
        ratio = rates["pool"] / rates["torch"]
        is_judged = nbytes >= MIB
        rows.append(
            Row(
                f"D2D {name}, from the device pool",
                f"{rates['pool']:.0f} GB/s, {ratio:.2f} of torch's copy",
                f"torch's copy {rates['torch']:.0f}; of torch's memory by ecd's call "
                f"{rates['rival']:.0f}",
                ">= 0.98" if is_judged else "",
                ratio >= 0.98 if is_judged else None,
                rates,
            )
        )
    return rows


def _hits(client: Client, pool: DevicePool) -> list[Row]:
    """A whole load of a copy, as the connector makes it, beside one from the host's pool."""
    client.put("near", new_tensor(ITEM_BYTES))
    wait_near(client, "near")
    target, rival = new_tensor(ITEM_BYTES), new_tensor(ITEM_BYTES)
    session = client._connection.session()
    took: dict[str, list[float]] = defaultdict(list)
    wrong = waits = 0
    with client.get("near") as held:
        handle = held.handle()

        def load() -> torch.Tensor:
            with client.hold("near", handle) as item:
                return item.to("cuda", non_blocking=True)

        def view() -> torch.Tensor | None:
            with client.hold("near", handle) as item:
                return item.device_view("cuda")

        ways: dict[str, Callable[[], object]] = {"near": load, "host": load, "view": view}
        ways["D2D"] = partial(target.copy_, rival)
        for _ in range(ITEMS):
            for way, queue in random.sample(list(ways.items()), len(ways)):
                time.sleep(SETTLED_S)
                session._dma.near = None if way == "host" else pool
                held_us, over_us = held_and_over_us(queue)
                took[f"{way} held"].append(held_us)
                took[f"{way} usable"].append(over_us)
            session._dma.near = pool
            wrong += wrong_bytes(load())
            torch.cuda._sleep(BUSY_CYCLES)
            waits += timed_us(load) > WAITED_US
    us = {name: median(each) for name, each in took.items()}
    name = f"load() of {ITEM_BYTES // MIB} MiB from the device pool"
    return [
        Row(
            f"{name}, host time",
            f"{us['near held']:.0f} us, {wrong} wrong bytes",
            f"from the host pool {us['host held']:.0f} us; a view {us['view held']:.0f} us",
            "<= 60 us, 0",
            us["near held"] <= 60 and wrong == 0,
            us,
        ),
        Row(f"{name}, host waits", f"{waits} of {ITEMS} loads", "", "0", waits == 0),
        Row(
            f"{name}, until usable",
            f"{us['near usable']:.0f} us",
            f"torch's copy {us['D2D usable']:.0f} us; from the host pool {us['host usable']:.0f}",
            "<= torch's copy + 40 us",
            us["near usable"] <= us["D2D usable"] + 40,
        ),
    ]


def attach() -> list[Row]:
    """Importing and mapping pools of several sizes, as an engine does once."""
    rows = []
    for nbytes in ATTACHED:
        size = f"{nbytes // GIB} GiB"
        if torch.cuda.mem_get_info()[0] < nbytes + GIB:
            rows.append(Row(f"attach: a device pool of {size}", "left out: the GPU has too little"))
            continue
        setting = {"ECD_DEVICE_POOL_BYTES": str(nbytes)}
        with daemon_of(SMALL_POOL_BYTES, **setting) as (_, address), Client(address) as client:
            started_s = time.monotonic()
            pool = near_of(client)
            first_s = time.monotonic() - started_s
            ms = [_attach_ms(pool) for _ in range(ATTACHES)]
        rows.append(
            Row(
                f"attach: import and map a device pool of {size}",
                f"{median(ms):.1f} ms, at most {max(ms):.1f}",
                f"from the first call of pin to a pool in use {first_s * 1e3:.0f} ms",
                "<= 50 ms",
                median(ms) <= 50,
                {"ms": ms, "first_s": first_s},
            )
        )
    return rows


def _attach_ms(pool: DevicePool) -> float:
    from ecd_client.device import driver

    started = time.perf_counter()
    mapped = pool._map(writable=False)
    took_ms = (time.perf_counter() - started) * 1e3
    with driver.on(pool.device):
        driver.unmap_memory(mapped, pool.nbytes)
    return took_ms
