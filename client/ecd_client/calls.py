"""The channel to the daemon, its batch calls, and the errors that its refusals become."""

from __future__ import annotations

import errno
import os
import queue
import re
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from copy import copy
from functools import partial
from typing import Any, TypeVar

import grpc

from ecd_client import arguments, forks
from ecd_client.errors import DaemonUnavailable, EcdError, InvalidArgument, bare
from ecd_proto.contract import MAX_MESSAGE_BYTES, as_address, default_address
from ecd_proto.v1 import cache_pb2 as pb

CALL_TIMEOUT_S = 5.0
"""How long the daemon may take to answer one call, waits apart."""
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Largest request: the rest of a message is for what Exchange adds."""
MAX_IN_FLIGHT = 64
"""Calls of `later` on their way at once. A server of grpc's refuses calls at random once 1,000 of
all its clients wait to be taken up (docs/decisions.md)."""
NO_ANSWER = (
    "the daemon is starting, stopping or busy",
    "its log says more; or start it anew: systemctl restart ecd",
)
"""The cause, and what to do, where a connection is made and no call is answered."""
CLOSED = "the client is closed"
JOIN_S = 1.0
PROBE_S = 0.1

Reply = TypeVar("Reply")
_answering = threading.local()
"""`is_here`: whether this thread of gRPC's is telling an answer."""
_Queued = tuple[Future[Any], str, Any]
"""The future of the reply, the name of the call, the request."""


def resolve(address: str | None) -> str:
    """The address to use: the given one, `ECD_ADDRESS`, or this user's default socket.

    Raises InvalidArgument.
    """
    if address is not None:
        address = arguments.text(address, "daemon's address")
    address = as_address(address or default_address())
    if not address.startswith("unix:"):
        raise InvalidArgument(
            f"the address must be unix:///path/to/socket, or that path, not {address!r}"
        )
    return address


def open_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(
        address,
        options=[
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 2000),  # it is how long an attempt may take
            ("grpc.max_reconnect_backoff_ms", 400),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),  # a call that gRPC tries again may never end
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
    path = socket_path(address)
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
    except ValueError:  # the channel is closed
        raise DaemonUnavailable(CLOSED) from None


