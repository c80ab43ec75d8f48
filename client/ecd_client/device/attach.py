"""Attaching to the daemon, which then knows the process that copies by DMA for a session."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct

from ecd_client.errors import EcdError
from ecd_proto.contract import MAX_POOLS
from ecd_proto.shm.session_page import ATTACHED, INTRODUCED

ATTACH_TIMEOUT_S = 5.0
"""How long the daemon may take to answer: as long as for a call."""


def attach(
    path: str, token: str, timeout_s: float = ATTACH_TIMEOUT_S, uid: int | None = None
) -> dict[int, int]:
    """Name the session to the daemon, from the process that will copy by DMA for it.

    `path` and `token` are Welcome's `attach_path` and `session`. Once this has returned, copies by
    DMA may begin, with the page's DMA_WORD set. The descriptors of device pools come back, by the
    pools' numbers; they are the caller's. Nothing is sent to a socket that is not user `uid`'s.
    Raises EcdError: the session must not copy by DMA.
    """
    if not path:
        raise EcdError("the daemon lets no client copy by DMA: it is older, or its log says why")
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            if uid not in (None, _owner(connection)):
                raise PermissionError(errno.EPERM, f"it is not user {uid}'s")
            connection.send(token.encode())
            limit = MAX_POOLS + 1
            answer, fds, _, _ = socket.recv_fds(
                connection, len(ATTACHED) + limit, limit, socket.MSG_CMSG_CLOEXEC
            )
    except (ConnectionResetError, BrokenPipeError):  # closed before the daemon read the token
        answer = b""
    except OSError as error:
        raise EcdError(f"the daemon does not answer on {path}: {error}") from None
    if not answer.startswith(ATTACHED):
        raise EcdError("the daemon does not attach the session: it is over, or the daemon is busy")
    numbers = answer.removeprefix(ATTACHED)
    if len(numbers) == len(fds):
        return dict(zip(numbers, fds, strict=True))
    for fd in fds:  # this process had no room for all of them
        os.close(fd)
    return {}


def introduce(path: str, token: str, uid: int) -> None:
    """Show the daemon which process has this session, for operators; no error, and no answer."""
    with (
        contextlib.suppress(OSError),  # an older daemon, or one with too many who attach
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection,
    ):
        connection.connect(path)
        if _owner(connection) == uid:
            connection.send(f"{INTRODUCED}{token}".encode())


def _owner(connection: socket.socket) -> int:
    """The user whose process listens at the other end."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    uid: int = credentials.unpack(said)[1]
    return uid
