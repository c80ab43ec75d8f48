"""Messages to the core's words and back, and the one place that validates what clients send."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite
from typing import NoReturn

import grpc
from typing_extensions import assert_never

from ecd.core.types import (
    Acquisition,
    AlreadyStored,
    BeingWritten,
    Content,
    EntryInfo,
    EntryTooLarge,
    Extent,
    Key,
    Leased,
    LimitReached,
    Missing,
    PoolFull,
    Reservation,
    Reserved,
    Selection,
    SessionEnded,
    Waiting,
)
from ecd_proto import contract
from ecd_proto.v1 import cache_pb2 as pb


class InvalidRequest(Exception):
    """The client sent something that the contract does not allow; the message says what."""


class SessionOver(Exception):
    """The client named a session that is not open here."""

    def __init__(self) -> None:
        super().__init__("the session is not open in this daemon: open a new one")


STATUS: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    SessionOver: grpc.StatusCode.FAILED_PRECONDITION,
}


def to_failure(error: Exception) -> pb.Failure:
    """What the status of a call would have been, where there is a stream instead."""
    code: int = STATUS[type(error)].value[0]
    return pb.Failure(code=code, details=str(error))


def check_batch(items: Collection[object]) -> None:
    if len(items) > contract.MAX_BATCH:
        raise InvalidRequest(f"{len(items)} items in one call; at most {contract.MAX_BATCH}")


def key_from(message: pb.Key) -> Key:
    for field, value, limit in (
        ("namespace", message.namespace, contract.MAX_NAMESPACE_BYTES),
        ("mm_hash", message.mm_hash, contract.MAX_MM_HASH_BYTES),
    ):
        if not value:
            raise InvalidRequest(f"an empty {field}")
        if len(value.encode()) > limit:
            raise InvalidRequest(f"a {field} of {len(value.encode())} bytes; at most {limit}")
    return Key(message.namespace, message.mm_hash)


def content_from(message: pb.Content) -> Content:
    shape = tuple(message.shape)
    if message.dtype not in contract.DTYPES:
        raise InvalidRequest(
            f"unknown dtype {message.dtype[:32]!r}; known are {', '.join(contract.DTYPES)}"
        )
    if len(shape) > contract.MAX_DIMENSIONS:
        raise InvalidRequest(f"{len(shape)} dimensions; at most {contract.MAX_DIMENSIONS}")
    expected = contract.nbytes_of(message.dtype, shape)
    if message.nbytes != expected:
        raise InvalidRequest(
            f"{message.dtype} of shape {shape} has {expected} bytes, not {message.nbytes}"
        )
    if len(message.metadata) > contract.MAX_METADATA_BYTES:
        raise InvalidRequest(
            f"{len(message.metadata)} bytes of metadata; at most {contract.MAX_METADATA_BYTES}"
        )
    if not (isfinite(message.cost_s) and message.cost_s >= 0.0):
        raise InvalidRequest(f"cost_s is {message.cost_s}; it must be 0 or more")
    return Content(message.dtype, shape, message.nbytes, message.metadata, message.cost_s)


def seconds_from(seconds: float, name: str) -> float:
    if not (isfinite(seconds) and seconds >= 0.0):
        raise InvalidRequest(f"{name} is {seconds}; it must be 0 or more")
    return seconds


def selection_from(request: pb.EvictRequest) -> Selection:
    return Selection(
        key=key_from(request.key) if request.HasField("key") else None,
        namespace=request.namespace if request.HasField("namespace") else None,
        idle_s=seconds_from(request.idle_s, "idle_s"),
        age_s=seconds_from(request.age_s, "age_s"),
    )


def to_reserve_outcome(outcome: Reservation) -> pb.ReserveOutcome:
    match outcome:
        case Reserved(reservation, extent):
            reserved = pb.Reserved(reservation=reservation, extent=to_extent(extent))
            return pb.ReserveOutcome(reserved=reserved)
        case AlreadyStored():
            return pb.ReserveOutcome(already_stored=pb.AlreadyStored())
        case BeingWritten():
            return pb.ReserveOutcome(being_written=pb.BeingWritten())
        case PoolFull(nbytes, largest, held):
            full = pb.PoolFull(nbytes=nbytes, largest_free_bytes=largest, held_bytes=held)
            return pb.ReserveOutcome(pool_full=full)
        case EntryTooLarge(nbytes, pool_bytes):
            large = pb.EntryTooLarge(nbytes=nbytes, pool_bytes=pool_bytes)
            return pb.ReserveOutcome(entry_too_large=large)
        case LimitReached(what, limit):
            return pb.ReserveOutcome(limit_reached=pb.LimitReached(what=what, limit=limit))
        case SessionEnded():
            _session_over()
        case _:
            assert_never(outcome)


def to_acquire_outcome(outcome: Acquisition) -> pb.AcquireOutcome:
    match outcome:
        case Leased(lease, _, content, extent, expires_s, _):
            leased = pb.Leased(
                lease=lease,
                content=to_content(content),
                extent=to_extent(extent),
                expires_s=expires_s,
            )
            return pb.AcquireOutcome(leased=leased)
        case Missing():
            return pb.AcquireOutcome(missing=pb.Missing())
        case Waiting(ticket):
            return pb.AcquireOutcome(waiting=pb.Waiting(ticket=ticket))
        case LimitReached(what, limit):
            return pb.AcquireOutcome(limit_reached=pb.LimitReached(what=what, limit=limit))
        case SessionEnded():
            _session_over()
        case _:
            assert_never(outcome)


def to_extent(extent: Extent) -> pb.Extent:
    return pb.Extent(pool=extent.pool, offset=extent.offset, nbytes=extent.nbytes)


def to_content(content: Content) -> pb.Content:
    return pb.Content(
        dtype=content.dtype,
        shape=content.shape,
        nbytes=content.nbytes,
        metadata=content.metadata,
        cost_s=content.cost_s,
    )


def to_entry_info(info: EntryInfo, now_s: float) -> pb.EntryInfo:
    return pb.EntryInfo(
        entry=info.entry,
        key=pb.Key(namespace=info.key.namespace, mm_hash=info.key.mm_hash),
        content=to_content(info.content),
        leases=info.leases,
        hits=info.hits,
        age_s=now_s - info.created_s,
        idle_s=now_s - info.used_s,
    )


def _session_over() -> NoReturn:
    raise SessionOver
