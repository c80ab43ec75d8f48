"""A link that a peer opened: its requests for leases and keys, and the replies to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ecd.base.wire import (
    BYTES_WITH_LEASE,
    MAX_WAIT_S,
    SPECULATIVE_BYTES,
    InvalidRequest,
    check_batch,
    key_from,
    places_from,
    seconds_from,
    to_content,
    to_extents,
    told_metadata,
)
from ecd.core.model.outcomes import Leased, LimitReached, Waiting, Wakeup
from ecd.core.model.types import Answer, Extent, Key, LeaseId, SessionId, Ticket, WaitFor
from ecd.live.background import Background
from ecd.live.live import LiveCache
from ecd.live.turns import Pace
from ecd.rpc.peer.serving import MAX_WAITING, Serving, Turn
from ecd_proto.contract import Hint
from ecd_proto.encoders import RegisteredEncoder
from ecd_proto.v1 import cache_pb2
from ecd_proto.v1 import peer_pb2 as pb

logger = logging.getLogger(__name__)

MAX_UNREAD_REPLIES = 10_000
"""Replies a peer may leave unread before its link is closed."""
MAX_UNREAD_BYTES = 4 << 20
"""Bytes of unread replies above which no further request of the link is read."""
TURN = 64
"""Keys of one request before the event loop gets its turn."""
HASHED_IN_TURN = 8
"""Entries hashed in one turn, of up to INLINE_BYTES each."""
TURN_WITH_BYTES = 16
"""Keys in a turn where their entries' bytes may be sent: 1 MiB of them."""
UNREAD_WITH_BYTES = 4
"""Unread replies above which leases come without bytes, so that a slow peer uses no memory."""


class Memory(Protocol):
    """The memory that peers read, and the fetches that fill it."""

    def describe(self) -> pb.NodeDescription: ...

    def address_of(self, extent: Extent) -> int: ...

    def bytes_of(self, extent: Extent) -> bytes: ...

    def checksum_of(self, leased: Leased) -> int | Awaitable[int]:
        """The entry's checksum; at once where it is known."""

    def is_speculative(self, key: Key) -> bool:
        """Whether the key is being written by a speculative read, which no node has confirmed."""

    def is_beginning_to_make(self, key: Key) -> bool:
        """Whether the directory is being told that this node makes the key."""

    def is_local(self, key: Key) -> bool:
        """Whether the key may lie on this node's disk."""

    def want_near(self, key: Key) -> None:
        """Bring the key from this node's disk, without asking other nodes."""

    def told_encoders(self) -> Sequence[RegisteredEncoder]:
        """The encoders here that other nodes can reach."""

    async def offered(self, found: Mapping[Key, Hint]) -> None:
        """Accept an offer: a node has these keys and expects this one to want them."""


class _Asked(NamedTuple):
    """A question for a key's lease: its ticket, and the largest entry that may come with the lease.

    `if_made`: the peer waits for a key that is made here, too. It waits until `until_s`, unless it
    is sent to another node, `or_elsewhere`.
    """

    key: Key
    ticket: int
    bytes_up_to: int
    if_made: bool
    or_elsewhere: bool
    until_s: float


class Outbox(asyncio.Queue[pb.LinkReply]):
    """The replies that the peer has not read."""

    def __init__(self) -> None:
        super().__init__(MAX_UNREAD_REPLIES)
        self._nbytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def is_full(self) -> bool:
        """Whether the peer has to read replies before a further request is answered."""
        return not self._has_room.is_set()

    async def room(self) -> None:
        """Wait until it is not full."""
        await self._has_room.wait()

    def _put(self, item: pb.LinkReply) -> None:
        super()._put(item)
        self._count(item.ByteSize())

    def _get(self) -> pb.LinkReply:
        item = super()._get()
        self._count(-item.ByteSize())
        return item

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes > MAX_UNREAD_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()


