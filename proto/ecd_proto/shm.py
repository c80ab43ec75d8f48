"""The files under `/dev/shm/ecd-<name>/` that the daemon makes and clients open.

lock                    held by the daemon for its life (flock): one daemon per directory
<incarnation>.pool      the host pool; extents start and end on pages
<incarnation>.sessions  one byte per session, locked by the client that owns it

Every start makes new files and unlinks those of dead daemons, never truncating or reusing them:
a client that still maps an old pool keeps reading the bytes that were there.

A client's byte lock is an open file description lock (Linux, `fcntl(2)`). The kernel drops it
when the last process that shares the description is gone, so that holding it proves that the
client may still touch the pool, however its stream ended.
"""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path

LOCK_NAME = "lock"
POOL_SUFFIX = ".pool"
SESSIONS_SUFFIX = ".sessions"

_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, len, pid


def pool_dir(shm_dir: str, name: str) -> Path:
    """Where the daemon called `name` keeps its files."""
    return Path(shm_dir) / f"ecd-{name}"


def lock_session(fd: int, offset: int) -> None:
    """Claim a session's byte. Raises BlockingIOError if another description holds it."""
    flock = _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock)


def is_session_locked(fd: int, offset: int) -> bool:
    """Whether a client, as seen from another open file description, holds its session's byte."""
    flock = _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0)
    found: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, flock))[0]
    return found != fcntl.F_UNLCK
