"""Counters never lie: what clients did is what status and metrics say, to the entry."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

import pytest
import torch
from rich.console import Console

from ecd_client import Client, DaemonUnavailable, EntryTooLarge
from ecd_client.cli import render
from ecd_client.shared import board
from ecd_proto.engines import Engine
from support.cli import cli
from support.daemon import Daemon
from support.processes import run
from support.waiting import HANG_S, eventually, stop

MakeDaemon = Callable[..., Daemon]
NBYTES = 5000

CLIENT = """
import json, os, random, signal, sys
from collections import Counter
from ecd_client import Client
from ecd_client.shared import board

address, seed, way, end = sys.argv[1:]
if way == "by calls":
    board.join_barriers = lambda: False
chance, did, own = random.Random(seed), Counter(), 0
with Client(address) as client:
    for _ in range(300):
        act = chance.choice(["put", "put again", "get", "get none", "wait"])
        if act.startswith("put"):
            own += act == "put"
            key = f"{seed}-{max(1, own)}"
            stored = client.put_bytes(key, bytes(5000), "uint8", (5000,))
            did["puts" if stored else "duplicates"] += 1
        else:
            key = f"k{chance.randrange(8)}" if act == "get" else f"none {seed}"
            item = client.get(key, timeout=0.001 if act == "wait" else 0.0)
            did["misses" if item is None else "hits"] += 1
            if item is not None and chance.random() < 0.9:
                item.close()
    print(json.dumps(did), flush=True)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "lost":
        client._connection.session().abandon()
"""


def told(daemon: Daemon) -> Counter[str]:
    """What status says; metrics say the same."""
    status, lines = daemon.status(), daemon.metrics().splitlines()
    metrics = dict(line.rsplit(" ", 1) for line in lines if line.startswith("ecd_"))
    counters = {
        name: getattr(status.counters, name)
        for name in ("hits", "misses", "puts", "duplicates", "recovered", "bytes_in", "bytes_out")
    } | {f"bench_{name}": getattr(status.bench, name) for name in ("hits", "puts", "misses")}
    uses = (
        float(metrics.pop(f'ecd_hits_total{{use="{use}"}}')) for use in ("reused", "handed_over")
    )
    metrics["ecd_hits_total"] = str(sum(uses))
    for name, value in counters.items():
        is_bench = name.startswith("bench_")
        sample = f'bench_total{{event="{name[6:]}"}}' if is_bench else f"{name}_total"
        assert float(metrics[f"ecd_{sample}"]) == value, name
    of_pool = metrics['ecd_pool_evictions_total{pool="host"}']
    assert float(of_pool) == sum(status.counters.evictions.values()), "a bench's are counted apart"
    evicted = sum(sum(each.evictions.values()) for each in (status.counters, status.bench))
    stored = sum(each.puts + each.recovered for each in (status.counters, status.bench))
    assert stored - evicted == status.entries
    return Counter(counters)


def sums(did: Counter[str]) -> Counter[str]:
    return did + Counter(bytes_in=NBYTES * did["puts"], bytes_out=NBYTES * did["hits"])


def put(client: Client, *keys: str) -> int:
    """How many are new."""
    return sum(client.put_bytes(key, bytes(NBYTES), "uint8", (NBYTES,)) for key in keys)


@pytest.fixture
def lasting(make_daemon: MakeDaemon) -> Iterator[Daemon]:
    """A daemon whose pool the next start takes over, with eight entries."""
    daemon = make_daemon(ECD_WARM_RESTART="true").start()
    with Client(daemon.address) as client:
        assert put(client, *(f"k{number}" for number in range(8))) == 8
    return daemon


@pytest.mark.parametrize("way", ["in memory", "by calls"])
def test_sessions_that_end_in_any_way_are_counted_whole(lasting: Daemon, way: str) -> None:
    """No wait: the first status after a session's end has all of it."""

    def work(seed: int, end: str) -> Counter[str]:
        command = [sys.executable, "-c", CLIENT, lasting.address, f"s{seed}", way, end]
        done = run(command, stdout=subprocess.PIPE)
        assert done.returncode == (-9 if end == "killed" else 0)
        return Counter(json.loads(done.stdout))

    did = Counter(puts=8)
    with ThreadPoolExecutor() as side:
        for each in side.map(work, range(3), ("closed", "killed", "lost")):
            assert min(each.values()) > 20
            did += each
    assert told(lasting) == sums(did)
    counters = lasting.status().counters
    assert (sum(counters.put_sizes), sum(counters.hit_sizes)) == (did["puts"], did["hits"])
    assert counters.hit_sizes_bytes == counters.bytes_out
    entries = lasting.evict_all().entries
    assert entries == did["puts"]
    assert lasting.status().counters.evictions["requested"] == entries
    assert told(lasting) == sums(did)


