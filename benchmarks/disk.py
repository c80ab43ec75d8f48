"""The disk tier: how fast entries come back, and what two workloads save by it.

    python benchmarks/disk.py [--directory DIR] [--output FILE.md]

The first table compares a client's get of an entry that lies on disk with a plain read of the same
file past the page cache, in pieces of the same size, into memory that is there. Both are medians of
many reads, one after the other; the plain read comes first every second time. "In the daemon" is
the part from the reservation to the commit, on average, and "a call" what a client waits for an
answer that needs no disk. Gets that are made together, 16 or as many as memory has room for, are
compared with plain reads of the same files by as many threads. The plain reads' memory has small
pages, as dd's has; the pool has huge ones.

The second table runs two workloads of one engine against the daemon, whose memory has a tenth of
their footprint. An engine that lacks an entry sleeps for as long as its encoder would take, and
puts it. The same accesses, at the times of each run, go through `ecd replay` (`ecd.replay.whatif`),
which knows no waiting but for reads from a disk of 1 GB/s.
"""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer
from common import MIB, SIZES, end_daemon, machine, markdown, show, start_daemon, write_page
from rich.console import Console

from ecd.core.model.types import Key
from ecd.memory.disk.disk_dir import DISK_PIECE_BYTES
from ecd.memory.disk.disk_format import file_name
from ecd.replay.policies import POLICIES
from ecd.replay.reading import Accesses, TracedKey
from ecd.replay.whatif import Disk, PoolOutcome, simulate
from ecd_client import Client
from ecd_client.session.channel import call, open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

READ_BYTES = 1 << 30
"""Bytes of one size that are read in all, or MOST_READS if these are fewer."""
MOST_READS = 300
TOGETHER = 16
ACCESSES = 1500
DISK_BYTES = 4 << 30
BUDGETS = {"none": 0, "20 MB/s": 20_000_000, "200 MB/s": 200_000_000}  # bytes per second


class Access(NamedTuple):
    key: str
    nbytes: int
    cost_s: float


def disk_of(address: str) -> pb.DiskStatus:
    with open_channel(address) as channel:
        return call(pb_grpc.CacheStub(channel).Status, pb.StatusRequest(), address, 10.0).disk


def plain_read_s(path: Path, into: mmap.mmap, nbytes: int) -> float:
    started = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with memoryview(into) as whole:
        for start in range(0, nbytes, DISK_PIECE_BYTES):
            os.preadv(fd, [whole[start : min(start + DISK_PIECE_BYTES, nbytes)]], start)
    os.close(fd)
    return time.perf_counter() - started


