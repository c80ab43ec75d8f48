"""The cost of finding a key on other nodes: Redis, static peers, links.

    python benchmarks/directory.py [--output FILE.md]

Real servers: a redis-server and a daemon on this machine. docs/design-nodes.md calculates with
what is measured here.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any

import psutil
import typer
from common import (
    cpu_s,
    end_daemon,
    machine,
    markdown,
    redis_server,
    show,
    start_daemon,
    write_page,
)
from redis import Redis
from rich.console import Console

from ecd.base.clock import Clock
from ecd.base.identity import NodeIdentity
from ecd.cluster.directory.directory import Candidate, StaticDirectory
from ecd.cluster.directory.redis_directory import RedisDirectory
from ecd.cluster.peers.peers import Peers
from ecd.core.model.types import Content, EntryId, EntryInfo, Extent, Key
from ecd.settings.config import Config

PORT = 16399
ENTRIES = 100_000
LINKS = 100
TOKEN = "the token of a benchmark"
METADATA = b'\x01{"image":{"image_grid_thw":[1,54,72]}}'
Rows = list[list[str]]


def keys(count: int, first: int = 0) -> list[Key]:
    return [
        Key("model|main|bfloat16|none", f"{number:064x}") for number in range(first, first + count)
    ]


class Stored:
    """What a node's cache shows: pictures at a place whose numbers are of usual length."""

    leases = 0

    def page(self, after: EntryId, limit: int) -> tuple[list[EntryInfo], EntryId | None]:
        return [], None

    def info(self, key: Key) -> EntryInfo:
        extent = Extent(0, 3 << 30, 10 << 20)
        content = Content("bfloat16", (1440, 3584), extent.nbytes, METADATA)
        return EntryInfo(EntryId(1), key, content, extent, 0, 0, 0.0, 0.0, None)


def config(number: int, **settings: Any) -> Config:
    settings |= {"peer_address": f"10.0.0.{number}:1", "peer_token": TOKEN, "cluster": "bench"}
    return Config(**settings)


def identity(number: int) -> NodeIdentity:
    return NodeIdentity("bench", f"{number:032x}", "bench", f"10.0.0.{number}:1")


async def timed_us(action: Callable[[], Awaitable[object]], times: int = 300) -> float:
    took = []
    for _ in range(times):
        started = time.perf_counter()
        await action()
        took.append((time.perf_counter() - started) * 1e6)
    return median(took)


def redis_cpu_s(redis: Redis) -> float:
    used = redis.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


async def measure_redis(rows: Rows) -> None:
    redis = Redis(port=PORT)
    url = f"redis://127.0.0.1:{PORT}/0"
    cache: Any = SimpleNamespace(views=Stored())
    asking, holding = (
        RedisDirectory(config(n, directory=url), identity(n), cache, Clock()) for n in range(2)
    )
    running = [asyncio.ensure_future(node.run()) for node in (asking, holding)]
    await asyncio.sleep(0.5)
    before_bytes, before_s = redis.info("memory")["used_memory"], redis_cpu_s(redis)
    own_s, started = time.process_time(), time.perf_counter()
    for first in range(0, ENTRIES, 1000):
        holding.publish(dict.fromkeys(keys(1000, first), True))
        while holding.state.unpublished:
            await asyncio.sleep(0)
    took_s = time.perf_counter() - started
    own_us = (time.process_time() - own_s) / ENTRIES * 1e6
    redis_us = (redis_cpu_s(redis) - before_s) / ENTRIES * 1e6
    row_bytes = (redis.info("memory")["used_memory"] - before_bytes) / ENTRIES
    rows += [
        ["Redis: telling one entry, the daemon's CPU", f"{own_us:.1f} us"],
        ["Redis: telling one entry, Redis' CPU", f"{redis_us:.1f} us"],
        ["Redis: telling entries, one daemon", f"{ENTRIES / took_s:,.0f} a second"],
        ["Redis: memory of one entry on one node", f"{row_bytes:.0f} bytes"],
    ]
    times = 300
    for count in (1, 8, 64):
        before_s, wanted = redis_cpu_s(redis), keys(count)
        each_us = await timed_us(lambda wanted=wanted: asking.find(wanted), times)
        redis_us = (redis_cpu_s(redis) - before_s) / times * 1e6
        rows += [
            [f"Redis: lookup of {count} keys in one batch", f"{each_us:,.0f} us"],
            ["Redis: the same, Redis' CPU", f"{redis_us:,.0f} us"],
        ]
    before_s = redis_cpu_s(redis)
    for _ in range(times):
        holding._publisher._beat_s = 0.0
        await holding._publisher._beat()
    redis_us = (redis_cpu_s(redis) - before_s) / times * 1e6
    rows.append(["Redis: a node's sign of life (every 5 s), Redis' CPU", f"{redis_us:.0f} us"])
    for task in running:
        task.cancel()
    for node in (asking, holding):
        await node.close()


async def measure_links(rows: Rows, address: str, pid: int) -> None:
    daemon = psutil.Process(pid)
    before_bytes = daemon.memory_info().rss
    askers = [Peers(config(n), identity(n), None, Clock()) for n in range(LINKS)]
    for asker in askers:
        await asker.link(address)
    link_kib = (daemon.memory_info().rss - before_bytes) / LINKS / 1024
    idle_s, before_s = 20.0, cpu_s(daemon)
    await asyncio.sleep(idle_s)
    idle = (cpu_s(daemon) - before_s) / idle_s
    link, wanted, times = await askers[0].link(address), keys(1), 300
    before_s, own_s = cpu_s(daemon), time.process_time()
    each_us = await timed_us(lambda: link.find(wanted), times)
    answer_us = (cpu_s(daemon) - before_s) / times * 1e6
    ask_us = (time.process_time() - own_s) / times * 1e6
    rows += [
        ["link: memory at the node that is linked to", f"{link_kib:.0f} KiB"],
        [f"{LINKS} idle links: CPU of that node", f"{idle:.2%} of a core"],
        ["question of one key over a link", f"{each_us:,.0f} us"],
        ["the same, CPU of the node that answers", f"{answer_us:.0f} us"],
        ["the same, CPU of the node that asks", f"{ask_us:.0f} us"],
    ]

    async def ask(node: str, wanted: Sequence[Key]) -> Sequence[Candidate | None]:
        return await (await askers[int(node)].link(address)).find(wanted)

    for count in (10, 100):
        static = StaticDirectory([str(n) for n in range(count)], ask, Clock())
        each_us = await timed_us(lambda static=static: static.find(wanted), 50)
        what = f"static: lookup among {count} nodes, one answers for all"
        rows.append([what, f"{each_us:,.0f} us"])
    for asker in askers:
        await asker.close()


def main(
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    rows: Rows = [["what", "measured"]]
    with tempfile.TemporaryDirectory() as directory, redis_server(Path(directory), PORT):
        daemon, _ = start_daemon(
            Path(directory),
            "peer",
            64 << 20,
            ECD_PEER_ADDRESS="127.0.0.2:9465",
            ECD_PEER_TOKEN=TOKEN,
        )
        try:
            asyncio.run(measure_redis(rows))
            asyncio.run(measure_links(rows, "127.0.0.2:9465", daemon.pid))
        finally:
            end_daemon(daemon)
    show(Console(highlight=False), "Costs of finding entries on other nodes", rows)
    if output is not None:
        write_page(output, f"{machine()}.\nMedians, or means of many.\n\n{markdown(rows)}")


if __name__ == "__main__":
    typer.run(main)
