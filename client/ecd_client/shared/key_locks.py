"""Locks of keys: advice among the clients of a node, who makes what is not stored.

A lock is one of an open file description (`fcntl(2)`) on a byte that stands for the key, so that it
ends with its process, however that ends. It ends in time, too: its client may have done all that it
will do, and wait for its user.
"""

from __future__ import annotations

import contextlib
import threading

from ecd_client import clock
from ecd_proto.shm.files import (
    elsewhere_offset,
    is_byte_locked,
    key_offset,
    lock_byte,
    unlock_byte,
)

MAX_LOCKS = 256
"""Locks of one session; with more, the oldest ends: the kernel walks through all of a file."""


class KeyLocks:
    """The locks of one session; thread-safe."""

    def __init__(self, fd: int) -> None:
        """`fd` is the file of the sessions' locks, and stays its owner's."""
        self._fd = fd
        self._until_s: dict[int, float] = {}  # by byte, the oldest first
        self._lock = threading.RLock()  # a garbage-collected item may close the session within it

    def take(self, namespace: str, mm_hash: str, seconds: float) -> bool:
        """Lock the key for this long. False: another session has locked it."""
        offset, until_s = key_offset(namespace, mm_hash), clock.now_s() + seconds
        with self._lock:
            if self._fd < 0:
                return True
            if self._until_s.pop(offset, None) is None:  # else the kernel knows of it already
                try:
                    lock_byte(self._fd, offset)
                except BlockingIOError:
                    return False
                except OSError:  # the kernel has no room for it: as if there were no locks
                    return True
            self._until_s[offset] = until_s
            if len(self._until_s) > MAX_LOCKS:
                self._release(next(iter(self._until_s)))
        return True

    def is_taken(self, namespace: str, mm_hash: str) -> bool:
        """Whether another session has locked the key."""
        return self._is_locked(key_offset(namespace, mm_hash))

    def is_made_elsewhere(self, namespace: str, mm_hash: str) -> bool:
        """Whether the daemon waits for another node that makes the key."""
        return self._is_locked(elsewhere_offset(namespace, mm_hash))

    def _is_locked(self, offset: int) -> bool:
        with self._lock:
            try:
                return self._fd >= 0 and is_byte_locked(self._fd, offset)
            except OSError:
                return False

    def release(self, namespace: str, mm_hash: str) -> None:
        """End the lock of the key, if there is one."""
        with self._lock:
            self._release(key_offset(namespace, mm_hash))

    def release_all(self) -> None:
        with self._lock:
            for offset in list(self._until_s):
                self._release(offset)

    def expire(self) -> None:
        """End the expired locks."""
        with self._lock:
            now_s = clock.now_s()
            for offset, until_s in list(self._until_s.items()):
                if until_s <= now_s:
                    self._release(offset)

    def end(self) -> None:
        """End all locks, and touch the file no more: items may keep it open long after this."""
        with self._lock:
            self.release_all()
            self._fd = -1

    def cut_off(self) -> None:
        """In a forked child: the locks are the parent's."""
        self._lock = threading.RLock()
        self._fd = -1

    def _release(self, offset: int) -> None:
        if self._until_s.pop(offset, None) is not None and self._fd >= 0:
            with contextlib.suppress(OSError):
                unlock_byte(self._fd, offset)
