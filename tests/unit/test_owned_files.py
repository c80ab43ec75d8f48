"""Where a daemon's directory and its socket may be: where no other user can change or replace them.

The process of the test acts as the users. tests/integration/test_ownership.py has whole daemons.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecd.memory.pool_dir import PoolDir, PoolError
from ecd.rpc.socket import OwnedSocket, SocketError
from support.users import MALLORY, SERVICE, acting_as, like_dev_shm, needs_root

pytestmark = needs_root
REPLACEABLE = pytest.mark.parametrize(("owner", "mode"), [(0, 0o2777), (MALLORY, 0o1777)])


@pytest.fixture
def place() -> Iterator[Path]:
    with like_dev_shm() as directory:
        yield directory


@pytest.fixture(params=[0, SERVICE], ids=["root", "service"])
def uid(request: pytest.FixtureRequest) -> int:
    """The user that the daemon runs as."""
    return request.param


def made(directory: Path, uid: int, mode: int = 0o700) -> Path:
    directory.mkdir()
    os.chown(directory, uid, uid)
    directory.chmod(mode)
    return directory


# -- the directory in shared memory ----------------------------------------------------------------


def refusal(place: Path, uid: int) -> str:
    with acting_as(uid), pytest.raises(PoolError) as refused:
        PoolDir(str(place), "x")
    return str(refused.value)


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_directory_of_another_user_is_refused(place: Path, uid: int, mode: int) -> None:
    directory = made(place / "ecd-x", MALLORY, mode)
    assert f"it is a directory of uid {MALLORY}, mode {mode:04o}" in refusal(place, uid)
    assert list(directory.iterdir()) == []


def test_a_link_in_place_of_the_directory_is_refused(place: Path, uid: int) -> None:
    elsewhere = made(place / "elsewhere", uid)
    with acting_as(MALLORY):
        (place / "ecd-x").symlink_to(elsewhere)
    assert f"a symbolic link of uid {MALLORY}" in refusal(place, uid)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_can_write_to_is_refused(place: Path, uid: int, mode: int) -> None:
    made(place / "ecd-x", uid, mode)
    assert f"mode {mode:04o}" in refusal(place, uid)


@REPLACEABLE
def test_a_place_where_others_can_replace_it_is_refused(
    place: Path, uid: int, owner: int, mode: int
) -> None:
    os.chown(place, owner, owner)
    place.chmod(mode)
    assert f"{place} is a directory of" in refusal(place, uid)
    assert not (place / "ecd-x").exists()


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
    place: Path, uid: int, lay: Callable[[Path, Path], None]
) -> None:
    directory, aim, there = made(place / "ecd-x", uid), place / "aim", place / "there"
    there.write_text("precious")
    os.chown(there, uid, uid)
    lay(directory / "lock", aim)
    assert "its lock" in refusal(place, uid)
    assert not aim.exists(), "what the link leads to was created"
    assert there.read_text() == "precious"


# -- the files in it -------------------------------------------------------------------------------


@pytest.fixture
def directory(place: Path) -> Iterator[PoolDir]:
    with acting_as(SERVICE):
        directory = PoolDir(str(place), "x")
    for suffix in ("pool", "index", "sessions"):
        os.close(directory.create(f"ab.{suffix}", 4096))
        os.chown(directory.path / f"ab.{suffix}", SERVICE, SERVICE)
    yield directory
    directory.close()


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
    [*(("pool", what) for what in SPOILT), ("index", "0666"), ("sessions", "hard link")],
)
def test_a_file_that_others_can_reach_is_removed(
    directory: PoolDir, caplog: pytest.LogCaptureFixture, suffix: str, what: str
) -> None:
    with acting_as(SERVICE):
        assert not directory.remove_foreign()
    file = directory.path / f"ab.{suffix}"
    SPOILT[what](file)
    others = set(directory.names()) - {file.name}
    with acting_as(SERVICE):
        assert directory.remove_foreign()
    assert f"{file} is not ours alone and is removed: a " in caplog.text
    assert set(directory.names()) == others


def test_a_directory_in_place_of_a_file_is_not_ours_to_remove(directory: PoolDir) -> None:
    pool = directory.path / "ab.pool"
    pool.unlink()
    pool.mkdir()
    (pool / "of somebody").touch()
    with acting_as(SERVICE), pytest.raises(PoolError, match=f"{pool} is a directory"):
        directory.remove_foreign()
    assert (pool / "of somebody").exists()


# -- the socket ------------------------------------------------------------------------------------


@REPLACEABLE
def test_a_socket_is_not_made_where_others_can_replace_it(
    place: Path, uid: int, owner: int, mode: int
) -> None:
    sockets = made(place / "sockets", owner, mode)
    said = f"cannot listen on unix://{sockets}/s: {sockets} is a directory of"
    with acting_as(uid), pytest.raises(SocketError, match=said):
        OwnedSocket(f"unix://{sockets}/s")
    assert list(sockets.iterdir()) == []


def test_a_link_in_place_of_the_sockets_lock_is_refused(place: Path, uid: int) -> None:
    with acting_as(MALLORY):
        (place / "s.lock").symlink_to(place / "aim")
    with acting_as(uid), pytest.raises(SocketError, match=f"a symbolic link of uid {MALLORY}"):
        OwnedSocket(f"unix://{place}/s")
    assert not (place / "aim").exists()
