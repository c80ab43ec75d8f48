"""Locks of keys among the clients of one node: held by one, and gone with it however it ends."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from ecd_client import Client, DaemonUnavailable
from ecd_client.shared.key_locks import MAX_LOCKS
from support.daemon import Daemon, eventually

HOLDER = """
import os, sys, time
from ecd_client import Client

client = Client(sys.argv[1])
print(client.lock("k", 60), flush=True)
if sys.argv[2] == "forks" and os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""
RACER = """
import sys, time
from ecd_client import Client

client = Client(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(" ".join(key for key in map(str, range(200)) if client.lock(key, 60)), flush=True)
sys.stdin.readline()
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def other(daemon: Daemon) -> Client:
    with Client(daemon.address) as other:
        yield other


def test_a_key_is_locked_by_one_client_until_it_unlocks_it(client: Client, other: Client) -> None:
    assert client.lock("k", 60)
    assert client.lock("k", 60), "it has the lock already"
    assert not other.lock("k", 60)
    assert other.is_locked("k")
    assert not client.is_locked("k"), "its own"
    assert other.lock("another", 60)
    assert other.lock("k", 60, namespace="another")
    other.unlock("k")  # which it has not locked
    assert not other.lock("k", 60)
    client.unlock("k")
    assert not other.is_locked("k")
    assert other.lock("k", 60)
    assert not client.lock("k", 60)
    other.unlock_all()
    assert client.lock("k", 60)
    assert client.lock("another", 60)


def test_a_lock_ends_in_time_though_its_client_does_nothing(client: Client, other: Client) -> None:
    assert client.lock("k", 60)
    assert client.lock("longer", 60)
    assert not other.lock("k", 60)
    assert client.lock("k", 0.3)
    eventually(lambda: other.lock("k", 60), 3, "the end of the lock")
    assert not other.lock("longer", 60)


def test_a_locked_key_is_put_and_read_by_anybody(client: Client, other: Client) -> None:
    assert client.lock("k", 60)
    assert other.put_bytes("k", b"12", "uint8", (2,))
    with client.get("k") as item:
        assert item.nbytes == 2


def test_the_oldest_lock_ends_where_there_are_too_many(client: Client, other: Client) -> None:
    for number in range(MAX_LOCKS + 10):
        assert client.lock(str(number), 60)
    assert [other.lock(str(number), 60) for number in (0, 9, 10, MAX_LOCKS)] == [
        *(True, True),
        *(False, False),
    ]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process(daemon: Daemon, client: Client, how: signal.Signals) -> None:
    with started(HOLDER, daemon.address, "alone") as holder:
        assert holder.stdout.readline() == "True\n"
        assert not client.lock("k", 60)
        holder.send_signal(how)
        eventually(lambda: client.lock("k", 60), 1.0, "the lock of the dead")


def test_a_forked_child_does_not_keep_its_parents_lock(daemon: Daemon, client: Client) -> None:
    with started(HOLDER, daemon.address, "forks") as holder:
        assert holder.stdout.readline() == "True\n"
        child = int(holder.stdout.readline())
        try:
            assert not client.lock("k", 60)
            holder.kill()
            eventually(lambda: client.lock("k", 60), 1.0, "the lock of the dead")
        finally:
            os.kill(child, signal.SIGKILL)


def test_of_processes_that_race_for_keys_each_key_has_one(daemon: Daemon) -> None:
    racers = [started(RACER, daemon.address) for _ in range(4)]
    try:
        assert {racer.stdout.readline() for racer in racers} == {"ready\n"}
        for racer in racers:
            racer.stdin.write("\n")
            racer.stdin.flush()
        won = Counter(key for racer in racers for key in racer.stdout.readline().split())
        assert set(won.values()) == {1}
        assert len(won) == 200
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
            racer.stdin.close()
            racer.stdout.close()


def test_locks_are_gone_after_a_restart_of_the_daemon(
    daemon: Daemon, client: Client, other: Client, make_daemon: Callable[..., Daemon]
) -> None:
    assert client.lock("k", 60)
    daemon.kill()
    eventually(lambda: not (client.connected or other.connected), 10, "the end of both sessions")
    for call in (client.lock, client.is_locked, client.unlock):
        with pytest.raises(DaemonUnavailable):
            call("k", *([60] if call == client.lock else []))
    daemon.start()
    client.wait_connected(10)
    other.wait_connected(10)
    assert other.lock("k", 60)
    assert not client.lock("k", 60)