def test_a_killed_daemons_successor_counts_what_that_had_not_seen(lasting: Daemon) -> None:
    with Client(lasting.address) as client:
        for _ in range(3):
            client.get("k0").close()
        assert told(lasting) == sums(Counter(puts=8, hits=3))
        for life in range(2):
            stop(lasting.pid)  # it sees nothing of what follows
            for number in range(5 + life):
                client.get(f"k{number}").close()
            assert client.get("none") is None
            assert put(client, "k0", "k1", f"new {life}") == 1
            lasting.kill()
            lasting.start()
            client.wait_connected(HANG_S)
            did = Counter(hits=5 + life, misses=1, duplicates=2, puts=1, recovered=8 + life)
            eventually(lambda: lasting.status().entries == 9 + life)  # noqa: B023
            assert told(lasting) == sums(did)


KILLED_WHILE_TAKING_OVER = """
import os, runpy, sys
from ecd.memory.leftovers import Leftovers
Leftovers.entries = lambda self: os.kill(os.getpid(), 9)
sys.argv = ["ecd", "serve"]
runpy.run_module("ecd", run_name="__main__")
"""


def test_a_daemon_that_is_killed_while_it_takes_over_loses_no_count(lasting: Daemon) -> None:
    with Client(lasting.address) as client:
        eventually(lambda: told(lasting)["puts"] == 8)
        stop(lasting.pid)
        for number in range(7):
            client.get(f"k{number}").close()
        assert client.get("none") is None
        lasting.kill()
    lasting.prefix = (sys.executable, "-c", KILLED_WHILE_TAKING_OVER)
    lasting.start(wait=False)
    assert lasting._process.wait(HANG_S) == -signal.SIGKILL
    lasting.prefix = ()
    lasting.start()
    eventually(lambda: lasting.status().entries == 8)
    assert told(lasting) == sums(Counter(hits=7, misses=1, recovered=8))


def test_readers_through_a_restart_are_counted_once(lasting: Daemon) -> None:
    """What the last daemon says as it ends, and what the next one counts, is what they read."""
    over, hits = threading.Event(), 0
    with Client(lasting.address) as client:

        def read() -> None:
            nonlocal hits
            while not over.is_set():
                try:
                    item = client.get("k0")
                except DaemonUnavailable:
                    return
                assert item is not None
                hits += 1
                item.close()

        reader = threading.Thread(target=read)
        reader.start()
        eventually(lambda: lasting.status().counters.hits > 1000)
        assert lasting.terminate() == 0
        reader.join(HANG_S)
        assert not reader.is_alive()
        lasting.start()
    [counted] = re.findall(r"counted: hits (\d+)", lasting.text())
    eventually(lambda: lasting.status().entries == 8)
    assert int(counted) + told(lasting)["hits"] == hits
    assert told(lasting)["recovered"] == 8
    shown = Console(file=StringIO(), width=200)
    render.status(shown, lasting.status(), lasting.address)
    assert "8; 8 entries taken over from the last daemon" in shown.file.getvalue()


