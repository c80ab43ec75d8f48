"""put: into granted memory, or reserve, copy and commit by calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from ecd_client import arguments, clock, forks
from ecd_client.errors import (
    DaemonUnavailable,
    EcdError,
    EntryTooLarge,
    InvalidArgument,
    PoolFull,
    bare,
    limit_reached,
)
from ecd_client.reader import Reader
from ecd_client.session.calls import result_of
from ecd_client.session.channel import CALL_TIMEOUT_S
from ecd_client.session.connection import Connection
from ecd_client.session.session import Session
from ecd_client.shared.puts import Claim, CopyTo, NewEntry, PutOutcome
from ecd_client.values import Key, to_key
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from ecd_client.session.leases import Pin
    from ecd_client.tensors import TensorSource
    from ecd_client.values import Extent

MAX_PENDING_PUTS = 256
"""Asynchronous puts in flight before `put_async` refuses."""
COPIED_HERE_BYTES = 256 << 10
"""Up to here `put_async` copies itself: waking another thread takes about as long."""
_STORED, _UNANSWERED = PutOutcome.STORED, PutOutcome.UNANSWERED  # as looking them up takes longer
_MUST_CALL, _BEING_WRITTEN = PutOutcome.MUST_CALL, PutOutcome.BEING_WRITTEN


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
                    put = _Put(session, entry, copy_to)
                    outcome = put.finish()
                    put.copy_near(lambda: None)
            finally:
                session.unref()
            if outcome is not _BEING_WRITTEN:
                return outcome is _STORED
            left_s = deadline_s - clock.now_s()
            if left_s <= 0:
                raise EcdError(f"another client has been writing {entry.mm_hash!r} for {timeout} s")
            if self._reader.wait_for_writer((entry.namespace, entry.mm_hash), left_s):
                return False

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
        put: _Put | None = None
        try:
            with session.whole_or_abandoned():  # interrupted, it would leave a claim behind
                put = _Put(session, entry, tensor.copy_to, tensor)
                ended = None
                if put.outcome is _MUST_CALL:
                    put.send_reserve()
                elif put.outcome is not None or is_copied_here:
                    ended = put.try_now()
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

    def _finish_aside(self, put: _Put) -> Future[bool]:
        """Have the rest done on the side. Raises DaemonUnavailable: the client is being closed."""
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

    def _finish(self, put: _Put, future: Future[bool]) -> None:
        if not put.is_taken_up():
            return  # `put_async` was interrupted
        try:
            try:
                with put.session.whole_or_abandoned():
                    outcome = put.finish()
            finally:
                self._let_go(put.session)
            put.copy_near(lambda: future.set_result(outcome is _STORED))
        except BaseException as error:
            if not future.done():
                future.set_exception(bare(error))

    def _let_go(self, session: Session) -> None:
        session.unref()
        self._slots.release()

    def close(self) -> None:
        """Finish the puts in flight."""
        self._side.shutdown(wait=True)
        wait(list(self._pending), CALL_TIMEOUT_S)  # of tensors that are copied within their GPU


class _Put:
    """One put on its way: claimed or by calls, written, answered."""

    def __init__(
        self,
        session: Session,
        entry: NewEntry,
        copy_to: CopyTo,
        tensor: TensorSource | None = None,
    ) -> None:
        """Claim granted memory for the entry, if that is possible.

        `tensor`, if given, keeps its value until `copy_near` is done with it.
        """
        self.session = session
        self._entry, self._copy_to, self._tensor = entry, copy_to, tensor
        claimed = PutOutcome.MUST_CALL if session.puts is None else session.puts.claim(entry)
        self._claim = claimed if isinstance(claimed, Claim) else None
        self.outcome = None if isinstance(claimed, Claim) else claimed
        """How far the put has come; None: it is claimed, and to be written."""
        self._reply: Any = None  # to a Reserve that was sent already
        self._held: Pin | None = None  # the extent's, from before the put is done
        self._untaken = [True]

    def is_taken_up(self) -> bool:
        """Whether this caller, and no other before, is to end the put and let go of its session."""
        try:
            return self._untaken.pop()
        except IndexError:
            return False

    def send_reserve(self) -> None:
        """Begin the put by calls, and do not wait for the answer."""
        self._reply = self.session.calls.later("reserve", self._reserve_request())

    def try_now(self) -> Future[bool] | None:
        """The put's future, if it ends without waiting."""
        try:
            outcome = self._write()
        except Exception as error:  # told by the future, as from the side
            failed: Future[bool] = Future()
            failed.set_exception(bare(error))
            return failed
        return _DONE.get(outcome)

    def finish(self) -> PutOutcome:
        """Do all that is left: write, wait for the answer, or make the calls.

        Returns STORED, ALREADY_STORED or BEING_WRITTEN. Raises EcdError and what `copy_to` raises.
        """
        near = self.session.near
        if near is None or self._tensor is None or self._tensor.device != near.device:
            self._tensor = None
        try:
            if self._claim is not None:
                self._hold(self._claim)
            self.outcome = outcome = self._finish()
        except BaseException:
            self._let_go()
            raise
        return outcome

    def copy_near(self, then: Callable[[], None]) -> None:
        """Have a copy made in the device pool too, after `finish`: of the tensor, if it lies there.

        `then` is called once the tensor is not read any more.
        """
        near, is_stored = self.session.near, self.outcome is _STORED
        key = self._entry.namespace, self._entry.mm_hash
        if near is None or not is_stored or self._tensor is None or self._held is None:
            try:
                self._let_go()
            finally:
                then()
            if near is not None and is_stored:
                near.promote_soon(self.session, key)
            return
        from ecd_client.device.pool import JustPut  # imports CUDA's driver, as `near` has

        near.promote_soon(self.session, key, just_put=JustPut(self._tensor, self._held, then))

    def _hold(self, extent: Extent) -> None:
        """Hold the extent, so that an entry there is this put until the hold ends."""
        if self._tensor is not None:
            self._held = self.session.pin_own(extent)

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.end()

    def _finish(self) -> PutOutcome:
        outcome = self._write()
        if outcome is _UNANSWERED:
            assert self._claim is not None
            assert self.session.puts is not None
            outcome = self.session.puts.answer(self._claim, self.session.calls.timeout_s)
        if outcome is _MUST_CALL:
            self._let_go()  # the entry will lie elsewhere
            outcome = self._put_by_calls()
        return outcome

    def _write(self) -> PutOutcome:
        """Write what is claimed, unless it is written. Raises what `copy_to` raises."""
        if self.outcome is None:
            assert self._claim is not None
            assert self.session.puts is not None
            self.outcome = self.session.puts.write(self._claim, self._copy_to)
        return self.outcome

    # -- by calls ------------------------------------------------------------------------------

    def _reserve_request(self) -> pb.ReserveRequest:
        entry = self._entry
        content = pb.Content(
            dtype=entry.dtype,
            shape=entry.shape,
            nbytes=entry.nbytes,
            metadata=entry.metadata,
            cost_s=entry.cost_s,
        )
        key = to_key((entry.namespace, entry.mm_hash))
        item = pb.ReserveItem(key=key, content=content)
        return pb.ReserveRequest(session=self.session.token, items=[item])

    def _put_by_calls(self) -> PutOutcome:
        """Reserve, unless that was sent already, then copy and commit."""
        if self._reply is None:
            reply = self.session.calls.now("reserve", self._reserve_request())
        else:
            reply = result_of(self._reply)
        entry, outcome = self._entry, reply.outcomes[0]
        match outcome.WhichOneof("outcome"):
            case "reserved":
                self._copy_and_commit(outcome.reserved)
                return PutOutcome.STORED
            case "already_stored":
                return PutOutcome.ALREADY_STORED
            case "being_written":
                return PutOutcome.BEING_WRITTEN
            case "pool_full":
                full = outcome.pool_full
                if full.quota_bytes:
                    raise PoolFull(
                        f"{full.nbytes} bytes do not fit into the quota of {entry.namespace!r}, "
                        f"{full.quota_bytes} bytes: its entries are leased, kept or being "
                        "written. Try later, or raise ECD_NAMESPACE_QUOTAS"
                    )
                raise PoolFull(
                    f"{full.nbytes} bytes do not fit: {full.held_bytes} are leased or being "
                    f"written, the largest free piece has {full.largest_free_bytes}"
                )
            case "entry_too_large":
                large = outcome.entry_too_large
                if large.quota_bytes:
                    raise EntryTooLarge(
                        f"{large.nbytes} bytes, and the quota of {entry.namespace!r} is "
                        f"{large.quota_bytes}: raise ECD_NAMESPACE_QUOTAS"
                    )
                raise EntryTooLarge(
                    f"{large.nbytes} bytes, and the whole pool has {large.pool_bytes}: raise "
                    "ECD_HOST_POOL_BYTES"
                )
            case _:
                limit = outcome.limit_reached
                raise limit_reached(limit.what, limit.limit)

    def _copy_and_commit(self, reserved: pb.Reserved) -> None:
        session, reservations = self.session, [reserved.reservation]
        try:
            self._hold(reserved.extent)
            self._copy_to(session.pools.of(reserved.extent), reserved.extent)
        except BaseException:
            abort = pb.AbortRequest(session=session.token, reservations=reservations)
            session.calls.now("abort", abort)
            raise
        commit = pb.CommitRequest(session=session.token, reservations=reservations)
        if not session.calls.now("commit", commit).committed[0]:
            raise DaemonUnavailable("the daemon took the reservation back meanwhile")


def _done(stored: bool) -> Future[bool]:
    done: Future[bool] = Future()
    done.set_result(stored)
    return done


def _all_done() -> dict[PutOutcome, Future[bool]]:
    return {PutOutcome.STORED: _done(True), PutOutcome.ALREADY_STORED: _done(False)}


_DONE = _all_done()
"""The futures of puts that ended at once, by outcome."""
os.register_at_fork(after_in_child=lambda: _DONE.update(_all_done()))  # their locks may be held
