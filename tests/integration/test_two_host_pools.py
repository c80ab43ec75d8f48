"""A daemon with a second host pool, used through the public API from put to eviction."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from ecd.checksum import digests, fold
from ecd.clock import REAL
from ecd.core.pool import Pool
from ecd.core.types import Key, SessionId
from ecd.identity import NodeIdentity
from ecd.live import LiveCache, Reserve
from ecd.memory.checksums import Checksums
from ecd.memory.host import HostPool
from ecd.memory.pool_dir import PoolDir
from ecd.memory.session_files import SessionFiles
from ecd.memory.shared_index import SharedIndex
from ecd.node import Node, SharedBoard, make_cache
from ecd.rpc.cache_service import Monitor
from ecd.rpc.origins import NoOtherNodes, NothingToRecover
from ecd.rpc.puts import Doorbell, PutIntake
from ecd.rpc.server import Server
from ecd.rpc.socket import OwnedSocket
from ecd.rpc.status import Status
from ecd.turns import Pace
from ecd_client import Client
from ecd_client.calls import open_channel
from ecd_client.cli.render import names_of_pools
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.waiting import HANG_S

NEAR, FAR = 0, 1
BYTES = {NEAR: 1 << 20, FAR: 8 << 20}


class FarFirst(LiveCache):
    """A live cache that reserves for clients in its second pool."""

    def reserving(
        self, session: SessionId, pace: Pace, patience_s: float, pool: Pool | None = None
    ) -> AbstractAsyncContextManager[Reserve]:
        return super().reserving(session, pace, patience_s, pool or self.cache.pools[1])


class TwoPools:
    """A daemon's own parts over two host pools, on the event loop of a thread of this process."""

    def __init__(self, directory: Path) -> None:
        self.address = f"unix://{directory}/ecd.sock"
        self.calls: Counter[str] = Counter()
        self._directory = directory
        self._is_serving, self._stop = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()])

    def start(self) -> None:
        self._thread.start()
        assert self._is_serving.wait(HANG_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
        self._loop.close()

    def on_loop(self, act: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(act, self._loop).result(HANG_S)

    async def _run(self) -> None:
        with ExitStack() as opened:
            incarnation = secrets.token_hex(16)
            socket = OwnedSocket(self.address)
            opened.callback(socket.close)
            self.pools = {}
            for number, nbytes in BYTES.items():
                place = PoolDir("/dev/shm", f"pools-{os.getpid()}-{number}")
                self.pools[number] = pool = HostPool(place, incarnation, nbytes, cold=True)
                opened.callback(pool.close)
                pool.populate(lambda _: None)
            index = SharedIndex(self.pools[NEAR].directory, incarnation, sum(BYTES.values()), 8)
            opened.callback(index.close)
            doorbell = Doorbell(self._directory / "bell")
            opened.callback(doorbell.close)
            board = SharedBoard(index, doorbell)
            self.cache = make_cache(self.pools, 30.0, board, REAL)
            intake = PutIntake(self.cache, index, doorbell, self._observe, REAL)
            live = FarFirst(self.cache, intake)
            identity = NodeIdentity("two-pools", incarnation, "a test")
            node = Node(live, SessionFiles(self.pools, index, doorbell.path, None), identity)
            status = Status(identity, self.cache, self.pools, index, node.streams, REAL)
            self.checksums = Checksums(live, self.pools)
            opened.callback(self.checksums.close)
            monitor = Monitor(status.read, self._observe)
            service = node.service(NoOtherNodes(), NothingToRecover(), monitor)
            server = Server(service, status.unavailable, self._observe, REAL)
            status.serving()
            await server.start(socket, None, None)
            running = asyncio.ensure_future(live.run())
            self._is_serving.set()
            await self._stop.wait()
            running.cancel()
            node.streams.end_all()
            await server.stop(1.0)

    def _observe(self, method: str, *_: object) -> None:
        self.calls[method] += 1


@pytest.fixture
def served(tmp_path: Path) -> Iterator[TwoPools]:
    served = TwoPools(tmp_path)
    served.start()
    yield served
    served.stop()
    assert not any(Path("/dev/shm").glob(f"ecd-pools-{os.getpid()}-[01]"))


@pytest.fixture
def stub(served: TwoPools) -> Iterator[pb_grpc.CacheStub]:
    with open_channel(served.address) as channel:
        yield pb_grpc.CacheStub(channel)


def test_an_entry_lives_in_the_second_pool_from_put_to_eviction(
    served: TwoPools, stub: pb_grpc.CacheStub
) -> None:
    tensor = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)  # larger than the first pool
    content = tensor.numpy().tobytes()
    with Client(served.address) as writer, Client(served.address) as reader:
        assert writer.put("k", tensor)
        assert not writer.put("k", tensor)
        [listed] = stub.List(pb.ListRequest()).entries
        assert listed.pool == FAR
        with reader.get("k") as item:
            assert torch.equal(item.tensor, tensor)
            assert served.calls["Acquire"] == 0, "the index shows where the entry lies"
            assert reader.contains(["k", "nothing"]) == [True, False]

            key = Key("default", "k")
            extent = served.cache.extent(key)
            assert extent.pool == FAR
            in_pool = served.pools[FAR].readable.view(extent.offset, extent.nbytes)
            assert bytes(in_pool) == content
            served.on_loop(served.checksums.note(key))
            assert served.cache.info(key).checksum == fold(digests(memoryview(content)))

            status = stub.Status(pb.StatusRequest())
            assert names_of_pools(status) == {NEAR: "host", FAR: "host1"}
            assert [pool.used_bytes for pool in status.pools] == [0, 3 << 20]
            assert [pool.populated_bytes for pool in status.pools] == list(BYTES.values())
            assert [Path(pool.path).stat().st_size for pool in status.pools] == [*BYTES.values()]

            evicted = stub.Evict(pb.EvictRequest(key=pb.Key(namespace="default", mm_hash="k")))
            assert (evicted.entries, evicted.nbytes, evicted.leased) == (1, 3 << 20, 1)
            assert reader.get("k") is None
            assert torch.equal(item.tensor, tensor), "kept for its reader"
        stub.Evict(pb.EvictRequest())  # its scan of the pins finds that the reader has gone
    served.cache.check()
    for pool in served.cache.pools:
        assert pool.allocator.is_one_free_extent
    assert served.cache.counters.evictions["requested"] == 1
