"""A put that has returned True survives the daemon's kill -9, and no byte is ever wrong."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ecd_client import Client
from ecd_client.pools import Extent, MappedPool
from ecd_client.writer import describe_entry
from ecd_proto.shm.index import INDEX_HEADER_BYTES, RECOVERING_WORD, unpack_index_header
from ecd_proto.shm.rows import ROW_BYTES, ROW_CHECKSUM_WORD, Row, pack_row
from ecd_proto.shm.session_page import (
    CLAIM_DONE,
    CLAIM_NUMBER,
    CLAIM_ROW,
    FIRST_CLAIM_WORD,
    claim_at,
)
from support.daemon import Daemon, eventually

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = int(os.environ.get("KILL_ROUNDS", "2"))
PUTS = 2000
MakeDaemon = Callable[..., Daemon]

WRITER = """
import os, random, sys
from types import SimpleNamespace
from ecd_client import Client
from ecd_client.errors import EcdError
from ecd_client.writer import describe_entry
address, name, again = sys.argv[1:]
chance = random.Random(name)
SIZES = [(0, 8 << 10)] * 70 + [(8 << 10, 64 << 10)] * 26 + [(300 << 10, 1 << 20)] * 4

def returned(key):
    os.write(1, f"{key}\\n".encode())

def put(client, number):
    nbytes = chance.randint(*chance.choice(SIZES))
    key = f"{name}-{number}-{nbytes}"
    content = random.Random(key).randbytes(nbytes)
    def copy_to(pool, extent):
        pool.write_view(extent)[:] = content
    what = describe_entry(("n", key), "uint8", (nbytes,), 0.5, key.encode())
    kind = chance.random()
    if kind < 0.3:
        source = SimpleNamespace(is_on_host=True, device=None, copy_to=copy_to)
        future = client._writer.put_async(what, source)
        future.add_done_callback(lambda f: f.exception() or (f.result() and returned(key)))
    elif kind > 0.97:
        with Client(address) as other:  # whose first put is one by calls
            if other._writer.put(what, copy_to, 5.0):
                returned(key)
    elif client._writer.put(what, copy_to, 5.0):
        returned(key)

with Client(address) as client:
    for number in range(1_000_000):
        try:
            put(client, number)
        except EcdError:
            if again != "again":
                break
            client.wait_connected(30.0)
