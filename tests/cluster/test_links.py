"""Links of peers to a daemon, spoken to as a peer does: in turns with others, and bounded."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
import torch
from prometheus_client import generate_latest

from ecd.checksum import digests, fold
from ecd.cluster.cluster import Cluster, PoolMemory
from ecd.cluster.pool_reads import PoolReads
from ecd.config import Config
from ecd.core.allocator import Allocator
from ecd.core.cache import Cache
from ecd.core.outcomes import Reserved
from ecd.core.pool import Pool
from ecd.core.types import Content, Extent, Key
from ecd.flights import Flights
from ecd.identity import NodeIdentity
from ecd.live import LiveCache
from ecd.memory.checksums import Checksums
from ecd.metrics import Metrics
from ecd.rpc import inbound_link, peer_service
from ecd.rpc.inbound_link import InboundLink
from ecd.rpc.peer_server import PeerServer
from ecd.rpc.peer_service import PeerService
from ecd.rpc.peer_token import TokenCheck
from ecd.rpc.serving import TURN_S, Serving
from ecd.rpc.sessions import SessionStreams
from ecd.rpc.status import Status
from ecd_client import Client
from ecd_proto.contract import CONTRACT_VERSION, proof
from ecd_proto.mapping import Mapping
from ecd_proto.shm.files import GRANULE_BYTES
from ecd_proto.v1 import cache_pb2
from ecd_proto.v1 import peer_pb2 as pb
from ecd_proto.v1 import peer_pb2_grpc as pb_grpc
from support.daemon import Daemon, eventually

TOKEN = "a secret of the test"

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]


async def open_link(
    stub: pb_grpc.PeerStub, node: str, own: str = "127.0.77.1:1"
) -> grpc.aio.StreamStreamCall:
    nonce, now = secrets.token_hex(16), str(int(time.time()))
    proven = proof(TOKEN, "ask", node, nonce, now)
    call = stub.Link(metadata=[("ecd-nonce", nonce), ("ecd-time", now), ("ecd-proof", proven)])
    hello = pb.LinkHello(contract_version=CONTRACT_VERSION, daemon="a test", node=own)
    await call.write(pb.LinkRequest(hello=hello))
    return call


@asynccontextmanager
async def peer_of(
    node: str, options: tuple[tuple[str, int], ...] = ()
) -> AsyncIterator[pb_grpc.PeerStub]:
    async with grpc.aio.insecure_channel(node, options) as channel:
        yield pb_grpc.PeerStub(channel)


def key(number: int) -> cache_pb2.Key:
    return cache_pb2.Key(namespace="default", mm_hash=f"k{number}")


def test_many_keys_are_leased_in_turns(make_peer: MakePeer, client_of: ClientOf) -> None:
    """Others are served between: the answer to a long request comes in parts, and is whole."""
    a = make_peer("64MiB").start()
    here = client_of(a)
    for number in range(0, 300, 2):
        here.put(f"k{number}", torch.full((1000,), float(number)))

    async def ask() -> None:
        async with peer_of(a.peer) as stub:
            call = await open_link(stub, a.peer)
            assert (await call.read()).HasField("welcome")
            keys = [pb.LeaseKey(ticket=n + 1, key=key(n), wait_s=1.0) for n in range(300)]
            await call.write(pb.LinkRequest(lease=pb.LeaseKeys(keys=keys)))
            outcomes: dict[int, pb.LeaseOutcome] = {}
            parts = 0
            while len(outcomes) < 300:
                reply = await asyncio.wait_for(call.read(), 5.0)
                parts += 1
                outcomes.update({each.ticket: each for each in reply.leases.outcomes})
            assert parts > 4
            for number in range(300):
                leased = outcomes[number + 1].WhichOneof("outcome") == "leased"
                assert leased == (number % 2 == 0)
            assert a.status().leases == 150
            found = pb.FindKeys(ticket=1, keys=[key(n) for n in range(300)])
            await call.write(pb.LinkRequest(find=found))
            reply = await asyncio.wait_for(call.read(), 5.0)
            assert list(reply.found.found) == [n % 2 == 0 for n in range(300)]
            assert [extent.nbytes > 0 for extent in reply.found.extents] == list(reply.found.found)
            leases = [each.leased.lease for each in outcomes.values() if each.HasField("leased")]
            await call.write(pb.LinkRequest(release=pb.ReleaseLeases(leases=leases)))
            await eventually_async(lambda: a.status().leases == 0)
            for too_many in ({"leases": range(100_000)}, {"stored": range(100_000)}):
                call = await open_link(stub, a.peer)
                assert (await call.read()).HasField("welcome")
                await call.write(pb.LinkRequest(release=pb.ReleaseLeases(**too_many)))
                assert await asyncio.wait_for(call.read(), 5.0) is grpc.aio.EOF

    asyncio.run(ask())
    a.check_nothing_leaked()


def test_peers_cannot_take_all_sessions(make_peer: MakePeer, client_of: ClientOf) -> None:
    """A node that is refused asks again: a link may be free by then."""
    a, b = make_peer().start(), make_peer().start()

    async def take_all() -> None:
        async with peer_of(a.peer) as stub:
            links, said = [], set()
            for _ in range(9):
                opened = [await open_link(stub, a.peer) for _ in range(256)]
                links += opened
                for call in opened:
                    try:
                        reply = await asyncio.wait_for(call.read(), 30.0)
                        assert reply.HasField("welcome")
                    except grpc.aio.AioRpcError as error:
                        said.add(error.details())
            refused = [call for call in links if call.done()]
            assert said == {"the daemon has its limit of 2048 links of peers"}
            assert len(refused) == len(links) - 2048
            client_of(a).put("k", torch.ones(1))
            count = 'ecd_refused_total{cause="peer_links"}'
            assert f"{count} {float(len(refused))}" in a.metrics()
            [found] = client_of(b).get_async(["k"], 20.0, nodes=[[a.peer]])

            def was_refused() -> bool:
                [told] = [line for line in a.metrics().splitlines() if line.startswith(count)]
                return float(told.split()[1]) > len(refused)

            await eventually_async(was_refused)
            next(call for call in links if not call.done()).cancel()
            assert await asyncio.to_thread(found.result, 30) is not None

    asyncio.run(take_all())
    eventually(lambda: client_of(a).contains(["k"]) == [True])


def test_nodes_that_ask_in_one_moment_all_get_a_link(make_peer: MakePeer) -> None:
    """From 1,000 calls on that wait to be taken up, gRPC cancels some by default."""
    a = make_peer().start()

    async def ask() -> None:
        async with peer_of(a.peer) as stub:
            assert (await (await open_link(stub, a.peer)).read()).HasField("welcome")
            os.kill(a.pid, signal.SIGSTOP)
            try:
                links = [await open_link(stub, a.peer) for _ in range(1600)]
            finally:
                os.kill(a.pid, signal.SIGCONT)
            for call in links:
                assert (await asyncio.wait_for(call.read(), 30.0)).HasField("welcome")

    asyncio.run(ask())


def test_what_is_offered_or_published_gives_up_the_loop() -> None:
    """Counted in turns and in this thread's time, as neither depends on what else runs here."""
    live = LiveCache(Cache([Pool(Allocator(0, 1 << 24, GRANULE_BYTES))]))
    memory = Mapping.of_memory(1 << 24)
    cache, session = live.cache, live.open_session()
    keys = [Key("default", str(n)) for n in range(1024)]

    async def run() -> None:
        config = Config(
            peer_address="127.0.88.1:9465", peer_token=TOKEN, hint_networks="127.0.0.0/8"
        )
        pools = {0: SimpleNamespace(readable=memory, writable=memory)}
        checksums = Checksums(live, pools)
        identity = NodeIdentity("default", "a" * 32, "a test", config.peer_address)
        about = Flights(live), PoolMemory(pools, checksums), identity, lambda *_: None
        cluster = Cluster(config, live, *about)
        for key in keys:
            reserved = cache.reserve(session, key, Content("uint8", (64,), 64), 0.0)
            live.commit(session, reserved.entry)
        publishing, turns = asyncio.ensure_future(cluster._publish()), 0
        while cache.info(keys[-1]).checksum is None:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= len(keys) / 8, "a few are hashed in one turn"
        publishing.cancel()
        took_s = []
        for _ in range(5):  # the least of them: Python's collector may run in one
            started_s = time.thread_time()
            cluster.offer(keys, ["127.0.77.1:1"])
            await asyncio.sleep(0)
            took_s.append(time.thread_time() - started_s)
        assert min(took_s) < 5e-3
        await cluster.close()
        checksums.close()

    asyncio.run(run())


