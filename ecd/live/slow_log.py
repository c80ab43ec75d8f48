"""The slow log: the last calls, puts, fetches and disk reads that took long, and why they did.

It is what SLOWLOG is to Redis. A call and a flight note how long they wait, stage by stage; a quick
one costs one comparison beyond that. A read through the mapped index is no call, and never here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar

from google.protobuf.message import Message

from ecd.base.clock import Clock
from ecd.base.log_limit import LogLimit
from ecd.core.model.board import Put
from ecd.core.model.types import Key
from ecd_proto.contract import MAX_MM_HASH_BYTES, MAX_NAMESPACE_BYTES, size_text
from ecd_proto.v1 import cache_pb2 as pb

logger = logging.getLogger(__name__)

MAX_SLOW = 128
"""Events kept; each is some hundred bytes."""
FETCH_FACTOR = 10.0
"""The threshold of a fetch from another node, as a multiple of that of a call."""
MAX_UINT64 = (1 << 64) - 1
DISK_READ, FETCH = "disk_read", "fetch"

_stages: ContextVar[dict[str, float] | None] = ContextVar("stages", default=None)


def time_stages() -> None:
    """Time the stages of this task from now on."""
    _stages.set({})


def waited(stage: str, seconds: float) -> None:
    """Note that this task spent this time in a stage."""
    stages = _stages.get()
    if stages is not None:
        stages[stage] = stages.get(stage, 0.0) + seconds


class Stage:
    """A context in which this task waits for one thing: the time counts, however it ends."""

    __slots__ = ("_clock", "_name", "_started_s")

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock

    def __enter__(self) -> None:
        self._started_s = self._clock.now_s()

    def __exit__(self, *_: object) -> None:
        waited(self._name, self._clock.now_s() - self._started_s)


class SlowLog:
    """The last MAX_SLOW slow events of one daemon, on its event loop."""

    def __init__(
        self,
        clock: Clock,
        slow_s: float = 0.1,
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`count` is told the kind of each slow event."""
        self.slow_s, self.total = slow_s, 0
        self._count, self._clock = count, clock
        self._events: deque[pb.SlowEvent] = deque(maxlen=MAX_SLOW)
        self._lines = LogLimit(clock)

    @property
    def slow_fetch_s(self) -> float:
        return self.slow_s * FETCH_FACTOR

    def call(
        self, method: str, seconds: float, asked: Message | Put | None, reply: Message | None = None
    ) -> None:
        """Keep a call, or a put without one, if it was slow."""
        if seconds < self.slow_s:
            return
        event = pb.SlowEvent(kind=method, seconds=seconds)
        if isinstance(asked, Put):
            _name(event, *asked.key)
            event.keys, event.nbytes = 1, asked.content.nbytes
        else:
            event.stages.update(_stages.get() or {})
            _describe(event, asked, reply)
        self._keep(event)

    def flight(
        self,
        kind: str,
        seconds: float,
        key: Key,
        nbytes: int,
        peer: str,
        outcome: str,
        awaited_s: float = 0.0,
    ) -> None:
        """Keep a flight of this task, a FETCH or a DISK_READ, if it was slow.

        The part of it in which it waited for an encode elsewhere, `awaited_s`, makes it no slower.
        """
        if seconds - awaited_s < (self.slow_fetch_s if kind == FETCH else self.slow_s):
            return
        event = pb.SlowEvent(kind=kind, seconds=seconds, keys=1)
        _name(event, *key)
        event.nbytes, event.peer, event.outcome = nbytes, peer, outcome
        event.stages.update(_stages.get() or {})
        self._keep(event)

    def newest(self, clear: bool) -> list[pb.SlowEvent]:
        """All that is kept, the newest first, and afterwards forgotten if `clear` says so."""
        events = list(reversed(self._events))
        if clear:
            self._events.clear()
        return events

    def _keep(self, event: pb.SlowEvent) -> None:
        event.unix_s = self._clock.unix_s() - event.seconds
        self._events.append(event)
        self.total += 1
        self._count(event.kind)
        more = self._lines.take()
        if more is not None:
            logger.info(
                "slow: %s of %s took %.2f s (%s): see `ecd-cli slow`%s",
                event.kind.replace("_", " "),
                size_text(event.nbytes),
                event.seconds,
                ", ".join(f"{stage} {spent:.2f} s" for stage, spent in event.stages.items()) or "-",
                more,
                extra={
                    "kind": event.kind,
                    "seconds": event.seconds,
                    "namespace": event.namespace,
                    "mm_hash": event.mm_hash,
                    "nbytes": event.nbytes,
                    "peer": event.peer,
                },
            )


def _name(event: pb.SlowEvent, namespace: str, mm_hash: str) -> None:
    """Set the key, which is not checked yet."""
    event.namespace, event.mm_hash = namespace[:MAX_NAMESPACE_BYTES], mm_hash[:MAX_MM_HASH_BYTES]


def _describe(event: pb.SlowEvent, asked: Message | None, reply: Message | None) -> None:
    """Set the first key, the number of keys and the bytes of a call."""
    keys: list[pb.Key] = []
    match asked:
        case pb.ReserveRequest():
            keys = [item.key for item in asked.items]
            event.nbytes = min(MAX_UINT64, sum(item.content.nbytes for item in asked.items))
        case pb.AcquireRequest() | pb.ContainsRequest() | pb.LocateRequest() | pb.OfferRequest():
            keys = list(asked.keys)
        case pb.PromoteRequest():
            keys = [asked.key]
        case pb.EvictRequest() | pb.ListRequest():
            _name(event, asked.namespace, "")
            if isinstance(asked, pb.EvictRequest) and asked.HasField("key"):
                keys = [asked.key]
    match reply:
        case pb.AcquireReply():
            event.nbytes = sum(each.leased.content.nbytes for each in reply.outcomes)
        case pb.EvictReply():
            event.nbytes = reply.nbytes + reply.disk_bytes
    event.keys = len(keys)
    if keys:
        _name(event, keys[0].namespace, keys[0].mm_hash)
