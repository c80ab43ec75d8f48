"""A link to another node: what its answers say of the way there."""

from __future__ import annotations

import asyncio
import contextlib
from unittest.mock import AsyncMock, Mock

import grpc
import pytest

from ecd.base.clock import Clock
from ecd.base.wire import SPECULATIVE_BYTES, TOLD_METADATA_BYTES
from ecd.cluster.directory.directory import DirectoryState
from ecd.cluster.directory.redis_rows import unpack_place
from ecd.cluster.peers.link import MAX_UNREAD, Link
from ecd.cluster.peers.peer import MAX_ERROR_CHARS, Peer, PeerUnavailable
from ecd.core.model.types import Extent, Key
from ecd_proto.contract import MAX_BATCH
from ecd_proto.v1 import cache_pb2
from ecd_proto.v1 import peer_pb2 as pb
from support.waiting import eventually_async, within_hang


def leased(nbytes: int) -> pb.LeaseOutcome:
    content = cache_pb2.Content(dtype="uint8", shape=[nbytes], nbytes=nbytes)
    return pb.LeaseOutcome(ticket=1, leased=pb.PeerLeased(lease=1, content=content))


@pytest.mark.parametrize(
    ("outcome", "is_measured"),
    [
        (pb.LeaseOutcome(ticket=1, missing=cache_pb2.Missing()), True),
        (leased(SPECULATIVE_BYTES), True),
        (leased(SPECULATIVE_BYTES + 1), False),
        (pb.LeaseOutcome(ticket=1, elsewhere=pb.Elsewhere(node="127.0.77.1:1")), False),
        (pb.LeaseOutcome(ticket=1, limit_reached=cache_pb2.LimitReached()), False),
    ],
    ids=["missing", "small", "large", "elsewhere", "refused"],
)
def test_an_answer_that_may_have_waited_for_others_says_nothing_of_the_way(
    outcome: pb.LeaseOutcome, is_measured: bool
) -> None:
    async def ask() -> None:
        answers: asyncio.Queue[pb.LinkReply] = asyncio.Queue()
        call = Mock(read=answers.get, write=AsyncMock())
        peer = Peer("127.0.77.2:9465", Clock())
        link = Link(peer, AsyncMock(), call, pb.NodeDescription(lease_ttl_s=30.0))
        question = link.ask_lease(Key("default", "k"), 20.0, 0, or_elsewhere=True)
        answers.put_nowait(pb.LinkReply(leases=pb.LeaseOutcomes(outcomes=[outcome])))
        await link.lease(question)
        assert (peer.round_trip_s > 0.0) == is_measured
        await link.close()

    asyncio.run(ask())


def outcomes(*tickets: int) -> pb.LinkReply:
    missing = [pb.LeaseOutcome(ticket=n, missing=cache_pb2.Missing()) for n in tickets]
    return pb.LinkReply(leases=pb.LeaseOutcomes(outcomes=missing))


def found(ticket: int, count: int, **about: list[object]) -> pb.LinkReply:
    return pb.LinkReply(found=pb.FoundKeys(ticket=ticket, found=[True] * count, **about))


@pytest.mark.parametrize(
    "reply",
    [
        outcomes(3),
        outcomes(1, 1),
        outcomes(2),
        outcomes(*[1] * (MAX_BATCH + 1)),
        found(1, 1),
        found(3, 2),
        found(2, 3),
        found(2, 1),
        found(2, 2, extents=[cache_pb2.Extent()] * 3),
        found(2, 2, metadata=[b"m"] * 3),
    ],
    ids=[
        *("a lease of no question", "a second lease", "a lease where keys are looked for"),
        *("more leases than a batch has", "keys where a lease is asked for"),
        *("keys of no question", "more keys", "fewer keys", "more places", "more metadata"),
    ],
)
def test_an_answer_to_what_was_not_asked_ends_the_link(reply: pb.LinkReply) -> None:
    """Question 1 is for a lease, question 2 looks for two keys."""

    async def ask() -> None:
        answers: asyncio.Queue[pb.LinkReply] = asyncio.Queue()
        call = Mock(read=answers.get, write=AsyncMock())
        peer = Peer("127.0.77.2:9465", Clock())
        link = Link(peer, AsyncMock(), call, pb.NodeDescription(lease_ttl_s=30.0))
        link.ask_lease(Key("default", "k"), 20.0, 0)
        finding = asyncio.ensure_future(link.find([Key("default", "k"), Key("default", "l")]))
        await asyncio.sleep(0)
        answers.put_nowait(reply)
        answers.put_nowait(found(2, 2))  # too late, if the link is over
        with pytest.raises(PeerUnavailable):
            await within_hang(finding)
        assert not link.alive
        assert "what it was not asked" in peer.last_error

    asyncio.run(ask())


