"""put: at once, or on a thread."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from typing import TYPE_CHECKING

from ecd_client import arguments, clock, forks
from ecd_client.errors import DaemonUnavailable, EcdError, InvalidArgument, stripped
from ecd_client.put import BEING_WRITTEN, CLAIMED, MUST_CALL, STORED, Put
from ecd_client.reader import Reader
from ecd_client.session.channel import CALL_TIMEOUT_S
from ecd_client.session.connection import Connection
from ecd_client.session.session import Session
from ecd_client.shared.puts import CopyTo, NewEntry, PutState
from ecd_client.values import Key, to_key
from ecd_proto.contract import MAX_BATCH
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from ecd_client.pools import MappedPool
    from ecd_client.tensors import TensorSource
    from ecd_client.values import Extent

MAX_PENDING_PUTS = 256
"""Asynchronous puts in flight before `put_async` refuses."""
COPIED_HERE_BYTES = 256 << 10
"""Size up to which `put_async` copies by itself: waking another thread takes about as long."""


def describe_entry(
    key: Key, dtype: str, shape: Sequence[int], cost_s: float, metadata: bytes
) -> NewEntry:
    """Raises InvalidArgument."""
    if not isinstance(metadata, bytes):
        raise InvalidArgument(f"metadata is bytes, not a {type(metadata).__name__}")
    dtype, lengths, nbytes = arguments.dense(dtype, shape)
    return NewEntry(*key, dtype, lengths, nbytes, metadata, arguments.cost(cost_s))


class Writer:
    """The writing half of a client."""

    def __init__(self, connection: Connection, reader: Reader) -> None:
        if "torch" in sys.modules:
            with contextlib.suppress(Exception):  # it may be half imported, or barred
                import_module("ecd_client.tensors")  # the first put would wait for it
        self._connection, self._reader = connection, reader
        self._side = ThreadPoolExecutor(1, thread_name_prefix="ecd-put")
        self._has_side = False  # whether its thread was started
        self._slots = threading.BoundedSemaphore(MAX_PENDING_PUTS)
        self._pending: set[Future[bool]] = set()

    def put(self, entry: NewEntry, copy_to: CopyTo, timeout: float) -> bool:
        """False: stored already. Waits up to `timeout` s for another writer of the key."""
        timeout = arguments.seconds(timeout, "timeout")
        deadline_s = clock.now_s() + timeout
        while True:
            session = self._connection.ref()
            try:
                with session.whole_or_abandoned():
                    put = Put(session, entry, copy_to)
                    state = put.finish()
                    put.copy_near(lambda: None)
            finally:
                session.unref()
            if state is not BEING_WRITTEN:
                return state is STORED
            left_s = deadline_s - clock.now_s()
            if left_s <= 0:
                raise EcdError(f"another client has been writing {entry.mm_hash!r} for {timeout} s")
            if self._reader.wait_for_writer((entry.namespace, entry.mm_hash), left_s):
                return False

    def put_bytes(self, entry: NewEntry, content: memoryview, timeout: float) -> bool:
        """`put` of bytes that lie in this process. Raises InvalidArgument if they are not all."""
        if content.nbytes != entry.nbytes:
            raise InvalidArgument(
                f"{entry.dtype} of shape {entry.shape} has {entry.nbytes} bytes, "
                f"not {content.nbytes}"
            )

        def copy_to(pool: MappedPool, extent: Extent) -> None:
            pool.write_view(extent)[:] = content

        return self.put(entry, copy_to, timeout)

    def put_async(self, entry: NewEntry, tensor: TensorSource) -> Future[bool]:
        """Claim or reserve at once, copy on the side. False: stored, or another client writes it.

        A small tensor on the host is copied before this returns, if memory was granted for it.
        """
        is_copied_here = tensor.is_on_host and entry.nbytes <= COPIED_HERE_BYTES
        session = self._connection.ref()
        try:
            if not is_copied_here:
                self._start_side()
            if not self._slots.acquire(blocking=False):
                raise EcdError(f"{MAX_PENDING_PUTS} puts are in flight: wait for one of them")
        except EcdError:
            session.unref()
            raise
        put: Put | None = None
        try:
            with session.whole_or_abandoned():  # interrupted, it would leave a claim behind
                put = Put(session, entry, tensor.copy_to, tensor)
                ended = None
                if put.state is MUST_CALL:
                    put.send_reserve()
                elif put.state is not CLAIMED or is_copied_here:
                    ended = _try_now(put)
                if ended is None:
                    return self._finish_aside(put)
        except BaseException:
            if put is None or put.is_taken_up():
                self._let_go(session)
            raise
        self._let_go(session)
        return ended

    def _start_side(self) -> None:
        """Start the thread for copies, before anything is claimed. Raises EcdError."""
        if not self._has_side:
            try:
                self._side.submit(int)
            except RuntimeError as error:
                raise EcdError(f"nothing can be copied on the side: {error}") from None
            self._has_side = True

    def _finish_aside(self, put: Put) -> Future[bool]:
        """Leave the rest to the thread. Raises DaemonUnavailable: the client is being closed."""
        future: forks.Pending[bool] = forks.Pending()
        forks.add(future)
        future.set_running_or_notify_cancel()  # others wait for a claim: it is not cancelled
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        try:
            self._side.submit(self._finish, put, future)
        except BaseException as error:
            self._pending.discard(future)
            if isinstance(error, RuntimeError):
                raise DaemonUnavailable(f"nothing can be copied on the side: {error}") from None
            raise
        return future

    def _finish(self, put: Put, future: Future[bool]) -> None:
        if not put.is_taken_up():
            return  # `put_async` was interrupted
        try:
            try:
                with put.session.whole_or_abandoned():
                    state = put.finish()
            finally:
                self._let_go(put.session)
            put.copy_near(lambda: future.set_result(state is STORED))
        except BaseException as error:
            if not future.done():
                future.set_exception(stripped(error))

    def _let_go(self, session: Session) -> None:
        session.unref()
        self._slots.release()

    def offer(self, keys: Sequence[Key], nodes: Sequence[str]) -> None:
        calls = self._connection.session().calls
        for start in range(0, len(keys), MAX_BATCH):
            batch = map(to_key, keys[start : start + MAX_BATCH])
            calls.later("offer", pb.OfferRequest(keys=batch, nodes=nodes))

    def close(self) -> None:
        """Finish the puts in flight."""
        self._side.shutdown(wait=True)
        wait(list(self._pending), CALL_TIMEOUT_S)  # of tensors that are copied within their GPU


def _try_now(put: Put) -> Future[bool] | None:
    """The put's future, if it ends without waiting."""
    try:
        put.write()
    except Exception as error:  # told by the future, as from the side
        failed: Future[bool] = Future()
        failed.set_exception(stripped(error))
        return failed
    return _DONE.get(put.state)


def _done(stored: bool) -> Future[bool]:
    done: Future[bool] = Future()
    done.set_result(stored)
    return done


def _all_done() -> dict[PutState, Future[bool]]:
    return {PutState.STORED: _done(True), PutState.ALREADY_STORED: _done(False)}


_DONE = _all_done()
"""The futures of puts that ended at once, by outcome."""
os.register_at_fork(after_in_child=lambda: _DONE.update(_all_done()))  # their locks may be held
