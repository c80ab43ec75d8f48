"""The host pool: one tmpfs file per daemon life, populated before serving, mapped by clients.

The file is made anew by every start and only ever unlinked, so that a client that still maps an
old one keeps reading the bytes that were there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from ecd_proto.mapping import CHUNK_BYTES, Mapping
from ecd_proto.shm import (
    LOCK_NAME,
    POOL_SUFFIX,
    SESSIONS_SUFFIX,
    SUFFIXES,
    is_session_locked,
    pool_dir,
)

logger = logging.getLogger(__name__)

SPACE_WAIT_S = 10.0
"""How long a start waits for clients of a dead daemon to let go of its pool."""


class PoolError(Exception):
    """The pool cannot be had; the message says what to change."""


class HostPool:
    """Owns the daemon's directory in shared memory and the files in it."""

    def __init__(self, shm_dir: str, name: str, incarnation: str, nbytes: int) -> None:
        """Take the directory, clean up after dead daemons and create the pool, still unpopulated.

        Raises PoolError: the directory is another daemon's or cannot be used, or space is short.
        """
        self.nbytes = nbytes
        self.populated_bytes = 0
        self.directory = pool_dir(shm_dir, name)
        self._lock_fd = _take_directory(self.directory)
        ours = "|".join(map(re.escape, SUFFIXES))
        stale = [
            path
            for path in self.directory.iterdir()
            if re.fullmatch(rf"[0-9a-f]+({ours})", path.name)
        ]
        for path in stale:
            logger.info("removing %s, left by a daemon that died", path)
            path.unlink()
        self._incarnation = incarnation
        self.path = self.directory / f"{incarnation}{POOL_SUFFIX}"
        self.sessions_path = self.directory / f"{incarnation}{SESSIONS_SUFFIX}"
        try:
            _require_space(shm_dir, nbytes, wait_s=SPACE_WAIT_S if stale else 0.0)
            self._fd = create_file(self.path, nbytes)
            self.writable = Mapping(self._fd, nbytes, writable=True)
            self.readable = Mapping(self._fd, nbytes, writable=False)
            self._sessions_fd = create_file(self.sessions_path)
        except BaseException:
            self._remove_files()
            raise
        self.inode = os.fstat(self._fd).st_ino

    def grant_group(self, gid: int) -> None:
        """Let members of a group open the files."""
        for path in (self.directory, *self.directory.iterdir()):
            if path.name != LOCK_NAME:
                os.chown(path, -1, gid)

    def populate(self, progress: Callable[[int], None]) -> None:
        """Touch every page, so that no writer pays for it. Blocking; run it off the loop.

        `progress` is told the populated bytes after each chunk. Raises PoolError when memory
        runs out on the way.
        """
        for offset in range(0, self.nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, self.nbytes - offset)
            self._populate_chunk(offset, nbytes)
            self.populated_bytes = offset + nbytes
            progress(self.populated_bytes)

    def _populate_chunk(self, offset: int, nbytes: int) -> None:
        try:
            # Allocating first turns a lack of memory into an error instead of a SIGBUS.
            os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise PoolError(
                f"memory ran out after {offset} of {self.nbytes} bytes of {self.path}. "
                + advice(self.nbytes)
            ) from None
        if not self.writable.populate(offset, nbytes):
            view = self.writable.view(offset, nbytes)
            for page in range(0, nbytes, mmap.PAGESIZE):
                view[page] = 0
        self.readable.populate(offset, nbytes)

    def is_session_locked(self, offset: int) -> bool:
        """Whether the client of this session may still touch the pool."""
        return is_session_locked(self._sessions_fd, offset)

    def close(self) -> None:
        """Unlink the files and let go of the directory. Clients keep what they have mapped."""
        self._remove_files()
        os.close(self._fd)
        os.close(self._sessions_fd)
        os.close(self._lock_fd)

    def _remove_files(self) -> None:
        """All of this life's: others put theirs beside the pool."""
        ours = self.directory.glob(f"{self._incarnation}.*")
        for path in (*ours, self.directory / LOCK_NAME):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()


def pool_bytes(wanted: int | str | None, shm_dir: str) -> int:
    """As configured: bytes, a share of the directory's size ("75%"), or by default.

    That is a quarter of what the directory has free, at most 4 GiB. Shares are whole MiB. Raises
    PoolError.
    """
    if isinstance(wanted, int):
        return wanted
    space = _space(shm_dir)
    if wanted is None:
        nbytes = min(space.f_bavail * space.f_frsize // 4, 4 << 30)
    else:
        nbytes = space.f_blocks * space.f_frsize * int(wanted.removesuffix("%")) // 100
    return nbytes >> 20 << 20


def _take_directory(directory: Path) -> int:
    """Create and lock the directory; the lock lives as long as the returned descriptor."""
    try:
        directory.mkdir(mode=0o770, exist_ok=True)
        for _ in range(10):
            fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(directory / LOCK_NAME).st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)  # the daemon before us unlinked it between our open and our lock
            directory.mkdir(mode=0o770, exist_ok=True)
    except BlockingIOError:
        raise PoolError(
            f"another daemon uses {directory}. Stop it, or give this one a name of its own: "
            "ECD_NAME or --name"
        ) from None
    except OSError as error:
        raise PoolError(
            f"{directory} cannot be used: {error.strerror}. ECD_SHM_DIR or --shm-dir must name a "
            "directory on tmpfs that this user may write to; /dev/shm is the usual one"
        ) from None
    raise PoolError(f"the lock of {directory} keeps changing hands")


def create_file(path: Path, nbytes: int = 0) -> int:
    """A new file that clients can open, without memory as yet. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
    os.fchmod(fd, 0o660)
    os.ftruncate(fd, nbytes)
    return fd


def _space(shm_dir: str) -> os.statvfs_result:
    try:
        return os.statvfs(shm_dir)
    except OSError as error:
        raise PoolError(
            f"{shm_dir} cannot be used: {error.strerror}. ECD_SHM_DIR or --shm-dir must name a "
            "directory on tmpfs; /dev/shm is the usual one"
        ) from None


def _require_space(shm_dir: str, nbytes: int, wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    while (free_bytes := (space := _space(shm_dir)).f_bavail * space.f_frsize) < nbytes:
        if time.monotonic() >= deadline_s:
            raise PoolError(
                f"the host pool needs {nbytes} bytes in {shm_dir}, which has {free_bytes} free. "
                + advice(nbytes)
            )
        logger.info("waiting for clients of the last daemon to let go of its pool")
        time.sleep(0.5)


def advice(nbytes: int) -> str:
    """What to do when the directory has no room for a pool of this size."""
    gib = -(-nbytes // (1 << 30)) + 1
    return (
        "Make the pool smaller (ECD_HOST_POOL_BYTES or --host-pool-bytes), or the file system "
        f"larger: under Docker `--shm-size={gib}g`; under Kubernetes an emptyDir volume with "
        f"`medium: Memory` and `sizeLimit: {gib}Gi` mounted at /dev/shm, counted in the "
        f"container's memory limit; elsewhere `mount -o remount,size={gib}G /dev/shm`"
    )
