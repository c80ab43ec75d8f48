"""What a dead client's device may still write is not reused: rule D1 of docs/gpu-rules.md."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecd.core.model.types import SessionId
from ecd.rpc.cache import attach as daemons_side
from ecd.rpc.cache.attach import AttachSocket, DmaProcesses
from ecd_client import Client, EcdError
from ecd_client.device.attach import attach
from ecd_client.session.channel import open_channel
from ecd_proto.contract import CONTRACT_VERSION
from ecd_proto.mapped_file import MappedFile
from ecd_proto.shm.session_page import ATTACHED, DMA_BLIND_GRACE_S, DMA_GRACE_S, DMA_LIMIT_S
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.daemon import Daemon, changed
from support.dma_writer import RESERVED_BYTES, reserved, writer
from support.processes import child, run
from support.users import MALLORY, SERVICE, acting_as, needs_root, prefix
from support.waiting import HANG_S, eventually, eventually_async

MIB = 1 << 20
HELD = changed(
    "import signal, threading",
    "from ecd.memory import leftovers",
    "from ecd.rpc.cache import attach",
    "from ecd.base.clock import Clock",
    "over, others, grace = threading.Event(), Clock.block, leftovers.DMA_BLIND_GRACE_S",
    "Clock.block = lambda *given: over.wait() if given[1] == grace else others(*given)",
    "attach.DMA_GRACE_S = attach.DMA_BLIND_GRACE_S = attach.DMA_LIMIT_S = 1e9",
    "def toggle(name): setattr(attach, name, 1e9 - getattr(attach, name))",
    "signal.signal(signal.SIGUSR1, lambda *_: toggle('DMA_GRACE_S'))",
    "signal.signal(signal.SIGUSR2, lambda *_: toggle('DMA_BLIND_GRACE_S'))",
    "signal.signal(signal.SIGPROF, lambda *_: toggle('DMA_LIMIT_S'))",
    "signal.signal(signal.SIGALRM, lambda *_: over.set())",
)
"""A daemon whose graces have no end until a signal comes: one for each, and SIGALRM at a start."""
AT_ONCE = changed(
    "from ecd.rpc.cache import attach", "attach.DMA_GRACE_S = attach.DMA_BLIND_GRACE_S = 0.0"
)
"""A daemon that gives no grace once the process has ended."""
WITHOUT_RULE = changed(
    "from ecd.memory import leftovers",
    "from ecd.rpc.cache.attach import DmaProcesses",
    "leftovers._died_copying = lambda index: False",
    "DmaProcesses.may_copy = lambda *_: False",
)
"""A daemon that reuses memory once the locks have dropped, as if nothing had copied by DMA."""
MakeDaemon = Callable[..., Daemon]


@pytest.fixture(scope="module")
def unstarted_daemon(tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    daemon = Daemon(tmp_path_factory.mktemp("held"))
    daemon.command = HELD
    return daemon


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


@contextlib.contextmanager
def over(daemon: Daemon, grace: signal.Signals) -> Iterator[None]:
    """Within the block this grace is over."""
    os.kill(daemon.pid, grace)
    try:
        yield
    finally:
        os.kill(daemon.pid, grace)


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
    ("steps", "grace"),
    [
        ((), None),
        (("attach",), None),
        (("attach", "word", "clear"), None),
        (("attach", "word"), signal.SIGUSR1),
        (("attach", "attach", "word"), signal.SIGUSR1),
        (("word",), signal.SIGUSR2),
        (("attach", "outlasts"), signal.SIGPROF),
        (("outlasts",), signal.SIGPROF),
    ],
    ids=[
        *("no DMA", "attached", "no copy under way", "attached, copying", "twice", "not attached"),
        *("forked", "forked, not attached"),
    ],
)
def test_a_killed_clients_memory_waits_for_its_device(
    daemon: Daemon, steps: tuple[str, ...], grace: signal.Signals | None
) -> None:
    """The process stays a zombie meanwhile, as its parent does not ask for it."""
    with writer(daemon, *steps) as (process, _):
        assert reserved(daemon) == RESERVED_BYTES
        assert daemon.status().waiting_for_dma == 0
        process.kill()
        if grace is not None:
            eventually(lambda: daemon.status().waiting_for_dma == 1, "it waits")
            assert daemon.status().sessions == 1
            with Client(daemon.address, namespace="n") as client:
                assert client.put_bytes("being written", b"x", "uint8", (1,)), "its key is free"
            assert reserved(daemon) == RESERVED_BYTES
        with contextlib.nullcontext() if grace is None else over(daemon, grace):
            eventually(lambda: reserved(daemon) == 0, "the memory is free")
            eventually(lambda: daemon.status().sessions == 0)
    assert daemon.status().waiting_for_dma == 0


def test_a_process_that_lives_keeps_its_memory(make_daemon: MakeDaemon) -> None:
    """Its lock is dropped and its stream has ended: only its pidfd tells that it may copy."""
    daemon = make_daemon()
    daemon.command = AT_ONCE
    daemon.start()
    before = descriptors_at_rest(daemon, clients=0)
    with writer(daemon, "attach", "word", "lives on") as (process, _):
        eventually(lambda: daemon.status().waiting_for_dma == 1)
        assert reserved(daemon) == RESERVED_BYTES
        assert "ecd_sessions_waiting_for_dma 1.0" in daemon.metrics()
        process.kill()
        eventually(lambda: reserved(daemon) == 0, "the memory is free")
    eventually(lambda: descriptors(daemon) <= before, "the pidfd is closed")


def test_a_word_that_is_cleared_late_is_believed(daemon: Daemon) -> None:
    """The client drops its lock first, against the contract, and then says that nothing copies."""
    steps = "attach", "word", "lives on", "say", "line", "clear"
    with writer(daemon, *steps) as (process, _):
        eventually(lambda: daemon.status().waiting_for_dma == 1)
        print(file=process.stdin, flush=True)
        eventually(lambda: reserved(daemon) == 0, "the memory is free")


def test_a_client_that_closes_is_not_waited_for(daemon: Daemon) -> None:
    before = descriptors_at_rest(daemon, clients=0)
    with writer(daemon, "attach", "word", "clear", "close") as (process, _):
        eventually(lambda: daemon.status().sessions == 0, "the session's end")
        assert process.poll() is None, "it lives on"
        assert reserved(daemon) == 0
        eventually(lambda: descriptors(daemon) <= before, "the pidfd is closed")


# -- what that is good for -------------------------------------------------------------------------


class Device:
    """A device that writes into a client's extent whatever becomes of the client."""

    def __init__(self, daemon: Daemon, offset: int) -> None:
        [pool] = daemon.shm.glob("*.pool")
        fd = os.open(pool, os.O_RDWR)
        self._view = MappedFile(fd, pool.stat().st_size, writable=True).view(offset, RESERVED_BYTES)
        os.close(fd)

    def write(self) -> None:
        self._view[:] = b"\xee" * len(self._view)


