"""A fetch that takes long is in the slow log, with the peer and what it waited for."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from ecd_client import Client
from ecd_client.session.channel import open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.daemon import Daemon
from support.pairs import PATIENT, missed, start_all
from support.waiting import HANG_S, eventually

SIZE = 1 << 20


def fetches(daemon: Daemon) -> dict[str, pb.SlowEvent]:
    """Fetches in the slow log, by their keys."""
    with open_channel(daemon.address) as channel:
        reply = pb_grpc.CacheStub(channel).Slow(pb.SlowRequest(), timeout=HANG_S)
    return {event.mm_hash: event for event in reply.events if event.kind == "fetch"}


@pytest.fixture(scope="module")
def nodes(make_lasting_peer: Callable[..., Daemon]) -> tuple[Daemon, Daemon, Daemon]:
    """One that others read from, a patient reader, and one in a hurry."""
    about = {"pool": "64MiB", "ECD_SLOW_LOG_S": "0"}
    has, patient = make_lasting_peer("64MiB"), make_lasting_peer(**about, ECD_FETCH_TIMEOUT_S="60")
    hurried = make_lasting_peer(**about, ECD_FETCH_TIMEOUT_S="1.5")
    has.command = patient.command = PATIENT
    start_all(has, patient, hurried)
    return has, patient, hurried


def test_a_fetch_says_where_its_time_went(
    nodes: tuple[Daemon, Daemon, Daemon], client_of: Callable[[Daemon], Client]
) -> None:
    has, wants, _ = nodes
    client_of(has).put_bytes("k", bytes(SIZE), "uint8", (SIZE,))
    client_of(wants).get("k", HANG_S, nodes=[has.peer]).close()
    event = fetches(wants)["k"]
    assert (event.peer, event.nbytes, event.outcome) == (has.peer, SIZE, "fetched")
    assert {"connecting", "lease", "read queue", "reading"} <= set(event.stages)
    assert sum(event.stages.values()) <= event.seconds


def test_a_peer_that_stands_still_is_named(
    nodes: tuple[Daemon, Daemon, Daemon], client_of: Callable[[Daemon], Client]
) -> None:
    has, _, wants = nodes
    owner, asker = client_of(has), client_of(wants)
    numbers = itertools.count()

    def is_named() -> bool:
        """Or the reader stood still itself, before it had asked."""
        linked, late = (f"{what} {next(numbers)}" for what in ("linked", "late"))
        for key in (linked, late):
            owner.put_bytes(key, bytes(SIZE), "uint8", (SIZE,))
        eventually(lambda: not missed(asker, linked, [has.peer]), "the link is there")
        with has.stopped():
            assert missed(asker, late, [has.peer])
        event = fetches(wants)[late]
        assert event.outcome in ("late", "unreachable")
        longest = max(event.stages, key=lambda stage: event.stages[stage])
        return (event.peer, longest) == (has.peer, "lease")

    eventually(is_named)
