"""The disk tier: what memory evicts is read back, whatever happens to the disk, and never wrong.

`simulation/test_disk.py` has how long one that fails, hangs or is slow is waited for.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ecd.core.demotion import BLOCK_BYTES
from ecd.core.model.types import Content, Key
from ecd.memory.disk.disk_dir import DiskDir
from ecd.memory.disk.disk_format import file_name
from ecd_client import Client
from ecd_client.session.channel import open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.cli import cli
from support.clock import SetClock
from support.daemon import Daemon, changed
from support.processes import run
from support.waiting import HANG_S, eventually

MIB = 1 << 20
MakeDaemon = Callable[..., Daemon]
DiskDaemon = Callable[..., Daemon]
FAULTS = Path(__file__).parents[1] / "support" / "disk_faults.c"
LARGE = 100_000


def patient(seconds: float) -> tuple[str, ...]:
    """The command of a daemon that waits so long for a read from disk."""
    return changed("from ecd.memory.disk import disk_reads", f"disk_reads.PATIENCE_S = {seconds}")


PATIENT, IMPATIENT = patient(HANG_S), patient(0.2)
"""A machine that stands still has no disk that hangs, except where the test hangs it."""


@pytest.fixture
def make_disk(make_daemon: MakeDaemon, tmp_path: Path) -> DiskDaemon:
    """Daemons with a disk tier, whose budget does not matter unless a test says so."""

    def make(pool: str = "8MiB", **settings: str) -> Daemon:
        (tmp_path / "disk").mkdir(exist_ok=True)
        daemon = make_daemon(
            pool,
            **{
                "ECD_DISK_POOL_BYTES": "1GiB",
                "ECD_DISK_DIR": str(tmp_path / "disk"),
                "ECD_DISK_WRITE_BYTES_PER_S": "1GB",
                "ECD_FETCH_TIMEOUT_S": str(HANG_S),
                "ECD_WARM_RESTART": "false",
                **settings,
            },
        )
        daemon.command = PATIENT
        return daemon

    return make


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes disks fail."""
    if shutil.which("gcc") is None:
        pytest.skip("NO DISK THAT FAILS IS TRIED: there is no gcc")
    library = tmp_path_factory.mktemp("faults") / "disk_faults.so"
    flags = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    run(["gcc", *flags, "-o", library, FAULTS, "-ldl"], check=True)
    return library


class FaultyDisk:
    """A daemon whose disk fails as told."""

    def __init__(self, daemon: Daemon, directory: Path) -> None:
        self.daemon, self._directory = daemon, directory

    def begin(self, fault: str) -> None:
        (self._directory / fault).touch()

    def end(self, fault: str) -> None:
        (self._directory / fault).unlink()


MakeFaulty = Callable[..., FaultyDisk]


@pytest.fixture
def make_faulty(make_disk: DiskDaemon, preloaded: Path, tmp_path: Path) -> MakeFaulty:
    def make(pool: str = "8MiB", command: tuple[str, ...] = PATIENT, **settings: str) -> FaultyDisk:
        directory = tmp_path / "faults"
        directory.mkdir()
        daemon = make_disk(pool, DISK_FAULTS=str(directory), LD_PRELOAD=str(preloaded), **settings)
        daemon.command = command
        return FaultyDisk(daemon.start(), directory)

    return make


@pytest.fixture
def faulty(make_faulty: MakeFaulty) -> FaultyDisk:
    return make_faulty()


def content(key: str, nbytes: int) -> bytes:
    """The one right content of a key."""
    return random.Random(key).randbytes(nbytes)


def put(client: Client, key: str, nbytes: int = LARGE, cost: float = 0.5) -> None:
    about = {"metadata": key.encode(), "cost": cost}
    client.put_bytes(key, content(key, nbytes), "uint8", (nbytes,), **about)


def found(client: Client, sizes: dict[str, int]) -> set[str]:
    """The keys that are in memory or on disk; each has its own bytes."""
    keys, there = list(sizes), set[str]()
    for start in range(0, len(keys), 20):
        some = keys[start : start + 20]
        for key, future in zip(
            some, client.get_async(some, HANG_S, only_if_written=True), strict=True
        ):
            item = future.result(HANG_S)
            if item is not None:
                with item:
                    assert bytes(item.view) == content(key, sizes[key]), key
                    assert (item.metadata, item.cost_s) == (key.encode(), 0.5)
                there.add(key)
    return there


