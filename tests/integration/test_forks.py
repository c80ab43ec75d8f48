"""Forked children: nothing of their parent's is theirs, and what they make themselves works."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ecd_client import Client
from support.daemon import Daemon, eventually

PARENT = """
import gc, multiprocessing, os, resource, signal, sys, threading, time
from ecd_client import Client, DaemonUnavailable, EcdError, LeaseExpired

address = sys.argv[1]
client = Client(address)

def say(word):
    print(word, flush=True)

def forked(child, leave=lambda: os._exit(0)):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(20)
    try:
        child()
    except Exception as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(7)
    leave()
"""


@contextmanager
def parent(daemon: Daemon, program: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, as gRPC's threads are whoever's tests ran here before."""
    command = [sys.executable, "-c", PARENT + program, daemon.address]
    with subprocess.Popen(
        command,
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def crowd(other: Client) -> None:
    """Fill the pool: what nobody holds is gone, and its memory is another entry's."""
    for number in range(63):
        other.put(f"{number}", torch.full((1 << 20,), 2, dtype=torch.uint8))


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
    process.join(20)
    return process.exitcode
"""


@pytest.mark.parametrize(
    "child",
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
def test_a_child_ends_none_of_its_parents_pins(daemon: Daemon, child: str) -> None:
    with Client(daemon.address) as other:
        other.put("k", torch.full((1 << 20,), 1, dtype=torch.uint8))
        program = HOLD + f"say({child})\ninput()\nsay(set(item.view) == {{1}})\nsay('end')"
        with parent(daemon, program) as process:
            assert said(process) == "0"
            daemon.evict_all()
            crowd(other)
            tell(process)
            assert said(process) == "True"
            assert said(process) == "end"
            process.wait(20)
    daemon.check_nothing_leaked()


def test_a_child_ends_no_pin_of_what_nobody_has_looked_at(daemon: Daemon) -> None:
    """The future has the item then, and is cut off before the session or after it, by chance."""
    keys = [f"k{number}" for number in range(32)]
    program = f"""
futures = client.get_async({keys}, 20.0)
say("asked")
while not all(future.done() for future in futures):
    time.sleep(0.01)
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
        crowd(other)
        tell(process)
        assert said(process) == "True"
        process.wait(20)
    daemon.check_nothing_leaked()


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
assert held.wait(20)
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
            crowd(other)
            tell(process)
            assert said(process) == "True"
            process.wait(20)
    daemon.check_nothing_leaked()


def test_a_child_interrupted_as_it_begins_ends_no_pin(daemon: Daemon) -> None:
    """A handler that raises ends a hook halfway, and Python goes on."""
    with Client(daemon.address) as other:
        other.put("k", torch.full((1 << 20,), 1, dtype=torch.uint8))
        program = f"""{HOLD}
import random
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
context = multiprocessing.get_context("fork")
for _ in range(300):
    process = context.Process(target=leave_with)
    process.start()
    until_s = time.perf_counter() + random.uniform(0.0, 1e-3)
    while time.perf_counter() < until_s:
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
            crowd(other)
            tell(process)
            assert said(process) == "True"
            process.wait(20)
    daemon.check_nothing_leaked()


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
                reply.result(1)
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
    """No hook of Python's runs there."""
    with Client(daemon.address) as other:
        other.put("k", torch.full((1 << 20,), 1, dtype=torch.uint8))
        program = f"""{HOLD}
import ctypes
pid = ctypes.PyDLL(None).fork()
if not pid:
    item.close()
    client.close()
    try:
        Client(address)
    except DaemonUnavailable:
        os._exit(0)
    os._exit(1)
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
item, [coming] = client.get("k"), client.get_async(["late"], 10.0)
uses = (
    lambda: client.get("k"), lambda: client.get("k", timeout=1.0), lambda: client.get_now("k"),
    lambda: client.get_async(["k"]), lambda: client.contains(["k"]), lambda: client.hint("k"),
    lambda: client.put_bytes("n", b"x", "uint8", (1,)), lambda: client.offer(["k"], []),
    lambda: client.wait_connected(5.0), lambda: coming.result(5),
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
say(coming.result(5).view.tobytes())
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
    time.sleep(60)
time.sleep(60)
"""
    with parent(daemon, program, GRPC_ENABLE_FORK_SUPPORT=by_grpc) as process:
        child = int(said(process))
        try:
            assert daemon.status().sessions == 1
            process.kill()
            process.wait()
            eventually(lambda: daemon.status().sessions == 0, 3.0)
            daemon.check_nothing_leaked(3.0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_grpc_starts_no_threads_in_a_child(daemon: Daemon) -> None:
    """Now and then a child would die of them."""
    program = """
client.put_bytes("k", b"x" * 4096, "uint8", (4096,))
def child():
    time.sleep(0.2)
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
    started = time.monotonic()
    try:
        Client(address)
    except DaemonUnavailable as error:
        assert "spawn" in str(error)
    else:
        raise AssertionError("gRPC after a fork")
    item = None
    client.close()
    gc.collect()
    assert time.monotonic() - started < 5
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
        assert process.wait(20) == 0
    eventually(lambda: daemon.status().sessions == 0)
    daemon.check_nothing_leaked()
