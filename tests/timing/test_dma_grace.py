"""How long a killed client's memory waits: D1 of docs/gpu-rules.md, with the daemon's graces."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from ecd_client import Client, EcdError
from ecd_client.device.attach import attach
from support.daemon import Daemon
from support.dma_writer import reserved, writer
from support.waiting import eventually


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), "some hundredths: at once, invariant 4 of the design"),
        (("attach",), "some hundredths: at once, invariant 4 of the design"),
        (("attach", "word", "clear"), "some hundredths: at once, invariant 4 of the design"),
        (("attach", "word"), "1.0 to 1.2: DMA_GRACE_S"),
        (("word",), "10.0 to 10.2: DMA_BLIND_GRACE_S"),
    ],
    ids=["no DMA", "attached", "no copy under way", "attached, copying", "not attached"],
)
def test_a_killed_clients_memory_is_free(
    daemon: Daemon, figure: Callable[..., None], steps: tuple[str, ...], expected: str
) -> None:
    with writer(daemon, *steps) as (process, _):
        started_s = time.monotonic()
        process.kill()
        eventually(lambda: reserved(daemon) == 0, "the memory is free")
        figure("after the kill", time.monotonic() - started_s, "s", expected)


def test_attaching_to_a_stopped_daemon(
    daemon: Daemon, client: Client, figure: Callable[..., None]
) -> None:
    [path] = daemon.shm.glob("*.attach")
    token = client._connection.session().token
    with daemon.stopped():
        started_s = time.monotonic()
        with pytest.raises(EcdError, match="timed out"):
            attach(str(path), token, 0.3)
        figure("given up", time.monotonic() - started_s, "s", "0.3: the patience")
