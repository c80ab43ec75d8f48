"""The longest turn of the daemon's event loop, in what is hardest for it.

    python benchmarks/loop.py [--sessions 1,100,1000] [--runs 5] [--output FILE.md]

A daemon's own core, index, sessions and services on one event loop, in this process; the clients
are their pages and their calls. A turn is what the loop does from one look for events to the next.
Each cell is the median, over some runs, of the longest turn of each run.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import selectors
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from ipaddress import IPv4Network
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from common import MIB, machine, markdown, show, write_page
from pydantic import SecretStr
from rich.console import Console

from ecd.base.clock import REAL
from ecd.base.identity import NodeIdentity
from ecd.cluster.cluster import Cluster, Outside, PoolMemory
from ecd.core.cache import Cache
from ecd.core.model.outcomes import Leased, LimitReached, MakingRoom, Reserved
from ecd.core.model.types import Answer, Content, EntryId, Extent, Key, SessionId
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.live.flights import Flights
from ecd.live.slow_log import SlowLog
from ecd.memory.checksums import Checksums
from ecd.memory.pool_dir import PoolDir
from ecd.memory.shared_index import SharedIndex
from ecd.node import Node as CacheNode
from ecd.node import SharedBoard, live_cache
from ecd.rpc.cache.cache_service import Monitor
from ecd.rpc.cache.origins import NoOtherNodes, NothingToRecover
from ecd.rpc.cache.puts import Doorbell
from ecd.rpc.cache.stream import Stream
from ecd.rpc.peer.inbound_link import InboundLink
from ecd.rpc.peer.serving import Serving
from ecd.settings.config import Config
from ecd_proto.contract import MAX_BATCH, Hint
from ecd_proto.encoders import RegisteredEncoder
from ecd_proto.mapped_file import MappedFile
from ecd_proto.shm.files import GRANULE_BYTES
from ecd_proto.shm.rows import Row, key_record, pack_row
from ecd_proto.shm.session_page import (
    CLAIM_DONE,
    CLAIM_NUMBER,
    CLAIM_ROW,
    CLAIM_WORDS,
    CLAIMS_WORD,
    DOORBELL,
    FIRST_CLAIM_WORD,
    FIRST_GRANT_WORD,
    FIRST_PIN_WORD,
    MAX_CLAIMS,
    MAX_PINS,
    PINS_USED_WORD,
    claim_at,
    unpack_grant,
)
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import peer_pb2 as peer_pb

LIMIT_S = 0.005
KIB = 1 << 10
PUTS_AT_ONCE = 256


class Selector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Measures the loop's longest turn, from one `select` to the next, within `watching`."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._now_s, self._back_s = now_s, math.inf

    def select(self, timeout: float | None = None) -> Any:
        self._note()
        events = super().select(timeout)
        if self._back_s < math.inf:
            self._back_s = self._now_s()
        return events

    def _note(self) -> None:
        self.longest_s = max(self.longest_s, self._now_s() - self._back_s)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._back_s = self._now_s()
        yield
        self._note()
        self._back_s = math.inf


class Node:
    """A daemon's core, index and services on one event loop, without the servers."""

    def __init__(self, directory: Path, sessions: int, pool_bytes: int, selector: Selector) -> None:
        self.watching = selector.watching
        place = PoolDir(str(directory), "bench")
        self.index = SharedIndex(place, "bench", pool_bytes, sessions + 8)
        self.cache = Cache([Pool(Allocator(0, pool_bytes, GRANULE_BYTES))], board=self.index)
        self.doorbell = Doorbell(directory / "bell")
        board, identity = (
            SharedBoard(self.index, self.doorbell),
            NodeIdentity("bench", "bench", "bench"),
        )
        self.live = live_cache(self.cache, board, _ignore, REAL)
        files: Any = self  # as far as these calls need them
        node = CacheNode(self.live, files, identity)
        self.streams = node.streams
        self.intake: Any = self.live._intake
        monitor = Monitor(pb.StatusReply, _ignore, SlowLog(REAL))
        self.service = node.service(NoOtherNodes(), NothingToRecover(), monitor)
        self.opened: dict[SessionId, Stream] = {}
        self.clients = [self.open() for _ in range(sessions)]

    def open(self) -> SessionId:
        stream = self.streams.open("bench")
        assert isinstance(stream, Stream)
        stream.attached = True
        self.index.open_page(stream.session)
        self.opened[stream.session] = stream
        return stream.session

    async def call(self, name: str, request: Any) -> Any:
        """A call's handler, watched from when its request is there."""
        if "session" in request.DESCRIPTOR.fields_by_name:
            request.session = self.opened[self.clients[0]].token
        with self.watching():
            return await getattr(self.service, name)(request, None)

    def is_session_locked(self, offset: int) -> bool:
        return False

    def dma_word(self, session: SessionId) -> int:
        return 0

    def words(self, session: SessionId) -> memoryview:
        return self.index._pages[session]._words

    def store(self, key: str, nbytes: int) -> EntryId:
        """Store an entry as Reserve and Commit do, without the calls."""
        session, content = self.clients[0], Content("uint8", (nbytes,), nbytes)
        while True:
            with self.cache.reserving():
                reserved = self.cache.reserve(session, Key("n", key), content, time.monotonic())
            if not isinstance(reserved, MakingRoom):
                break
        assert isinstance(reserved, Reserved), reserved
        self.cache.commit(session, reserved.entry, time.monotonic())
        info = self.cache.views.info(Key("n", key))
        assert info is not None
        return info.entry

    def claim(self, session: SessionId, place: int, key: str, nbytes: int, offset: int) -> None:
        """Claim a key in the session's page, as its client does before it copies."""
        number = self.index._names.add("n")
        assert number is not None
        record = key_record(number, key)
        assert record is not None
        words, at = self.words(session), claim_at(place)
        row = pack_row(record, Row(1, 0, offset, nbytes, "uint8", (nbytes,), b"", 0.0, False), 0)
        words[at + CLAIM_ROW : at + CLAIM_WORDS] = memoryview(row).cast("Q")
        words[CLAIMS_WORD] += 1
        words[at + CLAIM_NUMBER] = 1

    def close(self) -> None:
        self.index.close()


