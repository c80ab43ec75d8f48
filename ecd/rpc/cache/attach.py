"""Clients that copy by DMA: a socket on which each names its session, and the end of their copies.

A device goes on copying for a process that was killed, after the kernel has dropped the session's
lock. So a client attaches before its first copy. The connection shows the daemon its process, as a
pidfd: that is ready only when the process has closed all its files, the device's among them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import select
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ecd.core.model.types import SessionId
from ecd_proto.shm.session_page import (
    ATTACHED,
    DMA_BLIND_GRACE_S,
    DMA_GRACE_S,
    DMA_LIMIT_S,
    INTRODUCED,
    SO_PEERPIDFD,
)

logger = logging.getLogger(__name__)

SILENT_S = 5.0
"""How long a connection may be silent: a client sends its token as soon as it has connected."""
MAX_TOKEN_BYTES = 64
"""More than the length of a token: the kernel discards the rest of a longer packet."""
BACKLOG = 4096
"""Connections that the kernel queues: as many as there can be sessions, which may start at once."""
MAX_SILENT = 128
"""Silent connections: all may send in one turn of the loop, at 20 us each."""
ACCEPTED_AT_A_TIME = 16
"""Connections accepted in one turn of the event loop: each takes some 20 us."""
PF_EXITING, STAT_FLAGS = 0x4, 6
"""A bit of a process's flags (proc(5)), and their place after the name in its `stat` file."""
NO_FILES_PAUSE_S = 1.0
"""Pause once descriptors have run out: the queued connection would wake the loop in each turn."""


class AttachedSessions(Protocol):
    """Sessions of this node's clients; `attach` takes charge of the pidfd if it returns True."""

    @property
    def clients(self) -> int: ...

    def attach(self, token: str, pidfd: int | None) -> bool: ...

    def introduce(self, token: str, process: Process) -> None: ...


class Process(NamedTuple):
    """A process that has connected, as the kernel says."""

    pid: int
    """In the daemon's own namespace; 0: it is not seen there."""
    uid: int


UNKNOWN = Process(0, -1)


class Exported(Protocol):
    """Memory that clients import by a descriptor, if it is there."""

    @property
    def fd(self) -> int | None: ...


class AttachSocket:
    """Attaches a session's client: it sends the session's token, and is answered ATTACHED.

    Every client introduces itself here, too: it sends INTRODUCED and the token, without an answer.
    Each connection is for one packet. One that sends no open session's token is closed without an
    answer, and so is the oldest where more are silent than there are sessions, or than MAX_SILENT.
    """

    def __init__(self, path: Path) -> None:
        """Bind the socket. Raises OSError: the path is too long, most likely."""
        self.path = path
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}  # the oldest first
        self._pause: asyncio.TimerHandle | None = None
        self._devices: Mapping[int, Exported] = {}
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            self._socket.bind(str(path))
            os.chmod(path, 0o600)
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise

    def listen(
        self, sessions: AttachedSessions, devices: Mapping[int, Exported] = MappingProxyType({})
    ) -> None:
        """Attach clients to `sessions` on the running event loop.

        Each is handed the descriptors of the device pools that there are, by the pools' numbers.
        """
        self._pause, self._devices = None, devices
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept, sessions)

    def close(self) -> None:
        """Stop listening on the running event loop, and drop silent connections."""
        if self._pause is not None:
            self._pause.cancel()
        for connection in list(self._silent):
            self._drop(connection, "the daemon stops")
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()

    def _accept(self, sessions: AttachedSessions) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_AT_A_TIME):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("nobody can attach for %.0f s: %s", NO_FILES_PAUSE_S, error)
                loop.remove_reader(self._socket.fileno())
                listen, devices = self.listen, self._devices
                self._pause = loop.call_later(NO_FILES_PAUSE_S, listen, sessions, devices)
                return
            connection.setblocking(False)
            loop.add_reader(connection.fileno(), self._hear, connection, sessions)
            self._silent[connection] = loop.call_later(
                SILENT_S, self._drop, connection, "it is silent"
            )
            if len(self._silent) > min(sessions.clients, MAX_SILENT):
                self._hear(next(iter(self._silent)), sessions)  # it may have spoken by now

    def _hear(self, connection: socket.socket, sessions: AttachedSessions) -> None:
        """Answer the message of a connection, if it has sent one, and close it."""
        try:
            token = connection.recv(MAX_TOKEN_BYTES).decode("ascii")
            if token.startswith(INTRODUCED):
                sessions.introduce(token.removeprefix(INTRODUCED), _peer(connection))
                self._drop(connection, "it has introduced itself")
                return
            pidfd = _peer_pidfd(connection)
            if sessions.attach(token, pidfd):
                self._answer(connection)
                why = "it is attached"
            else:
                why = "it names no open session"
                if pidfd is not None:
                    os.close(pidfd)
        except BlockingIOError:
            why = "it is silent, and too many are"
        except (OSError, UnicodeDecodeError) as error:
            why = str(error)
        self._drop(connection, why)

    def _answer(self, connection: socket.socket) -> None:
        fds = {n: pool.fd for n, pool in self._devices.items() if pool.fd is not None}
        try:
            if fds:
                socket.send_fds(connection, [ATTACHED + bytes(fds)], list(fds.values()))
                return
        except OSError as error:  # too many descriptors are under way
            logger.warning("a client attaches without the device pools: %s", error)
        connection.send(ATTACHED)

    def _drop(self, connection: socket.socket, why: str) -> None:
        logger.debug("a connection to %s is closed: %s", self.path.name, why)
        self._silent.pop(connection).cancel()
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()