class GrpcThreads:
    """Threads of grpc's that work for one channel.

    They are daemon threads: if the interpreter's end stops one that holds a lock of grpc's, the
    main thread waits for that lock for ever. So they are joined first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def note(self, *_: object) -> None:
        """Add the calling thread."""
        with self._lock:
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
        self._is_sending = self._has_ended = False
        self._due_s: float | None = None
        self.is_over = self._overdue = self._is_cut_off = False

    def open(self, token: str) -> None:
        """Open the stream, so that the first blocking call need not wait for that.

        The call names the session, for which the daemon grants memory for a first put. Raises
        EcdError: the session is over, and may have been before its lock was taken.
        """
        if not self.is_over:
            self.now("release", pb.ReleaseRequest(session=token))
        if self.is_over:
            raise DaemonUnavailable(CLOSED)

    def later(self, name: str, request: Any) -> Future[Any]:
        """Make a call, named as in ExchangeRequest, and return the future of its reply.

        It fails with EcdError. Beyond MAX_IN_FLIGHT calls, one is sent when another is answered;
        its time to be answered starts then. Callbacks run on gRPC's thread for the channel.
        """
        reply: Future[Any] = Future()
        try:
            _check_size(request)
        except InvalidArgument as error:
            reply.set_exception(error)
            return reply
        with self._turns:
            has_ended = self._has_ended
            if not has_ended:
                self._queued.append((reply, name, request))
        if has_ended:
            reply.set_exception(self._gone())
        else:
            self._send_queued()
        return reply

    def end(self) -> None:
        """Fail what waits for its turn, and all later calls of `later`: the session is over."""
        with self._turns:
            self._has_ended = True
            queued, self._queued = self._queued, deque()
        for reply, _, _ in queued:
            reply.set_exception(self._gone())

    def _gone(self) -> DaemonUnavailable:
        return DaemonUnavailable(f"the daemon on {self.address} went away meanwhile")

    def _send_queued(self) -> None:
        """Send what is queued, as far as it may be sent now.

        A call that fails at once is answered in here, so one thread at a time loops.
        """
        is_ours, interruption = False, None
        while True:
            with self._turns:
                if self._is_sending and not is_ours:
                    break
                if not self._queued or self._in_flight >= MAX_IN_FLIGHT:
                    self._is_sending = False
                    break
                self._is_sending = is_ours = True
                queued = self._queued.popleft()
                self._in_flight += 1
            try:
                self._send(*queued)
            except BaseException as error:  # Ctrl-C: the calls of others are sent all the same
                interruption = error
        if interruption is not None:
            raise interruption

    def _send(self, reply: Future[Any], name: str, request: Any) -> None:
        try:
            sent = getattr(self._stub, name.title()).future(request, timeout=self.timeout_s)
            sent.add_done_callback(partial(self._answered, reply))
        except BaseException as error:
            with self._turns:
                self._in_flight -= 1
            reply.set_exception(DaemonUnavailable(CLOSED))
            if not isinstance(error, Exception):
                raise

    def _answered(self, reply: Future[Any], sent: Any) -> None:
        with self._turns:
            self._in_flight -= 1
        was_here, _answering.is_here = getattr(_answering, "is_here", False), True
        try:
            reply.set_result(sent.result())
        except Exception as error:
            reply.set_exception(self._meaning(bare(error)))
        finally:
            _answering.is_here = was_here
            self._send_queued()

    def now(self, name: str, request: Any) -> Any:
        """Make a call, named as in ExchangeRequest, and wait for the reply. Raises EcdError."""
        if self._is_cut_off:
            raise forks.before_fork()
        _check_size(request)
        is_answering = getattr(_answering, "is_here", False)  # it is who would read the stream
        if self.is_over or is_answering or not self._lock.acquire(blocking=False):
            return self.alone(name, request)
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
            bare(error)  # it is the stream itself, which stays
            if error.code() is grpc.StatusCode.CANCELLED:
                cause = late if self._overdue else unreachable
                raise DaemonUnavailable(cause(self.address)) from None
            raise translate(error, self.address) from None
        except ValueError:  # the channel is closed
            self.close()
            raise DaemonUnavailable(CLOSED) from None
        except BaseException:
            self.close()  # the reply would be taken for the next call's
            raise
        finally:
            self._due_s = None
            self._lock.release()
        if reply.WhichOneof("reply") == "failure":
            raise _named(_STATUS[reply.failure.code], reply.failure.details, self.address)
        return getattr(reply, name)

    def alone(self, name: str, request: Any) -> Any:
        """`now`, and no other call waits for this one, which may take long. Raises EcdError."""
        if self._is_cut_off:
            raise forks.before_fork()
        _check_size(request)
        return call(getattr(self._stub, name.title()), request, self.address, self.timeout_s)

    def _asked(self) -> Iterator[pb.ExchangeRequest]:
        self._threads.note()
        while (request := self._requests.get()) is not None:
            yield request

    def _meaning(self, error: Exception) -> EcdError:
        """The error for the caller when a call of `later` failed."""
        if isinstance(error, grpc.RpcError):
            return translate(error, self.address)
        return DaemonUnavailable(CLOSED)

    def check(self) -> None:
        """End the stream if its reply is overdue: called now and then from another thread."""
        due_s = self._due_s
        if due_s is not None and time.monotonic() > due_s:
            self._overdue = True
            self.close()

    def cut_off(self) -> None:
        """In a forked child: gRPC's objects here are not touched again."""
        self._lock, self._turns = threading.Lock(), threading.RLock()
        self.is_over = self._has_ended = self._is_cut_off = True

    def close(self) -> None:
        self.is_over = True
        if self._is_cut_off:
            return
        self._requests.put(None)
        if self._replies is not None:
            self._replies.cancel()


def result_of(future: Future[Reply], timeout_s: float | None = None) -> Reply:
    """The future's result, or its error: a copy, as the error itself would keep this frame.

    Raises concurrent.futures.TimeoutError, and what the future failed with.
    """
    error = future.exception(timeout_s)
    if error is not None:
        raise copy(error)
    return future.result()


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
    cause, advice = why_refused(address) or NO_ANSWER
    return f"nothing answers on {address}: {cause}; {advice}"


def why_refused(address: str) -> tuple[str, str] | None:
    """Why nobody gets a connection to the socket, and what to do. None: one was made."""
    path = socket_path(address)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_S)
            probe.connect(path)
    except FileNotFoundError:
        return f"there is no {path}", "start the daemon, or say where it is (ECD_ADDRESS)"
    except PermissionError:
        advice = "join the daemon's group (ECD_GROUP; under systemd ecd), or run as its user"
        return f"{path} does not let this user in", advice
    except ConnectionRefusedError:
        advice = "start the daemon: it takes the file over"
        return f"nobody listens on {path}, which a dead daemon left", advice
    except OSError as error:
        return f"{path}: {error}", "start the daemon anew"
    return None


def socket_path(address: str) -> str:
    return re.sub(r"^unix:(//)?", "", address)
