"""The daemon's unix socket: owned before it is bound.

grpc lets a second server take over a socket's path without an error, so a lock file that dies
with the process decides whose path it is.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from ecd.base.ownership import LockHeld, NotOurs, describe, open_place, take_lock

MAX_PATH_BYTES = 106  # sizeof(sockaddr_un.sun_path) - 1, without what is appended to bind it


class SocketError(Exception):
    """The address cannot be used; the message says what to change."""


class OwnedSocket:
    """The right to listen on one path."""

    def __init__(self, address: str) -> None:
        """Take the path of a `unix:///...` address and clear what a dead daemon left there.

        Raises SocketError.
        """
        self.path = _path(address)
        self._lock_name = f"{self.path.name}.lock"
        self._bound_name = f"{self.path.name}~"
        with contextlib.ExitStack() as opened:
            try:
                with contextlib.suppress(FileExistsError):  # no deeper: a typo is no new place
                    self.path.parent.mkdir(mode=0o755)
                self._place_fd = open_place(self.path.parent)
                opened.callback(os.close, self._place_fd)
                owners = frozenset({os.geteuid()})
                self._lock_fd = take_lock(self._place_fd, self._lock_name, owners)
                opened.callback(os.close, self._lock_fd)
                self._clear(self.path.name)
                self._clear(self._bound_name)
            except LockHeld as error:
                raise SocketError(
                    f"another daemon{error.who} listens on {address}. Stop it, or give this one "
                    "another ECD_ADDRESS (--address) and ECD_NAME (--name)"
                ) from None
            except NotOurs as error:
                raise SocketError(
                    f"cannot listen on {address}: {error}. ECD_ADDRESS or --address may name "
                    "another place"
                ) from None
            except OSError as error:
                raise SocketError(
                    f"cannot listen on {address}: {error.strerror}: {error.filename}. "
                    "ECD_ADDRESS or --address must name a place this user may write to"
                ) from None
            opened.pop_all()

    def _clear(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=self._place_fd, follow_symlinks=False)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise SocketError(
                    f"{self.path.with_name(name)} is not a socket of this user: it is "
                    f"{describe(found)}. Remove it first"
                )
            os.unlink(name, dir_fd=self._place_fd)

    def bind(self, server: Any, gid: int | None) -> None:
        """Let the server listen on the path, in place of one before it.

        grpc unlinks what it has bound when it ends, even if another server has bound it meanwhile:
        it binds another path, which is renamed. Raises RuntimeError, OSError and SocketError: it
        cannot be bound now.
        """
        self._clear(self._bound_name)
        bound = self.path.with_name(self._bound_name)
        server.add_insecure_port(f"unix:{bound}")
        try:
            _give(bound, gid)
            bound.rename(self.path)
        except FileNotFoundError as error:
            raise RuntimeError(f"another server ended: {error}") from None

    def close(self) -> None:
        for name in (self.path.name, self._lock_name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._place_fd)
        os.close(self._lock_fd)
        os.close(self._place_fd)


def _give(path: Path, gid: int | None) -> None:
    """Let the owner connect, and members of the group if there is one."""
    if gid is not None:
        os.chown(path, -1, gid)
    path.chmod(0o600 if gid is None else 0o660)


def _path(address: str) -> Path:
    scheme, separator, rest = address.partition(":")
    if scheme != "unix" or not separator:
        raise SocketError(f"ECD_ADDRESS must be unix:///path/to/socket, not {address!r}")
    path = Path("/" + rest.lstrip("/")) if rest.startswith("/") else Path(rest).absolute()
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise SocketError(f"a socket's path has at most {MAX_PATH_BYTES} bytes: {path}")
    return path
