"""Checks of owners: the daemon uses only files that no other user can change or replace."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from ecd.base.clock import REAL, Clock
from ecd_proto.leftovers import user

LOCK_WAIT_S = 0.5
"""How long a lock is tried for: `ecd_proto.leftovers` and clients hold one for a moment to test."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a pipe",
}
_ALL_USERS = ["0", "0", "4294967295"]


class LockHeld(BlockingIOError):
    """Another process has the lock; `who` names it in brackets, or is empty if it has not said."""

    def __init__(self, fd: int) -> None:
        super().__init__(errno.EAGAIN, os.strerror(errno.EAGAIN))
        said = os.pread(fd, 20, 0)
        self.who = f" (pid {int(said)})" if said.isdigit() else ""


class NotOurs(Exception):
    """Another user can change the file or directory; the message says who, and what to do."""


def describe(found: os.stat_result) -> str:
    """The file's kind, owner and mode, for a message."""
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
    return f"{kind} of {user(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o}"


def open_place(path: Path | str) -> int:
    """Open a directory in which no other user can rename or remove what is ours.

    A symbolic link is followed. Raises NotOurs and OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    found = os.fstat(fd)
    shared = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if shared or found.st_uid not in _trusted_users():
        os.close(fd)
        advice = "chmod +t" if shared else "choose one of root or of this user"
        raise NotOurs(
            f"{path} is {describe(found)}: other users can replace what lies in it ({advice})"
        )
    return fd


def take_lock(directory_fd: int, name: str, owners: frozenset[int], clock: Clock = REAL) -> int:
    """Lock a file of this name in the directory; the lock lives as long as the descriptor.

    Raises NotOurs: the file is not one of `owners`' alone; LockHeld: it is locked; OSError.
    FileNotFoundError: the directory was removed.
    """
    deadline_s = clock.now_s() + LOCK_WAIT_S
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o600, dir_fd=directory_fd)
        except OSError:
            # A link or another user's file: say so rather than "too many levels".
            _check_lock(os.stat(name, dir_fd=directory_fd, follow_symlinks=False), name, owners)
            raise
        try:
            held = os.fstat(fd)
            _check_lock(held, name, owners)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_ino == held.st_ino:
                with contextlib.suppress(OSError):  # the file system is full
                    os.truncate(fd, 0)
                    os.pwrite(fd, b"%d" % os.getpid(), 0)
                return fd
        except FileNotFoundError:
            pass  # its last holder unlinked it between our open and our lock
        except BlockingIOError:
            if clock.now_s() >= deadline_s:
                held_by = LockHeld(fd)
                os.close(fd)
                raise held_by from None
            clock.block(0.02)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _check_lock(found: os.stat_result, name: str, owners: frozenset[int]) -> None:
    """Raise NotOurs unless the lock is a file of `owners`' alone.

    A file without a link counts as theirs: its holder has ended, and unlinked it.
    """
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners or found.st_nlink > 1:
        links = f", {found.st_nlink} links" if found.st_nlink > 1 else ""
        raise NotOurs(f"its lock {name} is {describe(found)}{links}: remove it")


def _trusted_users() -> set[int]:
    """Root and this user.

    Where a user namespace does not show the machine's root, files of root carry the overflow uid.
    """
    users = {0, os.geteuid()}
    if Path("/proc/self/uid_map").read_text().split() != _ALL_USERS:
        users.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return users
