"""A client killed at any instruction costs nothing beyond its session (invariant 4)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecd_client import Client
from support.daemon import Daemon, eventually

KILLS = 200
AT_ONCE = 10


@pytest.mark.timeout(300)
def test_200_clients_killed_at_random_points_leave_nothing(
    make_daemon: Callable[..., Daemon],
) -> None:
    """Ten at a time work and are killed one by one while the rest work on."""
    daemon = make_daemon("24MiB").start()
    chance = random.Random(4)
    ended_s: list[float] = []
    script = str(Path(__file__).with_name("crashing_client.py"))
    nursery = subprocess.Popen(
        [sys.executable, script, daemon.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    try:
        for batch in range(KILLS // AT_ONCE):
            for number in range(AT_ONCE):
                print(batch * AT_ONCE + number, file=nursery.stdin)
            pids = [int(nursery.stdout.readline()) for _ in range(AT_ONCE)]
            while pids:
                time.sleep(chance.uniform(0.0, 0.05))
                os.kill(pids.pop(), signal.SIGKILL)
                left = len(pids)
                ended_s.append(
                    eventually(lambda left=left: daemon.status().sessions <= left, 5.0, "session")
                )
            status = daemon.status()
            assert (status.sessions, status.leases, status.waits) == (0, 0, 0)
            assert (status.pools[0].reserved_bytes, status.pools[0].leased_bytes) == (0, 0)
        said, _ = nursery.communicate(timeout=10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(nursery.pid, signal.SIGKILL)
        nursery.wait()
    assert said == "", "every byte read was right"
    counters = daemon.status().counters
    assert counters.puts > KILLS
    assert counters.aborts > 0, "some died between reserve and commit"
    print(f"slowest: {max(ended_s):.3f} s after the kill; {counters.aborts} died while writing")
    late = [seconds for seconds in ended_s if seconds > 1.0]
    assert len(late) < len(ended_s) / 20, "a machine busy with else may hold up a few"
    daemon.evict_all()
    status = daemon.status()
    assert status.pools[0].used_bytes == 0
    assert status.pools[0].largest_free_bytes == status.pools[0].pool_bytes, "one free extent again"
    assert "Traceback" not in daemon.text()
    with Client(daemon.address) as client:
        assert client.get("k1") is None
