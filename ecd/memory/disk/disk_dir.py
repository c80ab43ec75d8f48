"""The disk tier's directory: nobody else's, locked, one file an entry.

O_DIRECT moves the files' blocks past the page cache. A file is written under another name, and
renamed when it is whole. Nothing is synced: what a power failure left of a file lacks its checksum.

All methods block. A file may have any content: `read_header` and `read` verify it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from ecd.base.checksum import digests, fold
from ecd.base.clock import REAL, Clock
from ecd.base.ownership import LockHeld, NotOurs, describe, open_place, take_lock
from ecd.core.demotion import BLOCK_BYTES, rounded
from ecd.core.model.types import Content, Key
from ecd.memory.disk.disk_format import (
    MAX_HEADER_BYTES,
    SUFFIX,
    CorruptFile,
    Found,
    Header,
    file_name,
    header_bytes,
)
from ecd.memory.pool_dir import IN_USE, IN_USE_TO_CLEAR
from ecd_proto.leftovers import user
from ecd_proto.shm.files import LOCK_NAME, pool_dir

DISK_PIECE_BYTES = 4 << 20
"""Bytes read or written at a time."""
NEW_SUFFIX = ".new"
_NAME = re.compile(r"[0-9a-f]{32}(\.entry|\.new)")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full."""
_LATER = (*FULL, errno.EIO)
"""Errors that a usable directory may have for now: the tier starts, and writes are paused."""


class DiskError(Exception):
    """The directory cannot be used; the message says what to change."""


class _Asides(threading.local):
    """A thread's memory for headers, whole pages."""

    def __init__(self) -> None:
        self.aside = memoryview(mmap.mmap(-1, MAX_HEADER_BYTES))


