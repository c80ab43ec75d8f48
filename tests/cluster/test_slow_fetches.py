"""A fetch that takes long is in the slow log, with the peer and what it waited for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from ecd_client import Client
from ecd_client.calls import open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.daemon import Daemon

SIZE = 1 << 20


def fetches(daemon: Daemon) -> list[pb.SlowEvent]:
    with open_channel(daemon.address) as channel:
        reply = pb_grpc.CacheStub(channel).Slow(pb.SlowRequest(), timeout=10.0)
    return [event for event in reply.events if event.kind == "fetch"]


def test_a_fetch_says_where_its_time_went(
    make_peer: Callable[..., Daemon], client_of: Callable[[Daemon], Client]
) -> None:
    has, wants = make_peer().start(), make_peer(ECD_SLOW_LOG_S="0").start()
    owner, asker = client_of(has), client_of(wants)
    owner.put_bytes("k", bytes(SIZE), "uint8", (SIZE,))
    with asker.get("k", 20.0, nodes=[has.peer]):
        pass
    [event] = fetches(wants)
    assert (event.mm_hash, event.peer, event.nbytes) == ("k", has.peer, SIZE)
    assert event.outcome == "fetched"
    assert {"connecting", "lease", "read queue", "reading"} <= set(event.stages)
    assert sum(event.stages.values()) <= event.seconds


def test_a_peer_that_stands_still_is_named(
    make_peer: Callable[..., Daemon], client_of: Callable[[Daemon], Client]
) -> None:
    has = make_peer().start()
    wants = make_peer(ECD_SLOW_LOG_S="0.08", ECD_FETCH_TIMEOUT_S="1.5").start()
    owner, asker = client_of(has), client_of(wants)
    for key in ("k", "late"):
        owner.put_bytes(key, bytes(SIZE), "uint8", (SIZE,))
    with asker.get("k", 20.0, nodes=[has.peer]):
        pass
    os.kill(has.pid, signal.SIGSTOP)
    try:
        assert asker.get("late", 10.0, nodes=[has.peer]) is None
    finally:
        os.kill(has.pid, signal.SIGCONT)
    [event] = [event for event in fetches(wants) if event.mm_hash == "late"]
    assert event.peer == has.peer
    assert event.outcome in ("late", "unreachable")
    assert event.seconds >= 0.8
    assert event.stages["lease"] > 0.5 * event.seconds
