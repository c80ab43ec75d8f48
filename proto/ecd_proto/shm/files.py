"""The files under `/dev/shm/ecd-<name>/`, which the daemon makes and clients open, and their locks.

lock                    the daemon's for its life (flock): one daemon per directory
<incarnation>.pool      the host pool; extents start and end on granules
<incarnation>.sessions  one byte per session, locked by the client that owns the session; beyond
                        KEY_LOCKS, at a place that follows from the key, one byte per key that a
                        client has locked among those of its node (advice), and beyond ELSEWHERE,
                        one per key that the daemon waits for, as another node makes it
<incarnation>.index     where each stored entry lies: written by the daemon, read by clients
<incarnation>.pins      one page per session (pins, claims), which its client writes
<incarnation>.puts      the same file under the name that a recovering daemon gives it, so that no
                        late client opens it
<incarnation>.bell      the doorbell, a datagram socket: a client sends its page's number there
<incarnation>.attach    a SOCK_SEQPACKET socket: a client that will copy by DMA names its session
                        there, once, and so shows the daemon its process

Every start makes new files and unlinks those of dead daemons. No file is truncated or reused: a
client that still maps an old pool keeps reading the bytes that were there.

A client's byte lock is an open file description lock (Linux, `fcntl(2)`). The kernel drops the lock
when the last process that shares the description is gone. A held lock therefore proves that the
client may still touch the pool, however its stream ended.

A lock does not cover DMA. A device may go on writing for a dead process, so a client that copies by
DMA also sets a word of its page (`session_page.DMA_WORD`).
"""

from __future__ import annotations

import fcntl
import os
import struct
from hashlib import blake2b
from pathlib import Path

LOCK_NAME = "lock"
POOL_SUFFIX = ".pool"
SESSIONS_SUFFIX = ".sessions"
INDEX_SUFFIX = ".index"
PINS_SUFFIX = ".pins"
PUTS_SUFFIX = ".puts"
DOORBELL_SUFFIX = ".bell"
ATTACH_SUFFIX = ".attach"
SOCKET_SUFFIXES = (DOORBELL_SUFFIX, ATTACH_SUFFIX)
SUFFIXES = (
    *(POOL_SUFFIX, SESSIONS_SUFFIX, INDEX_SUFFIX),
    *(PINS_SUFFIX, PUTS_SUFFIX, *SOCKET_SUFFIXES),
)

KEY_LOCKS = 1 << 62
"""The first of the bytes that stand for keys in the file of locks: far beyond its end."""
ELSEWHERE = KEY_LOCKS | 1 << 61
"""The first of those that the daemon locks while it waits for a key that another node makes."""

IN_MEMORY = "tmpfs", "ramfs"
"""Filesystems whose files lie in memory."""
GRANULE_BYTES = 4096
"""Extents start and end on multiples of a granule: a page, so that no two share one."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, len, pid


def filesystem(place: str | Path) -> str:
    """The type of the filesystem of a file or directory, such as tmpfs; "" if nothing tells."""
    try:
        device = Path(place).stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((m.partition(" - ")[2].split()[0] for m in mounts if m.split()[2] == number), "")


def pool_dir(shm_dir: str, name: str) -> Path:
    """The directory that holds the files of the daemon called `name`."""
    return Path(shm_dir) / f"ecd-{name}"


def granules_bytes(nbytes: int) -> int:
    """The size of an extent for so many bytes: whole granules, at least one."""
    return max(1, -(-nbytes // GRANULE_BYTES)) * GRANULE_BYTES


def lock_byte(fd: int, offset: int) -> None:
    """Lock a byte. Raises BlockingIOError if another description holds the lock."""
    flock = _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock)


def unlock_byte(fd: int, offset: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, offset, 1, 0))


def is_file_locked(name: str, directory_fd: int | None = None) -> bool:
    """Whether a daemon has locked a file (flock). Raises OSError where it cannot be opened.

    The test takes the lock for a moment, which a daemon that starts outwaits.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=directory_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def key_offset(namespace: str, mm_hash: str) -> int:
    """The byte that stands for the key. Two keys have the same once in 2**61 pairs."""
    name = f"{namespace}\0{mm_hash}".encode()
    return KEY_LOCKS + (int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 3)


def elsewhere_offset(namespace: str, mm_hash: str) -> int:
    """The byte that says of the key that another node makes it."""
    return key_offset(namespace, mm_hash) | ELSEWHERE


def is_byte_locked(fd: int, offset: int) -> bool:
    """Whether another open file description holds the byte's lock."""
    return _is_locked(fd, offset, 1)


def is_any_session_locked(fd: int) -> bool:
    """Whether any client of the daemon that made this file may still touch the pool."""
    return _is_locked(fd, 0, 0)  # to the end


def _is_locked(fd: int, offset: int, nbytes: int) -> bool:
    flock = _FLOCK.pack(fcntl.F_WRLCK, 0, offset, nbytes, 0)
    found: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, flock))[0]
    return found != fcntl.F_UNLCK
