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
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from common import MIB, machine, markdown, show
from rich.console import Console

from ecd.core.cache import Cache
from ecd.core.types import Content, EntryId, Key, LimitReached, MakingRoom, Reserved, SessionId
from ecd.memory.mapped_index import MappedIndex
from ecd.memory.pool_dir import PoolDir
from ecd.rpc.cache_service import CacheService, NoOtherNodes
from ecd.rpc.puts import Bell, Puts
from ecd.rpc.sessions import Sessions, Stream
from ecd_proto.contract import MAX_BATCH
from ecd_proto.shm import (
    BELL,
    FIRST_GRANT_WORD,
    FIRST_PIN_WORD,
    FIRST_PUT_WORD,
    MAX_PINS,
    MAX_PUTS,
    PINS_USED_WORD,
    PUT_DONE,
    PUT_NUMBER,
    PUT_ROW,
    PUT_WORDS,
    PUTS_WORD,
    ROW_BYTES,
    Row,
    key_record,
    pack_row,
    unpack_grant,
)
from ecd_proto.v1 import cache_pb2 as pb

LIMIT_S = 0.005
KIB = 1 << 10
PUTS_AT_ONCE = 256


class Selector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Notes how long the loop was away between two looks for events, while it is told to."""

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
    """What a daemon has on its loop, without the servers."""

    def __init__(self, directory: Path, sessions: int, pool_bytes: int, selector: Selector) -> None:
        self.watching = selector.watching
        place = PoolDir(str(directory), "bench")
        self.index = MappedIndex(place, "bench", pool_bytes, sessions + 8)
        self.cache = Cache(pool_bytes, clients=self.index)
        self.locked: set[int] = set()
        self.sessions = Sessions(self.cache, self, "bench", "bench", "", time.monotonic)
        self.others = NoOtherNodes(lambda: None)
        self.service = CacheService(
            self.cache, self.sessions, self.others, "bench", time.monotonic, pb.StatusReply, _ignore
        )
        self.bell = Bell(directory / "bell")
        self.puts = Puts(
            self.cache, self.index, self.sessions, self.bell, self.service.trim_soon, _ignore
        )
        self.sessions.puts, self.service.grant = self.puts, self.puts.grant
        self.clients = [self.open() for _ in range(sessions)]

    def open(self) -> SessionId:
        session = self.cache.open_session()
        assert not isinstance(session, LimitReached)
        self.index.open_page(session)
        stream = Stream(session, str(session), "bench", attached=True)
        self.sessions._by_token[stream.token] = self.sessions._by_session[session] = stream
        return session

    async def call(self, name: str, request: Any) -> Any:
        """A call's handler, watched from when its request is there."""
        if "session" in request.DESCRIPTOR.fields_by_name:
            request.session = str(self.clients[0])
        with self.watching():
            return await getattr(self.service, name)(request, None)

    def is_session_locked(self, offset: int) -> bool:
        return offset in self.locked

    def words(self, session: SessionId) -> memoryview:
        return self.index._pages[session]._words

    def store(self, key: str, nbytes: int) -> EntryId:
        """As a call does, without one."""
        session, content = self.clients[0], Content("uint8", (nbytes,), nbytes)
        while True:
            reserved = self.cache.reserve(session, Key("n", key), content, time.monotonic())
            if not isinstance(reserved, MakingRoom):
                break
        assert isinstance(reserved, Reserved), reserved
        self.cache.commit(session, reserved.entry, time.monotonic())
        info = self.cache.look(Key("n", key))
        assert info is not None
        return info.entry

    def claim(self, session: SessionId, place: int, key: str, nbytes: int, offset: int) -> None:
        """What a client writes into its page before it copies."""
        number = self.index._names.add("n")
        assert number is not None
        record = key_record(number, key)
        assert record is not None
        words, at = self.words(session), FIRST_PUT_WORD + place * PUT_WORDS
        row = pack_row(record, Row(1, 0, offset, nbytes, "uint8", (nbytes,), b"", 0.0, False), 0)
        words[at + PUT_ROW : at + PUT_ROW + ROW_BYTES // 8] = memoryview(row).cast("Q")
        words[PUTS_WORD] += 1
        words[at + PUT_NUMBER] = 1

    def close(self) -> None:
        self.index.close()


def _ignore(name: str, seconds: float) -> None:
    pass


# -- what pages are full of ------------------------------------------------------------------------


def nothing(node: Node) -> None:
    pass


def garbage(node: Node) -> None:
    """Every word that may be a pin, and every put."""
    for session in node.clients:
        words = node.words(session)
        words[PINS_USED_WORD] = MAX_PINS
        for first, count in ((FIRST_PIN_WORD, MAX_PINS), (FIRST_PUT_WORD, MAX_PUTS * PUT_WORDS)):
            data = memoryview(random.randbytes(8 * count)).cast("Q")
            words[first : first + count] = data
        words[PUTS_WORD] = MAX_PUTS


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
    while node.cache.allocator.free_bytes >= 8 * KIB:
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
    return pb.ReserveRequest(session=str(node.clients[0]), items=items)


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
    while not node.cache.look_at_readers(0.0):
        pass


async def evict(node: Node) -> None:
    await node.call("Evict", pb.EvictRequest())


async def look(node: Node) -> None:
    """As four times a second."""
    with node.watching():
        settled = node.cache.look_at_readers(time.monotonic())
        while not settled:
            await asyncio.sleep(0)
            settled = node.cache.look_at_pins()


async def close_sessions(node: Node) -> None:
    """Up to a hundred streams end in one turn each, their processes gone."""
    with node.watching():
        for session in node.clients[-100:-1]:
            node.sessions._end(node.sessions._by_session[session])
            await asyncio.sleep(0)
    await look(node)


async def puts_at_once(node: Node) -> None:
    """PUTS_AT_ONCE, of 1 MiB where there is a grant for each, rung before the loop looks."""
    pages: list[int] = []
    left = PUTS_AT_ONCE
    for session in node.clients:
        node.puts.grant(session, MIB)
        page = node.index._pages[session]
        place = 0
        for word in page._desk[FIRST_GRANT_WORD : FIRST_GRANT_WORD + 16].tolist():
            grant = unpack_grant(word)
            for offset in range(grant.offset, grant.offset + grant.nbytes - MIB + 1, MIB):
                if left and place < MAX_PUTS:
                    node.claim(session, place, f"put-{session}-{place}", MIB, offset)
                    at = FIRST_PUT_WORD + place * PUT_WORDS
                    node.words(session)[at + PUT_DONE] = 1
                    place, left = place + 1, left - 1
        if place:
            pages.append(page.number)
    node.puts.listen()
    await asyncio.sleep(0)
    node.puts._rung |= dict.fromkeys(pages)  # beyond what the bell's queue holds
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.connect(str(node.bell.path))
        bell.send(BELL.pack(pages[0]))
        before = node.cache.counters.puts
        with node.watching():
            await node.puts.catch_up()
    assert node.cache.counters.puts - before == PUTS_AT_ONCE - left


async def end_a_rich_session(node: Node) -> None:
    """Its process is gone, and it had as many leases as it may."""
    node.store("leased", KIB)
    session = node.clients[0]
    for _ in range(node.cache.limits.leases_per_session):
        node.cache.acquire(session, Key("n", "leased"), time.monotonic())
    with node.watching():
        node.sessions._end(node.sessions._by_session[session])
        while node.sessions._closing:
            await asyncio.sleep(0)
    assert node.cache.leases == 0


async def wake(node: Node) -> None:
    """All sessions wait for one key."""
    key, content = Key("n", "waited for"), Content("uint8", (KIB,), KIB)
    reserved = node.cache.reserve(node.clients[0], key, content, time.monotonic())
    assert isinstance(reserved, Reserved)
    for session in node.clients:
        node.cache.acquire(session, key, time.monotonic(), 5.0, to_pin=True)
    await node.call("Commit", pb.CommitRequest(reservations=[reserved.entry]))
    with node.watching():
        while node.sessions._woken:
            await asyncio.sleep(0)


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
        output.write_text(f"{machine()}.\n{title}\n\n{markdown(rows)}")


if __name__ == "__main__":
    typer.run(main)
