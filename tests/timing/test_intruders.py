"""How long others are held up by what an intruder sends, and by a client that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from random import Random

from ecd_client.session.channel import open_channel
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from fuzz.test_socket import Intruder, send_millions
from support.crashing import nursery
from support.daemon import Daemon
from support.fuzz import Citizen
from support.waiting import eventually

Figure = Callable[[str, float, str, str], None]
BATCHES = 40
KILLS, AT_ONCE = 40, 10


@contextlib.contextmanager
def others(daemon: Daemon, figure: Figure) -> Iterator[Callable[[], None]]:
    """What others notice within the block: a client all the time, an operator at each call."""
    slowest_s = 0.0
    with contextlib.closing(Citizen(daemon)) as citizen, open_channel(daemon.address) as channel:
        stub = pb_grpc.CacheStub(channel)

        def look() -> None:
            nonlocal slowest_s
            started_s = time.perf_counter()
            stub.Status(pb.StatusRequest())
            slowest_s = max(slowest_s, time.perf_counter() - started_s)

        yield look
        told = citizen.finish()
    figure("slowest status", slowest_s, "s", "below 1, whatever else is sent")
    figure("slowest call of a client", told["slowest_s"], "s", "below 5: a call's limit")


def test_altered_messages(daemon: Daemon, figure: Figure) -> None:
    chance = Random(0)
    with (
        others(daemon, figure) as look,
        contextlib.closing(Intruder(daemon.address)) as intruder,
    ):
        for _ in range(BATCHES):
            intruder.send(chance)
            look()


def test_messages_of_millions_of_numbers(daemon: Daemon, figure: Figure) -> None:
    """Each is refused before it is walked."""
    with (
        others(daemon, figure) as look,
        contextlib.closing(Intruder(daemon.address)) as intruder,
    ):
        for _ in send_millions(intruder):
            look()


def test_the_session_of_a_killed_client(make_daemon: Callable[..., Daemon], figure: Figure) -> None:
    daemon = make_daemon("24MiB").start()
    ended_s = []
    with nursery(daemon) as clients:
        for first in range(0, KILLS, AT_ONCE):
            pids = clients.fork(range(first, first + AT_ONCE))
            while pids:
                started_s = time.perf_counter()
                os.kill(pids.pop(), signal.SIGKILL)
                left = len(pids)
                eventually(lambda left=left: daemon.status().sessions <= left, "session")
                ended_s.append(time.perf_counter() - started_s)
        clients.close()
    figure("it ends after the kill", max(ended_s), "s", "below 1 (invariant 4)")
