"""The memory that an ended daemon leaves is found, and removed."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ecd_client import Client
from support.daemon import Daemon, changed
from support.processes import child, run
from support.users import MALLORY, UsersDaemon, like_dev_shm, needs_root
from support.waiting import HANG_S, eventually, stop

MakeDaemon = Callable[..., Daemon]
MIB = 1 << 20


@pytest.fixture
def place() -> Iterator[Path]:
    """A /dev/shm of the test's own, so that it sees and clears nobody else's."""
    with like_dev_shm() as directory:
        yield directory


@pytest.fixture
def make_daemon(make_daemon: MakeDaemon, place: Path) -> MakeDaemon:
    def make(**settings: str) -> Daemon:
        daemon = make_daemon("16MiB", **{"ECD_SHM_DIR": str(place), **settings})
        daemon.shm = place / daemon.shm.name
        return daemon

    return make


def ecd(
    place: Path, *arguments: str, stdin: int = subprocess.DEVNULL, **environ: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ecd", *arguments]
    environ = {**os.environ, "ECD_SHM_DIR": str(place), **environ}
    return run(command, env=environ, capture_output=True, text=True, stdin=stdin)


def leave(daemon: Daemon) -> Daemon:
    """The daemon, killed with its pool in memory."""
    daemon.start().kill()
    return daemon


def grow_old(daemon: Daemon, age_s: float) -> None:
    """Make its directory older than a file that is made now."""
    with tempfile.NamedTemporaryFile(dir=daemon.shm.parent) as made:
        os.utime(daemon.shm, (os.stat(made.name).st_mtime - age_s,) * 2)


# -- clearing it -----------------------------------------------------------------------------------


def test_clear_all_frees_what_ended_and_leaves_what_runs(
    make_daemon: MakeDaemon, place: Path
) -> None:
    runs, first, second = make_daemon().start(), leave(make_daemon()), leave(make_daemon())
    (place / "ecd-of-somebody").mkdir()
    (place / "ecd-of-somebody" / "file").touch()
    done = ecd(place, "clear", "--all", "--yes")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    ended = sorted((first, second), key=lambda daemon: str(daemon.shm))
    for daemon, line in zip(ended, lines, strict=False):
        assert re.fullmatch(re.escape(f"removed {daemon.shm}, ") + r"1[67][.\d]* MiB", line)
        assert not daemon.shm.exists()
    assert re.fullmatch(r"removed 3[234][.\d]* MiB in all", lines[2])
    assert len(lines) == 3
    assert runs.shm.exists()
    assert (place / "ecd-of-somebody" / "file").exists()
    with Client(runs.address) as client:
        assert client.put_bytes("k", b"x", "uint8", (1,))
    assert ecd(place, "clear", "--all").stdout == "there was nothing to remove\n"


def test_clear_takes_a_name_and_answers_programs(make_daemon: MakeDaemon, place: Path) -> None:
    runs, first, second = make_daemon().start(), leave(make_daemon()), leave(make_daemon())
    [said] = json.loads(ecd(place, "clear", "--name", first.name, "--json").stdout)
    assert said["name"] == first.name
    assert 16 << 20 < said["freed_bytes"] < 32 << 20
    [said] = json.loads(ecd(place, "clear", "--all", "--yes", "--json").stdout)
    assert said["name"] == second.name
    refused = ecd(place, "clear", "--name", runs.name, "--json")
    assert refused.returncode == 1
    assert f"a running daemon uses {runs.shm}. Stop it" in json.loads(refused.stdout)[0]["error"]
    assert ecd(place, "clear", "--name", "../up").returncode == 2


def test_clear_all_asks_first(make_daemon: MakeDaemon, place: Path) -> None:
    left = [leave(make_daemon()), leave(make_daemon())]
    refused = ecd(place, "clear", "--all")
    assert refused.returncode == 2
    assert "Not a terminal: add --yes" in refused.stderr
    assert all(str(each.shm) in refused.stderr for each in left)
    error = json.loads(ecd(place, "clear", "--all", "--json").stderr)
    assert (error["exit_code"], "add --yes" in error["error"]) == (2, True)
    shown = ecd(place, "clear", "--all", "--dry-run")
    assert shown.returncode == 0
    for each in left:
        said = rf"would remove {each.shm}, 1[67][.\d]* MiB, of root \(uid 0\), since 20"
        assert re.search(said, shown.stdout)
    assert re.search(r"would remove 3[234][.\d]* MiB in all\n$", shown.stdout)
    for answer, is_removed in (("n", False), ("y", True)):
        ours, theirs = pty.openpty()
        os.write(ours, f"{answer}\n".encode())
        done = ecd(place, "clear", "--all", stdin=theirs)
        assert (done.returncode == 0) == is_removed
        assert re.search(r"Remove 3[234][.\d]* MiB\?", done.stderr)
        assert [each.shm.exists() for each in left] == [not is_removed] * 2
        os.close(ours)
        os.close(theirs)


def test_the_sum_of_what_is_removed_is_that_of_its_list(
    make_daemon: MakeDaemon, place: Path, tmp_path: Path
) -> None:
    """A pool that is being taken over has two names, and its memory counts once."""
    disk = {"ECD_DISK_POOL_BYTES": "64MiB", "ECD_DISK_DIR": str(tmp_path)}
    daemon = make_daemon(ECD_WARM_RESTART="true", ECD_DISK_WRITE_BYTES_PER_S="1GB", **disk).start()
    with Client(daemon.address) as client:
        for number in range(30):
            client.put_bytes(f"{number}", bytes(MIB), "uint8", (MIB,), cost=1.0)
    daemon.wait_idle("written")
    clear = partial(ecd, place, "clear", "--json", ECD_DISK_DIR=str(tmp_path))
    runs = clear("--name", daemon.name, "--dry-run")
    assert "a running daemon uses" in json.loads(runs.stdout)[0]["error"]
    daemon.kill()
    daemon.command = changed(
        "import asyncio",
        "from ecd.memory.recovery import Recovery",
        "async def never(recovery): await asyncio.Event().wait()",
        "Recovery.run = never",
    )
    daemon.start().kill()
    assert len(list(daemon.shm.glob("*.pool"))) == 2
    would = json.loads(clear("--name", daemon.name, "--dry-run").stdout)
    assert [each["path"] for each in would] == [str(daemon.shm), f"{tmp_path}/ecd-{daemon.name}"]
    assert 16 * MIB <= would[0]["nbytes"] < 20 * MIB, "once"
    assert would[1]["nbytes"] > MIB
    assert not any(each["freed_bytes"] for each in would)
    removed = json.loads(clear("--all", "--yes").stdout)
    assert [each | {"freed_bytes": 0} for each in removed] == would
    assert all(each["freed_bytes"] == each["nbytes"] for each in removed)
    assert not daemon.shm.exists()
    assert not (tmp_path / f"ecd-{daemon.name}").exists()


def test_a_start_removes_what_has_been_left_for_long(make_daemon: MakeDaemon) -> None:
    old, young, runs = leave(make_daemon()), leave(make_daemon()), make_daemon().start()
    grow_old(old, 4000.0)
    grow_old(young, 3000.0)
    grow_old(runs, 4000.0)
    said = make_daemon().start().text()
    assert not old.shm.exists()
    assert young.shm.exists()
    assert runs.shm.exists()
    assert re.search(f"a daemon that has ended left {young.shm}, 1[67][.0-9]* MiB, of ", said)
    assert f"ecd clear --name {young.name}" in said
    assert re.search(f"removed {old.shm}, 1[67][.0-9]* MiB", said)
    assert str(runs.shm) not in said


def test_a_start_takes_over_its_own_name_however_old(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ECD_WARM_RESTART="true").start()
    with Client(daemon.address) as client:
        client.put_bytes("k", b"x", "uint8", (1,))
    assert daemon.terminate() == 0
    grow_old(daemon, 1e6)
    daemon.start()
    with Client(daemon.address) as client:
        assert client.contains(["k"]) == [True]


def test_a_running_daemon_keeps_its_directory_young(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    daemon.command = changed("import ecd_proto.leftovers", "ecd_proto.leftovers.TOUCH_S = 0.1")
    young = daemon.start().shm.stat().st_mtime
    grow_old(daemon, 1e6)
    eventually(lambda: daemon.shm.stat().st_mtime >= young, "it is touched")


@needs_root
def test_another_users_is_left_to_it(make_daemon: MakeDaemon, place: Path, tmp_path: Path) -> None:
    others = UsersDaemon(place, tmp_path, MALLORY).start()
    others.kill()
    os.utime(others.shm, (1, 1))
    daemon = make_daemon().start()
    assert others.shm.exists()
    said = f"left {others.shm}, 1[67][.0-9]* MiB, of uid {MALLORY}, since 1970"
    assert re.search(said, daemon.text())


# -- saying so -------------------------------------------------------------------------------------


def doctor(daemon: Daemon) -> dict[str, str]:
    command = [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address]
    done = run([*command, "doctor", "--json"], capture_output=True, text=True)
    [found] = [each for each in json.loads(done.stdout) if each["check"] == "left in memory"]
    return found


def test_a_name_that_no_daemon_can_have_is_not_told(make_daemon: MakeDaemon, place: Path) -> None:
    names = ["x\n2026 ERROR forged", "x; rm -r forged", "\x1b[2J", "x" * 65]
    directories = [place / f"ecd-{name}" for name in names]
    for directory in directories:
        directory.mkdir()
        (directory / "ab.pool").write_bytes(b"x")
    text = make_daemon().start().text()
    assert "that has ended left" not in text
    assert not [name for name in names if name in text]
    assert ecd(place, "clear", "--all").stdout == "there was nothing to remove\n"
    assert all(directory.exists() for directory in directories)


def test_doctor_says_what_is_left_and_what_to_type(make_daemon: MakeDaemon, place: Path) -> None:
    daemon = make_daemon().start()
    assert doctor(daemon)["state"] == "ok"
    first, second = leave(make_daemon()), leave(make_daemon())
    found = doctor(daemon)
    assert found["state"] == "look"
    for left in (first, second):
        said = rf"{left.shm}, 1[67][.\d]* MiB, of root \(uid 0\), since 20"
        assert re.search(said, found["found"])
        assert f"ECD_SHM_DIR={place} ecd clear --name {left.name}" in found["advice"]
    assert "ecd clear --all" in found["advice"]
    assert daemon.name not in found["found"]


WITHOUT_PATIENCE = changed("from ecd.memory import host", "host.SPACE_WAIT_S = 0.1")
"""A daemon that waits for no room."""
HOLDER = """
import signal, sys
from ecd_client import Client
with Client(sys.argv[1]) as client:
    client.put_bytes("k", b"x", "uint8", (1,))
    item = client.get("k")
    print("holds", flush=True)
    signal.pause()
"""


@needs_root
def test_a_start_without_room_names_who_holds_the_old_pool(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """A stopped client with an item keeps the old pool's memory, and there is none for two."""
    shm = tmp_path / "shm"
    shm.mkdir(0o755)
    run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=755", "none", shm], check=True)
    daemon = make_daemon(ECD_SHM_DIR=str(shm))
    daemon.shm = shm / daemon.shm.name
    try:
        daemon.start()
        command = [sys.executable, "-c", HOLDER, daemon.address]
        with child(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "holds\n"
            stop(client.pid)
            daemon.kill()
            daemon.command = (*WITHOUT_PATIENCE, "--cold")
            daemon.start(wait=False)
            assert daemon._process is not None
            assert daemon._process.wait(HANG_S) == 1
            said = daemon.text()
        holds = f"(pid {client.pid}, stopped, of root (uid 0)). End them, or let a stopped"
        assert holds in said
        assert "Make the pool smaller" in said
        daemon.start()
    finally:
        daemon.close()
        run(["umount", "--lazy", shm], check=True)