def test_bench_and_doctor_are_no_users(lasting: Daemon) -> None:
    with Client(lasting.address) as client:
        assert client.get("k0") is not None
        assert client.get("none") is None
    before = told(lasting)
    for command in ("doctor", "bench --rounds 2", "ls", "namespaces", "top --interval 200ms"):
        assert cli(lasting, *command.split()).returncode == 0
    after = told(lasting)
    bench = Counter(bench_puts=after["bench_puts"])
    assert bench["bench_puts"] >= 3 * 4  # a cold round and two more, of four entries each
    assert after == before + bench
    assert sum(lasting.status().counters.evictions.values()) == 0


def test_a_put_that_waited_for_another_is_a_duplicate(daemon: Daemon) -> None:
    with Client(daemon.address) as first, Client(daemon.address) as second:
        session = first._connection.session()
        from ecd_client.writer import describe_entry

        entry = describe_entry(("default", "k"), "uint8", (NBYTES,), 0.0, b"")
        begun, go_on = threading.Event(), threading.Event()

        def slowly(*_: object) -> None:
            begun.set()
            assert go_on.wait(HANG_S)

        assert session is not None
        with ThreadPoolExecutor() as side:
            writing = side.submit(first._writer.put, entry, slowly, HANG_S)
            assert begun.wait(HANG_S)
            waiting = side.submit(put, second, "k")
            eventually(lambda: daemon.status().waits == 1)
            go_on.set()
            assert (writing.result(HANG_S), waiting.result(HANG_S)) == (True, 0)
        assert told(daemon) == sums(Counter(puts=1, duplicates=1))


def test_many_sessions_are_counted_before_status_answers(daemon: Daemon) -> None:
    """More than one scan of the pages takes in."""
    with Client(daemon.address) as client:
        put(client, "k")
    clients = [Client(daemon.address) for _ in range(140)]
    try:
        for each in clients:
            for _ in range(20):
                each.get("k").close()
        assert told(daemon) == sums(Counter(puts=1, hits=140 * 20))
    finally:
        for each in clients:
            each.close()


def test_how_long_evicted_entries_were_idle_is_told(daemon: Daemon) -> None:
    daemon.crowd()

    def for_room() -> float:
        evictions = daemon.status().counters.evictions
        return float(evictions["capacity"] + evictions["watermark"])

    def are_told() -> bool:
        said, count = daemon.metrics(), for_room()
        counted = f"ecd_eviction_idle_seconds_count {count}" in said
        return counted and f'ecd_eviction_idle_seconds_bucket{{le="3600.0"}} {count}' in said

    eventually(are_told, what="the last puts' room is made a moment after them")
    before = for_room()
    assert before > 20
    daemon.evict_all()
    assert f"ecd_eviction_idle_seconds_count {before}" in daemon.metrics()


def test_namespaces_are_told_apart_up_to_a_bound(daemon: Daemon) -> None:
    with Client(daemon.address) as client:
        for number in range(60):
            size = 1000 - number
            client.put_bytes("k", bytes(size), "uint8", (size,), namespace=f"model {number}")
        client.put_bytes("k", bytes(9000), "uint8", (9000,), namespace="other")
        status, metrics = daemon.status(), daemon.metrics()
    assert [each.namespace for each in status.namespaces[:2]] == ["other", "model 0"]
    assert len(status.namespaces) == 50
    sizes = dict(re.findall(r'ecd_namespace_bytes{namespace="(.*)"} (\S+)', metrics))
    assert len(sizes) == 50
    assert sizes["model 3"] == "997.0"
    assert float(sizes["other"]) == 9000 + sum(1000 - number for number in range(49, 60))
    assert 'ecd_namespace_entries{namespace="other"} 12.0' in metrics
    assert sum(map(float, sizes.values())) == status.counters.bytes_in
    daemon.evict_all()
    assert 'ecd_namespace_bytes{namespace="other"} 0.0' in daemon.metrics()
    assert 'ecd_namespace_bytes{namespace="model 3"}' not in daemon.metrics()


