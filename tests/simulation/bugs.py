"""Rules of the daemon, each taken out by hand: the simulation must find every one of these bugs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

from ecd.cluster import deliveries
from ecd.cluster.directory import redis_directory, redis_publisher, redis_rows
from ecd.cluster.peers import link
from ecd.cluster.transport.identity import IdentityCheck
from ecd.core.model.types import EntryId
from ecd.core.readers import Readers
from ecd.core.writers import Writers
from ecd.live.flights import Flights
from ecd.live.live import LiveCache
from ecd.rpc.peer.inbound_link import InboundLink
from ecd.rpc.peer.serving import Serving, Turn


class _AnyChecksum(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def _abort_at_once(self: deliveries.Deliveries, arrival: Any) -> None:
    self._live.abort(self._session, arrival.reserved.entry)


def _never_late(self: Flights, timeout_s: float) -> None:
    self._timeout_s = 1e6


def _wants_twice(self: Readers, key: Any) -> bool:
    return self._entries.stored(key) is None and self._entries.writing(key) is None


def _forgets_to_tell(self: Any, changes: Mapping[Any, bool]) -> None:
    _publish(self, {key: True for key, is_stored in changes.items() if is_stored})


def _forgets_the_peer(self: InboundLink) -> None:
    self._hashing.cancel()


def _keeps_expecting(self: LiveCache, key: Any) -> None:
    self._effects.after(self.cache.readers.writer_lost(key))


async def _beats_blindly(self: Any) -> None:
    """The sign of life as it once was: it writes the record while it asks for it."""
    now_s = time.monotonic()
    if now_s < self._beat_s:
        return
    name = self._names.record(self._incarnation)
    pipeline = self._redis.pipeline(transaction=False)
    pipeline.exists(name)
    pipeline.set(name, redis_rows.pack_record(self._node, self._zone, 0), ex=15)
    existed, *_ = await redis_rows.execute(pipeline)
    if not existed and self._known:
        self._sweeping = EntryId(0)
    self._known = True
    self._beat_s = now_s + 5.0


def _gives_up_with_its_asker(self: link.Link, answer: Any) -> None:
    """The end of a question as it once was: only one that somebody waits for ended the link."""
    if not answer.cancelled():
        _give_up(self, answer)


def _counts_to_infinity(self: Serving, turn: Turn, wait_s: float) -> bool:
    self.readers = len(self.lines[turn.entry].reading) + 1 if turn.entry in self.lines else 1
    return _ask(self, turn, wait_s)


def _passes_no_turn_on(self: Serving, turn: Turn, is_stored: bool = False) -> None:
    line = self.lines.get(turn.entry)
    if line is None or not line.waiting or turn in line.waiting:
        _end(self, turn, is_stored)
    else:
        turn.no_longer()
        line.reading.pop(turn, None)


_ask, _end = Serving.ask, Serving.end
_publish = redis_directory.RedisDirectory.publish
_give_up = link.Link._give_up
_nothing: Callable[..., None] = lambda *_: None  # noqa: E731


class Bug(NamedTuple):
    """What is put in place of an attribute, and within how many seeds from `first` that must show.

    A rare one is looked for near a seed that showed it.
    """

    target: Any
    attribute: str
    wrong: Any
    seeds: int = 100
    first: int = 0


BUGS = {
    "a peer's identity is not read after its bytes": Bug(
        IdentityCheck, "vouched", lambda *_: True, seeds=400, first=460
    ),
    "memory that a read may still write is not set aside": Bug(
        deliveries.Deliveries, "_give_up", _abort_at_once
    ),
    "a failed fetch keeps its reservation": Bug(deliveries.Deliveries, "_give_up", _nothing),
    "a fetched entry's lease is not given back": Bug(link.Link, "_give_back", _nothing),
    "a flight has no deadline": Bug(Flights, "reload", _never_late),
    "a question to a peer has no deadline": Bug(link, "ANSWER_TIMEOUT_S", 1e6, seeds=200, first=15),
    "a question is forgotten with its asker": Bug(
        link.Link, "_give_up", _gives_up_with_its_asker, seeds=200, first=15
    ),
    "a key is fetched again while it is on its way": Bug(Readers, "wants", _wants_twice),
    "a lease that has run out is still good": Bug(
        link.PeerLease, "ran_out", False, seeds=200, first=15
    ),
    "bytes are not compared with the checksum": Bug(
        deliveries, "fold", lambda _: _AnyChecksum(), seeds=600, first=220
    ),
    "a speculative read counts, wherever the entry lies": Bug(
        deliveries._Arrival, "is_of", lambda *_: True, seeds=500, first=1100
    ),
    "the directory is not told of evictions": Bug(
        redis_directory.RedisDirectory, "publish", _forgets_to_tell
    ),
    "a lost answer hides that Redis was emptied": Bug(
        redis_publisher.RedisPublisher, "_beat", _beats_blindly, seeds=1000, first=500
    ),
    "a dead peer's leases are kept": Bug(
        InboundLink, "end", _forgets_the_peer, seeds=200, first=90
    ),
    "a dead client's reservations are kept": Bug(
        Writers, "orphan_all", lambda *_: [], seeds=200, first=15
    ),
    "any number of nodes may read an entry": Bug(
        Serving, "ask", _counts_to_infinity, seeds=200, first=15
    ),
    "a turn to read is not passed on": Bug(Serving, "end", _passes_no_turn_on, seeds=200, first=15),
    "a key is expected after its flight": Bug(LiveCache, "stop_expecting", _keeps_expecting),
}


def put_in(bug: str) -> AbstractContextManager[object]:
    """Have the daemon's code contain the bug, within the context."""
    target, attribute, wrong, *_ = BUGS[bug]
    return mock.patch.object(target, attribute, wrong)
