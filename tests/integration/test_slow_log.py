"""The slow log keeps what was slow, the newest first, within its bound, and costs hits nothing."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from ecd_client import Client
from ecd_client.session.channel import open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.cli import cli
from support.daemon import Daemon
from support.waiting import HANG_S, eventually

MIB = 1 << 20
FILE = "ecd.toml"


@pytest.fixture(scope="module")
def unstarted_daemon(tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    daemon = Daemon(tmp_path_factory.mktemp("shared"))
    file = daemon.directory / FILE
    file.write_text("")
    daemon.command = (*Daemon.command, "--config", str(file))
    return daemon


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


def set_threshold(daemon: Daemon, seconds: float) -> None:
    """The daemon takes it over while it runs."""
    (daemon.directory / FILE).write_text(f"slow_log_s = {seconds}\n")
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: slow(daemon).slow_s == seconds)


def slow(daemon: Daemon, clear: bool = False) -> pb.SlowReply:
    with open_channel(daemon.address) as channel:
        return pb_grpc.CacheStub(channel).Slow(pb.SlowRequest(clear=clear), timeout=HANG_S)


def put(client: Client, key: str, nbytes: int = 5000) -> None:
    client.put_bytes(key, bytes(nbytes), "uint8", (nbytes,))


def test_what_is_kept_is_bounded_and_can_be_forgotten(daemon: Daemon) -> None:
    set_threshold(daemon, 0.0)  # everything is slow
    assert "slow_log_s is 0.0 now" in daemon.text()
    total, puts_before = slow(daemon).total, daemon.status().counters.puts
    with Client(daemon.address, namespace="model") as client:
        for number in range(200):
            put(client, f"k{number}")
        eventually(lambda: daemon.status().counters.puts == puts_before + 200)
    reply = slow(daemon)
    assert len(reply.events) == 128
    assert reply.total > total + 200
    puts = [event for event in reply.events if event.kind == "Put"]
    assert {(event.namespace, event.nbytes) for event in puts} == {("model", 5000)}
    numbers = [int(event.mm_hash[1:]) for event in puts]  # not those of puts that had to call
    assert numbers == sorted(set(numbers), reverse=True)
    assert 'ecd_slow_total{kind="Put"}' in daemon.metrics()
    shown: Any = json.loads(cli(daemon, "slow", "--clear", "--json").stdout)
    assert {"k199", "k150"} <= {event["mm_hash"] for event in shown["events"]}
    left = slow(daemon)
    assert {event.kind for event in left.events} <= {"Slow", "Status"}
    assert left.total > reply.total


def test_a_hit_is_no_call_and_what_is_quick_is_not_kept(daemon: Daemon) -> None:
    set_threshold(daemon, 3600.0)
    total = slow(daemon, clear=True).total
    with Client(daemon.address) as client:
        put(client, "k")
        client.get("k").close()
    assert not slow(daemon).events
    least = "3600 s, of fetches 36000 s (ECD_SLOW_LOG_S)"
    text = f"0 of {total:,} since the start; slow is what takes {least}.\n"
    assert cli(daemon, "slow").stderr == text


def test_a_call_says_of_what_it_was(daemon: Daemon) -> None:
    set_threshold(daemon, 0.0)
    slow(daemon, clear=True)
    with Client(daemon.address) as client:
        put(client, "k", 24 * MIB)
    [event] = [event for event in slow(daemon).events if event.kind == "Reserve"]
    assert (event.mm_hash, event.keys, event.nbytes) == ("k", 1, 24 * MIB)
    assert sum(event.stages.values()) <= event.seconds
    shown = cli(daemon, "slow").stdout
    assert "Reserve" in shown
    assert "24 MiB" in shown
