"""Forked children: nothing of their parent's is theirs, and what they make themselves works."""

import os
import subprocess
import sys
from contextlib import AbstractContextManager

import pytest
import torch

from ecd_client import Client
from support.daemon import Daemon
from support.processes import child
from support.waiting import HANG_S, eventually

PARENT = f"""
import concurrent.futures, gc, multiprocessing, os, random, resource, signal, sys, threading
from ecd_client import Client, DaemonUnavailable, EcdError, LeaseExpired

HANG_S = {HANG_S}
address = sys.argv[1]
client = Client(address)

def say(word):
    print(word, flush=True)

def forked(child, leave=lambda: os._exit(0)):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(60)
    try:
        child()
    except Exception as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(7)
    leave()
"""


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


def parent(
    daemon: Daemon, program: str, **environ: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process of its own, as gRPC's threads are whoever's tests ran here before."""
    return child(
        [sys.executable, "-c", PARENT + program, daemon.address],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


HOLD = """
item = client.get("k")
held = {"item": item}
def drop():
    global item
    item = None
    held.clear()
    gc.collect()
def leave_with():
    with item:
        pass
def fail():
    with item:
        raise SystemExit
def without_descriptors(child):
    here = os.open("/proc/self/fd", os.O_RDONLY)
    most, hard = max(map(int, os.listdir(here))), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))
    while True:
        try:
            os.dup(here)
        except OSError:
            return forked(child)
def mine(method, child):
    process = multiprocessing.get_context(method).Process(target=child)
    process.start()
    process.join(HANG_S)
    return process.exitcode
"""


@pytest.mark.parametrize(
    "act",
    [
        "forked(drop)",
        "forked(lambda: item.close())",
        "forked(leave_with)",
        "forked(lambda: None, sys.exit)",
        "mine('fork', drop)",
        "mine('fork', fail)",
        "forked(lambda: client.close(), sys.exit)",
        "without_descriptors(lambda: item.close())",
    ],
)
def test_a_child_ends_none_of_its_parents_pins(daemon: Daemon, act: str) -> None:
    with Client(daemon.address) as other:
        other.put("k", torch.full((1 << 20,), 1, dtype=torch.uint8))
        program = HOLD + f"say({act})\ninput()\nsay(set(item.view) == {{1}})\nsay('end')"
        with parent(daemon, program) as process:
            assert said(process) == "0"
            daemon.evict_all()
            daemon.crowd()
            tell(process)
            assert said(process) == "True"
            assert said(process) == "end"
            process.wait(HANG_S)


def test_a_child_ends_no_pin_of_what_nobody_has_looked_at(daemon: Daemon) -> None:
    """The future has the item then, and is cut off before the session or after it, by chance."""
    keys = [f"k{number}" for number in range(32)]
    program = f"""
futures = client.get_async({keys}, 60.0)
say("asked")
concurrent.futures.wait(futures)
say(forked(lambda: None))
input()
say([future.result().view.tobytes() for future in futures] == [b"1" * 4096] * 32)
"""
    with Client(daemon.address) as other, parent(daemon, program) as process:
        assert said(process) == "asked"
        for key in keys:
            other.put_bytes(key, b"1" * 4096, "uint8", (4096,))
        assert said(process) == "0"
        assert daemon.evict_all().leased == len(keys)
        daemon.crowd()
        tell(process)
        assert said(process) == "True"
        process.wait(HANG_S)


HOLD_IN_GENERATORS = """
def holding():
    with client.get(f"k{len(views)}") as held:
        views.append(held.view)
        yield held
views = []
futures = client.get_async([f"never {number}" for number in range(16)], 60.0)
for future in futures:
    generator = holding()
    next(generator)
    future.add_done_callback(lambda _, generator=generator: next(generator))
local, held, is_over = threading.local(), threading.Event(), threading.Event()
def hold_in_a_thread():
    local.generator = holding()
    next(local.generator)
    held.set()
    is_over.wait()
del generator
threading.Thread(target=hold_in_a_thread, daemon=True).start()
assert held.wait(HANG_S)
"""


def test_a_generator_that_a_child_ends_ends_no_pin(daemon: Daemon) -> None:
    """Callbacks of futures have them, and a thread that the child does not have."""
    with Client(daemon.address) as other:
        for number in range(17):  # one pin each
            other.put_bytes(f"k{number}", b"1" * 4096, "uint8", (4096,))
        program = f"""{HOLD_IN_GENERATORS}
say(forked(lambda: None))
input()
say([view.tobytes() for view in views] == [b"1" * 4096] * 17)
os._exit(0)
"""
        with parent(daemon, program) as process:
            assert said(process) == "0"
            daemon.evict_all()
            daemon.crowd()
            tell(process)
            assert said(process) == "True"
            process.wait(HANG_S)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("forks", [100, pytest.param(3000, marks=pytest.mark.night)])
def test_a_child_interrupted_as_it_begins_ends_no_pin(daemon: Daemon, forks: int) -> None:
    """A handler that raises ends a hook halfway, and Python goes on."""
    with Client(daemon.address) as other:
        other.put("k", torch.full((1 << 20,), 1, dtype=torch.uint8))
        program = f"""{HOLD}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
context = multiprocessing.get_context("fork")
for _ in range({forks}):
    process = context.Process(target=leave_with)
    process.start()
    for _ in range(random.randrange(20_000)):  # up to a millisecond
        pass
    process.terminate()
    process.join()