class InboundLink:
    """One peer's link, from its hello to its end."""

    def __init__(
        self, live: LiveCache, memory: Memory, serving: Serving, session: SessionId, node: str
    ) -> None:
        self.session, self.node = session, node
        self._serving = serving
        self._turns: dict[LeaseId, Turn] = {}
        self.outbox = Outbox()
        self.hung_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._live, self._memory = live, memory
        self._waits: dict[Ticket, _Asked] = {}
        self._hashing = Background()
        self._is_over = False
        live.subscribe(session, self)

    def end(self) -> None:
        """End the peer's session: peers never write to this memory."""
        self._is_over = True
        self._end_turns(list(self._turns))
        for ticket, asked in self._waits.items():
            self._forget(ticket, asked)
        self._live.leave_session(self.session)
        self._live.close_session(self.session)
        self._hashing.cancel()

    def hang_up(self) -> None:
        """Close the link, even with unread replies, and even if none can be written."""
        if not self.hung_up.done():
            self.hung_up.set_result(None)

    async def take(self, request: pb.LinkRequest) -> None:
        """Act on one request, in turns with others. Raises InvalidRequest."""
        match request.WhichOneof("request"):
            case "lease":
                await self._lease(request.lease)
            case "release":
                ended = request.release
                check_batch(ended.leases)
                check_batch(ended.stored)
                stored = set(ended.stored)
                await self._live.turns.pace().each(
                    lambda lease: self._release(LeaseId(lease), lease in stored), ended.leases
                )
            case "find":
                await self._find(request.find)
            case "find_encoders":
                told = [each.message for each in self._memory.told_encoders()]
                found = pb.FoundEncoders(ticket=request.find_encoders.ticket, encoders=told)
                self._post(pb.LinkReply(encoders=found))
            case "offer":
                check_batch(request.offer.keys)
                keys = [key_from(key) for key in request.offer.keys]
                places = places_from(request.offer.extents, len(keys))
                await self._memory.offered(
                    {key: Hint(self.node, *at) for key, at in zip(keys, places, strict=True)}
                )
            case _:
                raise InvalidRequest("an unknown request on a link")

    async def _find(self, request: pb.FindKeys) -> None:
        check_batch(request.keys)
        keys = [key_from(key) for key in request.keys]
        reply = pb.FoundKeys(ticket=request.ticket)
        pace = self._live.turns.pace()
        await self._live.learn(keys, pace)
        for start in range(0, len(keys), TURN):
            if start > 0:
                await pace.turn()
            turn = keys[start : start + TURN]
            reply.found.extend(map(self._has, turn))
            reply.extents.extend(to_extents(map(self._live.cache.views.extent, turn)))
            infos = map(self._live.cache.views.info, turn)
            reply.metadata.extend(
                told_metadata(info.content.metadata) if info else b"" for info in infos
            )
        self._post(pb.LinkReply(found=reply))

    def _has(self, key: Key) -> bool:
        """Whether the key is here, on disk included, or being written here, after `learn`.

        A speculative read does not count: the node that asks may be the one being read.
        """
        return (
            self._live.cache.views.contains(key)
            or (
                self._live.cache.views.is_being_written(key)
                and not self._memory.is_speculative(key)
            )
            or self._memory.is_local(key)
        )

    def _is_made(self, key: Key) -> bool:
        return key in self._live.makings or self._memory.is_beginning_to_make(key)

    async def _lease(self, request: pb.LeaseKeys) -> None:
        check_batch(request.keys)
        asked = [
            (
                _Asked(
                    key_from(item.key),
                    item.ticket,
                    item.bytes_up_to,
                    item.if_made,
                    item.or_elsewhere,
                    self._live.clock.now_s() + wait_s,
                ),
                wait_s,
            )
            for item in request.keys
            for wait_s in (min(seconds_from(item.wait_s, "wait_s"), MAX_WAIT_S),)
        ]
        pace = self._live.turns.pace()
        await self._live.learn([each.key for each, _ in asked], pace)
        some = TURN_WITH_BYTES if any(each.bytes_up_to for each, _ in asked) else TURN
        for start in range(0, len(asked), some):
            if start > 0:
                await pace.turn()
            await self._lease_in_turn(asked[start : start + some], pace)

    async def _lease_in_turn(self, questions: Sequence[tuple[_Asked, float]], pace: Pace) -> None:
        """Lease stored keys before the event loop gets a turn; hash their entries after it."""
        known: list[pb.LeaseOutcome] = []
        unhashed: list[tuple[_Asked, Leased]] = []
        for asked, wait_s in questions:
            key, wait_for = asked.key, WaitFor.WRITER
            if not self._has(key):
                if not (asked.if_made and self._is_made(key)):
                    known.append(pb.LeaseOutcome(ticket=asked.ticket, missing=cache_pb2.Missing()))
                    continue
                wait_for = WaitFor.ANY
            elif self._memory.is_local(key):
                self._memory.want_near(key)
            outcome = self._live.acquire(self.session, key, wait_s, wait_for, Answer.PEER)
            if isinstance(outcome, Waiting):
                self._waits[outcome.ticket] = asked
                if wait_for is WaitFor.ANY:
                    self._live.makings.note_wait(key, self.session, outcome.ticket)
            elif not isinstance(outcome, Leased):
                known.append(_refused(asked.ticket, outcome))
            elif outcome.checksum is None:
                unhashed.append((asked, outcome))
            else:
                known += self._in_turn(asked, outcome, outcome.checksum)
        self._say(known)
        for start in range(0, len(unhashed), HASHED_IN_TURN):
            if start > 0:
                await pace.turn()
            turn = unhashed[start : start + HASHED_IN_TURN]
            self._say([said for asked, leased in turn for said in self._granted(asked, leased)])

    def leases_ended(self, session: SessionId, leases: Sequence[LeaseId]) -> None:  # noqa: ARG002
        self._end_turns(leases)  # the peer knows their time to live, and does not renew them

    def _end_turns(self, leases: Iterable[LeaseId]) -> None:
        turns = (self._turns.pop(lease, None) for lease in leases)
        self._serving.end_all([turn for turn in turns if turn is not None])

    def _release(self, lease: LeaseId, is_stored: bool) -> None:
        self._live.cache.release(self.session, lease)
        if (turn := self._turns.pop(lease, None)) is not None:
            self._serving.end(turn, is_stored)

    def wait_ended(self, wakeup: Wakeup) -> None:
        asked = self._waits.pop(wakeup.ticket)
        self._forget(wakeup.ticket, asked)
        if isinstance(wakeup.outcome, Leased):
            self._say(self._granted(asked, wakeup.outcome))
        else:
            self._say([_refused(asked.ticket, wakeup.outcome)])

    def _forget(self, ticket: Ticket, asked: _Asked) -> None:
        if asked.if_made:
            self._live.makings.forget_wait(asked.key, self.session, ticket)

    def _say(self, outcomes: Sequence[pb.LeaseOutcome]) -> None:
        if outcomes:
            self._post(pb.LinkReply(leases=pb.LeaseOutcomes(outcomes=outcomes)))

    def _granted(self, asked: _Asked, leased: Leased) -> list[pb.LeaseOutcome]:
        """The outcome to send now; none while the entry's checksum is being computed."""
        checksum = self._memory.checksum_of(leased)
        if isinstance(checksum, int):
            return self._in_turn(asked, leased, checksum)
        self._hashing.spawn(self._say_later(asked, leased, checksum))
        return []

    async def _say_later(self, asked: _Asked, leased: Leased, checksum: Awaitable[int]) -> None:
        try:
            self._say(self._in_turn(asked, leased, await checksum))
        except Exception:
            logger.exception("what peer %s leased cannot be hashed", self.node)
            self._live.cache.release(self.session, leased.lease)
            self._say([_refused(asked.ticket, None)])

    def _in_turn(self, asked: _Asked, leased: Leased, checksum: int) -> list[pb.LeaseOutcome]:
        """The outcome to say now; none if it is the turn of others.

        A turn that was waited for begins with half of its lease's time to live at least.
        """
        if leased.extent.nbytes <= SPECULATIVE_BYTES:
            return [self._outcome(asked, leased, checksum)]

        def begin() -> None:
            self._say([self._outcome(asked, leased, checksum)])

        def leave(node: str) -> None:
            self._turns.pop(leased.lease, None)
            self._live.cache.release(self.session, leased.lease)
            full = LimitReached("nodes that wait for their turns to read", MAX_WAITING)
            self._say([_refused(asked.ticket, pb.Elsewhere(node=node) if node else full)])

        turn = Turn(leased.entry, self.node, begin, leave, asked.or_elsewhere)
        self._turns[leased.lease] = turn
        until_s = min(asked.until_s, leased.expires_s - self._live.cache.views.lease_ttl_s / 2)
        if self._serving.ask(turn, max(0.0, until_s - self._live.clock.now_s())):
            return [self._outcome(asked, leased, checksum)]
        return []

    def _outcome(self, asked: _Asked, leased: Leased, checksum: int) -> pb.LeaseOutcome:
        said = pb.PeerLeased(
            lease=leased.lease,
            content=to_content(leased.content),
            address=self._memory.address_of(leased.extent),
            checksum=checksum,
            age_s=self._live.cache.views.put_age_s(leased.entry, self._live.clock.now_s()),
            is_handover=leased.is_handover,
        )
        is_small = leased.extent.nbytes <= min(asked.bytes_up_to, BYTES_WITH_LEASE)
        if is_small and self.outbox.qsize() < UNREAD_WITH_BYTES:
            said.bytes = self._memory.bytes_of(leased.extent)
        return pb.LeaseOutcome(ticket=asked.ticket, leased=said)

    def _post(self, reply: pb.LinkReply) -> None:
        if self._is_over or self.hung_up.done():
            return
        if self.outbox.full():
            why = "leaves its replies unread: its link ends"
            logger.warning("peer %s %s", self.node, why, extra={"peer": self.node})
            self.hang_up()
            return
        self.outbox.put_nowait(reply)


def _refused(ticket: int, outcome: object) -> pb.LeaseOutcome:
    if isinstance(outcome, pb.Elsewhere):
        return pb.LeaseOutcome(ticket=ticket, elsewhere=outcome)
    if isinstance(outcome, LimitReached):
        reached = cache_pb2.LimitReached(what=outcome.what, limit=outcome.limit)
        return pb.LeaseOutcome(ticket=ticket, limit_reached=reached)
    return pb.LeaseOutcome(ticket=ticket, missing=cache_pb2.Missing())
