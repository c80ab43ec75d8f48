"""What a dead client's device may still write is not reused: rule D1 of docs/gpu.md."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import queue
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecd.core.types import SessionId
from ecd.rpc import attach as daemons_side
from ecd.rpc.attach import SILENT_S, AttachSocket, DmaProcesses
from ecd_client import Client, EcdError
from ecd_client.calls import open_channel
from ecd_client.device.attach import attach
from ecd_proto.contract import CONTRACT_VERSION
from ecd_proto.mapping import Mapping
from ecd_proto.shm.session_page import ATTACHED, DMA_BLIND_GRACE_S, DMA_GRACE_S, DMA_LIMIT_S
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.daemon import Daemon, changed, eventually

MIB = 1 << 20
AT_ONCE_S = 1.0
"""Within which a session without DMA is closed: invariant 4 of the design."""
RESERVED_BYTES = 8 * MIB
LONG_GRACE_S = 3.0
WITH_LONG_GRACE = changed("from ecd.rpc import attach", f"attach.DMA_GRACE_S = {LONG_GRACE_S}")
"""A daemon that can be looked at while it waits for a process whose end it knows of."""
WITHOUT_RULE = changed(
    "from ecd.memory import leftovers",
    "from ecd.rpc.attach import DmaProcesses",
    "leftovers._died_copying = lambda index: False",
    "DmaProcesses.may_copy = lambda *_: False",
)
"""A daemon that reuses memory once the locks have dropped, as if nothing had copied by DMA."""

WRITER = """
import os, sys
from ecd_client import Client
from ecd_client.device.attach import attach
from ecd_proto.shm.session_page import DMA_WORD
from ecd_proto.v1 import cache_pb2 as pb

address, shm, nbytes, *steps = sys.argv[1:]
client = Client(address, namespace="n")
session = client._connection.session()
key = pb.Key(namespace="n", mm_hash="being written")
content = pb.Content(dtype="uint8", shape=[int(nbytes)], nbytes=int(nbytes))
item = pb.ReserveItem(key=key, content=content)
reply = session.calls.now("reserve", pb.ReserveRequest(session=session.token, items=[item]))
offset = reply.outcomes[0].reserved.extent.offset

def drop_lock():
    for fd in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{fd}").endswith(".sessions"):
            os.dup2(os.open("/dev/null", os.O_RDWR), int(fd))

for step in [*steps, "ready", "wait"]:
    if step == "attach":
        attach(f"{shm}/{session.incarnation}.attach", session.token)
    if step == "word":
        session.puts._words[DMA_WORD] = 1
    if step == "clear":
        session.puts._words[DMA_WORD] = 0
    if step == "close":
        client.close()
    if step == "lives on":
        session.ref()  # or the end of the stream closes the session's files
        drop_lock()
        session.abandon()
    if step == "ready":
        print(offset, flush=True)
    if step == "wait":
        sys.stdin.read()
"""
MakeDaemon = Callable[..., Daemon]


@contextlib.contextmanager
def writer(daemon: Daemon, *steps: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """A client that has reserved memory and taken these steps, and the memory's offset."""
    command = [sys.executable, "-c", WRITER, daemon.address, str(daemon.shm), str(RESERVED_BYTES)]
    with subprocess.Popen(
        [*command, *steps], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def reserved(daemon: Daemon) -> int:
    return daemon.status().pools[0].reserved_bytes


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def descriptors_at_rest(daemon: Daemon, clients: int) -> int:
    """The daemon's open descriptors, once it has closed the connection that its start was seen by.

    gRPC binds its socket under the name that ends in `~`.
    """
    path = daemon.address.removeprefix("unix://") + "~"

    def connections() -> int:
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return sum(row[5] == "03" and row[-1] == path for row in rows)  # connected

    eventually(lambda: connections() == clients)
    return descriptors(daemon)


# -- when memory is free ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "least_s"),
    [
        ((), 0.0),
        (("attach",), 0.0),
        (("attach", "word", "clear"), 0.0),
        (("attach", "word"), LONG_GRACE_S),
        (("attach", "attach", "word"), LONG_GRACE_S),
        (("word",), DMA_BLIND_GRACE_S),
    ],
    ids=["no DMA", "attached", "no copy under way", "attached, copying", "twice", "not attached"],
)
def test_a_killed_clients_memory_waits_for_its_device(
    make_daemon: MakeDaemon, steps: tuple[str, ...], least_s: float
) -> None:
    """The process stays a zombie meanwhile, as its parent does not ask for it."""
    daemon = make_daemon()
    daemon.command = WITH_LONG_GRACE
    daemon.start()
    with writer(daemon, *steps) as (process, _):
        assert reserved(daemon) == RESERVED_BYTES
        assert daemon.status().waiting_for_dma == 0
        started_s = time.monotonic()
        process.kill()
        if least_s:
            eventually(lambda: daemon.status().waiting_for_dma == 1, AT_ONCE_S, "it waits")
            assert daemon.status().sessions == 1
            with Client(daemon.address, namespace="n") as client:
                assert client.put_bytes("being written", b"x", "uint8", (1,)), "its key is free"
        eventually(lambda: reserved(daemon) == 0, least_s + AT_ONCE_S, "the memory is free")
        took_s = time.monotonic() - started_s
    print(f"free {took_s:.3f} s after the kill")
    assert took_s >= least_s
    eventually(lambda: daemon.status().sessions == 0, AT_ONCE_S)
    assert daemon.status().waiting_for_dma == 0
    daemon.check_nothing_leaked()


