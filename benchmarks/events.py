"""The cost of publishing what is stored and removed, on the daemon and on the wire.

    python benchmarks/events.py [--output FILE.md]

Rounds of puts to three daemons in turn: without events, with them and nobody who listens, and with
a subscriber in a process of its own. docs/design-nodes.md calculates with what is measured here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Annotated, Any

import typer
import uvloop
import zmq
from common import end_daemon, report, start_daemon

from ecd.base.clock import Clock
from ecd.core.cache import Cache
from ecd.core.model.outcomes import LimitReached, Reserved
from ecd.core.model.types import Content, Key
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.live.live import LiveCache
from ecd.ops.events import COLLECT_S, KEYS, Events
from ecd_client import Client
from ecd_client.events import Subscriber
from ecd_client.session.channel import call, open_channel
from ecd_proto.events import SNAPSHOT
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

POOL_BYTES = 256 << 20
NBYTES = 8192
NAMESPACE = "model|main|bfloat16|none"
WITHOUT, PUBLISHED, HEARD = "without events", "published", "published, one subscriber"
SLOW_S, A_SECOND = 10.0, 20
ENTRIES, MESSAGES = 20_000, 100
LISTEN = "--listen"


def cpu_s(pid: int) -> float:
    """CPU that the process's living threads have used, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


class Node:
    """A daemon, a client of it, and the CPU that the daemon has used."""

    def __init__(self, directory: Path, number: int, **settings: str) -> None:
        self.process, self.address = start_daemon(directory, f"n{number}", POOL_BYTES, **settings)
        self.client = Client(self.address, namespace=NAMESPACE)
        self._stub = pb_grpc.CacheStub(open_channel(self.address))
        status = call(self._stub.Status, pb.StatusRequest(), self.address)
        self.events, self.replay = status.events, status.events_replay
        self._put = 0

    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)

    def put(self, count: int) -> None:
        for _ in range(count):
            self._put += 1
            self.client.put_bytes(f"{self._put:064x}", bytes(NBYTES), "uint8", (NBYTES,))

    def evict(self) -> None:
        call(self._stub.Evict, pb.EvictRequest(), self.address, 60.0)

    def close(self) -> None:
        self.client.close()
        end_daemon(self.process)


def listen(events: str, replay: str) -> None:
    """Follow a daemon, until killed."""
    with Subscriber([(events, replay)]) as subscriber:
        while True:
            subscriber.changes(1.0)


@contextlib.contextmanager
def listening(node: Any) -> Iterator[int]:
    """A process that follows the daemon."""
    listener = subprocess.Popen([sys.executable, __file__, LISTEN, node.events, node.replay])
    try:
        time.sleep(3.0)  # it has started
        yield listener.pid
    finally:
        listener.kill()
        listener.wait()


