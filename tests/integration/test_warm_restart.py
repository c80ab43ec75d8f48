"""A daemon that is restarted serves what it had; what is in doubt is a miss, never wrong bytes."""

from __future__ import annotations

import mmap
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecd_client import Client
from ecd_proto.shm.index import INDEX_HEADER_BYTES, unpack_index_header
from ecd_proto.shm.rows import ROW_BYTES, ROW_CHECKSUM_WORD
from support.daemon import Daemon, eventually

MIB = 1 << 20
MakeDaemon = Callable[..., Daemon]


@pytest.fixture
def make_daemon(make_daemon: MakeDaemon) -> MakeDaemon:
    """Daemons that leave their pool on SIGTERM, though nobody is to start them again."""
    return lambda pool="64MiB", **settings: make_daemon(
        pool, **{"ECD_WARM_RESTART": "true", **settings}
    )


def content(key: str, nbytes: int) -> bytes:
    """The one right content of a key."""
    return random.Random(key).randbytes(nbytes)


def put(client: Client, key: str, nbytes: int) -> None:
    client.put_bytes(key, content(key, nbytes), "uint8", (nbytes,), metadata=key.encode(), cost=0.5)


def check(client: Client, key: str, nbytes: int) -> bool:
    """Whether it is there; if so, it is what it was."""
    item = client.get(key)
    if item is None:
        return False
    with item:
        assert (item.metadata, item.cost_s, item.shape) == (key.encode(), 0.5, (nbytes,))
        assert bytes(item.view) == content(key, nbytes), key
    return True


def fill(client: Client, sizes: dict[str, int]) -> None:
    for key, nbytes in sizes.items():
        put(client, key, nbytes)


def missing(client: Client, keys: list[str]) -> list[str]:
    parts = [keys[start : start + 1000] for start in range(0, len(keys), 1000)]
    found = [there for part in parts for there in client.contains(part)]
    return [key for key, there in zip(keys, found, strict=True) if not there]


def files(daemon: Daemon, suffix: str) -> list[Path]:
    return sorted(daemon.shm.glob(f"*{suffix}"))


def restart(daemon: Daemon, how: str, *flags: str) -> None:
    if how == "SIGKILL":
        daemon.kill()
    else:
        assert daemon.terminate() == 0
    daemon.command = (*Daemon.command, *flags)
    daemon.start()


SIZES = {f"k{number}": 1 + 997 * number % 60_000 for number in range(300)}
SIZES |= {"large": 3 * MIB + 5, "empty": 0}


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_what_was_stored_is_there_again(make_daemon: MakeDaemon, how: str) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        fill(client, SIZES)
        first = client.incarnation
        time.sleep(0.5)  # what was put last is hashed behind the puts
        for life in range(3):
            restart(daemon, how)
            client.wait_connected(10.0)
            assert client.incarnation != first
            assert client.contains(["large", "none"]) == [True, False]
            assert all(check(client, key, nbytes) for key, nbytes in SIZES.items())
            put(client, f"of life {life}", 100)
            assert not client.put_bytes("k0", b"x", "uint8", (1,)), "it is there already"
            time.sleep(0.3)
        assert all(check(client, f"of life {life}", 100) for life in range(3))
    if how == "SIGTERM":
        left = rf"30\d entries and 6[45][.\d]* MiB in {daemon.shm} are left for the next start"
        assert re.search(left, daemon.text())