def test_peers_read_and_fill_the_pool_that_an_extent_names() -> None:
    """A node reads from its second pool, by the address that peers are told, into the same."""
    memory = [Mapping.of_memory(1 << 20) for _ in range(2)]
    live = LiveCache(Cache([Pool(Allocator(n, 1 << 20, GRANULE_BYTES)) for n in range(2)]))
    source, target = Extent(1, 4096, 100_000), Extent(1, 1 << 19, 100_000)
    memory[1].view(source.offset, source.nbytes)[:] = content = secrets.token_bytes(source.nbytes)
    checksum = fold(digests(memoryview(content)))

    async def run() -> None:
        config = Config(peer_address="127.0.88.2:9465", peer_token=TOKEN)
        identity = NodeIdentity("default", "a" * 32, "a test", config.peer_address)
        pools = {n: SimpleNamespace(readable=each, writable=each) for n, each in enumerate(memory)}
        checksums = Checksums(live, pools)
        assert await checksums.compute(source) == checksum
        about = Flights(live), PoolMemory(pools, checksums), identity, lambda *_: None
        cluster = Cluster(config, live, *about)
        await cluster.start()
        described = cluster.describe()
        assert [(each.pool, each.address) for each in described.pools] == [
            (number, each.address) for number, each in enumerate(memory)
        ]
        reads = PoolReads(cluster._engine.reads, dict(enumerate(memory)))
        reading = reads.begin(described, cluster.address_of(source), target, time.monotonic())
        assert fold(await asyncio.wait_for(reading.ended, 10.0)) == checksum
        assert bytes(memory[1].view(target.offset, target.nbytes)) == content
        assert not any(memory[0].view(0, 1 << 20)), "the first pool is untouched"
        await cluster.close()
        checksums.close()

    asyncio.run(run())


