"""How long fetches take, and how soon they are given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from ecd.base.clock import Clock
from ecd.base.identity import NodeIdentity
from ecd.cluster.cluster import Cluster, Outside, PoolMemory
from ecd.core.cache import Cache
from ecd.core.model.types import Content, EntryId, Key
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.live.flights import Flights
from ecd.live.live import LiveCache
from ecd.memory.checksums import Checksums
from ecd.rpc.peer.serving import TURN_S, Serving, Turn
from ecd.settings.config import Config
from ecd_client.vllm.base import hints
from ecd_proto.mapped_file import MappedFile
from ecd_proto.shm.files import GRANULE_BYTES
from support.hints import IDENTIFIERS, SHAPES, huge
from support.nodes import NodeClient
from support.pairs import Apart, cable
from support.reserving import reserve
from support.waiting import eventually, eventually_async

Figure = Callable[[str, float, str, str], None]
MIB = 1 << 20


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    with cable() as (near, far):
        settings = {"ECD_SLOW_LOG_S": "0", "ECD_FETCH_TIMEOUT_S": "5"}
        with Apart(near, far, tmp_path, **settings).running() as apart:
            yield apart


@pytest.mark.parametrize("shape", SHAPES)
def test_hints_of_any_form(shape: str, figure: Figure) -> None:
    params = huge(shape)
    for name, identifiers in zip(("all", "named"), IDENTIFIERS, strict=True):
        took_s = []
        for _ in range(10):
            begun_s = time.perf_counter()
            hints.hints_in(params, identifiers)
            hints.consumers_in(params)
            took_s.append(time.perf_counter() - begun_s)
        figure(name, min(took_s), "s", "below 0.001: it is the scheduler's time")


def test_an_offer_of_many_keys(figure: Figure) -> None:
    async def run() -> None:
        live = LiveCache(Cache([Pool(Allocator(0, 1 << 24, GRANULE_BYTES))]), Clock())
        memory = MappedFile.of_memory(1 << 24)
        config = Config(
            peer_address="127.0.88.1:9465", peer_insecure=True, hint_networks="127.0.0.0/8"
        )
        pools = {0: SimpleNamespace(readable=memory, writable=memory)}
        checksums = Checksums(live, pools)
        identity = NodeIdentity("default", "a" * 32, "a test", config.peer_address)
        about = Flights(live), PoolMemory(pools, checksums), identity, lambda *_: None, Outside()
        cluster, session = Cluster(config, live, *about), live.cache.open_session()
        keys = [Key("default", str(number)) for number in range(1024)]
        for key in keys:
            reserved = reserve(live.cache, session, key, Content("uint8", (64,), 64), 0.0)
            live.commit(session, reserved.entry)
        took_s = []
        for _ in range(5):  # the least of them: Python's collector may run in one
            begun_s = time.thread_time()
            cluster.offer(keys, ["127.0.77.1:1"])
            await asyncio.sleep(0)
            took_s.append(time.thread_time() - begun_s)
        figure("of the event loop", min(took_s), "s", "below 0.005")
        await cluster.close()
        checksums.close()

    asyncio.run(run())


def test_a_turn_that_takes_long(figure: Figure) -> None:
    async def run() -> None:
        serving, begun = Serving(1, lambda *_: None, Clock()), []
        turns = [
            Turn(EntryId(1), node, lambda node=node: begun.append(node), lambda _: None)
            for node in ("first", "second")
        ]
        begun_s = time.monotonic()
        assert [serving.ask(turn, 60.0) for turn in turns] == [True, False]
        await eventually_async(lambda: begun == ["second"])
        figure("kept another waiting for", time.monotonic() - begun_s, "s", f"{TURN_S}: TURN_S")
        for turn in turns:
            serving.end(turn)

    asyncio.run(run())


def test_a_small_read_beside_a_large_one(apart: Apart, figure: Figure) -> None:
    for key, nbytes in (("first", 4096), ("large", 16 * MIB), ("small", 4096)):
        apart.owner.put(key, nbytes)
    assert apart.asker.get("first", nodes=[apart.peer])["right"]
    apart.near.run("sysctl", "-qw", "net.ipv4.tcp_wmem=4096 16384 131072")
    apart.near.throttle("40mbit")
    other = NodeClient(apart.wants)
    other.send("get", key="large", timeout=25.0, nodes=[apart.peer], seed=1)
    eventually(lambda: apart.status().in_flight, "it is under way")
    reply = apart.asker.get("small", nodes=[apart.peer])
    assert reply["right"]
    figure("small", reply["seconds"], "s", "below 1: the large one takes 3 s")
    assert other.receive()["right"]
    other.close()


def test_reads_during_first_contact_with_nobody(apart: Apart, figure: Figure) -> None:
    for number in range(30):
        apart.owner.put(f"k{number}", 64 << 10, seed=number)
    assert apart.asker.get("k0", nodes=[apart.peer], seed=0)["right"]
    nobody = [f"10.77.0.{n}:9465" for n in range(100, 108)]  # no machine answers there
    second = NodeClient(apart.wants)
    second.send("get_many", keys=["x"] * 8, timeout=5.0, nodes=nobody)
    took_s = []
    for number in range(1, 30):
        reply = apart.asker.get(f"k{number}", nodes=[apart.peer], seed=number)
        assert reply["right"]
        took_s.append(reply["seconds"])
    figure("median", median(took_s), "s", "below 0.1")
    figure("longest", max(took_s), "s", "below 2: contact takes 5 s and more")
    second.receive()
    second.close()


def test_connections_that_have_been_idle(apart: Apart, figure: Figure) -> None:
    """Reads after more than a minute, and after a few seconds."""
    for number in range(7):
        apart.owner.put(f"k{number}", 8 * MIB, seed=number)
    for idle_s, numbers in ((0, [0]), (65, range(1, 4)), (6, range(4, 7))):
        time.sleep(idle_s)
        replies = [apart.asker.get(f"k{n}", nodes=[apart.peer], seed=n) for n in numbers]
        assert all(reply["right"] for reply in replies)
        longest = max(reply["seconds"] for reply in replies)
        figure(f"longest read after {idle_s} s", longest, "s", "below 1")
    assert apart.outcomes()["fetched"] == 7