def test_entries_are_listed_in_the_order_in_which_they_were_stored(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    keys = [str(number) for number in range(50)]
    random.Random(1).shuffle(keys)
    with Client(daemon.address) as client:
        for key in keys:
            put(client, key, 100)
        restart(daemon, "SIGTERM")
        client.wait_connected(10.0)
        eventually(lambda: daemon.status().entries == 50)
    assert [entry.key.mm_hash for entry in daemon.entries()] == keys


def test_what_was_evicted_stays_away(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        fill(client, SIZES)
        daemon.evict_all()
        put(client, "after", 5000)
        restart(daemon, "SIGTERM")
        client.wait_connected(10.0)
        assert check(client, "after", 5000)
        assert not any(client.contains(list(SIZES)))
        assert daemon.evict_all().entries == 1
    daemon.check_nothing_leaked()


def test_an_eviction_after_the_start_means_what_was_taken_over(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon("512MiB").start()
    with Client(daemon.address) as client:
        for number in range(40):
            put(client, str(number), 10 * MIB)
    restart(daemon, "SIGTERM")
    assert daemon.evict_all().entries == 40
    assert daemon.status().entries == 0
    daemon.check_nothing_leaked()


def test_a_reader_of_the_old_life_is_waited_for(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        put(client, "k", MIB)
        time.sleep(0.2)
        item = client.get("k")
        assert item is not None
        daemon.kill()
        daemon.start(wait=False)
        time.sleep(2.0)
        assert daemon.text().count("serving on") == 1, "the first life alone"
        assert bytes(item.view) == content("k", MIB)
        item.close()
        daemon.wait_serving()
        client.wait_connected(10.0)
        assert check(client, "k", MIB)
    eventually(lambda: "took over 1 entry" in daemon.text())


def test_one_that_does_not_let_go_costs_the_cache_and_nothing_else(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        put(client, "k", MIB)
        item = client.get("k")
        assert item is not None
        daemon.kill()
        daemon.start()
        client.wait_connected(10.0)
        assert client.contains(["k"]) == [False]
        for number in range(50):
            put(client, str(number), MIB)
        assert bytes(item.view) == content("k", MIB)
        item.close()
    assert "some client has not let go of its pool" in daemon.text()


@pytest.mark.parametrize(
    ("flags", "settings", "why"),
    [
        (("--cold",), {}, None),
        ((), {"ECD_WARM_RESTART": "false"}, None),
        ((), {"ECD_HOST_POOL_BYTES": "32MiB"}, "33554432 are wanted"),
    ],
)
def test_a_start_may_be_cold(
    make_daemon: MakeDaemon, flags: tuple[str, ...], settings: dict[str, str], why: str | None
) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        put(client, "k", 1000)
        time.sleep(0.2)
        daemon._settings |= settings
        restart(daemon, "SIGTERM", *flags)
        client.wait_connected(10.0)
        assert client.contains(["k"]) == [False]
        put(client, "k", 1000)
    assert why is None or why in daemon.text()
    daemon.check_nothing_leaked()


def test_files_stay_for_the_next_start_alone(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    assert daemon.terminate() == 0
    assert {path.suffix for path in daemon.shm.iterdir()} == {
        ".pool",
        ".index",
        ".sessions",
        ".pins",
    }
    daemon.start()
    os.kill(daemon.pid, signal.SIGINT)
    eventually(lambda: not daemon.shm.exists(), 10.0, "Ctrl-C leaves nothing")
    daemon._settings["ECD_WARM_RESTART"] = "false"
    daemon.start()
    assert daemon.terminate() == 0
    assert not daemon.shm.exists()


@pytest.mark.parametrize(
    ("settings", "flags", "kept"),
    [
        ({}, (), False),
        ({}, ("--warm",), True),
        ({"ECD_WARM_RESTART": "true"}, (), True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (), True),
        ({"NOTIFY_SOCKET": "/nowhere/notify"}, (), True),
        ({"NOTIFY_SOCKET": "/nowhere/notify", "ECD_WARM_RESTART": "false"}, (), False),
    ],
)
def test_the_pool_is_left_where_the_daemon_is_started_again(
    make_daemon: MakeDaemon, settings: dict[str, str], flags: tuple[str, ...], kept: bool
) -> None:
    daemon = make_daemon("16MiB", **{"ECD_WARM_RESTART": "auto", **settings})
    daemon.command = (*Daemon.command, *flags)
    daemon.start()
    assert daemon.terminate() == 0
    assert daemon.shm.exists() is kept


def test_a_daemon_takes_over_after_a_kill_though_it_would_leave_nothing(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon(ECD_WARM_RESTART="auto").start()
    with Client(daemon.address) as client:
        put(client, "k", 1000)
        time.sleep(0.5)  # it is hashed behind the put
        restart(daemon, "SIGKILL")
        client.wait_connected(10.0)
        assert check(client, "k", 1000)


def test_what_is_left_can_be_removed(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()

    def clear() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ecd", "clear"],
            env={**os.environ, "ECD_NAME": daemon.name},
            capture_output=True,
            text=True,
        )

    refused = clear()
    assert refused.returncode == 1
    assert "another daemon uses" in refused.stderr
    with Client(daemon.address) as client:
        put(client, "k", 1000)
        assert check(client, "k", 1000)
    assert daemon.terminate() == 0
    assert re.fullmatch(r"removed 6[45][.\d]* MiB\n", clear().stdout)
    assert not daemon.shm.exists()
    assert clear().stdout == "there was nothing to remove\n"


# -- starts that come to nothing -------------------------------------------------------------------


def fail(daemon: Daemon, **settings: str) -> None:
    """Start it with these settings, with which it ends by itself, and take them back."""
    daemon._settings |= settings
    daemon.start(wait=False)
    assert daemon._process is not None
    assert daemon._process.wait(20) == 1, daemon.text()
    for name in settings:
        del daemon._settings[name]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_start_that_comes_to_nothing_leaves_what_it_found(
    make_daemon: MakeDaemon, how: str
) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        fill(client, SIZES)
        if how == "SIGKILL":
            daemon.kill()
        else:
            assert daemon.terminate() == 0
    found = files(daemon, ".pool") + files(daemon, ".index")
    elsewhere = "203.0.113.1:9"  # no address of this machine
    for settings in (
        {"ECD_METRICS_ADDRESS": elsewhere},
        {"ECD_HEALTH_ADDRESS": elsewhere},
        {"ECD_PEER_ADDRESS": elsewhere, "ECD_PEER_TOKEN": "a secret of the test"},
    ):
        fail(daemon, **settings)
        assert files(daemon, ".pool") + files(daemon, ".index") == found
    daemon.start()
    with Client(daemon.address) as client:
        assert all(check(client, key, nbytes) for key, nbytes in SIZES.items())
    daemon.check_nothing_leaked()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_that_is_told_to_end_leaves_what_it_found(
    make_daemon: MakeDaemon, number: signal.Signals
) -> None:
    daemon, sizes = make_daemon(), {"small": 100, "large": MIB}
    for _ in range(20):
        daemon.start()
        with Client(daemon.address) as client:
            fill(client, sizes)
        assert daemon.terminate() == 0
        seen = len(daemon.text())
        daemon.start(wait=False)
        eventually(lambda seen=seen: "metrics on" in daemon.text()[seen:], 20.0)
        os.kill(daemon.pid, number)
        assert daemon._process is not None
        assert daemon._process.wait(20) == 0, daemon.text()
        if "serving on" not in daemon.text()[seen:]:
            break
    else:
        pytest.fail("it always served before the signal reached it")
    daemon.start()
    with Client(daemon.address) as client:
        assert all(check(client, key, nbytes) for key, nbytes in sizes.items())
    daemon.check_nothing_leaked()


def test_a_start_without_memory_for_its_index_leaves_what_it_found(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    place = tmp_path / "shm"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "none", place], check=True)
    try:
        daemon = make_daemon("32MiB", ECD_SHM_DIR=str(place)).start()
        with Client(daemon.address) as client:
            fill(client, SIZES)
        daemon.kill()
        space = os.statvfs(place)
        filler = place / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_bsize - 100_000)
        fail(daemon)
        assert "the pool's index needs" in daemon.text()
        filler.unlink()
        daemon.start()
        with Client(daemon.address) as client:
            assert all(check(client, key, nbytes) for key, nbytes in SIZES.items())
        daemon.close()
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_first_start_that_comes_to_nothing_leaves_nothing(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    fail(daemon, ECD_HEALTH_ADDRESS="203.0.113.1:9")
    assert not daemon.shm.exists()


# -- memory that was spoilt ------------------------------------------------------------------------


def rows(index: mmap.mmap) -> list[int]:
    """The offsets of the rows that list an entry."""
    shape = unpack_index_header(index[:INDEX_HEADER_BYTES])
    assert shape is not None
    starts = range(shape.rows_at, shape.rows_at + 2048 * ROW_BYTES, ROW_BYTES)
    return [at for at in starts if struct.unpack_from("<Q", index, at + 16)[0]]


def flip(memory: mmap.mmap, at: int) -> None:
    memory[at] ^= 1 << random.randrange(8)


def spoil_rows(index: mmap.mmap, pool: mmap.mmap) -> None:
    for at in rows(index)[::3]:
        flip(index, at + 16 + random.randrange(8 * ROW_CHECKSUM_WORD - 16))


def spoil_proofs(index: mmap.mmap, pool: mmap.mmap) -> None:
    for at in rows(index)[::3]:
        flip(index, at + 8 * ROW_CHECKSUM_WORD + random.randrange(8))


def spoil_bytes(index: mmap.mmap, pool: mmap.mmap) -> None:
    for at in rows(index)[::3]:
        offset, nbytes = struct.unpack_from("<QQ", index, at + 24)
        flip(pool, offset + random.randrange(nbytes))


def spoil_everything(index: mmap.mmap, pool: mmap.mmap) -> None:
    index[INDEX_HEADER_BYTES:] = random.randbytes(len(index) - INDEX_HEADER_BYTES)


def lay_rows_over_others(index: mmap.mmap, pool: mmap.mmap) -> None:
    """A row copied whole into another's place: two rows for one extent and one key."""
    first, *others = rows(index)
    for at in others[::3]:
        index[at : at + ROW_BYTES] = index[first : first + ROW_BYTES]


@pytest.mark.parametrize(
    "spoil", [spoil_rows, spoil_proofs, spoil_bytes, spoil_everything, lay_rows_over_others]
)
def test_nobody_sees_what_was_spoilt(
    make_daemon: MakeDaemon, spoil: Callable[[mmap.mmap, mmap.mmap], None]
) -> None:
    daemon = make_daemon().start()
    sizes = {f"k{number}": 1 + 997 * number % 60_000 for number in range(300)}
    with Client(daemon.address) as client:
        fill(client, sizes)
        assert daemon.terminate() == 0
        [index], [pool] = files(daemon, ".index"), files(daemon, ".pool")
        with (
            index.open("r+b") as first,
            pool.open("r+b") as second,
            mmap.mmap(first.fileno(), 0) as one,
            mmap.mmap(second.fileno(), 0) as other,
        ):
            spoil(one, other)
        daemon.start()
        client.wait_connected(10.0)
        found = sum(check(client, key, nbytes) for key, nbytes in sizes.items())
        assert found == (0 if spoil is spoil_everything else 200)
        fill(client, sizes)
        assert all(check(client, key, nbytes) for key, nbytes in sizes.items())
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked()


@pytest.mark.parametrize(
    ("suffix", "nbytes", "why"),
    [
        (".index", 0, None),
        (".index", 100, "another version"),
        (".index", INDEX_HEADER_BYTES + 4096, None),
        (".pool", 0, "are wanted"),
        (".pool", 32 * MIB, "are wanted"),
        (".pool", -1, "not populated"),
        (".sessions", None, None),
    ],
)
def test_a_file_that_is_cut_short_is_a_cold_start(
    make_daemon: MakeDaemon, suffix: str, nbytes: int | None, why: str | None
) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        put(client, "k", 1000)
        assert daemon.terminate() == 0
        [file] = files(daemon, suffix)
        if nbytes is None:
            file.unlink()
        elif nbytes < 0:  # its size stays, its memory goes
            os.truncate(file, 0)
            os.truncate(file, 64 * MIB)
        else:
            os.truncate(file, nbytes)
        daemon.start()
        client.wait_connected(10.0)
        assert client.contains(["k"]) == [False]
        put(client, "k", 1000)
        assert check(client, "k", 1000)
    assert why is None or why in daemon.text()
    assert "Traceback" not in daemon.text()


def test_what_another_version_left_is_not_read(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        put(client, "k", 1000)
        assert daemon.terminate() == 0
        [index] = files(daemon, ".index")
        with index.open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", 99))
        daemon.start()
        client.wait_connected(10.0)
        assert client.contains(["k"]) == [False]
    assert "of another version" in daemon.text()


# -- again and again -------------------------------------------------------------------------------

ENTRIES = 10_000
RESTARTS = int(os.environ.get("WARM_RESTARTS", "8"))
"""Two seconds each: CI has no time for more."""
WORKER = """
import random, sys, time
from ecd_client import Client
from ecd_client.errors import EcdError
address, entries = sys.argv[1], int(sys.argv[2])
chance = random.Random()
counts = {"right": 0, "missed": 0, "away": 0, "put": 0}
with Client(address, connect_timeout=0.0) as client:
    while True:
        number = chance.randrange(entries)
        key, nbytes = f"k{number}", 1 + number * 7919 % 9000
        try:
            item = client.get(key)
            if item is None:
                counts["missed"] += 1
                content = random.Random(key).randbytes(nbytes)
                client.put_bytes(key, content, "uint8", (nbytes,), metadata=key.encode())
                counts["put"] += 1
            else:
                with item:
                    seen = bytes(item.view)
                assert (item.metadata, seen) == (key.encode(), random.Random(key).randbytes(nbytes))
                counts["right"] += 1
        except EcdError:
            counts["away"] += 1
            time.sleep(0.02)
        if counts["right"] % 50 == 0:
            print(counts, flush=True)
"""


@pytest.mark.timeout(600)
def test_restarts_under_load(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Readers compare every byte; a clean restart keeps all, and nothing is ever leaked."""
    daemon = make_daemon("96MiB").start()
    chance = random.Random(7)
    keys = [f"k{number}" for number in range(ENTRIES)]
    with Client(daemon.address) as client:
        for number, key in enumerate(keys):
            data = content(key, 1 + number * 7919 % 9000)
            client.put_bytes(key, data, "uint8", (len(data),), metadata=key.encode())
        eventually(lambda: daemon.status().entries == ENTRIES)
        logs = [tmp_path / f"worker-{number}" for number in range(2)]
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, daemon.address, str(ENTRIES)],
                stdin=subprocess.DEVNULL,
                stdout=log.open("wb"),
                stderr=subprocess.STDOUT,
            )
            for log in logs
        ]
        try:
            for number in range(RESTARTS):
                time.sleep(chance.random() * 0.5)
                restart(daemon, "SIGKILL" if number % 2 else "SIGTERM")
                assert all(worker.poll() is None for worker in workers), logs[0].read_text()[-2000:]
                client.wait_connected(10.0)
                assert missing(client, keys) == []
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        counts = [log.read_text().splitlines()[-1] for log in logs]
        assert all(int(re.findall(r"'right': (\d+)", line)[0]) > 1000 for line in counts), counts
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked(20.0)


WRITER = """
import random, sys, threading, time
from ecd_client import Client
from ecd_client.errors import EcdError
address, name = sys.argv[1:]
stored = []
def put_many(thread):
    number = 0
    while True:
        key = f"{name}-{thread}-{number}"
        try:
            if client.put_bytes(key, random.Random(key).randbytes(3000), "uint8", (3000,),
                                metadata=key.encode(), cost=0.5):
                stored.append(key)
        except EcdError:
            return
        number += 1
        time.sleep(0.0002)
client = Client(address)
client.put_bytes(name, b"", "uint8", (0,))
threads = [threading.Thread(target=put_many, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
print("puts", flush=True)
for thread in threads:
    thread.join()
print(*stored)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_what_was_put_until_the_end_is_there_again(make_daemon: MakeDaemon, how: str) -> None:
    """Every put that returned True is there, up to the moment when its writer sees the end."""
    daemon = make_daemon("256MiB").start()
    for turn in range(4):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, daemon.address, f"{turn}.{number}"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "puts\n"
        time.sleep(0.5)
        os.kill(daemon.pid, getattr(signal, how))
        stored = [key for writer in writers for key in writer.communicate(timeout=20)[0].split()]
        assert daemon._process is not None
        daemon._process.wait(20)
        daemon.start()
        with Client(daemon.address) as client:
            assert missing(client, stored) == []
            assert all(check(client, key, 3000) for key in stored[-100:])
    daemon.check_nothing_leaked()


def test_the_time_to_serve_again_does_not_grow_with_the_bytes(make_daemon: MakeDaemon) -> None:
    """The pool's bytes are verified after the daemon serves again."""
    daemon = make_daemon("1GiB").start()
    with Client(daemon.address) as client:
        for number in range(9):
            put(client, str(number), 100 * MIB)
        assert daemon.terminate() == 0
        daemon.start()
        text = daemon.text()
        serving = text.rindex("serving on")
        eventually(lambda: "took over 9 entries" in daemon.text(), 30.0)
        assert daemon.text().rindex("took over 9 entries") > serving
        client.wait_connected(10.0)
        assert check(client, "3", 100 * MIB)
