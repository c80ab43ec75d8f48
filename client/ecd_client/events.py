"""Follows what daemons store and remove: an index for routers, from the daemons' events.

    with Subscriber([("10.0.0.1:5557", "10.0.0.1:5558"), ...]) as subscriber:
        while True:
            for change in subscriber.changes(timeout=1.0):
                ...
            nodes = subscriber.holders(namespace, mm_hash)

Needs pyzmq and msgspec: `pip install encoder-cache-daemon[events]`; vLLM has both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import zmq

from ecd_client import arguments, clock
from ecd_proto.events import (
    END,
    SIGN_S,
    SNAPSHOT,
    TOPIC,
    AllCleared,
    Batch,
    EncodingRemoved,
    EncodingStored,
    split_topic,
)

UNREAD = 10_000
"""Messages queued from each daemon."""
AT_ONCE = 256
"""Messages read from one daemon before the next has its turn."""
ASK_S = 3.0
"""How long an answer may be silent before it is asked for again."""
SILENT_S = 5 * SIGN_S
"""Seconds without a sign of life after which a daemon's entries are not current."""
CHECK_S = 0.5
LEFT = 8
"""Past epochs that are remembered: their messages may still come."""
MAX_MESSAGE_BYTES = 4 << 20

Entries = dict[tuple[str, str], int]
"""Bytes by namespace and mm_hash."""


class Change(NamedTuple):
    """An entry that a node has stored, with its bytes, or removed (None)."""

    node: str
    namespace: str
    mm_hash: str
    nbytes: int | None


class _Message(NamedTuple):
    node: str
    namespace: str
    sequence: int
    batch: Batch


class Feed:
    """One daemon's entries, as its events tell them.

    A message that does not follow the last one is a gap: the lost ones are asked for. If they are
    not kept any more, or the daemon has a new epoch, a snapshot takes the place of all entries.
    """

    def __init__(self, context: zmq.Context[Any], address: str, replay: str, unread: int) -> None:
        self.address, self.replay = address, replay
        self.node = self.epoch = ""
        self._left: deque[str] = deque(maxlen=LEFT)
        self.entries: Entries = {}
        self.gaps = self.replays = self.snapshots = self.malformed = 0
        self._context = context
        self._decode = msgspec.msgpack.Decoder(Batch).decode
        self._sequence = -1
        self._heard_s = 0.0
        self._sub: Any = context.socket(zmq.SUB)
        self._sub.linger, self._sub.rcvhwm, self._sub.maxmsgsize = 0, unread, MAX_MESSAGE_BYTES
        self._sub.ipv6 = address.startswith("[")
        self._sub.subscribe(TOPIC)
        self._sub.connect(f"tcp://{address}")
        self._asked: Any = None
        self._until_s = 0.0
        self._begun: _Message | None = None
        self._ask(SNAPSHOT)

    @property
    def is_current(self) -> bool:
        """Whether no loss is known, and the daemon has sent messages recently."""
        return self._asked is None and clock.now_s() - self._heard_s < SILENT_S

    @property
    def socket(self) -> Any:
        """The socket that is read now: changes wait while an answer comes."""
        return self._sub if self._asked is None else self._asked

    def take(self) -> Iterator[Change]:
        """Read some of the messages that have arrived, without waiting."""
        if self._asked is not None and clock.now_s() > self._until_s:
            self._ask(self._request)
        for _ in range(AT_ONCE):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_s = clock.now_s()
            try:
                if self._asked is None:
                    yield from self._told(self._parse(frames))
                else:
                    self._until_s = self._heard_s + ASK_S
                    yield from self._answered(frames[1:])
            except ValueError:  # msgspec's errors are among them
                self.malformed += 1
                self._begun = None  # the snapshot is not whole: it is asked for again

    def close(self) -> None:
        self._sub.close()
        self._end_question()

    # -- messages ------------------------------------------------------------------------------

    def _parse(self, frames: Sequence[bytes]) -> _Message:
        """Raises ValueError for a message that breaks the protocol."""
        topic, sequence, said = frames
        if len(sequence) != len(END):
            raise ValueError(f"a sequence of {len(sequence)} bytes")
        batch = self._decode(said)
        for event in batch.events:
            if isinstance(event, EncodingStored) and len(event.keys) != len(event.nbytes):
                raise ValueError(f"{len(event.keys)} keys and {len(event.nbytes)} sizes")
        return _Message(*split_topic(topic), int.from_bytes(sequence, "big"), batch)

    def _told(self, message: _Message) -> Iterator[Change]:
        if message.batch.epoch in self._left:
            return  # it was in the queue while the daemon's successor began
        if message.batch.epoch != self.epoch:
            self._ask(SNAPSHOT)
        elif message.sequence == self._sequence + 1 and message.batch.events:
            yield from self._apply(message)
        elif message.sequence > self._sequence:
            self.gaps += 1
            self._ask((self._sequence + 1).to_bytes(8, "big"))

    def _apply(self, message: _Message) -> Iterator[Change]:
        self._sequence = message.sequence
        known = self.entries
        for event in message.batch.events:
            if isinstance(event, EncodingStored):
                for mm_hash, nbytes in zip(event.keys, event.nbytes, strict=True):
                    if known.get((message.namespace, mm_hash)) != nbytes:
                        known[message.namespace, mm_hash] = nbytes
                        yield Change(self.node, message.namespace, mm_hash, nbytes)
            elif isinstance(event, EncodingRemoved):
                for mm_hash in event.keys:
                    if known.pop((message.namespace, mm_hash), None) is not None:
                        yield Change(self.node, message.namespace, mm_hash, None)
            else:
                yield from self._become({})

    def _become(self, entries: Entries) -> Iterator[Change]:
        before, self.entries = self.entries, entries
        for key in before.keys() - entries.keys():
            yield Change(self.node, *key, None)
        for key, nbytes in entries.items():
            if before.get(key) != nbytes:
                yield Change(self.node, *key, nbytes)

    # -- questions -----------------------------------------------------------------------------

    def _ask(self, request: bytes) -> None:
        """Ask on a socket of its own, so that no answer is mistaken for another question's."""
        self._end_question()
        self._asked, self._request = self._context.socket(zmq.DEALER), request
        self._asked.linger, self._asked.rcvhwm, self._asked.maxmsgsize = (
            0,
            UNREAD,
            MAX_MESSAGE_BYTES,
        )
        self._asked.ipv6 = self.replay.startswith("[")
        self._asked.connect(f"tcp://{self.replay}")
        self._asked.send_multipart([b"", request], zmq.NOBLOCK)
        self._until_s = clock.now_s() + ASK_S
        self._begun = None
        self._fresh: Entries = {}

    def _end_question(self) -> None:
        if self._asked is not None:
            self._asked.close()
            self._asked = None

    def _answered(self, frames: Sequence[bytes]) -> Iterator[Change]:
        if frames[1:2] == [END]:
            yield from self._ended()
        elif self._request == SNAPSHOT:
            self._collect(self._parse(frames))
        else:
            message = self._parse(frames)
            is_lost = message.sequence > self._sequence + 1
            if is_lost or message.batch.epoch != self.epoch:
                self._ask(SNAPSHOT)
            elif message.sequence == self._sequence + 1:
                yield from self._apply(message)

    def _collect(self, message: _Message) -> None:
        """Add a piece of a snapshot, whose first says that everything is cleared."""
        for event in message.batch.events:
            if isinstance(event, AllCleared):
                self._begun, self._fresh = message, {}
            elif isinstance(event, EncodingStored):
                keys = ((message.namespace, mm_hash) for mm_hash in event.keys)
                self._fresh.update(zip(keys, event.nbytes, strict=True))

    def _ended(self) -> Iterator[Change]:
        if self._request != SNAPSHOT:
            self.replays += 1
        elif self._begun is None:
            return
        else:
            self.snapshots += 1
            if self.epoch not in ("", self._begun.batch.epoch):
                self._left.append(self.epoch)
            self.node, self.epoch = self._begun.node, self._begun.batch.epoch
            self._sequence = self._begun.sequence
            yield from self._become(self._fresh)
        self._end_question()


