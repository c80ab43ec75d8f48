"""A client killed at any instruction costs nothing beyond its session (invariant 4)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import pytest

from ecd_client import Client
from support.crashing import nursery
from support.daemon import Daemon
from support.waiting import eventually

AT_ONCE = 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [60, pytest.param(1000, marks=pytest.mark.night)])
def test_clients_killed_at_random_points_leave_nothing(
    make_daemon: Callable[..., Daemon], kills: int
) -> None:
    """Ten at a time work and are killed one by one while the rest work on."""
    daemon = make_daemon("24MiB").start()
    chance = random.Random(4)
    with nursery(daemon) as clients:
        for first in range(0, kills, AT_ONCE):
            pids = clients.fork(range(first, first + AT_ONCE))
            while pids:
                work_on(daemon, puts=chance.randrange(4))
                os.kill(pids.pop(), signal.SIGKILL)
                left = len(pids)
                eventually(lambda left=left: daemon.status().sessions <= left, "session")
            status = daemon.status()
            assert (status.sessions, status.leases, status.waits) == (0, 0, 0)
            assert (status.pools[0].reserved_bytes, status.pools[0].leased_bytes) == (0, 0)
        clients.close()
    counters = daemon.status().counters
    assert counters.puts > kills
    assert counters.aborts > 0, "some died between reserve and commit"
    print(f"{counters.aborts} died while writing")
    daemon.evict_all()
    status = daemon.status()
    assert status.pools[0].used_bytes == 0
    assert status.pools[0].largest_free_bytes == status.pools[0].pool_bytes, "one free extent again"
    assert "Traceback" not in daemon.text()
    with Client(daemon.address) as client:
        assert client.get("k1") is None


def work_on(daemon: Daemon, puts: int) -> None:
    """Let the clients put so many entries more."""
    aim = daemon.status().counters.puts + puts
    eventually(lambda: daemon.status().counters.puts >= aim, "the clients work")
