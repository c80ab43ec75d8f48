"""Putting without a call: grants, the doorbell, and what happens when something goes wrong."""

import asyncio
import errno
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ecd.core.cache import Cache
from ecd.core.model.outcomes import Reserved
from ecd.core.model.types import Content, Key
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd.memory.pool_dir import PoolDir
from ecd.memory.shared_index import SharedIndex
from ecd.rpc.cache.puts import Doorbell
from ecd_client import Client, DaemonUnavailable
from ecd_client.pools import MappedPool
from ecd_client.session.channel import open_channel
from ecd_client.shared.puts import MAX_UNANSWERED, Claim, NewEntry, PutState, PutWriter
from ecd_client.values import Extent
from ecd_proto.shm.barriers import STORES_IN_ORDER
from ecd_proto.shm.session_page import DOORBELL, MAX_CLAIMS
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.daemon import Daemon
from support.processes import run
from support.reserving import reserve
from support.waiting import HANG_S, eventually, within_hang

MIB = 1 << 20


def filled(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


@pytest.fixture
def other(client: Client) -> Iterator[Client]:
    with Client(client.address, namespace=client.namespace) as other:
        yield other


@pytest.fixture
def calls(daemon: Daemon) -> Callable[[str], int]:
    """How many calls of a method the daemon has answered since the test began."""
    before = {method: daemon.calls(method) for method in ("Reserve", "Put")}
    return lambda method: daemon.calls(method) - before[method]


def test_only_the_first_put_of_a_namespace_makes_calls(
    daemon: Daemon, client: Client, other: Client, calls: Callable[[str], int]
) -> None:
    before = daemon.status().counters
    for number in range(40):
        assert client.put(f"k{number}", filled(MIB // 8, number), metadata=b"m", cost=0.5)
        assert other.contains([f"k{number}"]) == [True], "put returned before it was visible"
        daemon.status()  # it has listed the put: a client that is far ahead of it makes calls
    assert not client.put("k7", filled(10, 1))
    assert other.put("its first", filled(MIB // 8, 41))
    daemon.status()
    assert (calls("Reserve"), calls("Put")) == (1, 40)
    for number in range(40):
        with other.get(f"k{number}") as item:
            assert torch.equal(item.tensor, filled(MIB // 8, number))
            assert (item.metadata, item.cost_s) == (b"m", 0.5)
    counters = daemon.status().counters
    assert counters.puts - before.puts == 41
    assert counters.duplicates - before.duplicates == 1


def test_clients_that_only_read_leave_memory_to_those_that_write(
    daemon: Daemon, calls: Callable[[str], int], request: pytest.FixtureRequest
) -> None:
    """64 MiB, of which at most 8 are granted: half of them to clients that have not put."""
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(Client(daemon.address))
        assert daemon.status().pools[0].granted_bytes == 4 * MIB
        writer = stack.enter_context(Client(daemon.address, namespace=request.node.name))
        for number in range(20):
            assert writer.put(f"k{number}", filled(MIB // 8, number))
            daemon.status()
        assert calls("Reserve") == 1
    eventually(lambda: daemon.status().pools[0].granted_bytes == 0)
    with Client(daemon.address) as client:
        client.put("large", filled(57 * MIB, 1))
        before = daemon.status()
        with Client(daemon.address), Client(daemon.address):
            after = daemon.status()
            assert after.pools[0].granted_bytes == before.pools[0].granted_bytes
            assert after.counters.evictions == before.counters.evictions
            assert client.contains(["large"]) == [True]


def test_each_dtype_shape_and_size_comes_back(client: Client, calls: Callable[[str], int]) -> None:
    client.put("first", torch.ones(MIB))
    for number, tensor in enumerate(
        [
            torch.randn(7, 16).to(torch.bfloat16),
            torch.randn(64, 64).t(),
            torch.tensor(3.0),
            torch.empty(0, 4),
            torch.randn(2, 3, 4, 5).to(torch.float8_e4m3fn),
            torch.randn(3, MIB),
        ]
    ):
        assert client.put(str(number), tensor)
        with client.get(str(number)) as item:
            assert (item.tensor.dtype, item.tensor.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(item.tensor.float(), tensor.float())
    assert calls("Put") > 0


def test_grants_give_way(daemon: Daemon, client: Client, other: Client) -> None:
    for number, each in enumerate((client, other)):
        each.put(f"first {number}", filled(MIB, 1))
    assert daemon.status().pools[0].granted_bytes > 0
    assert client.put("all", filled(64 * MIB, 2)), "nothing but the pool's size is a limit"
    assert daemon.status().pools[0].granted_bytes == 0
    with other.get("all") as item:
        assert (item.tensor == 2).all()
    assert other.put("small", filled(MIB, 3))
    with client.get("small") as item:
        assert (item.tensor == 3).all()


def test_what_is_being_written_outlives_its_grant(
    daemon: Daemon, client: Client, other: Client
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    client.put("first", filled(MIB, 1))

    def copy_to(pool: MappedPool, extent: Extent) -> None:
        copying.set()
        assert go_on.wait(HANG_S)
        pool.write_view(extent)[:] = b"\x07" * extent.nbytes

    entry = NewEntry(client.namespace, "slow", "uint8", (MIB,), MIB, b"", 0.0)
    with ThreadPoolExecutor() as side:
        try:
            stored = side.submit(client._writer.put, entry, copy_to, HANG_S)
            assert copying.wait(HANG_S)
            daemon.evict_all()
            assert other.put("large", filled(50 * MIB, 2))
        finally:
            go_on.set()
        assert stored.result(HANG_S)
    with other.get("slow") as slow, other.get("large") as large:
        assert (slow.tensor == 7).all()
        assert (large.tensor == 2).all()


class Door:
    """A lock that tells when somebody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_awaited = False

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_awaited = True
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_no_put_begins_while_another_has_yet_to_check_its_grant(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant that comes and goes in between would let a stale claim lie across a live put."""
    claiming, go_on, begun = threading.Event(), threading.Event(), threading.Event()
    is_granted = PutWriter._is_granted

    def slowly(self: PutWriter, number: int, grant: int) -> bool:
        if not claiming.is_set():
            claiming.set()
            assert go_on.wait(HANG_S)
        else:
            begun.set()
        return is_granted(self, number, grant)

    client.put("first", filled(5000, 0))
    client._connection.session().puts._lock = door = Door()
    monkeypatch.setattr(PutWriter, "_is_granted", slowly)
    with ThreadPoolExecutor() as side:
        try:
            slow = side.submit(client.put, "slow", filled(5000, 0))
            assert claiming.wait(HANG_S)
            after = side.submit(client.put, "next", filled(5000, 1))
            eventually(lambda: door.is_awaited or begun.is_set())
            assert not begun.is_set()
        finally:
            go_on.set()
        assert slow.result(HANG_S)
        assert after.result(HANG_S)
    assert begun.is_set()
    for value, key in enumerate(("slow", "next")):
        with client.get(key) as item:
            assert (item.tensor == value).all()


def test_a_copy_that_fails_stores_nothing_and_keeps_nothing(daemon: Daemon, client: Client) -> None:
    client.put("first", filled(MIB, 1))
    entry = NewEntry(client.namespace, "k", "uint8", (MIB,), MIB, b"", 0.0)

    def copy_to(*_: object) -> None:
        raise OSError("the device is gone")

    for _ in range(MAX_CLAIMS + 1):
        with pytest.raises(OSError, match="gone"):
            client._writer.put(entry, copy_to, HANG_S)
    assert client.contains(["k"]) == [False]
    assert client.put("k", filled(MIB, 1))
    daemon.check_nothing_leaked()


def test_an_interrupted_put_frees_no_place_twice(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two claims in one place would leave the first one's memory unseen, to be given away."""
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        client.put_bytes("first", b"x", "uint8", (1,))
        writer = client._connection.session().puts
        with daemon.stopped():
            for number in range(4):
                client.put_bytes(f"k{number}", b"x", "uint8", (1,))
            assert len(writer._unanswered) >= 4
        eventually(lambda: daemon.status().entries == 5)
        leave = PutWriter._leave
        left: list[Claim] = []

        def interrupt(self: PutWriter, claim: Claim) -> None:
            leave(self, claim)
            left.append(claim)
            if len(left) == 2:
                raise InterruptedError  # as a handler's exception after the last step

        monkeypatch.setattr(PutWriter, "_leave", interrupt)
        with pytest.raises(InterruptedError):
            client.put_bytes("interrupted", b"x", "uint8", (1,))
        client.put_bytes("after", b"x", "uint8", (1,))
        assert len(left) == len(set(left)) >= 4
        assert len(set(writer._places)) == len(writer._places)


def test_whoever_looks_after_a_put_sees_it(
    daemon: Daemon, client: Client, other: Client, calls: Callable[[str], int]
) -> None:
    """Readers in memory and by calls see it, though the daemon lists it a moment later."""
    with open_channel(daemon.address) as channel:
        stub = pb_grpc.CacheStub(channel)
        client.put("first", filled(5000, 1))
        for number in range(500):
            key = f"k{number}"
            client.put(key, filled(5000, number % 251))
            match number % 4:
                case 0:
                    with other.get(key) as item:
                        assert (item.tensor == number % 251).all()
                case 1:
                    assert other.contains([key]) == [True]
                case 2:
                    wanted = [pb.Key(namespace=client.namespace, mm_hash=key)]
                    assert stub.Contains(pb.ContainsRequest(keys=wanted)).contained == [True]
                case 3:
                    assert stub.Status(pb.StatusRequest()).entries == number + 2
    assert calls("Put") == 500
    client.put("last", filled(5000, 1))
    client.close()
    assert other.contains(["last"]) == [True]


@pytest.mark.parametrize("look", ["is_shown", "contains", "get_now"])
def test_a_put_that_is_listed_between_two_looks_is_seen(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """No row yet, as the index is read; then no claim any more."""
    daemon = make_daemon().start()
    with Client(daemon.address) as client, ExitStack() as halt:
        client.put("first", filled(5000, 1))
        claims = client._connection.session().index.claims
        claims_of = claims.of

        def of(*arguments: object) -> object:
            halt.close()
            eventually(lambda: daemon.status().entries == 2)
            eventually(lambda: not list(claims_of(*arguments)))
            return iter(())

        halt.enter_context(daemon.stopped())
        client.put("k", filled(5000, 2))
        monkeypatch.setattr(claims, "of", of)
        match look:
            case "is_shown":
                assert client.is_shown("k")
            case "contains":
                assert client.contains(["k"]) == [True]
            case "get_now":
                item, _ = client.get_now("k")
                with item:
                    assert (item.tensor == 2).all()
    daemon.check_nothing_leaked()


def test_what_is_put_while_the_daemon_is_stopped_is_bounded_and_kept(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client, Client(daemon.address) as other:
        client.put("first", filled(5000, 1))
        other.get("first").close()
        stored = []

        def put_many() -> None:
            for number in range(MAX_CLAIMS):
                client.put(f"k{number}", filled(5000, number))
                stored.append(number)

        with daemon.stopped():
            monkeypatch.setattr(client._connection.session().calls, "timeout_s", 0.1)
            with pytest.raises(DaemonUnavailable, match="in time"):
                put_many()
            assert stored == list(range(MAX_UNANSWERED))
            assert other.contains(["k0", "k7", f"k{MAX_CLAIMS}"]) == [True, True, False]
            unlisted, may_come = other.get_now("k0")
            assert (unlisted is not None, may_come) == (STORES_IN_ORDER, not STORES_IN_ORDER)
            assert unlisted is None or (unlisted.tensor == 0).all()
        client.wait_connected(HANG_S)
        for number in stored:
            with client.get(f"k{number}") as item:
                assert (item.tensor == number).all()
        client.put("k", filled(MIB, 1))
        with client.get("k") as item:
            assert (item.tensor == 1).all()
        if unlisted is not None:
            daemon.evict_all()
            daemon.crowd()
            assert (unlisted.tensor == 0).all(), "evicted, and kept for its reader"
            unlisted.close()
    daemon.check_nothing_leaked()


def test_what_a_killed_client_had_put_is_kept(daemon: Daemon) -> None:
    program = """
import os, signal, sys
from ecd_client import Client
client = Client(sys.argv[1])
for number in range(8):
    client.put_bytes(str(number), bytes([number]) * 5000, "uint8", (5000,))
os.kill(os.getpid(), signal.SIGKILL)
"""
    died = run([sys.executable, "-c", program, daemon.address])
    assert died.returncode == -signal.SIGKILL
    with Client(daemon.address) as client:
        for number in range(8):
            with client.get(str(number)) as item:
                assert (item.tensor == number).all()


def test_a_put_that_ends_after_its_stream_is_kept(
    daemon: Daemon, client: Client, other: Client
) -> None:
    """The client may not know yet that its stream has ended, and returns True."""
    client.put("first", filled(5000, 1))
    session = client._connection.ref()
    puts = session.puts

    def claim(key: str) -> Claim:
        claim = puts.claim(
            NewEntry(client.namespace, key, "uint8", (5000,), 5000, key.encode(), 0.0)
        )
        assert isinstance(claim, Claim)
        return claim

    def copy_to(pool: MappedPool, extent: Extent) -> None:
        pool.write_view(extent)[:] = b"\7" * 5000

    def write(claim: Claim) -> PutState:
        puts.session_is_over = False
        return puts.write(claim, copy_to)

    rung, silent = claim("rung"), claim("silent")
    session._outbox.put(pb.SessionRequest(hello=pb.Hello()))  # a second one
    eventually(lambda: session._over)
    assert "broke the session's protocol" in daemon.text()
    assert write(rung) is PutState.STORED
    assert write(claim("late")) is PutState.STORED
    assert daemon.status().entries == 3
    puts.close()
    assert write(silent) is PutState.UNANSWERED, "there is no doorbell"
    assert daemon.status().entries == 3
    session.unref()
    eventually(lambda: daemon.status().entries == 4)
    for key in ("rung", "late", "silent"):
        with other.get(key) as item:
            assert (bytes(item.view), item.metadata) == (b"\7" * 5000, key.encode())


def test_two_writers_of_one_key_store_one(daemon: Daemon, client: Client, other: Client) -> None:
    before = daemon.status().counters.puts
    for number, each in enumerate((client, other)):
        each.put(f"first {number}", filled(MIB, 1))

    def put(each: Client) -> list[bool]:
        return [each.put(f"k{number}", filled(5000, number % 251)) for number in range(200)]

    with ThreadPoolExecutor() as side:
        ours, others = side.map(put, (client, other))
    assert all(a != b for a, b in zip(ours, others, strict=True))
    assert daemon.status().counters.puts - before == 202
    for number in range(200):
        with client.get(f"k{number}") as item:
            assert (item.tensor == number % 251).all()


def test_a_reservation_is_counted_and_seen_before_claims_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order alone: no test makes a processor reorder a store and a load at will."""
    steps: list[str] = []

    class Header:
        def __init__(self, words: memoryview) -> None:
            self.words = words

        def __getitem__(self, word: int) -> int:
            return self.words[word]

        def __setitem__(self, word: int, count: int) -> None:
            steps.append(f"count {count}")
            self.words[word] = count

    class Pages(Header):
        def __getitem__(self, words: slice) -> memoryview:
            steps.append("scan")
            return self.words[words]

    directory = PoolDir(str(tmp_path), "test")
    index = SharedIndex(directory, "ab", 64 * MIB, 4)
    cache = Cache([Pool(Allocator(0, 64 * MIB, 4096))], board=index)
    session = cache.open_session()
    index.open_page(session)
    index._header = Header(index._header)
    index._claims._pages = Pages(index._claims._pages)
    monkeypatch.setattr("ecd.memory.claims.barrier", lambda: steps.append("barrier"))
    content = Content("uint8", (1,), 1)
    assert isinstance(reserve(cache, session, Key("n", "k"), content, 0.0), Reserved)
    assert steps[:3] == ["count 1", "barrier", "scan"]
    assert "count 0" not in steps
    index.close()
    directory.close()


def test_who_waits_is_woken_by_a_put_without_a_call(
    daemon: Daemon, client: Client, other: Client, calls: Callable[[str], int]
) -> None:
    client.put("first", filled(MIB, 1))
    [waiting] = other.get_async(["k"], HANG_S)
    eventually(lambda: daemon.status().waits == 1)
    client.put("k", filled(MIB, 4))
    with waiting.result(HANG_S) as item:
        assert (item.tensor == 4).all()
    assert calls("Put") == 1


def test_a_ring_preempts_nobody_and_a_call_does(daemon: Daemon) -> None:
    def listeners() -> int:
        tasks = map(int, os.listdir(f"/proc/{daemon.pid}/task"))
        return [os.sched_getscheduler(task) for task in tasks].count(os.SCHED_BATCH)

    eventually(lambda: listeners() == 1, "the thread that listens has begun")
    assert os.sched_getscheduler(daemon.pid) == os.SCHED_OTHER


class Deaf:
    """An epoll that hears of its end, but of no ring."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def close(self) -> None:
        self._epoll.close()

    def register(self, what: socket.socket | int, events: int) -> None:
        if not isinstance(what, socket.socket):
            self._epoll.register(what, events)

    def poll(self) -> list[tuple[int, int]]:
        return self._epoll.poll()


def test_a_doorbell_is_heard_by_its_thread_or_where_somebody_waits_by_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def no_descriptor() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    async def hears(name: str, hurries: bool = False) -> bool:
        """Whether rings are heard: one that came before anybody listened, and two later ones."""
        doorbell, heard = Doorbell(tmp_path / name), asyncio.Event()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ringing:
            ringing.connect(str(doorbell.path))
            try:
                ringing.send(DOORBELL.pack(0))
                doorbell.listen(heard.set)
                for page in range(3):
                    doorbell.hurry(hurries)
                    if name == "deaf":
                        for _ in range(1000):
                            await asyncio.sleep(0)
                        return heard.is_set()
                    await within_hang(heard.wait())
                    assert list(doorbell.take()) == [page]
                    doorbell.hurry(False)
                    heard.clear()
                    ringing.send(DOORBELL.pack(page + 1))
            finally:
                doorbell.close()
        return True

    assert asyncio.run(hears("by its thread"))
    monkeypatch.setattr(
        "ecd.rpc.cache.puts.select",
        SimpleNamespace(epoll=Deaf, EPOLLIN=select.EPOLLIN, EPOLLET=select.EPOLLET),
    )
    assert not asyncio.run(hears("deaf"))
    assert asyncio.run(hears("hurried", hurries=True))
    no_epoll = SimpleNamespace(epoll=no_descriptor)
    with monkeypatch.context() as patch:
        patch.setattr("ecd.rpc.cache.puts.select", no_epoll)
        assert asyncio.run(hears("without a descriptor"))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert asyncio.run(hears("without a thread"))


def test_what_is_on_its_way_can_be_seen(
    client: Client, other: Client, calls: Callable[[str], int]
) -> None:
    """An engine asks only for what may come: a miss that costs no call costs no step."""
    for key in ("by a call", "in granted memory"):
        copying, go_on = threading.Event(), threading.Event()

        def copy_to(*_: object, copying=copying, go_on=go_on) -> None:
            copying.set()
            assert go_on.wait(HANG_S)

        assert other.get_now(key) == (None, False)
        entry = NewEntry(client.namespace, key, "uint8", (MIB,), MIB, b"", 0.0)
        with ThreadPoolExecutor() as side:
            try:
                stored = side.submit(client._writer.put, entry, copy_to, HANG_S)
                assert copying.wait(HANG_S)
                assert other.get_now(key) == (None, True)
            finally:
                go_on.set()
            assert stored.result(HANG_S)
        eventually(lambda k=key: other.get_now(k)[0] is not None)
    eventually(lambda: calls("Put") == 1)


def test_a_name_too_long_for_a_socket_means_calls(
    make_daemon: Callable[..., Daemon], tmp_path_factory: pytest.TempPathFactory
) -> None:
    deep = tmp_path_factory.mktemp("d" * 100)
    daemon = make_daemon(ECD_SHM_DIR=str(deep)).start()
    assert "Every put is a call" in daemon.text()
    with Client(daemon.address) as client:
        for number in range(3):
            assert client.put(f"k{number}", filled(1000, number))
        assert (daemon.calls("Reserve"), daemon.calls("Put")) == (3, 0)
