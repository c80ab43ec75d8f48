"""A daemon that is restarted serves what it had; what is in doubt is a miss, never wrong bytes."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ecd_client import Client
from ecd_proto.shm.index import INDEX_HEADER_BYTES, unpack_index_header
from ecd_proto.shm.rows import ROW_BYTES, ROW_CHECKSUM_WORD
from support.cli import as_json, cli
from support.daemon import Daemon, changed, memory_of
from support.processes import run
from support.waiting import HANG_S, eventually

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


def check_all(daemon: Daemon, sizes: dict[str, int]) -> None:
    with Client(daemon.address) as client:
        assert all(check(client, key, nbytes) for key, nbytes in sizes.items())


def files(daemon: Daemon, suffix: str) -> list[Path]:
    return sorted(daemon.shm.glob(f"*{suffix}"))


def end(daemon: Daemon, how: str) -> None:
    if how == "SIGKILL":
        daemon.kill()
    else:
        assert daemon.terminate() == 0


def restart(daemon: Daemon, how: str, *flags: str) -> str:
    """End the daemon and start it again; the log until it ended."""
    end(daemon, how)
    before = daemon.text()
    daemon.command = (*Daemon.command, *flags)
    daemon.start()
    return before


SIZES = {"large": 3 * MIB + 5, "empty": 0}
SIZES |= {f"k{number}": 1 + 997 * number % 60_000 for number in range(300)}
SIZES = dict(random.Random(1).sample([*SIZES.items()], len(SIZES)))


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_what_was_stored_is_there_again(make_daemon: MakeDaemon, how: str) -> None:
    """It is listed in the order in which it was stored; what was evicted stays away.

    The daemon serves before it has verified any of it.
    """
    daemon, evicted = make_daemon().start(), [f"evicted {number}" for number in range(300)]
    with Client(daemon.address) as client:
        fill(client, dict.fromkeys(evicted, 20_000))
        daemon.evict_all()
        fill(client, SIZES)
        first, keys = client.incarnation, [*SIZES]
        for life in range(2):
            daemon.wait_idle("hashed")
            seen = len(restart(daemon, how))
            client.wait_connected(HANG_S)
            assert client.incarnation != first
            if life == 0:  # before a client asks for some, which are verified first then
                daemon.wait_idle("hashed")
                listed = [entry.key.mm_hash for entry in daemon.entries()]
                assert listed == keys[:100], "a page of them"
            assert client.contains(["large", "none"]) == [True, False]
            assert all(check(client, key, nbytes) for key, nbytes in SIZES.items())
            assert not any(client.contains(evicted))
            daemon.wait_idle("hashed")
            text = daemon.text()[seen:]
            assert text.index("serving on") < text.index(f"took over {len(keys)} entries")
            keys.append(f"of life {life}")
            put(client, keys[-1], 100)
            assert not client.put_bytes("k0", b"x", "uint8", (1,)), "it is there already"
        assert all(check(client, f"of life {life}", 100) for life in range(2))
    if how == "SIGTERM":
        left = rf"30\d entries and 6[45][.\d]* MiB in {daemon.shm} are left for the next start"
        assert re.search(left, daemon.text())
    assert daemon.evict_all().entries == len(keys)
    daemon.check_nothing_leaked()


def test_an_eviction_after_the_start_means_what_was_taken_over(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon("16MiB").start()
    with Client(daemon.address) as client:
        fill(client, {str(number): 100_000 for number in range(40)})
    assert daemon.terminate() == 0
    daemon.command = changed(
        "import asyncio",
        "from ecd.memory.recovery import Recovery",
        "Recovery.run = lambda self: asyncio.Event().wait()",  # nothing is verified unasked
    )
    daemon.start()
    assert daemon.evict_all().entries == 40
    assert daemon.status().entries == 0
    daemon.check_nothing_leaked()


def waits_for_readers(wait_s: float) -> tuple[str, ...]:
    """A daemon that waits so long for readers of the last one, and logs each look at them."""
    return changed(
        "from ecd.memory import leftovers",
        f"leftovers.WAIT_S, look = {wait_s}, leftovers.is_any_session_locked",
        "def looked(fd):",
        "    found = look(fd)",
        "    print('readers:', found, flush=True)",
        "    return found",
        "leftovers.is_any_session_locked = looked",
    )


def test_a_reader_of_the_old_life_is_waited_for(make_daemon: MakeDaemon) -> None:
    """One that comes only now finds no page to pin in."""
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        put(client, "k", MIB)
        daemon.wait_idle("hashed")
        [pins] = files(daemon, ".pins")
        item = client.get("k")
        assert item is not None
        daemon.kill()
        seen = len(daemon.text())
        daemon.command = waits_for_readers(HANG_S)
        daemon.start(wait=False)
        eventually(lambda: daemon.text().count("readers: True") > 10, "it looks again and again")
        assert not pins.exists()
        assert pins.with_suffix(".puts").exists()
        assert "waiting for clients" in daemon.text()[seen:]
        assert "serving on" not in daemon.text()[seen:]
        asked = cli(daemon, "status")
        assert asked.returncode == 3
        assert "is starting or stopping; wait: its log says what for" in asked.stderr
        assert bytes(item.view) == content("k", MIB)
        item.close()
        daemon.wait_serving()
        client.wait_connected(HANG_S)
        assert check(client, "k", MIB)
    eventually(lambda: "took over 1 entry" in daemon.text())
    assert not pins.with_suffix(".puts").exists()


def test_one_that_does_not_let_go_costs_the_cache_and_nothing_else(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        put(client, "k", MIB)
        item = client.get("k")
        assert item is not None
        daemon.kill()
        daemon.command = waits_for_readers(0.1)
        daemon.start()
        client.wait_connected(HANG_S)
        assert client.contains(["k"]) == [False]
        for number in range(50):
            put(client, str(number), MIB)
        assert bytes(item.view) == content("k", MIB)
        item.close()
    assert "some client has not let go of its pool" in daemon.text()


def test_a_start_may_be_cold(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    for flags, settings, why in (
        (("--cold",), {}, "serving on"),
        ((), {"ECD_HOST_POOL_BYTES": "8MiB"}, "only 8 MiB are wanted"),
        ((), {"ECD_WARM_RESTART": "false"}, "serving on"),
    ):
        with Client(daemon.address) as client:
            put(client, "k", 1000)
            daemon._settings |= settings
            seen = len(restart(daemon, "SIGTERM", *flags))
            client.wait_connected(HANG_S)
            assert client.contains(["k"]) == [False], (flags, settings)
        assert why in daemon.text()[seen:]
        assert daemon.text()[seen:].count("INFO ecd.memory.host: removing") == 1
        daemon.check_nothing_leaked()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_pool_grows_with_its_entries(make_daemon: MakeDaemon, how: str) -> None:
    """A client that reads stays connected, and what is new holds an entry larger than before."""
    daemon = make_daemon("8MiB").start()
    with Client(daemon.address) as client:
        for number, size in enumerate((24, 40), start=1):
            put(client, f"k{number}", 3 * MIB)
            assert check(client, f"k{number}", 3 * MIB)
            daemon._settings["ECD_HOST_POOL_BYTES"] = f"{size}MiB"
            restart(daemon, how)
            client.wait_connected(HANG_S)
            assert all(check(client, f"k{one}", 3 * MIB) for one in range(1, number + 1))
            put(client, f"large{number}", 9 * MIB)
            assert check(client, f"large{number}", 9 * MIB)
            [file] = {path.stat().st_ino: path for path in files(daemon, ".pool")}.values()
            assert file.stat().st_size == daemon.status().pools[0].pool_bytes == size * MIB
    daemon.check_nothing_leaked()


def ended_with_an_entry(make_daemon: MakeDaemon) -> Daemon:
    """A daemon that has left a pool of 8 MiB, with `k` of 3 MiB in it."""
    daemon = make_daemon("8MiB").start()
    with Client(daemon.address) as client:
        put(client, "k", 3 * MIB)
        assert check(client, "k", 3 * MIB)
    assert daemon.terminate() == 0
    return daemon


@pytest.mark.parametrize("size", ["64MiB", "8MiB"])
def test_a_daemon_killed_while_its_pool_grows_loses_nothing(
    make_daemon: MakeDaemon, size: str
) -> None:
    """The next one goes on, or gives back what no entry has used."""
    daemon = ended_with_an_entry(make_daemon)
    daemon.command = changed(
        "import os, signal",
        "from ecd.memory.host import HostPool",
        "populate = HostPool._populate_chunk",
        "def killed(pool, offset, nbytes):",
        "    populate(pool, offset, nbytes // 2)",
        "    os.kill(os.getpid(), signal.SIGKILL)",
        "HostPool._populate_chunk = killed",
    )
    daemon._settings["ECD_HOST_POOL_BYTES"] = "64MiB"
    daemon.start(wait=False)
    daemon._process.wait(HANG_S)
    daemon.command = Daemon.command
    daemon._settings["ECD_HOST_POOL_BYTES"] = size
    daemon.start()
    check_all(daemon, {"k": 3 * MIB})
    assert {file.stat().st_size for file in files(daemon, ".pool")} == {int(size[:-3]) * MIB}


def test_a_pool_that_cannot_grow_is_left_as_it_was(make_daemon: MakeDaemon) -> None:
    daemon = ended_with_an_entry(make_daemon)
    without_memory = changed(
        "import errno, os",
        "allocate = os.posix_fallocate",
        "def fail(fd, offset, nbytes):",
        "    if offset >= 32 << 20: raise OSError(errno.ENOSPC, 'no space')",
        "    allocate(fd, offset, nbytes)",
        "os.posix_fallocate = fail",
    )
    for size, command in (("8TiB", Daemon.command), ("64MiB", without_memory)):
        daemon.command = command
        daemon._settings["ECD_HOST_POOL_BYTES"] = size
        daemon.start(wait=False)
        assert daemon._process.wait(HANG_S) == 1
    assert "memory ran out" in daemon.text()
    [file] = files(daemon, ".pool")
    assert file.stat().st_size == 8 * MIB
    daemon.command = Daemon.command
    daemon._settings["ECD_HOST_POOL_BYTES"] = "8MiB"
    daemon.start()
    check_all(daemon, {"k": 3 * MIB})


def test_files_stay_for_the_next_start_alone(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    assert daemon.terminate() == 0
    assert {path.suffix for path in daemon.shm.iterdir()} == {
        ".pool",
        ".index",
        ".sessions",
        ".pins",
        "",  # the lock, which the process had until its end
    }
    daemon.start()
    os.kill(daemon.pid, signal.SIGINT)
    eventually(lambda: not daemon.shm.exists(), "Ctrl-C leaves nothing")


def test_the_pool_is_left_where_the_daemon_is_started_again(make_daemon: MakeDaemon) -> None:
    supervised = {"NOTIFY_SOCKET": "/nowhere/notify"}
    cases = [
        ({}, (), False),
        ({}, ("--warm",), True),
        (supervised, (), True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (), True),
        ({**supervised, "ECD_WARM_RESTART": "false"}, (), False),
    ]
    daemons = [make_daemon("4MiB", **{"ECD_WARM_RESTART": "auto", **each[0]}) for each in cases]
    for daemon, (_, flags, _) in zip(daemons, cases, strict=True):
        daemon.command = (*Daemon.command, *flags)
        daemon.start(wait=False)
    for daemon, case in zip(daemons, cases, strict=True):
        daemon.wait_serving()
        assert daemon.terminate() == 0
        assert daemon.shm.exists() is case[2], case


def test_a_daemon_takes_over_after_a_kill_though_it_would_leave_nothing(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon(ECD_WARM_RESTART="auto").start()
    with Client(daemon.address) as client:
        put(client, "k", 1000)
        daemon.wait_idle("hashed")
        restart(daemon, "SIGKILL")
        client.wait_connected(HANG_S)
        assert check(client, "k", 1000)


def test_what_is_left_can_be_removed(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()

    def clear() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ecd", "clear"]
        environ = {**os.environ, "ECD_NAME": daemon.name}
        return run(command, env=environ, capture_output=True, text=True)

    refused = clear()
    assert refused.returncode == 1
    assert f"not removed: a running daemon uses {daemon.shm}. Stop it first" in refused.stderr
    with Client(daemon.address) as client:
        put(client, "k", 1000)
        assert check(client, "k", 1000)
    assert daemon.terminate() == 0
    assert re.fullmatch(rf"removed {daemon.shm}, 6[45][.\d]* MiB\n", clear().stdout)
    assert not daemon.shm.exists()
    assert clear().stdout == "there was nothing to remove\n"


# -- starts that come to nothing -------------------------------------------------------------------

ELSEWHERE = "203.0.113.1:9"
"""No address of this machine."""


def fail(daemon: Daemon, **settings: str) -> None:
    """Start it with these settings, with which it ends by itself, and take them back."""
    daemon._settings |= settings
    daemon.start(wait=False)
    assert daemon._process is not None
    assert daemon._process.wait(HANG_S) == 1, daemon.text()
    for name in settings:
        del daemon._settings[name]


def test_a_start_that_comes_to_nothing_leaves_what_it_found(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        fill(client, SIZES)
    to_peers = {"ECD_PEER_ADDRESS": ELSEWHERE, "ECD_PEER_TOKEN": "a secret of the test"}
    for how, settings in (
        ("SIGTERM", [{"ECD_METRICS_ADDRESS": ELSEWHERE}, {"ECD_HEALTH_ADDRESS": ELSEWHERE}]),
        ("SIGKILL", [to_peers]),
    ):
        end(daemon, how)
        found = files(daemon, ".pool") + files(daemon, ".index")
        for each in settings:
            fail(daemon, **each)
            assert files(daemon, ".pool") + files(daemon, ".index") == found
        daemon.start()
        check_all(daemon, SIZES)
    daemon.check_nothing_leaked()


def test_a_start_that_is_told_to_end_leaves_what_it_found(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    daemon, sizes, pipe = make_daemon().start(), {"small": 100, "large": MIB}, tmp_path / "pipe"
    os.mkfifo(pipe)
    with Client(daemon.address) as client:
        fill(client, sizes)
    assert daemon.terminate() == 0
    daemon.command = changed(
        "from ecd.memory.host import HostPool",
        f"HostPool.populate = lambda *_: open({str(pipe)!r}).read()",  # until it is told to end
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        seen = len(daemon.text())
        daemon.start(wait=False)
        process = daemon._process
        eventually(lambda seen=seen: "populating /" in daemon.text()[seen:])
        os.kill(daemon.pid, number)
        eventually(lambda seen=seen: "stopping" in daemon.text()[seen:])

        def has_ended(process: subprocess.Popen = process) -> bool:
            with contextlib.suppress(OSError):  # nobody has opened it yet, or any more
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            return process.poll() is not None

        eventually(has_ended)
        assert process.returncode == 0, daemon.text()[seen:]
        assert "serving on" not in daemon.text()[seen:]
    daemon.command = Daemon.command
    daemon.start()
    check_all(daemon, sizes)
    daemon.check_nothing_leaked()


def test_the_next_daemon_gets_the_pool_when_the_process_of_the_last_has_ended(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """Until then Mooncake may write to it what it still reads from other nodes."""
    gate, next_one = tmp_path / "gate", make_daemon()
    os.mkfifo(gate)
    daemon = make_daemon()
    daemon.command = changed(
        "import os, ecd.commands",
        "end_process = ecd.commands.end_process",
        f"wait = lambda: os.read(os.open({str(gate)!r}, os.O_RDONLY), 1)",
        "ecd.commands.end_process = lambda code: wait() and end_process(code)",
    )
    with Client(daemon.start().address) as client:
        put(client, "k", 1000)
    next_one.name, next_one.shm = daemon.name, daemon.shm
    with ThreadPoolExecutor(1) as side:
        ended = side.submit(daemon.terminate)
        with gate.open("wb") as opened:  # once all but the process has ended
            next_one.start(wait=False)
            eventually(lambda: f"another daemon (pid {daemon.pid}) uses" in next_one.text())
            opened.write(b"x")
        assert ended.result(HANG_S) == 0
    check_all(next_one.start(), {"k": 1000})


def test_nothing_is_to_be_removed_where_nothing_else_lies(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    with memory_of(tmp_path / "shm", "64m") as place:
        daemon = make_daemon("64MiB", ECD_SHM_DIR=str(place))
        daemon.shm = place / daemon.shm.name
        fail(daemon)
        assert "make the file system larger" in daemon.text()
        assert "what else lies" not in daemon.text()
        daemon.pool = "62MiB"
        daemon.start()

        def advised() -> str:
            found = {each["check"]: each for each in as_json(daemon, "doctor")}
            return found["shared memory"]["advice"]

        assert advised().startswith("make it larger, or")
        daemon.close()
        daemon.pool = "56MiB"
        (place / "filler").write_bytes(bytes(6 << 20))
        daemon.start()
        assert advised().startswith("remove what else lies there, make it larger, or")
        daemon.close()


def test_a_start_without_memory_for_its_index_leaves_what_it_found(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    with memory_of(tmp_path / "shm", "128m") as place:
        daemon = make_daemon("32MiB", ECD_SHM_DIR=str(place)).start()
        with Client(daemon.address) as client:
            fill(client, SIZES)
        daemon.wait_idle("hashed")
        daemon.kill()
        space = os.statvfs(place)
        filler = place / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_bsize - 100_000)
        fail(daemon)
        assert "the pool's index needs" in daemon.text()
        assert f"remove what else lies in {place}, or make the file system" in daemon.text()
        filler.unlink()
        daemon.start()
        check_all(daemon, SIZES)
        daemon.close()


def test_a_first_start_that_comes_to_nothing_leaves_nothing(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    fail(daemon, ECD_HEALTH_ADDRESS=ELSEWHERE)
    assert not daemon.shm.exists()


# -- memory that was spoilt ------------------------------------------------------------------------


CHANCE = random.Random(1)


def rows(index: mmap.mmap) -> list[int]:
    """The offsets of the rows that list an entry."""
    shape = unpack_index_header(index[:INDEX_HEADER_BYTES])
    assert shape is not None
    starts = range(shape.rows_at, shape.rows_at + 2048 * ROW_BYTES, ROW_BYTES)
    return [at for at in starts if struct.unpack_from("<Q", index, at + 16)[0]]


def flip(memory: mmap.mmap, at: int) -> None:
    memory[at] ^= 1 << CHANCE.randrange(8)


def spoil_rows(index: mmap.mmap, pool: mmap.mmap) -> None:
    for at in rows(index)[::3]:
        flip(index, at + 16 + CHANCE.randrange(8 * ROW_CHECKSUM_WORD - 16))


def spoil_proofs(index: mmap.mmap, pool: mmap.mmap) -> None:
    for at in rows(index)[::3]:
        flip(index, at + 8 * ROW_CHECKSUM_WORD + CHANCE.randrange(8))


def spoil_bytes(index: mmap.mmap, pool: mmap.mmap) -> None:
    for at in rows(index)[::3]:
        offset, nbytes = struct.unpack_from("<QQ", index, at + 24)
        flip(pool, offset + CHANCE.randrange(nbytes))


def spoil_everything(index: mmap.mmap, pool: mmap.mmap) -> None:
    index[INDEX_HEADER_BYTES:] = CHANCE.randbytes(len(index) - INDEX_HEADER_BYTES)


def lay_rows_over_others(index: mmap.mmap, pool: mmap.mmap) -> None:
    """A row copied whole into another's place: two rows for one extent and one key."""
    first, *others = rows(index)
    for at in others[::3]:
        index[at : at + ROW_BYTES] = index[first : first + ROW_BYTES]