def _ignore(*_: object) -> None:
    pass


# -- what pages are full of ------------------------------------------------------------------------


def nothing(node: Node) -> None:
    pass


def garbage(node: Node) -> None:
    """Every word that may be a pin, and every put."""
    for session in node.clients:
        words = node.words(session)
        words[PINS_USED_WORD] = MAX_PINS
        for first, count in (
            (FIRST_PIN_WORD, MAX_PINS),
            (FIRST_CLAIM_WORD, MAX_CLAIMS * CLAIM_WORDS),
        ):
            data = memoryview(random.randbytes(8 * count)).cast("Q")
            words[first : first + count] = data
        words[CLAIMS_WORD] = MAX_CLAIMS


def many_pins(node: Node) -> None:
    """Real ones, as many as there can be."""
    entries = [node.store(f"pinned-{number}", KIB) for number in range(2_000)]
    for session in node.clients:
        words = node.words(session)
        words[PINS_USED_WORD] = MAX_PINS
        for word, entry in enumerate(random.sample(entries, MAX_PINS), FIRST_PIN_WORD):
            words[word] = entry


def a_full_pool(node: Node) -> None:
    """Garbage in all pages, and no memory that is free: every reservation evicts."""
    garbage(node)
    number = 0
    while node.cache.pools[0].free_bytes >= 8 * KIB:
        node.store(f"filler-{number}", 4 * KIB)
        number += 1


def one_claim_each(node: Node) -> None:
    for session in node.clients:
        node.claim(session, 0, f"claimed-{session}", KIB, 0)


# -- what is done ----------------------------------------------------------------------------------


def reserve_request(node: Node, nbytes: int = 4 * KIB) -> pb.ReserveRequest:
    content = pb.Content(dtype="uint8", shape=[nbytes], nbytes=nbytes)
    first = random.randrange(1 << 40)
    keys = (pb.Key(namespace="n", mm_hash=f"{first + n:064x}") for n in range(MAX_BATCH))
    items = [pb.ReserveItem(key=key, content=content) for key in keys]
    return pb.ReserveRequest(items=items)


