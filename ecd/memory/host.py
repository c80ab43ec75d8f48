"""The host pool: a tmpfs file, populated before serving, mapped by clients.

A start makes it anew, or takes over what the life before it left (`before.py`). A file is only ever
unlinked, so that a client that still maps an old one keeps reading the bytes that were there.
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
from collections.abc import Callable, Sequence
from pathlib import Path

from ecd.memory import before
from ecd.memory.before import KEPT_SUFFIXES, Before
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

    def __init__(
        self, shm_dir: str, name: str, incarnation: str, wanted: int | str | None, cold: bool
    ) -> None:
        """Take the directory, and the pool that lies there or a new one, still unpopulated.

        `wanted` is its size, as configured; with `cold` it is a new one in any case. Raises
        PoolError: the directory is another daemon's or cannot be used, or space is short.
        """
        self.directory = pool_dir(shm_dir, name)
        self._lock_fd = _take_directory(self.directory)
        self._incarnation = incarnation
        self.path = self.directory / f"{incarnation}{POOL_SUFFIX}"
        self.sessions_path = self.directory / f"{incarnation}{SESSIONS_SUFFIX}"
        try:
            nbytes = None if wanted is None else pool_bytes(wanted, shm_dir)
            self.before = None if cold else self._find(nbytes)
            removed = self._remove_stale()
            if self.before is not None:
                self.nbytes = self.populated_bytes = self.before.nbytes
                self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            else:
                self.nbytes = pool_bytes(None, shm_dir) if nbytes is None else nbytes
                self.populated_bytes = 0
                _require_space(shm_dir, self.nbytes, wait_s=SPACE_WAIT_S if removed else 0.0)
                self._fd = create_file(self.path, self.nbytes)
            self.writable = Mapping(self._fd, self.nbytes, writable=True)
            self.readable = Mapping(self._fd, self.nbytes, writable=False)
            self._sessions_fd = create_file(self.sessions_path)
        except BaseException:
            self._remove_files()
            raise
        self.inode = os.fstat(self._fd).st_ino

    def _find(self, nbytes: int | None) -> Before | None:
        try:
            found = before.find(self.directory, nbytes)
            if isinstance(found, Before):
                os.link(found.pool, self.path)
        except OSError as error:
            found = str(error)
        if isinstance(found, str):
            logger.warning("what the last daemon left in %s is lost: %s", self.directory, found)
            return None
        return found

    def _remove_stale(self) -> bool:
        """Remove what dead daemons left and this one does not take over. Whether there was any."""
        lives = () if self.before is None else self.before.lives
        kept = {self._incarnation, *(index.stem for _, index in lives)}
        stale = [
            path
            for path in self.directory.iterdir()
            if path.suffix in SUFFIXES
            and re.fullmatch(r"[0-9a-f]+", path.stem)
            and not (path.stem in kept and path.suffix in KEPT_SUFFIXES)
        ]
        for path in stale:
            logger.info("removing %s, left by a daemon before this one", path)
            path.unlink()
        return bool(stale)

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
        if self.before is not None:
            return  # it is
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

    def close(self, keep: bool = False) -> None:
        """Let go of the directory, and unlink the files unless a later life is to find them.

        Clients keep what they have mapped.
        """
        if self.before is not None and not keep:
            self.before.remove()
        self._remove_files(KEPT_SUFFIXES if keep else ())
        os.close(self._fd)
        os.close(self._sessions_fd)
        os.close(self._lock_fd)

    def _remove_files(self, kept: Sequence[str] = ()) -> None:
        """Of this life's, and others put theirs beside the pool, all but those."""
        ours = self.directory.glob(f"{self._incarnation}.*")
        for path in (*ours, self.directory / LOCK_NAME):
            if path.suffix not in kept:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()


def clear(shm_dir: str, name: str) -> int:
    """Remove what the last daemon of this name left; the bytes of it. Raises PoolError."""
    directory = pool_dir(shm_dir, name)
    if not directory.is_dir():
        return 0
    lock_fd = _take_directory(directory)
    nbytes = 0
    for path in directory.iterdir():
        if path.suffix in SUFFIXES or path.name == LOCK_NAME:
            stat = path.stat()
            nbytes += stat.st_blocks * 512 // stat.st_nlink
            path.unlink()
    os.close(lock_fd)
    with contextlib.suppress(OSError):
        directory.rmdir()
    return nbytes


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