def test_a_scrape_never_fails() -> None:
    """Its thread reads what the event loop changes all the time."""
    cache = Cache([Pool(Allocator(0, 1 << 24, GRANULE_BYTES))])
    identity = NodeIdentity("default", "a" * 32, "a test")
    streams = SessionStreams(LiveCache(cache), None, identity)
    pool = SimpleNamespace(
        path="a pool", nbytes=1 << 24, populated_bytes=1 << 24, huge_bytes=0, problem=""
    )
    metrics = Metrics("0")
    metrics.watch_core(Status(identity, cache, {0: pool}, None, streams).read)
    scrapes: list[bytes] = []
    failures: list[BaseException] = []
    over = threading.Event()

    def scrape() -> None:
        try:
            for _ in range(200):
                scrapes.append(generate_latest(metrics.registry))
        except BaseException as error:
            failures.append(error)
        finally:
            over.set()

    async def change() -> None:
        metrics.listen("127.0.0.1:0")
        session = cache.open_session()
        thread = threading.Thread(target=scrape)
        thread.start()
        number = 0
        while not over.is_set():
            await asyncio.sleep(0)
            for _ in range(100):
                number += 1
                nbytes = 64 * (1 + number * 7919 % 50_000)
                what = Content("uint8", (nbytes,), nbytes)
                reserved = cache.reserve(session, Key("default", str(number)), what, 0.0)
                if isinstance(reserved, Reserved):
                    cache.abort(session, reserved.entry)
        thread.join()
        metrics.close()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asyncio.run(change())
    finally:
        sys.setswitchinterval(interval_s)
    assert not failures
    assert len(scrapes) == 200
    assert all(b"ecd_pool_largest_free_bytes" in scraped for scraped in scrapes)


# -- turns to read one large entry -----------------------------------------------------------------

LARGE_BYTES = 9 << 20


async def ask_for_lease(call: grpc.aio.StreamStreamCall) -> None:
    asked = pb.LeaseKey(ticket=1, key=key(0), wait_s=20.0)
    await call.write(pb.LinkRequest(lease=pb.LeaseKeys(keys=[asked])))


async def leased(call: grpc.aio.StreamStreamCall) -> int:
    [outcome] = (await asyncio.wait_for(call.read(), 20)).leases.outcomes
    return int(outcome.leased.lease)