def test_a_peer_that_answers_and_reads_nothing_costs_bounded_memory() -> None:
    """It guesses the questions' tickets, so that no question is late."""

    async def ask() -> None:
        answers: asyncio.Queue[pb.LinkReply] = asyncio.Queue()
        call = Mock(read=answers.get, write=lambda _: asyncio.Event().wait())
        peer = Peer("127.0.77.2:9465", Clock())
        link = Link(peer, AsyncMock(), call, pb.NodeDescription(lease_ttl_s=30.0))
        asked = 0

        async def one() -> None:
            nonlocal asked
            question = link.ask_lease(Key("default", "k"), 20.0, 0)
            asked += 1
            outcome = leased(SPECULATIVE_BYTES + 1)
            outcome.ticket = asked
            answers.put_nowait(pb.LinkReply(leases=pb.LeaseOutcomes(outcomes=[outcome])))
            await link.lease(question)
            link.end(question, is_stored=False)

        while link.alive and asked < 10 * MAX_UNREAD:
            with contextlib.suppress(PeerUnavailable):
                await one()
        assert MAX_UNREAD / 2 < asked < 2 * MAX_UNREAD
        assert "does not read" in peer.last_error
        await link.close()

    asyncio.run(ask())


def test_a_link_whose_end_a_write_finds_has_failed() -> None:
    """The next look at the peers tries it again, which it does not do with one that is idle."""

    async def ask() -> None:
        ends: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        call = Mock(read=lambda: ends, write=AsyncMock(side_effect=asyncio.InvalidStateError))
        peer = Peer("127.0.77.2:9465", Clock())
        link = Link(peer, AsyncMock(), call, pb.NodeDescription(lease_ttl_s=30.0))
        link.offer({Key("default", "k"): None})
        await eventually_async(lambda: call.write.called)
        ends.set_result(grpc.aio.EOF)
        await within_hang(link.gone)
        assert peer.last_error == "it ended the link"

    asyncio.run(ask())


SENSE = b'\x01{"image":{"image_grid_thw":[1,16,24]}}'
NONSENSE = SENSE.replace(b"16", b"-16")


def test_metadata_that_a_peer_tells_are_short_and_make_sense() -> None:
    async def ask() -> None:
        answers: asyncio.Queue[pb.LinkReply] = asyncio.Queue()
        call = Mock(read=answers.get, write=AsyncMock())
        link = Link(Peer("127.0.77.2:9465", Clock()), AsyncMock(), call, pb.NodeDescription())
        metadata = [b"m" * TOLD_METADATA_BYTES, b"m" * (TOLD_METADATA_BYTES + 1), SENSE, NONSENSE]
        answers.put_nowait(found(1, 5, metadata=metadata))
        candidates = await link.find([Key("default", key) for key in "abcde"])
        told = [each and each.metadata for each in candidates]
        assert told == [metadata[0], b"", SENSE, b"", b""]
        await link.close()

    asyncio.run(ask())


def test_metadata_in_a_directory_make_sense() -> None:
    for metadata, told in {
        SENSE: SENSE,
        NONSENSE: b"",
        b"of another form": b"of another form",
    }.items():
        assert unpack_place(b"0:4096+100 " + metadata) == (Extent(0, 4096, 100), told)


def test_an_error_of_a_directory_is_kept_short() -> None:
    state = DirectoryState("redis")
    state.failed("x" * 100_000)
    assert len(state.last_error) == MAX_ERROR_CHARS