def wrong_bytes(client: Client, write: Callable[[], None]) -> int:
    """Fill the pool of 16 MiB anew twice, with a write after each put: how often a get is wrong."""
    wrong = 0
    for put in range(32):
        assert client.put_bytes(f"new {put}", bytes([put]) * MIB, "uint8", (MIB,))
        write()
        for number in range(max(0, put - 12), put + 1):
            with client.get(f"new {number}") or contextlib.nullcontext() as item:
                if item is not None:
                    wrong += bytes(item.view) != bytes([number]) * MIB
    return wrong


@pytest.mark.parametrize("has_rule", [True, False], ids=["with the rule", "without it"])
def test_no_byte_is_wrong_after_a_kill(make_daemon: MakeDaemon, has_rule: bool) -> None:
    """The device writes on after the kill; without the rule it meets what was put since."""
    daemon = make_daemon("16MiB")
    daemon.command = HELD if has_rule else WITHOUT_RULE
    daemon.start()
    with Client(daemon.address, namespace="n") as client, writer(daemon, "attach", "word") as made:
        process, offset = made
        device = Device(daemon, offset)
        process.kill()
        eventually(lambda: daemon.status().waiting_for_dma if has_rule else not reserved(daemon))
        assert (wrong_bytes(client, device.write) == 0) == has_rule
        if has_rule:
            os.kill(daemon.pid, signal.SIGUSR1)
            eventually(lambda: reserved(daemon) == 0, "the memory is free")
            assert wrong_bytes(client, lambda: None) == 0
        assert daemon.status().pools[0].used_bytes > RESERVED_BYTES, "the extent is in use again"