class DiskDir:
    """The directory, locked as long as it is open."""

    def __init__(self, parent: Path, name: str, clock: Clock = REAL) -> None:
        """Make the directory `ecd-<name>`, or take the one that is there. Raises DiskError.

        `parent` must exist: below a disk that is not mounted, the tier would fill another one.
        """
        self.path = pool_dir(str(parent), name)
        self._clock = clock
        self._asides = _Asides()
        with contextlib.ExitStack() as opened:
            try:
                self._parent_fd = _open_parent(parent)
                opened.callback(os.close, self._parent_fd)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.path.name, 0o700, dir_fd=self._parent_fd)
                self._fd, self._lock_fd = _take(self._parent_fd, self.path, os.geteuid(), IN_USE)
                opened.callback(os.close, self._fd)
                opened.callback(os.close, self._lock_fd)
                for left in os.listdir(self._fd):
                    if left.endswith(NEW_SUFFIX) and _NAME.fullmatch(left):
                        os.unlink(left, dir_fd=self._fd)
                self._direct = os.O_DIRECT
                try:
                    self._try()
                except OSError as error:
                    if error.errno in _NO_DIRECT_IO:
                        self._direct = 0  # a file system in memory
                        self._try()
                    elif error.errno not in _LATER:
                        raise
            except (NotOurs, CorruptFile) as error:
                raise DiskError(f"{self.path}: {error}. {_ADVICE}") from None
            except OSError as error:
                raise DiskError(
                    f"{self.path} cannot be used: {error.strerror}. {_ADVICE}"
                ) from None
            opened.pop_all()

    def names(self) -> list[str]:
        """The names of all entries' files."""
        every = os.listdir(self._fd)
        return [name for name in every if name.endswith(SUFFIX) and _NAME.fullmatch(name)]

    def read_header(self, name: str) -> Found:
        """Read the header of a file of any origin. Raises CorruptFile and OSError."""
        fd = self._open(name, 0)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            found = os.fstat(fd)
            first = os.pread(fd, BLOCK_BYTES, 0).ljust(BLOCK_BYTES, b"\0")
            nbytes = header_bytes(first)
            if not stat.S_ISREG(found.st_mode) or not BLOCK_BYTES <= nbytes <= MAX_HEADER_BYTES:
                raise CorruptFile("no header")
            header = Header.unpack(first + os.pread(fd, nbytes - BLOCK_BYTES, BLOCK_BYTES))
        finally:
            os.close(fd)
        whole = nbytes + rounded(header.content.nbytes)
        if file_name(header.key) != name or found.st_size != whole:
            raise CorruptFile("of another entry, or not whole")
        ages = (max(0.0, self._clock.unix_s() - at) for at in (found.st_mtime, found.st_ctime))
        return Found(header, whole, *ages)

    def write(
        self, name: str, key: Key, content: Content, memory: memoryview, age_s: float = 0.0
    ) -> int:
        """Write an entry, put `age_s` ago, under its new name, for `publish`; its checksum.

        `memory` is page-aligned. If it changes meanwhile, the file must not be published. Raises
        OSError; there is no file then.
        """
        checksum = fold(digests(memory))
        header = Header(key, content, checksum).pack()
        whole = len(memory) - len(memory) % BLOCK_BYTES
        last = rounded(len(memory) - whole)
        aside = mmap.mmap(-1, len(header) + last)  # aligned
        aside[: len(header)] = header
        aside[len(header) : len(header) + len(memory) - whole] = memory[whole:]
        with memoryview(aside) as ends:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            new = new_name(name)
            fd = os.open(new, flags | self._direct, 0o600, dir_fd=self._fd)
            try:
                pieces = [
                    memory[at : min(at + DISK_PIECE_BYTES, whole)]
                    for at in range(0, whole, DISK_PIECE_BYTES)
                ]
                calls = [[piece] for piece in pieces] or [[]]
                calls[0].insert(0, ends[: len(header)])
                calls[-1].append(ends[len(header) :])
                offset = 0
                for pieces in calls:
                    written = os.pwritev(fd, pieces, offset)
                    if written != sum(map(len, pieces)):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    offset += written
                now_s = self._clock.unix_s()
                os.utime(fd, (now_s, now_s - age_s))  # for the next daemon
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(new, dir_fd=self._fd)
                raise
            finally:
                os.close(fd)
        return checksum

    def publish(self, name: str) -> None:
        """Give a written file its name. Raises OSError."""
        os.rename(new_name(name), name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def read(
        self, name: str, key: Key, nbytes: int, target: memoryview, is_wanted: Callable[[], bool]
    ) -> Header:
        """Read an entry of `nbytes` into whole blocks of memory, and verify it; its header.

        Stops early once it is not wanted. Raises CorruptFile and OSError.
        """
        fd = self._open(name, self._direct)
        try:
            ahead = os.fstat(fd).st_size - len(target)
            if not 0 < ahead <= MAX_HEADER_BYTES or ahead % BLOCK_BYTES:
                raise CorruptFile("not whole")
            hashed: list[int] = []
            aside = self._asides.aside[:ahead]
            for start in range(0, len(target) or 1, DISK_PIECE_BYTES):
                piece = target[start : start + DISK_PIECE_BYTES]
                if start == 0:
                    got = os.preadv(fd, [aside, piece], 0) - ahead
                else:
                    got = os.preadv(fd, [piece], ahead + start)
                if got != len(piece):
                    raise CorruptFile("it ends early")
                if not is_wanted():
                    raise OSError(errno.ECANCELED, "not wanted any more")
                hashed += digests(piece[: nbytes - start])
            header = Header.unpack(bytes(aside))
        finally:
            os.close(fd)
        if header.key != key or header.content.nbytes != nbytes or fold(hashed) != header.checksum:
            raise CorruptFile("other bytes than were written")
        return header

    def space(self) -> tuple[int, Path]:
        """The free bytes of the file system for this user, and its mount point.

        Raises OSError.
        """
        space = os.fstatvfs(self._fd)
        path = self.path.resolve()
        mount = next(each for each in (path, *path.parents) if os.path.ismount(each))
        return space.f_bavail * space.f_frsize, mount

    def close(self) -> None:
        """Release the directory; its files stay."""
        for fd in (self._fd, self._lock_fd, self._parent_fd):
            os.close(fd)

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._fd)

    def _try(self) -> None:
        """Write, read and remove a file. Raises OSError."""
        key, block = Key("ecd", "a try at the start"), memoryview(mmap.mmap(-1, BLOCK_BYTES))
        name = file_name(key)
        self.write(name, key, Content("uint8", (BLOCK_BYTES,), BLOCK_BYTES), block)
        self.publish(name)
        self.read(name, key, BLOCK_BYTES, block, lambda: True)
        self.remove(name)


