"""The channel to the daemon, its batch calls, and the errors that its refusals become."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import grpc

from ecd_client.errors import DaemonUnavailable, EcdError, InvalidArgument
from ecd_proto.contract import MAX_MESSAGE_BYTES, default_address
from ecd_proto.v1 import cache_pb2 as pb

CALL_TIMEOUT_S = 5.0
"""How long the daemon may take to answer one call, waits apart."""
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Largest request: the rest of a message is for what Exchange adds."""
MAX_IN_FLIGHT = 64
"""Calls of `later` on their way at once. A server of grpc's refuses calls at random once 1,000 of
all its clients wait to be taken up (docs/decisions.md)."""
JOIN_S = 1.0

Reply = TypeVar("Reply")
_Queued = tuple[Future[Any], str, Any]
"""The future of the reply, the name of the call, the request."""


def resolve(address: str | None) -> str:
    """The address to use: the given one, `ECD_ADDRESS`, or this user's default socket."""
    address = address or default_address()
    if not address.startswith("unix:"):
        raise InvalidArgument(f"the address must be unix:///path/to/socket, not {address!r}")
    return address


def open_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(
        address,
        options=[
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 2000),  # it is how long an attempt may take
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ],
    )


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


def socket_owner(address: str) -> int:
    """The user that owns the socket. Raises OSError where there is no socket.

    A symbolic link is not followed: it could lead to another daemon's socket.
    """
    path = re.sub(r"^unix:(//)?", "", address)
    found = os.lstat(path)
    if not stat.S_ISSOCK(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a socket", path)
    return found.st_uid


def call(
    method: Callable[..., Reply], request: Any, address: str, timeout_s: float = CALL_TIMEOUT_S
) -> Reply:
    """One unary call. Raises EcdError."""
    try:
        return method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise translate(error, address) from None


class GrpcThreads:
    """Threads of grpc's that work for one channel.

    They are daemon threads: if the interpreter's end stops one that holds a lock of grpc's, the
    main thread waits for that lock for ever. So they are joined first.
    """

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    def note(self, *_: object) -> None:
        """Add the calling thread."""
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        self._threads.add(threading.current_thread())

    def join(self) -> None:
        """Wait for the threads' end, JOIN_S at most."""
        deadline_s = time.monotonic() + JOIN_S
        for thread in self._threads - {threading.current_thread()}:
            thread.join(max(0.0, deadline_s - time.monotonic()))


class Calls:
    """The batch calls of one session.

    Blocking calls go one after the other over one Exchange stream, which saves a sixth to a quarter
    of their time (docs/decisions.md). A thread that finds the stream busy makes a unary call
    instead of waiting.
    """

    def __init__(self, stub: Any, address: str, timeout_s: float, threads: GrpcThreads) -> None:
        self.address = address
        self._threads = threads
        self.timeout_s = timeout_s
        self._stub = stub
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[pb.ExchangeRequest | None] = queue.SimpleQueue()
        self._replies: Any = None
        self._turns = threading.RLock()  # a garbage-collected item may release within it
        self._queued: deque[_Queued] = deque()
        self._in_flight = 0
        self._is_sending = False
        self._due_s: float | None = None
        self.is_over = self._overdue = False

    def open(self) -> None:
        """Open the stream, so that the first blocking call need not wait for that."""
        with contextlib.suppress(EcdError):
            if not self.is_over:
                self.now("contains", pb.ContainsRequest())

    def later(self, name: str, request: Any) -> Future[Any]:
        """Make a call, named as in ExchangeRequest, and return the future of its reply.

        It fails with EcdError or with grpc's errors, for which see `meaning`. Beyond MAX_IN_FLIGHT
        calls, one is sent when another is answered; its time to be answered starts then.
        """
        reply: Future[Any] = Future()
        try:
            _check_size(request)
        except InvalidArgument as error:
            reply.set_exception(error)
            return reply
        with self._turns:
            self._queued.append((reply, name, request))
        self._send_queued()
        return reply

    def _send_queued(self) -> None:
        """Send what is queued, as far as it may be sent now.

        A call that fails at once is answered in here, so one thread at a time loops.
        """
        while True:
            with self._turns:
                if self._is_sending or not self._queued or self._in_flight >= MAX_IN_FLIGHT:
                    return
                self._is_sending = True
            try:
                self._send(*self._queued.popleft())
            finally:
                self._is_sending = False

    def _send(self, reply: Future[Any], name: str, request: Any) -> None:
        try:
            sent = getattr(self._stub, name.title()).future(request, timeout=self.timeout_s)
        except BaseException as error:  # Ctrl-C too
            reply.set_exception(DaemonUnavailable("the client is closed"))
            if not isinstance(error, ValueError):  # the channel was closed
                raise
            return
        with self._turns:
            self._in_flight += 1
        sent.add_done_callback(partial(self._answered, reply))

    def _answered(self, reply: Future[Any], sent: Any) -> None:
        with self._turns:
            self._in_flight -= 1
        self._send_queued()
        try:
            result = sent.result()
        except Exception as error:
            reply.set_exception(error)
        else:
            reply.set_result(result)

    def now(self, name: str, request: Any) -> Any:
        """Make a call, named as in ExchangeRequest, and wait for the reply. Raises EcdError."""
        _check_size(request)
        if self.is_over or not self._lock.acquire(blocking=False):
            method = getattr(self._stub, name.title())
            return call(method, request, self.address, self.timeout_s)
        try:
            if self._replies is None:
                self._replies = self._stub.Exchange(self._asked())
                self._replies.add_done_callback(self._threads.note)
                if self.is_over:  # closed meanwhile, without this stream
                    self._replies.cancel()
            self._due_s = time.monotonic() + self.timeout_s
            self._requests.put(pb.ExchangeRequest(**{name: request}))
            reply = next(self._replies)
        except StopIteration:
            raise DaemonUnavailable(unreachable(self.address)) from None
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                cause = late if self._overdue else unreachable
                raise DaemonUnavailable(cause(self.address)) from None
            raise translate(error, self.address) from None
        except BaseException:
            self.close()  # the reply would be taken for the next call's
            raise
        finally:
            self._due_s = None
            self._lock.release()
        if reply.WhichOneof("reply") == "failure":
            raise _named(_STATUS[reply.failure.code], reply.failure.details, self.address)
        return getattr(reply, name)

    def _asked(self) -> Iterator[pb.ExchangeRequest]:
        self._threads.note()
        while (request := self._requests.get()) is not None:
            yield request

    def meaning(self, error: Exception) -> EcdError:
        """The error for the caller when a future of `later` failed."""
        if isinstance(error, grpc.RpcError):
            return translate(error, self.address)
        return DaemonUnavailable("the client is closed")

    def check(self) -> None:
        """End the stream if its reply is overdue: called now and then from another thread."""
        due_s = self._due_s
        if due_s is not None and time.monotonic() > due_s:
            self._overdue = True
            self.close()

    def close(self) -> None:
        self.is_over = True
        self._requests.put(None)
        if self._replies is not None:
            self._replies.cancel()


def _check_size(request: Any) -> None:
    """Raise InvalidArgument for a request so large that gRPC's refusal would end the session."""
    nbytes = request.ByteSize()
    if nbytes > MAX_REQUEST_BYTES:
        raise InvalidArgument(f"a message of {nbytes} bytes; at most {MAX_REQUEST_BYTES}")


_STATUS = {code.value[0]: code for code in grpc.StatusCode}


def translate(error: grpc.RpcError, address: str) -> EcdError:
    """The error for the caller when a call failed."""
    if not isinstance(error, grpc.Call):
        return DaemonUnavailable(f"the call to {address} failed: {error}")
    return _named(error.code(), error.details() or "", address)


def _named(code: grpc.StatusCode, details: str, address: str) -> EcdError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument(details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DaemonUnavailable(late(address))
    if code is grpc.StatusCode.UNAVAILABLE and not details.startswith("the daemon"):
        return DaemonUnavailable(unreachable(address))
    return DaemonUnavailable(details or f"the daemon on {address} answered {code.name}")


def late(address: str) -> str:
    return f"the daemon on {address} did not answer in time"


def unreachable(address: str) -> str:
    return (
        f"nothing answers on {address}: the daemon is not started, restarting, or another "
        "user's. `ecd-cli doctor` says more; or set ECD_ADDRESS"
    )