def directory(daemon: Daemon) -> Path:
    return Path(daemon.status().disk.path)


def files(daemon: Daemon) -> set[str]:
    return {path.name for path in directory(daemon).glob("*.entry")}


def on_disk(daemon: Daemon, keys: Iterable[str], namespace: str = "default") -> set[str]:
    names = files(daemon)
    return {key for key in keys if file_name(Key(namespace, key)) in names}


def wait_known(daemon: Daemon) -> None:
    """Wait until the start has found what lies on disk."""
    eventually(lambda: daemon.text().rstrip().split("serving on")[-1].count("found in"))


def fill(daemon: Daemon, count: int = 120) -> dict[str, int]:
    """Put more than memory holds, no faster than it is written; all but the last are on disk."""
    sizes = {f"k{number}": LARGE for number in range(count)}
    with Client(daemon.address) as client:
        put_all(daemon, client, sizes)
    return sizes


def put_all(daemon: Daemon, client: Client, keys: Iterable[str], cost: float = 0.5) -> None:
    for number, key in enumerate(keys):
        put(client, key, cost=cost)
        if number % 10 == 9:
            daemon.wait_idle("written")
    daemon.wait_idle("written")


def away(client: Client, keys: Iterable[str]) -> list[str]:
    """Those that are not in memory."""
    keys = sorted(keys)
    return [key for key, there in zip(keys, client.contains(keys), strict=True) if not there]


@pytest.mark.parametrize("count", [3_000, pytest.param(30_000, marks=pytest.mark.night)])
def test_many_entries_pass_through_a_part_of_their_size(make_disk: DiskDaemon, count: int) -> None:
    daemon = make_disk("2MiB", ECD_WARM_RESTART="true").start()
    sizes = {f"k{number}": 1 + 997 * number % 8000 for number in range(count)}
    sizes["k0"] = 0
    with Client(daemon.address) as client:
        others = itertools.count()

        def is_writing() -> bool:
            put(client, f"other{next(others)}", 8000)  # which is written a moment later
            return not daemon.status().idle.written

        for number, key in enumerate(sizes):
            put(client, key, sizes[key])
            if number == 0.9 * count:
                eventually(is_writing)
                daemon.kill()
                daemon.start()
                client.wait_connected(HANG_S)
                wait_known(daemon)
            elif number % 100 == 99:
                daemon.wait_idle("written")
        daemon.wait_idle("written")
        kept = on_disk(daemon, sizes)
        assert len(kept) > 0.75 * count, "all but those of the kill, and what memory holds"
        for how in ("SIGTERM", "SIGKILL", "--cold"):
            if how == "SIGKILL":
                daemon.kill()
            else:
                assert daemon.terminate() == 0
            daemon.command = (*PATIENT, *(["--cold"] if how == "--cold" else []))
            daemon.start()
            client.wait_connected(HANG_S)
            wait_known(daemon)
            assert kept <= on_disk(daemon, sizes), "nothing goes while there is room"
            kept = on_disk(daemon, sizes)
            some = dict(random.Random(how).sample([*sizes.items()], 600))
            asked = sizes if how == "--cold" else some
            assert kept & asked.keys() <= found(client, asked), how
        daemon.wait_idle("written")
        disk = daemon.status().disk
        assert disk.reads > 500
        assert not any(disk.failures.values())
        assert disk.used_bytes == sum(
            path.stat().st_size for path in directory(daemon).glob("*.entry")
        )
    assert not list(directory(daemon).glob("*.new"))
    assert evict(daemon).disk_failures == 0
    daemon.check_nothing_leaked()


