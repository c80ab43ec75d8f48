"""put: into granted memory, or reserve, copy and commit by calls."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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
                    begun = conversation.begin_put(what)
                    stored = _finish(conversation, what, begun, None, copy_to)
            finally:
                conversation.unuse()
            if stored is not None:
                return stored
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise EcdError(f"another client has been writing {what.mm_hash!r} for {timeout} s")
            if self._reader.wait_for_writer((what.namespace, what.mm_hash), left_s):
                return False

    def put_async(self, what: What, copy_to: CopyTo) -> Future[bool]:
        """Announced or reserved at once, copied on the side; what another writes is left to it."""
        conversation = self._session.use()
        if not self._slots.acquire(blocking=False):
            conversation.unuse()
            raise EcdError(f"{MAX_PENDING_PUTS} puts are in flight: wait for one of them")
        begun, reply = conversation.begin_put(what), None
        if begun is None:
            reply = conversation.calls.later("reserve", _reserve(conversation, what))

        def finish() -> bool:
            try:
                with conversation.whole_or_abandoned():
                    return _finish(conversation, what, begun, reply, copy_to) or False
            finally:
                conversation.unuse()
                self._slots.release()

        return self._side.submit(finish)

    def close(self) -> None:
        """Finish the puts in flight."""
        self._side.shutdown(wait=True)


def _finish(
    conversation: Conversation,
    what: What,
    begun: Begun | bool | None,
    reply: Any,
    copy_to: CopyTo,
) -> bool | None:
    """What came of a put: in granted memory if it was begun there, else by calls.

    `reply` is the future of a Reserve that was sent already. None: another client writes it.
    """
    stored = conversation.finish_put(begun, copy_to) if isinstance(begun, Begun) else begun
    if stored is not None:
        return stored
    request = _reserve(conversation, what)
    reserved = conversation.calls.now("reserve", request) if reply is None else reply.result()
    return _write(conversation, reserved, copy_to)


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