_ADVICE = (
    "ECD_DISK_DIR or --disk-dir must name a directory of a local disk that this user may write to; "
    "without a disk tier, set ECD_DISK_POOL_BYTES=0"
)


def _open_parent(parent: Path) -> int:
    """Open the directory that is to hold the daemon's.

    Raises DiskError if there is none, NotOurs and OSError.
    """
    try:
        return open_place(parent)
    except FileNotFoundError:
        raise DiskError(
            f"disk_dir {parent} does not exist, and ecd does not make it: its disk may not be "
            f"mounted. Mount the disk, or make the directory: install -d -m 0700 -o "
            f"{os.geteuid()} {parent}. {_ADVICE}"
        ) from None


def clear(parent: Path | str, name: str) -> int:
    """Remove the files of the last daemon of this name; how many bytes. Raises DiskError.

    Root may do so for another user.
    """
    path, nbytes = pool_dir(str(parent), name), 0
    if not os.path.lexists(path):
        return 0
    with contextlib.ExitStack() as opened:
        try:
            parent_fd = open_place(parent)
            opened.callback(os.close, parent_fd)
            found = os.stat(path.name, dir_fd=parent_fd, follow_symlinks=False)
            fd, lock_fd = _take(parent_fd, path, os.geteuid() or found.st_uid, IN_USE_TO_CLEAR)
            opened.callback(os.close, fd)
            opened.callback(os.close, lock_fd)
            for each in filter(_NAME.fullmatch, os.listdir(fd)):
                nbytes += os.stat(each, dir_fd=fd, follow_symlinks=False).st_blocks * 512
                os.unlink(each, dir_fd=fd)
            os.unlink(LOCK_NAME, dir_fd=fd)
            with contextlib.suppress(OSError):  # what is not the daemon's stays
                os.rmdir(path.name, dir_fd=parent_fd)
        except FileNotFoundError:
            pass
        except NotOurs as error:
            raise DiskError(str(error)) from None
        except OSError as error:
            raise DiskError(f"{path} cannot be cleared: {error.strerror}") from None
    return nbytes


def left(parent: Path, name: str) -> int:
    """The bytes of the files that the daemon of this name has there; changes nothing."""
    nbytes = 0
    with contextlib.suppress(OSError), os.scandir(pool_dir(str(parent), name)) as found:
        for each in found:
            if _NAME.fullmatch(each.name):
                nbytes += each.stat(follow_symlinks=False).st_blocks * 512
    return nbytes


def _take(parent_fd: int, path: Path, uid: int, in_use: str) -> tuple[int, int]:
    """Open and lock a directory of this user. `in_use` is the error if it is locked.

    Raises DiskError, NotOurs and OSError.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path.name, flags, dir_fd=parent_fd)
    try:
        found = os.fstat(fd)
        if found.st_uid != uid or found.st_mode & _OTHERS_WRITE:
            raise NotOurs(f"{path} is not {user(uid)}'s alone: it is {describe(found)}")
        os.fchmod(fd, 0o700)
        return fd, take_lock(fd, LOCK_NAME, frozenset({uid, os.geteuid()}))
    except LockHeld as error:
        os.close(fd)
        raise DiskError(in_use.format(path=path, who=error.who)) from None
    except BaseException:
        os.close(fd)
        raise


def new_name(name: str) -> str:
    """The name of a file that is being written."""
    return name.removesuffix(SUFFIX) + NEW_SUFFIX
