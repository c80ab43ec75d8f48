"""The host pool: a tmpfs file, populated before serving, mapped by clients.

Where the kernel can, its pages are huge ones: they are populated faster, clients take 512 times
fewer page faults, and a mapping's page tables take 512 times less memory.

A start makes it anew, or takes over the last one's (`leftovers.py`), and lets it grow. A file is
only ever unlinked, so that a client that still maps an old one keeps reading the bytes that were
there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ecd.base.clock import REAL, Clock
from ecd.memory import mapped_by
from ecd.memory.leftovers import KEPT_SUFFIXES, Leftovers, Unusable, find, generation_of
from ecd.memory.pool_dir import PoolDir, PoolError
from ecd_proto.contract import SMALL_POOL_BYTES, count_text, size_text
from ecd_proto.mapped_file import CHUNK_BYTES, HUGE_BYTES, MappedFile
from ecd_proto.shm.files import (
    INDEX_SUFFIX,
    POOL_SUFFIX,
    SESSIONS_SUFFIX,
    is_byte_locked,
    lock_byte,
    unlock_byte,
)

logger = logging.getLogger(__name__)

TAKEN_OVER_WITHIN_S = 1.0
"""Longest time in which small pages of a pool that is taken over are moved to huge ones."""
MAX_FAILURES = 8
"""Failed attempts in a row to get a huge page, after which no more are made."""
SPACE_WAIT_S = 10.0
"""How long a start waits for clients of a dead daemon to release its pool."""
SMALL_FILES_BYTES = 1 << 20
"""Files of others that take less, such as semaphores, are not worth a word."""


class HostPool:
    """Owns the daemon's directory in shared memory and the files in it."""

    problem = ""
    device_bytes = 0

    def __init__(
        self,
        directory: PoolDir,
        incarnation: str,
        wanted: int | str | None,
        cold: bool,
        clock: Clock = REAL,
    ) -> None:
        """Take the pool that lies in the directory, or make a new one, still unpopulated.

        `wanted` is its size, as configured; with `cold`, or if the one that lies there is larger,
        it is a new one. The directory is closed with the pool. Raises PoolError: space is short.
        """
        self.directory = directory
        self._incarnation, self._clock = incarnation, clock
        self.path = directory.path / f"{incarnation}{POOL_SUFFIX}"
        self.sessions_path = directory.path / f"{incarnation}{SESSIONS_SUFFIX}"
        shm_dir = directory.shm_dir
        try:
            cold |= directory.remove_foreign()
            nbytes = None if wanted is None else pool_bytes(wanted, shm_dir)
            self.leftovers = None if cold else self._find(nbytes)
            removed = self._remove_stale()
            self.populated_bytes = 0 if self.leftovers is None else self.leftovers.nbytes
            self.nbytes = nbytes or self.populated_bytes or pool_bytes(None, shm_dir)
            if self.leftovers is not None:
                self._fd = directory.open(self.path.name)
                self._resize(self.populated_bytes)  # a start that never served left more
            self._require_space(shm_dir, wait_s=SPACE_WAIT_S if removed else 0.0)
            if self.leftovers is None:
                self._fd = directory.create(self.path.name, self.nbytes)
            self.writable = MappedFile(self._fd, self.nbytes, writable=True)
            self.readable = MappedFile(self._fd, self.nbytes, writable=False)
            self._sessions_fd = directory.create(self.sessions_path.name)
        except BaseException:
            self._remove_files()
            raise
        self.inode = os.fstat(self._fd).st_ino
        self._populating, self._is_closing = threading.Lock(), False
        self._failures = 0  # to get a huge page, one after the other
        self.huge_bytes = 0
        """Bytes that lie in huge pages."""

    @property
    def generation(self) -> int:
        """How many daemons have had the pool, this one included."""
        return 1 if self.leftovers is None else self.leftovers.last + 1

    def _find(self, nbytes: int | None) -> Leftovers | None:
        try:
            found = find(self.directory.path, nbytes, self._clock)
            if isinstance(found, Leftovers):
                self.directory.link(found.pool.name, self.path.name)
        except OSError as error:
            found = Unusable(str(error))
        if isinstance(found, Unusable):
            path = self.directory.path
            who = ", ".join(mapped_by.processes(path))
            still = f"; still mapped by {who}" if who else ""
            logger.warning("what the last daemon left in %s is lost: %s%s", path, found.why, still)
            return None
        return found

    def _remove_stale(self) -> bool:
        """Remove files of dead daemons that are not taken over. False: there were none."""
        generations = () if self.leftovers is None else self.leftovers.generations
        kept = {self._incarnation, *(index.stem for _, index in generations)}
        stale = [
            name
            for name in map(Path, self.directory.names())
            if not (name.stem in kept and name.suffix in KEPT_SUFFIXES)
        ]
        if stale:
            count, path = count_text(len(stale), "file"), self.directory.path
            logger.info("removing %s that a daemon before this one left in %s", count, path)
        for name in sorted(stale, key=self._generation_of):  # a kill leaves the newest whole
            logger.debug("removing %s", name)
            self.directory.unlink(name.name)
        return bool(stale)

    def _generation_of(self, name: Path) -> int:
        """The generation whose file this is; 0 if no index says so."""
        index = self.directory.path / f"{name.stem}{INDEX_SUFFIX}"
        return (index.exists() and generation_of(index)) or 0

    def _require_space(self, shm_dir: str, wait_s: float) -> None:
        deadline_s = self._clock.now_s() + wait_s
        more_bytes = self.nbytes - self.populated_bytes
        while (free_bytes := (space := _space(shm_dir)).f_bavail * space.f_frsize) < more_bytes:
            if self._clock.now_s() >= deadline_s:
                lacking = size_text(more_bytes - free_bytes)
                raise PoolError(
                    f"the host pool needs {size_text(self.nbytes)} in {shm_dir}, which has "
                    f"{lacking} less free. {mapped_by.advice(self.directory.path)}"
                    f"{advice(self.nbytes, self.directory)}"
                )
            logger.info("waiting for clients of the last daemon to let go of its pool")
            self._clock.block(0.5)

    def _resize(self, nbytes: int) -> None:
        """Set the length of a file that was taken over. No client maps what this adds or cuts."""
        os.ftruncate(self._fd, nbytes)

    def populate(self, progress: Callable[[int], None]) -> None:
        """Touch every page, so that no writer pays for it. Blocking; run it off the loop.

        Pages become huge ones. Those that are taken over keep their bytes, and stay small
        where moving them would take longer than TAKEN_OVER_WITHIN_S: it is to serve at once.

        `progress` is told the populated bytes after each chunk. Raises PoolError when memory
        runs out on the way.
        """
        until_s = self._clock.now_s() + TAKEN_OVER_WITHIN_S
        for offset in range(0, self.nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, self.nbytes - offset)
            with self._populating:
                if self._is_closing:
                    return
                if offset + nbytes > self.populated_bytes:
                    self._populate_chunk(offset, nbytes)
                    self.populated_bytes = offset + nbytes
                elif self._clock.now_s() < until_s:
                    self._collapse(offset, nbytes)
            progress(offset + nbytes)

    def _collapse(self, offset: int, nbytes: int) -> None:
        """Move pages to huge ones: all at once, or else as many as possible."""
        if self._failures < MAX_FAILURES and self.writable.collapse(offset, nbytes):
            self.huge_bytes += nbytes // HUGE_BYTES * HUGE_BYTES
            return
        for piece in range(offset, offset + nbytes - HUGE_BYTES + 1, HUGE_BYTES):
            if self._failures >= MAX_FAILURES:
                return
            if self.writable.collapse(piece, HUGE_BYTES):
                self.huge_bytes += HUGE_BYTES
                self._failures = 0
            else:
                self._failures += 1

    def _populate_chunk(self, offset: int, nbytes: int) -> None:
        if self.leftovers is not None:
            self._resize(offset + nbytes)
        try:
            # Allocating first turns a lack of memory into an error instead of a SIGBUS.
            for first in range(offset, offset + nbytes, HUGE_BYTES):
                os.posix_fallocate(self._fd, _first_page(first, offset + nbytes), 1)
            self._collapse(offset, nbytes)
            os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise PoolError(
                f"memory ran out after {size_text(offset)} of {size_text(self.nbytes)} of "
                f"{self.path}. " + advice(self.nbytes, self.directory)
            ) from None
        if not self.writable.populate(offset, nbytes):
            view = self.writable.view(offset, nbytes)
            for page in range(0, nbytes, mmap.PAGESIZE):
                view[page] = view[page]  # in a pool that grows, one may hold an entry's bytes
        self.readable.populate(offset, nbytes)

    def is_locked(self, offset: int) -> bool:
        """Whether a client has locked this byte of the file of locks."""
        return is_byte_locked(self._sessions_fd, offset)

    def lock(self, offset: int, *, is_held: bool) -> None:
        """Hold the lock of this byte, for clients to see, or release it. Raises OSError."""
        (lock_byte if is_held else unlock_byte)(self._sessions_fd, offset)

    def close(self, keep: bool = False, was_served: bool = False) -> None:
        """Let go of the directory, and unlink the files unless the next daemon is to find them.

        Files of earlier generations go with them once the pool `was_served`, which may have reused
        its memory. Clients keep what they have mapped.
        """
        with self._populating:
            self._is_closing = True
        if self.leftovers is not None:
            if not was_served:
                self._resize(self.leftovers.nbytes)
            elif not keep:
                self.leftovers.remove()
        self._remove_files(KEPT_SUFFIXES if keep else ())
        os.close(self._fd)
        os.close(self._sessions_fd)

    def _remove_files(self, kept: Sequence[str] = ()) -> None:
        """Unlink this incarnation's files, other modules' included, except those kept."""
        for name in map(Path, self.directory.names()):
            if name.stem == self._incarnation and name.suffix not in kept:
                self.directory.unlink(name.name)
        self.directory.close(keep=bool(kept))


