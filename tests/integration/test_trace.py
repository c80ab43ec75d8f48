"""`ECD_TRACE` and `ecd replay`: a daemon under load, and what its trace says afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from random import Random

import pytest

from ecd.commands import app
from ecd_client import Client, PoolFull
from ecd_client.session.channel import open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.daemon import Daemon
from support.processes import child, run
from support.waiting import HANG_S, eventually

OPERATIONS = 300


def ecd(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run(
        [sys.executable, "-m", "ecd", "replay", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "160"},
    )


def use(address: str, seed: int) -> int:
    """Get what few ask for often, and put what is missing; how often it was there."""
    chance, hits = Random(seed), 0
    with Client(address, namespace=f"n{seed % 2}") as client:
        for number in range(OPERATIONS):
            key = f"k{int(200 * chance.random() ** 3)}"
            item = client.get(key)
            if item is not None:
                with item:
                    hits += 1
                continue
            nbytes = chance.choice((4096, 30_000, 100_000, 400_000))
            if number % 50 == 0:  # by a call: too large for a grant
                nbytes = 3_000_000
            with suppress(PoolFull):  # the others hold what could go
                client.put_bytes(key, bytes(nbytes), "uint8", (nbytes,), cost=chance.random())
    return hits


def user(daemon: Daemon, seed: int) -> AbstractContextManager[subprocess.Popen[str]]:
    program = f"from integration.test_trace import use; print(use({daemon.address!r}, {seed}))"
    command = [sys.executable, "-c", program]
    return child(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("eviction", ["value", "lru"])
def test_a_replay_of_a_run_evicts_what_the_run_did(
    make_daemon: Callable[..., Daemon], tmp_path: Path, eviction: str
) -> None:
    trace = tmp_path / "trace"
    rules = {"ECD_NAMESPACE_QUOTAS": "n1=4MiB", "ECD_NAMESPACE_TTLS": "brief=1s"}
    daemon = make_daemon("16MiB", ECD_TRACE=str(trace), ECD_EVICTION=eviction, **rules).start()
    with Client(daemon.address, namespace="brief") as client:
        for key in ("kept", "not kept"):
            client.put_bytes(key, bytes(4096), "uint8", (4096,))
    with open_channel(daemon.address) as channel:
        key = pb.Key(namespace="brief", mm_hash="kept")
        pb_grpc.CacheStub(channel).Keep(pb.KeepRequest(key=key), timeout=HANG_S)
    # Before memory is full, or all that is brief might go for room.
    eventually(lambda: daemon.status().counters.evictions["ttl"] > 0)
    with ExitStack() as stack:
        clients = [stack.enter_context(user(daemon, seed)) for seed in range(3)]
        assert sum(int(each.communicate()[0]) for each in clients) > 0
    with Client(daemon.address) as client:
        for number in range(4096):  # one page each: all that is free can be used
            client.put_bytes(f"{number}", bytes(4096), "uint8", (4096,))
    eventually(lambda: daemon.status().counters.evictions["watermark"] > 0)
    daemon.evict_all()
    evictions = dict(daemon.status().counters.evictions)
    assert all(evictions.values()), evictions
    assert "ecd_trace_lost_records_total 0.0" in daemon.metrics()
    daemon.terminate()

    again = ecd(trace, "--json")
    assert again.returncode == 0, again.stderr + again.stdout
    assert json.loads(again.stdout)["evictions"] == evictions
    assert json.loads(again.stdout)["is_whole"]

    other = "lru" if eviction == "value" else "value"
    header, rest = trace.read_text().split("\n", 1)
    trace.write_text(header.replace(f'"{eviction}"', f'"{other}"') + "\n" + rest)
    differs = ecd(trace)
    assert differs.returncode == 1
    assert "the evictions differ" in differs.stdout

    tried = ecd(trace, "--pool", "8MiB,50%,100%", "--json", "--plot", tmp_path / "plot.svg")
    assert tried.returncode == 0, tried.stderr
    rows = json.loads(tried.stdout)
    assert [row["policy"] for row in rows] == ["value", "lru"] * 3
    for row in rows:
        assert row["saved_s"] <= row["upper_s"] + 1e-6
        assert row["feasible_s"] <= row["upper_s"] + 1e-6
        assert 0.0 < row["share"] <= 1.0
        assert row["accesses"] == rows[0]["accesses"] > OPERATIONS
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_a_trace_on_a_full_disk_costs_no_entry(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon("16MiB", ECD_TRACE="/dev/full").start()
    with Client(daemon.address) as client:
        client.put_bytes("k", b"x" * 100_000, "uint8", (100_000,))
        eventually(lambda: "No space left on device" in daemon.text())
        client.put_bytes("k2", b"y" * 100_000, "uint8", (100_000,))
        assert client.contains(["k", "k2"]) == [True, True]
    assert daemon.text().count("No space left on device") == 1
    lost = [line for line in daemon.metrics().splitlines() if line.startswith("ecd_trace_lost")]
    assert float(lost[0].split()[1]) > 0
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.text()


def test_a_trace_that_cannot_begin_is_said_at_the_start(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(ECD_TRACE=str(tmp_path / "none" / "trace")).start(wait=False)
    assert daemon._process is not None
    assert daemon._process.wait(HANG_S) == 1
    assert "ECD_TRACE=" in daemon.text()
    assert "No such file or directory" in daemon.text()
    assert "Traceback" not in daemon.text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("none", 2, "No such file"),
        (".", 2, "Is a directory"),
        ("garbage --pool 1MiB", 2, "neither a trace nor time,id,size"),
        ("csv", 2, "a CSV needs --pool"),
        ("csv --policy lru", 2, "give --pool"),
        ("csv --pool 4B", 2, "less than a granule"),
        ("csv --pool x", 2, "--pool must be a size, such as 512MiB or 4GiB, got 'x'"),
        ("csv --pool 4", 2, "--pool needs a unit, such as 4MiB or 4GiB, got '4'"),
        ("csv --pool 1MiB --policy best", 2, "There are value, lru"),
        ("csv --disk x", 2, "--disk must be a size"),
        ("csv --disk 1GiB --disk-read-bytes-per-s 0", 2, "--disk-read-bytes-per-s must be more"),
        ("csv --pool 1MiB --plot none/x.svg", 1, "cannot be written"),
    ],
)
def test_wrong_use_is_told_apart(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("garbage").write_bytes(bytes(range(256)))
    Path("csv").write_text("0,a,5000\n1,b,5000\n2,a,5000\n")
    with pytest.raises(SystemExit) as ended:
        app(["replay", *arguments.split()])
    assert ended.value.code == code
    assert message in capfd.readouterr().err


def test_a_csv_of_libcachesim_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "csv"
    file.write_text("time,obj_id,obj_size\n" + "0,a,5000\n1,b,5000\n2,a,5000\n" * 3)
    done = ecd(file, "--pool", "1MiB", "--policy", "lru")
    assert done.returncode == 0, done.stderr
    assert "9 accesses of 2 keys" in done.stdout
    assert all(line == line.rstrip() and line.isascii() for line in done.stdout.splitlines())
    assert "100.0%" in done.stdout


def test_a_replay_with_a_disk_tells_what_came_from_it(tmp_path: Path) -> None:
    file = tmp_path / "csv"
    file.write_text("".join(f"{second},{second % 20},4096\n" for second in range(60)))
    arguments = file, "--pool", "64KiB", "--policy", "lru"
    assert "from disk" not in ecd(*arguments).stdout
    assert "of these from disk" in ecd(*arguments, "--disk", "1GiB").stdout
    found = ecd(*arguments, "--disk", "1GiB", "--disk-write-bytes-per-s", "1MB", "--json")
    [outcome] = json.loads(found.stdout)
    assert outcome["hits"] == outcome["disk_hits"] == 40
    assert outcome["saved_s"] == outcome["disk_saved_s"] > 39.0