class Subscriber:
    """Keeps the entries of some daemons. Not thread-safe; it works while `changes` runs."""

    def __init__(self, daemons: Sequence[tuple[str, str]], *, unread: int = UNREAD) -> None:
        """`daemons` are pairs of host:port: where one publishes, and where it replays.

        At most `unread` messages of each wait between two calls of `changes`; if more come, the
        lost ones are asked for again. Raises InvalidArgument, and zmq's own error where it has no
        socket left.
        """
        pairs, unread = arguments.daemons(daemons), arguments.number(unread, "unread")
        self._context: zmq.Context[Any] = zmq.Context()
        self.feeds: list[Feed] = []
        try:
            self.feeds += [Feed(self._context, *pair, unread) for pair in pairs]
        except BaseException:  # too many sockets, say
            self._context.destroy(linger=0)
            raise

    @property
    def is_current(self) -> bool:
        """Whether the entries of every daemon are current."""
        return all(feed.is_current for feed in self.feeds)

    def changes(self, timeout: float = 0.0) -> list[Change]:
        """The changes since the last call; waits at most `timeout` seconds for the first.

        The first of a daemon are all entries that it holds. Raises InvalidArgument for a time that
        is not finite, or below 0.
        """
        until_s = clock.now_s() + arguments.seconds(timeout, "timeout")
        while True:
            found = [change for feed in self.feeds for change in feed.take()]
            left_s = until_s - clock.now_s()
            if found or left_s <= 0:
                return found
            poller = zmq.Poller()
            for feed in self.feeds:
                poller.register(feed.socket, zmq.POLLIN)
            poller.poll(1 + int(1000 * min(left_s, CHECK_S)))

    def holders(self, namespace: str, mm_hash: str) -> list[str]:
        """The nodes that hold a key."""
        key = namespace, mm_hash
        return [feed.node for feed in self.feeds if key in feed.entries]

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()
        self._context.term()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()
