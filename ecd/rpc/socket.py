"""The daemon's unix socket: owned before it is bound.

grpc lets a second server take over a socket's path without an error, so a lock file that dies
with the process decides whose path it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

MAX_PATH_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1


class SocketError(Exception):
    """The address cannot be used; the message says what to change."""


class OwnedSocket:
    """The right to listen on one path."""

    def __init__(self, address: str) -> None:
        """Take the path of a `unix:///...` address and clear what a dead daemon left there.

        Raises SocketError.
        """
        self.path = _path(address)
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._lock_fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SocketError(
                f"cannot listen on {address}: {error.strerror}: {error.filename}. "
                "ECD_ADDRESS or --address must name a place this user may write to"
            ) from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise SocketError(
                f"another daemon listens on {address}. Stop it, or give this one another "
                "ECD_ADDRESS (--address) and ECD_NAME (--name)"
            ) from None
        self._clear()

    def _clear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise SocketError(f"{self.path} is there and is not a socket; remove it first")
            self.path.unlink()

    @property
    def target(self) -> str:
        """What grpc binds."""
        return f"unix:{self.path}"

    def grant(self, gid: int | None) -> None:
        """After binding: owner and group may connect."""
        self.path.chmod(0o660)
        if gid is not None:
            os.chown(self.path, -1, gid)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock_fd)


def _path(address: str) -> Path:
    scheme, separator, rest = address.partition(":")
    if scheme != "unix" or not separator:
        raise SocketError(f"ECD_ADDRESS must be unix:///path/to/socket, not {address!r}")
    path = Path("/" + rest.lstrip("/")) if rest.startswith("/") else Path(rest).absolute()
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise SocketError(f"a socket's path has at most {MAX_PATH_BYTES} bytes: {path}")
    return path