def test_an_entry_comes_back_as_it_was(make_disk: DiskDaemon) -> None:
    daemon = make_disk(ECD_EVICTION="lru").start()  # by value the small ones would stay
    with Client(daemon.address, namespace="n" * 1000) as client:
        shapes = {
            "float32": (3, 5, 7),
            "bfloat16": (0, 4),
            "int8": (4096,),
            "uint8": (2 * MIB + 1,),
        }
        for number, (dtype, shape) in enumerate(shapes.items()):
            nbytes = {"float32": 4, "bfloat16": 2}.get(dtype, 1)
            for side in shape:
                nbytes *= side
            said = {
                "metadata": dtype.encode() * (200 * number),
                "cost": 0.1,
            }
            client.put_bytes(dtype * 120, content(dtype, nbytes), dtype, shape, **said)
        names = [dtype * 120 for dtype in shapes]
        with Client(daemon.address) as other:  # they are next then, and not yet evicted
            put_all(daemon, other, [f"more{number}" for number in range(45)])
        assert len(on_disk(daemon, names, "n" * 1000)) == 4
        fill(daemon)
        assert not any(client.contains(names))
        for number, (dtype, shape) in enumerate(shapes.items()):
            assert client.get_now(dtype * 120) == (None, True), "a call may find it"
            with client.get(dtype * 120, HANG_S) as item:
                assert (str(item.dtype), item.shape) == (dtype, shape)
                assert bytes(item.view) == content(dtype, len(item.view))
                assert (item.metadata, item.cost_s) == (dtype.encode() * (200 * number), 0.1)
        assert client.contains(names) == [True] * 4
    daemon.wait_idle("written")
    for path in (directory(daemon), *directory(daemon).iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_without_its_setting_there_is_none(daemon: Daemon, client: Client) -> None:
    assert not daemon.status().HasField("disk")
    assert "ecd_disk" not in daemon.metrics()
    assert client.get_now("k") == (None, False)


def test_the_tier_keeps_within_its_size(make_disk: DiskDaemon) -> None:
    """What is written ahead and one burst of puts fit into it: no file goes before its entry."""
    daemon = make_disk(ECD_DISK_POOL_BYTES="5MiB").start()
    sizes = fill(daemon)
    disk = daemon.status().disk
    assert 4 * MIB < disk.used_bytes <= 5 * MIB
    assert disk.evictions > 0
    assert disk.lost == disk.skipped["budget"] == 0
    daemon.kill()
    daemon.start()
    wait_known(daemon)
    with Client(daemon.address) as client:
        assert on_disk(daemon, sizes) == found(client, sizes)
    assert 'ecd_disk_failures_total{kind="corrupt"} 0.0' in daemon.metrics()


def test_the_tier_keeps_within_its_budget(make_disk: DiskDaemon) -> None:
    """One write overdraws it, so that the next one comes in a hundred seconds."""
    daemon = make_disk(ECD_DISK_WRITE_BYTES_PER_S="1kB").start()
    with Client(daemon.address) as client:
        for number in range(200):
            put(client, f"k{number}")
    eventually(lambda: daemon.status().disk.skipped["budget"] > 0)
    eventually(lambda: daemon.status().disk.lost > 0)
    most = 2 * (LARGE + 2 * BLOCK_BYTES)
    assert 0 < daemon.status().disk.written_bytes <= most, "two write at one time"


@pytest.mark.parametrize("when", ["running", "at the start"])
def test_a_file_that_is_not_what_was_written_is_a_miss(make_disk: DiskDaemon, when: str) -> None:
    daemon = make_disk().start()
    sizes = fill(daemon)
    place, kept = directory(daemon), sorted(on_disk(daemon, sizes))
    with Client(daemon.address) as client:
        gone = away(client, kept)
    if when == "at the start":
        assert daemon.terminate() == 0
    paths = [place / file_name(Key("default", key)) for key in gone[:8]]
    damage(paths[0], BLOCK_BYTES + 5)
    damage(paths[1], paths[1].stat().st_size // BLOCK_BYTES * BLOCK_BYTES - BLOCK_BYTES)
    damage(paths[2], 60)  # its header
    os.truncate(paths[3], paths[3].stat().st_size - BLOCK_BYTES)
    os.truncate(paths[4], 10)
    paths[5].write_bytes(paths[6].read_bytes())  # another key's
    paths[7].unlink()
    (place / "not ours").write_bytes(b"x")
    (place / ("0" * 32 + ".entry")).write_bytes(bytes(BLOCK_BYTES))
    if when == "at the start":
        daemon.start()
        wait_known(daemon)
    with Client(daemon.address) as client:
        client.wait_connected(HANG_S)
        got = found(client, {key: sizes[key] for key in gone})
    wrong = {*gone[:6], gone[7]}
    assert got == set(gone) - wrong
    disk = daemon.status().disk
    assert disk.failures["corrupt"] >= 5
    assert not disk.reads_rest, "a wrong file says nothing of the others"
    eventually(lambda: not on_disk(daemon, wrong))
    assert (place / "not ours").exists()


def test_a_name_is_short_and_in_one_line_in_the_log(make_disk: DiskDaemon) -> None:
    daemon = make_disk(ECD_EVICTION="lru").start()
    forged = "\n2026-11-27 ERROR ecd.daemon: forged \x1b[31m" + "x" * 300
    with Client(daemon.address, name=forged) as client:
        put_all(daemon, client, [forged])
        fill(daemon)
        damage(directory(daemon) / file_name(Key("default", forged)), BLOCK_BYTES + 5)
        assert not found(client, {forged: LARGE})
        client._connection.session()._outbox.put(pb.SessionRequest())
        eventually(lambda: "passed over" in daemon.text())
    assert all(map(str.isprintable, daemon.text().splitlines()))
    for what in ("on disk is removed", "passed over"):
        [line] = [line for line in daemon.text().splitlines() if what in line]
        assert "\\n2026-11-27 ERROR ecd.daemon: forged \\x1b[31mx" in line
        assert "x" * 129 not in line


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_what_is_erased_is_erased_on_disk(make_disk: DiskDaemon) -> None:
    daemon = make_disk(ECD_EVICTION="lru").start()
    secrets = [f"s{number}" for number in range(20)]
    with Client(daemon.address, namespace="secret") as client:
        put_all(daemon, client, secrets)
    sizes, written = fill(daemon), len(secrets)
    assert len(on_disk(daemon, secrets, "secret")) == written
    reply = evict(daemon, namespace="secret", dry_run=True)
    assert (reply.disk_entries, reply.disk_bytes) == (written, written * LARGE)
    reply = evict(daemon, namespace="secret")
    assert (reply.disk_entries, reply.disk_failures) == (written, 0)
    assert not on_disk(daemon, secrets, "secret")
    with Client(daemon.address, namespace="secret") as client:
        assert not found(client, dict.fromkeys(secrets, LARGE))
    [key, *_] = on_disk(daemon, sizes)
    reply = daemon.evict(pb.Key(namespace="default", mm_hash=key))
    assert reply.disk_entries == 1
    daemon.kill()
    daemon.start()
    wait_known(daemon)
    kept = on_disk(daemon, sizes)
    with Client(daemon.address) as client:
        assert found(client, sizes) == kept == kept - {key}
    assert daemon.evict_all().disk_entries == len(kept)
    assert not files(daemon)


def evict(daemon: Daemon, **request: object) -> pb.EvictReply:
    with open_channel(daemon.address) as channel:
        return pb_grpc.CacheStub(channel).Evict(pb.EvictRequest(**request), timeout=HANG_S)


def test_what_is_erased_while_it_is_read_or_written_stays_away(faulty: FaultyDisk) -> None:
    daemon = faulty.daemon
    sizes = fill(daemon)
    with Client(daemon.address) as client:
        [key, *_] = away(client, on_disk(daemon, sizes))
        faulty.begin("hang-read")
        [future] = client.get_async([key], HANG_S, only_if_written=True)
        eventually(lambda: daemon.status().pools[0].reserved_bytes > 0)
        faulty.begin("hang-write")
        put(client, "late")
        assert client.get_now("late")[0].close() is None
        for number in range(100):
            put(client, f"more{number}")
        eventually(lambda: list(directory(daemon).glob("*.new")), "some are being written")
        evicting = evict(daemon)
        assert evicting.disk_entries > 0
        faulty.end("hang-read")
        faulty.end("hang-write")
        assert future.result(HANG_S) is None
        assert daemon.status().entries == 0
        assert not found(client, sizes)
    daemon.wait_idle("written")
    assert not list(directory(daemon).glob("*.[en]*")), "no file is left"
    daemon.check_nothing_leaked()


def test_what_is_erased_after_its_file_went_for_room_stays_away(make_faulty: MakeFaulty) -> None:
    """A read under way has the file open still."""
    faulty = make_faulty("4MiB", ECD_DISK_POOL_BYTES="6MiB", ECD_EVICTION="lru")
    daemon = faulty.daemon
    sizes = fill(daemon)
    with Client(daemon.address) as client:
        [key, *_] = away(client, on_disk(daemon, sizes))
        faulty.begin("hang-read")
        [future] = client.get_async([key], HANG_S, only_if_written=True)
        eventually(lambda: daemon.status().pools[0].reserved_bytes > 0)
        put_all(daemon, client, [f"x{number}" for number in range(120)])
        assert not on_disk(daemon, [key])
        assert daemon.status().pools[0].reserved_bytes > 0
        assert not future.done()
        evict(daemon)
        faulty.end("hang-read")
        assert future.result(HANG_S) is None
        assert client.contains([key]) == [False]


def test_files_that_are_not_known_yet_are_erased_too(make_disk: DiskDaemon, tmp_path: Path) -> None:
    daemon, pipe = make_disk().start(), tmp_path / "pipe"
    fill(daemon)
    kept = len(files(daemon))
    daemon.kill()
    os.mkfifo(pipe)
    daemon.command = changed(
        "from ecd.memory.disk import disk_files",
        "disk_files.KNOWN_S = disk_files.REMOVAL_S = 0.2",
        "look_at = disk_files.DiskFiles._look_at",
        "def waits(files, names):",
        f"    open({str(pipe)!r}).read()",
        "    return look_at(files, names)",
        "disk_files.DiskFiles._look_at = waits",
    )
    daemon.start()
    eventually(lambda: evict(daemon).disk_failures == kept, "all are listed, none is known")
    pipe.write_text("")
    daemon.wait_idle("written")
    assert not files(daemon)
    daemon.kill()
    daemon.command = PATIENT
    daemon.start()
    wait_known(daemon)
    assert daemon.status().disk.entries == 0


def test_a_file_that_cannot_be_given_its_name_leaves_nothing(faulty: FaultyDisk) -> None:
    daemon = faulty.daemon
    faulty.begin("full-rename")
    with Client(daemon.address) as client:
        put_all(daemon, client, [f"k{number}" for number in range(120)])
    assert daemon.status().disk.failures["full"] >= 3
    assert not list(directory(daemon).glob("*.[en]*"))
    assert daemon.status().disk.used_bytes == 0
    assert "disk_pool_bytes is" not in daemon.text(), "there is room for it"


def test_what_is_evicted_on_request_is_not_lost_to_the_tier(make_disk: DiskDaemon) -> None:
    daemon = make_disk().start()
    with Client(daemon.address) as client:
        for number in range(20):
            put(client, f"k{number}")
    assert evict(daemon).entries == 20
    fill(daemon)
    disk, told = daemon.status().disk, daemon.status().counters.evictions
    assert told["requested"] == 20
    assert disk.lost == 0
    assert 0 < disk.kept <= told["capacity"] + told["watermark"]


def test_operators_see_it_and_are_told_of_a_file_that_cannot_be_removed(faulty: FaultyDisk) -> None:
    daemon = faulty.daemon
    fill(daemon)
    kept = len(files(daemon))
    shown = cli(daemon, "status").stdout
    assert str(directory(daemon)) in shown.replace("\n", "").replace(" ", "")
    assert f"{kept} entries" in shown
    faulty.begin("fail-remove")
    done = cli(daemon, "evict", "--all", "--yes")
    assert done.returncode == 1
    assert f"{kept} on disk" in done.stdout
    assert f"{kept} files of the disk tier could not be removed" in done.stderr
    assert daemon.status().disk.failures["remove"] == kept
    faulty.end("fail-remove")
    assert cli(daemon, "evict", "--all", "--yes").returncode == 0, "they are tried again"
    assert not files(daemon)


@pytest.mark.parametrize("fault", ["fail-write", "full-write", "hang-write"])
def test_a_disk_that_takes_no_writes_costs_the_tier(faulty: FaultyDisk, fault: str) -> None:
    daemon = faulty.daemon
    sizes = fill(daemon)
    kept = on_disk(daemon, sizes)
    faulty.begin(fault)
    with Client(daemon.address) as client:
        for number in range(150):
            put(client, f"n{number}")
        assert client.contains(["n149"]) == [True]
        if fault != "hang-write":
            daemon.wait_idle("written")
            assert daemon.status().disk.writes_rest
            kind = "full" if fault == "full-write" else "write"
            assert daemon.status().disk.failures[kind] >= 3
            assert "writes to disk failed" in daemon.text()
            assert not list(directory(daemon).glob("*.new"))
        assert kept <= found(client, sizes), "what was written is there"
        put(client, "last")
    faulty.end(fault)
    daemon.check_nothing_leaked()


@pytest.mark.parametrize("fault", ["fail-read", "hang-read"])
def test_a_disk_that_gives_nothing_back_is_a_miss_and_rests(
    make_faulty: MakeFaulty, fault: str
) -> None:
    faulty = make_faulty(command=IMPATIENT if fault == "hang-read" else PATIENT)
    daemon = faulty.daemon
    sizes = fill(daemon)
    with Client(daemon.address) as client:
        gone = away(client, on_disk(daemon, sizes))
        faulty.begin(fault)
        assert not found(client, dict.fromkeys(gone[:40], LARGE))
        disk = daemon.status().disk
        assert disk.reads_rest
        failures = disk.failures["slow" if fault == "hang-read" else "read"]
        assert 3 <= failures <= 20, "those that were asked for before the tier rested"
        assert client.get("none") is None
        put(client, gone[0])
        assert found(client, {gone[0]: LARGE}) == {gone[0]}
    assert on_disk(daemon, gone) == set(gone), "its files stay"
    if fault == "hang-read":
        assert daemon.status().pools[0].reserved_bytes > 0, "set aside until the reads return"
    faulty.end(fault)
    daemon.check_nothing_leaked()


def test_a_disk_that_is_full_costs_the_tier(make_disk: DiskDaemon, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    mounted = f'mkdir -p {place}; mount -t tmpfs -o size=3m none {place} && exec "$@"'
    if run(["unshare", "--mount", "sh", "-c", mounted, "sh", "true"]).returncode:
        pytest.skip("NO FULL DISK IS TRIED: this user mounts nothing")
    daemon = make_disk()
    daemon.prefix = ("unshare", "--mount", "sh", "-c", mounted, "sh")
    daemon.start()
    sizes = fill(daemon)
    with Client(daemon.address) as client:
        disk = daemon.status().disk
        assert disk.failures["full"] > 0
        assert 0 < disk.used_bytes <= 3 * MIB
        assert disk.entries <= len(found(client, sizes))
        more = itertools.count()

        def rests() -> bool:
            put(client, f"more{next(more)}")
            return daemon.status().disk.is_full

        eventually(rests)
        advised = cli(daemon, "doctor").stdout
        assert "in use; the disk is full: writes rest\n" in advised
        assert f"free space on the disk that has {disk.path}, or lower ECD_DISK_P" in advised
        eventually(rests)
        assert " full; the disk is full: writes rest" in cli(daemon, "status").stdout
    log = " ".join(daemon.text().split())
    warned = (
        f"disk_pool_bytes is 1 GiB, and the file system of {disk.path}, mounted at {place}, has "
    )
    assert f"{warned}3 MiB free beside the 0 bytes of the tier" in log
    daemon.check_nothing_leaked()


@pytest.mark.parametrize("fault", ["full-write", "fail-write"])
def test_a_disk_that_takes_nothing_at_the_start_is_read(faulty: FaultyDisk, fault: str) -> None:
    daemon = faulty.daemon
    sizes = fill(daemon)
    kept = on_disk(daemon, sizes)
    faulty.begin(fault)
    assert daemon.terminate() == 0
    daemon.start()
    wait_known(daemon)
    with Client(daemon.address) as client:
        assert kept <= found(client, sizes) == on_disk(daemon, sizes)


def test_a_directory_that_does_not_exist_is_not_made(make_disk: DiskDaemon, tmp_path: Path) -> None:
    """Its parent may be where a disk is to be mounted: then the root file system would fill."""
    daemon = make_disk(ECD_DISK_DIR=str(tmp_path / "mount" / "ecd"))
    (tmp_path / "mount").mkdir()
    daemon.start(wait=False)
    eventually(lambda: "ecd cannot serve" in daemon.text())
    assert (
        f"disk_dir {tmp_path}/mount/ecd does not exist, and ecd does not make it" in daemon.text()
    )
    assert f"Mount the disk, or make the directory: install -d -m 0700 -o {os.geteuid()} " in (
        daemon.text()
    )
    assert not list((tmp_path / "mount").iterdir())
    assert not daemon.shm.exists()


@pytest.mark.parametrize("kind", ["read-only", "others write", "another user's", "a file"])
def test_a_directory_that_cannot_be_used_is_an_error_that_says_what_to_do(
    make_disk: DiskDaemon, tmp_path: Path, kind: str
) -> None:
    daemon = make_disk()
    place = tmp_path / "disk"
    own = place / f"ecd-{daemon.name}"
    own.mkdir(parents=True)
    if kind == "read-only":
        mounted = f'mount -t tmpfs -o ro none {place} && exec "$@"'
        if run(["unshare", "--mount", "sh", "-c", mounted, "sh", "true"]).returncode:
            pytest.skip("this user mounts nothing")
        daemon.prefix = ("unshare", "--mount", "sh", "-c", mounted, "sh")
    elif kind == "others write":
        own.chmod(0o777)
    elif kind == "a file":
        own.rmdir()
        own.write_text("")
    else:
        if os.geteuid() != 0:
            pytest.skip("only root makes another user's directory")
        os.chown(own, 12345, 12345)
    daemon.start(wait=False)
    eventually(lambda: "ecd cannot serve" in daemon.text())
    said = daemon.text()
    assert str(own) in said
    assert "ECD_DISK_DIR" in said
    assert not daemon.shm.exists()


def test_two_daemons_do_not_share_a_directory(make_disk: DiskDaemon, tmp_path: Path) -> None:
    first = make_disk().start()
    second = make_disk()
    second.name = first.name
    second.start(wait=False)
    eventually(lambda: "ecd cannot serve" in second.text())
    assert (
        f"another daemon (pid {first.pid}) uses {tmp_path}/disk/ecd-{first.name}" in second.text()
    )


def test_clear_removes_it(make_disk: DiskDaemon, tmp_path: Path) -> None:
    daemon = make_disk().start()
    fill(daemon, 100)
    place = directory(daemon)
    environment = {**os.environ, "ECD_NAME": daemon.name, "ECD_DISK_DIR": str(place.parent)}
    command = [*Daemon.command[:-1], "clear"]
    said = run(command, env=environment, capture_output=True, text=True)
    assert said.returncode == 1, "the daemon runs"
    assert files(daemon)
    assert daemon.terminate() == 0
    said = run(command, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert not place.exists()


def test_a_ttl_holds_on_disk_and_counts_from_the_put_through_a_restart(
    make_disk: DiskDaemon,
) -> None:
    """A file's time is that of the put: here half of the puts were half an hour ago."""
    daemon = make_disk(ECD_NAMESPACE_TTLS="default=1h").start()
    sizes, place = fill(daemon), directory(daemon)
    assert daemon.terminate() == 0
    keys = [key for key in sizes if (place / file_name(Key("default", key))).exists()]
    old, young = set(keys[::2]), set(keys[1::2])
    for key in old:
        path = place / file_name(Key("default", key))
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 1800 * 10**9))
    daemon.start()
    wait_known(daemon)
    with Client(daemon.address) as client:
        [some, *_] = old
        assert found(client, {some: LARGE}) == {some}, "and so it is in memory, too"
    assert on_disk(daemon, sizes) == old | young
    assert daemon.terminate() == 0
    daemon._settings["ECD_NAMESPACE_TTLS"] = "default=10m"
    daemon.start()
    wait_known(daemon)
    with Client(daemon.address) as client:
        assert found(client, dict.fromkeys(keys, LARGE)) == young
    eventually(lambda: daemon.status().disk.expired == len(old))
    daemon.wait_idle("written")
    assert on_disk(daemon, sizes) == young, "what is too old leaves the disk"


def test_a_file_tells_the_next_daemon_how_old_its_entry_is(tmp_path: Path) -> None:
    clock, key = SetClock(), Key("n", "k")
    directory = DiskDir(tmp_path, "ages", clock)
    name, block = file_name(key), memoryview(mmap.mmap(-1, BLOCK_BYTES))
    directory.write(name, key, Content("uint8", (BLOCK_BYTES,), BLOCK_BYTES), block, age_s=1000.0)
    directory.publish(name)
    clock.at_s += 70.0
    found, [path] = directory.read_header(name), tmp_path.rglob(name)
    assert found.age_s == 1070.0
    assert found.idle_s == clock.unix_s() - path.stat().st_ctime
    directory.close()
