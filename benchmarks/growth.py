"""What operations cost with 1,000 and with 1,000,000 entries, and what an entry and a pool cost.

    python benchmarks/growth.py [--entries N] [--pool-gib N] [--output FILE.md]

Four tables: a client's operations on two daemons that hold entries of 4 KiB, and what of their
memory is not the pool; how long a daemon takes to have its pool ready, beside touching as many
pages of such memory; the operations of the core alone, without a daemon; and a look of the status
page, with as many peers as it shows and its curves' longest answer. Medians of many.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from common import end_daemon, machine, markdown, show, start_daemon, timed_us, write_page
from rich.console import Console

from ecd.base.clock import REAL
from ecd.base.identity import NodeIdentity
from ecd.core.cache import Cache
from ecd.core.model.outcomes import Leased, LimitReached, Reserved
from ecd.core.model.types import Content, Key, PoolLimits, SessionId
from ecd.core.policy.policy import Policy
from ecd.core.policy.value_density import ValueDensity
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.ops.history import KEPT_SAMPLES, History, lot
from ecd.ops.status import Status
from ecd.ops.status_page import MAX_PEERS, PageFigures, described
from ecd_client import Client
from ecd_client.session.channel import call, open_channel
from ecd_proto.mapped_file import MappedFile
from ecd_proto.shm.files import GRANULE_BYTES
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

FEW = 1_000
SAMPLES = 5_000
DAEMON_SAMPLES = 2_000
PUTS = 500
"""Of those, the puts: what a daemon has room for beside its entries."""
AT_ONCE = 64
NAMESPACES = 1_000
LOOKS = 200
OPERATIONS = ("put", "get, handle", "contains, each of 64", "miss")
ENTRY = b"\1" * GRANULE_BYTES
READY_TIMES = 3


def content(granules: int) -> Content:
    nbytes = granules * GRANULE_BYTES
    return Content("int8", (nbytes,), nbytes)


def filled(
    count: int, chance: random.Random, policy: Callable[[int], Policy], namespaces: int = 1
) -> tuple[Cache, SessionId]:
    """A cache of `count` entries of 1 to 16 granules, the pool full to the last few."""
    names = ["n", *(f"namespace-{number}" for number in range(1, namespaces))]
    sizes = [chance.randint(1, 16) for _ in range(count)]
    limits = PoolLimits(high_watermark=1.0, low_watermark=1.0)
    allocator = Allocator(0, (sum(sizes) + 64) * GRANULE_BYTES, GRANULE_BYTES)
    cache = Cache([Pool(allocator, limits=limits, policy=policy(allocator.nbytes))])
    session = cache.open_session()
    assert not isinstance(session, LimitReached)
    for index, granules in enumerate(sizes):
        key = Key(names[index % namespaces], f"k{index}")
        with cache.reserving():
            reserved = cache.reserve(session, key, content(granules), 0.0)
        assert isinstance(reserved, Reserved)
        cache.commit(session, reserved.entry, 0.0)
    return cache, session


def measure(count: int, policy: Callable[[int], Policy] = ValueDensity) -> dict[str, float]:
    """Medians of the core's operations, under a policy for the pool's bytes."""
    chance = random.Random(1)
    cache, session = filled(count, chance, policy)
    took: dict[str, list[float]] = {
        name: [] for name in ("contains", "acquire", "release", "reserve, evicting", "commit")
    }
    for step in range(SAMPLES):
        key = Key("n", f"k{chance.randrange(count)}")
        took["contains"].append(timed_us(lambda k=key: cache.views.contains(k)))
        started = time.perf_counter()
        leased = cache.acquire(session, key, float(step))
        took["acquire"].append((time.perf_counter() - started) * 1e6)
        if isinstance(leased, Leased):
            took["release"].append(timed_us(lambda x=leased: cache.release(session, x.lease)))
        wanted = content(chance.randint(1, 16))
        started = time.perf_counter()
        with cache.reserving():
            reserved = cache.reserve(session, Key("n", f"new{step}"), wanted, float(step))
        took["reserve, evicting"].append((time.perf_counter() - started) * 1e6)
        assert isinstance(reserved, Reserved)
        took["commit"].append(
            timed_us(lambda r=reserved, s=step: cache.commit(session, r.entry, float(s)))
        )
    return {name: median(values) for name, values in took.items()}


def measure_look(count: int) -> dict[str, float]:
    """Medians: the turn of the event loop that a look takes, and its document on another thread."""
    cache, _ = filled(count, random.Random(1), ValueDensity, NAMESPACES)
    memory: Any = SimpleNamespace(path="", nbytes=1, huge_bytes=1, problem="", populated_bytes=1)
    memory.device_bytes = 0
    engines = SimpleNamespace(statuses=list)
    streams: Any = SimpleNamespace(clients=0, waiting_for_dma=0, engines=engines)
    identity = NodeIdentity("growth", "0" * 32, "ecd", "node:1")
    status = Status(identity, cache, {0: memory}, None, streams, REAL)
    nodes = [pb.PeerStatus(node=f"node-{n}:1", state="connected") for n in range(MAX_PEERS)]
    peers = pb.PeersReply(node=identity.node, peers=nodes)
    history = History(status.figures, REAL)
    for _ in range(KEPT_SAMPLES):
        history.sample()

    def on_loop() -> PageFigures:
        return PageFigures(status.read(), peers, history.refused_s_ago(), history.samples(), 0.0)

    def encoded() -> bytes:
        return json.dumps({**described(look), "history": lot(look.samples, 0)}).encode()

    look = on_loop()
    return {
        "on the event loop": median(timed_us(on_loop) for _ in range(LOOKS)),
        "its document, beside it": median(timed_us(encoded) for _ in range(LOOKS)),
    }


# -- daemons ---------------------------------------------------------------------------------------


def anonymous_bytes(pid: int) -> int:
    """Memory of the process's own: what it maps of files in /dev/shm is not in it."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Anonymous:\s+(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def index_bytes(name: str) -> int:
    """The memory that the files beside the pool take of /dev/shm."""
    directory = Path("/dev/shm") / f"ecd-{name}"
    return sum(f.stat().st_blocks * 512 for f in directory.iterdir() if f.suffix != ".pool")