async def reserve(node: Node) -> list[int]:
    reply = await node.call("Reserve", reserve_request(node))
    outcomes = [outcome.WhichOneof("outcome") for outcome in reply.outcomes]
    assert set(outcomes) == {"reserved"}, set(outcomes)
    return [outcome.reserved.reservation for outcome in reply.outcomes]


async def all_calls(node: Node) -> None:
    request = reserve_request(node)
    reply = await node.call("Reserve", request)
    reservations = [outcome.reserved.reservation for outcome in reply.outcomes]
    await node.call("Commit", pb.CommitRequest(reservations=reservations))
    keys = [item.key for item in request.items]
    acquired = await node.call(
        "Acquire", pb.AcquireRequest(keys=keys, wait_s=1.0, only_if_written=True)
    )
    leases = [outcome.leased.lease for outcome in acquired.outcomes]
    assert all(leases)
    await node.call("Contains", pb.ContainsRequest(keys=keys))
    await node.call("Release", pb.ReleaseRequest(leases=leases))


async def miss(node: Node) -> None:
    keys = [item.key for item in reserve_request(node).items]
    reply = await node.call(
        "Acquire", pb.AcquireRequest(keys=keys, wait_s=1.0, only_if_written=True)
    )
    assert all(outcome.HasField("missing") for outcome in reply.outcomes)


def looked_at(node: Node) -> None:
    garbage(node)
    while not node.cache.evictor.scan(0.0):
        pass


async def evict(node: Node) -> None:
    await node.call("Evict", pb.EvictRequest())


async def look(node: Node) -> None:
    """Scan uses and pins to the end, as the daemon does four times a second."""
    with node.watching():
        settled = node.cache.evictor.scan(time.monotonic())
        while not settled:
            await asyncio.sleep(0)
            settled = node.cache.pins.step()


async def close_sessions(node: Node) -> None:
    """Up to a hundred streams end in one turn each, their processes gone."""
    with node.watching():
        for session in node.clients[-100:-1]:
            node.streams.end(node.opened[session])
            await asyncio.sleep(0)
    await look(node)


async def puts_at_once(node: Node) -> None:
    """PUTS_AT_ONCE, of 1 MiB where there is a grant for each, rung before the loop looks."""
    pages: list[int] = []
    left = PUTS_AT_ONCE
    for session in node.clients:
        node.intake.grant(session, MIB, time.monotonic())
        page = node.index._pages[session]
        place = 0
        for word in page._mailbox[FIRST_GRANT_WORD : FIRST_GRANT_WORD + 16].tolist():
            grant = unpack_grant(word)
            for offset in range(grant.offset, grant.offset + grant.nbytes - MIB + 1, MIB):
                if left and place < MAX_CLAIMS:
                    node.claim(session, place, f"put-{session}-{place}", MIB, offset)
                    at = claim_at(place)
                    node.words(session)[at + CLAIM_DONE] = 1
                    place, left = place + 1, left - 1
        if place:
            pages.append(page.number)
    node.intake.listen(node.live.drain)
    await asyncio.sleep(0)
    node.intake._rung |= dict.fromkeys(pages)  # beyond what the doorbell's queue holds
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.connect(str(node.doorbell.path))
        bell.send(DOORBELL.pack(pages[0]))
        before = node.cache.counters.puts
        with node.watching():
            await node.live.begin()
    assert node.cache.counters.puts - before == PUTS_AT_ONCE - left


async def end_a_rich_session(node: Node) -> None:
    """End a session that holds as many leases as one may."""
    node.store("leased", KIB)
    session = node.clients[0]
    for _ in range(node.cache.limits.leases_per_session):
        node.cache.acquire(session, Key("n", "leased"), time.monotonic())
    with node.watching():
        node.streams.end(node.opened[session])
        while node.cache.views.leases:
            await asyncio.sleep(0)


async def wake(node: Node) -> None:
    """Commit a key that every session waits for."""
    key, content = Key("n", "waited for"), Content("uint8", (KIB,), KIB)
    with node.cache.reserving():
        reserved = node.cache.reserve(node.clients[0], key, content, time.monotonic())
    assert isinstance(reserved, Reserved)
    for session in node.clients:
        node.cache.acquire(session, key, time.monotonic(), 5.0, answer=Answer.PIN)
    await node.call("Commit", pb.CommitRequest(reservations=[reserved.entry]))
    with node.watching():
        while any(node.opened[session].outbox.empty() for session in node.clients):
            await asyncio.sleep(0)