class DmaProcesses:
    """The processes of sessions that copy by DMA, and when the copies of a dead one are over.

    A session's copies are over when its lock has dropped, its process's pidfd is ready, and
    DMA_GRACE_S has passed since. Without a pidfd they are over DMA_BLIND_GRACE_S after the lock has
    dropped, and so they are DMA_LIMIT_S after it where the process is not about to end. DMA_LIMIT_S
    is also in place of the others where the session says that its copies outlast its process.
    """

    def __init__(self) -> None:
        self._pidfds: dict[SessionId, int] = {}
        self._dropped_s: dict[SessionId, float] = {}  # when the lock was found to have dropped
        self._ended_s: dict[SessionId, float] = {}  # when the process was found to have ended
        self._has_warned = False

    @property
    def waiting(self) -> int:
        """Sessions whose lock has dropped and whose copies may be under way."""
        return len(self._dropped_s)

    def is_waited_for(self, session: SessionId) -> bool:
        """Whether the session's lock has dropped and its copies may be under way."""
        return session in self._dropped_s

    def attach(self, session: SessionId, pidfd: int | None) -> None:
        """Keep the pidfd of the session's process, in place of an earlier one."""
        self.forget(session)
        if pidfd is None:
            return
        self._pidfds[session] = pidfd
        if not self._has_warned and _is_hidden(pidfd):
            self._has_warned = True
            logger.warning(
                "/proc hides processes of other users from the daemon, as hidepid and systemd's "
                "ProtectProc do: memory of an engine that hangs in its end is reused after %.0f s, "
                "and a device may still write there. Let the daemon see them (ProtectProc=default)",
                DMA_LIMIT_S,
            )

    def may_copy(self, session: SessionId, now_s: float, outlasts: bool = False) -> bool:
        """Whether a copy may be under way, for a session that dropped its lock with DMA_WORD set.

        `outlasts`: the word is DMA_OUTLASTS. The first question starts the clock.
        """
        dropped_s = self._dropped_s.setdefault(session, now_s)
        pidfd = self._pidfds.get(session)
        if pidfd is None:
            return now_s < dropped_s + (DMA_LIMIT_S if outlasts else DMA_BLIND_GRACE_S)
        if not _has_ended(pidfd):
            return now_s < dropped_s + DMA_LIMIT_S or _is_ending(pidfd)
        grace_s = DMA_LIMIT_S if outlasts else DMA_GRACE_S
        return now_s < self._ended_s.setdefault(session, now_s) + grace_s

    def forget(self, session: SessionId) -> None:
        """Release a session's process."""
        self._dropped_s.pop(session, None)
        self._ended_s.pop(session, None)
        pidfd = self._pidfds.pop(session, None)
        if pidfd is not None:
            os.close(pidfd)


def _peer(connection: socket.socket) -> Process:
    """The process that connected, as it was then. Raises OSError."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    pid, uid, _ = credentials.unpack(said)
    return Process(pid, uid)


def _peer_pidfd(connection: socket.socket) -> int | None:
    """Return a pidfd of the process that connected; None on a kernel that gives none.

    Raises OSError: the process has ended, or descriptors have run out.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return None


def _has_ended(pidfd: int) -> bool:
    """Whether the process has ended, all its threads and files included."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _is_ending(pidfd: int) -> bool:
    """Whether the process is closing its files, which takes long where a device hangs.

    False where its number is not seen from here, such as from another container.
    """
    try:
        stat = Path(f"/proc/{_number(pidfd)}/stat").read_text()
        return bool(int(stat.rpartition(")")[2].split()[STAT_FLAGS]) & PF_EXITING)
    except (OSError, ValueError):
        return False


def _is_hidden(pidfd: int) -> bool:
    """Whether the process has a number here, lives, and has no directory in /proc."""
    try:
        is_missing = not os.path.exists(f"/proc/{_number(pidfd)}")
    except (OSError, ValueError):
        return False
    return is_missing and not _has_ended(pidfd)


def _number(pidfd: int) -> int:
    """The process's number in this /proc. Raises OSError, and ValueError where it has none."""
    about = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    [pid] = re.findall(r"^Pid:\s+([1-9]\d*)", about, re.MULTILINE)
    return int(pid)