SPOILS = spoil_rows, spoil_proofs, spoil_bytes, spoil_everything, lay_rows_over_others


def test_nobody_sees_what_was_spoilt(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("16MiB").start()
    sizes = {f"k{number}": 1 + 997 * number % 30_000 for number in range(300)}
    with Client(daemon.address) as client:
        for spoil in (
            spoil_rows,
            spoil_proofs,
            spoil_bytes,
            spoil_everything,
            lay_rows_over_others,
        ):
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
            client.wait_connected(HANG_S)
            found = sum(check(client, key, nbytes) for key, nbytes in sizes.items())
            assert found == (0 if spoil is spoil_everything else 200), spoil
        fill(client, sizes)
        assert all(check(client, key, nbytes) for key, nbytes in sizes.items())
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked()


def lose(file: Path) -> None:
    """Its size stays, its memory goes."""
    nbytes = file.stat().st_size
    os.truncate(file, 0)
    os.truncate(file, nbytes)


def write_version(file: Path) -> None:
    with file.open("r+b") as index:
        index.seek(8)
        index.write(struct.pack("<I", 99))


LOST: list[tuple[str, Callable[[Path], None], str]] = [
    (".index", lambda file: os.truncate(file, 0), "serving on"),
    (".index", lambda file: os.truncate(file, 100), "of another version"),
    (".index", write_version, "of another version"),
    (".index", lambda file: os.truncate(file, INDEX_HEADER_BYTES + 4096), "serving on"),
    (".pool", lambda file: os.truncate(file, 0), "was truncated"),
    (".pool", lambda file: os.truncate(file, 4 * MIB), "was truncated"),
    (".pool", lose, "not populated"),
    (".sessions", Path.unlink, "serving on"),
]


def test_a_file_that_is_cut_short_or_of_another_version_is_a_cold_start(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon("8MiB").start()
    with Client(daemon.address) as client:
        for suffix, spoil, why in LOST:
            put(client, "k", 1000)
            assert check(client, "k", 1000)
            assert daemon.terminate() == 0
            [file] = files(daemon, suffix)
            spoil(file)
            seen = len(daemon.text())
            daemon.start()
            client.wait_connected(HANG_S)
            assert client.contains(["k"]) == [False], (suffix, why)
            assert why in daemon.text()[seen:], suffix
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked()