def measure_puts(nodes: dict[str, Node], puts: int, rounds: int) -> list[list[str]]:
    """Puts a second, and the daemon's CPU, for each daemon and against the one without events."""
    rates: dict[str, list[float]] = {name: [] for name in nodes}
    costs: dict[str, list[float]] = {name: [] for name in nodes}
    for number in range(-1, rounds):  # the first warms up
        for name, node in sorted(nodes.items(), key=lambda _: random.random()):
            before_s, started_s = node.cpu_s(), time.perf_counter()
            node.put(puts)
            took_s = time.perf_counter() - started_s
            node.evict()
            time.sleep(0.3)  # what is published behind is this round's
            if number >= 0:
                rates[name].append(puts / took_s)
                costs[name].append((node.cpu_s() - before_s) / puts * 1e6)
    rows = []
    for name in nodes:
        rows.append([f"puts a second, {name}", f"{median(rates[name]):,.0f}"])
    for name in nodes:
        cost = f"{median(costs[name]):.0f} us"
        rows.append([f"a put and its eviction, {name}: the daemon's CPU", cost])
    for name in list(nodes)[1:]:
        ratios = [a / b - 1 for a, b in zip(rates[name], rates[WITHOUT], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        against = f"{middle:+.1%}, half of the rounds {low:+.0%} to {high:+.0%}"
        rows.append([f"{name}: puts a second, against none in the same round", against])
    return rows


async def measure_message(rows: list[list[str]]) -> None:
    """The CPU of a message in a process of nothing else, its network thread included."""
    cache = Cache([Pool(Allocator(0, 64 << 20, 4096))], 30.0)
    session = cache.open_session()
    assert not isinstance(session, LimitReached)
    keys = [Key(NAMESPACE, f"{number:064x}") for number in range(KEYS)]
    for key in keys:
        with cache.reserving():
            reserved = cache.reserve(session, key, Content("uint8", (NBYTES,), NBYTES), 0.0)
        assert isinstance(reserved, Reserved)
        cache.commit(session, reserved.entry, 0.0)
    events = Events("127.0.0.1:0", "10.0.0.1:9465", "e" * 32, LiveCache(cache, Clock()))
    running = asyncio.ensure_future(events.run())
    node = SimpleNamespace(events=events.address, replay=events.replay_address)
    with listening(node):
        waiting_us = 0.0
        for count in (0, 2, KEYS):
            before_s = time.process_time()
            for _ in range(MESSAGES):
                events._changes.add(dict.fromkeys(keys[:count], True))
                await asyncio.sleep(1.5 * COLLECT_S)
            us = (time.process_time() - before_s) / MESSAGES * 1e6 - waiting_us
            if count == 0:
                waiting_us = us
                continue
            what = f"a message of {count} changes to one subscriber: the daemon's CPU"
            rows += [[what, f"{us:.0f} us, {us / count:.1f} us a change"]]
    assert events.counters.events == MESSAGES * (2 + KEYS)
    running.cancel()
    await events.close()


def measure_wire(node: Node) -> list[list[str]]:
    """Messages and bytes at the rate of docs/design-nodes.md: as many evictions as puts."""
    with (
        listening(node) as listener,
        zmq.Context() as context,
        context.socket(zmq.SUB) as sub,
    ):
        sub.subscribe(b"")
        sub.connect(f"tcp://{node.events}")
        sub.poll(5000)
        messages = nbytes = changes = 0
        stub = pb_grpc.CacheStub(open_channel(node.address))
        before_s, until_s = cpu_s(listener), time.monotonic() + SLOW_S
        while time.monotonic() < until_s:
            node.put(1)
            key = pb.Key(namespace=NAMESPACE, mm_hash=f"{node._put:064x}")
            time.sleep(0.5 / A_SECOND)
            call(stub.Evict, pb.EvictRequest(key=key), node.address)
            time.sleep(0.5 / A_SECOND)
            changes += 2
        time.sleep(0.3)
        heard_us = (cpu_s(listener) - before_s) / changes * 1e6
        while sub.poll(0):
            frames = sub.recv_multipart()
            messages, nbytes = messages + 1, nbytes + sum(map(len, frames))
    return [
        ["changes a second, of one daemon", f"{changes / SLOW_S:.0f}"],
        ["messages a second for them, signs of life included", f"{messages / SLOW_S:.1f}"],
        ["bytes of a change, in these messages", f"{nbytes / changes:.0f}"],
        ["a change heard by the Python subscriber, its CPU", f"{heard_us:.0f} us"],
    ]


def measure_snapshot(node: Node) -> list[list[str]]:
    node.put(ENTRIES)
    time.sleep(0.5)
    before_s, started_s, nbytes = node.cpu_s(), time.perf_counter(), 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://{node.replay}")
        dealer.send_multipart([b"", SNAPSHOT])
        while (frames := dealer.recv_multipart())[1]:
            nbytes += sum(map(len, frames))
    took_s, cpu_s = time.perf_counter() - started_s, node.cpu_s() - before_s
    own_s = time.process_time()
    with Subscriber([(node.events, node.replay)]) as subscriber:
        while not subscriber.is_current:
            subscriber.changes(1.0)
        assert len(subscriber.feeds[0].entries) == ENTRIES
    own_us = (time.process_time() - own_s) / ENTRIES * 1e6
    return [
        [f"snapshot of {ENTRIES:,} entries", f"{1000 * took_s:.0f} ms"],
        ["the same, the daemon's CPU", f"{1000 * cpu_s:.0f} ms"],
        ["bytes of an entry in a snapshot", f"{nbytes / ENTRIES:.0f}"],
        ["an entry taken by the Python subscriber, its CPU", f"{own_us:.1f} us"],
    ]


def main(
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
    puts: Annotated[int, typer.Option(min=100, help="Puts of a round.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the medians are shown.")] = 31,
) -> None:
    message_rows: list[list[str]] = []
    uvloop.run(measure_message(message_rows))  # before there are clients with threads
    nodes: dict[str, Node] = {}
    with tempfile.TemporaryDirectory() as directory:
        try:
            for number, name in enumerate((WITHOUT, PUBLISHED, HEARD)):
                settings = {} if name == WITHOUT else {"ECD_EVENTS_ADDRESS": "127.0.0.1:0"}
                nodes[name] = Node(Path(directory), number, **settings)
            with listening(nodes[HEARD]):
                rows = measure_puts(nodes, puts, rounds)
            rows += (
                message_rows + measure_wire(nodes[PUBLISHED]) + measure_snapshot(nodes[PUBLISHED])
            )
        finally:
            for node in nodes.values():
                node.close()
    title = (
        f"{rounds} rounds of {puts} puts of {NBYTES} bytes to each daemon, then one eviction. "
        "Medians; differences are medians of those within a round"
    )
    report(title, [["what", "measured"], *rows], output, 120)


if __name__ == "__main__":
    if sys.argv[1:2] == [LISTEN]:
        listen(*sys.argv[2:])
    else:
        typer.run(main)
