"""put: reserve, copy, commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ecd_client.conversation import Conversation
from ecd_client.errors import (
    DaemonUnavailable,
    EcdError,
    EntryTooLarge,
    InvalidArgument,
    PoolFull,
    limit_reached,
)
from ecd_client.reader import Key, Reader, to_key
from ecd_client.session import Session
from ecd_proto.contract import DTYPES, nbytes_of
from ecd_proto.v1 import cache_pb2 as pb

MAX_PENDING_PUTS = 256
"""Asynchronous puts in flight before `put_async` refuses."""

CopyTo = Callable[[memoryview], None]
"""Fills the reserved extent: a writable view of the entry's length."""


def reserve_item(
    key: Key, dtype: str, shape: tuple[int, ...], cost_s: float, metadata: bytes
) -> pb.ReserveItem:
    """Raises InvalidArgument."""
    if dtype not in DTYPES:
        raise InvalidArgument(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    content = pb.Content(
        dtype=dtype,
        shape=shape,
        nbytes=nbytes_of(dtype, shape),
        metadata=metadata,
        cost_s=cost_s,
    )
    return pb.ReserveItem(key=to_key(key), content=content)


class Writer:
    """The writing half of a client."""

    def __init__(self, session: Session, reader: Reader) -> None:
        self._session, self._reader = session, reader
        self._side = ThreadPoolExecutor(1, thread_name_prefix="ecd-put")
        self._slots = threading.BoundedSemaphore(MAX_PENDING_PUTS)

    def put(self, item: pb.ReserveItem, copy_to: CopyTo, timeout: float) -> bool:
        """False: stored already. Waits up to `timeout` s for another writer of the key."""
        deadline_s = time.monotonic() + timeout
        while True:
            conversation = self._session.use()
            request = pb.ReserveRequest(session=conversation.token, items=[item])
            try:
                with conversation.whole_or_abandoned():
                    reply = conversation.calls.now("reserve", request)
                    stored = _write(conversation, reply, copy_to)
            finally:
                conversation.unuse()
            if stored is not None:
                return stored
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise EcdError(
                    f"another client has been writing {item.key.mm_hash!r} for {timeout} s"
                )
            if self._reader.wait_for_writer((item.key.namespace, item.key.mm_hash), left_s):
                return False

    def put_async(self, item: pb.ReserveItem, copy_to: CopyTo) -> Future[bool]:
        """Reserves at once, copies on the side; a key that another writes is left to it."""
        conversation = self._session.use()
        if not self._slots.acquire(blocking=False):
            conversation.unuse()
            raise EcdError(f"{MAX_PENDING_PUTS} puts are in flight: wait for one of them")
        request = pb.ReserveRequest(session=conversation.token, items=[item])
        reply = conversation.calls.later("reserve", request)

        def finish() -> bool:
            try:
                with conversation.whole_or_abandoned():
                    return _write(conversation, reply.result(), copy_to) or False
            finally:
                conversation.unuse()
                self._slots.release()

        return self._side.submit(finish)

    def close(self) -> None:
        """Finish the puts in flight."""
        self._side.shutdown(wait=True)


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