class PoolOfZeros:
    """The memory that peers read: nothing is hashed, nothing fetched, and there is no disk."""

    def describe(self) -> peer_pb.NodeDescription:
        return peer_pb.NodeDescription()

    def address_of(self, extent: Extent) -> int:
        return extent.offset

    def bytes_of(self, extent: Extent) -> bytes:
        return bytes(extent.nbytes)

    def checksum_of(self, leased: Leased) -> int:
        return 1

    def is_speculative(self, key: Key) -> bool:
        return False

    def is_beginning_to_make(self, key: Key) -> bool:
        return False

    def is_local(self, key: Key) -> bool:
        return False

    def want_near(self, key: Key) -> None: ...

    def told_encoders(self) -> Sequence[RegisteredEncoder]:
        return []

    async def offered(self, found: Mapping[Key, Hint]) -> None: ...


def a_thousand_keys(node: Node) -> None:
    """Store every other key that peers ask for, with a put under way in each session."""
    one_claim_each(node)
    for number in range(0, MAX_BATCH, 2):
        node.store(f"k{number}", KIB)


def asked_keys() -> list[pb.Key]:
    return [pb.Key(namespace="n", mm_hash=f"k{number}") for number in range(MAX_BATCH)]


async def ask_as_a_peer(node: Node, request: peer_pb.LinkRequest) -> InboundLink:
    """Watch a peer's request from its arrival until all of it is answered."""
    session = node.live.cache.open_session()
    assert not isinstance(session, LimitReached)
    serving = Serving(2, node.live.refuse, node.live.clock)
    link = InboundLink(node.live, PoolOfZeros(), serving, session, "127.0.0.1:1")
    with node.watching():
        await link.take(request)
    return link


async def find_keys(node: Node) -> None:
    find = peer_pb.FindKeys(ticket=1, keys=asked_keys())
    link = await ask_as_a_peer(node, peer_pb.LinkRequest(find=find))
    reply = link.outbox.get_nowait()
    assert reply is not None
    assert sum(reply.found.found) == MAX_BATCH // 2


async def lease_keys(node: Node) -> None:
    keys = [
        peer_pb.LeaseKey(ticket=ticket, key=key, wait_s=1.0, bytes_up_to=1 << 16)
        for ticket, key in enumerate(asked_keys(), 1)
    ]
    lease = peer_pb.LeaseKeys(keys=keys)
    link = await ask_as_a_peer(node, peer_pb.LinkRequest(lease=lease))
    replies = [link.outbox.get_nowait() for _ in range(link.outbox.qsize())]
    outcomes = [each for reply in replies if reply for each in reply.leases.outcomes]
    assert len(outcomes) == MAX_BATCH
    assert sum(each.HasField("leased") for each in outcomes) == MAX_BATCH // 2


@asynccontextmanager
async def a_cluster(node: Node) -> AsyncIterator[Cluster]:
    """The node among others that do not answer, its memory in this process alone."""
    config = Config(
        peer_address="127.0.88.1:9465",
        peer_token=SecretStr("the token of a benchmark"),
        hint_networks=(IPv4Network("127.0.0.0/8"),),
    )
    memory = MappedFile.of_memory(64 * MIB)
    pools: Any = {0: SimpleNamespace(readable=memory, writable=memory)}
    checksums, flights = Checksums(node.live, pools), Flights(node.live)
    identity = NodeIdentity("bench", "a" * 32, "bench", "127.0.88.1:9465")
    shared = PoolMemory(pools, checksums)
    cluster = Cluster(config, node.live, flights, shared, identity, _ignore, Outside())
    try:
        yield cluster
    finally:
        await cluster.close()
        checksums.close()


async def offer(node: Node) -> None:
    """Offer MAX_BATCH keys to one node, half of them stored here."""
    keys = [Key(key.namespace, key.mm_hash) for key in asked_keys()]
    async with a_cluster(node) as cluster:
        with node.watching():
            cluster.offer(keys, ["127.0.77.1:1"])
            for _ in range(4):
                await asyncio.sleep(0)


