"""Half an hour of mixed load on two nodes: does anything grow?

    python benchmarks/soak.py [--minutes N] [--output FILE.md]

Two daemons over loopback with a Redis as directory and a disk tier each. Four engines a node, each
a process that stays, get and put entries of 64 KiB to 8 MiB, of which the pools hold a tenth; what
they get is compared whole. Clients that come and go, one in three by SIGKILL, do the same. Every
five seconds a sample is taken of each process that stays: memory of its own (what it maps of shared
files is not in it), descriptors and threads, and of what lies in /dev/shm. A thread within each
daemon tells how much of its memory is allocated: the rest is free, but not given back to the
system.

The slope is that of a line through the medians of each minute, by least squares, without the first
third; its 95 % interval is by Student's t. Where the interval is wholly above zero and the growth
of the run is more than a hundredth, the program says so and ends with 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import psutil
import typer
from common import (
    MIB,
    end_daemon,
    machine,
    markdown,
    processes,
    redis_server,
    show,
    start_daemon,
    write_page,
)
from rich.console import Console
from rich.progress import track

from ecd_client import Client, DaemonUnavailable, PoolFull
from ecd_client.session.channel import call, open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

HOSTS = ("127.0.0.2", "127.0.0.3")
REDIS_PORT, METRICS_PORT, PEER_PORT = 16398, 19470, 9475
POOL_BYTES, DISK_BYTES = 512 * MIB, 512 * MIB
"""Both are full after a few minutes, so that what they remember does not grow after these."""
INSIDE = Path(__file__).parent / "inside"
KEYS = 4_000
SIZES = [64 << 10] * 10 + [MIB] * 7 + [8 * MIB] * 3
ENGINES = 4
PACE_S = 0.2
"""What an engine sleeps between two operations."""
SAMPLE_S, MINUTE_S = 5.0, 60.0
T_95 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13]
"""Student's t for 1 degree of freedom and more, two-sided; 2.1 beyond."""
Samples = dict[str, list[tuple[float, float]]]
"""By what is sampled: minutes since the start, and value."""


# -- clients ---------------------------------------------------------------------------------------


