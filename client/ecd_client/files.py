"""Files that the daemon names, opened safely."""

from __future__ import annotations

import errno
import os
import stat


def open_file(path: str, flags: int, uid: int | None = None) -> int:
    """Open a file that the daemon named, if it is a regular file of user `uid` and no link.

    Otherwise a daemon could lead its clients to their own files, or to another daemon's. Raises
    OSError.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and uid in (None, found.st_uid):
        return fd
    os.close(fd)
    cause = f"not a file of the owner of the daemon's socket (uid {uid})"
    raise PermissionError(errno.EPERM, cause, path)
