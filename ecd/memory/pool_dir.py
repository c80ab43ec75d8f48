"""The daemon's directory in shared memory: nobody else's, locked, and with the files in it.

No other user can put anything into it, or move it: it is ours, and so checked is the directory
that it lies in.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections import Counter
from pathlib import Path

from ecd.base.ownership import LockHeld, NotOurs, describe, open_place, take_lock
from ecd_proto.leftovers import is_pool_file, leftovers, user
from ecd_proto.shm.files import LOCK_NAME, SOCKET_SUFFIXES, pool_dir

logger = logging.getLogger(__name__)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_RM = "Remove it if nobody needs it; else take another name: ECD_NAME or --name"
IN_USE = (
    "another daemon{who} uses {path}. Stop it, or give this one a name of its own: ECD_NAME or "
    "--name"
)
IN_USE_TO_CLEAR = (
    "a running daemon uses {path}. Stop it first, or empty its cache with `ecd-cli evict --all`"
)
OTHERS_MAX_AGE_S = 3600.0
"""How long after its end a daemon of another name may come back to its pool."""


class PoolError(Exception):
    """The pool cannot be made; the message says what to change."""


class PoolDir:
    """The daemon's directory, locked as long as it is open, or as files are left in it."""

    def __init__(self, shm_dir: str, name: str, gid: int | None = None) -> None:
        """Make the directory, or take the one that is there if it is this user's alone.

        Members of the group may open the files in it. Raises PoolError.
        """
        self.shm_dir, self.path = shm_dir, pool_dir(shm_dir, name)
        self._gid = gid
        with contextlib.ExitStack() as opened:
            self._place_fd = _open_place(shm_dir)
            opened.callback(os.close, self._place_fd)
            self._fd, self._lock_fd = _make(self._place_fd, self.path)
            opened.pop_all()
        try:
            self._give(self._fd, 0o050)
        except BaseException:
            self.close()
            raise

    def create(self, name: str, nbytes: int = 0, clients_write: bool = True) -> int:
        """Make a file that clients can open, without memory. Raises OSError and PoolError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            self._give(fd, 0o060 if clients_write else 0o040)
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open(self, name: str) -> int:
        """Open a file that is there. Raises OSError and PoolError."""
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            self._give(fd, 0o060)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def share(self, name: str) -> None:
        """Let members of the group write to a socket. Raises OSError."""
        if self._gid is not None:
            os.chown(name, -1, self._gid, dir_fd=self._fd, follow_symlinks=False)
            os.chmod(self.path / name, 0o660)

    def link(self, name: str, new: str) -> None:
        os.link(name, new, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        """Remove a file. Raises PoolError if it is not the daemon's."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass
        except OSError:
            found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            raise PoolError(f"{self.path / name} is {describe(found)}: remove it") from None

    def names(self) -> list[str]:
        """The names of all files that daemons have put there."""
        return [name for name in os.listdir(self._fd) if is_pool_file(name)]

    def remove_foreign(self) -> bool:
        """Remove the files that another user owns or can reach; whether there was one.

        A hard link that lies elsewhere is such a way. A pool itself has a name for each generation.
        """
        found = {
            name: os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            for name in self.names()
            if not name.endswith(SOCKET_SUFFIXES)
        }
        here = Counter(each.st_ino for each in found.values())
        foreign = [name for name, each in found.items() if self._is_foreign(each, here)]
        for name in foreign:
            links = found[name].st_nlink
            elsewhere = f", {links} links" if links > here[found[name].st_ino] else ""
            logger.warning(
                "%s is not ours alone and is removed: %s%s",
                self.path / name,
                describe(found[name]),
                elsewhere,
            )
            self.unlink(name)
        return bool(foreign)

    def _is_foreign(self, found: os.stat_result, here: Counter[int]) -> bool:
        group_writes = found.st_mode & stat.S_IWGRP and found.st_gid != self._gid
        return bool(
            not stat.S_ISREG(found.st_mode)
            or found.st_uid != os.geteuid()
            or found.st_mode & stat.S_IWOTH
            or group_writes
            or found.st_nlink > here[found.st_ino]
        )

    def touch(self) -> None:
        """Set the directory's time: it is in use."""
        os.utime(self._fd)

    def close(self, *, keep: bool = False) -> None:
        """Release the directory, and remove it if it is empty: foreign files stay.

        With `keep` it stays locked until the process ends: the next daemon is to find the files,
        and until then Mooncake may write what it still reads from other nodes.
        """
        if keep:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(LOCK_NAME, dir_fd=self._fd)
        with contextlib.suppress(OSError):
            os.rmdir(self.path.name, dir_fd=self._place_fd)
        for fd in (self._fd, self._lock_fd, self._place_fd):
            os.close(fd)

    def _give(self, fd: int, group_mode: int) -> None:
        """Set the rights of the owner and the group; without a group, the group has none."""
        mode = 0o700 if stat.S_ISDIR(os.fstat(fd).st_mode) else 0o600
        if self._gid is None:
            os.fchmod(fd, mode)
            return
        try:
            os.fchown(fd, -1, self._gid)
        except PermissionError:
            raise PoolError(
                f"{self.path} cannot be given to group {self._gid}: {user(os.geteuid())} is no "
                "member of it (ECD_GROUP or --group)"
            ) from None
        os.fchmod(fd, mode | group_mode)