say("forked")
input()
say(set(item.view) == {{1}})
"""
        with parent(daemon, program) as process:
            assert said(process) == "forked"
            daemon.evict_all()
            daemon.crowd()
            tell(process)
            assert said(process) == "True"
            process.wait(HANG_S)


def test_a_call_in_a_child_of_a_handler_fails_at_once(daemon: Daemon) -> None:
    """A signal's handler may fork amid a call, and the child end it as it unwinds."""
    program = """
from ecd_proto.v1 import cache_pb2 as pb
session = client._connection.session()
def call():
    for name in ("now", "later"):
        try:
            reply = getattr(session.calls, name)("contains", pb.ContainsRequest())
            if name == "later":
                reply.result(HANG_S)
        except EcdError as error:
            assert isinstance(error, DaemonUnavailable)
        else:
            raise AssertionError(name)
    session.abandon()
    session.calls.close()
say(forked(call))
client.contains(["k"])
say("alive")
"""
    with parent(daemon, program) as process:
        assert said(process) == "0"
        assert said(process) == "alive"


def test_a_child_of_c_code_ends_nothing_and_makes_no_client(daemon: Daemon) -> None:
    """No hook of Python's runs there, not those that mend its own lock: a child may hang in it.

    It does so before it has first let go of the lock, where another thread asked for it amid the
    fork. Such a child, or one that is slow to begin, is killed, and another one forked.
    """
    with Client(daemon.address) as other:
        other.put("k", torch.full((1 << 20,), 1, dtype=torch.uint8))
        program = f"""{HOLD}
import ctypes, select
while True:
    has_begun, begins = os.pipe()
    pid = ctypes.PyDLL(None).fork()
    if not pid:
        os.write(begins, b"x")
        item.close()
        client.close()
        try:
            Client(address)
        except DaemonUnavailable:
            os._exit(0)
        os._exit(1)
    if select.select([has_begun], [], [], 5)[0]:
        break
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
if not select.select([os.pidfd_open(pid)], [], [], HANG_S)[0]:
    os.kill(pid, signal.SIGKILL)
say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
client.contains(["k"])
say(set(item.view) == {{1}} and item._hold._index._words[item._hold._pin] > 0)
"""
        with parent(daemon, program) as process:
            assert said(process) == "0"
            assert said(process) == "True"


def test_whatever_was_made_before_a_fork_is_dead_in_the_child(daemon: Daemon) -> None:
    program = """
client.put_bytes("k", b"x" * 4096, "uint8", (4096,))
item, [coming] = client.get("k"), client.get_async(["late"], 60.0)
uses = (
    lambda: client.get("k"), lambda: client.get("k", timeout=1.0), lambda: client.get_now("k"),
    lambda: client.get_async(["k"]), lambda: client.contains(["k"]), lambda: client.hint("k"),
    lambda: client.put_bytes("n", b"x", "uint8", (1,)), lambda: client.offer(["k"], []),
    lambda: client.wait_connected(HANG_S), lambda: coming.result(HANG_S),
)
def child():
    for number, use in enumerate(uses):
        try:
            use()
        except DaemonUnavailable as error:
            assert "made before a fork" in str(error), (number, error)
        else:
            raise AssertionError(number)
    assert not client.connected
    try:
        item.view
    except LeaseExpired as error:
        assert "before a fork" in str(error)
    else:
        raise AssertionError("a view")
    client.close()
say(forked(child, sys.exit))
client.put_bytes("late", b"y", "uint8", (1,))
say(coming.result(HANG_S).view.tobytes())
"""
    with parent(daemon, program) as process:
        assert said(process) == "0"
        assert said(process) == "b'y'"


@pytest.mark.parametrize("by_grpc", ["1", "0"])
def test_a_child_that_outlives_its_parent_keeps_nothing(daemon: Daemon, by_grpc: str) -> None:
    """Also where gRPC closes no connection of its own in a child."""
    program = """
client.put_bytes("k", b"x" * 4096, "uint8", (4096,))
item = client.get("k")
if os.fork() == 0:
    say(os.getpid())
signal.pause()
"""
    with parent(daemon, program, GRPC_ENABLE_FORK_SUPPORT=by_grpc) as process:
        forked = int(said(process))
        assert daemon.status().sessions == 1
        process.kill()
        eventually(lambda: daemon.status().sessions == 0)
        daemon.check_nothing_leaked()
        os.kill(forked, 0)  # it lives


def test_grpc_starts_no_threads_in_a_child(daemon: Daemon) -> None:
    """Now and then a child would die of them."""
    program = """
client.put_bytes("k", b"x" * 4096, "uint8", (4096,))
def child():
    assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
say(forked(child))
"""
    with parent(daemon, program) as process:
        assert said(process) == "0"


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_child_of_a_busy_parent_ends_in_time(daemon: Daemon, end: str) -> None:
    """The parent's threads may hold any lock; gRPC would abort the child or never connect."""
    program = f"""
client.put_bytes("k", b"x" * 4096, "uint8", (4096,))
over = False
def work(number):
    turn = 0
    while not over:
        turn += 1
        try:
            client.get("k").close()
            if number % 2:
                client.get(f"no{{turn}}", timeout=0.001)
            else:
                client.put_bytes(f"{{number}}-{{turn % 50}}", b"x" * 4096, "uint8", (4096,))
        except EcdError as error:
            say(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
def child():
    global item
    try:
        Client(address)
    except DaemonUnavailable as error:
        assert "spawn" in str(error)
    else:
        raise AssertionError("gRPC after a fork")
    item = None
    client.close()
    gc.collect()
item = client.get("k")
failed = [code for code in (forked(child, lambda: {end}) for _ in range(15)) if code]
over = True
for thread in threads:
    thread.join()
client.close()
say(failed)
"""
    with parent(daemon, program) as process:
        assert said(process) == "[]"
        assert process.wait(HANG_S) == 0