def test_a_process_that_lives_keeps_its_memory(daemon: Daemon) -> None:
    """Its lock is dropped and its stream has ended: only its pidfd tells that it may copy."""
    before = descriptors_at_rest(daemon, clients=0)
    with writer(daemon, "attach", "word", "lives on") as (process, _):
        eventually(lambda: daemon.status().waiting_for_dma == 1, AT_ONCE_S)
        time.sleep(2 * DMA_GRACE_S + 0.5)
        assert reserved(daemon) == RESERVED_BYTES
        assert "ecd_sessions_waiting_for_dma 1.0" in daemon.metrics()
        started_s = time.monotonic()
        process.kill()
        took_s = eventually(lambda: reserved(daemon) == 0, DMA_GRACE_S + AT_ONCE_S)
        assert time.monotonic() - started_s >= DMA_GRACE_S
    print(f"free {took_s:.3f} s after the kill")
    eventually(lambda: descriptors(daemon) <= before, AT_ONCE_S, "the pidfd is closed")


def test_a_word_that_is_cleared_late_is_believed(daemon: Daemon) -> None:
    """The client drops its lock first, against the contract, and then says that nothing copies."""
    with writer(daemon, "attach", "word", "lives on", "clear"):
        eventually(lambda: reserved(daemon) == 0, AT_ONCE_S, "the memory is free")


def test_a_client_that_closes_is_not_waited_for(daemon: Daemon) -> None:
    before = descriptors_at_rest(daemon, clients=0)
    with writer(daemon, "attach", "word", "clear", "close") as (process, _):
        took_s = eventually(lambda: daemon.status().sessions == 0, AT_ONCE_S, "the session's end")
        assert process.poll() is None, "it lives on"
        assert reserved(daemon) == 0
        eventually(lambda: descriptors(daemon) <= before, AT_ONCE_S, "the pidfd is closed")
    print(f"free {took_s:.3f} s after the end")


# -- what that is good for -------------------------------------------------------------------------


class Device:
    """A device that writes into a client's extent whatever becomes of the client."""

    def __init__(self, daemon: Daemon, offset: int) -> None:
        [pool] = daemon.shm.glob("*.pool")
        fd = os.open(pool, os.O_RDWR)
        self._view = Mapping(fd, pool.stat().st_size, writable=True).view(offset, RESERVED_BYTES)
        os.close(fd)
        self._over_s = float("inf")
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        data = b"\xee" * len(self._view)
        while time.monotonic() < self._over_s:
            self._view[:] = data
            self.ended_s = time.monotonic()
            time.sleep(0.005)

    def end_in(self, seconds: float) -> None:
        self._over_s = time.monotonic() + seconds

    def join(self) -> None:
        self._thread.join()


def turn_over(client: Client, seconds: float) -> tuple[int, int]:
    """Fill the pool anew and anew: how many entries were put, and how many had wrong bytes."""
    put = wrong = 0
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        data = random.Random(put).randbytes(MIB)
        assert client.put_bytes(f"new {put}", data, "uint8", (MIB,))
        put += 1
        for number in range(max(0, put - 12), put):
            with client.get(f"new {number}") or contextlib.nullcontext() as item:
                if item is not None:
                    wrong += bytes(item.view) != random.Random(number).randbytes(MIB)
    return put, wrong


