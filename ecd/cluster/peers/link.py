"""A link to another node, for asking for and ending leases, and for finding and offering keys."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ecd.base.clock import Clock
from ecd.base.wire import (
    SPECULATIVE_BYTES,
    InvalidRequest,
    content_from,
    places_from,
    seconds_from,
    to_extents,
    to_key,
    told_metadata,
)
from ecd.cluster.directory.directory import Candidate
from ecd.cluster.peers.peer import Peer, PeerUnavailable
from ecd.core.model.types import Content, Extent, Key
from ecd.live.background import Background
from ecd_proto.contract import MAX_BATCH, NODE_PATTERN, Hint
from ecd_proto.encoders import MAX_ENCODERS, RegisteredEncoder
from ecd_proto.v1 import peer_pb2 as pb

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0
"""How long a peer may take to answer, besides waits, before the link to it is given up."""
ADDRESSES = 1 << 64
"""The range of addresses: no memory ends beyond it."""
RELEASE_PAUSE_S = 0.05
"""How long ends of leases are collected before they are sent."""
MAX_UNSENT = 1024
"""Requests that may wait for the peer to read; offers beyond are dropped."""
MAX_UNREAD = 8 * MAX_UNSENT
"""Requests that a peer may leave unread before the link is given up, each key's lease counted."""

_Answer = pb.LeaseOutcome | pb.FoundKeys | pb.FoundEncoders


@dataclass(frozen=True)
class _Open:
    """A question that the peer has not answered yet, whether or not a caller still waits."""

    kind: type[Any]  # of the answer
    keys: int
    answer: asyncio.Future[Any]
    asked_s: float
    waits: bool  # the peer is asked to wait for an encoder first
    late: asyncio.TimerHandle


@dataclass(frozen=True)
class Question:
    """A question for a lease, and its answer to come."""

    asked_s: float
    bytes_up_to: int
    or_elsewhere: bool
    answer: asyncio.Future[pb.LeaseOutcome]


@dataclass(frozen=True)
class PeerLease:
    """An entry that a peer keeps for this node, `until_s` on the monotonic clock at least."""

    content: Content
    address: int
    checksum: int
    until_s: float
    data: bytes
    """The entry's bytes; none if they did not come with the lease."""
    ttl_s: float
    clock: Clock
    put_s: float
    """When the entry was put, on this node's clock; as the lease came, where the peer is silent."""
    is_handover: bool
    """Whether the entry's next hit saves no encode."""

    @property
    def age_s(self) -> float:
        """Seconds since the entry was put."""
        return self.clock.now_s() - self.put_s

    @property
    def is_late(self) -> bool:
        """Whether the lease came so late that it may run out soon: its start is not known."""
        return self.clock.now_s() >= self.until_s - self.ttl_s / 2

    @property
    def ran_out(self) -> bool:
        return self.clock.now_s() >= self.until_s


@dataclass(frozen=True)
class Elsewhere:
    """Too many nodes read the key there; this one has just read it."""

    node: str