def bandwidths(directory: Path) -> list[list[str]]:
    rows = [["entry", "plain read", "get", "share", "in the daemon", "a call"]]
    rows[0] += ["at a time", "plain reads", "gets", "share"]
    for name, nbytes in SIZES.items():
        count = min(MOST_READS, READ_BYTES // nbytes)
        settings = {"ECD_DISK_POOL_BYTES": "8GiB", "ECD_DISK_WRITE_BYTES_PER_S": "100GB"}
        settings["ECD_DISK_DIR"] = str(directory)
        pool_bytes = max(MIB, 4 * nbytes, count * nbytes // 8)
        daemon, address = start_daemon(directory, f"disk-{nbytes}", pool_bytes, **settings)
        try:
            with Client(address) as client:
                plain_s, get_s, keys = _read_each(client, address, count, nbytes)
                disk, call_s = disk_of(address), median(_calls_s(client))
                some = max(1, min(TOGETHER, count // 32))
                place = Path(disk_of(address).path)
                plain_rate, rate = _read_together(client, place, keys, some, nbytes)
        finally:
            end_daemon(daemon)
        plain, got = nbytes / median(plain_s) / 1e9, nbytes / median(get_s) / 1e9
        row = [name, f"{plain:.2f} GB/s", f"{got:.2f} GB/s", f"{got / plain:.2f}"]
        row += [f"{disk.read_s / disk.reads * 1e6:.0f} us", f"{call_s * 1e6:.0f} us", str(some)]
        rows.append(
            [*row, f"{plain_rate:.2f} GB/s", f"{rate:.2f} GB/s", f"{rate / plain_rate:.2f}"]
        )
    return rows


def _calls_s(client: Client) -> list[float]:
    """Seconds of calls that ask for keys which nobody has."""
    took: list[float] = []
    for number in range(MOST_READS):
        started = time.perf_counter()
        [future] = client.get_async([f"nobody's {number}"], 10.0, only_if_written=True)
        assert future.result(10.0) is None
        took.append(time.perf_counter() - started)
    return took


def _read_each(
    client: Client, address: str, count: int, nbytes: int
) -> tuple[list[float], list[float], list[str]]:
    """Seconds of plain reads and of gets, one after the other, and the keys that are on disk."""
    keys, data = [f"{nbytes}-{number}" for number in range(count)], os.urandom(nbytes)
    for number, key in enumerate(keys):
        client.put_bytes(key, data, "uint8", (nbytes,), cost=100.0)
        until_s = time.monotonic() + 0.2
        while disk_of(address).writes < number - count // 8 and time.monotonic() < until_s:
            time.sleep(0.005)
    place = Path(disk_of(address).path)
    into = mmap.mmap(-1, nbytes + DISK_PIECE_BYTES)
    into[:] = bytes(len(into))
    plain_s: list[float] = []
    get_s: list[float] = []
    for number, key in enumerate(keys):
        path = place / file_name(Key("default", key))
        if client.contains([key])[0] or not path.exists():
            continue
        if number % 2:
            plain_s.append(plain_read_s(path, into, nbytes))
        started = time.perf_counter()
        with client.get(key, 10.0) as item:
            get_s.append(time.perf_counter() - started)
            assert item.view[-1] == data[-1]
        if not number % 2:
            plain_s.append(plain_read_s(path, into, nbytes))
    on_disk = [key for key in keys if (place / file_name(Key("default", key))).exists()]
    return plain_s, get_s, on_disk


def _read_together(
    client: Client, place: Path, keys: list[str], some: int, nbytes: int
) -> tuple[float, float]:
    """The GB/s of plain reads by some threads, and of as many gets that are made together."""
    plain_rates: list[float] = []
    rates: list[float] = []
    buffers = [mmap.mmap(-1, nbytes) for _ in range(some)]
    for buffer in buffers:
        buffer[:] = bytes(nbytes)
    with ThreadPoolExecutor(some) as threads:
        for start in range(0, len(keys) - some, some):
            batch = keys[start : start + some]
            if any(client.contains(batch)):
                continue
            paths = [place / file_name(Key("default", key)) for key in batch]
            started = time.perf_counter()
            list(threads.map(plain_read_s, paths, buffers, [nbytes] * some))
            plain_rates.append(some * nbytes / (time.perf_counter() - started) / 1e9)
            started = time.perf_counter()
            items = [future.result(10.0) for future in client.get_async(batch, 10.0)]
            rates.append(some * nbytes / (time.perf_counter() - started) / 1e9)
            for item in items:
                item.close()
    return median(plain_rates), median(rates)


def catalogue(chance: random.Random) -> Iterator[Access]:
    """Pictures of documents, of Zipf's popularity (exponent 0.9): what is popular stays so."""
    names = list(range(600))
    weights = [1 / (rank + 1) ** 0.9 for rank in names]
    for number in chance.choices(names, weights, k=ACCESSES):
        rows = 64 << number % 4
        yield Access(f"c{number}", rows * 7168, 0.01 + rows * 15e-6)


def chats(chance: random.Random) -> Iterator[Access]:
    """Conversations of about eight turns about one picture of their own, 40 of them at a time."""
    running = list(range(40))
    last = len(running)
    for _ in range(ACCESSES):
        place = chance.randrange(len(running))
        number = running[place]
        rows = 256 << number % 3
        yield Access(f"t{number}", rows * 7168, 0.01 + rows * 15e-6)
        if chance.random() < 1 / 8:
            running[place], last = last, last + 1


def savings(directory: Path) -> list[list[str]]:
    rows = [["workload", "disk tier", "would encode", "encoded", "waited", "written"]]
    rows[0] += ["saved", "by replay", "written by replay"]
    for make in (catalogue, chats):
        accesses = list(make(random.Random(1)))
        footprint = sum({access.key: access.nbytes for access in accesses}.values())
        for number, (name, budget) in enumerate(BUDGETS.items()):
            settings = {"ECD_DISK_POOL_BYTES": str(DISK_BYTES), "ECD_DISK_DIR": str(directory)}
            settings["ECD_DISK_WRITE_BYTES_PER_S"] = str(budget)
            node, pool_bytes = f"{make.__name__}-{number}", max(8 * MIB, footprint // 10)
            chosen = settings if budget else {}
            daemon, address = start_daemon(directory, node, pool_bytes, **chosen)
            try:
                encoded_s, waited_s, times_s = _run(address, accesses)
                took_s = times_s[-1]
                written = disk_of(address).written_bytes / took_s / 1e6
            finally:
                end_daemon(daemon)
            every_s = sum(access.cost_s for access in accesses)
            saved_s = every_s - encoded_s - waited_s
            replayed = _replay(accesses, times_s, pool_bytes, budget)
            again = replayed.disk_written_bytes / took_s / 1e6
            rows.append(
                [
                    *(make.__name__, name, f"{every_s:.1f} s", f"{encoded_s:.1f} s"),
                    *(f"{waited_s:.1f} s", f"{written:.0f} MB/s", f"{saved_s:.1f} s"),
                    *(f"{replayed.saved_s:.1f} s", f"{again:.0f} MB/s"),
                ]
            )
    return rows


def _replay(
    accesses: list[Access], times_s: array[float], pool_bytes: int, bytes_per_s: int
) -> PoolOutcome:
    """What `ecd replay` has for a run's accesses, under the daemon's policy."""
    numbers = {
        key: number for number, key in enumerate(dict.fromkeys(each.key for each in accesses))
    }
    items = {
        numbers[a.key]: TracedKey(numbers[a.key], 1, a.nbytes, a.nbytes, a.cost_s) for a in accesses
    }
    order = array("I", (numbers[each.key] for each in accesses))
    found = Accesses([items[number] for number in range(len(items))], order, times_s)
    disk = Disk(DISK_BYTES, bytes_per_s) if bytes_per_s else None
    return simulate(found, pool_bytes, "value", POLICIES["value"], disk=disk)


def _run(address: str, accesses: list[Access]) -> tuple[float, float, array[float]]:
    """The seconds that were encoded, that were waited for the daemon, and the accesses' times."""
    encoded_s = waited_s = 0.0
    times_s = array("d")
    data = bytes(max(access.nbytes for access in accesses))
    begun = time.perf_counter()
    with Client(address) as client:
        for key, nbytes, cost_s in accesses:
            started = time.perf_counter()
            times_s.append(started - begun)
            [future] = client.get_async([key], 5.0, only_if_written=True, makes=[0.0])
            item = future.result(10.0)
            waited_s += time.perf_counter() - started
            if item is not None:
                item.close()
                continue
            time.sleep(cost_s)
            encoded_s += cost_s
            client.put_bytes(key, memoryview(data)[:nbytes], "uint8", (nbytes,), cost=cost_s)
    return encoded_s, waited_s, times_s


def main(
    directory: Annotated[Path | None, typer.Option(help="On the disk to be measured.")] = None,
    output: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
    only: Annotated[str, typer.Option(help="reads or savings alone.")] = "",
) -> None:
    out = Console(highlight=False, width=120)
    text = f"{machine()}. Medians.\n"
    with tempfile.TemporaryDirectory(dir=directory) as place:
        for name, title, measure in (
            ("reads", "An entry on disk, read by a client and past the page cache.", bandwidths),
            ("savings", "An engine's workload, memory of a tenth of its footprint.", savings),
        ):
            if only in ("", name):
                rows = measure(Path(place))
                show(out, title, rows)
                text += f"\n{title}\n\n{markdown(rows)}"
    if output is not None:
        write_page(output, text)


if __name__ == "__main__":
    typer.run(main)
