"""Kills at random moments, and restarts under load: what was put survives, no byte is ever wrong.

A kill comes after a number of puts, reads or lines of code that is drawn by lot. `make test` draws
the same in each run, `make night` others; a test prints its seed, and KILL_SEED gives it again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecd_client import Client
from ecd_client.pools import MappedPool
from ecd_client.values import Extent
from ecd_client.writer import describe_entry
from ecd_proto.shm.index import INDEX_HEADER_BYTES, RECOVERING_WORD, unpack_index_header
from ecd_proto.shm.rows import ROW_BYTES, ROW_CHECKSUM_WORD
from support.daemon import Daemon, changed
from support.processes import child, run
from support.waiting import HANG_S, eventually, stop

KIB, MIB = 1 << 10, 1 << 20
MakeDaemon = Callable[..., Daemon]


def rounds(few: int, many: int) -> pytest.MarkDecorator:
    """How often a test kills: `few` times in `make test`, `many` times at night."""
    night = pytest.param(many, marks=[pytest.mark.night, pytest.mark.timeout(3600)])
    return pytest.mark.parametrize("rounds", [few, night])


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """What draws a test's kills."""
    is_night = request.node.get_closest_marker("night") is not None
    seed = os.environ.get("KILL_SEED") or (str(random.randrange(1 << 32)) if is_night else "1")
    print(f"KILL_SEED={seed}")
    return random.Random(f"{seed} {request.node.originalname}")


WRITER = """
import os, random, sys
from contextlib import suppress
from types import SimpleNamespace
from ecd_client import Client
from ecd_client.errors import EcdError
from ecd_client.writer import describe_entry
address, name, most, again = sys.argv[1:]
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
        with suppress(EcdError):  # of a daemon that has ended the next put tells
            with Client(address, connect_timeout=1.0) as other:  # whose first put is one by calls
                if other._writer.put(what, copy_to, 60.0):
                    returned(key)
    elif client._writer.put(what, copy_to, 60.0):
        returned(key)

with Client(address) as client:
    for number in range(int(most)):
        try:
            put(client, number)
        except EcdError:
            if again != "again":
                break
            client.wait_connected(HANG_S)
""".replace("HANG_S", str(HANG_S))
READER = """
import os, random, sys
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
                    client.wait_connected(HANG_S)
                    continue
                if item is not None:
                    with item:
                        seen = bytes(item.view)
                    assert seen == random.Random(key).randbytes(int(key.split("-")[2])), key
                    right += 1
        print(right, flush=True)
""".replace("HANG_S", str(HANG_S))


STEPS = "leftovers.py find", "leftovers.py entries", "recovery.py run", "leftovers.py remove"
"""Functions of a takeover, in this order."""


def dies(step: str, lines: int) -> tuple[str, ...]:
    """The command of a daemon that kills itself so many lines of code after a step has begun.

    Lines of `ecd.memory` count, which takes over what the last daemon left.
    """
    return changed(
        "import os, signal, sys",
        "import ecd.daemon",
        f"left, step = {lines}, {step!r}",
        "def look(frame, event, _):",
        "    global left, step",
        "    place = f'{frame.f_code.co_filename} {frame.f_code.co_name}'",
        "    if '/ecd/memory/' not in place or not place.endswith(step):",
        "        return None",
        "    step = ''",
        "    left -= event == 'line'",
        "    if not left:",
        "        os.kill(os.getpid(), signal.SIGKILL)",
        "    return look",
        "sys.settrace(look)",
    )


def start_and_kill(daemon: Daemon, chance: random.Random) -> None:
    """Start the daemon, and kill it amid its takeover, or right after it."""
    seen = len(daemon.text())
    daemon.command = dies(chance.choice(STEPS), int(2 ** chance.uniform(0, 14)))
    daemon.start(wait=False)
    process = daemon._process
    assert process is not None
    eventually(lambda: process.poll() is not None or "took over" in daemon.text()[seen:])
    daemon.kill()
    assert process.returncode == -signal.SIGKILL, daemon.text()[seen:]
    daemon.command = Daemon.command


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


@contextlib.contextmanager
def processes(*commands: tuple[str, ...], logs: list[Path]) -> Iterator[list[subprocess.Popen]]:
    """Each command's process, with its output in a log and its errors beside that."""
    with contextlib.ExitStack() as stack:
        started = []
        for command, log in zip(commands, logs, strict=True):
            output, errors = (
                stack.enter_context(path.open("ab")) for path in (log, errors_of(log))
            )
            about = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
            started.append(stack.enter_context(child([sys.executable, "-c", *command], **about)))
        yield started


