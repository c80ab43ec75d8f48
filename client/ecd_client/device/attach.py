"""Attaching to the daemon, which then knows the process that copies by DMA for a session."""

from __future__ import annotations

import socket

from ecd_client.errors import EcdError
from ecd_proto.shm.session_page import ATTACHED

ATTACH_TIMEOUT_S = 5.0
"""How long the daemon may take to answer: as long as for a call."""


def attach(path: str, token: str, timeout_s: float = ATTACH_TIMEOUT_S) -> None:
    """Name the session to the daemon, from the process that will copy by DMA for it.

    `path` and `token` are Welcome's `attach_path` and `session`. Once this has returned, copies by
    DMA may begin, with the page's DMA_WORD set. Raises EcdError: the session must not copy by DMA.
    """
    if not path:
        raise EcdError("the daemon lets no client copy by DMA: it is older, or its log says why")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.send(token.encode())
            answer = connection.recv(len(ATTACHED) + 1)
    except (ConnectionResetError, BrokenPipeError):  # closed before the daemon read the token
        answer = b""
    except OSError as error:
        raise EcdError(f"the daemon does not answer on {path}: {error}") from None
    if answer != ATTACHED:
        raise EcdError("the daemon does not attach the session: it is over, or the daemon is busy")
