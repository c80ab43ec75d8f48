"""Links of peers to a daemon, spoken to as a peer does: in turns with others, and bounded."""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from types import SimpleNamespace

import grpc
import pytest
import torch
from prometheus_client import generate_latest

from ecd.base.checksum import digests, fold
from ecd.base.clock import REAL, Clock
from ecd.base.identity import NodeIdentity
from ecd.cluster.cluster import Cluster, Outside, PoolMemory
from ecd.cluster.transport import handshake
from ecd.cluster.transport.pool_reads import PoolReads
from ecd.core.cache import Cache
from ecd.core.model.outcomes import Reserved
from ecd.core.model.types import Content, Extent, Key
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.live.flights import Flights
from ecd.live.live import LiveCache
from ecd.memory.checksums import Checksums
from ecd.ops.metrics.registry import Metrics
from ecd.ops.status import Status
from ecd.rpc.cache.sessions import SessionStreams
from ecd.rpc.peer import inbound_link, peer_service, serving
from ecd.rpc.peer.inbound_link import InboundLink
from ecd.rpc.peer.peer_server import PeerServer
from ecd.rpc.peer.peer_service import PeerService
from ecd.rpc.peer.peer_token import TokenCheck
from ecd.rpc.peer.serving import Serving
from ecd.settings.config import Config
from ecd_client import Client
from ecd_proto.contract import CONTRACT_VERSION, proof
from ecd_proto.mapped_file import MappedFile
from ecd_proto.shm.files import GRANULE_BYTES
from ecd_proto.v1 import cache_pb2
from ecd_proto.v1 import peer_pb2 as pb
from ecd_proto.v1 import peer_pb2_grpc as pb_grpc
from support.clock import SetClock
from support.daemon import Daemon, changed
from support.pairs import PATIENCE, start_all
from support.reserving import reserve
from support.waiting import HANG_S, eventually_async, within_hang

TOKEN = "a secret of the test"

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]


@pytest.fixture(scope="module")
def lasting(make_lasting_peer: MakePeer) -> Daemon:
    return make_lasting_peer("64MiB").start()


@pytest.fixture
def node(lasting: Daemon) -> Iterator[Daemon]:
    lasting.check_unused()
    yield lasting
    lasting.check_unused()


Metadata = list[tuple[str, str]]


def proof_for(node: str) -> Metadata:
    nonce, now = secrets.token_hex(16), f"{datetime.now().timestamp():.0f}"
    proven = proof(TOKEN, "ask", node, nonce, now)
    return [("ecd-nonce", nonce), ("ecd-time", now), ("ecd-proof", proven)]


async def open_link(
    stub: pb_grpc.PeerStub, node: str, own: str = "127.0.77.1:1", proven: Metadata | None = None
) -> grpc.aio.StreamStreamCall:
    call = stub.Link(metadata=proven or proof_for(node))
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


def test_a_proof_of_the_token_is_accepted_once(node: Daemon) -> None:
    """A listener repeats what a member has said, on the same connection or another."""
    about = pb.DescribeRequest()

    async def refused(asked: Awaitable[object]) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await within_hang(asked)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        return error.value.details()

    async def ask() -> None:
        apart = (("grpc.use_local_subchannel_pool", 1),)
        async with peer_of(node.peer) as stub, peer_of(node.peer, apart) as listener:
            proven = proof_for(node.peer)
            call = await open_link(stub, node.peer, proven=proven)
            assert (await call.read()).HasField("welcome")
            described = proof_for(node.peer)
            assert (await stub.Describe(about, metadata=described)).contract_version
            for again in (stub, listener):
                for metadata in (proven, described):
                    link = await open_link(again, node.peer, proven=metadata)
                    assert "was used before" in await refused(link.read())
                    asked = again.Describe(about, metadata=metadata)
                    assert "was used before" in await refused(asked)
            odd = [("ecd-nonce", "n"), ("ecd-time", "9" * 5000)]
            assert "no proof" in await refused(listener.Describe(about, metadata=odd))
            odd.append(("ecd-proof", proof(TOKEN, "ask", node.peer, "n", "9" * 5000)))
            assert "the clock of" in await refused(listener.Describe(about, metadata=odd))

    before = node.status().counters.refused["peer_proofs"]
    asyncio.run(ask())
    assert node.status().counters.refused["peer_proofs"] == before + 10
    assert 'ecd_refused_total{cause="peer_proofs"}' in node.metrics()


