"""Fetches between two daemons, beside Mooncake's bare engine and raw TCP, on the same bytes.

    python benchmarks/fetch.py [--rounds N] [--output FILE.md]

Every round does the same work in each way, one after the other: N entries of one size, one at a
time and four at a time. All of it runs on this machine, over loopback, so that both ends share
its cores.
"""

from __future__ import annotations

import multiprocessing
import re
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from common import MIB, end_daemon, report, start_daemon
from rich.console import Console

from ecd_client import Client, Hint, Item
from ecd_client.session.channel import call, open_channel
from ecd_proto.mapped_file import MappedFile
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

SIZES = {
    "64 KiB": (64 << 10, 16),
    "256 KiB": (256 << 10, 16),
    "1 MiB": (MIB, 16),
    "8 MiB": (8 * MIB, 16),
    "32 MiB": (32 * MIB, 8),
    "128 MiB": (128 * MIB, 4),
    "64 of 64 KiB": (64 << 10, 64),
}
"""Bytes of an entry, and how many of them a round moves."""
POOL_BYTES = 640 * MIB
AT_ONCE = 4
METRICS_PORT = 19464
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
Way = Callable[[int, int], float]
"""Moves N entries of so many bytes; the seconds that took."""


# -- Mooncake's engine alone -----------------------------------------------------------------------


def start_engine(host: str, ports: str) -> Any:
    """Start Mooncake's engine with the variables that ecd sets."""
    from ecd.cluster.transport.engine import EngineSettings, start_transfer_engine

    return start_transfer_engine(EngineSettings(host, "tcp", ports))


def serve_bare(pipe: Connection) -> None:
    memory = MappedFile.of_memory(POOL_BYTES)
    memory.populate(0, POOL_BYTES)
    engine = start_engine(HOSTS[2], "18400-18431")
    engine.register_memory(memory.address, POOL_BYTES)
    pipe.send((f"{HOSTS[2]}:{engine.get_rpc_port()}", memory.address))
    pipe.recv()


