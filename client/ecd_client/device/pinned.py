"""Pools whose pages are pinned in this process, so that a GPU copies from and to them by DMA.

A pool is mapped and registered with CUDA once per process, however many sessions use it. It is
registered in pieces, on a thread of its own; one copy must not cross from one piece into the next.
CUDA copies from memory that is not registered too, through a buffer of its own, at a third of the
speed.

All launches of the process wait while the driver registers or unregisters, and calls that follow at
once leave them no gap: so a piece is small, and a pause as long as its call comes after it. The
driver's locks are the node's, and all engines pin anew after a restart of the daemon: so they take
turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from ecd_client import clock
from ecd_client.device import completions
from ecd_client.errors import RETRY_S, DeviceError
from ecd_proto.contract import size_text
from ecd_proto.mapped_file import MappedFile

logger = logging.getLogger(__name__)

PINNED_PIECE_BYTES = 32 << 20
"""Bytes registered by one call, which takes some 1 ms: the longest that a launch waits for it."""
TURN_S = 0.05
"""How long a call waits for those of other engines, one of which may be stopped within it."""
PIN_PROGRESS_S = 2.0

T = TypeVar("T")


class Pinning(NamedTuple):
    """The progress of pinning in a process: bytes and seconds once it ended, or the refusal."""

    nbytes: int = 0
    took_s: float = 0.0
    failure: str | None = None


class PinnedPool:
    """One pool's file, mapped for DMA; `pinned_bytes` of it, from its first on, are registered."""

    def __init__(self, fd: int, nbytes: int, device: int, directory: str = "") -> None:
        """Map the file, and begin to register it. Raises OSError.

        Engines with the same directory take turns.
        """
        self.nbytes, self.pinned_bytes = nbytes, 0
        self.outcome = Pinning()
        """All zero until nothing more will be registered."""
        self.users = 0  # sessions; changed by `acquire` and `release` alone
        self._device, self._turns = device, _Turns(directory)
        self._mapping = MappedFile(fd, nbytes, writable=True)
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._register, name="ecd-pin", daemon=True)
        self._thread.start()

    def parts(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Addresses and sizes of the parts to copy one by one; empty: not all of it is pinned."""
        end = offset + nbytes
        if end > self.pinned_bytes:
            return []
        parts = []
        while offset < end:
            part = min(end, (offset // PINNED_PIECE_BYTES + 1) * PINNED_PIECE_BYTES) - offset
            parts.append((self._mapping.address + offset, part))
            offset += part
        return parts

    def wait(self) -> int:
        """Wait until nothing more will be registered; returns `pinned_bytes`."""
        self._thread.join()
        return self.pinned_bytes

    def _register(self) -> None:
        from ecd_client.device import driver  # cuda-bindings, which not every process has

        started_s = told_s = clock.now_s()
        failure: str | None = None
        try:
            with driver.on(self._device):
                while self.pinned_bytes < self.nbytes and self._turns.call(self._register_next):
                    if clock.now_s() - told_s >= PIN_PROGRESS_S:
                        told_s = clock.now_s()
                        percent = 100 * self.pinned_bytes / self.nbytes
                        logger.info("pinning the pool: %.0f %%", percent)
        except DeviceError as error:
            failure = str(error)
            logger.warning(
                "the pool cannot be pinned, and GPU copies of what lies beyond %s take "
                "three times as long: %s",
                size_text(self.pinned_bytes),
                error,
            )
        took_s = clock.now_s() - started_s
        self.outcome = Pinning(self.pinned_bytes, took_s, failure)
        if failure is None and not self._closing:
            logger.info("pinned %s in %.2f s", size_text(self.nbytes), took_s)

    def _register_next(self) -> bool:
        """Register one more piece. False: this object is being closed. Raises DeviceError."""
        from ecd_client.device import driver

        with self._lock:
            if self._closing:
                return False
            nbytes = min(PINNED_PIECE_BYTES, self.nbytes - self.pinned_bytes)
            driver.register(self._mapping.address + self.pinned_bytes, nbytes)
            self.pinned_bytes += nbytes
            return True

    def unregister(self) -> None:
        """Unregister all pieces. No copy may be under way (R4). Raises DeviceError."""
        from ecd_client.device import driver

        with self._lock:  # a piece that is being registered comes first
            self._closing = True
            pieces = range(0, self.pinned_bytes, PINNED_PIECE_BYTES)
            self.pinned_bytes = 0
        with driver.on(self._device):
            for offset in pieces:
                self._turns.call(partial(driver.unregister, self._mapping.address + offset))

    def cut_off(self) -> None:
        """In a forked child: writes here no longer reach the pool."""
        self._mapping.cut_off()


_driver = threading.Lock()


class _Turns:
    """Makes calls of the driver with pauses between them, and one at a time in the node.

    The lock is the directory's, and is opened for each call: another daemon may have made the
    directory anew.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._patience_s, self._took_s = TURN_S, 0.0

    def call(self, function: Callable[[], T]) -> T:
        """Make a call, then leave the driver to the engine's launches for as long as it took."""
        with _driver:  # while one pool is unpinned, the next is pinned: pauses of both, not of each
            with self._turn() as has_waited:
                if has_waited:  # the pause after the other engine's call
                    clock.sleep(self._took_s)
                started_s = clock.now_s()
                result = function()
                self._took_s = clock.now_s() - started_s
            clock.sleep(self._took_s)
            return result

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Keep other engines from their calls; whether theirs had to be waited for."""
        try:
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # the daemon has stopped, and no engine pins its pool anew
            yield False
            return
        try:
            yield self._wait(fd)
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that is forked now has the descriptor, too
            os.close(fd)

    def _wait(self, fd: int) -> bool:
        """Wait for the lock while patience lasts, which each wait in vain halves.

        Returns whether another engine had it.
        """
        until_s, has_waited = clock.now_s() + self._patience_s, False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if clock.now_s() >= until_s:
                    self._patience_s /= 2
                    return True
            except OSError:  # there are no such locks
                return False
            else:
                self._patience_s = TURN_S
                return has_waited
            has_waited = True
            clock.sleep(RETRY_S)


_lock = threading.RLock()  # which a garbage-collected item may take within
_pools: dict[tuple[int, int, int], PinnedPool] = {}  # by device, inode and bytes of the file
_leaving: set[PinnedPool] = set()
"""Pools that a session let go of, until that is done; those that stay registered stay mapped."""


def acquire(fd: int, nbytes: int, device: int, directory: str) -> PinnedPool:
    """The pinned pool of this file in the directory, for one session until `release`.

    Raises OSError.
    """
    found = os.fstat(fd)
    completions.start()
    with _lock:
        place = found.st_dev, found.st_ino, nbytes  # a restart may let the pool grow
        pool = _pools.get(place)
        if pool is None:
            pool = _pools[place] = PinnedPool(fd, nbytes, device, directory)
        pool.users += 1
        return pool


def release(pool: PinnedPool) -> None:
    """Release a session's pool, and unpin it with the last one, in the background."""
    _leaving.add(pool)
    completions.aside(lambda: _release(pool))


def _release(pool: PinnedPool) -> None:
    with _lock:
        pool.users -= 1
        is_last = pool.users == 0
        if is_last:
            for place in [place for place, each in _pools.items() if each is pool]:
                del _pools[place]
    if not is_last:
        _leaving.discard(pool)
        return
    thread = threading.Thread(target=_unregister, args=(pool,), name="ecd-unpin", daemon=True)
    try:
        thread.start()  # seconds for a large pool, in which others' holds must end
    except RuntimeError:  # no more threads
        _unregister(pool)


def _unregister(pool: PinnedPool) -> None:
    try:
        pool.unregister()
    except DeviceError as error:
        logger.warning("a pool stays pinned in this process: %s", error)
        return
    _leaving.discard(pool)


def _in_child() -> None:
    global _lock, _driver
    _lock, _driver = threading.RLock(), threading.Lock()
    for pool in _leaving:
        pool.cut_off()
    _pools.clear()
    _leaving.clear()


os.register_at_fork(after_in_child=_in_child)  # its pools are the parent's
