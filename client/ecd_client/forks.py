"""Forks: a child is cut off from its parent's clients, so that it cannot reach their daemon.

A child shares the session's page, the session's lock and the connection of its parent, and has
none of its threads. So all that was made before the fork is cut off in the child before other
Python code can use it, and without a lock that a thread of the parent might have held.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, TypeVar

from ecd_client.errors import DaemonUnavailable

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
"""Read as gRPC is imported. Otherwise it starts threads in a child, which now and then abort it."""

MADE_BEFORE = "this client was made before a fork: it is the parent's"


class Forked(Protocol):
    """An object that a child must not use."""

    def cut_off(self) -> None:
        """Disable this object in the child, without taking a lock that was made before."""


Result = TypeVar("Result")


class Pending(Future[Result]):
    """A future that a thread of its process settles, and that fails in a child."""

    def cut_off(self) -> None:
        Future.__init__(self)  # with a new lock, and without callbacks
        self.set_exception(before_fork())


pid = os.getpid()
"""The process that owns the clients: a child differs until all in it is cut off."""
has_had_clients = False
"""Whether gRPC has run here: one of its threads may hold a lock long after the last client."""
is_child = False
"""Whether this process was forked from one that had clients."""
steady = threading.RLock()
"""Held while files are opened or closed: a fork waits, so that the child knows all of them."""
_made: weakref.WeakSet[Forked] = weakref.WeakSet()
_made_last: weakref.WeakSet[Forked] = weakref.WeakSet()


def add(made: Forked, last: bool = False) -> None:
    """Cut `made` off in every child that is forked from now on.

    `last`: after all others, which give descriptors back.
    """
    global has_had_clients
    has_had_clients = True
    (_made_last if last else _made).add(made)


def is_uncut() -> bool:
    """Whether this process is a child that is not cut off entirely yet: it must release nothing."""
    return os.getpid() != pid


def before_fork() -> DaemonUnavailable:
    return DaemonUnavailable(MADE_BEFORE)


def close_connections(path: str) -> None:
    """Drop every connection to the socket `path`, so that the daemon sees the parent's end.

    The file descriptors stay taken, as gRPC would close them once more. The kernel reports the
    name that the socket was bound under: the daemon binds `path~` and renames it. Without a
    descriptor to do it with, the daemon sees the parent's end as this process ends.
    """
    path = os.path.realpath(path)
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nothing:
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode) and _peer_of(fd) == path:
                    os.dup2(nothing.fileno(), fd, inheritable=False)


def _peer_of(fd: int) -> str | None:
    """The path of the socket at the other end, if it has one. Raises OSError."""
    with socket.socket(fileno=os.dup(fd)) as connection:
        name = connection.getpeername()
    is_file = isinstance(name, str) and name
    return os.path.realpath(name.removesuffix("~")) if is_file else None


def _blocked_signals() -> set[signal.Signals] | set[int]:
    """Block all signals, and return those that were blocked before."""
    blocked = None
    while True:
        with suppress(BaseException):  # a handler's, of a signal that came just before
            if blocked is None:
                blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            return blocked


def in_child() -> None:
    """Cut everything off, in a child that has not done so: C code may fork without hooks."""
    global pid, is_child, steady
    if not is_uncut():
        return
    # Python goes on after a hook that a signal's handler has ended halfway with an exception.
    blocked = _blocked_signals()
    steady = threading.RLock()
    is_child = has_had_clients
    failed: list[Exception] = []
    for made in (*_made, *_made_last):
        try:
            made.cut_off()
        except Exception as error:
            failed.append(error)
    _made.clear()
    _made_last.clear()
    # Last: a future that is cut off lets go of its item, whose session may come later, and an item
    # that ends where `pid` is this process's would end its parent's pin.
    pid = os.getpid()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if failed:
        raise failed[0]  # Python says so, and goes on


os.register_at_fork(
    before=lambda: steady.acquire(),
    after_in_parent=lambda: steady.release(),
    after_in_child=in_child,
)
os.register_at_fork(after_in_child=in_child)  # again, should a signal have ended it as it began
