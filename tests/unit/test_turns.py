"""How much is done in one turn of the event loop: items, puts and pages are counted, not timed."""

import asyncio
import heapq
import itertools
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ecd.base.identity import NodeIdentity
from ecd.cluster.deliveries import Deliveries
from ecd.core.cache import Cache
from ecd.core.model.outcomes import (
    BeingWritten,
    Leased,
    LimitReached,
    MakingRoom,
    PoolFull,
    Reserved,
    Waiting,
)
from ecd.core.model.types import Answer, Content, EntryId, Extent, Key, Selection, SessionId
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.core.readers import DUE_AT_A_TIME
from ecd.live import turns
from ecd.live.slow_log import SlowLog, time_stages
from ecd.live.turns import PIECE, Turns
from ecd.memory import claims, shared_index
from ecd.memory.pool_dir import PoolDir
from ecd.memory.session_page import SessionPage
from ecd.memory.shared_index import SharedIndex
from ecd.node import Node as CacheNode
from ecd.node import SharedBoard, live_cache
from ecd.rpc.cache.cache_service import Monitor
from ecd.rpc.cache.origins import NoOtherNodes, NothingToRecover
from ecd.rpc.cache.puts import MAX_RINGS, PUTS_AT_A_TIME, Doorbell
from ecd.rpc.cache.stream import Stream
from ecd.rpc.peer.inbound_link import UNREAD_WITH_BYTES, InboundLink
from ecd.rpc.peer.serving import Serving
from ecd_proto.contract import MAX_BATCH
from ecd_proto.shm.files import GRANULE_BYTES
from ecd_proto.shm.rows import ROW_BYTES, Row, key_record, pack_row
from ecd_proto.shm.session_page import (
    CLAIM_DONE,
    CLAIM_NUMBER,
    CLAIM_ROW,
    CLAIM_WORDS,
    CLAIMS_WORD,
    DOORBELL,
    FIRST_ANSWER_WORD,
    FIRST_CLAIM_WORD,
    FIRST_GRANT_WORD,
    FIRST_PIN_WORD,
    GRANTED_POOL,
    MAX_CLAIMS,
    MAX_GRANTS,
    MAX_PINS,
    claim_at,
    unpack_grant,
)
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import peer_pb2 as peer_pb
from support.clock import SetClock
from support.reserving import is_being_written, reserve

POOL_BYTES = 64 << 20
SESSIONS = 200


class Locks:
    """Session locks that every client holds for its whole session."""

    def is_session_locked(self, offset: int) -> bool:
        return True


