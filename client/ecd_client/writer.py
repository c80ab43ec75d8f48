"""put: into granted memory, or reserve, copy and commit by calls."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ecd_client import forks
from ecd_client.conversation import Conversation
from ecd_client.errors import (
    DaemonUnavailable,
    EcdError,
    EntryTooLarge,
    InvalidArgument,
    PoolFull,
    limit_reached,
)
from ecd_client.puts import Begun, CopyTo, What
from ecd_client.reader import Key, Reader, to_key
from ecd_client.session import Session
from ecd_proto.contract import DTYPES, nbytes_of
from ecd_proto.v1 import cache_pb2 as pb

MAX_PENDING_PUTS = 256
"""Asynchronous puts in flight before `put_async` refuses."""
COPIED_HERE_BYTES = 256 << 10
"""Of `put_async`: waking another thread takes about as long as copying these."""


def describe_entry(
    key: Key, dtype: str, shape: tuple[int, ...], cost_s: float, metadata: bytes
) -> What:
    """Raises InvalidArgument."""
    if dtype not in DTYPES:
        raise InvalidArgument(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    return What(*key, dtype, shape, nbytes_of(dtype, shape), metadata, cost_s)


def _reserve(conversation: Conversation, what: What) -> pb.ReserveRequest:
    content = pb.Content(
        dtype=what.dtype,
        shape=what.shape,
        nbytes=what.nbytes,
        metadata=what.metadata,
        cost_s=what.cost_s,
    )
    key = to_key((what.namespace, what.mm_hash))
    item = pb.ReserveItem(key=key, content=content)
    return pb.ReserveRequest(session=conversation.token, items=[item])


class Writer:
    """The writing half of a client."""

    def __init__(self, session: Session, reader: Reader) -> None:
        self._session, self._reader = session, reader
        self._side = ThreadPoolExecutor(1, thread_name_prefix="ecd-put")
        self._slots = threading.BoundedSemaphore(MAX_PENDING_PUTS)

    def put(self, what: What, copy_to: CopyTo, timeout: float) -> bool:
        """False: stored already. Waits up to `timeout` s for another writer of the key."""
        deadline_s = time.monotonic() + timeout
        while True:
            conversation = self._session.use()
            try:
                with conversation.whole_or_abandoned():
                    put = _Put(conversation, what, copy_to, conversation.begin_put(what))
                    stored = put.finish()
            finally:
                conversation.unuse()
            if stored is not None:
                return stored
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise EcdError(f"another client has been writing {what.mm_hash!r} for {timeout} s")
            if self._reader.wait_for_writer((what.namespace, what.mm_hash), left_s):
                return False

    def put_async(self, what: What, copy_to: CopyTo, on_host: bool) -> Future[bool]:
        """Announced or reserved at once, copied on the side; what another writes is left to it.

        Small entries that are `on_host` are copied here, if that is in granted memory.
        """
        conversation = self._session.use()
        if not self._slots.acquire(blocking=False):
            conversation.unuse()
            raise EcdError(f"{MAX_PENDING_PUTS} puts are in flight: wait for one of them")
        put = _Put(conversation, what, copy_to, conversation.begin_put(what))
        if put.begun is None:
            put.reply = conversation.calls.later("reserve", _reserve(conversation, what))
        elif put.begun is False or (on_host and what.nbytes <= COPIED_HERE_BYTES):
            ended = put.try_now()
            if ended is not None:
                self._let_go(put)
                return ended
        future: forks.Pending[bool] = forks.Pending()
        forks.add(future)
        future.set_running_or_notify_cancel()  # others wait for what is announced: no way back
        self._side.submit(self._tell, put, future)
        return future

    def _tell(self, put: _Put, future: Future[bool]) -> None:
        try:
            future.set_result(self._finish(put))
        except BaseException as error:
            future.set_exception(error)

    def _finish(self, put: _Put) -> bool:
        try:
            with put.conversation.whole_or_abandoned():
                return put.finish() or False
        finally:
            self._let_go(put)

    def _let_go(self, put: _Put) -> None:
        put.conversation.unuse()
        self._slots.release()

    def close(self) -> None:
        """Finish the puts in flight."""
        self._side.shutdown(wait=True)


@dataclass(eq=False)
class _Put:
    """One put on its way."""

    conversation: Conversation
    what: What
    copy_to: CopyTo
    begun: Begun | bool | None  # what Conversation.begin_put says
    reply: Any = None  # of a Reserve that was sent already
    written: bool = False

    def try_now(self) -> Future[bool] | None:
        """What came of it, if that can be had without waiting."""
        try:
            stored = self.write()
        except Exception as error:  # told by the future, as from the side
            failed: Future[bool] = Future()
            failed.set_exception(error)
            return failed
        return None if stored is None else _DONE[stored]

    def write(self) -> bool | None:
        """What came of it, if that is known now. Raises what `copy_to` raises."""
        if not isinstance(self.begun, Begun):
            return self.begun
        if self.written:
            return None
        self.written = True
        return self.conversation.write_put(self.begun, self.copy_to) or None

    def finish(self) -> bool | None:
        """What came of it, in granted memory if it was begun there, else by calls.

        None: another client writes it.
        """
        stored = self.write()
        if stored is None and isinstance(self.begun, Begun):
            stored = self.conversation.answer_to_put(self.begun)
        if stored is not None:
            return stored
        conversation = self.conversation
        if self.reply is None:
            reserved = conversation.calls.now("reserve", _reserve(conversation, self.what))
        else:
            reserved = self.reply.result()
        return _write(conversation, reserved, self.copy_to)


def _done(stored: bool) -> Future[bool]:
    done: Future[bool] = Future()
    done.set_result(stored)
    return done


def _both_done() -> dict[bool, Future[bool]]:
    return {stored: _done(stored) for stored in (True, False)}


_DONE = _both_done()
os.register_at_fork(after_in_child=lambda: _DONE.update(_both_done()))  # their locks may be held


def _write(conversation: Conversation, reply: pb.ReserveReply, copy_to: CopyTo) -> bool | None:
    """What came of a Reserve: True after the commit, None while another client writes."""
    outcome = reply.outcomes[0]
    match outcome.WhichOneof("outcome"):
        case "reserved":
            _copy_and_commit(conversation, outcome.reserved, copy_to)
            return True
        case "already_stored":
            return False
        case "being_written":
            return None
        case "pool_full":
            full = outcome.pool_full
            raise PoolFull(
                f"{full.nbytes} bytes do not fit: {full.held_bytes} are leased or being "
                f"written, the largest free piece has {full.largest_free_bytes}"
            )
        case "entry_too_large":
            large = outcome.entry_too_large
            raise EntryTooLarge(
                f"{large.nbytes} bytes, and the whole pool has {large.pool_bytes}: raise "
                "ECD_HOST_POOL_BYTES"
            )
        case _:
            limit = outcome.limit_reached
            raise limit_reached(limit.what, limit.limit)


def _copy_and_commit(conversation: Conversation, reserved: pb.Reserved, copy_to: CopyTo) -> None:
    session, reservations = conversation.token, [reserved.reservation]
    try:
        copy_to(conversation.write_view(reserved.extent))
    except BaseException:
        abort = pb.AbortRequest(session=session, reservations=reservations)
        conversation.calls.now("abort", abort)
        raise
    commit = pb.CommitRequest(session=session, reservations=reservations)
    if not conversation.calls.now("commit", commit).committed[0]:
        raise DaemonUnavailable("the daemon took the reservation back meanwhile")
