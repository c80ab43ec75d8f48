"""How long a client's waits last: the seconds that it was given, and little more."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from ecd_client import Client, DaemonUnavailable
from support.daemon import Daemon

Figure = Callable[[str, float, str, str], None]


def test_a_wait_runs_out(client: Client, figure: Figure) -> None:
    started_s = time.monotonic()
    assert client.get("never", timeout=0.3) is None
    figure("get", time.monotonic() - started_s, "s", "0.3: its timeout")


def test_calls_to_a_daemon_that_stands_still_are_given_up(daemon: Daemon, figure: Figure) -> None:
    with Client(daemon.address, call_timeout=0.5) as client:
        client.put("k", torch.ones(10))
        with daemon.stopped():
            started_s = time.monotonic()
            with pytest.raises(DaemonUnavailable):
                client.get("new", 0.2)
            got_s = time.monotonic()
            with pytest.raises(DaemonUnavailable):
                client.put("new", torch.ones(10))
            figure("get", got_s - started_s, "s", "0.5 to 1: the call's timeout")
            figure("put", time.monotonic() - got_s, "s", "less: the connection is given up")