@pytest.mark.parametrize("has_it", [True, False])
def test_a_node_that_waits_for_its_turn_is_sent_to_the_one_that_has_read(
    make_peer: MakePeer, client_of: ClientOf, has_it: bool
) -> None:
    """If that one has evicted the entry meanwhile, the node comes back and waits again."""
    a = make_peer("64MiB", ECD_READERS_PER_ENTRY="1").start()
    b, c = make_peer("64MiB").start(), make_peer("64MiB", ECD_FETCH_TIMEOUT_S="20").start()
    here, there = client_of(a), client_of(c)
    entry = torch.randint(0, 256, (LARGE_BYTES,), dtype=torch.uint8)
    here.put("k0", entry)
    if has_it:
        with client_of(b).get("k0", 20.0, nodes=[here.node]) as item:
            assert torch.equal(item.tensor, entry)

    async def act() -> None:
        async with peer_of(a.peer) as stub:
            first, second = [await open_link(stub, a.peer, own=b.peer) for _ in range(2)]
            for call in (first, second):
                assert (await call.read()).HasField("welcome")
            await ask_for_lease(first)
            lease = await leased(first)
            await ask_for_lease(second)
            await eventually_async(lambda: a.status().leases == 2)
            [found] = there.get_async(["k0"], 20.0, nodes=[[here.node]])
            await eventually_async(lambda: a.status().leases == 3)
            read = pb.ReleaseLeases(leases=[lease], stored=[lease])
            await first.write(pb.LinkRequest(release=read))
            await leased(second)
            with await asyncio.to_thread(found.result, 30) as item:
                assert torch.equal(item.tensor, entry)

    asyncio.run(act())
    reads = {peer.node: peer.reads for peer in c.peers().peers}
    assert reads == {a.peer: int(not has_it), b.peer: int(has_it)}