def content(key: int) -> bytes:
    block = hashlib.blake2b(str(key).encode()).digest() * 16
    return block * (SIZES[key % len(SIZES)] // len(block))


def work(address: str, other: str, seed: int, until_s: float, counts: Any) -> None:
    """One engine: get what it needs, by a few keys that many want, and put what nobody has."""
    chance = random.Random(seed)
    with Client(address, namespace="soak") as client:
        while time.time() < until_s:
            key = min(int(chance.paretovariate(0.4)), chance.randrange(1, KEYS))
            try:
                asked = [f"{key:064x}"]
                hints = [[other]] if seed % 2 else []  # the others ask the directory
                item = client.get_async(asked, 5.0, nodes=hints, only_if_written=True)[0].result()
                if item is None:
                    data = content(key)
                    client.put_bytes(f"{key:064x}", data, "uint8", (len(data),), cost=0.05)
                    counts[1] += 1
                else:
                    with item:
                        counts[2 if item.view != content(key) else 0] += 1
            except (DaemonUnavailable, PoolFull):
                counts[3] += 1
            time.sleep(PACE_S)


def visit(address: str, other: str, seed: int, until_s: float, counts: Any) -> None:
    """Clients one after the other, each in a process of its own; one in three is killed."""
    context, chance = processes(), random.Random(seed)
    while time.time() < until_s:
        stays_s = chance.uniform(1.0, 4.0)
        ends_s = time.time() + 60.0 if chance.random() < 1 / 3 else time.time() + stays_s
        guest = context.Process(target=work, args=(address, other, seed, ends_s, counts))
        guest.start()
        guest.join(stays_s + 2.0)
        guest.kill()
        guest.join()


# -- samples ---------------------------------------------------------------------------------------


def sample(samples: Samples, minute: float, name: str, value: float) -> None:
    samples[name].append((minute, value))


def look(samples: Samples, minute: float, name: str, pids: list[int]) -> None:
    """The means of some processes that do the same."""
    own = [
        re.findall(r"^Anonymous:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        for pid in pids
    ]
    processes = [psutil.Process(pid) for pid in pids]
    sample(samples, minute, f"{name}: memory, MiB", fmean(int(kib) / 1024 for (kib,) in own))
    sample(samples, minute, f"{name}: descriptors", fmean(p.num_fds() for p in processes))
    sample(samples, minute, f"{name}: threads", fmean(p.num_threads() for p in processes))


def look_inside(samples: Samples, minute: float, files: list[Path]) -> None:
    """The means of what daemons have allocated."""
    told = [file.read_text().split() for file in files]
    bytes_, blocks = (fmean(float(each[column]) for each in told) for column in (0, 1))
    sample(samples, minute, "daemon: allocated by malloc, MiB", bytes_ / MIB)
    sample(samples, minute, "daemon: allocated by Python, thousand blocks", blocks / 1000)


def slope(values: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Of the medians of minutes: an hour's growth, half its 95 % interval, and the level."""
    last = values[-1][0]
    minutes: dict[int, list[float]] = defaultdict(list)
    for minute, value in values:
        if minute >= last / 3:
            minutes[int(minute)].append(value)
    xs, ys = list(minutes), [median(each) for each in minutes.values()]
    x_mean, y_mean = fmean(xs), fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    b = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - y_mean - b * (x - x_mean)) ** 2 for x, y in zip(xs, ys, strict=True))
    free = len(xs) - 2
    t = T_95[free - 1] if free <= len(T_95) else 2.1
    return b * 60, t * (rest / free / spread) ** 0.5 * 60, y_mean


def lag_buckets(port: int) -> dict[float, float]:
    """How many turns of the event loop were late by at most so many seconds."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        text = reply.read().decode()
    found = re.findall(r'ecd_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
    return {float(bound): float(count) for bound, count in found}


def lag_rows(before: dict[float, float], after: dict[float, float]) -> list[str]:
    grown = {bound: after[bound] - before[bound] for bound in after}
    total = grown[float("inf")]
    cells = []
    for share in (0.5, 0.99, 0.999):
        bound = next(bound for bound, count in grown.items() if count >= share * total)
        cells.append(f"at most {bound * 1e3:g} ms")
    return [f"{total:,.0f}", *cells]


# -- the run ---------------------------------------------------------------------------------------


def status(address: str) -> pb.StatusReply:
    with open_channel(address) as channel:
        return call(pb_grpc.CacheStub(channel).Status, pb.StatusRequest(), address)


def evict_all(address: str) -> None:
    with open_channel(address) as channel:
        call(pb_grpc.CacheStub(channel).Evict, pb.EvictRequest(), address)


def main(
    minutes: Annotated[float, typer.Option(help="How long, at least 9.")] = 30.0,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    out, progress = Console(highlight=False, width=130), Console(stderr=True)
    context = processes()
    samples: Samples = defaultdict(list)
    counts = context.Array("q", 4, lock=False)
    with (
        tempfile.TemporaryDirectory() as directory,
        redis_server(Path(directory), REDIS_PORT) as redis,
    ):
        started = [start_node(Path(directory), number) for number in range(len(HOSTS))]
        daemons, addresses = [daemon for daemon, _ in started], [each for _, each in started]
        until_s = time.time() + minutes * 60
        engines, visitors = [], []
        try:
            before = [lag_buckets(METRICS_PORT + number) for number in range(len(HOSTS))]
            for number, address in enumerate(addresses):
                other = status(addresses[1 - number]).node
                for seed in range(number * 10, number * 10 + ENGINES):
                    how = (address, other, seed, until_s, counts)
                    engines.append(context.Process(target=work, args=how))
                how = (address, other, number * 10 + 9, until_s, counts)
                visitors.append(context.Process(target=visit, args=how))
            for process in engines + visitors:
                process.start()
            time.sleep(10)  # until all have begun
            steps = range(int((minutes * 60 - 20) / SAMPLE_S))
            start_s = time.monotonic()
            for step in track(steps, f"{minutes:g} minutes", console=progress):
                time.sleep(max(0.0, start_s + step * SAMPLE_S - time.monotonic()))
                minute = step * SAMPLE_S / MINUTE_S
                pids = [daemon.pid for daemon in daemons]
                look(samples, minute, "daemon", pids)
                look_inside(samples, minute, [Path(directory, f"allocated.{pid}") for pid in pids])
                look(samples, minute, "engine", [engine.pid for engine in engines])
                said = [status(address) for address in addresses]
                shm = [Path("/dev/shm") / f"ecd-{each.name}" for each in said]
                files = [file.stat() for each in shm for file in list(each.iterdir())]
                sample(samples, minute, "files in /dev/shm", len(files))
                taken = sum(file.st_blocks for file in files) * 512 / MIB
                sample(samples, minute, "bytes in /dev/shm, MiB", taken)
                sample(samples, minute, "sessions", sum(each.sessions for each in said))
                sample(samples, minute, "leases", sum(each.leases for each in said))
                sample(samples, minute, "entries", sum(each.entries for each in said))
                sample(samples, minute, "keys in Redis", redis.dbsize())
                sample(samples, minute, "Redis: memory, MiB", redis.info()["used_memory"] / MIB)
            after = [lag_buckets(METRICS_PORT + number) for number in range(len(HOSTS))]
            for process in engines + visitors:
                process.join(60)
            left = drained(addresses)
        finally:
            for process in engines + visitors:
                process.kill()
            for daemon in daemons:
                end_daemon(daemon)
    tell(out, samples, minutes, list(counts), [before, after], left, output, as_json)


def start_node(directory: Path, number: int) -> tuple[subprocess.Popen[bytes], str]:
    disk = directory / f"disk-{number}"
    disk.mkdir()
    return start_daemon(
        directory,
        f"soak-{number}",
        POOL_BYTES,
        ECD_PEER_ADDRESS=f"{HOSTS[number]}:{PEER_PORT}",
        ECD_PEER_TOKEN="the token of a soak",
        ECD_ENGINE_PORTS=f"{18600 + 32 * number}-{18631 + 32 * number}",
        ECD_HINT_NETWORKS="127.0.0.0/8",
        ECD_DIRECTORY=f"redis://127.0.0.1:{REDIS_PORT}",
        ECD_METRICS_ADDRESS=f"127.0.0.1:{METRICS_PORT + number}",
        ECD_DISK_POOL_BYTES=str(DISK_BYTES),
        ECD_DISK_DIR=str(disk),
        PYTHONPATH=os.pathsep.join([str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        ECD_BENCHMARK_ALLOCATED=str(directory / "allocated"),
    )


def drained(addresses: list[str]) -> int:
    """Bytes that are not one free extent again once all entries are evicted."""
    deadline_s = time.monotonic() + 30
    while True:
        left = 0
        for address in addresses:
            evict_all(address)
            pool = status(address).pools[0]
            left += pool.pool_bytes - pool.largest_free_bytes
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.5)


def tell(
    out: Console,
    samples: Samples,
    minutes: float,
    counts: list[int],
    lag: list[list[dict[float, float]]],
    left: int,
    output: Path | None,
    as_json: bool,
) -> None:
    rows, grew = [["", "level", "an hour's growth", "95 % interval"]], []
    found: dict[str, Any] = {}
    for name, values in samples.items():
        growth, half, level = slope(values)
        found[name] = {"level": level, "per_hour": growth, "half_interval": half}
        rows.append(
            [
                name,
                f"{level:,.1f}",
                f"{growth:+,.2f}",
                f"{growth - half:+,.2f} to {growth + half:+,.2f}",
            ]
        )
        if growth > half and growth * minutes / 60 > level / 100:
            grew.append(name)
    done = [
        ["", "times"],
        *map(list, zip(("right", "put", "WRONG BYTES", "refused"), map(str, counts), strict=True)),
    ]
    done.append(["bytes not free once all is evicted", str(left)])
    lags = [["", "turns", "p50", "p99", "p99.9"]]
    lags += [
        [f"daemon {n + 1}", *lag_rows(b, a)] for n, (b, a) in enumerate(zip(*lag, strict=True))
    ]
    if as_json:
        out.print_json(json.dumps({"machine": machine(), "slopes": found, "counts": counts}))
    text = f"{machine()}. {minutes:g} minutes.\n"
    for title, table in (
        ("What was done", done),
        ("What grew", rows),
        ("How late the event loops were", lags),
    ):
        if not as_json:
            show(out, title, table)
        text += f"\n{title}.\n\n{markdown(table)}"
    if output is not None:
        write_page(output, text)
    if grew or counts[2] or left:
        Console(stderr=True).print(f"grew: {', '.join(grew) or 'nothing'}", style="bold red")
        sys.exit(1)


if __name__ == "__main__":
    os.environ.pop("ECD_ADDRESS", None)
    typer.run(main)