@pytest.mark.parametrize("has_rule", [True, False], ids=["with the rule", "without it"])
def test_no_byte_is_wrong_after_a_kill(make_daemon: MakeDaemon, has_rule: bool) -> None:
    """The device writes for 0.6 s after the kill; without the rule for longer, to be met."""
    for _ in range(3):
        wrong, wrote_s = wrong_after_a_kill(make_daemon, has_rule)
        if not has_rule or wrote_s < DMA_GRACE_S:
            break  # else the device's thread was kept waiting, for longer than devices write
    assert (wrong == 0) == has_rule


def wrong_after_a_kill(make_daemon: MakeDaemon, has_rule: bool) -> tuple[int, float]:
    """How many entries had wrong bytes, and how long after the kill the device has written."""
    daemon = make_daemon("16MiB")
    if not has_rule:
        daemon.command = WITHOUT_RULE
    daemon.start()
    with Client(daemon.address, namespace="n") as client, writer(daemon, "attach", "word") as made:
        process, offset = made
        device = Device(daemon, offset)
        device.end_in(0.6 if has_rule else 2.5)
        killed_s = time.monotonic()
        process.kill()
        put, wrong = turn_over(client, 2.5)
        device.join()
        assert daemon.status().pools[0].used_bytes > RESERVED_BYTES, "the extent is in use again"
    print(f"{wrong} of {put} entries had wrong bytes")
    return wrong, device.ended_s - killed_s


@pytest.mark.parametrize("has_rule", [True, False], ids=["with the rule", "without it"])
def test_no_byte_is_wrong_after_a_restart(make_daemon: MakeDaemon, has_rule: bool) -> None:
    """Client and daemon are killed together; the device writes for 6 s more, or to the end."""
    daemon = make_daemon("16MiB")
    if not has_rule:
        daemon.command = WITHOUT_RULE
    daemon.start()
    kept = random.Random("kept").randbytes(MIB)
    with Client(daemon.address, namespace="n") as client, writer(daemon, "attach", "word") as made:
        process, offset = made
        assert client.put_bytes("kept", kept, "uint8", (MIB,))
        device = Device(daemon, offset)
        started_s = time.monotonic()
        process.kill()
        daemon.kill()
        device.end_in(6.0 if has_rule else 60.0)
        daemon.start()
        took_s = time.monotonic() - started_s
        client.wait_connected(10.0)
        with client.get("kept") as item:
            assert item is not None
            assert bytes(item.view) == kept
        put, wrong = turn_over(client, 2.0)
        device.end_in(0.0)
        device.join()
    print(f"served {took_s:.3f} s after the kills; {wrong} of {put} entries had wrong bytes")
    assert (took_s >= DMA_BLIND_GRACE_S) == ("may still write to the pool" in daemon.text())
    assert (took_s >= DMA_BLIND_GRACE_S) == (wrong == 0) == has_rule
    assert took_s < DMA_BLIND_GRACE_S + 10.0
    assert "took over 1 entry" in daemon.text()


def test_a_restart_waits_for_no_device_that_is_idle(daemon: Daemon) -> None:
    with writer(daemon, "attach", "word", "clear") as (process, _):
        process.kill()
        daemon.kill()
        started_s = time.monotonic()
        daemon.start()
        assert time.monotonic() - started_s < DMA_BLIND_GRACE_S
    assert "may still write" not in daemon.text()


def test_a_daemon_that_is_killed_while_it_waits_waits_again(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with writer(daemon, "attach", "word") as (process, _):
        process.kill()
        daemon.kill()
    daemon.start(wait=False)
    eventually(lambda: "may still write" in daemon.text(), 10.0)
    daemon.kill()
    daemon.start(wait=False)
    eventually(lambda: daemon.text().count("may still write") == 2, 10.0)
    daemon.kill()


# -- the socket ------------------------------------------------------------------------------------


def attach_path(daemon: Daemon) -> Path:
    [path] = daemon.shm.glob("*.attach")
    return path


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10.0)
    connection.connect(str(path))
    return connection


def test_a_welcome_names_the_socket(daemon: Daemon) -> None:
    """It has the doorbell's rights, and goes with the daemon."""
    path = attach_path(daemon)
    requests: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
    with open_channel(daemon.address) as channel:
        events = pb_grpc.CacheStub(channel).Session(iter(requests.get, None))
        hello = pb.Hello(contract_version=CONTRACT_VERSION, client="test", pid=os.getpid())
        requests.put(pb.SessionRequest(hello=hello))
        welcome = next(events).welcome
        requests.put(None)
    assert welcome.attach_path == str(path)
    bell = path.with_suffix(".bell")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(bell.stat().st_mode) == 0o600
    assert daemon.terminate() == 0
    assert not path.exists()