class Link:
    """One connection to a peer, from its description until it breaks: then `gone` is done."""

    def __init__(self, peer: Peer, channel: Any, call: Any, description: pb.NodeDescription):
        self.peer, self.description, self._clock = peer, description, peer.clock
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel, self._call = channel, call
        self._tickets = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._leases: list[pb.LeaseKey] = []
        self._releases: list[int] = []
        self._stored: list[int] = []  # those of them whose entries are stored here
        self._others: deque[pb.LinkRequest] = deque()
        self._something = asyncio.Event()
        self._background = Background()
        self._tasks = [self._background.spawn(self._write()), self._background.spawn(self._read())]

    @property
    def alive(self) -> bool:
        return not self.gone.done()

    @property
    def is_asked(self) -> bool:
        """Whether answers of the peer are outstanding."""
        return bool(self._open)

    def ask_lease(
        self,
        key: Key,
        wait_s: float,
        bytes_up_to: int,
        *,
        if_made: bool = False,
        or_elsewhere: bool = False,
    ) -> Question:
        """Ask for a lease on the key, to be waited for with `lease` and ended with `end`.

        If the key is being written there, or with `if_made` if a client there makes it, the peer
        waits at most `wait_s`. An entry of at most `bytes_up_to` bytes may come with its lease.
        With `or_elsewhere` a busy peer may name another one instead. Raises PeerUnavailable.
        """
        asked_s = self._clock.now_s()
        ticket, answer = self._ask(pb.LeaseOutcome, 1, wait_s, waits=if_made)
        self._leases.append(
            pb.LeaseKey(
                ticket=ticket,
                key=to_key(key),
                wait_s=wait_s,
                bytes_up_to=bytes_up_to,
                if_made=if_made,
                or_elsewhere=or_elsewhere,
            )
        )
        self._wake_writer()
        return Question(asked_s, bytes_up_to, or_elsewhere, answer)

    async def lease(self, question: Question) -> PeerLease | Elsewhere | None:
        """Wait for the lease; None if the peer does not have the key. Raises PeerUnavailable."""
        outcome = await question.answer
        if outcome.WhichOneof("outcome") == "elsewhere":
            node = outcome.elsewhere.node
            if not (question.or_elsewhere and re.fullmatch(NODE_PATTERN, node)):
                self.peer.blame("it sends this node where it cannot go")
                raise PeerUnavailable(f"{self.peer.node}: {self.peer.last_error}")
            return Elsewhere(node)
        if outcome.WhichOneof("outcome") != "leased":
            return None
        leased = outcome.leased
        try:
            content = content_from(leased.content)
            if leased.address + content.nbytes > ADDRESSES:
                raise InvalidRequest(f"no memory ends {content.nbytes} bytes after that address")
            data, age_s = leased.bytes, seconds_from(leased.age_s, "age_s")
            if data and not len(data) == content.nbytes <= question.bytes_up_to:
                raise InvalidRequest(f"{len(data)} bytes of {content.nbytes} came with it")
        except InvalidRequest as error:
            raise PeerUnavailable(f"{self.peer.node} leased what cannot be: {error}") from None
        ttl_s = self.description.lease_ttl_s
        until_s = question.asked_s + ttl_s
        times = until_s, data, ttl_s, self._clock, self._clock.now_s() - age_s
        return PeerLease(content, leased.address, leased.checksum, *times, leased.is_handover)

    def end(self, question: Question, is_stored: bool) -> None:
        """Give the lease back, if it was granted or will be; the entry `is_stored` here now."""
        answer = question.answer
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self._give_back(answer.result(), is_stored)
        answer.cancel()

    async def find(self, keys: Sequence[Key]) -> Sequence[Candidate | None]:
        """The peer, for each key that is there or on its way; else None. Raises PeerUnavailable."""
        found: list[Candidate | None] = []
        for start in range(0, len(keys), MAX_BATCH):
            batch = [to_key(key) for key in keys[start : start + MAX_BATCH]]
            ticket, answer = self._ask(pb.FoundKeys, len(batch))
            self._send(pb.LinkRequest(find=pb.FindKeys(ticket=ticket, keys=batch)))
            reply = await answer
            places = places_from(reply.extents, len(reply.found))
            metadata = [*map(told_metadata, reply.metadata), *[b""] * len(places)]
            found.extend(
                Candidate(Hint(self.peer.node, *place), metadata=said) if has else None
                for has, place, said in zip(reply.found, places, metadata, strict=False)
            )
        return found

    async def encoders(self) -> list[RegisteredEncoder]:
        """The peer's encoders; none of an older peer. Raises PeerUnavailable."""
        if not self.description.takes_find_encoders:
            return []
        ticket, answer = self._ask(pb.FoundEncoders, 0)
        self._send(pb.LinkRequest(find_encoders=pb.FindEncoders(ticket=ticket)))
        return list(filter(None, map(RegisteredEncoder.of, (await answer).encoders)))

    def _give_back(self, outcome: pb.LeaseOutcome, is_stored: bool = False) -> None:
        """End a lease soon, together with others: one message costs as much for one as for many.

        The lease of a large entry ends at once, as other nodes may wait for their turn.
        """
        if outcome.WhichOneof("outcome") == "leased":
            is_first, leased = not self._releases, outcome.leased
            self._releases.append(leased.lease)
            if leased.content.nbytes > SPECULATIVE_BYTES:
                self._stored += [leased.lease] * is_stored
                self._send_releases()
            elif is_first:
                asyncio.get_running_loop().call_later(RELEASE_PAUSE_S, self._send_releases)

    def _send_releases(self) -> None:
        ended, self._releases = self._releases, []
        stored, self._stored = self._stored, []
        for start in range(0, len(ended), MAX_BATCH):
            batch = pb.ReleaseLeases(leases=ended[start : start + MAX_BATCH], stored=stored)
            self._send(pb.LinkRequest(release=batch))

    def offer(self, stored: Mapping[Key, Extent | None]) -> None:
        if len(self._others) < MAX_UNSENT:
            keys, extents = map(to_key, stored), to_extents(stored.values())
            self._send(pb.LinkRequest(offer=pb.OfferKeys(keys=keys, extents=extents)))

    async def close(self) -> None:
        """Break the link; open questions end with PeerUnavailable."""
        if self.alive:
            self.gone.set_result(None)
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            for opened in self._open.values():
                opened.late.cancel()
                if not opened.answer.done():
                    opened.answer.set_exception(PeerUnavailable(f"{self.peer.node} went away"))
                    opened.answer.exception()  # the asking task may have gone
            self._open.clear()
            self._call.cancel()
            await self._channel.close()

    def _ask(
        self, kind: type[Any], keys: int, wait_s: float = 0.0, waits: bool = False
    ) -> tuple[int, asyncio.Future[Any]]:
        """Open a question about so many keys: its ticket, and its answer, a message of that kind.

        The peer has `wait_s` and ANSWER_TIMEOUT_S for it. `waits`: it is asked to wait for an
        encoder first. Raises PeerUnavailable.
        """
        if not self.alive:
            raise PeerUnavailable(f"{self.peer.node} went away")
        ticket = next(self._tickets)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        late = loop.call_later(wait_s + ANSWER_TIMEOUT_S, self._give_up, answer)
        self._open[ticket] = _Open(kind, keys, answer, self._clock.now_s(), waits, late)
        return ticket, answer

    def _give_up(self, answer: asyncio.Future[Any]) -> None:
        """Close the link: a peer that leaves one question unanswered is asked nothing more.

        This holds if the asker has gone, too: nothing else would ever end the question.
        """
        if not answer.done():
            answer.set_exception(PeerUnavailable(f"{self.peer.node} does not answer"))
            answer.exception()  # the asking task may have gone
        self._fail("it did not answer in time")

    def _fail(self, why: str) -> None:
        if self.alive:
            self.peer.failed(why)
            self._background.spawn(self.close())

    def _send(self, request: pb.LinkRequest) -> None:
        self._others.append(request)
        self._wake_writer()

    def _wake_writer(self) -> None:
        self._something.set()
        if len(self._leases) + len(self._others) > MAX_UNREAD:
            self._fail("it does not read what it is asked")

    async def _write(self) -> None:
        try:
            while True:
                await self._something.wait()
                self._something.clear()
                while (request := self._next_request()) is not None:
                    await self._call.write(request)
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the link is over: `_read` learns the cause, and closes it
        except BaseException:
            await self.close()
            raise

    def _next_request(self) -> pb.LinkRequest | None:
        if self._leases:
            batch, self._leases = self._leases[:MAX_BATCH], self._leases[MAX_BATCH:]
            return pb.LinkRequest(lease=pb.LeaseKeys(keys=batch))
        return self._others.popleft() if self._others else None

    async def _read(self) -> None:
        cause, was_idle = "it ended the link", False
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                if reply is None:  # what gRPC could not decode
                    cause = "it sent what is no message"
                    break
                if not self._take(reply):
                    cause = "it answered what it was not asked"
                    break
            was_idle = reply is grpc.aio.EOF and not self._open
        except grpc.RpcError as error:
            cause = error.details() or error.code().name
        except Exception as error:
            cause = f"it cannot be understood: {error}"
            logger.exception("peer %s", self.peer.node)
        finally:
            if self.alive and was_idle:  # others needed the place: it may be asked again at once
                self.peer.blame(cause)
            elif self.alive:
                self.peer.failed(cause)
            await self.close()

    def _take(self, reply: pb.LinkReply) -> bool:
        """Settle the questions that the reply answers; False if it answers any other."""
        match reply.WhichOneof("reply"):
            case "leases":
                outcomes = reply.leases.outcomes
                return len(outcomes) <= MAX_BATCH and all(
                    self._settle(outcome.ticket, outcome) for outcome in outcomes
                )
            case "found":
                return self._settle(reply.found.ticket, reply.found)
            case "encoders":
                return self._settle(reply.encoders.ticket, reply.encoders)
        return True

    def _settle(self, ticket: int, result: _Answer) -> bool:
        """End the question with its answer. False: the reply is another's, and it stays open."""
        opened = self._open.get(ticket)
        if opened is None or opened.kind is not type(result) or not _is_of(opened.keys, result):
            return False
        del self._open[ticket]
        opened.late.cancel()
        if opened.answer.done():  # nobody waits for it any more
            if isinstance(result, pb.LeaseOutcome):
                self._give_back(result)
            return True
        if not (opened.waits or _may_have_waited(result)):  # or it says nothing of the way
            self.peer.answered(self._clock.now_s() - opened.asked_s)
        opened.answer.set_result(result)
        return True


def _is_of(keys: int, answer: _Answer) -> bool:
    """Whether the answer is about this number of keys; it may leave out where they are."""
    if isinstance(answer, pb.LeaseOutcome):
        return True
    if isinstance(answer, pb.FoundEncoders):
        return len(answer.encoders) <= MAX_ENCODERS
    return len(answer.found) == keys >= max(len(answer.extents), len(answer.metadata))


def _may_have_waited(answer: object) -> bool:
    """Whether the peer may have given the answer only when other nodes had read the entry."""
    return isinstance(answer, pb.LeaseOutcome) and (
        answer.WhichOneof("outcome") in ("elsewhere", "limit_reached")
        or answer.leased.content.nbytes > SPECULATIVE_BYTES
    )
