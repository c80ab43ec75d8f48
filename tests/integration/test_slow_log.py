"""The slow log keeps what was slow, the newest first, within its bound, and costs hits nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ecd_client import Client
from ecd_client.calls import open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.daemon import Daemon, eventually

MIB = 1 << 20
MakeDaemon = Callable[..., Daemon]


def slow(daemon: Daemon, clear: bool = False) -> pb.SlowReply:
    with open_channel(daemon.address) as channel:
        return pb_grpc.CacheStub(channel).Slow(pb.SlowRequest(clear=clear), timeout=10.0)


def cli(daemon: Daemon, *arguments: str) -> str:
    command = [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def put(client: Client, key: str, nbytes: int = 5000) -> None:
    client.put_bytes(key, bytes(nbytes), "uint8", (nbytes,))


def test_what_is_kept_is_bounded_and_can_be_forgotten(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ECD_SLOW_LOG_S="0").start()  # everything is slow
    before_s = time.time()
    with Client(daemon.address, namespace="model") as client:
        for number in range(200):
            put(client, f"k{number}")
        eventually(lambda: daemon.status().counters.puts == 200)
    reply = slow(daemon)
    assert len(reply.events) == 128
    assert reply.total > 200
    puts = [event for event in reply.events if event.kind == "Put"]
    assert (puts[0].namespace, puts[0].mm_hash, puts[0].nbytes) == ("model", "k199", 5000)
    begun = [event.unix_s for event in puts]
    assert begun == sorted(begun, reverse=True)
    assert before_s - 1.0 < begun[-1] <= begun[0] < time.time() + 1.0
    counted = daemon.metrics()
    assert 'ecd_slow_total{kind="Put"}' in counted
    assert daemon.text().count("slow: ") == 1, "one line a minute"
    shown: Any = json.loads(cli(daemon, "slow", "--clear", "--json"))
    assert {"k199", "k150"} <= {event["mm_hash"] for event in shown["events"]}
    left = slow(daemon)
    assert {event.kind for event in left.events} <= {"Slow", "Status"}
    assert left.total > reply.total


def test_a_hit_is_no_call_and_what_is_quick_is_not_kept(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ECD_SLOW_LOG_S="3600").start()
    with Client(daemon.address) as client:
        put(client, "k")
        client.get("k").close()
    assert not slow(daemon).events
    text = cli(daemon, "slow")
    assert text == (
        "0 of 0 since the start; slow is what takes 3600 s, of fetches 36000 s (ECD_SLOW_LOG_S).\n"
    )


def test_a_call_says_of_what_it_was(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ECD_SLOW_LOG_S="0").start()
    with Client(daemon.address) as client:
        put(client, "k", 24 * MIB)
    [event] = [event for event in slow(daemon).events if event.kind == "Reserve"]
    assert (event.mm_hash, event.keys, event.nbytes) == ("k", 1, 24 * MIB)
    assert sum(event.stages.values()) <= event.seconds
    shown = cli(daemon, "slow")
    assert "Reserve" in shown
    assert "24 MiB" in shown


def test_the_threshold_is_reloaded(tmp_path: Path) -> None:
    file = tmp_path / "ecd.toml"
    file.write_text("slow_log_s = 3600.0\n")
    daemon = Daemon(tmp_path)
    daemon.command = (*Daemon.command, "--config", str(file))
    try:
        daemon.start()
        file.write_text("slow_log_s = 0.0\n")
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: "slow_log_s is 0.0 now" in daemon.text())
        with Client(daemon.address) as client:
            put(client, "k")
        eventually(lambda: "k" in {event.mm_hash for event in slow(daemon).events})
    finally:
        daemon.close()
