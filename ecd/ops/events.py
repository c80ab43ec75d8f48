"""Publishes what is stored and removed, for routers that keep an index of their own.

A PUB socket sends every change, a ROUTER socket replays the latest ones or gives a snapshot. The
wire form is that of `ecd_proto.events`. Nothing here waits for a subscriber: one that is slow loses
messages, and learns that from the sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ecd.core.model.types import EntryId, Key
from ecd.live.background import Background
from ecd.live.live import LiveCache
from ecd_proto.events import (
    END,
    SIGN_S,
    SNAPSHOT,
    AllCleared,
    Batch,
    EncodingRemoved,
    EncodingStored,
    Event,
    topic,
)

logger = logging.getLogger(__name__)

COLLECT_S = 0.05
"""How long changes are collected for one message."""
KEYS = 256
"""Keys in one message, and entries of a snapshot's page."""
KEPT_BYTES = 16 << 20
"""Messages kept for replay."""
UNSENT = 256
"""Messages queued for one subscriber; it loses further ones."""
UNSENT_ANSWERS = 16
"""Messages of an answer queued for one asker; the rest is sent as it reads them."""
ANSWERS = 16
"""Answers given at one time; further requests are dropped, and their senders ask again."""
PATIENCE_S = 10.0
"""How long one answer waits, in all, for an asker that is full."""
FULL_S = 0.01
"""Pause before a full asker is tried again."""
MAX_REQUEST_BYTES, MAX_TOPIC_BYTES = 4096, 300
"""Largest frames of requests and subscriptions; a connection that sends a larger one is closed."""
MAX_FRAMES, FRAMES_IN_TURN = 3, 64
"""Frames that a request has; of more, as many are dropped in one turn of the event loop."""


class EventsError(Exception):
    """The events' ports cannot be bound; the message says what to change."""


@dataclass
class EventCounters:
    """Counts since the daemon started."""

    events: int = 0  # keys told as stored or removed
    batches: int = 0
    losses: int = 0  # times that a slow subscriber began to lose batches
    replays: int = 0
    snapshots: int = 0
    refused: int = 0  # requests that made no sense, or came while too many were answered
    given_up: int = 0  # answers that were not taken in time


@dataclass
class _Changed:
    """The unsent changes of one namespace."""

    stored: list[str] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.stored) + len(self.removed)

    def events(self) -> Iterator[Event]:
        if self.stored:
            yield EncodingStored(self.stored, self.nbytes)
        if self.removed:
            yield EncodingRemoved(self.removed)


@dataclass
class _Asker:
    """The sender of a request."""

    identity: bytes
    patience_s: float = PATIENCE_S


_Answer = Callable[[_Asker], Coroutine[Any, Any, None]]


