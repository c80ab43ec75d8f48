"""Page faults in the path of a copy, on a pool of huge pages and on one of small pages."""

import ctypes
import mmap
import os
import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecd.memory.host import HostPool
from ecd.memory.pool_dir import PoolDir
from ecd_client import Client
from ecd_client.pools import MappedPool, address_of
from ecd_client.values import Extent
from ecd_client.writer import describe_entry
from ecd_proto.findings import COLLAPSES_SINCE, SHMEM_HUGE_PAGES
from support.daemon import WITHOUT_HUGE_PAGES, Daemon
from support.processes import run
from support.waiting import HANG_S, eventually

MIB = 1 << 20
NBYTES = 8 * MIB
SMALL_PAGES = NBYTES // 4096
FEW_FAULTS = SMALL_PAGES // 10


def can_collapse() -> bool:
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return version >= COLLAPSES_SINCE and "[deny]" not in Path(SHMEM_HUGE_PAGES).read_text()


@pytest.fixture(scope="module", params=["huge pages", "small pages"])
def shared_daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("shared"), "256MiB")
    if request.param == "small pages":
        daemon.prefix = WITHOUT_HUGE_PAGES
    elif not can_collapse():
        pytest.skip("this kernel moves no shared memory to huge pages")
    daemon.start()
    yield daemon
    daemon.close()


@pytest.fixture
def daemon(request: pytest.FixtureRequest, unused_daemon: Daemon) -> Daemon:
    pool = unused_daemon.status().pools[0]
    is_huge = "huge pages" in request.node.name
    assert pool.huge_bytes == (pool.pool_bytes if is_huge else 0)
    return unused_daemon


def faults(action: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    action()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_faults_are_counted() -> None:
    with mmap.mmap(-1, NBYTES) as fresh:
        assert faults(lambda: fresh.write(bytes(NBYTES))) > FEW_FAULTS


def test_a_put_and_a_get_take_few_page_faults(daemon: Daemon) -> None:
    data, target = ctypes.create_string_buffer(NBYTES), ctypes.create_string_buffer(NBYTES)
    ctypes.memset(data, 7, NBYTES)
    took: list[int] = []

    def fill(pool: MappedPool, extent: Extent) -> None:
        address = address_of(pool.write_view(extent))
        took.append(faults(lambda: ctypes.memmove(address, data, NBYTES)))

    with Client(daemon.address) as client, Client(daemon.address) as other:
        for number in range(4):
            entry = describe_entry(("default", f"k{number}"), "uint8", (NBYTES,), 0.0, b"")
            assert client._writer.put(entry, fill, HANG_S)
        for number in range(4):
            with other.get(f"k{number}") as item:
                address = item.tensor.data_ptr()
                took.append(faults(lambda a=address: ctypes.memmove(target, a, NBYTES)))
            assert target.raw == data.raw
    assert len(took) == 8
    assert max(took) < FEW_FAULTS


def test_what_is_granted_is_populated_before_it_is_written(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon("256MiB")
    daemon.prefix = WITHOUT_HUGE_PAGES  # huge ones need no more than a call before the copy
    daemon.start()
    with Client(daemon.address) as client:
        for number in range(3):
            client.put_bytes(f"k{number}", bytes(MIB), "uint8", (MIB,))
        pool = client._connection.session().pools.granted
        writer = client._connection.session().puts

        def is_populated() -> bool:
            pieces = [piece for piece in writer._pieces if piece[0] < piece[1]]
            assert pieces
            return all(pool._writable.is_populated(start, end - start) for start, end in pieces)

        eventually(is_populated)


def test_a_pool_that_is_taken_over_gets_huge_pages(make_daemon: Callable[..., Daemon]) -> None:
    if not can_collapse():
        pytest.skip("this kernel moves no shared memory to huge pages")
    daemon = make_daemon("64MiB", ECD_WARM_RESTART="true")
    daemon.prefix = WITHOUT_HUGE_PAGES
    daemon.start()
    data = bytes(range(256)) * 4096
    with Client(daemon.address) as client:
        client.put_bytes("k", data, "uint8", (MIB,))
    assert daemon.terminate() == 0
    daemon.prefix = ()
    daemon.start()
    pool = daemon.status().pools[0]
    assert pool.huge_bytes == pool.pool_bytes
    with Client(daemon.address) as client, client.get("k") as item:
        assert bytes(item.view) == data


def test_doctor_advises_where_pages_are_small(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address, "doctor"]
    done = run(command, capture_output=True, text=True)
    line = next(line for line in done.stdout.splitlines() if "huge pages" in line)
    is_huge = daemon.status().pools[0].huge_bytes > 0
    assert ("100%" in line) == is_huge
    assert ("memory is in pieces" in done.stdout) != is_huge


def test_one_huge_page_that_cannot_be_had_costs_no_other() -> None:
    if not can_collapse():
        pytest.skip("this kernel moves no shared memory to huge pages")
    directory = PoolDir("/dev/shm", f"test-{os.getpid()}-pages", None)
    pool = HostPool(directory, "0" * 32, 64 * MIB, cold=True)
    try:
        for first in range(0, 64 * MIB, 2 * MIB):
            if first != 20 * MIB:  # this piece stays empty, which the kernel refuses
                os.posix_fallocate(pool._fd, first, 1)
        pool._collapse(0, 64 * MIB)
        assert pool.huge_bytes == 62 * MIB
    finally:
        pool.close()


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_memory_may_be_interleaved_in_huge_pages(
    monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """The kernel takes a page's number, modulo the nodes; a huge page is where its first one is."""
    allocate, firsts = os.posix_fallocate, []

    def note(fd: int, offset: int, nbytes: int) -> None:
        if nbytes == 1:
            firsts.append(offset // mmap.PAGESIZE)
        allocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", note)
    directory = PoolDir("/dev/shm", f"test-{os.getpid()}-nodes", None)
    pool = HostPool(directory, "0" * 32, 64 * MIB, cold=True)
    try:
        pool.populate(lambda _: None)
        assert os.fstat(pool._fd).st_size == 64 * MIB
    finally:
        pool.close()
    assert [page * mmap.PAGESIZE // (2 * MIB) for page in firsts] == list(range(32))
    assert set(Counter(page % nodes for page in firsts).values()) == {32 // nodes}


def test_without_a_thread_for_them_pages_are_populated_later(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "ecd-populate":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with Client(daemon.address) as client:
        for number in range(5):
            assert client.put_bytes(f"k{number}", bytes(MIB), "uint8", (MIB,))
        with client.get("k4") as item:
            assert bytes(item.view) == bytes(MIB)