def measure_client(count: int, progress: Console) -> dict[str, float]:
    """Medians, and what the daemon's memory grew by for each entry."""
    chance = random.Random(1)
    pool_bytes = int((count + 4 * PUTS) * GRANULE_BYTES * 1.1)  # below the high watermark
    took: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    with tempfile.TemporaryDirectory() as directory:
        daemon, address = start_daemon(Path(directory), f"growth-{count}", pool_bytes)
        try:
            with Client(address, namespace="growth") as client:
                name = client_name(address)
                before = anonymous_bytes(daemon.pid) + index_bytes(name)

                def put(key: str) -> None:
                    client.put_bytes(key, ENTRY, "uint8", (GRANULE_BYTES,))

                for index in range(count):
                    put(f"{index:064x}")
                    if index % 100_000 == 99_999:
                        progress.print(f"{index + 1:,} entries ...")
                time.sleep(1.0)  # until the last puts are listed, and the page tables filled
                grown = anonymous_bytes(daemon.pid) + index_bytes(name) - before
                for step in range(DAEMON_SAMPLES):
                    keys = [f"{chance.randrange(count):064x}" for _ in range(AT_ONCE)]
                    all_us = timed_us(lambda k=keys: client.contains(k))
                    took["contains, each of 64"].append(all_us / AT_ONCE)
                    key = f"{chance.randrange(count):064x}"
                    took["get, handle"].append(timed_us(lambda k=key: client.get(k).close()))
                    took["miss"].append(timed_us(lambda s=step: client.get(f"none-{s}")))
                for step in range(PUTS):
                    took["put"].append(timed_us(lambda s=step: put(f"new-{s}")))
        finally:
            end_daemon(daemon)
    return {name: median(values) for name, values in took.items()} | {"memory": grown / count}


def client_name(address: str) -> str:
    stub = pb_grpc.CacheStub(open_channel(address))
    name: str = call(stub.Status, pb.StatusRequest(), address).name
    return name


def measure_ready(pool_bytes: int) -> dict[str, float]:
    """Seconds: a daemon from its start until it serves, and touching as much memory."""
    ready, touched = [], []
    for _ in range(READY_TIMES):
        memory = MappedFile.of_memory(pool_bytes)
        started_s = time.perf_counter()
        memory.populate(0, pool_bytes)
        touched.append(time.perf_counter() - started_s)
        del memory
        with tempfile.TemporaryDirectory() as directory:
            started_s = time.perf_counter()
            daemon, _ = start_daemon(Path(directory), "ready", pool_bytes)
            ready.append(time.perf_counter() - started_s)
            end_daemon(daemon)
    return {"touching the pages": median(touched), "a daemon, until it serves": median(ready)}


# -- tables ----------------------------------------------------------------------------------------


def rows_of(small: dict[str, float], large: dict[str, float], entries: int) -> list[list[str]]:
    rows = [["operation", f"{FEW:,} entries", f"{entries:,} entries", "ratio"]]
    for name in small:
        if name != "memory":
            ratio = large[name] / small[name]
            rows.append([name, f"{small[name]:.1f} us", f"{large[name]:.1f} us", f"{ratio:.2f}"])
    return rows


def main(
    entries: Annotated[int, typer.Option(help="The many.")] = 1_000_000,
    pool_gib: Annotated[float, typer.Option(help="The pool that gets ready.")] = 4.0,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    out, progress = Console(highlight=False, width=120), Console(stderr=True)
    tables: list[tuple[str, list[list[str]]]] = []
    few, many = (measure_client(count, progress) for count in (FEW, entries))
    rows = rows_of(few, many, entries)
    rows.append(["memory of an entry beyond the pool", "", f"{many['memory']:,.0f} bytes", ""])
    tables.append(("A client and its daemon, entries of 4 KiB", rows))
    progress.print(f"{pool_gib:g} GiB, {2 * READY_TIMES} times ...")
    seconds = measure_ready(int(pool_gib * (1 << 30)))
    touched = seconds["touching the pages"]
    rows = [["what", "seconds", "ratio"]]
    rows += [[name, f"{took:.2f}", f"{took / touched:.2f}"] for name, took in seconds.items()]
    tables.append((f"A pool of {pool_gib:g} GiB", rows))
    progress.print("the core alone ...")
    tables.append(("The core alone", rows_of(measure(FEW), measure(entries), entries)))
    rows = rows_of(measure_look(FEW), measure_look(entries), entries)
    tables.append((f"A look of the status page, {NAMESPACES:,} namespaces", rows))
    text = f"{machine()}. Medians.\n"
    for title, rows in tables:
        show(out, title, rows)
        text += f"\n{title}.\n\n{markdown(rows)}"
    if output is not None:
        write_page(output, text)


if __name__ == "__main__":
    typer.run(main)
