"""No other user of the machine gets at a daemon's memory: see also tests/unit/test_ownership.py."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from ecd_client import Client, DaemonUnavailable
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.processes import end, run
from support.users import MALLORY, SERVICE, UsersDaemon, like_dev_shm, needs_root, prefix, shell
from support.waiting import HANG_S, eventually

pytestmark = needs_root
MakeUsersDaemon = Callable[..., UsersDaemon]


@pytest.fixture
def place() -> Iterator[Path]:
    with like_dev_shm() as directory:
        yield directory


@pytest.fixture
def make(place: Path, tmp_path: Path) -> Iterator[MakeUsersDaemon]:
    daemons: list[UsersDaemon] = []

    def make(uid: int, **settings: str) -> UsersDaemon:
        daemons.append(UsersDaemon(place, tmp_path, uid, **settings))
        return daemons[-1]

    yield make
    for daemon in daemons:
        if daemon._process is not None:
            end(daemon._process, grace=True)


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


def test_a_directory_that_was_made_for_it_stays(daemon: UsersDaemon) -> None:
    """systemd-tmpfiles makes it at boot, so that no other user can be there first."""
    shell(daemon.uid, 'mkdir -m 750 "$1"; : >"$1/keep"', daemon.shm)
    daemon._settings["ECD_WARM_RESTART"] = "false"
    daemon.start()
    assert daemon.terminate() == 0
    assert [path.name for path in daemon.shm.iterdir()] == ["keep"]


def test_a_file_that_others_can_reach_is_not_taken_over(make: MakeUsersDaemon) -> None:
    daemon = make(SERVICE, ECD_WARM_RESTART="true").start()
    put(daemon)
    assert daemon.terminate() == 0
    file = left(daemon, ".pool")
    file.chmod(0o666)
    daemon.start()
    assert not has(daemon)
    assert f"{file} is not ours alone and is removed: a " in daemon.text()
    assert left(daemon, ".pool").stat().st_uid == SERVICE


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
    as_member = prefix(tmp_path, SERVICE, str(MALLORY))
    patience_s = 0.1 if group is None else HANG_S
    command = [*as_member, sys.executable, "-c", MEMBER, daemon.address, str(patience_s)]
    member = run(command, capture_output=True, text=True)
    assert member.stdout == ("" if group is None else "True True refused\n"), member.stderr
    assert ("does not let this user in" in member.stderr) == (group is None), member.stderr


MEMBER = """
import sys
from pathlib import Path
from ecd_client import Client
with Client(sys.argv[1], connect_timeout=float(sys.argv[2])) as client:
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


def test_what_another_user_has_where_the_socket_belongs_is_refused(
    daemon: UsersDaemon, place: Path
) -> None:
    bind = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
    shell(MALLORY, f'/usr/bin/python3 -c "{bind}" "$1"', daemon.socket)
    assert f"a socket of uid {MALLORY}" in daemon.refused()
    assert daemon.socket.stat().st_uid == MALLORY


# -- clearing --------------------------------------------------------------------------------------


def clear(place: Path, name: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "ECD_SHM_DIR": str(place), "ECD_NAME": name}
    command = [sys.executable, "-m", "ecd", "clear"]
    return run(command, env=environ, capture_output=True, text=True)


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

    def Contains(  # noqa: N802
        self, request: pb.ContainsRequest, context: grpc.ServicerContext
    ) -> pb.ContainsReply:
        return pb.ContainsReply()

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
    try:
        with Client(f"unix://{address}", connect_timeout=0.0) as client:

            def refusal() -> str:
                try:
                    client.wait_connected(0.1)
                except DaemonUnavailable as refused:
                    return str(refused)
                return "none"

            expected = "none" if way == "own" else "its pool cannot be mapped"
            eventually(lambda: expected in refusal(), expected)
    finally:
        server.stop(None)
