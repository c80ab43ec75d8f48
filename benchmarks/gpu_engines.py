"""What `gpu.py` measures of several engines on one GPU: hits of the device pool, and memory.

Each engine is a process, which does what it is told through a pipe and answers when it is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from common import MIB
from gpu_client import ITEM_BYTES
from gpu_common import (
    NEAR,
    NEAR_BYTES,
    POOL_BYTES,
    Row,
    daemon_of,
    near_of,
    new_tensor,
    used_bytes,
    wait_near,
    wrong_bytes,
)

from ecd_client import Client

ENGINES = 4
ENTRIES = 16
RUN_S = 3.0
LOADS_PER_STEP = 4
"""Loads that an engine queues before it waits for the GPU, as at a step's end."""
READY_S = 120.0


def engines() -> list[Row]:
    """Hits of one engine and of several at once, and the memory that they have on the GPU."""
    with (
        daemon_of(POOL_BYTES, **NEAR) as (_, address),
        Client(address) as client,
        _started(address) as pipes,
    ):
        near_of(client)
        for number in range(ENTRIES):
            client.put(str(number), new_tensor(ITEM_BYTES))
            wait_near(client, str(number))
        used = {"at first": used_bytes()}
        for each in ("attach", "copies", "views"):
            _tell(pipes, each)
            used[each] = used_bytes()
            _tell(pipes, "let go")
        alone = _tell(pipes[:1], "hit")
        together = _tell(pipes, "hit")
    return [*_memory(used), *_hits(alone, together)]


def _memory(used: dict[str, int]) -> list[Row]:
    mib = {name: (each - used["at first"]) / ENGINES / MIB for name, each in used.items()}
    what = f"{ENTRIES} entries of {ITEM_BYTES // MIB} MiB, each engine of {ENGINES}"
    return [
        Row(
            "memory: an engine's mapping of the device pool",
            f"{mib['attach']:.0f} MiB",
            f"the pool, once for all: {NEAR_BYTES // MIB} MiB",
            numbers=used,
        ),
        Row(
            f"memory: duplicates of {what}",
            f"as copies {mib['copies'] - mib['attach']:.0f} MiB, "
            f"as views {mib['views'] - mib['attach']:.0f} MiB",
            f"the entries: {ENTRIES * ITEM_BYTES // MIB} MiB",
        ),
    ]


def _hits(alone: list[dict[str, float]], together: list[dict[str, float]]) -> list[Row]:
    one, several = (sum(each["hits"] / each["took_s"] for each in n) for n in (alone, together))
    wrong = sum(each["wrong"] for each in (*alone, *together))
    gbs = {rate: rate * ITEM_BYTES / 1e9 for rate in (one, several)}
    return [
        Row(
            f"{ENGINES} engines: hits of {ITEM_BYTES // MIB} MiB in the device pool, in sum",
            f"{several:.0f}/s, {gbs[several]:.0f} GB/s, {wrong:.0f} wrong bytes",
            f"one engine {one:.0f}/s, {gbs[one]:.0f} GB/s",
            ">= one engine's, 0",
            several >= one and wrong == 0,
            {"alone": alone, "together": together},
        )
    ]


def _tell(pipes: list[Connection], what: str) -> list[dict[str, float]]:
    """Have engines do something at one time; what they answer."""
    for pipe in pipes:
        pipe.send(what)
    for pipe in pipes:
        assert pipe.poll(READY_S), f"an engine does not answer: {what}"
    return [pipe.recv() for pipe in pipes]


@contextmanager
def _started(address: str) -> Iterator[list[Connection]]:
    """Engines with contexts of their own, which have not attached yet."""
    spawn = get_context("spawn")
    pairs = [spawn.Pipe() for _ in range(ENGINES)]
    processes = [
        spawn.Process(target=_engine, args=(address, theirs), daemon=True) for _, theirs in pairs
    ]
    pipes = [ours for ours, _ in pairs]
    for process in processes:
        process.start()
    for _, theirs in pairs:
        theirs.close()
    try:
        _tell(pipes, "start")
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(READY_S)


# -- an engine -------------------------------------------------------------------------------------


def _engine(address: str, pipe: Connection) -> None:
    """One of the processes, until its pipe is closed."""
    used_bytes()  # which makes the context
    kept: list[torch.Tensor | None] = []
    with Client(address) as client:
        while True:
            try:
                told = pipe.recv()
            except EOFError:
                return
            answer: dict[str, float] = {}
            match told:
                case "attach":
                    for number in range(ENTRIES):
                        wait_near(client, str(number))
                case "copies":
                    kept = [_load(client, number) for number in range(ENTRIES)]
                case "views":
                    kept = [_view(client, number) for number in range(ENTRIES)]
                    assert None not in kept, "an entry has no copy"
                case "let go":
                    kept = []
                    torch.cuda.empty_cache()
                case "hit":
                    answer = _hit(client)
            torch.cuda.synchronize()
            pipe.send(answer)


def _load(client: Client, number: int) -> torch.Tensor:
    with client.get(str(number)) as item:
        return item.to("cuda", non_blocking=True)


def _view(client: Client, number: int) -> torch.Tensor | None:
    with client.get(str(number)) as item:
        return item.device_view("cuda")


def _hit(client: Client) -> dict[str, float]:
    """Load one entry after the other for some seconds."""
    hits, copies = 0, []
    started_s = time.monotonic()
    while (took_s := time.monotonic() - started_s) < RUN_S:
        copies = [_load(client, (hits + each) % ENTRIES) for each in range(LOADS_PER_STEP)]
        hits += len(copies)
        torch.cuda.synchronize()
    wrong = sum(map(wrong_bytes, copies))
    return {"hits": hits, "took_s": took_s, "wrong": wrong}
