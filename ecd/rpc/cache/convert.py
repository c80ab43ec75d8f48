"""The Cache service's messages to the core's words and back."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import NoReturn

import grpc
from typing_extensions import assert_never

from ecd.base.wire import InvalidRequest, key_from, seconds_from, to_content, to_extent, to_key
from ecd.core.model.outcomes import (
    Acquisition,
    AlreadyStored,
    BeingWritten,
    EntryTooLarge,
    Keeping,
    Kept,
    KeptTooMuch,
    Leased,
    LimitReached,
    Missing,
    PoolFull,
    Reservation,
    Reserved,
    SessionEnded,
    Stored,
    Waiting,
)
from ecd.core.model.types import EntryInfo, Selection, Terms
from ecd.core.pool.pool import Pool
from ecd_proto.v1 import cache_pb2 as pb


class SessionOver(Exception):
    """The client named a session that is not open here."""

    def __init__(self) -> None:
        super().__init__("the session is not open in this daemon: open a new one")


STATUS: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    SessionOver: grpc.StatusCode.FAILED_PRECONDITION,
}


def to_failure(error: Exception) -> pb.Failure:
    """The error of one call in a stream, with the status that a call of its own would have had."""
    code: int = STATUS[type(error)].value[0]
    return pb.Failure(code=code, details=str(error))


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
        case PoolFull(nbytes, largest, held, quota):
            full = pb.PoolFull(
                nbytes=nbytes, largest_free_bytes=largest, held_bytes=held, quota_bytes=quota
            )
            return pb.ReserveOutcome(pool_full=full)
        case EntryTooLarge(nbytes, pool_bytes, quota):
            large = pb.EntryTooLarge(nbytes=nbytes, pool_bytes=pool_bytes, quota_bytes=quota)
            return pb.ReserveOutcome(entry_too_large=large)
        case LimitReached(what, limit):
            return pb.ReserveOutcome(limit_reached=pb.LimitReached(what=what, limit=limit))
        case SessionEnded():
            _session_over()
        case _:
            assert_never(outcome)


def copies_pool(pools: Iterable[Pool], number: int) -> Pool:
    """The pool of this number, for copies. Raises InvalidRequest."""
    for pool in pools:
        if pool.number == number and pool.holds_replicas:
            return pool
    raise InvalidRequest(f"pool {number} is no device pool")


def to_promote_reply(outcome: Reservation | Missing, incarnation: str) -> pb.PromoteReply:
    reply = pb.PromoteReply(incarnation=incarnation)
    if isinstance(outcome, SessionEnded):
        _session_over()
    if isinstance(outcome, Reserved):
        reply.reserved.reservation = outcome.entry
        reply.reserved.extent.CopyFrom(to_extent(outcome.extent))
    return reply


def to_acquire_outcome(outcome: Acquisition) -> pb.AcquireOutcome:
    match outcome:
        case Leased(lease, _, content, extent, expires_s, entry):
            leased = pb.Leased(
                lease=lease,
                content=to_content(content),
                extent=to_extent(extent),
                expires_s=expires_s,
                entry=entry,
            )
            return pb.AcquireOutcome(leased=leased)
        case Stored():
            return pb.AcquireOutcome(stored=pb.Stored())
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


def to_entry_info(info: EntryInfo, now_s: float) -> pb.EntryInfo:
    terms = info.terms or Terms(info.created_s)
    kept = terms.kept_until_s > 0.0
    return pb.EntryInfo(
        entry=info.entry,
        key=to_key(info.key),
        content=to_content(info.content),
        leases=info.leases,
        hits=info.hits,
        age_s=now_s - info.created_s,
        idle_s=now_s - info.used_s,
        pool=info.extent.pool,
        kept=kept,
        kept_for_s=max(0.0, terms.kept_until_s - now_s) if isfinite(terms.kept_until_s) else 0.0,
        expires_in_s=None if terms.expires_s == inf else max(0.0, terms.expires_s - now_s),
    )


def to_keep_reply(outcome: Keeping) -> pb.KeepReply:
    match outcome:
        case Kept():
            return pb.KeepReply(outcome=pb.KeepReply.OUTCOME_KEPT)
        case Missing():
            return pb.KeepReply(outcome=pb.KeepReply.OUTCOME_MISSING)
        case KeptTooMuch(nbytes, kept_bytes, most_bytes):
            return pb.KeepReply(
                outcome=pb.KeepReply.OUTCOME_TOO_MUCH,
                nbytes=nbytes,
                kept_bytes=kept_bytes,
                kept_most_bytes=most_bytes,
            )
        case _:
            assert_never(outcome)


def to_holder(node: str, info: EntryInfo, now_s: float) -> pb.Holder:
    content = info.content
    return pb.Holder(
        node=node,
        nbytes=content.nbytes,
        age_s=now_s - info.created_s,
        metadata=content.metadata,
    )


def _session_over() -> NoReturn:
    raise SessionOver