class Events:
    """The stream of one daemon's changes, on its event loop."""

    def __init__(self, address: str, node: str, epoch: str, live: LiveCache) -> None:
        """Bind `address` (host:port) and, for replay, the port after it; port 0: any two.

        Changes from now on are published under the name `node`. Raises EventsError.
        """
        self.counters = EventCounters()
        self._node, self._epoch, self._live = node, epoch, live
        self._encode = msgspec.msgpack.Encoder().encode
        self._kept: dict[int, tuple[bytes, bytes]] = {}  # topic and batch, by sequence
        self._kept_bytes = 0
        self._next = self._oldest = 0
        self._background = Background()
        self._context = zmq.Context()
        self._pub: Any = self._context.socket(zmq.PUB)
        self._router: Any = zmq.asyncio.Socket(self._context, zmq.ROUTER)
        self._pub.sndhwm, self._router.sndhwm = UNSENT, UNSENT_ANSWERS
        # Where somebody is full, or an asker has gone, a send fails, and is counted.
        self._pub.xpub_nodrop = self._router.router_mandatory = True
        self._pub.maxmsgsize, self._router.maxmsgsize = MAX_TOPIC_BYTES, MAX_REQUEST_BYTES
        for socket in (self._pub, self._router):
            socket.linger = 0
            socket.ipv6 = address.startswith("[")
        try:
            host, _, port = address.rpartition(":")
            self.address = _bind(self._pub, host, int(port))
            self.replay_address = _bind(self._router, host, int(port) and int(port) + 1)
        except (zmq.ZMQError, OverflowError) as error:
            self._close_sockets()
            raise EventsError(
                f"cannot publish events on {address} and the port after it: {error}. Choose "
                "another IP address and port with ECD_EVENTS_ADDRESS; port 0 takes any two"
            ) from None
        self._changes = live.follow_changes()
        self._publish("", [AllCleared()])

    async def run(self) -> None:
        """Publish changes and answer requests, until cancelled."""
        await asyncio.gather(self._follow(), self._live_on(), self._answer())

    async def close(self) -> None:
        await self._background.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close()
        self._router.close()
        self._context.term()

    # -- changes -------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Publish for each changed key whether it is stored at that moment."""
        while True:
            pace = self._live.turns.pace()
            changed: dict[str, _Changed] = {}
            for key in await self._changes.next(COLLECT_S):
                await pace.step()
                of_namespace = changed.setdefault(key.namespace, _Changed())
                self._note(of_namespace, key)
                if len(of_namespace) == KEYS:
                    self._publish(key.namespace, changed.pop(key.namespace).events())
            for namespace, of_namespace in changed.items():
                await pace.step()
                self._publish(namespace, of_namespace.events())

    def _note(self, changed: _Changed, key: Key) -> None:
        self.counters.events += 1
        extent = self._live.cache.views.extent(key)
        if extent is None:
            changed.removed.append(key.mm_hash)
        else:
            changed.stored.append(key.mm_hash)
            changed.nbytes.append(extent.nbytes)

    def _publish(self, namespace: str, events: Iterable[Event]) -> None:
        message = topic(self._node, namespace), self._batch(events)
        self._kept[self._next] = message
        self._kept_bytes += sum(map(len, message))
        self._next += 1
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= sum(map(len, self._kept.pop(self._oldest)))
            self._oldest += 1
        self.counters.batches += 1
        self._send(*message)

    def _send(self, topic: bytes, batch: bytes) -> None:
        """Send with the last sequence, to every subscriber that is not full."""
        frames = topic, _sequence(self._next - 1), batch
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # a full subscriber's first loss: of later ones nothing is told
            self.counters.losses += 1
            self._pub.xpub_nodrop = False
            self._pub.send_multipart(frames, zmq.NOBLOCK)
            self._pub.xpub_nodrop = True

    async def _live_on(self) -> None:
        """Send signs of life, by which a subscriber notices that it lost the last message."""
        while True:
            self._send(topic(self._node), self._batch([]))
            await self._live.clock.sleep(SIGN_S)

    def _batch(self, events: Iterable[Event]) -> bytes:
        return self._encode(Batch(self._live.clock.unix_s(), list(events), None, self._epoch))

    # -- requests ------------------------------------------------------------------------------

    async def _answer(self) -> None:
        """Read one request a turn, however many have come."""
        answering: set[asyncio.Task[Any]] = set()
        while True:
            frames = await self._request()
            answer = self._answer_to(frames)
            if answer is None or len(answering) >= ANSWERS:
                self.counters.refused += 1
            else:
                task = self._background.spawn(self._give(answer(_Asker(frames[0]))))
                answering.add(task)
                task.add_done_callback(answering.discard)
            await self._live.clock.sleep(0)

    async def _request(self) -> list[bytes]:
        """The next request, or the first frames of a malformed message."""
        frames = [await self._router.recv()]
        count = 1
        while self._router.rcvmore:
            frame = await self._router.recv()
            count += 1
            if count <= MAX_FRAMES + 1:
                frames.append(frame)
            if count % FRAMES_IN_TURN == 0:
                await self._live.clock.sleep(0)
        return frames

    def _answer_to(self, frames: list[bytes]) -> _Answer | None:
        """The answer to a request; None if the request is malformed."""
        if len(frames) != 3 or frames[1]:
            return None
        if frames[2] == SNAPSHOT:
            return self._snapshot
        if len(frames[2]) != len(END):
            return None
        first = int.from_bytes(frames[2], "big")
        return lambda asker: self._replay(asker, first)

    async def _give(self, answer: Coroutine[Any, Any, None]) -> None:
        """Send an answer, unless its asker disconnects or is too slow."""
        try:
            await answer
        except zmq.ZMQError as error:
            self.counters.given_up += 1
            logger.debug("an answer of events was not taken: %s", error)

    async def _replay(self, asker: _Asker, first: int) -> None:
        """Send the messages from `first` on, as far as they are kept."""
        self.counters.replays += 1
        pace = self._live.turns.pace()
        sequence = max(first, self._oldest)
        while sequence < self._next:
            await pace.step()
            if (message := self._kept.get(sequence)) is not None:
                await self._reply(asker, message[0], _sequence(sequence), message[1])
            sequence = max(sequence + 1, self._oldest)
        await self._reply(asker, b"", END, b"")

    async def _snapshot(self, asker: _Asker) -> None:
        """Send all entries under the present sequence: their later changes have later sequences."""
        self.counters.snapshots += 1
        pace = self._live.turns.pace()
        sequence = _sequence(self._next - 1)
        await self._reply(asker, topic(self._node), sequence, self._batch([AllCleared()]))
        after: EntryId | None = EntryId(0)
        while after is not None:
            await pace.turn()
            entries, after = self._live.cache.views.page(after, KEYS)
            page: dict[str, _Changed] = {}
            for entry in entries:
                of_namespace = page.setdefault(entry.key.namespace, _Changed())
                of_namespace.stored.append(entry.key.mm_hash)
                of_namespace.nbytes.append(entry.content.nbytes)
            for namespace, stored in page.items():
                await pace.step()
                batch = self._batch(stored.events())
                await self._reply(asker, topic(self._node, namespace), sequence, batch)
        await self._reply(asker, b"", END, b"")

    async def _reply(self, asker: _Asker, *frames: bytes) -> None:
        """Send one message of an answer as soon as the asker has room. Raises ZMQError."""
        while True:
            try:
                await self._router.send_multipart((asker.identity, b"", *frames), zmq.NOBLOCK)
                return
            except zmq.Again:
                if asker.patience_s <= 0:
                    raise
                asker.patience_s -= FULL_S
                await self._live.clock.sleep(FULL_S)


def _bind(socket: Any, host: str, port: int) -> str:
    socket.bind(f"tcp://{host}:{port}")
    bound: bytes = socket.last_endpoint
    return f"{host}:{bound.decode().rpartition(':')[2]}"


def _sequence(number: int) -> bytes:
    return number.to_bytes(8, "big")
