"""The client library against a real daemon."""

from __future__ import annotations

import gc
import os
import signal
import struct
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType

import grpc
import numpy
import pytest
import torch

from ecd_client import (
    Client,
    DaemonUnavailable,
    EcdError,
    EntryTooLarge,
    Hint,
    InvalidArgument,
    LeaseExpired,
    PoolFull,
)
from ecd_client.session.connection import Connection
from ecd_client.session.session import Outbox, Session
from ecd_client.shared.puts import NewEntry
from ecd_client.tensors import TensorSource
from ecd_client.writer import describe_entry
from ecd_proto.contract import MAX_BATCH
from ecd_proto.engines import Engine
from ecd_proto.shm.session_page import MAX_CLAIMS
from ecd_proto.v1 import cache_pb2 as pb
from support.daemon import Daemon, changed
from support.processes import run
from support.waiting import HANG_S, eventually, stop

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


@pytest.fixture
def own_daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon that the test may stop and kill."""
    return make_daemon().start()


@pytest.fixture
def by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that cannot use the mapped index, as those in other languages."""
    monkeypatch.setattr("ecd_client.shared.board.join_barriers", lambda: False)


@pytest.fixture(autouse=True, params=["in memory", "by calls"])
def way(request: pytest.FixtureRequest) -> None:
    """Everything here holds for both ways to read and write."""
    if request.param == "by calls":
        request.getfixturevalue("by_calls")


IN_MEMORY = pytest.mark.parametrize("way", ["in memory"], indirect=True)
BY_CALLS = pytest.mark.parametrize("way", ["by calls"], indirect=True)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.resolve_neg().contiguous().flatten().view(torch.uint8)

    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(raw(a), raw(b))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.bool, torch.int64])
def test_every_dtype_and_shape(client: Client, dtype: torch.dtype) -> None:
    for shape in [(7, 16), (3,), (), (0, 4), (2, 3, 4, 5), (1369, 64)]:
        tensor = (torch.randn(shape) * 4).to(dtype)
        key = str(shape)
        assert client.put(key, tensor, cost=0.5, metadata=b"\x00\xff") is True
        assert client.put(key, tensor) is False
        with client.get(key) as item:
            assert same_bytes(item.tensor, tensor)
            assert same_bytes(item.to("cpu"), tensor)
            assert (item.metadata, item.cost_s) == (b"\x00\xff", 0.5)
            assert (item.shape, item.nbytes) == (shape, tensor.nbytes)


def test_non_contiguous_tensors_are_stored_as_they_read(client: Client) -> None:
    base = torch.arange(4 * 6 * 8, dtype=torch.float32).view(4, 6, 8)
    for key, tensor in {
        "transposed": base.transpose(0, 2),
        "strided": base[::2, 1::3],
        "negated when read": torch._neg_view(torch.randn(4)),
        "a parameter": torch.nn.Parameter(torch.ones(3)),
        "expanded": base[:1].expand(5, 6, 8),
        "slice": base[1:3, :, 2:5],
        "gradient": base.clone().requires_grad_(),
    }.items():
        client.put(key, tensor)
        with client.get(key) as item:
            assert same_bytes(item.tensor, tensor.detach())


def test_a_view_is_the_pools_memory_and_a_copy_is_not(client: Client) -> None:
    client.put("k", torch.ones(1024))
    item = client.get("k")
    other = client.get("k")
    assert item.tensor.data_ptr() == other.tensor.data_ptr(), "one copy, seen twice"
    copy = item.to()
    assert copy.data_ptr() != item.tensor.data_ptr()
    item.close()
    other.close()
    with pytest.raises(LeaseExpired, match="closed"):
        _ = item.tensor
    assert torch.equal(copy, torch.ones(1024))


@pytest.mark.parametrize("nbytes", [1, 1 << 20, 5 << 20])
def test_a_private_copy_is_where_it_was_asked_for(client: Client, nbytes: int) -> None:
    tensor = torch.full((nbytes,), 7, dtype=torch.uint8)
    client.put("k", tensor)
    with client.get("k") as item, torch.device("meta"):  # the default of new tensors
        copy = item.to("cpu")
    assert copy.is_cpu
    assert torch.equal(copy, tensor)


def test_a_forgotten_item_is_released(client: Client, daemon: Daemon) -> None:
    client.put("k", torch.ones(4))
    client.get("k")
    eventually(lambda: daemon.status().leases == 0)


def test_contains_takes_a_list_of_keys(client: Client) -> None:
    with pytest.raises(InvalidArgument, match=r"contains\(\['abc'\]\)"):
        client.contains("abc")


def test_misses_namespaces_and_contains(client: Client) -> None:
    client.put("k", torch.ones(2))
    assert client.get("nothing") is None
    assert client.get("k", namespace="other") is None
    assert client.contains(["k", "nothing", "k"]) == [True, False, True]
    assert client.contains(["k"], namespace="other") == [False]
    assert client.contains([]) == []
    assert client.contains(["k"] * 3000) == [True] * 3000