def test_who_names_no_open_session_is_told_nothing(daemon: Daemon, client: Client) -> None:
    path = attach_path(daemon)
    session = client._connection.session()
    for token in ("", "0" * 32, session.token[:-1], session.token + "0", "\xe9" * 16, "x" * 10_000):
        with pytest.raises(EcdError, match="does not attach"):
            attach(str(path), token)
    attach(str(path), session.token)
    attach(str(path), session.token)
    client.close()
    eventually(lambda: daemon.status().sessions == 0)  # a stopped daemon hears of both in any order
    with pytest.raises(EcdError, match="it is over"):
        attach(str(path), session.token)


def test_who_has_spoken_is_heard_however_many_are_silent(daemon: Daemon, client: Client) -> None:
    """One session: of those that say nothing the daemon keeps one."""
    path, token = attach_path(daemon), client._connection.session().token.encode()
    os.kill(daemon.pid, signal.SIGSTOP)
    eventually(lambda: "T (stopped)" in Path(f"/proc/{daemon.pid}/status").read_text())
    with contextlib.ExitStack() as opened:
        pairs = [[opened.enter_context(connect(path)) for _ in range(2)] for _ in range(20)]
        for speaking, _ in pairs:
            speaking.send(token)
        os.kill(daemon.pid, signal.SIGCONT)
        assert [speaking.recv(10) for speaking, _ in pairs] == [ATTACHED] * 20
        assert [silent.recv(10) for _, silent in pairs[:-1]] == [b""] * 19


def test_errors_say_what_is_wrong(daemon: Daemon, client: Client) -> None:
    with pytest.raises(EcdError, match="no client copy by DMA"):
        attach("", "token")
    with pytest.raises(EcdError, match="No such file"):
        attach(str(daemon.shm / "none.attach"), "token")
    os.kill(daemon.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(EcdError, match=r"timed out"):
        attach(str(attach_path(daemon)), client._connection.session().token, 0.3)
    assert time.monotonic() - started_s < SILENT_S


def test_garbage_leaves_no_descriptor(daemon: Daemon, client: Client) -> None:
    path, chance = attach_path(daemon), random.Random(1)
    session = client._connection.session()
    before = descriptors_at_rest(daemon, clients=1)
    opened = []
    for number in range(1000):
        connection = connect(path)
        match number % 5:
            case 0:
                connection.send(chance.randbytes(chance.choice((1, 32, 64, 65, 5000))))
            case 1:  # descriptors that nobody asked for
                fds = array.array("i", [connection.fileno()] * 10).tobytes()
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
                with contextlib.suppress(OSError):  # this one was the oldest that said nothing
                    connection.sendmsg([session.token.encode()], rights)
            case 2:
                connection.close()
            case 3:  # does not read its answer
                with contextlib.suppress(OSError):
                    connection.send(session.token.encode())
                connection.close()
            case _:
                pass  # says nothing
        opened.append(connection)
    started_s = time.monotonic()
    assert client.contains(["k"]) == [False]
    assert time.monotonic() - started_s < AT_ONCE_S
    eventually(lambda: descriptors(daemon) <= before + 2, AT_ONCE_S, "one connection and one pidfd")
    with connect(path) as silent:
        eventually(lambda: descriptors(daemon) == before + 2, AT_ONCE_S, "the newest is kept")
        attach(str(path), session.token)
        silent.settimeout(SILENT_S + AT_ONCE_S)
        assert silent.recv(1) == b"", "for so long"
    for connection in opened:
        connection.close()
    eventually(lambda: descriptors(daemon) == before + 1, AT_ONCE_S, "the session's pidfd")
    client.close()
    eventually(lambda: descriptors(daemon) < before, AT_ONCE_S, "and its stream's end")
    assert "Traceback" not in daemon.text()


def test_many_clients_attach_at_once(daemon: Daemon) -> None:
    before = descriptors_at_rest(daemon, clients=0)
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(Client(daemon.address)) for _ in range(20)]
        tokens = [client._connection.session().token for client in clients]
        path, failed = str(attach_path(daemon)), []

        def work(token: str) -> None:
            try:
                for _ in range(20):
                    attach(path, token)
            except EcdError as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(token,)) for token in tokens]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
    eventually(lambda: descriptors(daemon) <= before, 2.0, "all are closed")


