"""Directories that daemons have in shared memory, and which of them no daemon uses any more."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ecd_proto.contract import size_text
from ecd_proto.shm.files import LOCK_NAME, SUFFIXES, is_file_locked, pool_dir

TOUCH_S = 60.0
"""How often a running daemon sets its directory's time, so that the time says when it ended."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILE = re.compile(rf"[0-9a-f]+({'|'.join(map(re.escape, SUFFIXES))})")


@dataclass(frozen=True)
class Leftover:
    """The directory of a daemon that has ended, with its pool still in memory."""

    name: str  # the daemon's
    path: Path
    uid: int
    nbytes: int | None  # None: this user may not look
    since_s: float  # wall clock

    @property
    def age_s(self) -> float:
        return time.time() - self.since_s

    def __str__(self) -> str:
        size = "of unknown size" if self.nbytes is None else size_text(self.nbytes)
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since_s))
        return f"{self.path}, {size}, of {user(self.uid)}, since {since}"


def user(uid: int) -> str:
    """The user's name and number."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def is_pool_file(name: str) -> bool:
    """Whether a daemon's file in its directory may have this name."""
    return _FILE.fullmatch(name) is not None


def leftovers(shm_dir: str | Path) -> list[Leftover]:
    """Every daemon's directory there that holds files and that no daemon has locked, by name.

    One that this user may not look into counts as left if nothing has touched it for some time.
    Anybody may make a directory there: one whose name no daemon can have is none, as names are
    logged, and shown in commands to type.
    """
    prefix = pool_dir("", "").name
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(shm_dir).glob(f"{prefix}*")):
            name = path.name.removeprefix(prefix)
            if _NAME.fullmatch(name) and (left := leftover(shm_dir, name)) is not None:
                found.append(left)
    return found


def leftover(shm_dir: str | Path, name: str) -> Leftover | None:
    """The directory of the daemon of this name; None if it is not one of the `leftovers`."""
    with contextlib.suppress(OSError):
        return _look(pool_dir(str(shm_dir), name), name)
    return None


def is_in_use(path: Path) -> bool:
    """Whether a daemon has locked the directory, as far as this user can see."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return _is_locked(fd, time.time() - os.fstat(fd).st_mtime)
        finally:
            os.close(fd)
    return False


def _look(path: Path, name: str) -> Leftover | None:
    """The leftover in a directory; None if it is empty or in use. Raises OSError for a file."""
    seen = path.lstat()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        left = Leftover(name, path, seen.st_uid, None, seen.st_mtime)
        return left if left.age_s > 3 * TOUCH_S else None
    try:
        seen = os.fstat(fd)
        files = [os.stat(each, dir_fd=fd, follow_symlinks=False) for each in _files(fd)]
        nbytes = sum({file.st_ino: file.st_blocks * 512 for file in files}.values())
        left = Leftover(name, path, seen.st_uid, nbytes, seen.st_mtime)
        return left if files and not _is_locked(fd, left.age_s) else None
    finally:
        os.close(fd)


def _files(directory_fd: int) -> list[str]:
    return [name for name in os.listdir(directory_fd) if is_pool_file(name)]


def _is_locked(directory_fd: int, age_s: float) -> bool:
    try:
        return is_file_locked(LOCK_NAME, directory_fd)
    except FileNotFoundError:
        return False
    except OSError:
        return age_s <= 3 * TOUCH_S  # not this user's to open
