"""No other user of the machine gets at a daemon's memory, whatever lies where it starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from ecd_client import Client, DaemonUnavailable
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.users import MALLORY, SERVICE, UsersDaemon, needs_root, prefix, shell

pytestmark = needs_root
MakeUsersDaemon = Callable[..., UsersDaemon]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory like /dev/shm: on tmpfs, open to all, nobody can remove another's files."""
    directory = Path(tempfile.mkdtemp(prefix="test-owners-", dir="/dev/shm"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def make(place: Path, tmp_path: Path) -> Iterator[MakeUsersDaemon]:
    daemons: list[UsersDaemon] = []

    def make(uid: int, **settings: str) -> UsersDaemon:
        daemons.append(UsersDaemon(place, tmp_path, uid, **settings))
        return daemons[-1]

    yield make
    for daemon in daemons:
        if daemon._process is not None and daemon._process.poll() is None:
            daemon.terminate()


@pytest.fixture(params=[0, SERVICE], ids=["root", "service"])
def daemon(request: pytest.FixtureRequest, make: MakeUsersDaemon) -> UsersDaemon:
    return make(request.param, ECD_WARM_RESTART="true")


def put(daemon: UsersDaemon) -> None:
    with Client(daemon.address) as client:
        client.put_bytes("k", b"secret", "uint8", (6,))


def has(daemon: UsersDaemon) -> bool:
    with Client(daemon.address) as client:
        return client.contains(["k"]) == [True]


def left(daemon: UsersDaemon, suffix: str) -> Path:
    [file] = daemon.shm.glob(f"*{suffix}")
    return file


# -- the directory in shared memory ----------------------------------------------------------------


def test_a_pool_that_another_user_made_ready_is_refused(
    daemon: UsersDaemon, make: MakeUsersDaemon
) -> None:
    """The attack: a daemon of the same name, whose files anybody may then write to."""
    attacker = make(MALLORY, ECD_WARM_RESTART="true", ECD_NAME=daemon.name)
    attacker.shm = daemon.shm
    attacker.start()
    put(attacker)
    assert attacker.terminate() == 0
    shell(MALLORY, 'chmod 777 "$1"; chmod 666 "$1"/*', daemon.shm)
    files = sorted(daemon.shm.iterdir())
    said = daemon.refused()
    assert f"{daemon.shm}" in said
    assert f"uid {MALLORY}, mode 0777" in said
    assert sorted(daemon.shm.iterdir()) == files


@pytest.mark.parametrize("mode", ["700", "755"])
def test_a_directory_of_another_user_is_refused(daemon: UsersDaemon, mode: str) -> None:
    shell(MALLORY, f'mkdir -m {mode} "$1"', daemon.shm)
    assert f"it is a directory of uid {MALLORY}, mode 0{mode}" in daemon.refused()
    assert list(daemon.shm.iterdir()) == []


def test_a_link_in_place_of_the_directory_is_refused(daemon: UsersDaemon, place: Path) -> None:
    elsewhere = place / "elsewhere"
    shell(daemon.uid, 'mkdir -m 700 "$1"', elsewhere)
    shell(MALLORY, 'ln -s "$1" "$2"', elsewhere, daemon.shm)
    assert f"a symbolic link of uid {MALLORY}" in daemon.refused()
    assert list(elsewhere.iterdir()) == []


def test_a_directory_that_was_made_for_it_stays(daemon: UsersDaemon) -> None:
    """systemd-tmpfiles makes it at boot, so that no other user can be there first."""
    shell(daemon.uid, 'mkdir -m 750 "$1"; : >"$1/keep"', daemon.shm)
    daemon._settings["ECD_WARM_RESTART"] = "false"
    daemon.start()
    assert daemon.terminate() == 0
    assert [path.name for path in daemon.shm.iterdir()] == ["keep"]


@pytest.mark.parametrize("mode", ["770", "707"])
def test_a_directory_that_others_can_write_to_is_refused(daemon: UsersDaemon, mode: str) -> None:
    shell(daemon.uid, f'mkdir -m {mode} "$1"', daemon.shm)
    assert f"mode 0{mode}" in daemon.refused()


@pytest.mark.parametrize(
    "lay",
    [
        lambda lock, aim: lock.symlink_to(aim),
        lambda lock, aim: os.link(aim.with_name("there"), lock),
        lambda lock, aim: (lock.touch(), os.chown(lock, MALLORY, MALLORY)),
        lambda lock, aim: os.mkfifo(lock, 0o666),
        lambda lock, aim: lock.mkdir(),
    ],
    ids=["link", "hard link", "another's", "pipe", "directory"],
)
def test_a_lock_that_is_not_ours_is_refused(
    daemon: UsersDaemon, place: Path, lay: Callable[[Path, Path], None]
) -> None:
    aim = place / "aim"
    shell(daemon.uid, 'mkdir -m 700 "$1"; echo precious >"$2"', daemon.shm, place / "there")
    lay(daemon.shm / "lock", aim)
    assert "its lock" in daemon.refused()
    assert not aim.exists(), "what the link leads to was created"
    assert (place / "there").read_text() == "precious\n"


SPOILT: dict[str, Callable[[Path], object]] = {
    "another's": lambda file: os.chown(file, MALLORY, MALLORY),
    "0666": lambda file: file.chmod(0o666),
    "0660": lambda file: file.chmod(0o660),
    "hard link": lambda file: os.link(file, file.parents[1] / "outside"),
    "link": lambda file: (file.rename(file.parent / "moved"), file.symlink_to("moved")),
    "pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.parametrize(
    ("suffix", "what"),
    [*((".pool", what) for what in SPOILT), (".index", "0666"), (".sessions", "hard link")],
)
def test_a_file_that_others_can_reach_is_not_taken_over(
    make: MakeUsersDaemon, suffix: str, what: str
) -> None:
    daemon = make(SERVICE, ECD_WARM_RESTART="true")
    daemon.start()
    put(daemon)
    assert daemon.terminate() == 0
    file = left(daemon, suffix)
    SPOILT[what](file)
    daemon.start()
    assert not has(daemon)
    assert f"{file} is not ours alone and is removed: a " in daemon.text()
    assert not file.exists()
    assert left(daemon, ".pool").stat().st_uid == SERVICE


def test_a_directory_in_place_of_a_file_is_not_ours_to_remove(daemon: UsersDaemon) -> None:
    daemon.start()
    assert daemon.terminate() == 0
    pool = left(daemon, ".pool")
    pool.unlink()
    pool.mkdir()
    (pool / "of somebody").touch()
    assert f"{pool} is a directory" in daemon.refused()
    assert (pool / "of somebody").exists()


def test_its_own_files_are_taken_over(daemon: UsersDaemon) -> None:
    """Also by a second life, when the pool has had two names, and after a kill."""
    daemon.start()
    put(daemon)
    for _ in range(2):
        assert daemon.terminate() == 0
        daemon.start()
        assert has(daemon)
    daemon.kill()
    daemon.start()
    assert has(daemon)
    assert "not ours" not in daemon.text()


@pytest.mark.parametrize(("owner", "mode"), [(0, 0o2777), (MALLORY, 0o1777)])
def test_a_place_where_others_can_replace_it_is_refused(
    daemon: UsersDaemon, place: Path, owner: int, mode: int
) -> None:
    os.chown(place, owner, owner)
    place.chmod(mode)
    elsewhere = place.with_name(place.name + "-sockets")
    daemon._settings["ECD_ADDRESS"] = f"unix://{elsewhere}/s"
    shell(daemon.uid, 'mkdir -m 700 "$1"', elsewhere)
    try:
        assert f"{place} is a directory of" in daemon.refused()
        assert not daemon.shm.exists()
    finally:
        shutil.rmtree(elsewhere)


def test_a_container_without_the_machines_root_may_use_its_place(make: MakeUsersDaemon) -> None:
    """There files of root, such as /dev/shm, seem to be those of the overflow uid."""
    daemon = make(SERVICE)
    daemon.prefix = [*daemon.prefix, "unshare", "--user", "--map-root-user"]
    daemon.start()
    assert daemon.shm.stat().st_uid == SERVICE


@pytest.mark.parametrize("group", [None, MALLORY])
def test_rights_are_as_narrow_as_they_can_be(
    make: MakeUsersDaemon, tmp_path: Path, group: int | None
) -> None:
    """Clients write to pool, pins and sockets, and lock sessions; the daemon alone writes rows."""
    daemon = make(0, **({} if group is None else {"ECD_GROUP": str(group)}))
    daemon.start()
    read, write = (0, 0) if group is None else (0o040, 0o060)
    written = (".pool", ".sessions", ".pins", ".bell", ".attach")
    expected = {**dict.fromkeys(written, write), ".index": read}
    for suffix, mode in expected.items():
        file = left(daemon, suffix).stat()
        assert stat.S_IMODE(file.st_mode) == 0o600 | mode, suffix
        assert group in (None, file.st_gid)
    assert stat.S_IMODE(daemon.shm.stat().st_mode) == (0o700 if group is None else 0o750)
    assert stat.S_IMODE((daemon.shm / "lock").stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600 | write
    member = subprocess.run(
        [*prefix(tmp_path, SERVICE, str(MALLORY)), sys.executable, "-c", MEMBER, daemon.address],
        capture_output=True,
        text=True,
    )
    assert (member.returncode == 0) == (group is not None), member.stderr
    if group is not None:
        assert member.stdout == "True True refused\n"


MEMBER = """
import sys
from pathlib import Path
from ecd_client import Client
with Client(sys.argv[1]) as client:
    stored = client.put_bytes("k", b"x", "uint8", (1,))
    session = client._connection.current
    got = client.get("k") is not None and session.index is not None
    try:
        Path(session.pools.granted.path).with_suffix(".index").open("r+b")
        print(stored, got, "may write")
    except PermissionError:
        print(stored, got, "refused")
"""


# -- the socket ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("owner", "mode"), [(0, 0o2777), (MALLORY, 0o1777)])
def test_a_socket_is_not_made_where_others_can_replace_it(
    daemon: UsersDaemon, place: Path, owner: int, mode: int
) -> None:
    directory = place / "sockets"
    directory.mkdir()
    os.chown(directory, owner, owner)
    directory.chmod(mode)
    daemon._settings["ECD_ADDRESS"] = f"unix://{directory}/s"
    said = daemon.refused()
    assert f"cannot listen on unix://{directory}/s: {directory} is a directory of" in said
    assert list(directory.iterdir()) == []


def test_a_link_in_place_of_the_sockets_lock_is_refused(daemon: UsersDaemon, place: Path) -> None:
    aim = place / "aim"
    shell(MALLORY, 'ln -s "$1" "$2"', aim, Path(f"{daemon.socket}.lock"))
    assert f"a symbolic link of uid {MALLORY}" in daemon.refused()
    assert not aim.exists()


def test_what_another_user_has_where_the_socket_belongs_is_refused(
    daemon: UsersDaemon, place: Path
) -> None:
    bind = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
    shell(MALLORY, f'/usr/bin/python3 -c "{bind}" "$1"', daemon.socket)
    assert f"a socket of uid {MALLORY}" in daemon.refused()
    assert daemon.socket.stat().st_uid == MALLORY


# -- clearing --------------------------------------------------------------------------------------


def clear(place: Path, name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ecd", "clear"],
        env={**os.environ, "ECD_SHM_DIR": str(place), "ECD_NAME": name},
        capture_output=True,
        text=True,
    )


def test_clear_follows_no_link(place: Path) -> None:
    precious = place / "precious"
    precious.mkdir()
    (precious / "0.pool").touch()
    shell(MALLORY, 'ln -s "$1" "$2"', precious, place / "ecd-x")
    done = clear(place, "x")
    assert (done.returncode, "a symbolic link" in done.stderr) == (1, True)
    shell(MALLORY, 'rm "$2"; mkdir "$2"; ln -s "$1/0.pool" "$2/lock"', precious, place / "ecd-x")
    done = clear(place, "x")
    assert (done.returncode, "its lock" in done.stderr) == (1, True)
    shell(MALLORY, 'rm "$2/lock"; ln -s "$1/0.pool" "$2/1.pool"', precious, place / "ecd-x")
    done = clear(place, "x")
    assert done.returncode == 0, done.stderr
    assert not (place / "ecd-x").exists()
    assert (precious / "0.pool").exists()


# -- clients ---------------------------------------------------------------------------------------


class Misleading(pb_grpc.CacheServicer):
    """A daemon that names a file of its choice as its pool, and does something before it."""

    def __init__(self, pool: Path, lock: Path, before: Callable[[], object]) -> None:
        self.pool, self.lock, self.before = pool, lock, before

    def Session(  # noqa: N802
        self, requests: Iterator[pb.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.SessionEvent]:
        next(requests)
        self.before()
        seen = self.pool.stat()
        pool = pb.PoolFile(kind="host", path=str(self.pool), nbytes=seen.st_size, inode=seen.st_ino)
        welcome = pb.Welcome(session="s", lease_ttl_s=30.0, pools=[pool], lock_path=str(self.lock))
        yield pb.SessionEvent(incarnation="ab", welcome=welcome)
        for _ in requests:
            pass

    def Exchange(  # noqa: N802
        self, requests: Iterator[pb.ExchangeRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ExchangeReply]:
        for _ in requests:
            yield pb.ExchangeReply(release=pb.ReleaseReply())


@pytest.mark.parametrize("way", ["own", "named", "linked", "lock", "gone", "led", "a file's"])
def test_a_client_opens_nothing_but_the_socket_owners_files(place: Path, way: str) -> None:
    """The client is root, which may write to any file: no daemon makes it write to one.

    Where its socket is gone, or is something else by now, nobody's files are.
    """
    precious, own, link, address = (place / name for name in ("precious", "own", "link", "s"))
    precious.write_bytes(bytes(4096))
    shell(MALLORY, 'head -c 4096 /dev/zero >"$1"; ln -s "$2" "$3"', own, precious, link)
    pool = {"named": precious, "linked": link}.get(way, own)
    lock = precious if way == "lock" else own

    def spoil() -> None:
        if way in ("gone", "led", "a file's"):
            address.unlink(missing_ok=True)
        if way == "led":
            address.symlink_to(precious)
        elif way == "a file's":
            shutil.copy(precious, address)

    if way in ("gone", "led", "a file's"):
        pool = lock = precious
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_CacheServicer_to_server(Misleading(pool, lock, spoil), server)
    server.add_insecure_port(f"unix:{address}")
    server.start()
    os.chown(address, MALLORY, MALLORY)
    refused = pytest.raises(DaemonUnavailable, match="its pool cannot be mapped")
    try:
        with (
            contextlib.nullcontext() if way == "own" else refused,
            Client(f"unix://{address}", connect_timeout=5.0),
        ):
            pass
    finally:
        server.stop(None)