def errors_of(log: Path) -> Path:
    """What the process of a log has said of its errors, beside the log."""
    return log.with_name(f"{log.name}.errors")


def check_alive(running: list[subprocess.Popen], logs: list[Path]) -> None:
    errors = [errors_of(log).read_text()[-2000:] for log in logs]
    assert all(process.poll() is None for process in running), errors


def lines(log: Path) -> list[str]:
    """The whole lines of a log, the last one excluded that may be written still."""
    return log.read_text().rpartition("\n")[0].splitlines()


def returned(logs: list[Path]) -> list[str]:
    """Keys whose put has returned True."""
    return [key for log in logs for key in lines(log)]


def reads(log: Path) -> int:
    """How many entries a reader has read, all of them right."""
    return int((lines(log) or ["0"])[-1])


# -- kills ----------------------------------------------------------------------------------------


@rounds(2, 20)
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "SIGKILL, and to the writers"])
def test_what_was_put_until_the_end_is_there_again(
    make_daemon: MakeDaemon, tmp_path: Path, chance: random.Random, how: str, rounds: int
) -> None:
    """Every put that has returned True, up to the moment when its writer sees the end."""
    daemon = make_daemon("192MiB", ECD_WARM_RESTART="true").start()
    total = kept = 0
    for number in range(rounds):
        logs = [tmp_path / f"{number}.{writer}" for writer in range(3)]
        commands = [(WRITER, daemon.address, log.name, "800", "once") for log in logs]
        puts = chance.randrange(100, 1600)
        with processes(*commands, logs=logs) as writers:
            eventually(lambda logs=logs: all(returned([log]) for log in logs), "all are connected")
            eventually(lambda logs=logs, puts=puts: len(returned(logs)) >= puts)
            if how == "SIGTERM":
                assert daemon.terminate() == 0
            else:
                daemon.kill()
            if how != "SIGKILL, and to the writers":
                assert [writer.wait(HANG_S) for writer in writers] == [0, 0, 0]
        daemon.start()
        keys = returned(logs)
        with Client(daemon.address, namespace="n") as client:
            there = [check(client, key) for key in keys]
        total, kept = total + len(keys), kept + sum(there)
        assert len(keys) >= puts
        daemon.evict_all()
    print(f"{kept} of {total} puts were kept")
    assert kept == total if how == "SIGTERM" else kept >= 0.999 * total
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked()


@rounds(2, 20)
def test_a_kill_while_the_pool_is_turned_over(
    make_daemon: MakeDaemon, tmp_path: Path, chance: random.Random, rounds: int
) -> None:
    """Readers compare every byte of what was put last, before and after each kill."""
    daemon = make_daemon("16MiB").start()
    logs = [tmp_path / f"{writer}" for writer in range(2)]
    for log in logs:
        log.touch()
    commands = [(WRITER, daemon.address, log.name, "1000000", "again") for log in logs]
    commands.append((READER, daemon.address, *map(str, logs)))
    outputs = [*logs, tmp_path / "reader"]
    with processes(*commands, logs=outputs) as running:
        for number in range(2 * rounds):
            puts, read = len(returned(logs)), reads(outputs[-1])
            more = chance.randrange(50, 800)
            eventually(
                lambda puts=puts, read=read, more=more: (
                    len(returned(logs)) >= puts + more and reads(outputs[-1]) > read
                )
            )
            daemon.kill()
            if number % 2:  # and once more while it starts
                start_and_kill(daemon, chance)
            daemon.start()
            check_alive(running, outputs)
        eventually(lambda: reads(outputs[-1]) > 100, "the reader reads")
        check_alive(running, outputs)
    with Client(daemon.address, namespace="n") as client:
        assert sum(check(client, key) for key in returned(logs)[::3]) > 0
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked()