def test_many_keys_are_leased_in_turns(node: Daemon, client_of: ClientOf) -> None:
    """Others are served between: the answer to a long request comes in parts, and is whole."""
    here = client_of(node)
    for number in range(0, 300, 2):
        here.put(f"k{number}", torch.full((1000,), float(number)))

    async def ask() -> None:
        async with peer_of(node.peer) as stub:
            call = await open_link(stub, node.peer)
            assert (await call.read()).HasField("welcome")
            keys = [pb.LeaseKey(ticket=n + 1, key=key(n), wait_s=1.0) for n in range(300)]
            await call.write(pb.LinkRequest(lease=pb.LeaseKeys(keys=keys)))
            outcomes: dict[int, pb.LeaseOutcome] = {}
            parts = 0
            while len(outcomes) < 300:
                reply = await within_hang(call.read())
                parts += 1
                outcomes.update({each.ticket: each for each in reply.leases.outcomes})
            assert parts > 4
            for number in range(300):
                leased = outcomes[number + 1].WhichOneof("outcome") == "leased"
                assert leased == (number % 2 == 0)
            assert node.status().leases == 150
            found = pb.FindKeys(ticket=1, keys=[key(n) for n in range(300)])
            await call.write(pb.LinkRequest(find=found))
            reply = await within_hang(call.read())
            assert list(reply.found.found) == [n % 2 == 0 for n in range(300)]
            assert [extent.nbytes > 0 for extent in reply.found.extents] == list(reply.found.found)
            leases = [each.leased.lease for each in outcomes.values() if each.HasField("leased")]
            await call.write(pb.LinkRequest(release=pb.ReleaseLeases(leases=leases)))
            await eventually_async(lambda: node.status().leases == 0)
            for too_many in ({"leases": range(100_000)}, {"stored": range(100_000)}):
                call = await open_link(stub, node.peer)
                assert (await call.read()).HasField("welcome")
                await call.write(pb.LinkRequest(release=pb.ReleaseLeases(**too_many)))
                assert await within_hang(call.read()) is grpc.aio.EOF

    asyncio.run(ask())


def test_peers_cannot_take_all_sessions(make_peer: MakePeer, client_of: ClientOf) -> None:
    """A node that is refused asks again: a link may be free by then."""
    a, b = make_peer(), make_peer()
    a.command = changed("from ecd.rpc.peer import peer_service as at", "at.MAX_LINKS = 64")
    pauses = "from ecd.cluster import fetcher as at", "at.PAUSES_S = (0.1,) * 1000"
    b.command = changed(*PATIENCE, *pauses)
    start_all(a, b)
    count = 'ecd_refused_total{cause="peer_links"}'

    def refusals() -> int:
        [told] = [line for line in a.metrics().splitlines() if line.startswith(count)]
        return int(float(told.split()[1]))

    async def take_all() -> None:
        async with peer_of(a.peer) as stub:
            links, said = [await open_link(stub, a.peer) for _ in range(80)], set()
            for call in links:
                try:
                    assert (await within_hang(call.read())).HasField("welcome")
                except grpc.aio.AioRpcError as error:
                    said.add(error.details())
            taken = [call for call in links if not call.done()]
            assert said == {"the daemon has its limit of 64 links of peers"}
            assert (len(taken), refusals()) == (64, 16)
            client_of(a).put("k", torch.ones(1))
            [found] = client_of(b).get_async(["k"], HANG_S, nodes=[[a.peer]])
            await eventually_async(lambda: refusals() > 16)
            taken[0].cancel()
            item = await asyncio.to_thread(found.result, HANG_S)
            assert item is not None
            item.close()

    asyncio.run(take_all())
    assert client_of(a).contains(["k"]) == [True]


def test_nodes_that_ask_in_one_moment_all_get_a_link(node: Daemon) -> None:
    """From 1,000 calls on that wait to be taken up, gRPC cancels some by default."""

    async def ask() -> None:
        async with peer_of(node.peer) as stub:
            assert (await (await open_link(stub, node.peer)).read()).HasField("welcome")
            with node.stopped():
                links = [await open_link(stub, node.peer) for _ in range(1600)]
            for call in links:
                assert (await within_hang(call.read())).HasField("welcome")

    asyncio.run(ask())


