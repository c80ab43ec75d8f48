"""One session's stream, as the daemon keeps it, and the events that it has to write."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from ecd.core.model.types import SessionId
from ecd.rpc.cache.attach import UNKNOWN, Process
from ecd_proto.v1 import cache_pb2 as pb

MAX_UNREAD_EVENTS = 100_000
"""Events a client may leave unread before its session is ended."""

Event = pb.SessionEvent | pb.WaitEnded | None
"""An event to write; None ends the stream."""


@dataclass(eq=False)
class Stream:
    """One session stream, open or ended."""

    session: SessionId
    token: str
    client: str  # name and version, as the client says
    pid: int  # as the client says
    opened_s: float
    process: Process = UNKNOWN  # as the kernel says
    is_over: asyncio.Event = field(default_factory=asyncio.Event)  # at an operator's request
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)  # with its session
    outbox: asyncio.Queue[Event] = field(default_factory=lambda: asyncio.Queue(MAX_UNREAD_EVENTS))
    attached: bool = False  # its client was seen to hold the session's lock
    is_described: bool = False  # by its client, as an engine
    is_misread: bool = False  # what its client says that its engine is
    has_erred: bool = False  # a message of its client was passed over

    def __str__(self) -> str:
        return f"{self.client} pid {self.pid}"


def merged(events: Iterable[Event]) -> Iterator[pb.SessionEvent | None]:
    """The events in order; ends of waits in a row make one."""
    for _, group in groupby(events, type):
        others: list[pb.SessionEvent | None] = []
        waits: list[pb.WaitEnded] = []
        for event in group:
            if isinstance(event, pb.WaitEnded):
                waits.append(event)
            else:
                others.append(event)
        if waits:
            yield pb.SessionEvent(waits_ended=pb.WaitsEnded(ended=waits))
        yield from others