@pytest.mark.parametrize("has_rule", [True, False], ids=["with the rule", "without it"])
def test_no_byte_is_wrong_after_a_restart(make_daemon: MakeDaemon, has_rule: bool) -> None:
    """Client and daemon are killed together; the device writes until the wait's end, or on."""
    daemon = make_daemon("16MiB")
    daemon.command = HELD if has_rule else WITHOUT_RULE
    daemon.start()
    kept = random.Random("kept").randbytes(MIB)
    with Client(daemon.address, namespace="n") as client, writer(daemon, "attach", "word") as made:
        process, offset = made
        assert client.put_bytes("kept", kept, "uint8", (MIB,))
        device = Device(daemon, offset)
        process.kill()
        daemon.kill()
        daemon.start(wait=not has_rule)
        if has_rule:
            eventually(lambda: WAITS in daemon.text(), "the daemon waits for the device")
            device.write()
            assert daemon.text().count("serving on") == 1, "it serves before the device has ended"
            os.kill(daemon.pid, signal.SIGALRM)
            daemon.wait_serving()
        client.wait_connected(HANG_S)
        with client.get("kept") as item:
            assert item is not None
            assert bytes(item.view) == kept
        wrong = wrong_bytes(client, (lambda: None) if has_rule else device.write)
    assert (wrong == 0) == (WAITS in daemon.text()) == has_rule
    assert "took over 1 entry" in daemon.text()


WAITS = "may still write to the pool"
"""What the log says when a start waits for a device."""


def test_a_restart_waits_for_no_device_that_is_idle(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with writer(daemon, "attach", "word", "clear") as (process, _):
        process.kill()
        daemon.kill()
        daemon.start()
    assert WAITS not in daemon.text()


def test_a_daemon_that_is_killed_while_it_waits_waits_again(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with writer(daemon, "attach", "word") as (process, _):
        process.kill()
        daemon.kill()
    for waits in (1, 2):
        daemon.start(wait=False)
        eventually(lambda waits=waits: daemon.text().count(WAITS) == waits)
        daemon.kill()


# -- the socket ------------------------------------------------------------------------------------


def attach_path(daemon: Daemon) -> Path:
    [path] = daemon.shm.glob("*.attach")
    return path


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(HANG_S)
    connection.connect(str(path))
    return connection


def test_a_welcome_names_the_socket(make_daemon: MakeDaemon) -> None:
    """It has the doorbell's rights, and goes with the daemon."""
    daemon = make_daemon().start()
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


def test_a_session_attaches_until_it_is_over(daemon: Daemon, client: Client) -> None:
    path = attach_path(daemon)
    session = client._connection.session()
    attach(str(path), session.token)
    attach(str(path), session.token, uid=os.geteuid())
    client.close()
    eventually(lambda: daemon.status().sessions == 0)  # a stopped daemon hears of both in any order
    with pytest.raises(EcdError, match="it is over"):
        attach(str(path), session.token)


@needs_root
def test_nothing_is_said_to_a_socket_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "mallorys.attach"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        with acting_as(MALLORY):
            listening.listen()
        with pytest.raises(EcdError, match=r"not user 0's"):
            attach(str(path), "a token", uid=0)
        with listening.accept()[0] as connection:
            assert connection.recv(64) == b""


def test_who_has_spoken_is_heard_however_many_are_silent(daemon: Daemon, client: Client) -> None:
    """One session: of those that say nothing the daemon keeps one."""
    path, token = attach_path(daemon), client._connection.session().token.encode()
    with contextlib.ExitStack() as opened:
        with daemon.stopped():
            pairs = [[opened.enter_context(connect(path)) for _ in range(2)] for _ in range(20)]
            for speaking, _ in pairs:
                speaking.send(token)
        assert [speaking.recv(10) for speaking, _ in pairs] == [ATTACHED] * 20
        assert [silent.recv(10) for _, silent in pairs[:-1]] == [b""] * 19


def test_errors_say_what_is_wrong(daemon: Daemon, client: Client) -> None:
    with pytest.raises(EcdError, match="no client copy by DMA"):
        attach("", "token")
    with pytest.raises(EcdError, match="No such file"):
        attach(str(daemon.shm / "none.attach"), "token")
    token = client._connection.session().token
    with daemon.stopped(), pytest.raises(EcdError, match=r"timed out"):
        attach(str(attach_path(daemon)), token, 0.3)


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
            thread.join(HANG_S)
        assert failed == []
    eventually(lambda: descriptors(daemon) <= before, "all are closed")


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
        try:
            await asyncio.to_thread(attach, str(bound.path), "token")
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


def test_who_stays_silent_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons_side, "SILENT_S", 0.1)

    async def run() -> None:
        bound = AttachSocket(tmp_path / "x.attach")
        with contextlib.closing(bound), connect(bound.path) as silent:
            bound.listen(Sessions())
            assert await asyncio.to_thread(silent.recv, 10) == b""

    asyncio.run(run())


def test_a_daemon_without_descriptors_listens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemons_side, "NO_FILES_PAUSE_S", 0.2)
    sessions = Sessions()

    async def run() -> None:
        bound = AttachSocket(tmp_path / "x.attach")
        with contextlib.closing(bound), connect(bound.path) as connection:
            connection.send(b"token")
            with no_descriptors():
                bound.listen(sessions)
                await eventually_async(lambda: "nobody can attach for" in caplog.text)
            assert sessions.attached == []
            assert await asyncio.to_thread(connection.recv, 10) == ATTACHED

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