"""
READER = """
import os, random, sys, time
from ecd_client import Client
from ecd_client.errors import EcdError
address, *logs = sys.argv[1:]
chance = random.Random(1)
right = 0
with Client(address, namespace="n") as client:
    while True:
        for log in logs:
            with open(log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
                keys = file.read().decode().splitlines()[1:-1]
            for key in chance.sample(keys, min(len(keys), 50)):
                try:
                    item = client.get(key)
                except EcdError:
                    time.sleep(0.01)
                    continue
                if item is not None:
                    with item:
                        seen = bytes(item.view)
                    assert seen == random.Random(key).randbytes(int(key.split("-")[2])), key
                    right += 1
        print(right, flush=True)
"""


def content(key: str) -> bytes:
    """The one right content of a key, which names the number of its bytes."""
    return random.Random(key).randbytes(int(key.split("-")[2]))


def put(client: Client, key: str) -> bool:
    data = content(key)
    return client.put_bytes(key, data, "uint8", (len(data),), cost=0.5, metadata=key.encode())


def check(client: Client, key: str) -> bool:
    """Whether it is there; if so, it is what it was."""
    item = client.get(key)
    if item is None:
        return False
    with item:
        assert item.metadata == key.encode()
        assert bytes(item.view) == content(key), f"wrong bytes: {key}"
    return True


@contextmanager
def processes(*commands: tuple[str, ...], logs: list[Path]) -> Iterator[list[subprocess.Popen]]:
    started = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("ab") as output:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-c", *command],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=log.with_suffix(".errors").open("ab"),
                    )
                )
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def returned(logs: list[Path]) -> list[str]:
    """Keys whose put has returned True."""
    return [
        key
        for log in logs
        for key in log.read_text().rpartition("\n")[0].splitlines()
        if key.count("-") == 2
    ]


@pytest.mark.timeout(120 + 60 * ROUNDS)
@pytest.mark.parametrize("together", [False, True], ids=["writers live", "writers die too"])
def test_what_was_put_is_there_after_a_kill(
    make_daemon: MakeDaemon, tmp_path: Path, together: bool
) -> None:
    daemon = make_daemon("320MiB").start()
    total = kept = 0
    for number in range(ROUNDS):
        logs = [tmp_path / f"{number}.{writer}" for writer in range(3)]
        commands = [(WRITER, daemon.address, log.name, "once") for log in logs]
        with processes(*commands, logs=logs) as writers:
            while sum(log.read_bytes().count(b"\n") for log in logs) < PUTS:
                assert all(writer.poll() is None for writer in writers), logs
                time.sleep(0.001)
            daemon.kill()
            if not together:
                for writer in writers:
                    writer.wait(30)
        daemon.start()
        keys = returned(logs)
        with Client(daemon.address, namespace="n") as client:
            there = [check(client, key) for key in keys]
        total, kept = total + len(keys), kept + sum(there)
        daemon.evict_all()
    print(f"{kept} of {total} puts were kept")
    assert total >= ROUNDS * PUTS
    assert kept >= 0.999 * total, f"{kept} of {total}"
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked(20.0)


@pytest.mark.timeout(120 + 20 * ROUNDS)
def test_a_kill_while_the_pool_is_turned_over(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Readers compare every byte of what was put last, before and after each kill."""
    daemon = make_daemon("16MiB").start()
    logs = [tmp_path / f"{writer}" for writer in range(2)]
    for log in logs:
        log.touch()
    names = [str(log) for log in logs]
    commands = [(WRITER, daemon.address, log.name, "again") for log in logs]
    commands.append((READER, daemon.address, *names))
    outputs = [*logs, tmp_path / "reader"]
    with processes(*commands, logs=outputs) as running:
        eventually(lambda: len(returned(logs)) > 100, 30.0)
        for number in range(2 * ROUNDS):
            time.sleep(random.random())
            daemon.kill()
            if number % 2:  # and once more while it starts
                daemon.start(wait=False)
                time.sleep(random.random() * 1.5)
                daemon.kill()
            daemon.start()
            errors = [output.with_suffix(".errors").read_text()[-2000:] for output in outputs]
            assert all(process.poll() is None for process in running), errors
        eventually(lambda: outputs[-1].read_text().split()[-1:] > ["0"], 20.0)
    with Client(daemon.address, namespace="n") as client:
        assert sum(check(client, key) for key in returned(logs)[::3]) > 0
    assert int(outputs[-1].read_text().split()[-1]) > 100, "the reader read"
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked(20.0)


def test_a_put_that_nobody_has_heard_of_is_kept(make_daemon: MakeDaemon) -> None:
    """Done, in granted memory, the last grant or one before it; not even its bell was heard."""
    daemon = make_daemon().start()
    copying, go_on = threading.Event(), threading.Event()
    old, new = "old-0-4096", [f"new-{number}-{4096 * number}" for number in range(5)]

    def copy_to(pool: MappedPool, extent: Extent) -> None:
        copying.set()
        assert go_on.wait(20)
        pool.write_view(extent)[:] = content(old)

    with Client(daemon.address, namespace="n") as client:
        for number in range(3):
            assert put(client, f"first-{number}-4096")
        what = describe_entry(("n", old), "uint8", (4096,), 0.5, old.encode())
        outcomes: list[bool] = []
        writer = threading.Thread(
            target=lambda: outcomes.append(client._writer.put(what, copy_to, 20.0))
        )
        writer.start()
        assert copying.wait(5)
        daemon.evict_all()  # takes all grants back
        for number in range(3, 6):
            assert put(client, f"first-{number}-4096")
        eventually(lambda: daemon.status().pools[0].granted_bytes > 8192)
        os.kill(daemon.pid, signal.SIGSTOP)
        go_on.set()
        writer.join()
        assert outcomes == [True]
        assert all(put(client, key) for key in new)
        daemon.kill()
        daemon.start()
        client.wait_connected(10.0)
        assert client.contains([old, *new]) == [True] * 6
        assert all(check(client, key) for key in (old, *new))
        assert not any(client.contains([f"first-{number}-4096" for number in range(3)]))
    daemon.check_nothing_leaked()


def test_kills_one_after_the_other_lose_nothing(make_daemon: MakeDaemon) -> None:
    """Each start may be killed before, while and after it takes over what the last one left."""
    daemon = make_daemon("128MiB").start()
    keys = [f"k-{number}-{1 + 997 * number % 20_000}" for number in range(3000)]
    with Client(daemon.address, namespace="n") as client:
        assert all(put(client, key) for key in keys)
        daemon.kill()
        for _ in range(4 + ROUNDS):
            started = daemon.text().count("populating /dev")
            daemon.start(wait=False)
            if random.random() < 0.5:  # right after the takeover began, most often
                eventually(lambda n=started: daemon.text().count("populating /dev") > n, 20.0)
            time.sleep(random.random() * 0.8)
            daemon.kill()
        daemon.start()
        client.wait_connected(10.0)
        assert sum(check(client, key) for key in keys) >= 0.999 * len(keys)
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked()


def is_trimmed(daemon: Daemon) -> bool:
    """Whether nothing need be evicted for what was put last."""
    pool = daemon.status().pools[0]
    return pool.used_bytes + pool.granted_bytes <= 0.95 * pool.pool_bytes


def forget_proofs(daemon: Daemon) -> None:
    """Clear all checksums, as if the daemon had been killed before it read any bytes."""
    [index] = daemon.shm.glob("*.index")
    with index.open("r+b") as file:
        shape = unpack_index_header(file.read(INDEX_HEADER_BYTES))
        assert shape is not None
        for row in range(2048):
            file.seek(shape.rows_at + row * ROW_BYTES + 8 * ROW_CHECKSUM_WORD)
            file.write(bytes(8))


@contextmanager
def kept_aside(daemon: Daemon) -> Iterator[Callable[[], None]]:
    """Keep a dead daemon's files; the result puts them back, as if they had never been removed."""
    with tempfile.TemporaryDirectory() as made:
        aside = Path(made)
        for path in daemon.shm.iterdir():
            if path.suffix not in (".bell", ".attach", ".pool", ""):
                subprocess.run(["cp", "--sparse=always", path, aside], check=True)
        [stem] = {path.stem for path in aside.iterdir()}

        def put_back() -> None:
            for path in aside.iterdir():
                if not (daemon.shm / path.name).exists():
                    subprocess.run(["cp", "--sparse=always", path, daemon.shm], check=True)
            pool, *_ = daemon.shm.glob("*.pool")
            if not (there := daemon.shm / f"{stem}.pool").exists():
                os.link(pool, there)

        yield put_back


@pytest.mark.parametrize("given_away", [True, False])
def test_what_has_no_proof_is_believed_until_the_next_daemon_gives_memory_away(
    make_daemon: MakeDaemon, given_away: bool
) -> None:
    """The second daemon is killed in the middle of its takeover: the third sees both indexes."""
    daemon = make_daemon("16MiB").start()
    keys = [f"k-{number}-{60 * KIB}" for number in range(200)]
    news = [f"new-{number}-{50 * KIB}" for number in range(290)]
    with Client(daemon.address, namespace="n") as client:
        for key in keys:
            assert put(client, key)
        daemon.kill()
    forget_proofs(daemon)
    with kept_aside(daemon) as put_back:
        daemon.start()
        with Client(daemon.address, namespace="n") as client:
            if given_away:
                assert all(put(client, key) for key in news)  # in the places of the others
            eventually(lambda: is_trimmed(daemon), what="the last puts are taken up")
            before = client.contains(keys + news)
            daemon.kill()
        put_back()
        if not given_away:
            for index in daemon.shm.glob("*.index"):
                with index.open("r+b") as file:
                    file.seek(8 * RECOVERING_WORD)
                    if not list(daemon.shm.glob(f"{index.stem}.puts")):
                        file.write(struct.pack("<Q", 1))
        daemon.start()
    with Client(daemon.address, namespace="n") as client:
        there = [check(client, key) for key in keys + news]
    assert there == before
    assert all(there[: len(keys)]) != given_away
    assert any(there[len(keys) :]) == given_away
    daemon.check_nothing_leaked()


def test_a_daemon_killed_before_it_began_costs_nothing(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address, namespace="n") as client:
        assert put(client, "k-0-1000")
        daemon.kill()
        [pool] = daemon.shm.glob("*.pool")
        os.link(pool, daemon.shm / "00ab.pool")
        (daemon.shm / "00ab.sessions").touch()
        index = daemon.shm / "00ab.index"
        index.touch()
        os.truncate(index, MIB)
        daemon.start()
        client.wait_connected(10.0)
        assert check(client, "k-0-1000")
    assert not list(daemon.shm.glob("00ab.*"))


class Page:
    """A client's page and claims, written at will."""

    def __init__(self, client: Client) -> None:
        session = client._connection.session()
        assert session.index is not None
        assert session.puts is not None
        self.index, self.puts = session.index, session.puts

    def plant(self, place: int, key: str, offset: int, nbytes: int, done: bool = True) -> None:
        """A put that is announced or done, says the page."""
        record = self.index.record("n", key)
        row = pack_row(
            record, Row(1000 + place, 0, offset, nbytes, "uint8", (nbytes,), b"", 0, False), 0
        )
        at = claim_at(place)
        self.puts._memory[(at + CLAIM_ROW) * 8 : (at + CLAIM_ROW) * 8 + ROW_BYTES] = row
        self.puts._words[at + CLAIM_NUMBER] = 1000 + place
        self.puts._words[at + CLAIM_DONE] = (1000 + place) * done

    def grant(self) -> tuple[int, int]:
        return next(piece for piece in self.puts._pieces if piece[0] < piece[1])


def test_a_page_plants_nothing_outside_its_own_grant(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    keys = [f"k-{number}-{1 + 9999 * number % 50_000}" for number in range(100)]
    with (
        Client(daemon.address, namespace="n") as client,
        Client(daemon.address, namespace="n") as rogue,
    ):
        for key in keys:
            assert put(client, key)
        for number in range(3):
            assert put(rogue, f"rogue-{number}-4096")
        page = Page(rogue)
        page.plant(0, "as grants are taken back", 50 * MIB, 4096, done=False)
        daemon.evict_all()
        for key in keys:
            assert put(client, key)
        for number in range(3):
            assert put(rogue, f"rogue-{number}-4096")
        others = Page(client).grant()
        own, end = page.grant()
        [(_, offset, _)] = [page.index.extent("n", "rogue-1-4096")]
        os.kill(daemon.pid, signal.SIGSTOP)
        waiting = f"waiting-0-{20 * KIB}"
        assert put(client, waiting)
        planted = {
            "over another's entry": client._connection.session().index.extent("n", keys[3])[1],
            "over its own entry": offset,
            "in another's grant": others[1] - 4096,
            "where another puts": others[0],
            "in free memory": 60 * MIB,
            "beyond its grant": end - 2048,
            "beside a page": own + 100,
            "beyond the pool": 1 << 40,
        }
        page.plant(0, "as grants are taken back", 50 * MIB, 4096)
        for place, (key, at) in enumerate(planted.items(), 1):
            page.plant(place, key, at, 4096)
        page.plant(len(planted) + 1, "within its grant", own, 4096)
        page.plant(len(planted) + 2, keys[5], own + 4096, 4096)  # there is an entry of this key
        daemon.kill()
        daemon.start()
        for one in (client, rogue):
            one.wait_connected(10.0)
        assert all(check(client, key) for key in (*keys, waiting))
        assert not any(client.contains(["as grants are taken back", *planted]))
        assert client.contains(["within its grant"]) == [True]
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked()


def test_nonsense_in_pages_is_taken_for_nothing(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    keys = [f"k-{number}-{1 + 9999 * number % 50_000}" for number in range(100)]
    with Client(daemon.address, namespace="n") as client:
        for key in keys:
            assert put(client, key)
        with Client(daemon.address, namespace="n") as rogue:
            assert put(rogue, "rogue-1-4096")
            daemon.status()  # it is listed: its claim is about to be overwritten
            puts = Page(rogue).puts
            start = 8 * FIRST_CLAIM_WORD
            puts._memory[start:] = random.Random(1).randbytes(len(puts._memory) - start)
            daemon.kill()
        [index] = daemon.shm.glob("*.index")
        assert index.stat().st_size > INDEX_HEADER_BYTES
        daemon.start()
        client.wait_connected(10.0)
        assert all(check(client, key) for key in keys)
        assert daemon.status().entries == len(keys) + 1
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked()


def test_who_comes_late_does_not_read_what_a_dead_daemon_left(make_daemon: MakeDaemon) -> None:
    """It was welcomed, then the daemon was killed: its page is gone before locks are looked at."""
    daemon = make_daemon("64MiB").start()
    with Client(daemon.address, namespace="n") as client:
        put(client, "k-0-1000")
        [pins] = daemon.shm.glob("*.pins")
        item = client.get("k-0-1000")
        daemon.kill()
        daemon.start(wait=False)
        eventually(lambda: not pins.exists(), 10.0)
        assert pins.with_suffix(".puts").exists()
        eventually(lambda: "waiting for clients" in daemon.text(), 10.0)
        time.sleep(0.2)
        assert "serving on" not in daemon.text().rpartition("waiting for clients")[2]
        item.close()
        daemon.wait_serving()
        client.wait_connected(10.0)
        assert check(client, "k-0-1000")
        eventually(lambda: not pins.with_suffix(".puts").exists(), 10.0)
