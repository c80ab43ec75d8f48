"""Daemons and clients one version apart: they say so and lose nothing (docs/restart.md)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from ecd_client import Client, DaemonUnavailable
from ecd_proto.contract import CONTRACT_VERSION, DISTRIBUTION
from support.daemon import Daemon
from support.processes import run
from support.waiting import eventually

Make = Callable[..., Daemon]
CLI = Path(sys.executable).with_name("ecd-cli")
ECD = f"ecd {version(DISTRIBUTION)}"


def serving(constant: str, by: int) -> tuple[str, ...]:
    """A daemon that differs from this one in a number of the contract."""
    module, _, name = constant.rpartition(".")
    script = f"import {module} as m; m.{name} += {by}; from ecd.__main__ import main; main()"
    return (sys.executable, "-c", script, "serve")


def contract(by: int) -> tuple[str, ...]:
    return serving("ecd_proto.contract.CONTRACT_VERSION", by)


def put(client: Client, key: str) -> bool:
    return client.put_bytes(key, b"x" * 5000, "uint8", (5000,))


def is_there(client: Client, key: str, timeout_s: float = 0.0) -> bool:
    item = client.get(key, timeout_s)
    if item is None:
        return False
    with item:
        return bytes(item.view) == b"x" * 5000


def doctor(daemon: Daemon) -> str:
    command = [CLI, "--address", daemon.address, "doctor"]
    return run(command, capture_output=True, text=True).stdout


@pytest.mark.parametrize("by", [1, -1], ids=["newer", "older"])
def test_a_client_is_refused_in_words_and_finds_its_entries_afterwards(
    make_daemon: Make, by: int
) -> None:
    """The daemon is replaced under a running engine, and put back."""
    daemon = make_daemon(ECD_WARM_RESTART="true").start()
    ours = daemon.command
    with Client(daemon.address) as client:
        assert put(client, "k")
        assert daemon.terminate() == 0
        daemon.command = contract(by)
        daemon.start()
        told = f"speaks contract {CONTRACT_VERSION}, {ECD} speaks contract"

        def refused(act: Callable[[], object]) -> bool:
            with pytest.raises(DaemonUnavailable) as error:
                act()
            return f"{told} {CONTRACT_VERSION + by}: upgrade the older one" in str(error.value)

        def connect() -> Client:
            return Client(daemon.address, connect_timeout=0.5)

        eventually(lambda: refused(lambda: client.get("k")), "the client says why")
        eventually(lambda: refused(connect), "so does a new one")
        eventually(lambda: told in daemon.text(), "so does the daemon's log")
        found = doctor(daemon)
        assert f" fix  versions: daemon {ECD}, client {ECD}: contracts" in found
        assert "  reading: " not in found, "one cause, one finding"
        assert [entry.key.mm_hash for entry in daemon.entries()] == ["k"]
        assert daemon.text().count(f"python {ECD} {told}") == 1, "not at each attempt"

        assert daemon.terminate() == 0
        daemon.command = ours
        daemon.start()
        eventually(lambda: client.connected)
        eventually(lambda: is_there(client, "k"))


def test_a_client_calls_a_daemon_whose_index_it_cannot_read(make_daemon: Make) -> None:
    """The contract is the same, so nothing is refused; what needs the index is a call."""
    daemon = make_daemon(ECD_WARM_RESTART="true")
    ours = daemon.command
    daemon.command = serving("ecd_proto.shm.index.INDEX_VERSION", 1)
    daemon.start()
    with Client(daemon.address) as client:
        assert put(client, "k")
        assert not put(client, "k")
        assert is_there(client, "k")
        assert not is_there(client, "another")
        assert client.contains(["k", "another"]) == [True, False]
        assert daemon.calls("Acquire") >= 2
    assert "look  reading: every get is a call" in doctor(daemon)
    assert daemon.terminate() == 0
    daemon.command = ours
    daemon.start()
    assert daemon.entries() == []
    assert "it is of another version of ecd" in daemon.text()


@pytest.mark.parametrize("by", [1, -1], ids=["newer", "older"])
def test_nodes_that_differ_miss_in_each_other_until_they_do_not(make_daemon: Make, by: int) -> None:
    """A rolling upgrade of a cluster."""
    hosts = "127.0.93.1", "127.0.93.2"
    here, there = (
        make_daemon(
            ECD_PEER_ADDRESS=f"{host}:9465",
            ECD_PEERS=f"{other}:9465",
            ECD_ENGINE_PORTS=f"{first}-{first + 15}",
            ECD_WARM_RESTART="true",
        )
        for host, other, first in zip(hosts, hosts[::-1], (29100, 29116), strict=True)
    )
    ours = there.command
    there.command = contract(by)
    here.start()
    there.start()
    with Client(here.address) as client:
        assert put(client, "k")
        told = f"speaks contract {CONTRACT_VERSION}, {ECD} speaks contract {CONTRACT_VERSION + by}"

        def refused() -> bool:
            assert client.get("not here", 0.2) is None
            return any(told in peer.last_error for peer in here.peers().peers)

        eventually(refused, "ecd-cli peers says why")
        assert there.terminate() == 0
        there.command = ours
        there.start()
        with Client(there.address) as other:
            eventually(lambda: is_there(other, "k", 1.0))
