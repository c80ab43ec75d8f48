"""What `gpu.py` measures of a client: how long loads and puts hold their caller, and take."""

from __future__ import annotations

import time
from collections import defaultdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

import torch
from common import MIB, timed_us
from gpu_common import (
    NEAR,
    POOL_BYTES,
    Row,
    daemon_of,
    near_of,
    new_tensor,
    wait_pinned,
    wrong_bytes,
)

from ecd_client import Client
from ecd_client.item import Item
from ecd_client.tensors import private_copy

ITEM_BYTES, ITEMS = 8 * MIB, 100
BUSY_CYCLES = 100_000_000
"""Work of some 50 ms, queued ahead of a copy whose caller must not wait for it."""


def loads() -> list[Row]:
    """How long `Item.to` holds its caller, with the GPU idle and with work queued ahead."""
    took: dict[str, list[float]] = defaultdict(list)
    wrong = 0
    with daemon_of(POOL_BYTES) as (_, address), Client(address) as client:
        pinned_s = wait_pinned(client)
        client.put("k", new_tensor(ITEM_BYTES))
        for _ in range(ITEMS):
            item = client.get("k")
            assert item is not None
            with item:
                wrong += _load(item, took)
    us = {name: median(each) for name, each in took.items()}
    name = f"Item.to(non_blocking) of {ITEM_BYTES // MIB} MiB"
    against = f"waited for {us['waited for']:.0f} us; by torch {us['by torch']:.0f} us"
    return [
        Row(
            f"{name}, host time",
            f"{us['idle']:.0f} us",
            against,
            "<= 60 us",
            us["idle"] <= 60,
            us,
        ),
        Row(
            f"{name}, host time with 50 ms of work queued ahead",
            f"{us['busy']:.0f} us, {wrong} wrong bytes",
            "",
            "<= 1 ms, 0",
            us["busy"] <= 1000 and wrong == 0,
        ),
        Row(f"{name}, until usable", f"{us['usable']:.0f} us", f"pinned in {pinned_s:.2f} s"),
    ]


def _load(item: Item, took: dict[str, list[float]]) -> int:
    """Load an item of ones in each way; how many bytes were wrong."""
    wrong = 0
    for way in ("idle", "busy"):
        torch.cuda.synchronize()
        if way == "busy":
            torch.cuda._sleep(BUSY_CYCLES)
        started = time.perf_counter()
        copy = item.to("cuda", non_blocking=True)
        took[way].append((time.perf_counter() - started) * 1e6)
        wrong += wrong_bytes(copy)  # which waits for it

    def load_usable() -> None:
        item.to("cuda", non_blocking=True)
        torch.cuda.synchronize()

    took["usable"].append(timed_us(load_usable))
    took["waited for"].append(timed_us(lambda: item.to("cuda")))
    took["by torch"].append(timed_us(lambda: private_copy(item.view, "uint8", item.shape, "cuda")))
    return wrong


def puts() -> list[Row]:
    """How long a put of a GPU's tensor holds its caller, and when another process has it."""
    return _puts({}, "put_async") + _puts(NEAR, "put_async with a device pool")


def _puts(settings: dict[str, str], what: str) -> list[Row]:
    took: dict[str, list[float]] = defaultdict(list)
    with daemon_of(POOL_BYTES, **settings) as (_, address), Client(address) as client:
        wait_pinned(client)
        if settings:
            near_of(client)
        processes = get_context("spawn")
        pipe, theirs = processes.Pipe()
        arguments = (address, theirs, bool(settings))
        process = processes.Process(target=_wait_for_keys, args=arguments, daemon=True)
        process.start()
        theirs.close()
        rival = torch.zeros(ITEM_BYTES, dtype=torch.uint8, pin_memory=True)
        for number in range(ITEMS):
            tensor = new_tensor(ITEM_BYTES)
            torch.cuda.synchronize()
            took["copied"].append(timed_us(lambda t=tensor: rival.copy_(t)))
            pipe.send(f"k{number}")
            pipe.recv()
            time.sleep(0.005)
            started_s = time.monotonic()
            stored = client.put_async(f"k{number}", tensor)
            took["held"].append((time.monotonic() - started_s) * 1e6)
            for name, seen_s in pipe.recv().items():
                took[name].append((seen_s - started_s) * 1e6)
            assert stored.result(10)
        pipe.send(None)
        process.join()
    us = {name: median(each) for name, each in took.items()}
    put = f"{what}, {ITEM_BYTES // MIB} MiB"
    rows = [
        Row(f"{put}, caller held", f"{us['held']:.0f} us", "", "<= 80 us", us["held"] <= 80, us),
        Row(
            f"{put}, to a handle in another process",
            f"{us['seen']:.0f} us",
            f"the copy alone, to pin_memory: {us['copied']:.0f} us",
            "<= that + 1 ms",
            us["seen"] <= us["copied"] + 1000,
        ),
    ]
    if settings:
        found = f"{us['near']:.0f} us"
        rows.append(Row(f"{put}, to a copy held in another process's device pool", found))
    return rows


def _wait_for_keys(address: str, pipe: Connection, is_near: bool) -> None:
    """The other process: says when it looks for a key, and when it has it."""
    with Client(address) as client:
        if is_near:
            near_of(client)
        while (key := pipe.recv()) is not None:
            pipe.send(None)
            while (item := client.get(key)) is None:
                pass
            seen = {"seen": time.monotonic()}
            item.close()
            if is_near:
                while not _has_copy(client, key):
                    pass
                seen["near"] = time.monotonic()
            pipe.send(seen)


def _has_copy(client: Client, key: str) -> bool:
    """Whether the device pool has a copy; asks for none."""
    session = client._connection.session()
    with client.get(key) as item:
        entry, place = item._hold.entry, (client.namespace, key)
        held = entry and session.near.hold(session, place, entry, item.nbytes)
    if held:
        held.end()
    return bool(held)
