"""A client's connection to its daemon, which makes one session after another.

A session that broke is never used again: its successor starts from nothing, and the daemon takes
back all that the broken one owned.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import grpc

from ecd_client import clock, forks
from ecd_client.errors import DaemonUnavailable, EcdError
from ecd_client.session.calls import Calls, GrpcThreads
from ecd_client.session.channel import CLOSED, open_channel, socket_owner, translate, unreachable
from ecd_client.session.session import Outbox, Session
from ecd_proto.contract import CONTRACT_VERSION, DISTRIBUTION, POPULATING
from ecd_proto.encoders import RegisteredEncoder
from ecd_proto.engines import Engine
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    import torch

RECONNECT_PAUSE_S = 0.25
"""Pause between the end of one session and the next; the channel adds its own backoff."""

POPULATED_WITHIN_S = 60.0
"""Longest wait for a daemon that answers that it is populating its pool."""

CHECK_S = 0.25
"""Interval at which a running call is checked for being overdue."""

NOT_IN_A_CHILD = (
    "this process was forked from one that had a client, and gRPC does not survive that: start it "
    "with multiprocessing's spawn or forkserver, or make the parent's first client after the fork"
)
"""With grpcio 1.85 the child's channel never connects, or gRPC aborts the process."""

_kept: list[object] = []
"""Connections of a parent process, and channels for whose calls no thread could be started.

They are kept because the end of gRPC's objects might wait for ever.
"""