def test_a_node_that_reads_for_ever_keeps_nobody_waiting_for_long(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    a = make_peer("64MiB", ECD_READERS_PER_ENTRY="1").start()
    b = make_peer("64MiB", ECD_FETCH_TIMEOUT_S="20").start()
    here, there = client_of(a), client_of(b)
    here.put("k0", torch.ones(LARGE_BYTES, dtype=torch.uint8))

    async def act() -> None:
        async with peer_of(a.peer) as stub:
            call = await open_link(stub, a.peer)
            assert (await call.read()).HasField("welcome")
            started_s = time.monotonic()
            await ask_for_lease(call)
            await leased(call)
            with await asyncio.to_thread(there.get, "k0", 20.0, nodes=[here.node]) as item:
                assert (item.tensor == 1).all()
            assert time.monotonic() - started_s > TURN_S / 2, "it waited for its turn"
            [peer] = b.peers().peers
            assert peer.round_trip_s < TURN_S / 2, "which says nothing of the way"
            assert 'ecd_refused_total{cause="long_peer_turns"} 1.0' in a.metrics()

    asyncio.run(act())


def test_a_node_that_asks_often_denies_the_entry_to_nobody(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    a = make_peer("64MiB").start()
    b = make_peer("64MiB", ECD_FETCH_TIMEOUT_S="20").start()
    here, there = client_of(a), client_of(b)
    here.put("k0", torch.ones(LARGE_BYTES, dtype=torch.uint8))

    async def act() -> None:
        async with peer_of(a.peer) as stub:
            call = await open_link(stub, a.peer)
            assert (await call.read()).HasField("welcome")
            asked = [pb.LeaseKey(ticket=1 + n, key=key(0), wait_s=60.0) for n in range(40)]
            await call.write(pb.LinkRequest(lease=pb.LeaseKeys(keys=asked)))
            outcomes: list[pb.LeaseOutcome] = []
            while len(outcomes) < 39:
                reply = await asyncio.wait_for(call.read(), 20.0)
                outcomes += reply.leases.outcomes
            said = {each.ticket: each.WhichOneof("outcome") for each in outcomes}
            assert said == {1: "leased", **dict.fromkeys(range(2, 40), "limit_reached")}
            with await asyncio.to_thread(there.get, "k0", 20.0, nodes=[here.node]) as item:
                assert (item.tensor == 1).all()

    asyncio.run(act())


@asynccontextmanager
async def links_that_take_turns(
    monkeypatch: pytest.MonkeyPatch, lease_ttl_s: float = 30.0
) -> AsyncIterator[tuple[LiveCache, list[InboundLink]]]:
    """Two links to a node whose 64 entries, k0 to k63, one node reads at a time."""
    monkeypatch.setattr(inbound_link, "SPECULATIVE_BYTES", 0)
    live = LiveCache(Cache([Pool(Allocator(0, 1 << 20, GRANULE_BYTES))], lease_ttl_s))
    memory = Mapping.of_memory(1 << 20)
    pools = {0: SimpleNamespace(readable=memory, writable=memory)}
    checksums = Checksums(live, pools)
    config = Config(peer_address="127.0.88.3:9465", peer_token=TOKEN)
    identity = NodeIdentity("default", "a" * 32, "a test", config.peer_address)
    about = Flights(live), PoolMemory(pools, checksums), identity, lambda *_: None
    cluster = Cluster(config, live, *about)
    session, serving = live.open_session(), Serving(1, live.refuse)
    for number in range(64):
        content = Content("uint8", (64,), 64)
        reserved = live.cache.reserve(session, Key("default", f"k{number}"), content, 0.0)
        live.commit(session, reserved.entry)
    yield (
        live,
        [InboundLink(live, cluster, serving, live.open_session(), f"10.0.0.{n}:1") for n in (1, 2)],
    )
    await cluster.close()
    checksums.close()


def outcomes_in(link: InboundLink) -> list[pb.LeaseOutcome]:
    replies = [link.outbox.get_nowait() for _ in range(link.outbox.qsize())]
    return [outcome for reply in replies for outcome in reply.leases.outcomes]


ALL_KEYS = pb.LinkRequest(
    lease=pb.LeaseKeys(keys=[pb.LeaseKey(ticket=1 + n, key=key(n), wait_s=60.0) for n in range(64)])
)


@pytest.mark.parametrize("way", ["released", "link ends"])
def test_many_turns_end_in_turns_with_others(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    async def run() -> None:
        async with links_that_take_turns(monkeypatch) as (_, [first, second]):
            for link in (first, second):
                await link.take(ALL_KEYS)
            leases = [each.leased.lease for each in outcomes_in(first)]
            assert len(leases) == 64
            await first.take(ALL_KEYS)  # for other engines of its node
            assert not [*outcomes_in(first), *outcomes_in(second)]
            ended = pb.LinkRequest(release=pb.ReleaseLeases(leases=leases))
            acting = asyncio.ensure_future(first.take(ended) if way == "released" else _end(first))
            begun = [0]
            while begun[-1] < 64:
                await asyncio.sleep(0)
                begun.append(begun[-1] + len(outcomes_in(second)))
                assert begun[-1] - begun[-2] <= 32, "others have the loop between"
            await acting
            assert not outcomes_in(first), "nothing is said to a node that has gone"
            for link in (first, second):
                link.end()

    asyncio.run(run())


async def _end(link: InboundLink) -> None:
    link.end()


def test_a_turn_does_not_begin_when_its_lease_is_nearly_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with links_that_take_turns(monkeypatch, lease_ttl_s=0.4) as (live, links):
            for link in links:
                await link.take(ALL_KEYS)
            reply = await asyncio.wait_for(links[1].outbox.get(), 10.0)
            [outcome] = reply.leases.outcomes
            assert outcome.HasField("limit_reached")
            assert live.cache.counters.refused["peer_turns"] >= 1
            for link in links:
                link.end()

    asyncio.run(run())


def test_a_peer_that_reads_nothing_keeps_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it could take, link by link, all sessions of the engines."""

    async def run() -> None:
        monkeypatch.setattr(peer_service, "MAX_LINKS", 1)
        monkeypatch.setattr(peer_service, "MAX_WAIT_S", 0.0)
        node = "127.0.88.4:9465"
        async with links_that_take_turns(monkeypatch, lease_ttl_s=0.2) as (live, links):
            service = PeerService(live, links[0]._memory, TokenCheck(node, TOKEN), 1)
            server = PeerServer(service, None)
            server.bind(node)
            await server.start()
            others = len(live.cache._sessions)
            async with peer_of(node, (("grpc.http2.bdp_probe", 0),)) as stub:
                keys = [key(n) for n in range(1024)]
                asked = pb.LinkRequest(find=pb.FindKeys(ticket=1, keys=keys))
                calls = [await open_link(stub, node)]
                assert (await calls[0].read()).HasField("welcome")
                for _ in range(60):
                    await calls[0].write(asked)
                [link] = service._links
                await eventually_async(lambda: 20 < link.outbox.qsize() < 60)
                await asyncio.sleep(0.5)
                assert link.outbox.qsize() > 20, "a reply is being written"
                calls.append(await open_link(stub, node, own="127.0.77.2:1"))
                assert (await calls[1].read()).HasField("welcome")
                await eventually_async(lambda: len(live.cache._sessions) == others + 1)
                while await asyncio.wait_for(calls[0].read(), 10.0) is not grpc.aio.EOF:
                    pass  # it is told at last
                for call in calls:
                    call.cancel()
            for link in links:
                link.end()
            await server.stop(0)

    asyncio.run(run())


async def eventually_async(holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, holds, what="the nodes that wait")