class Node:
    """A daemon's core, index and services; its clients consist of their pages alone."""

    def __init__(self, directory: Path) -> None:
        self.index = SharedIndex(PoolDir(str(directory), "test"), "ab", POOL_BYTES, SESSIONS)
        self.cache = Cache([Pool(Allocator(0, POOL_BYTES, GRANULE_BYTES))], board=self.index)
        board = SharedBoard(self.index, Doorbell(directory / "bell"))
        identity = NodeIdentity("test", "ab", "test")
        self.live = live_cache(self.cache, board, lambda *_: None, SetClock())
        node = CacheNode(self.live, Locks(), identity)  # type: ignore[arg-type]
        self.streams, self.intake = node.streams, self.live._intake
        monitor = Monitor(pb.StatusReply, lambda *_: None, SlowLog(self.live.clock))
        self.service = node.service(NoOtherNodes(), NothingToRecover(), monitor)
        self.tokens: dict[SessionId, str] = {}
        self.clients = [self.open() for _ in range(SESSIONS)]
        self.did: list[str] = []  # between two turns
        self.most = 0

    def open(self) -> SessionId:
        stream = self.streams.open("test")
        assert isinstance(stream, Stream)
        self.index.open_page(stream.session)
        self.tokens[stream.session] = stream.token
        return stream.session

    def token(self) -> str:
        """The first client's."""
        return self.tokens[self.clients[0]]

    def words(self, session: SessionId) -> memoryview:
        return self.index._pages[session]._words

    def claim(
        self, session: SessionId, place: int, key: str, offset: int = 0, pool: int = 0
    ) -> None:
        """Claim a key at `offset` of granted memory, as the session's client does."""
        namespace = self.index._names.add("n")
        assert namespace is not None
        record = key_record(namespace, key)
        assert record is not None
        words, at = self.words(session), claim_at(place)
        row = pack_row(record, Row(1, pool, offset, 4096, "uint8", (4096,), b"", 0.0, False), 0)
        words[at + CLAIM_ROW : at + CLAIM_WORDS] = memoryview(row).cast("Q")
        words[CLAIMS_WORD] += 1
        words[at + CLAIM_NUMBER] = 1

    def finish(self, session: SessionId, place: int) -> None:
        self.words(session)[claim_at(place) + CLAIM_DONE] = 1

    def unclaim(self, session: SessionId, place: int) -> None:
        self.words(session)[claim_at(place) + CLAIM_NUMBER] = 0
        self.words(session)[CLAIMS_WORD] -= 1

    def store(self, *names: str) -> list[EntryId]:
        for name in names:
            reserved = reserve(
                self.cache, self.clients[0], Key("n", name), Content("uint8", (4096,), 4096), 0.0
            )
            assert isinstance(reserved, Reserved)
            self.cache.commit(self.clients[0], reserved.entry, 0.0)
        infos = [self.cache.views.info(Key("n", name)) for name in names]
        return [info.entry for info in infos if info is not None]

    def run(self, act: Callable[[], Awaitable[object]]) -> int:
        """Run `act`; returns the most that one turn of the loop appended to `did`."""

        async def count() -> None:
            while True:
                self.most, self.did = max(self.most, len(self.did)), []
                await asyncio.sleep(0)

        async def both() -> None:
            counting = asyncio.ensure_future(count())
            await act()
            await asyncio.sleep(0)
            counting.cancel()

        self.most, self.did = 0, []
        asyncio.run(both())
        return self.most

    def counted(self, monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
        method = getattr(where, name)

        def counting(*args: object, **named: object) -> object:
            self.did.append(name)
            return method(*args, **named)

        monkeypatch.setattr(where, name, counting)

    async def call(self, name: str, request: object) -> object:
        return await getattr(self.service, name)(request, None)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(turns, "PIECE_S", 60.0)  # so that nothing but the count ends a piece
    node = Node(tmp_path)
    yield node
    node.cache.check()
    node.index.close()


def keys(count: int, name: str = "k") -> list[pb.Key]:
    return [pb.Key(namespace="n", mm_hash=f"{name}{number}") for number in range(count)]


def reserve_request(node: Node, wanted: list[pb.Key]) -> pb.ReserveRequest:
    content = pb.Content(dtype="uint8", shape=[4096], nbytes=4096)
    items = [pb.ReserveItem(key=key, content=content) for key in wanted]
    return pb.ReserveRequest(session=node.token(), items=items)


# -- batches ---------------------------------------------------------------------------------------


def test_of_the_largest_batch_a_turn_does_one_piece(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = node.token()
    for name in ("reserve", "commit", "acquire", "release", "abort"):
        node.counted(monkeypatch, node.cache, name)
    node.counted(monkeypatch, node.cache.views, "contains")
    replies: dict[str, object] = {}

    def most(name: str, request: object) -> int:
        async def act() -> None:
            replies[name] = await node.call(name, request)

        return node.run(act)

    wanted = keys(MAX_BATCH)
    assert most("Reserve", reserve_request(node, wanted)) <= PIECE
    reserved = [outcome.reserved.reservation for outcome in replies["Reserve"].outcomes]
    assert len(set(reserved)) == MAX_BATCH
    assert most("Commit", pb.CommitRequest(session=token, reservations=reserved)) <= PIECE
    assert all(replies["Commit"].committed)
    assert most("Contains", pb.ContainsRequest(keys=wanted)) <= PIECE
    assert all(replies["Contains"].contained)
    assert most("Acquire", pb.AcquireRequest(session=token, keys=wanted)) <= PIECE
    leases = [outcome.leased.lease for outcome in replies["Acquire"].outcomes]
    assert most("Release", pb.ReleaseRequest(session=token, leases=leases)) <= PIECE
    assert all(replies["Release"].released)
    assert most("Reserve", reserve_request(node, keys(MAX_BATCH, "other"))) <= PIECE
    reserved = [outcome.reserved.reservation for outcome in replies["Reserve"].outcomes]
    assert most("Abort", pb.AbortRequest(session=token, reservations=reserved)) <= PIECE
    assert all(replies["Abort"].aborted)


def test_many_large_calls_at_once_share_the_turns(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.counted(monkeypatch, node.cache.views, "contains")
    request = pb.ContainsRequest(keys=keys(MAX_BATCH))

    async def act() -> None:
        await asyncio.gather(*(node.call("Contains", request) for _ in range(10)))
        assert len(asked) == 0

    asked: list[object] = []
    assert node.run(act) <= 2 * PIECE


def test_what_a_cancelled_call_has_done_is_undone(node: Node) -> None:
    token = node.token()
    node.store(*(key.mm_hash for key in keys(200, "stored")))
    wanted = [*keys(200, "stored"), *keys(200, "coming")]
    other = node.clients[1]
    content = Content("uint8", (4096,), 4096)
    for key in keys(200, "coming"):
        reserve(node.cache, other, Key("n", key.mm_hash), content, 0.0)

    async def cancelled(name: str, request: object, turns_of_it: int) -> None:
        call = asyncio.ensure_future(node.call(name, request))
        for _ in range(turns_of_it):
            await asyncio.sleep(0)
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while not node.service._undoing.is_idle:
            await asyncio.sleep(0)

    async def act() -> None:
        before = node.cache.pools[0].reserved_bytes
        await cancelled("Reserve", reserve_request(node, keys(MAX_BATCH)), 90)
        assert node.cache.pools[0].reserved_bytes == before
        acquire = pb.AcquireRequest(session=token, keys=wanted, wait_s=5.0)
        for turns_of_it in range(20, 60, 3):
            await cancelled("Acquire", acquire, turns_of_it)
            assert (node.cache.views.leases, node.cache.views.waits) == (0, 0)

    asyncio.run(act())
    assert node.cache.counters.aborts > 0, "the call was cancelled before it reserved anything"
    assert node.cache.counters.hits > 0


def test_a_session_that_ends_meanwhile_ends_its_batch(node: Node) -> None:
    async def act() -> None:
        call = asyncio.ensure_future(node.call("Reserve", reserve_request(node, keys(MAX_BATCH))))
        while not node.cache.pools[0].reserved_bytes:
            await asyncio.sleep(0)
        node.cache.leave_session(node.clients[0])
        node.cache.close_session(node.clients[0])
        with pytest.raises(Exception, match="not open"):
            await call
        assert node.cache.pools[0].reserved_bytes == 0

    asyncio.run(act())


# -- sessions --------------------------------------------------------------------------------------


def test_what_a_session_had_is_taken_back_in_turns(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.store("k")
    content = Content("uint8", (4096,), 4096)
    sessions = node.clients[1:4]
    for session in sessions:
        for _ in range(10 * DUE_AT_A_TIME):
            assert isinstance(node.cache.acquire(session, Key("n", "k"), 0.0), Leased)
        for number in range(2 * DUE_AT_A_TIME):
            key = Key("n", f"{session}-{number}")
            assert isinstance(reserve(node.cache, session, key, content, 0.0), Reserved)
    node.counted(monkeypatch, node.cache.pins, "let_go")
    node.counted(monkeypatch, node.cache._writers, "_free")

    async def act() -> None:
        for session in sessions:
            node.live.leave_session(session)
            node.live.close_session(session)
        while node.cache.views.sessions > SESSIONS - len(sessions):
            await asyncio.sleep(0)
        assert (node.cache.views.leases, node.cache.pools[0].reserved_bytes) == (0, 0)

    assert node.run(act) <= 2 * 2 * DUE_AT_A_TIME


def test_of_many_who_wait_for_one_key_a_turn_tells_some(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, content = Key("n", "k"), Content("uint8", (4096,), 4096)
    reserved = reserve(node.cache, node.clients[0], key, content, 0.0)
    assert isinstance(reserved, Reserved)
    for session in node.clients:
        assert isinstance(node.cache.acquire(session, key, 0.0, 5.0, answer=Answer.PIN), Waiting)
    node.counted(monkeypatch, node.streams, "_post")

    async def act() -> None:
        request = pb.CommitRequest(session=node.token(), reservations=[reserved.entry])
        await node.call("Commit", request)
        while any(stream.outbox.empty() for stream in node.streams._by_session.values()):
            await asyncio.sleep(0)

    assert node.run(act) <= PIECE


def test_leases_that_were_renewed_are_looked_at_some_at_a_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.store("k")
    session = node.clients[1]
    count = 8 * DUE_AT_A_TIME
    outcomes = [node.cache.acquire(session, Key("n", "k"), 0.0) for _ in range(count)]
    leases = [outcome.lease for outcome in outcomes if isinstance(outcome, Leased)]
    assert node.cache.renew(session, leases, 10.0)[1] == []
    for lease in leases[: count // 4]:
        node.cache.release(session, lease)
    node.counted(monkeypatch, heapq, "heappop")
    times = 0
    while (next_s := node.cache.next_deadline_s()) is not None and next_s <= 31.0:
        node.did = []
        assert node.cache.expire(31.0) == ([], [])
        assert len(node.did) <= 2 * DUE_AT_A_TIME
        times += 1
    assert times > 2
    assert node.cache.views.leases == count - count // 4


# -- pins ------------------------------------------------------------------------------------------


def fill_with_garbage(node: Node) -> None:
    for session in node.clients:
        words = node.words(session)
        words[FIRST_PIN_WORD : FIRST_PIN_WORD + MAX_PINS] = memoryview(
            random.randbytes(8 * MAX_PINS)
        ).cast("Q")


def test_of_pages_full_of_garbage_a_step_reads_a_few(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_with_garbage(node)
    words: list[int] = []
    pinned = SessionPage.pinned

    def counting(self: SessionPage, live: object) -> tuple[frozenset[EntryId], int]:
        found = pinned(self, live)  # type: ignore[arg-type]
        words.append(found[1])
        return found

    monkeypatch.setattr(SessionPage, "pinned", counting)
    steps = 1
    while not node.cache.pins.step():
        assert sum(words) <= shared_index.MAX_COST + MAX_PINS
        words.clear()
        steps += 1
    assert steps > 1
    words.clear()
    assert node.cache.pins.step(), "what has not changed is looked at in one step"
    assert (sum(words), len(words)) == (0, SESSIONS)


def test_room_waits_for_the_scan_and_is_not_refused(node: Node) -> None:
    """The pool is full, pages change all the time: who reserves is answered when it is over."""
    session, other = node.clients[:2]
    half = Content("uint8", (POOL_BYTES // 2,), POOL_BYTES // 2)
    for name in "ab":
        reserved = reserve(node.cache, session, Key("n", name), half, 0.0)
        assert isinstance(reserved, Reserved)
        node.cache.commit(session, reserved.entry, 0.0)
    info = node.cache.views.info(Key("n", "b"))
    assert info is not None
    outcomes: list[object] = []
    while not outcomes or isinstance(outcomes[-1], MakingRoom):
        fill_with_garbage(node)
        outcomes.append(reserve(node.cache, other, Key("n", "c"), half, 0.0))
    assert isinstance(outcomes[-1], Reserved)
    assert len(outcomes) > 3
    node.words(session)[FIRST_PIN_WORD] = info.entry  # what is left is pinned
    outcomes = []
    while not outcomes or isinstance(outcomes[-1], MakingRoom):
        outcomes.append(reserve(node.cache, other, Key("n", "d"), half, 0.0))
    assert isinstance(outcomes[-1], PoolFull)
    assert node.cache.views.contains(Key("n", "b")) or not node.cache._index.is_readable(info.entry)


def test_room_that_others_take_again_is_not_made_for_ever(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.cache, "reserve", lambda *_, **__: MakingRoom())
    clock = itertools.count()
    monkeypatch.setattr(node.live.clock, "now_s", lambda: next(clock) / 100)
    replies: list[pb.ReserveReply] = []
    slow_log = SlowLog(node.live.clock)

    async def act() -> None:
        time_stages()
        replies.append(await node.call("Reserve", reserve_request(node, keys(1))))
        slow_log.call("Reserve", 1.0, None)

    node.run(act)
    [outcome] = replies[0].outcomes
    assert outcome.WhichOneof("outcome") == "pool_full"
    assert node.cache.counters.refused["pool_full"] == 1
    assert slow_log.newest(clear=False)[0].stages["room"] > 0.0


def test_the_slow_log_takes_a_call_that_asks_for_more_than_there_can_be() -> None:
    slow_log = SlowLog(SetClock())
    content = pb.Content(nbytes=(1 << 64) - 1)
    asked = pb.ReserveRequest(items=[pb.ReserveItem(content=content)] * 2)
    slow_log.call("Reserve", 1.0, asked)
    assert slow_log.newest(clear=False)[0].nbytes == (1 << 64) - 1


def test_a_pin_is_seen_though_its_page_is_as_it_was(node: Node) -> None:
    [entry] = node.store("k")
    node.words(node.clients[7])[FIRST_PIN_WORD + 400] = entry
    for _ in range(3):
        assert node.cache.pins.step()
        assert node.cache.views.leases == 1
    node.cache.evictor.evict_selected(Selection(), 0.0, 10)
    for _ in range(3):
        assert node.cache.pins.step()
        assert node.cache.pools[0].used_bytes == 4096
    node.words(node.clients[7])[FIRST_PIN_WORD + 400] = 0
    assert node.cache.pins.step()
    assert node.cache.pools[0].used_bytes == 0


# -- claims ----------------------------------------------------------------------------------------


def test_a_scan_of_claims_reads_some_rows_a_step_and_each_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in node.clients:
        for place in range(MAX_CLAIMS):
            node.claim(session, place, f"{session}-{place}")
    node.counted(monkeypatch, claims, "unpack_key")
    most, total = 0, 0
    for _ in node.cache.scan_claims():
        most, total, node.did = max(most, len(node.did)), total + len(node.did), []
    assert 0 < most <= claims.CLAIMS_AT_A_TIME
    assert total + len(node.did) == SESSIONS * MAX_CLAIMS
    node.did = []
    for session in node.clients:
        for place in range(MAX_CLAIMS):
            assert node.index.is_claimed(Key("n", f"{session}-{place}"))
            assert not node.index.is_claimed(Key("n", f"{session}-{place}x"))
    for _ in node.cache.scan_claims():
        pass
    assert node.did == []


@pytest.mark.parametrize("before", ["nothing", "a piece of the row", "another put's row"])
def test_a_row_that_is_seen_after_its_number_is_read_again(node: Node, before: str) -> None:
    """The order of stores on processors that do not show them in order."""
    session, key = node.clients[3], Key("n", "k")
    words, at = node.words(session), FIRST_CLAIM_WORD + CLAIM_ROW
    row = slice(at, at + ROW_BYTES // 8)
    if before == "another put's row":
        node.claim(session, 0, "other")
    node.claim(node.clients[4], 0, "k")
    whole = node.words(node.clients[4])[row].tobytes()
    node.unclaim(node.clients[4], 0)
    if before == "a piece of the row":
        words[row] = memoryview(whole[:32] + bytes(ROW_BYTES - 32)).cast("Q")
    if before == "another put's row":
        namespace = node.index._names.numbers["n"]
        record = key_record(namespace, "k")
        assert record is not None
        second = Row(2, 0, 0, 4096, "uint8", (4096,), b"", 0.0, False)
        whole = pack_row(record, second, 0)
    words[CLAIMS_WORD] = 1
    words[FIRST_CLAIM_WORD + CLAIM_NUMBER] = 2 if before == "another put's row" else 1
    assert not is_being_written(node.cache, key)
    assert not is_being_written(node.cache, Key("n", "other"))
    words[row] = memoryview(whole).cast("Q")
    assert is_being_written(node.cache, key)
    content = Content("uint8", (4096,), 4096)
    assert reserve(node.cache, node.clients[0], key, content, 0.0) == BeingWritten()


def test_claims_come_and_go_and_pages_change_hands(node: Node) -> None:
    session, content = node.clients[3], Content("uint8", (4096,), 4096)
    key = Key("n", "k")
    node.claim(session, 2, "k")
    assert is_being_written(node.cache, key)
    assert reserve(node.cache, node.clients[0], key, content, 0.0) == BeingWritten()
    node.unclaim(session, 2)
    assert not is_being_written(node.cache, key)
    node.claim(session, 2, "k")
    assert is_being_written(node.cache, key)
    node.cache.leave_session(session)
    node.cache.close_session(session)
    assert not is_being_written(node.cache, key)
    after = node.open()
    node.claim(after, 2, "other")  # the same page, place and number
    assert not is_being_written(node.cache, key)
    assert is_being_written(node.cache, Key("n", "other"))


@pytest.mark.parametrize("pool", [GRANTED_POOL, GRANTED_POOL + 1])
def test_only_a_claim_in_the_pool_of_grants_keeps_memory(node: Node, pool: int) -> None:
    session = node.clients[3]
    assert node.cache.granted.grant(session, 4096, 1, 1, 0.0, node.cache.pools[0])
    page = node.index._pages[session]
    offset = unpack_grant(page._mailbox[FIRST_GRANT_WORD]).offset
    node.claim(session, 0, "k", offset, pool)
    node.index.revoke([session])
    assert bool(page._mailbox[FIRST_ANSWER_WORD]) == (pool == GRANTED_POOL)
    node.finish(session, 0)
    assert [page.is_granted(put) for put in page.finished_puts()] == [pool == GRANTED_POOL]


class NoMemory:
    """The memory of a node that fetches nothing itself, as peers read it."""

    def is_speculative(self, key: Key) -> bool:
        return False

    def is_local(self, key: Key) -> bool:
        return False

    def address_of(self, extent: Extent) -> int:
        return extent.offset

    def bytes_of(self, extent: Extent) -> bytes:
        return bytes(extent.nbytes)

    def checksum_of(self, leased: Leased) -> int:
        return 1


def peer_link(node: Node) -> InboundLink:
    session = node.live.cache.open_session()
    assert not isinstance(session, LimitReached)
    serving = Serving(2, node.live.refuse, node.live.clock)
    return InboundLink(node.live, NoMemory(), serving, session, "127.0.0.1:1")  # type: ignore[arg-type]


def test_a_peers_question_about_many_keys_looks_at_claims_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.store("stored")
    node.claim(node.clients[3], 0, "claimed")
    node.counted(monkeypatch, node.index, "scan_claims")
    wanted = [*keys(62), *(pb.Key(namespace="n", mm_hash=name) for name in ("stored", "claimed"))]
    items = [
        peer_pb.LeaseKey(ticket=ticket, key=key, wait_s=1.0) for ticket, key in enumerate(wanted)
    ]

    async def act() -> None:
        link = peer_link(node)
        await link.take(peer_pb.LinkRequest(find=peer_pb.FindKeys(ticket=1, keys=wanted)))
        found = link.outbox.get_nowait()
        assert found is not None
        assert list(found.found.found) == [False] * 62 + [True] * 2
        assert len(node.did) == 1
        await link.take(peer_pb.LinkRequest(lease=peer_pb.LeaseKeys(keys=items)))
        said = [link.outbox.get_nowait() for _ in range(link.outbox.qsize())]
        outcomes = {
            outcome.ticket: outcome
            for reply in said
            if reply is not None
            for outcome in reply.leases.outcomes
        }
        assert all(outcomes[ticket].HasField("missing") for ticket in range(62))
        assert outcomes[62].HasField("leased")
        assert 63 not in outcomes
        assert node.cache.views.waits == 1, "for what is being put"
        assert len(node.did) == 2
        link.end()

    asyncio.run(act())


def test_bytes_come_with_leases_of_small_entries_if_they_are_asked_for_and_read(node: Node) -> None:
    names = [f"stored{number}" for number in range(16)]
    node.store(*names)
    stored = [pb.Key(namespace="n", mm_hash=name) for name in names]

    async def asked(link: InboundLink, count: int, bytes_up_to: int) -> list[list[int]]:
        keys_of = enumerate(stored[:count])
        items = [
            peer_pb.LeaseKey(ticket=ticket, key=key, bytes_up_to=bytes_up_to)
            for ticket, key in keys_of
        ]
        unread = link.outbox.qsize()
        await link.take(peer_pb.LinkRequest(lease=peer_pb.LeaseKeys(keys=items)))
        replies = [link.outbox.get_nowait() for _ in range(link.outbox.qsize())]
        assert None not in replies
        for _ in range(unread):
            link.outbox.put_nowait(peer_pb.LinkReply())
        lengths = [[len(o.leased.bytes) for o in r.leases.outcomes] for r in replies if r]
        return [each for each in lengths if each]

    async def act() -> None:
        link = peer_link(node)
        assert await asked(link, 2, 0) == [[0, 0]]
        assert await asked(link, 2, 4095) == [[0, 0]]
        assert await asked(link, 16, 1 << 40) == [[4096] * 8, [4096] * 8]
        for _ in range(UNREAD_WITH_BYTES):
            link.outbox.put_nowait(peer_pb.LinkReply())
        assert await asked(link, 2, 1 << 40) == [[0, 0]]
        link.end()

    asyncio.run(act())


def test_flights_that_are_answered_together_reserve_one_a_turn(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.claim(node.clients[3], 0, "k5")
    node.counted(monkeypatch, node.index, "scan_claims")

    async def act() -> None:
        deliveries = Deliveries(node.live, None, None, lambda *_: None, 5.0)  # type: ignore[arg-type]
        content = Content("uint8", (4096,), 4096)
        outcomes = await asyncio.gather(
            *(deliveries._reserve(Key("n", f"k{number}"), content) for number in range(64))
        )
        assert [type(outcome) for outcome in outcomes].count(Reserved) == 63
        assert outcomes[5] == BeingWritten()

    assert node.run(act) <= 2


# -- puts ------------------------------------------------------------------------------------------


def granted_puts(node: Node, count: int) -> list[int]:
    """Claims of so many entries that are written, and the pages that they are in."""
    pages: list[int] = []
    for session in node.clients:
        if count <= 0:
            break
        assert node.cache.granted.grant(session, 4096, 1, MAX_CLAIMS, 0.0, node.cache.pools[0])
        page = node.index._pages[session]
        grants = page._mailbox[FIRST_GRANT_WORD : FIRST_GRANT_WORD + MAX_GRANTS].tolist()
        offset = unpack_grant(grants[0]).offset
        for place in range(min(MAX_CLAIMS, count)):
            node.claim(session, place, f"{session}-{place}", offset + 4096 * place)
            node.finish(session, place)
        count -= MAX_CLAIMS
        pages.append(page.number)
    return pages


def test_puts_rung_at_once_take_turns_and_who_asks_sees_them_all(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages = granted_puts(node, 256)
    node.counted(monkeypatch, node.cache.granted, "put")

    async def act() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            bell.connect(str(tmp_path / "bell"))
            for page in pages[:4]:
                bell.send(DOORBELL.pack(page))
            node.intake._rung |= dict.fromkeys(pages[4:])  # the kernel's queue may hold only 10
            await asyncio.gather(*(node.live.begin() for _ in range(20)))
            assert node.cache.counters.puts == 256

    assert node.run(act) < 2 * PUTS_AT_A_TIME
    assert MAX_RINGS > 512


def test_the_last_puts_of_a_session_are_taken_with_its_end(node: Node) -> None:
    pages = granted_puts(node, 256)
    node.intake._rung |= dict.fromkeys(pages)
    last = node.clients[len(pages) - 1]

    async def act() -> None:
        node.live.leave_session(last)
        assert node.cache.counters.puts == MAX_CLAIMS

    asyncio.run(act())


def test_a_put_that_is_refused_evicts_nothing(node: Node) -> None:
    """A refused put may name any size. The pool is full here, and is not trimmed."""
    pool = node.cache.pools[0]
    pool.limits = replace(pool.limits, high_watermark=1.0)
    content = Content("uint8", (1 << 16,), 1 << 16)
    number = 0
    while node.cache.pools[0].free_bytes >= 1 << 16:
        reserved = reserve(node.cache, node.clients[0], Key("n", f"{number}"), content, 0.0)
        assert isinstance(reserved, Reserved)
        node.cache.commit(node.clients[0], reserved.entry, 0.0)
        number += 1
    rogue = node.clients[5]
    namespace = node.index._names.add("n")
    assert namespace is not None
    record = key_record(namespace, "no memory was granted for it")
    assert record is not None
    row = pack_row(record, Row(1, 0, 0, 1 << 20, "uint8", (1 << 20,), b"", 0.0, False), 0)
    words, at = node.words(rogue), FIRST_CLAIM_WORD
    words[at + CLAIM_ROW : at + CLAIM_WORDS] = memoryview(row).cast("Q")
    words[at + CLAIM_NUMBER] = words[at + CLAIM_DONE] = 1

    async def act() -> None:
        node.intake._rung[node.index._pages[rogue].number] = None
        await node.live.begin()
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0)

    asyncio.run(act())
    assert sum(node.cache.counters.evictions.values()) == 0
    assert node.cache.views.entries == number


def test_turns_go_to_whoever_waits_still() -> None:
    async def act() -> None:
        order: list[int] = []
        shared = Turns(SetClock())

        async def wait(number: int) -> None:
            await shared.next()
            order.append(number)

        waiting = [asyncio.ensure_future(wait(number)) for number in range(5)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        waiting[0].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert order == [2, 3, 4]

    asyncio.run(act())