class Connection:
    """Keeps a session with the daemon open, on a thread of its own."""

    def __init__(
        self,
        address: str,
        name: str,
        call_timeout_s: float,
        counts_reads: bool = True,
        uses_puts: bool = False,
        namespace: str = "",
    ) -> None:
        """`counts_reads`: whether the daemon counts this client's reads without a call.

        `uses_puts`, `namespace`: as in `Client`.
        """
        forks.in_child()
        if forks.is_child:
            raise DaemonUnavailable(NOT_IN_A_CHILD)
        self._address, self._name = address, name
        self._call_timeout_s, self._counts_reads = call_timeout_s, counts_reads
        self._uses_puts, self._namespace = uses_puts, namespace
        self._open_channel()
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._cause: EcdError | None = None
        self._closed = threading.Event()
        self._stream: Any = None  # or the call before it
        self._calls: Calls | None = None
        self._threads = GrpcThreads()
        self._gpu: int | None = None
        self._engine: Engine | None = None
        self._on_apart: Callable[[Engine], None] | None = None
        self._encoder: RegisteredEncoder | None = None
        self.is_cut_off = False
        self._thread = threading.Thread(target=self._run, name="ecd-connection", daemon=True)
        forks.add(self, last=True)
        self._thread.start()

    def _open_channel(self) -> None:
        self._channel = open_channel(self._address)
        self._stub: Any = pb_grpc.CacheStub(self._channel)

    @property
    def current(self) -> Session | None:
        """The session that is open now."""
        session = self._session
        return None if session is None or session.abandoned else session

    def session(self, wait_s: float = 0.0) -> Session:
        """Return the open session, waiting up to `wait_s` for one.

        Raises DaemonUnavailable with the cause.
        """
        session = self._session
        if session is not None and not session.abandoned:
            return session  # `current` without its call: every get and put comes here
        if self.is_cut_off:
            raise forks.before_fork()
        with self._changed:
            self._wait(wait_s)
            session = self.current
        if session is not None:
            return session
        if self._closed.is_set():
            raise DaemonUnavailable(CLOSED)
        raise DaemonUnavailable(str(self._cause or unreachable(self._address)))

    def _wait(self, wait_s: float) -> None:
        self._changed.wait_for(lambda: self.current or self._closed.is_set(), wait_s)

    def start(self, wait_s: float) -> None:
        """Wait for a session up to `wait_s`, or POPULATED_WITHIN_S where the pool is populated.

        Raises DaemonUnavailable with the cause.
        """
        started_s = clock.now_s()
        until_s = started_s + wait_s
        with self._changed:
            self._wait(wait_s)
            while self.current is None and not self._closed.is_set():
                now_s = clock.now_s()
                if str(self._cause).startswith(POPULATING):
                    until_s = now_s + wait_s  # its socket may be away for a moment meanwhile
                if now_s >= min(until_s, started_s + max(wait_s, POPULATED_WITHIN_S)):
                    break
                self._wait(CHECK_S)
        self.session()

    def ref(self) -> Session:
        """Return the open session, kept until its `unref`. Raises DaemonUnavailable."""
        session = self.session()
        if not session.ref():
            raise DaemonUnavailable(f"the daemon on {self._address} just went away")
        return session

    def pin(self, device: torch.device) -> None:
        """Pin the pools of this session and of all later ones for a GPU's copies, if it is one."""
        from ecd_client.device.copies import for_device

        copies = for_device(device)
        if copies is None:
            return
        with self._changed:
            self._gpu = copies.device
            session = self._session
        if session is not None:
            session.pools.pin(copies.device)

    def describe(self, engine: Engine, on_apart: Callable[[Engine], None] | None) -> None:
        """Tell the daemon of this session, and of all later ones, which engine the client is of."""
        with self._changed:
            self._engine, self._on_apart = engine, on_apart
            session = self._session
            if session is not None:
                session.describe(engine, on_apart)

    def register(self, encoder: RegisteredEncoder) -> None:
        """Register the encoder at the daemon of this session, and of all later ones."""
        with self._changed:
            self._encoder, session = encoder, self._session
            if session is not None:
                session.register(encoder)

    def cut_off(self) -> None:
        """In a forked child: do not touch gRPC's objects here again, not even to end them."""
        self.is_cut_off, self._session = True, None
        _kept.append(self)
        forks.close_connections(self._address.removeprefix("unix:").removeprefix("//"))

    def close(self) -> None:
        if self.is_cut_off or forks.is_uncut():
            return
        self._closed.set()
        with self._changed:
            stream, calls = self._stream, self._calls
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()
        if calls is not None:
            calls.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._channel.close()
        self._threads.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                threading.Thread(target=int).start()  # or there is none for gRPC, either
                self._connect()
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.CANCELLED:  # by us: the session was abandoned
                    self._cause = DaemonUnavailable(f"connecting anew to {self._address}")
                else:
                    self._cause = translate(error, self._address)
            except EcdError as error:
                self._cause = error
            except RuntimeError as error:  # no thread can be started
                self._cause = DaemonUnavailable(f"this process has no thread left: {error}")
            except (OSError, ValueError) as error:
                self._cause = DaemonUnavailable(
                    f"the daemon answers on {self._address}, but its pool cannot be mapped: "
                    f"{error}. Engine and daemon must share the directory of ECD_SHM_DIR and "
                    "run as one user, or as members of the daemon's ECD_GROUP"
                )
            self._closed.wait(RECONNECT_PAUSE_S)

    def _connect(self) -> None:
        """Have a session until it ends."""
        try:
            self._wait_for_channel()
            self._run_session()
        except RuntimeError:  # the channel takes it that the thread runs, and starts no other
            _kept.append(self._channel)
            self._open_channel()
            raise

    def _wait_for_channel(self) -> None:
        """Wait until the daemon answers: by a call, whose thread ends with the channel.

        That of `grpc.channel_ready_future` prints a traceback if the channel is closed meanwhile.
        """
        ready = self._stub.Contains.future(pb.ContainsRequest(), wait_for_ready=True)
        ready.add_done_callback(self._threads.note)
        with self._changed:
            self._stream = ready
        try:
            while not self._closed.is_set():
                with contextlib.suppress(grpc.FutureTimeoutError):
                    ready.result(timeout=0.5)
                    return
                self._cause = DaemonUnavailable(unreachable(self._address))
        except grpc.FutureCancelledError:
            pass  # the client is closed
        finally:
            ready.cancel()

    def _run_session(self) -> None:
        """Open a session and serve its events until the stream ends."""
        outbox: Outbox = queue.SimpleQueue()
        uid = socket_owner(self._address)  # before a session is asked for
        with self._changed:
            if self._closed.is_set():
                return
            calls = Calls(self._stub, self._address, self._call_timeout_s, self._threads)
            self._calls = calls
            sent_s = clock.now_s()
            stream = self._stream = self._stub.Session(self._requests(outbox))
        stream.add_done_callback(self._threads.note)
        session = None
        try:
            for event in stream:
                if session is None:
                    session = Session(calls, stream, outbox, event, sent_s, uid)
                    if session.index is not None:
                        session.index.counts = self._counts_reads
                    outbox.put(session)
                    # The daemon may have ended it before its lock was taken, and have given its
                    # page to another client: nothing is written there before this is answered.
                    calls.open(session.token)
                    self._announce(session)
                else:
                    session.take(event)
            self._cause = DaemonUnavailable(f"the daemon on {self._address} is stopping")
        finally:
            # gRPC may never draw what is left there, and an error of the stream keeps this frame.
            with contextlib.suppress(queue.Empty):
                while True:
                    outbox.get_nowait()
            outbox.put(None)
            stream.cancel()
            calls.close()
            self._announce(None)
            if session is not None:
                session.end()
                del session, event  # an error of the stream has this frame in its traceback

    def _announce(self, session: Session | None) -> None:
        with self._changed:
            self._session, device = session, self._gpu
            if session is not None and self._engine is not None:
                session.describe(self._engine, self._on_apart)
            if session is not None and self._encoder is not None:
                session.register(self._encoder)
            self._changed.notify_all()
        if session is not None and device is not None:
            session.pools.pin(device)

    def _requests(self, outbox: Outbox) -> Iterator[pb.SessionRequest]:
        """Yield the client's side of the stream; gRPC draws it on a thread of its own."""
        self._threads.note()
        client = f"{self._name} ecd {version(DISTRIBUTION)}"
        yield pb.SessionRequest(
            hello=pb.Hello(
                contract_version=CONTRACT_VERSION,
                client=client,
                pid=os.getpid(),
                uses_puts=self._uses_puts,
                namespace=self._namespace,
            )
        )
        session, check_s = outbox.get(), 0.0
        while isinstance(session, Session):
            due_s = clock.now_s() + session.lease_ttl_s / 3
            while (now_s := clock.now_s()) < due_s:
                if now_s >= check_s:
                    session.calls.check()
                    session.key_locks.expire()
                    check_s = now_s + CHECK_S
                with contextlib.suppress(queue.Empty):
                    request = outbox.get(timeout=min(due_s, check_s) - now_s)
                    if request is None:
                        return
                    yield request
            if renewal := session.renewal():
                yield renewal