@contextlib.contextmanager
def hangs_in_its_end() -> Iterator[subprocess.Popen[bytes]]:
    """A zombie whose other thread lives on stands for a process that a device holds up."""
    script = (
        "import ctypes, sys, threading;"
        "threading.Thread(target=sys.stdin.read).start();"
        "print(flush=True);"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with child([sys.executable, "-c", script], **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stat_path = Path(f"/proc/{process.pid}/stat")
        eventually(lambda: " Z " in stat_path.read_text())
        yield process


def test_a_process_that_takes_long_to_end_is_waited_for() -> None:
    processes, session = DmaProcesses(), SessionId(1)
    with hangs_in_its_end() as process:
        processes.attach(session, os.pidfd_open(process.pid))
        assert processes.may_copy(session, 5.0)
        assert processes.may_copy(session, 5.0 + 10 * DMA_LIMIT_S)
    assert processes.may_copy(session, 1000.0)
    assert not processes.may_copy(session, 1000.0 + DMA_GRACE_S)
    processes.forget(session)


HIDES = """
set -e
mount --make-rprivate /
mount -t proc -o "hidepid=$HIDEPID" proc /proc
exec "$@"
"""
WATCHES = """
import logging, os, sys
from ecd.rpc.cache.attach import DmaProcesses
logging.basicConfig(stream=sys.stdout, format="%(message)s")
processes = DmaProcesses()
for session in (1, 2):
    processes.attach(session, os.pidfd_open(int(sys.argv[1])))
print(processes.may_copy(1, 5.0), processes.may_copy(1, 5.0 + 10 * float(sys.argv[2])))
"""


@needs_root
@pytest.mark.parametrize(("hidepid", "is_seen"), [("off", True), ("invisible", False)])
def test_an_engine_of_another_user_is_seen_to_hang_in_its_end(
    tmp_path: Path, hidepid: str, is_seen: bool
) -> None:
    """As by the daemon that systemd starts; where /proc hides the engine, the log says so once."""
    with hangs_in_its_end() as process:
        watch = [sys.executable, "-c", WATCHES, str(process.pid), str(DMA_LIMIT_S)]
        hide = ["unshare", "--mount", "sh", "-c", HIDES, "sh", *prefix(tmp_path, SERVICE), *watch]
        done = run(hide, env={**os.environ, "HIDEPID": hidepid}, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1:] == [f"True {is_seen}"], done.stderr
        assert done.stdout.count("/proc hides processes") == (not is_seen)


def test_the_unit_lets_the_daemon_see_engines() -> None:
    unit = (Path(__file__).parents[2] / "deploy/systemd/ecd.service").read_text()
    assert "\nProtectProc=default\n" in unit


def test_the_clock_starts_when_the_process_has_ended() -> None:
    processes, session = DmaProcesses(), SessionId(1)
    with child([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        processes.attach(session, os.pidfd_open(process.pid))
        assert processes.waiting == 0
        assert processes.may_copy(session, 0.0)
        assert processes.may_copy(session, DMA_LIMIT_S - 0.01), "it lives"
        assert processes.waiting == 1
    assert processes.may_copy(session, 2000.0)
    assert processes.may_copy(session, 2000.0 + DMA_GRACE_S - 0.01)
    assert not processes.may_copy(session, 2000.0 + DMA_GRACE_S)
    processes.forget(session)
    assert processes.waiting == 0
    assert processes.may_copy(session, 0.0)
    assert processes.may_copy(session, DMA_BLIND_GRACE_S - 0.01), "nothing is known of its process"
    assert not processes.may_copy(session, DMA_BLIND_GRACE_S)