@pytest.fixture(params=["in memory", "by calls"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How clients that are made from now on read."""
    if request.param == "by calls":
        monkeypatch.setattr(board, "join_barriers", lambda: False)
    return str(request.param)


def traffic(daemon: Daemon) -> dict[str, tuple[float, float, int, int, int, float]]:
    """Hits, hits handed over, misses, evictions, refused puts, seconds saved of each namespace."""
    status = daemon.status()
    return {
        each.namespace: (
            each.reused + each.handed_over,
            each.handed_over,
            each.misses,
            each.evictions,
            each.refused,
            each.saved_s,
        )
        for each in (*status.traffic, status.other_traffic)
    }


def test_lookups_and_losses_are_counted_by_namespace(daemon: Daemon, reading: str) -> None:
    own, plain = Client(daemon.address, namespace="a"), Client(daemon.address)
    engine = Client(daemon.address)
    engine.describe(Engine("e1", "model", "of the engine", True, True, {}, ""))
    eventually(lambda: daemon.status().engines, what="the description arrives")
    with own, plain, engine:
        own.put("k", torch.zeros(4), cost=2.0)
        plain.put("k", torch.zeros(4), cost=3.0, namespace="b")
        daemon.wait_idle()
        for client, namespace, count in ((own, "a", 3), (plain, "b", 2)):
            for _ in range(count):
                client.get("k", namespace=namespace).close()
        assert own.get("none") is None, "in its own namespace"
        assert own.get("none", namespace="b") is None
        assert own.get("none", namespace="none") is None, "which has had no entry yet"
        assert engine.get("none", namespace="of the engine") is None
        if is_mapped := reading == "in memory":
            engine.count_miss()
            engine.count_miss(namespace="b")
        with pytest.raises(EntryTooLarge):
            plain.put_bytes("big", bytes(100 << 20), "uint8", (100 << 20,), namespace="b")
        daemon.evict_all()
        found = traffic(daemon)
    assert found["a"] == (3, 1, 1 + is_mapped, 1, 0, 4.0)
    assert found["b"] == (2, 1, 1 + is_mapped, 1, 1, 3.0)
    assert found["of the engine"] == (0, 0, 1 + is_mapped, 0, 0, 0.0)
    assert found[""] == (0, 0, 0, 0, 0, 0.0), "nothing is without a namespace"
    said = daemon.metrics()
    assert 'ecd_namespace_hits_total{namespace="a",use="reused"} 2.0' in said
    assert 'ecd_namespace_saved_seconds_total{namespace="b"} 3.0' in said
    assert 'ecd_namespace_misses_total{namespace="b"} ' + str(1.0 + is_mapped) in said


def test_namespaces_beyond_the_bound_are_counted_together(daemon: Daemon) -> None:
    with Client(daemon.address) as client:
        for name in ("other", *(f"model {number}" for number in range(60))):
            client.get("none", namespace=name, timeout=0.001)
    found = traffic(daemon)
    assert len(found) == 51
    assert found["model 3"][2] == 1
    assert sum(each[2] for each in found.values()) == daemon.status().counters.misses == 61
    said = daemon.metrics()
    assert 'ecd_namespace_misses_total{namespace="other"} 12.0' in said
    assert "model 55" not in said


def uses(daemon: Daemon) -> tuple[int, int, int, float]:
    """Hits, those handed over, misses, and the seconds saved."""
    counted = daemon.status().counters
    return counted.hits, counted.handed_over, counted.misses, counted.saved_s


def test_every_lookup_is_counted_once_and_a_look_is_not(daemon: Daemon, client: Client) -> None:
    assert not daemon.status().node, "it has no peers: `get_now` is the whole lookup"
    client.put("k", torch.zeros(4), cost=2.0)
    daemon.wait_idle()
    assert client.get_now("none") == (None, False)
    assert uses(daemon) == (0, 0, 1, 0.0)
    looks = [client.get_now("none", is_use=False)[0], client.get("none", is_use=False)]
    looks += [client.get("none", timeout=0.01, is_use=False)]
    looks += [future.result() for future in client.get_async(["none"], is_use=False)]
    looks += [future.result() for future in client.get_async(["none"], 0.01, is_use=False)]
    assert looks == [None] * 5
    for item in (client.get_now("k", is_use=False)[0], client.get("k", is_use=False)):
        item.close()
        item.count_use()  # it is closed
    assert uses(daemon) == (0, 0, 1, 0.0)
    client.count_miss()
    with client.get("k", is_use=False) as item:
        item.count_use()
    assert uses(daemon) == (1, 1, 2, 0.0)
    client.get_now("k")[0].close()
    assert uses(daemon) == (2, 1, 2, 2.0)


def test_a_look_by_call_is_counted_once(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "join_barriers", lambda: False)  # every read is a call
    with Client(daemon.address) as client:
        client.put("k", torch.zeros(4))
        with client.get("k", is_use=False) as item:
            item.count_use()
        assert client.get("none", timeout=0.01, is_use=False) is None
        client.count_miss()
    assert uses(daemon)[:3] == (1, 1, 1)


def test_what_saves_an_encode_is_counted_apart_from_what_hands_over(
    daemon: Daemon, reading: str
) -> None:
    own = Client(daemon.address, uses_puts=True)  # as an engine that encodes and decodes
    encoder, decoder = Client(daemon.address), Client(daemon.address)
    with own, encoder, decoder:
        own.put("own", torch.zeros(4), cost=2.0)
        daemon.wait_idle()  # it is listed: a read before that counts for no entry
        decoder.get("own").close()
        assert uses(daemon) == (1, 0, 0, 2.0), "the first engine had used it already"
        encoder.put("handed", torch.zeros(4), cost=3.0)
        daemon.wait_idle()
        decoder.get("handed").close()
        assert uses(daemon) == (2, 1, 0, 2.0)
        decoder.get("handed").close()
        assert uses(daemon) == (3, 1, 0, 5.0)
        if reading == "in memory":
            with encoder.get("handed", is_use=False) as item:
                item.count_use(for_another=True)
            decoder.get("handed").close()
            assert uses(daemon) == (5, 2, 0, 8.0), "one request, one encode saved"


def test_a_use_of_a_put_that_was_not_listed_yet_is_the_entrys(
    daemon: Daemon, client: Client
) -> None:
    """The put is seen in its claim while the daemon stands still; its number is looked up later."""
    client.put("earlier", torch.zeros(4))
    daemon.wait_idle()  # memory was granted
    with daemon.stopped():
        assert client.put_async("k", torch.zeros(4), cost=2.0).result()
        item, _ = client.get_now("k", is_use=False)
    daemon.wait_idle()
    item.count_use()
    item.close()
    assert uses(daemon) == (1, 1, 0, 0.0)
    client.get("k").close()
    assert uses(daemon) == (2, 1, 0, 2.0)


@pytest.mark.parametrize(
    ("key", "metadata"),
    [("k" * 200, b""), ("k", bytes(300)), ("k", b"")],
    ids=["a key without a row", "metadata without room", "a row"],
)
def test_a_look_that_takes_a_lease_is_counted_once(
    daemon: Daemon, client: Client, key: str, metadata: bytes
) -> None:
    client.put(key, torch.zeros(4), cost=2.0, metadata=metadata)
    daemon.wait_idle()
    for _ in range(2):
        client.get(key, is_use=False).close()
        [future] = client.get_async([key], 0.01, is_use=False)
        with future.result() as item:
            item.count_use()
    assert uses(daemon) == (2, 1, 0, 2.0)
    [entry] = daemon.entries()
    assert entry.hits == 2
    assert client.get("k" * 199, timeout=0.01, is_use=False) is None
    assert uses(daemon)[2] == 0