_TMPFS = (
    "ECD_SHM_DIR or --shm-dir must name a directory on tmpfs that this user may write to; "
    "/dev/shm is the usual one"
)


def _open_place(shm_dir: str) -> int:
    try:
        return open_place(shm_dir)
    except NotOurs as error:
        raise PoolError(f"{error}. Set ECD_SHM_DIR or --shm-dir, or mend its mode") from None
    except OSError as error:
        raise PoolError(f"{shm_dir} cannot be used: {error.strerror}. {_TMPFS}") from None


def _make(place_fd: int, path: Path) -> tuple[int, int]:
    """Make the directory, or take the one that is there; its descriptor and its lock's."""
    try:
        for _ in range(10):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=place_fd)
            with contextlib.suppress(FileNotFoundError):  # its last daemon has just removed it
                found = os.stat(path.name, dir_fd=place_fd, follow_symlinks=False)
                if found.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(found.st_mode):
                    raise PoolError(f"other users can write to {path}: {describe(found)}. {_RM}")
                return _take(place_fd, path, found, os.geteuid(), IN_USE)
    except OSError as error:
        raise PoolError(f"{path} cannot be used: {error.strerror}. {_TMPFS}") from None
    raise PoolError(f"{path} keeps changing hands")


def _take(
    place_fd: int, path: Path, found: os.stat_result, uid: int, in_use: str
) -> tuple[int, int]:
    """Open and lock a directory of this user. `in_use` is the error if it is locked.

    Raises PoolError, FileNotFoundError if it is removed meanwhile, and OSError.
    """
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
        raise PoolError(f"{path} is not a directory of {user(uid)}: it is {describe(found)}. {_RM}")
    fd = os.open(path.name, _DIRECTORY, dir_fd=place_fd)
    try:
        if os.fstat(fd).st_ino != found.st_ino:
            raise FileNotFoundError(path.name)
        return fd, take_lock(fd, LOCK_NAME, frozenset({uid, os.geteuid()}))
    except BaseException as error:
        os.close(fd)
        if isinstance(error, LockHeld):
            raise PoolError(in_use.format(path=path, who=error.who)) from None
        if isinstance(error, NotOurs):
            raise PoolError(f"{path} cannot be used: {error}") from None
        raise


def clear(shm_dir: str, name: str) -> int:
    """Remove all files of the last daemon of this name; how many bytes. Raises PoolError.

    Root may do so for another user: only the daemon's files go, and no link is followed.
    """
    path = pool_dir(shm_dir, name)
    place_fd = _open_place(shm_dir)
    try:
        found = os.stat(path.name, dir_fd=place_fd, follow_symlinks=False)
        uid = os.geteuid() or found.st_uid
        fd, lock_fd = _take(place_fd, path, found, uid, IN_USE_TO_CLEAR)
        try:
            nbytes = _remove_files(fd)
            os.unlink(LOCK_NAME, dir_fd=fd)
        finally:
            os.close(fd)
            os.close(lock_fd)
        with contextlib.suppress(OSError):  # what is not the daemon's stays
            os.rmdir(path.name, dir_fd=place_fd)
        return nbytes
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise PoolError(f"{path} cannot be cleared: {error.strerror}") from None
    finally:
        os.close(place_fd)


def _remove_files(directory_fd: int) -> int:
    sizes: dict[int, int] = {}  # a pool has a name for each of its daemons
    for name in os.listdir(directory_fd):
        if is_pool_file(name):
            found = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
            os.unlink(name, dir_fd=directory_fd)
            sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def clear_others(shm_dir: str, name: str) -> None:
    """Log the leftovers of daemons of other names, and remove this user's older ones."""
    for left in leftovers(shm_dir):
        if left.name == name:
            continue
        if left.uid == os.geteuid() and left.age_s > OTHERS_MAX_AGE_S:
            try:
                clear(shm_dir, left.name)
                logger.info("removed %s: its daemon ended more than an hour ago", left)
            except PoolError as error:
                logger.warning("%s stays: %s", left.path, error)
        else:
            logger.info(
                "a daemon that has ended left %s: ecd clear --name %s frees it",
                left,
                left.name,
            )