def test_a_wait_ends_with_the_commit(daemon: Daemon, client: Client) -> None:
    with Client(daemon.address, namespace=client.namespace) as reader:
        [waiting] = reader.get_async(["late"], HANG_S)
        eventually(lambda: daemon.status().waits == 1)
        client.put("late", torch.full((3,), 7.0))
        with waiting.result(HANG_S) as item:
            assert torch.equal(item.tensor, torch.full((3,), 7.0))
        assert reader.get("never", timeout=0.3) is None


def test_a_wait_that_nobody_wants_any_more_ends(daemon: Daemon, client: Client) -> None:
    [waiting] = client.get_async(["never"], 60.0)
    eventually(lambda: daemon.status().waits == 1)
    assert waiting.cancel()
    eventually(lambda: daemon.status().waits == 0)
    assert client.get_async(["never"], 60.0, only_if_written=True)[0].result(HANG_S) is None


def test_puts_on_the_side(client: Client, daemon: Daemon) -> None:
    tensors = {f"k{i}": torch.full((1000,), float(i)) for i in range(50)}
    futures = [client.put_async(key, tensor) for key, tensor in tensors.items()]
    assert all(future.result(HANG_S) for future in futures)
    for key, tensor in tensors.items():
        with client.get(key) as item:
            assert torch.equal(item.tensor, tensor)
    assert client.put_async("k1", tensors["k1"]).result(HANG_S) is False
    assert daemon.status().pools[0].reserved_bytes == 0


def test_a_put_on_the_side_is_not_cancelled(client: Client) -> None:
    """Others wait for what is announced; and what was given up half-way would stay taken."""
    tensor = torch.zeros(300 << 10, dtype=torch.uint8)  # too large to be copied on the spot
    for turn in range(6):  # more than may be in flight at one time
        futures = [client.put_async(f"k{turn}-{number}", tensor) for number in range(50)]
        assert not any(future.cancel() for future in futures)
        assert all(future.result(HANG_S) for future in futures)