def pool_bytes(wanted: int | str | None, shm_dir: str) -> int:
    """The pool's size as configured: bytes, a share of the directory's size ("75%"), or None.

    None stands for a quarter of the directory's free space, at most 4 GiB, and a small one is
    logged. Shares are whole MiB. Raises PoolError, also for a share of less than one.
    """
    if isinstance(wanted, int):
        return wanted
    space = _space(shm_dir)
    free_bytes, all_bytes = (count * space.f_frsize for count in (space.f_bavail, space.f_blocks))
    if wanted is None:
        share, nbytes = "a quarter of that", min(free_bytes // 4, 4 << 30)
    else:
        share, nbytes = f"{wanted} of all", all_bytes * int(wanted.removesuffix("%")) // 100
    nbytes = nbytes >> 20 << 20
    if nbytes >= SMALL_POOL_BYTES or (nbytes and wanted is not None):
        return nbytes
    found = f"{shm_dir} has {size_text(free_bytes)} of {size_text(all_bytes)} free"
    more = f"`ecd-cli doctor` says what daemons have left there. Or {_enlarging(shm_dir, 1 << 30)}"
    if not nbytes:
        raise PoolError(f"{found}; {share} is too little for a pool. {more}")
    few = "the host pool has only %s, %s, as %s: few items fit. %s"
    logger.warning(few, size_text(nbytes), share, found, more)
    return nbytes


def _space(shm_dir: str) -> os.statvfs_result:
    try:
        return os.statvfs(shm_dir)
    except OSError as error:
        raise PoolError(
            f"{shm_dir} cannot be used: {error.strerror}. ECD_SHM_DIR or --shm-dir must name a "
            "directory on tmpfs; /dev/shm is the usual one"
        ) from None


def advice(nbytes: int, directory: PoolDir) -> str:
    """A sentence that says how to make room for a pool of this size in the directory."""
    space, ways = (
        _space(directory.shm_dir),
        "Make the pool smaller (ECD_HOST_POOL_BYTES or --host-pool-bytes)",
    )
    if nbytes <= space.f_blocks * space.f_frsize and _holds_more(directory):
        ways += f", remove what else lies in {directory.shm_dir}"
    return f"{ways}, or {_enlarging(directory.shm_dir, nbytes)}"


def _holds_more(directory: PoolDir) -> bool:
    """Whether files of others take memory beside the directory, or may do so unseen."""
    closed: list[OSError] = []
    found_bytes = 0
    for place, _, names in os.walk(directory.shm_dir, onerror=closed.append):
        for name in names if Path(place) != directory.path else ():
            with contextlib.suppress(OSError):
                found_bytes += 512 * os.lstat(Path(place, name)).st_blocks
    return bool(closed) or found_bytes >= SMALL_FILES_BYTES


def _enlarging(shm_dir: str, more_bytes: int) -> str:
    """How to enlarge the file system by so many bytes."""
    space = _space(shm_dir)
    gib = -(-(space.f_blocks * space.f_frsize + more_bytes) // (1 << 30))
    return (
        f"make the file system larger: under Docker `--shm-size={gib}g`; under Kubernetes an "
        f"emptyDir volume with `medium: Memory` and `sizeLimit: {gib}Gi` mounted at {shm_dir}, "
        "counted in the container's memory limit; elsewhere "
        f"`mount -o remount,size={gib}G {shm_dir}`"
    )


def _first_page(first: int, end: int) -> int:
    """The page of a huge page to allocate first: the others come from the same node's memory.

    A daemon that was started with interleaved memory has a page's node chosen by the page's number
    in the file, which must not differ by whole huge pages alone.
    """
    at = first + first // HUGE_BYTES * mmap.PAGESIZE % HUGE_BYTES
    return at if at < end else first
