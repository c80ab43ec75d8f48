"""The batch calls of one session, each awaited at once or answered through a future."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from copy import copy
from functools import partial
from typing import Any, TypeVar

import grpc

from ecd_client import clock, forks
from ecd_client.errors import DaemonUnavailable, EcdError, InvalidArgument, stripped
from ecd_client.session.channel import CLOSED, call, from_status, late, translate, unreachable
from ecd_proto.contract import MAX_MESSAGE_BYTES
from ecd_proto.v1 import cache_pb2 as pb

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Largest request: the rest of a message is for what Exchange adds."""
MAX_IN_FLIGHT = 64
"""Calls of `later` on their way at once. A server of grpc's refuses calls at random once 1,000 of
all its clients wait to be taken up (docs/decisions.md)."""
JOIN_S = 1.0

Reply = TypeVar("Reply")
_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_answering = threading.local()
"""`is_here`: whether this thread of gRPC's is delivering an answer."""
_Queued = tuple[Future[Any], str, Any]
"""The future of the reply, the name of the call, the request."""


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
        deadline_s = clock.now_s() + JOIN_S
        for thread in self._threads - {threading.current_thread()}:
            thread.join(max(0.0, deadline_s - clock.now_s()))


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
        """Fail queued calls, and all later calls of `later`: the session is over."""
        with self._turns:
            self._has_ended = True
            queued, self._queued = self._queued, deque()
        for reply, _, _ in queued:
            reply.set_exception(self._gone())

    def _gone(self) -> DaemonUnavailable:
        return DaemonUnavailable(f"the daemon on {self.address} went away meanwhile")

    def _send_queued(self) -> None:
        """Send queued calls, as far as the limit allows.

        A call that fails at once is answered in here, so only one thread at a time loops.
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
            reply.set_exception(self._meaning(stripped(error)))
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
            self._due_s = clock.now_s() + self.timeout_s
            self._requests.put(pb.ExchangeRequest(**{name: request}))
            reply = next(self._replies)
        except StopIteration:
            raise DaemonUnavailable(unreachable(self.address)) from None
        except grpc.RpcError as error:
            stripped(error)  # it is the stream itself, which stays
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
            raise from_status(_STATUS[reply.failure.code], reply.failure.details, self.address)
        return getattr(reply, name)

    def alone(self, name: str, request: Any) -> Any:
        """Like `now`, for slow calls: it does not block other calls. Raises EcdError."""
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
        """End the stream if its reply is overdue; called regularly from another thread."""
        due_s = self._due_s
        if due_s is not None and clock.now_s() > due_s:
            self._overdue = True
            self.close()

    def cut_off(self) -> None:
        """In a forked child: do not touch gRPC's objects here again."""
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