def test_what_is_published_gives_up_the_loop() -> None:
    live = LiveCache(Cache([Pool(Allocator(0, 1 << 24, GRANULE_BYTES))]), REAL)
    memory = MappedFile.of_memory(1 << 24)
    cache, session = live.cache, live.cache.open_session()
    keys = [Key("default", str(n)) for n in range(1024)]

    async def run() -> None:
        config = Config(peer_address="127.0.88.1:9465", peer_token=TOKEN)
        pools = {0: SimpleNamespace(readable=memory, writable=memory)}
        checksums = Checksums(live, pools)
        identity = NodeIdentity("default", "a" * 32, "a test", config.peer_address)
        about = Flights(live), PoolMemory(pools, checksums), identity, lambda *_: None, Outside()
        cluster = Cluster(config, live, *about)
        for key in keys:
            reserved = reserve(cache, session, key, Content("uint8", (64,), 64), 0.0)
            live.commit(session, reserved.entry)
        publishing, turns = asyncio.ensure_future(cluster._publish()), 0
        while cache.views.info(keys[-1]).checksum is None:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= len(keys) / 8, "a few are hashed in one turn"
        publishing.cancel()
        await cluster.close()
        checksums.close()

    asyncio.run(run())


def test_peers_read_and_fill_the_pool_that_an_extent_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node reads from its second pool, by the address that peers are told, into the same.

    Its start waits for its own engine for longer than it would for another node's.
    """
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.0)
    memory = [MappedFile.of_memory(1 << 20) for _ in range(2)]
    live = LiveCache(Cache([Pool(Allocator(n, 1 << 20, GRANULE_BYTES)) for n in range(2)]), REAL)
    source, target = Extent(1, 4096, 100_000), Extent(1, 1 << 19, 100_000)
    memory[1].view(source.offset, source.nbytes)[:] = content = secrets.token_bytes(source.nbytes)
    checksum = fold(digests(memoryview(content)))

    async def run() -> None:
        config = Config(peer_address="127.0.88.2:9465", peer_token=TOKEN)
        identity = NodeIdentity("default", "a" * 32, "a test", config.peer_address)
        pools = {n: SimpleNamespace(readable=each, writable=each) for n, each in enumerate(memory)}
        checksums = Checksums(live, pools)
        assert await checksums.compute(source) == checksum
        about = Flights(live), PoolMemory(pools, checksums), identity, lambda *_: None, Outside()
        cluster = Cluster(config, live, *about)
        await cluster.start()
        described = cluster.describe()
        assert [(each.pool, each.address) for each in described.pools] == [
            (number, each.address) for number, each in enumerate(memory)
        ]
        reads = PoolReads(cluster._engine.reads, dict(enumerate(memory)))
        now_s = asyncio.get_running_loop().time()
        reading = reads.begin(described, cluster.address_of(source), target, now_s)
        assert fold(await within_hang(reading.ended)) == checksum
        assert bytes(memory[1].view(target.offset, target.nbytes)) == content
        assert not any(memory[0].view(0, 1 << 20)), "the first pool is untouched"
        await cluster.close()
        checksums.close()

    asyncio.run(run())


def test_a_scrape_never_fails() -> None:
    """Its thread reads what the event loop changes all the time."""
    cache = Cache([Pool(Allocator(0, 1 << 24, GRANULE_BYTES))])
    identity = NodeIdentity("default", "a" * 32, "a test")
    live = LiveCache(cache, REAL)
    streams = SessionStreams(live, Flights(live), None, identity)
    nbytes = {"nbytes": 1 << 24, "populated_bytes": 1 << 24, "huge_bytes": 0, "device_bytes": 0}
    pool = SimpleNamespace(path="a pool", problem="", **nbytes)
    metrics = Metrics("0", REAL)
    metrics.watch_core(Status(identity, cache, {0: pool}, None, streams, REAL).read)
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
                reserved = reserve(cache, session, Key("default", str(number)), what, 0.0)
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


# -- turns to read one large entry (see unit/test_serving and simulation/test_turns) ---------------


@asynccontextmanager
async def links_that_take_turns(
    monkeypatch: pytest.MonkeyPatch, lease_ttl_s: float = 30.0, clock: Clock = REAL
) -> AsyncIterator[tuple[LiveCache, list[InboundLink]]]:
    """Two links to a node whose 64 entries, k0 to k63, one node reads at a time.

    No turn ends by time.
    """
    monkeypatch.setattr(inbound_link, "SPECULATIVE_BYTES", 0)
    monkeypatch.setattr(serving, "TURN_S", 10 * HANG_S)
    live = LiveCache(Cache([Pool(Allocator(0, 1 << 20, GRANULE_BYTES))], lease_ttl_s), clock)
    memory = MappedFile.of_memory(1 << 20)
    pools = {0: SimpleNamespace(readable=memory, writable=memory)}
    checksums = Checksums(live, pools)
    config = Config(peer_address="127.0.88.3:9465", peer_token=TOKEN)
    identity = NodeIdentity("default", "a" * 32, "a test", config.peer_address)
    about = Flights(live), PoolMemory(pools, checksums), identity, lambda *_: None, Outside()
    cluster = Cluster(config, live, *about)
    session, turns = live.cache.open_session(), Serving(1, live.refuse, live.clock)
    for number in range(64):
        content = Content("uint8", (64,), 64)
        reserved = reserve(live.cache, session, Key("default", f"k{number}"), content, 0.0)
        live.commit(session, reserved.entry)
    yield (
        live,
        [
            InboundLink(live, cluster, turns, live.cache.open_session(), f"10.0.0.{n}:1")
            for n in (1, 2)
        ],
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
            await first.take(ALL_KEYS)
            assert [each.HasField("limit_reached") for each in outcomes_in(first)] == [True] * 64
            assert not outcomes_in(second), "a node has one place among those that wait"
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
    clock = SetClock()
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: clock.at_s)

    async def run() -> None:
        async with links_that_take_turns(monkeypatch, 30.0, clock) as (live, [first, second]):
            for link in (first, second):
                await link.take(ALL_KEYS)
            for clock.at_s, refused in ((14.9, 0), (15.0, 64)):  # of the 60 s that it would wait
                await asyncio.sleep(0)  # timers that are due
                await asyncio.sleep(0)
                outcomes = outcomes_in(second)
                assert [each.HasField("limit_reached") for each in outcomes] == [True] * refused
                assert live.cache.counters.refused["peer_turns"] == refused
            for link in (first, second):
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
            service = PeerService(live, links[0]._memory, TokenCheck(node, TOKEN, REAL), 1)
            server = PeerServer(service, None, REAL)
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

                async def is_welcome() -> bool:
                    calls.append(await open_link(stub, node, own="127.0.77.2:1"))
                    try:
                        return (await within_hang(calls[-1].read())).HasField("welcome")
                    except grpc.aio.AioRpcError:
                        return False  # the other link has not been idle for long enough

                while not await is_welcome():
                    pass
                assert link.outbox.qsize() > 20, "a reply is being written"
                await eventually_async(lambda: len(live.cache._sessions) == others + 1)
                while await within_hang(calls[0].read()) is not grpc.aio.EOF:
                    pass  # it is told at last
                for call in calls:
                    call.cancel()
            for link in links:
                link.end()
            await server.stop(0)

    asyncio.run(within_hang(run()))


def test_a_peer_that_reads_nothing_is_read_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replies would take any memory. Once it reads, every question of its is answered."""
    monkeypatch.setattr(inbound_link, "MAX_UNREAD_BYTES", 64 << 10)
    asked: list[int] = []

    async def requests() -> AsyncIterator[pb.LinkRequest]:
        for ticket in range(100):
            asked.append(ticket)
            keys = [key(n) for n in range(1024)]  # of which a reply has 5 KiB
            yield pb.LinkRequest(find=pb.FindKeys(ticket=ticket, keys=keys))

    async def run() -> None:
        async with links_that_take_turns(monkeypatch) as (live, [link, other]):
            node = "127.0.88.6:9465"
            service = PeerService(live, link._memory, TokenCheck(node, TOKEN, REAL), 1)
            reading = asyncio.ensure_future(service._read(link, requests()))
            await eventually_async(lambda: link.outbox.is_full)
            so_far = len(asked)
            for _ in range(1000):
                await asyncio.sleep(0)
            assert len(asked) == so_far < 30
            for ticket in range(100):
                assert (await within_hang(link.outbox.get())).found.ticket == ticket
            await reading
            for each in (link, other):
                each.end()

    asyncio.run(run())