class Bare:
    """Reads of the bare engine, as its documentation has them."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._server = context.Process(target=serve_bare, args=(theirs,), daemon=True)
        self._server.start()
        self._peer, self._source = self._pipe.recv()
        self._engine = start_engine(HOSTS[1], "18432-18463")
        self._target = MappedFile.of_memory(POOL_BYTES)
        self._target.populate(0, POOL_BYTES)

    def synchronous(self, nbytes: int, count: int) -> float:
        started = time.perf_counter()
        for number in range(count):
            at = number * nbytes
            done = self._engine.transfer_sync_read(
                self._peer, self._target.address + at, self._source + at, nbytes
            )
            assert done == 0
        return time.perf_counter() - started

    def asynchronous(self, nbytes: int, count: int) -> float:
        """Four in flight, polled every 20 us."""
        started = time.perf_counter()
        waiting, under_way = list(range(count)), list[int]()
        while waiting or under_way:
            while waiting and len(under_way) < AT_ONCE:
                at = waiting.pop() * nbytes
                under_way.append(
                    self._engine.batch_transfer_async_read(
                        self._peer, [self._target.address + at], [self._source + at], [nbytes]
                    )
                )
            statuses = [self._engine.transfer_check_status(read) for read in under_way]
            assert all(status >= 0 for status in statuses)
            under_way = [r for r, s in zip(under_way, statuses, strict=True) if s == 0]
            if 1 not in statuses:
                time.sleep(20e-6)
        return time.perf_counter() - started

    def close(self) -> None:
        self._pipe.send(None)
        self._server.join()


# -- raw TCP ---------------------------------------------------------------------------------------


def serve_raw(pipe: Connection) -> None:
    """Sends what is asked for, from memory that the caches do not hold, a thread a stream."""
    memory = memoryview(bytearray(POOL_BYTES))
    with socket.create_server((HOSTS[2], 0)) as listener:
        pipe.send(listener.getsockname())

        def serve(connection: socket.socket) -> None:
            with connection:
                while request := connection.recv(16):
                    at, nbytes = (int.from_bytes(request[i : i + 8], "little") for i in (0, 8))
                    connection.sendall(memory[at : at + nbytes])

        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


class Raw:
    """A plain TCP transfer: one request, one answer, on streams that stay open."""

    def __init__(self) -> None:
        pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._server = context.Process(target=serve_raw, args=(theirs,), daemon=True)
        self._server.start()
        address = pipe.recv()
        self._streams = [socket.create_connection(address) for _ in range(AT_ONCE)]
        self._target = memoryview(bytearray(POOL_BYTES))

    def _read(self, stream: socket.socket, at: int, nbytes: int) -> None:
        stream.sendall(at.to_bytes(8, "little") + nbytes.to_bytes(8, "little"))
        view = self._target[at : at + nbytes]
        while view:
            view = view[stream.recv_into(view) :]

    def one(self, nbytes: int, count: int) -> float:
        started = time.perf_counter()
        for number in range(count):
            self._read(self._streams[0], number * nbytes, nbytes)
        return time.perf_counter() - started

    def four(self, nbytes: int, count: int) -> float:
        def work(lane: int) -> None:
            for number in range(lane, count, AT_ONCE):
                self._read(self._streams[lane], number * nbytes, nbytes)

        started = time.perf_counter()
        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started

    def close(self) -> None:
        self._server.kill()


# -- ecd -------------------------------------------------------------------------------------------


class Ecd:
    """Two daemons; the first one's entries are fetched by the second, again and again."""

    def __init__(self, directory: Path) -> None:
        token = {"ECD_PEER_TOKEN": "the token of a benchmark"}
        self._daemons = []
        clients = []
        for name, host, first in (("has", HOSTS[0], 18464), ("wants", HOSTS[1], 18496)):
            daemon, address = start_daemon(
                directory,
                name,
                POOL_BYTES,
                ECD_PEER_ADDRESS=f"{host}:9465",
                ECD_ENGINE_PORTS=f"{first}-{first + 31}",
                ECD_HINT_NETWORKS="127.0.0.0/8",
                ECD_METRICS_ADDRESS=f"127.0.0.1:{METRICS_PORT if name == 'wants' else 0}",
                **token,
            )
            self._daemons.append(daemon)
            clients.append(Client(address, name="bench"))
        self._has, self._wants = clients
        self._hints: dict[str, list[str | Hint]] = {}
        self._stub = pb_grpc.CacheStub(open_channel(self._wants.address))
        self._fetch_s = 0.0

    def fill(self, nbytes: int, count: int) -> None:
        for client in (self._has, self._wants):
            stub = pb_grpc.CacheStub(open_channel(client.address))
            call(stub.Evict, pb.EvictRequest(), client.address)
        self._keys = [f"{nbytes}-{number}" for number in range(count)]
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        for key in self._keys:
            self._has.put(key, data)
        time.sleep(0.5)  # checksums are made behind the puts
        for key in self._keys:
            hint = self._has.hint(key)
            assert hint is not None, "the node that has them has no address"
            self._hints[key] = [hint]

    def one(self, nbytes: int, count: int) -> float:
        return self._one(self._hints)

    def one_by_node(self, nbytes: int, count: int) -> float:
        """Fetch by hints that name the node, not the entry's place in its pool."""
        return self._one({key: [self._has.node] for key in self._keys})

    def _one(self, hints: dict[str, list[str | Hint]]) -> float:
        self._forget()
        before_s = self._fetched_s()
        started = time.perf_counter()
        for key in self._keys:
            item = self._wants.get(key, 10.0, nodes=hints[key])
            assert item is not None
            item.close()
        took_s = time.perf_counter() - started
        self._fetch_s = self._fetched_s() - before_s
        return took_s

    def fetch(self, nbytes: int, count: int) -> float:
        """The daemon's part of the last round: from wanting an entry to serving it."""
        return self._fetch_s

    def _fetched_s(self) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics") as answer:
            (sum_s,) = re.findall(r"ecd_fetch_seconds_sum (\S+)", answer.read().decode())
        return float(sum_s)

    def several(self, at_once: int) -> Way:
        def way(nbytes: int, count: int) -> float:
            self._forget()
            started = time.perf_counter()
            waiting, under_way = list(self._keys), list[Future[Item | None]]()
            while waiting or under_way:
                while waiting and len(under_way) < at_once:
                    ask = waiting[: at_once - len(under_way)]
                    del waiting[: len(ask)]
                    under_way += self._wants.get_async(
                        ask, 10.0, nodes=[self._hints[key] for key in ask], only_if_written=True
                    )
                item = under_way.pop(0).result()
                assert item is not None
                item.close()
            return time.perf_counter() - started

        return way

    def local(self, nbytes: int, count: int) -> float:
        """The same gets when the entries are here: what the client's own call takes."""
        started = time.perf_counter()
        for key in self._keys:
            self._wants.get(key, 10.0).close()
        return time.perf_counter() - started

    def _forget(self) -> None:
        call(self._stub.Evict, pb.EvictRequest(), self._wants.address)

    def close(self) -> None:
        for client in (self._has, self._wants):
            client.close()
        for daemon in self._daemons:
            end_daemon(daemon)