@rounds(4, 100)
def test_restarts_under_load(
    make_daemon: MakeDaemon, tmp_path: Path, chance: random.Random, rounds: int
) -> None:
    """Readers compare every byte; entries with checksums all stay, however the daemon ends."""
    daemon = make_daemon("32MiB", ECD_WARM_RESTART="true").start()
    keys = [f"k-{number}-{1 + number * 7919 % 9000}" for number in range(3000)]
    listed, outputs = tmp_path / "keys", [tmp_path / f"reader-{number}" for number in range(2)]
    listed.write_text("\n".join(keys))
    with Client(daemon.address, namespace="n") as client:
        assert all(put(client, key) for key in keys)
        daemon.wait_idle("hashed")
        commands = [(READER, daemon.address, str(listed))] * 2
        with processes(*commands, logs=outputs) as running:
            for number in range(rounds):
                least = [reads(log) + chance.randrange(1, 1500) for log in outputs]
                eventually(lambda least=least: all(map(int.__ge__, map(reads, outputs), least)))
                if number % 2:
                    daemon.kill()
                else:
                    assert daemon.terminate() == 0
                daemon.start()
                client.wait_connected(HANG_S)
                assert not [key for key in keys if not check(client, key)]
                check_alive(running, outputs)
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked()


@rounds(6, 60)
def test_kills_one_after_the_other_lose_nothing(
    make_daemon: MakeDaemon, chance: random.Random, rounds: int
) -> None:
    """Each start may be killed before, while and after it takes over what the last one left."""
    daemon = make_daemon().start()
    keys = [f"k-{number}-{1 + 997 * number % 20_000}" for number in range(3000)]
    with Client(daemon.address, namespace="n") as client:
        assert all(put(client, key) for key in keys)
        daemon.kill()
        for _ in range(rounds):
            start_and_kill(daemon, chance)
        daemon.start()
        client.wait_connected(HANG_S)
        assert sum(check(client, key) for key in keys) >= 0.999 * len(keys)
    assert "Traceback" not in daemon.text()
    daemon.check_nothing_leaked()


# -- what a killed daemon leaves -------------------------------------------------------------------


def test_a_put_that_nobody_has_heard_of_is_kept(make_daemon: MakeDaemon) -> None:
    """Done, in granted memory, the last grant or one before it; not even its bell was heard."""
    daemon = make_daemon().start()
    copying, go_on = threading.Event(), threading.Event()
    old, new = "old-0-4096", [f"new-{number}-{4096 * number}" for number in range(5)]

    def copy_to(pool: MappedPool, extent: Extent) -> None:
        copying.set()
        assert go_on.wait(HANG_S)
        pool.write_view(extent)[:] = content(old)

    with Client(daemon.address, namespace="n") as client:
        for number in range(3):
            assert put(client, f"first-{number}-4096")
        what = describe_entry(("n", old), "uint8", (4096,), 0.5, old.encode())
        outcomes: list[bool] = []
        writer = threading.Thread(
            target=lambda: outcomes.append(client._writer.put(what, copy_to, HANG_S))
        )
        writer.start()
        assert copying.wait(HANG_S)
        daemon.evict_all()  # takes all grants back
        for number in range(3, 6):
            assert put(client, f"first-{number}-4096")
        eventually(lambda: daemon.status().pools[0].granted_bytes > 8192)
        stop(daemon.pid)
        go_on.set()
        writer.join(HANG_S)
        assert outcomes == [True]
        assert all(put(client, key) for key in new)
        daemon.kill()
        daemon.start()
        client.wait_connected(HANG_S)
        assert client.contains([old, *new]) == [True] * 6
        assert all(check(client, key) for key in (old, *new))
        assert not any(client.contains([f"first-{number}-4096" for number in range(3)]))
    daemon.check_nothing_leaked()


def forget_proofs(daemon: Daemon) -> None:
    """Clear all checksums, as if the daemon had been killed before it read any bytes."""
    [index] = daemon.shm.glob("*.index")
    with index.open("r+b") as file:
        shape = unpack_index_header(file.read(INDEX_HEADER_BYTES))
        assert shape is not None
        for row in range(2048):
            file.seek(shape.rows_at + row * ROW_BYTES + 8 * ROW_CHECKSUM_WORD)
            file.write(bytes(8))


@contextlib.contextmanager
def kept_aside(daemon: Daemon) -> Iterator[Callable[[], None]]:
    """Keep a dead daemon's files; the result puts them back, as if they had never been removed."""
    with tempfile.TemporaryDirectory() as made:
        aside = Path(made)
        for path in daemon.shm.iterdir():
            if path.suffix not in (".bell", ".attach", ".pool", ""):
                run(["cp", "--sparse=always", path, aside], check=True)
        [stem] = {path.stem for path in aside.iterdir()}

        def put_back() -> None:
            for path in aside.iterdir():
                if not (daemon.shm / path.name).exists():
                    run(["cp", "--sparse=always", path, daemon.shm], check=True)
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
            daemon.wait_idle("drained")
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
