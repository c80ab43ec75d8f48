"""How soon a session ends with its client's process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from support.daemon import Daemon
from support.processes import child
from support.waiting import eventually

CLIENT = """
import sys
from ecd_client import Client
client = Client(sys.argv[1])
print("connected", flush=True)
sys.stdin.read()
"""


def test_a_session_ends_with_its_client(daemon: Daemon, figure: Callable[..., None]) -> None:
    slowest_s = 0.0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    for _ in range(10):
        with child([sys.executable, "-c", CLIENT, daemon.address], **pipes) as client:
            assert client.stdout.readline() == b"connected\n"
            client.kill()
            killed_s = time.monotonic()
            eventually(lambda: daemon.status().sessions == 0)
            slowest_s = max(slowest_s, time.monotonic() - killed_s)
    figure("the slowest of ten", slowest_s, "s", "below 0.2")