async def publish(node: Node) -> None:
    """MAX_BATCH entries that are hashed on the loop, changed in one moment."""
    async with a_cluster(node) as cluster:
        session, names = node.clients[0], [f"published-{number}" for number in range(MAX_BATCH)]
        content = Content("uint8", (KIB,), KIB)
        for name in names:
            with node.cache.reserving():
                reserved = node.cache.reserve(session, Key("n", name), content, time.monotonic())
            assert isinstance(reserved, Reserved)
            node.live.commit(session, reserved.entry)
        publishing = asyncio.ensure_future(cluster._publish())
        last = Key("n", names[-1])
        with node.watching():
            while (info := node.cache.views.info(last)) is None or info.checksum is None:
                await asyncio.sleep(0)
        publishing.cancel()


CASES: tuple[tuple[str, int, Callable[[Node], None], Callable[[Node], Awaitable[object]]], ...] = (
    ("1,024 items reserved, committed, acquired, released", 64, nothing, all_calls),
    ("the same, with a put under way in each session", 64, one_claim_each, all_calls),
    ("the same, pages full of garbage", 64, garbage, all_calls),
    ("1,024 items reserved, each evicts, pages full of garbage", 16, a_full_pool, reserve),
    ("1,024 misses, with a put under way in each session", 64, one_claim_each, miss),
    ("a look at pages full of garbage", 64, garbage, look),
    ("a look at 504 pins in each page", 64, many_pins, look),
    ("a look at pages that are as they were", 64, looked_at, look),
    ("2,000 entries evicted, 504 pins in each page", 64, many_pins, evict),
    ("100 sessions end, pages full of garbage", 64, garbage, close_sessions),
    ("a session of 65,536 leases ends", 64, nothing, end_a_rich_session),
    ("every session waits for one key", 64, nothing, wake),
    ("256 puts of 1 MiB rung at once", 4096, nothing, puts_at_once),
    (
        "a peer looks for 1,024 keys, a put under way in each session",
        64,
        a_thousand_keys,
        find_keys,
    ),
    ("a peer leases 1,024 keys, a put under way in each session", 64, a_thousand_keys, lease_keys),
    ("1,024 keys offered to a node", 64, a_thousand_keys, offer),
    ("1,024 changes hashed and published", 64, nothing, publish),
)


def longest_s(
    sessions: int,
    pool_mib: int,
    prepare: Callable[[Node], None],
    act: Callable[[Node], Awaitable[object]],
    now_s: Callable[[], float],
) -> float:
    selector = Selector(now_s)
    loop = asyncio.SelectorEventLoop(selector)

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ecd-loop-") as directory:
        node = Node(Path(directory), sessions, pool_mib * MIB, selector)
        prepare(node)
        gc.freeze()  # as the daemon does
        try:
            loop.run_until_complete(act(node))
            return selector.longest_s
        finally:
            node.close()
            loop.close()


def main(
    sessions: Annotated[str, typer.Option(help="How many, one column each.")] = "1,100,1000",
    runs: Annotated[int, typer.Option(help="Of each cell.")] = 5,
    cpu: Annotated[bool, typer.Option(help="The loop's own time: others share the cores.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    progress = Console(stderr=True)
    now_s = time.thread_time if cpu else time.perf_counter
    counts = [int(count) for count in sessions.split(",")]
    rows = [["the longest turn", *(f"{count:,} sessions" for count in counts)]]
    for name, pool_mib, prepare, act in CASES:
        progress.print(f"{name} ...")
        row = [name]
        for count in counts:
            took = [longest_s(count, pool_mib, prepare, act, now_s) for _ in range(runs)]
            row.append(f"{median(took) * 1e3:.1f} ms")
        rows.append(row)
    clock = ", in CPU time of its thread" if cpu else ""
    title = (
        f"Medians of the longest turn of {runs} runs{clock}; the limit is {LIMIT_S * 1e3:.0f} ms."
    )
    show(Console(highlight=False, width=120), title, rows)
    if output is not None:
        write_page(output, f"{machine()}.\n{title}\n\n{markdown(rows)}")


if __name__ == "__main__":
    typer.run(main)