class Sessions:
    """Sessions that take charge of what is attached, under one name."""

    clients = 1

    def __init__(self) -> None:
        self.attached: list[int | None] = []

    def attach(self, token: str, pidfd: int | None) -> bool:
        self.attached.append(pidfd)
        return token == "token"


@pytest.mark.parametrize("failure", [None, errno.ENOPROTOOPT, errno.EMFILE])
def test_a_kernel_without_pidfds_attaches_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int | None
) -> None:
    """A descriptor that could be had but for a lack of them is no reason to go without."""
    if failure == errno.ENOPROTOOPT:
        monkeypatch.setattr(daemons_side, "SO_PEERPIDFD", 9999)  # no kernel has it
    elif failure is not None:

        def fail(connection: socket.socket) -> int:
            raise OSError(failure, os.strerror(failure))

        monkeypatch.setattr(daemons_side, "_peer_pidfd", fail)
    sessions = Sessions()

    async def run() -> None:
        bound = AttachSocket(tmp_path / "x.attach")
        bound.listen(sessions)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, attach, str(bound.path), "token")
        finally:
            bound.close()

    if failure == errno.EMFILE:
        with pytest.raises(EcdError):
            asyncio.run(run())
        assert sessions.attached == []
        return
    asyncio.run(run())
    [pidfd] = sessions.attached
    assert (pidfd is None) == (failure == errno.ENOPROTOOPT)
    if pidfd is not None:
        os.close(pidfd)


def test_a_daemon_without_descriptors_listens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons_side, "NO_FILES_PAUSE_S", 0.2)
    sessions = Sessions()

    async def run() -> None:
        bound = AttachSocket(tmp_path / "x.attach")
        with contextlib.closing(bound), connect(bound.path) as connection:
            connection.send(b"token")
            with no_descriptors():
                bound.listen(sessions)
                await asyncio.sleep(0.1)
            assert sessions.attached == []
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(None, connection.recv, 10) == ATTACHED

    asyncio.run(run())
    [pidfd] = sessions.attached
    assert pidfd is not None
    os.close(pidfd)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process no descriptor."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_that_begins_another_program_keeps_nothing_for_ever() -> None:
    """`exec` drops the lock, leaves the word set, and the process lives on."""
    processes, session = DmaProcesses(), SessionId(1)
    processes.attach(session, os.pidfd_open(os.getpid()))
    assert processes.may_copy(session, 5.0)
    assert not processes.may_copy(session, 5.0 + DMA_LIMIT_S)
    processes.forget(session)


def test_a_process_that_takes_long_to_end_is_waited_for() -> None:
    """A zombie whose other thread lives on stands for one that a device holds up."""
    processes, session = DmaProcesses(), SessionId(1)
    script = (
        "import ctypes, threading, time;"
        "threading.Thread(target=time.sleep, args=[60]).start();"
        "print(flush=True);"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            stat_path = Path(f"/proc/{process.pid}/stat")
            eventually(lambda: " Z " in stat_path.read_text())
            processes.attach(session, os.pidfd_open(process.pid))
            assert processes.may_copy(session, 5.0)
            assert processes.may_copy(session, 5.0 + 10 * DMA_LIMIT_S)
        finally:
            process.kill()
    assert processes.may_copy(session, 1000.0)
    assert not processes.may_copy(session, 1000.0 + DMA_GRACE_S)
    processes.forget(session)


def test_the_clock_starts_when_the_process_has_ended() -> None:
    processes, session = DmaProcesses(), SessionId(1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        processes.attach(session, os.pidfd_open(process.pid))
        assert processes.waiting == 0
        assert processes.may_copy(session, 0.0)
        assert processes.may_copy(session, DMA_LIMIT_S - 0.01), "it lives"
        assert processes.waiting == 1
        process.kill()
        process.wait()
    assert processes.may_copy(session, 2000.0)
    assert processes.may_copy(session, 2000.0 + DMA_GRACE_S - 0.01)
    assert not processes.may_copy(session, 2000.0 + DMA_GRACE_S)
    processes.forget(session)
    assert processes.waiting == 0
    assert processes.may_copy(session, 0.0)
    assert processes.may_copy(session, DMA_BLIND_GRACE_S - 0.01), "nothing is known of its process"
    assert not processes.may_copy(session, DMA_BLIND_GRACE_S)
