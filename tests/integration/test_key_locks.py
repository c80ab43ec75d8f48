"""Locks of keys among the clients of one node: held by one, and gone with it however it ends."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import pytest

from ecd_client import Client, DaemonUnavailable
from ecd_client.shared.key_locks import MAX_LOCKS
from support.daemon import Daemon
from support.processes import child
from support.waiting import HANG_S, eventually

LONG_S = 600
"""Longer than a test lasts."""
HOLDER = """
import os, signal, sys
from ecd_client import Client

client = Client(sys.argv[1], namespace=sys.argv[2])
print(client.lock("k", 600), flush=True)
if sys.argv[3] == "forks" and os.fork() == 0:
    print(os.getpid(), flush=True)
signal.pause()
"""
RACER = """
import sys
from ecd_client import Client

client = Client(sys.argv[1], namespace=sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
print(" ".join(key for key in map(str, range(200)) if client.lock(key, 600)), flush=True)
sys.stdin.readline()
"""


def started(
    program: str, client: Client, *arguments: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, client.address, client.namespace, *arguments]
    return child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


@pytest.fixture
def other(client: Client) -> Iterator[Client]:
    with Client(client.address, namespace=client.namespace) as other:
        yield other


def test_a_key_is_locked_by_one_client_until_it_unlocks_it(client: Client, other: Client) -> None:
    assert client.lock("k", LONG_S)
    assert client.lock("k", LONG_S), "it has the lock already"
    assert not other.lock("k", LONG_S)
    assert other.is_locked("k")
    assert not client.is_locked("k"), "its own"
    assert other.lock("another", LONG_S)
    assert other.lock("k", LONG_S, namespace="another")
    other.unlock("k")  # which it has not locked
    assert not other.lock("k", LONG_S)
    client.unlock("k")
    assert not other.is_locked("k")
    assert other.lock("k", LONG_S)
    assert not client.lock("k", LONG_S)
    other.unlock_all()
    assert client.lock("k", LONG_S)
    assert client.lock("another", LONG_S)


def test_a_lock_ends_in_time_though_its_client_does_nothing(client: Client, other: Client) -> None:
    assert client.lock("k", LONG_S)
    assert client.lock("longer", LONG_S)
    assert not other.lock("k", LONG_S)
    assert client.lock("k", 0.3)
    eventually(lambda: other.lock("k", LONG_S), "the end of the lock")
    assert not other.lock("longer", LONG_S)


def test_a_locked_key_is_put_and_read_by_anybody(client: Client, other: Client) -> None:
    assert client.lock("k", LONG_S)
    assert other.put_bytes("k", b"12", "uint8", (2,))
    with client.get("k") as item:
        assert item.nbytes == 2


def test_the_oldest_lock_ends_where_there_are_too_many(client: Client, other: Client) -> None:
    for number in range(MAX_LOCKS + 10):
        assert client.lock(str(number), LONG_S)
    assert [other.lock(str(number), LONG_S) for number in (0, 9, 10, MAX_LOCKS)] == [
        *(True, True),
        *(False, False),
    ]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process(client: Client, how: signal.Signals) -> None:
    with started(HOLDER, client, "alone") as holder:
        assert holder.stdout.readline() == "True\n"
        assert not client.lock("k", LONG_S)
        holder.send_signal(how)
        eventually(lambda: client.lock("k", LONG_S), "the lock of the dead")


def test_a_forked_child_does_not_keep_its_parents_lock(client: Client) -> None:
    with started(HOLDER, client, "forks") as holder:
        assert holder.stdout.readline() == "True\n"
        forked = int(holder.stdout.readline())
        assert not client.lock("k", LONG_S)
        holder.kill()
        eventually(lambda: client.lock("k", LONG_S), "the lock of the dead")
        os.kill(forked, 0)  # it lives


def test_of_processes_that_race_for_keys_each_key_has_one(client: Client) -> None:
    with ExitStack() as stack:
        racers = [stack.enter_context(started(RACER, client)) for _ in range(4)]
        assert {racer.stdout.readline() for racer in racers} == {"ready\n"}
        for racer in racers:
            racer.stdin.write("\n")
            racer.stdin.flush()
        won = Counter(key for racer in racers for key in racer.stdout.readline().split())
        assert set(won.values()) == {1}
        assert len(won) == 200


def test_locks_are_gone_after_a_restart_of_the_daemon(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client, Client(daemon.address) as other:
        assert client.lock("k", LONG_S)
        daemon.kill()
        eventually(lambda: not (client.connected or other.connected), "the end of both sessions")
        for call in (client.lock, client.is_locked, client.unlock):
            with pytest.raises(DaemonUnavailable):
                call("k", *([LONG_S] if call == client.lock else []))
        daemon.start()
        client.wait_connected(HANG_S)
        other.wait_connected(HANG_S)
        assert other.lock("k", LONG_S)
        assert not client.lock("k", LONG_S)