def main(
    rounds: Annotated[int, typer.Option(help="Rounds; the medians are shown.")] = 15,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
    sizes: Annotated[str, typer.Option(help="Only sizes whose name contains this.")] = "",
) -> None:
    torch.set_num_threads(1)
    progress = Console(stderr=True)
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        bare, raw, ecd = Bare(), Raw(), Ecd(Path(directory))
        ways: dict[str, Way] = {
            "raw TCP, one stream": raw.one,
            "raw TCP, four streams": raw.four,
            "engine, synchronous": bare.synchronous,
            "engine, four in flight": bare.asynchronous,
            "ecd, one get at a time": ecd.one,
            "of which the daemon's fetch": ecd.fetch,
            "ecd, the same gets once local": ecd.local,
            "ecd, by the node alone": ecd.one_by_node,
            "of which its fetch": ecd.fetch,
            "ecd, four gets at a time": ecd.several(AT_ONCE),
            "ecd, all gets at a time": ecd.several(64),
        }
        try:
            for size, (nbytes, count) in SIZES.items():
                if sizes not in size:
                    continue
                progress.print(f"{size} ...")
                ecd.fill(nbytes, count)
                took: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(rounds + 1):
                    for name, way in ways.items():
                        seconds = way(nbytes, count)
                        if number:  # the first round warms up
                            took[name].append(seconds / count)
                results[size] = took
        finally:
            ecd.close()
            raw.close()
            bare.close()
    rows = [["", *results]]
    for name in ways:
        cells = []
        for size, took in results.items():
            each_s = median(took[name])
            nbytes = SIZES[size][0]
            cells.append(f"{each_s * 1e6:,.0f} us, {nbytes / each_s / 1e9:.2f} GB/s")
        rows.append([name, *cells])
    best = ["ratio to the engine's better figure"]
    added = ["a fetch beyond a synchronous read"]
    for took in results.values():
        ratios = [
            min(sync, four) / min(fetched)
            for sync, four, *fetched in zip(
                took["engine, synchronous"],
                took["engine, four in flight"],
                took["ecd, four gets at a time"],
                took["ecd, all gets at a time"],
                strict=True,
            )
        ]
        best.append(f"{median(ratios):.2f}")
        fetches, reads = took["of which the daemon's fetch"], took["engine, synchronous"]
        more = [fetch - read for fetch, read in zip(fetches, reads, strict=True)]
        added.append(f"{median(more) * 1e6:,.0f} us")
    rows += [best, added]
    title = "Time and throughput of one entry, medians of rounds."
    title += " By the node alone: nobody says where in its pool an entry lies."
    report(title, rows, output, width=170, where=", over loopback")


if __name__ == "__main__":
    typer.run(main)