def test_two_writers_of_one_key(daemon: Daemon) -> None:
    """The first commit wins; the second is told before it copies, or waits for the first."""
    shape = (4 << 20,)
    with Client(daemon.address) as a, Client(daemon.address) as b:
        for attempt in range(10):
            key = f"k{attempt}"
            wrote: dict[str, bool] = {}

            def write(name: str, client: Client, value: int, key=key, wrote=wrote) -> None:
                wrote[name] = client.put(key, torch.full(shape, value, dtype=torch.int8))

            threads = [
                threading.Thread(target=write, args=("a", a, 1)),
                threading.Thread(target=write, args=("b", b, 2)),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(wrote.values()) == [False, True]
            with a.get(key) as item:
                value = 1 if wrote["a"] else 2
                assert (item.tensor == value).all()


def test_one_client_in_many_threads(client: Client, daemon: Daemon) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(40):
                key = f"k{(number + step) % 20}"
                client.put(key, torch.full((2000,), float(key[1:])))
                item = client.get(key)
                if item is not None:
                    with item:
                        assert (item.tensor == float(key[1:])).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    eventually(lambda: daemon.status().leases == 0)


def test_64_sessions_at_once(daemon: Daemon) -> None:
    clients = [Client(daemon.address) for _ in range(64)]
    assert daemon.status().sessions == 64
    futures: list[Future[bool]] = [
        client.put_async(f"k{i}", torch.full((100,), float(i))) for i, client in enumerate(clients)
    ]
    wait(futures, HANG_S)
    assert all(future.result() for future in futures)
    for i, client in enumerate(clients):
        with client.get(f"k{(i + 7) % 64}") as item:
            assert (item.tensor == float((i + 7) % 64)).all()
    for client in clients:
        client.close()
    eventually(lambda: daemon.status().sessions == 0)


def test_thousands_of_calls_and_of_items_at_once(client: Client, daemon: Daemon) -> None:
    """They are more than grpc's server takes up by default, and more than there are pins."""
    keys = [f"k{number}" for number in range(3000)]
    for number, key in enumerate(keys):
        client.put_bytes(key, number.to_bytes(4, "little"), "uint8", (4,))
    never = [client.get_async([f"never{number}"], 0.5)[0] for number in range(3000)]
    one_by_one = [client.get_async([key], HANG_S)[0] for key in keys]
    items = [future.result(HANG_S) for future in one_by_one + client.get_async(keys, HANG_S)]
    for number, item in enumerate(items):
        assert item is not None
        assert bytes(item.view) == (number % 3000).to_bytes(4, "little")
        item.check()  # its session has not ended
    for item in items:
        item.close()
    assert {future.result(HANG_S) for future in never} == {None}
    eventually(lambda: daemon.status().leases == 0)


# -- bounds and mistakes ---------------------------------------------------------------------------


def test_a_full_pool_is_told_and_loses_nothing(client: Client, daemon: Daemon) -> None:
    big = torch.zeros(40 << 20, dtype=torch.int8)
    client.put("a", big)
    held = client.get("a")
    with pytest.raises(PoolFull, match="leased, kept or being written"):
        client.put("b", big)
    with pytest.raises(EntryTooLarge, match=r"raise ECD_HOST_POOL_BYTES$"):
        client.put("c", torch.zeros(65 << 20, dtype=torch.int8))
    assert torch.equal(held.tensor, big)
    held.close()
    eventually(lambda: daemon.status().leases == 0)
    assert client.put("b", big) is True, "room is made as soon as nobody holds it"
    assert client.get("a") is None


@pytest.mark.parametrize(
    "mistake",
    [
        lambda c: c.put("k", torch.zeros(3, dtype=torch.complex64)),
        lambda c: c.put("k", torch.zeros(3).to_sparse()),
        lambda c: c.put("", torch.zeros(3)),
        lambda c: c.put("k" * 5000, torch.zeros(3)),
        lambda c: c.put("k", torch.zeros(3), metadata=b"x" * 5000),
        lambda c: c.put("k", torch.zeros(3), cost=float("nan")),
        lambda c: c.put("k", torch.zeros(3), namespace=""),
        lambda c: c.put("k", torch.zeros([1] * 20)),
        lambda c: c.put_bytes("k", b"123", "float32", (1,)),
        lambda c: c.put_bytes("k", b"123", "float99", (1,)),
        lambda c: c.get("k", timeout=-1.0),
        lambda c: c.get("k", timeout=float("inf")),
        lambda c: c.get(""),
        lambda c: c.contains([""]),
        lambda c: Client("tcp://127.0.0.1:1"),
    ],
)
def test_mistakes_of_the_caller(client: Client, daemon: Daemon, mistake: Callable) -> None:
    assert client.put("before", torch.ones(1))
    with client.get("before") as item:
        with pytest.raises(InvalidArgument):
            mistake(client)
        assert client.put("fine", torch.ones(1)), "the client goes on"
        item.check()
    assert daemon.status().pools[0].reserved_bytes == 0


def test_an_interrupted_copy_gives_the_space_back(client: Client, daemon: Daemon) -> None:
    """A failure between reserve and commit: no reservation stays, the key is free."""
    with pytest.raises(InvalidArgument, match="torch does not copy the tensor"):
        torch.vmap(lambda row: client.put("k", row))(torch.ones(2, 1))  # it has no bytes of its own
    assert daemon.status().pools[0].used_bytes == 0
    assert client.put("k", torch.ones(1)) is True


# -- life ------------------------------------------------------------------------------------------


def test_no_daemon(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    with pytest.raises(DaemonUnavailable, match="start the daemon"):
        Client(daemon.address, connect_timeout=0.5)
    with Client(daemon.address, connect_timeout=0.0) as client:
        with pytest.raises(DaemonUnavailable, match="nothing answers on"):
            client.get("k")
        daemon.start()
        client.wait_connected(HANG_S)
        assert client.put("k", torch.ones(1)) is True


HASTY = changed("import ecd.memory.leftovers as taken_over", "taken_over.WAIT_S = 0.0")
"""A daemon whose start does not wait for clients to let go of the last one's pool: it is lost."""


ENDS_AMID_A_CALL = """
import contextlib, os, socket, struct, sys, threading
from ecd_client import Client, DaemonUnavailable
path, answers_until = sys.argv[1], int(sys.argv[2])
SETTINGS, GOAWAY, INTERNAL_ERROR, ACK = 4, 7, 2, 1  # RFC 9113

def frame(kind, payload=b"", flags=0):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + bytes(4) + payload

def take(file):
    head = file.read(9)
    if not head:
        raise EOFError("the client has given up before its call")
    file.read(int.from_bytes(head[:3], "big"))
    return head[3], head[4]

def end_amid_a_call(listener):
    with listener.accept()[0] as connection, connection.makefile("rwb") as file:
        file.read(24)  # the client's preface
        file.write(frame(SETTINGS))
        file.flush()
        while (got := take(file))[0] != answers_until:
            if got == (SETTINGS, 0):
                file.write(frame(SETTINGS, flags=ACK))
                file.flush()
        listener.close()
        os.unlink(path)
        file.write(frame(GOAWAY, struct.pack(">II", 0, INTERNAL_ERROR)))
        ended.append(path)

def serve(listener):
    try:
        end_amid_a_call(listener)
    except (EOFError, OSError):  # a slow machine's client: it does not count
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

ended = []
while len(ended) < 6:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        try:
            Client("unix://" + path, connect_timeout=0.2)
        except DaemonUnavailable:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # nobody may have come
            server.join()
        else:
            raise SystemExit("it has a session with nobody")
"""


@BY_CALLS
@pytest.mark.parametrize("answers_until", [1, 0], ids=["HEADERS", "DATA"])
def test_a_daemon_that_ends_amid_a_first_call_holds_nobody(
    tmp_path: Path, answers_until: int
) -> None:
    """gRPC would try that call again; the call would never end, and the client would wait for it.

    The server speaks as one of gRPC's does that ends: it refuses the call that is on its way.
    """
    command = [sys.executable, "-c", ENDS_AMID_A_CALL, str(tmp_path / "s"), str(answers_until)]
    run(command, check=True)


def test_a_restart_is_noticed_and_survived(own_daemon: Daemon) -> None:
    with Client(own_daemon.address) as client:
        before = client.incarnation
        client.put("k", torch.full((1000,), 3.0))
        item = client.get("k")
        own_daemon.kill()
        assert (item.tensor == 3.0).all(), "what was mapped stays readable"
        eventually(lambda: not client.connected)
        with pytest.raises(DaemonUnavailable):
            client.put("k", torch.ones(1))
        own_daemon.command = HASTY
        own_daemon.start()
        client.wait_connected(HANG_S)
        assert client.incarnation != before
        assert client.get("k") is None
        client.put("k", torch.full((1000,), 4.0))
        with client.get("k") as new:
            assert (new.tensor == 4.0).all()
            assert (item.tensor == 3.0).all(), "the old file was not reused under the old view"
        item.close()


def test_a_restart_between_two_calls_never_mixes_lives(
    own_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reserved by one life, committed to the next: an error, never a commit of something else."""
    original = torch.Tensor.copy_

    def slow_copy(target: torch.Tensor, source: torch.Tensor, *rest: object) -> torch.Tensor:
        own_daemon.kill()
        own_daemon.command = HASTY
        own_daemon.start()
        return original(target, source, *rest)

    with Client(own_daemon.address) as client:
        client.put("k", torch.ones(1))
        torn = torch.ones(1024, 2)[:, 0]  # strided: torch copies it
        monkeypatch.setattr(torch.Tensor, "copy_", slow_copy)
        with pytest.raises(DaemonUnavailable):
            client.put("torn", torn)
        client.wait_connected(HANG_S)
        status = own_daemon.status()
        assert (status.entries, status.pools[0].used_bytes) == (0, 0)


@BY_CALLS
def test_leases_are_renewed_for_as_long_as_the_client_lives(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each third of what the client takes for their TTL; the daemon's is long."""
    ttl_s = property(lambda _: 0.3, lambda *_: None)
    monkeypatch.setattr(Session, "lease_ttl_s", ttl_s, raising=False)
    expired = daemon.status().counters.leases_expired
    with Client(daemon.address) as client:
        client.put("k", torch.ones(1000))
        with client.get("k") as item:
            for _ in range(3):
                before_s = item._hold.expires_s
                eventually(lambda: item._hold.expires_s > before_s)  # noqa: B023
            assert (item.tensor == 1).all()
            assert daemon.status().leases == 1
    assert daemon.status().counters.leases_expired == expired


@BY_CALLS
def test_a_client_that_stood_still_is_told_that_its_lease_ran_out(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads bytes that the daemon no longer keeps: the client's own clock says so."""

    class Clock:
        at_s = 0.0

        def now_s(self) -> float:
            return self.at_s

    with Client(daemon.address) as client:
        client.put("k", torch.ones(1000))
        with client.get("k") as item:
            clock = Clock()
            monkeypatch.setattr("ecd_client.session.leases.clock", clock)
            clock.at_s = item._hold.expires_s - 0.1
            assert (item.tensor == 1).all()
            clock.at_s = item._hold.expires_s
            with pytest.raises(LeaseExpired, match="Get it again"):
                _ = item.tensor


def test_every_wait_is_bounded_when_the_daemon_stands_still(own_daemon: Daemon) -> None:
    with (
        Client(own_daemon.address) as patient,
        Client(own_daemon.address, call_timeout=0.5) as client,
    ):
        patient.put("k", torch.ones(10))
        with own_daemon.stopped():
            with pytest.raises(DaemonUnavailable):
                client.get("new", 0.2)
            with pytest.raises(DaemonUnavailable):
                client.put("new", torch.ones(10))

        def reads() -> bool:
            with suppress(DaemonUnavailable), client.get("k") as item:
                return bool((item.tensor == 1).all())
            return False

        eventually(reads, "it is connected again, and has an answer in time")
        eventually(lambda: own_daemon.status().pools[0].reserved_bytes == 0)


def test_a_closed_client_says_so(daemon: Daemon) -> None:
    client = Client(daemon.address)
    client.close()
    client.close()
    with pytest.raises(EcdError, match="closed"):
        client.get("k")


Mapped = Callable[[Daemon], int]


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    """How many mappings of a daemon's memory there are; Python's collector does not run."""
    gc.collect()
    gc.disable()
    yield lambda daemon: Path("/proc/self/maps").read_text().count(f"{daemon.shm}/")
    gc.enable()


def test_what_an_ended_session_had_mapped_goes_without_the_collector(
    own_daemon: Daemon, mapped: Mapped
) -> None:
    """Else the memory of a pool that a restart has replaced would stay until Python collects."""
    with Client(own_daemon.address) as client:
        client.put("k", torch.ones(1000))
        with client.get("k") as item:
            item.to("cpu")
        del item
        one_session = mapped(own_daemon)
        item = client.get("k")
        stop(own_daemon.pid)  # by calls, the release is on its way at the end
        item.close()
        del item
        own_daemon.kill()
        eventually(lambda: not client.connected)
        eventually(lambda: not mapped(own_daemon))
        own_daemon.start()
        client.wait_connected(HANG_S)
        eventually(lambda: 0 < mapped(own_daemon) <= one_session)
    eventually(lambda: not mapped(own_daemon))


def test_a_session_goes_though_grpc_never_took_it_up(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, mapped: Mapped
) -> None:
    """Its thread for requests may not have run between the daemon's answer and the end."""
    asked, closed = Connection._requests, threading.Event()

    def hello_alone(self: Connection, outbox: Outbox) -> Iterator[pb.SessionRequest]:
        yield next(asked(self, outbox))
        closed.wait(HANG_S)

    monkeypatch.setattr(Connection, "_requests", hello_alone)
    with Client(daemon.address) as client:
        assert mapped(daemon)
        closed.set()
    eventually(lambda: not mapped(daemon))
    assert not client.connected


def is_in_grpc(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and "/grpc/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("by", ["a wait", "waits", "a call", "locate"])
def test_a_read_that_fails_with_its_daemon_keeps_nothing(
    own_daemon: Daemon, mapped: Mapped, by: str
) -> None:
    reading = threading.current_thread()

    def kill_under_it() -> None:
        if by in ("a call", "locate"):
            eventually(lambda: is_in_grpc(reading))
        else:
            eventually(lambda: own_daemon.status().waits)
        own_daemon.kill()

    with Client(own_daemon.address) as client:
        futures = client.get_async(["a", "b"], HANG_S) if by == "waits" else []
        if by in ("a call", "locate"):
            stop(own_daemon.pid)
        killing = threading.Thread(target=kill_under_it)
        killing.start()
        try:
            if by == "locate":
                client.locate(["a"])
            elif not futures:
                client.get("a", HANG_S)
        except DaemonUnavailable:
            pass
        while futures:
            assert isinstance(futures.pop().exception(HANG_S), DaemonUnavailable)
        killing.join(HANG_S)
        eventually(lambda: not mapped(own_daemon))


def test_a_call_that_is_late_keeps_nothing_of_its_session(
    own_daemon: Daemon, mapped: Mapped
) -> None:
    with Client(own_daemon.address, call_timeout=0.5) as client:
        one_session = mapped(own_daemon)
        with own_daemon.stopped():
            with suppress(DaemonUnavailable):
                client.get("a", 0.2)
            eventually(lambda: not client.connected)
        client.wait_connected(HANG_S)
        eventually(lambda: mapped(own_daemon) <= one_session)


def test_a_put_that_fails_keeps_neither_its_tensor_nor_its_session(
    daemon: Daemon, mapped: Mapped
) -> None:
    tensor = torch.ones(32 << 20)
    is_there = weakref.ref(tensor)
    with Client(daemon.address) as client:
        future = client.put_async("large", tensor)
        assert isinstance(future.exception(HANG_S), EntryTooLarge)
        del future, tensor
        eventually(lambda: is_there() is None)
    eventually(lambda: not mapped(daemon))


def test_a_put_that_cannot_begin_keeps_nothing(
    daemon: Daemon, mapped: Mapped, client: Client
) -> None:
    with Client(daemon.address) as closing:
        entry = describe_entry(("default", HALF), "float32", (3,), 0.0, b"")
        for _ in range(300):  # more than may be in flight, past the door for keys
            with suppress(UnicodeEncodeError):
                closing._writer.put_async(entry, TensorSource(torch.ones(3)))
        assert closing.put_async("first", torch.ones(1 << 20)).result(HANG_S)
        closing._writer._side.shutdown()  # as `close` in another thread does
        said = ""
        try:
            closing.put_async("second", torch.ones(1 << 20))
        except DaemonUnavailable as error:  # pytest.raises would keep its frames
            said = str(error)
        assert "on the side" in said
        assert client.put("second", torch.ones(1 << 20), timeout=HANG_S) is True
        client.close()
    eventually(lambda: not mapped(daemon))
    daemon.check_nothing_leaked()


def test_a_callback_may_make_calls(daemon: Daemon) -> None:
    """It runs on gRPC's thread, which reads what the daemon answers."""
    said: list[object] = []

    def ask(_: object) -> None:
        said.append(client.locate(["absent"]).holders)
        said.append(client.get("k", 0.1))  # by a call, where it is leased
        try:
            said.append(client.get("absent", 0.1))
        except DaemonUnavailable as error:
            said.append(error)
        said.append(client.put("of the callback", torch.ones(300)))

    with Client(daemon.address, call_timeout=3.0) as client:
        client.put("k", torch.ones(3))
        client._connection.session().calls.later(
            "contains", pb.ContainsRequest()
        ).add_done_callback(ask)
        eventually(lambda: len(said) == 4)
        assert said[0] == [[]]
        said[1].close()
        assert said[3] is True
    daemon.check_nothing_leaked()


@pytest.mark.usefixtures("mapped")
def test_an_item_does_not_wait_for_the_other_keys(daemon: Daemon) -> None:
    with Client(daemon.address) as client, Client(daemon.address) as other:
        first, second = client.get_async(["first", "second"], HANG_S)
        other.put("first", torch.ones(3))
        assert first.result(HANG_S) is not None
        eventually(lambda: daemon.status().pools[0].leased_bytes > 0)
        del first
        eventually(lambda: daemon.status().pools[0].leased_bytes == 0)
        assert not second.done()
        second.cancel()


def test_locks_end_with_their_session(daemon: Daemon) -> None:
    """An item keeps the session's memory, and the file in which its locks were taken."""
    with Client(daemon.address) as client, Client(daemon.address) as other:
        client.put("k", torch.ones(3))
        with client.get("k"):
            assert client.lock("a", 60.0)
            assert not other.lock("a", 60.0)
            client._connection.session().abandon()
            eventually(lambda: other.lock("a", 60.0))


def test_mistakes_are_named(client: Client) -> None:
    for mistake, says in (
        (lambda: client.put("k", torch.ones(3), metadata="text"), "metadata is bytes, not a str"),
        (lambda: client.put_async("k", torch.ones(3), cost="1"), "the cost is a number of seconds"),
        (lambda: client.put("k", [1, 2]), "a list is no tensor"),
        (lambda: client.put_async("k", None), "a NoneType is no tensor"),
        (lambda: client.get(None), "a key is a string, not None"),
        (lambda: client.get(b"k", 1.0), "a key is a string, not b'k'"),
        (lambda: client.contains("abc"), r"contains\(\['abc'\]\)"),
        (lambda: client.contains([None]), "a key is a string, not None"),
        (lambda: client.get_async([7]), "a key is a string, not 7"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            mistake()


def freed(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The tensor over a storage that has only so many bytes left, as sharded training leaves it."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


HALF = "half a character: \ud800"
LARGE = 10**5000  # Python writes no integer of so many digits
ONES = torch.ones(4)
ENGINE = Engine("a", "m", "n", stores=True, loads=True, parts={}, shares="")
TAKE_A_KEY: dict[str, Callable[..., object]] = {
    "hold": lambda c, key, **of: c.hold(key, c.get("before").handle(), **of),
    "offer": lambda c, key, **of: c.offer(["k", key], ["host:1"], **of),
    "lock": lambda c, key, **of: c.lock(key, 60.0, **of),
    "is_locked": lambda c, key, **of: c.is_locked(key, **of),
    "is_made_elsewhere": lambda c, key, **of: c.is_made_elsewhere(key, **of),
    "unlock": lambda c, key, **of: c.unlock(key, **of),
    "stop_making": lambda c, key, **of: c.stop_making(["k", key], **of),
}
MISTAKES: dict[str, Callable[[Client], object]] = {
    "name: put": lambda c: c.put(HALF, ONES),
    "name: put_async": lambda c: c.put_async(HALF, ONES),
    "name: get": lambda c: c.get(HALF),
    "name: get_now": lambda c: c.get_now(HALF),
    "name: contains": lambda c: c.contains(["k", HALF]),
    "name: lock": lambda c: c.lock(HALF, 1.0),
    "name: unlock": lambda c: c.unlock(HALF),
    "name: locate": lambda c: c.locate([HALF]),
    "name: offer": lambda c: c.offer([HALF], []),
    "name: is_shown": lambda c: c.is_shown(HALF),
    "name: stop_making": lambda c: c.stop_making([HALF]),
    "names: get_async": lambda c: c.get_async("abc"),
    "names: offer": lambda c: c.offer(7, []),
    "names: locate": lambda c: c.locate(b"k"),
    "names: stop_making": lambda c: c.stop_making("abc"),
    "namespace: half": lambda c: c.get("k", namespace=HALF),
    "namespace: type": lambda c: c.put("k", ONES, namespace=7),
    "namespace: contains": lambda c: c.contains([], namespace=b"n"),
    "namespace: get_async": lambda c: c.get_async(["k"], namespace=7),
    "namespace: client": lambda c: Client(c.address, namespace=7),
    "name of the client": lambda c: Client(c.address, name=HALF),
    "address": lambda c: Client(7),
    "connect_timeout": lambda c: Client(c.address, connect_timeout=None),
    "call_timeout": lambda c: Client(c.address, call_timeout=float("nan")),
    "timeout: None": lambda c: c.get("nothing", timeout=None),
    "timeout: text": lambda c: c.get("nothing", timeout="1"),
    "timeout: large": lambda c: c.get("nothing", timeout=LARGE),
    "timeout: larger than clocks": lambda c: c.get("nothing", timeout=1e300),
    "timeout: put": lambda c: c.put("k", ONES, timeout=None),
    "timeout: get_async": lambda c: c.get_async(["nothing"], "1"),
    "timeout: wait_connected": lambda c: c.wait_connected(None),
    "seconds: text": lambda c: c.lock("k", "1"),
    "seconds: never": lambda c: c.lock("k", float("nan")),
    "nodes: number": lambda c: c.get("nothing", 1.0, nodes=5),
    "nodes: of numbers": lambda c: c.get("nothing", 1.0, nodes=[5]),
    "nodes: text": lambda c: c.get("before", nodes="host:1"),
    "nodes: one hint": lambda c: c.get("before", nodes=Hint("host:1")),
    "nodes: half": lambda c: c.get("nothing", 1.0, nodes=[HALF]),
    "nodes: extent": lambda c: c.get("nothing", 1.0, nodes=[Hint("host:1", -1, 0, 1)]),
    "nodes: get_async": lambda c: c.get_async(["nothing"], 1.0, nodes=[[5]]),
    "nodes: too few": lambda c: c.get_async(["nothing", "else"], 1.0, nodes=[["host:1"]]),
    "nodes: offer": lambda c: c.offer(["k"], [5]),
    "nodes: offer, text": lambda c: c.offer(["k"], "host:1"),
    "makes: too many": lambda c: c.get_async(["nothing"], 1.0, makes=[0.0, 0.0]),
    "makes: text": lambda c: c.get_async(["nothing"], 1.0, makes=["1"]),
    "cost: large": lambda c: c.put("k", ONES, cost=LARGE),
    "cost: below 0": lambda c: c.put_async("k", ONES, cost=-1),
    "tensor: meta": lambda c: c.put("k", torch.ones(4, device="meta")),
    "tensor: freed": lambda c: c.put("k", freed(torch.ones(4096), 0)),
    "tensor: cut": lambda c: c.put("k", freed(torch.ones(64, 64).T, 4096)),
    "tensor: without a shape": lambda c: c.put("k", torch.nn.UninitializedParameter()),
    "tensor: nested": lambda c: c.put("k", torch.nested.nested_tensor([ONES, ONES])),
    "tensor: vmap": lambda c: torch.vmap(lambda row: c.put("k", row))(torch.ones(2, 4)),
    "tensor: vmap aside": lambda c: torch.vmap(lambda row: c.put_async("k", row).result(HANG_S))(
        torch.ones(2, 4)
    ),
    "data: text": lambda c: c.put_bytes("k", "text", "uint8", (4,)),
    "data: gaps": lambda c: c.put_bytes("k", memoryview(bytes(8))[::2], "uint8", (4,)),
    "data: of items": lambda c: c.put_bytes("k", [1, 2, 3, 4], "uint8", (4,)),
    "dtype": lambda c: c.put_bytes("k", b"1234", ["uint8"], (4,)),
    "shape: number": lambda c: c.put_bytes("k", b"1234", "uint8", 4),
    "shape: below 0": lambda c: c.put_bytes("k", bytes(16), "float32", (-2, -2)),
    "shape: float": lambda c: c.put_bytes("k", bytes(16), "float32", (2.0, 2)),
    "shape: bool": lambda c: c.put_bytes("k", bytes(4), "uint8", (4, True)),
    "shape: large": lambda c: c.put_bytes("k", b"", "float32", (0, 1 << 63)),
    "shape: larger": lambda c: c.put_bytes("k", b"", "float32", (0, LARGE)),
    "shape: too many": lambda c: c.put_bytes("k", b"1", "uint8", (1,) * 17),
    "device: pin": lambda c: c.pin("nonsense"),
    "device: large": lambda c: c.get("before").to(LARGE),
    "device: to": lambda c: c.get("before").to("nonsense"),
    "device: view": lambda c: c.get("before").device_view(None),
    "handle": lambda c: c.hold("before", "handle"),
    **{
        f"key: {odd}, {call}": partial(mistake, key=key)
        for odd, key in {"empty": "", "long": "x" * 1025, "wide": "\u2713" * 342}.items()
        for call, mistake in TAKE_A_KEY.items()
    },
    **{
        f"namespace: empty, {call}": partial(mistake, key="k", namespace="")
        for call, mistake in TAKE_A_KEY.items()
    },
    **{
        f"engine: {name}": lambda c, odd=odd: c.describe(replace(ENGINE, **odd))
        for name, odd in {
            "large": {"stores": LARGE},
            "text": {"loads": "yes"},
            "parts": {"parts": 5},
            "half": {"model": HALF},
        }.items()
    },
}


def test_a_message_that_makes_no_sense_does_not_end_the_session(
    daemon: Daemon, client: Client
) -> None:
    many = range(MAX_BATCH + 1)
    named = [pb.Key(namespace="n", mm_hash=f"{number}") for number in many]
    with Client(daemon.address, name=f"odd {client.namespace}") as odd:
        session = odd._connection.session()
        for request in (
            pb.SessionRequest(),
            pb.SessionRequest(cancel_waits=pb.CancelWaits(tickets=many)),
            pb.SessionRequest(stop_making=pb.StopMaking(keys=[pb.Key(namespace="n")])),
            pb.SessionRequest(stop_making=pb.StopMaking(keys=named)),
        ):
            session._outbox.put(request)
        odd.stop_making([f"{number}" for number in many])
        [waited] = odd.get_async(["nothing"], HANG_S)
        eventually(lambda: daemon.status().waits == 1)
        waited.cancel()
        eventually(lambda: daemon.status().waits == 0, "it was read after all of these")
        assert odd._connection.current is session
    said = [line for line in daemon.text().splitlines() if f"odd {client.namespace}" in line]
    [passed_over] = [line for line in said if "passed over" in line]
    assert "a request is too long, or not known here" in passed_over


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_told_in_one_way_and_leaves_nothing(
    client: Client, daemon: Daemon, mistake: str
) -> None:
    assert client.put("before", ONES)
    for _ in range(MAX_CLAIMS + 1):  # one more than a session has places
        with pytest.raises(InvalidArgument):
            MISTAKES[mistake](client)
    if puts := client._connection.session().puts:
        assert len(puts._places) + len(puts._unanswered) == MAX_CLAIMS
    with Client(daemon.address, namespace=client.namespace) as other:
        assert not other.is_locked("k")
        assert other.put("k", ONES), "the key is free"
    with client.get("k") as item:
        assert torch.equal(item.tensor, ONES)


def test_data_are_any_bytes_in_one_piece(client: Client) -> None:
    for number, data in enumerate((array("f", [1.0, 2.0]), memoryview(array("d", [7.0])))):
        assert client.put_bytes(str(number), data, "uint8", (8,))
        with client.get(str(number)) as item:
            assert item.view == memoryview(data).cast("B")
    assert client.put_bytes("numbers", bytearray(8), "uint8", (numpy.int64(8),), cost=Fraction(1))
    assert client.put_bytes("empty", array("f"), "float32", (0, 4))


@IN_MEMORY
def test_what_cannot_be_packed_or_timed_takes_nothing(client: Client, daemon: Daemon) -> None:
    """Behind the doors, too: neither a place of the page nor a key's lock."""
    client.put("before", ONES)
    session = client._connection.session()
    broken = NewEntry(client.namespace, "k", "float32", (-2, -2), 16, b"", 0.0)
    for _ in range(MAX_CLAIMS + 1):
        with pytest.raises(struct.error):
            session.puts.claim(broken)
    assert len(session.puts._places) + len(session.puts._unanswered) == MAX_CLAIMS
    with pytest.raises(TypeError):
        session.key_locks.take(client.namespace, "k", "1")
    with Client(daemon.address, namespace=client.namespace) as other:
        assert other.lock("k", HANG_S)
        assert other.put("k", ONES)


def test_clients_and_items_say_what_they_are(client: Client) -> None:
    client.put("k", torch.ones(3, 4))
    item = client.get("k")
    assert repr(item) == "<Item 'k', float32 3x4, 48 bytes, open>"
    item.close()
    assert repr(item) == "<Item 'k', float32 3x4, 48 bytes, closed>"
    about = f"namespace {client.namespace!r}"
    assert repr(client) == f"<Client of {client.address}, {about}, connected>"
    client.close()
    assert repr(client).endswith("not connected>")


LEFT_TO_THE_COLLECTOR = """
import gc, sys
from ecd_client import Client

gc.disable()
client = Client(sys.argv[1])
client.put_bytes("k", b"x" * 4096, "uint8", (4096,))
cycle = [client.get("k")]
cycle.append(cycle)
del cycle
if sys.argv[2] == "closed":
    client.close()
    del client
else:
    session = client._connection.session()
    session.abandon()
    while not session._over:
        pass
    del session
    client.wait_connected(HANG_S)
gc.collect()
""".replace("HANG_S", str(HANG_S))


@pytest.mark.parametrize("end", ["closed", "broken"])
def test_an_item_may_outlive_its_session_in_a_cycle(daemon: Daemon, end: str) -> None:
    """Python's collector ends the item's pin in the session's page, which must be mapped still."""
    command = [sys.executable, "-c", LEFT_TO_THE_COLLECTOR, daemon.address, end]
    assert run(command).returncode == 0
    eventually(lambda: daemon.status().sessions == 0)
    daemon.check_nothing_leaked()


class Interruption:
    """Acts when the client's threads begin their `at`th call of one of the client's functions."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.calls, self.has_acted = 0, threading.Event()
        self._numbers, self._at, self._act = count(1), at, act

    def __enter__(self) -> Interruption:
        threading.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/ecd_client/" in frame.f_code.co_filename:
            self.calls = number = next(self._numbers)
            if number == self._at:
                self._act()
                self.has_acted.set()


def close_in_time(client: Client) -> None:
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(HANG_S)
    assert not closing.is_alive()


def test_a_client_of_a_daemon_that_stands_still_can_be_closed_at_any_moment(
    own_daemon: Daemon,
) -> None:
    """On its way to a session: when it makes the first, a twentieth, ... of the calls to there."""
    with Interruption(0, lambda: None) as counting, Client(own_daemon.address):
        calls = counting.calls
    for at in range(1, calls, 1 + calls // 20):
        with Interruption(at, lambda: stop(own_daemon.pid)) as stopping:
            client = Client(own_daemon.address, connect_timeout=0.0)
            assert stopping.has_acted.wait(HANG_S)
            close_in_time(client)
        os.kill(own_daemon.pid, signal.SIGCONT)
    own_daemon.check_nothing_leaked()


def test_no_thread_looks_at_the_channel_of_a_client_that_has_just_connected(
    daemon: Daemon,
) -> None:
    """One of grpc's would hold up a close by up to 0.2 s, and may complain of it on stderr."""

    def functions(frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back

    with Client(daemon.address):
        frames = sys._current_frames().values()
        assert "_poll_connectivity" not in {name for each in frames for name in functions(each)}


@pytest.mark.parametrize("at", range(4))
def test_a_client_connects_though_there_was_no_thread_for_a_moment(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """For a call of grpc's, which then takes it that there is one."""
    made, numbers = grpc._channel.cygrpc.ForkManagedThread, count()

    def thread(**about: object) -> object:
        if next(numbers) == at:
            raise RuntimeError("can't start new thread")
        return made(**about)

    monkeypatch.setattr(grpc._channel.cygrpc, "ForkManagedThread", thread)
    client = Client(daemon.address, connect_timeout=0.0)
    client.wait_connected(HANG_S)
    assert client.put("k", torch.ones(4))
    close_in_time(client)


def test_a_call_on_a_client_that_closes_is_an_error_of_ecds(daemon: Daemon) -> None:
    """A thread has its session when another closes the client: gRPC raises ValueError then."""
    client = Client(daemon.address)
    calls = client._connection.session().calls
    client.close()
    with pytest.raises(DaemonUnavailable, match="the client is closed"):
        calls.now("acquire", pb.AcquireRequest())
