"""`Status.idle`: each part says when it has nothing left to do, and while it has."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ecd_client import Client
from support.daemon import Daemon, changed
from support.processes import run
from support.waiting import HANG_S, eventually

HELD = {
    "hashed": ("ecd.memory.checksums", "Checksums", "_read"),
    "settled": ("ecd.memory.disk.disk_dir", "DiskDir", "read"),
    "written": ("ecd.memory.disk.disk_dir", "DiskDir", "publish"),
}
"""What does each part's work, on a thread: module, class and method."""
NBYTES = 8 << 20


def holding(part: str, pipe: Path) -> tuple[str, ...]:
    """The command of a daemon whose part waits for the pipe, once there is one, before it works."""
    module, owner, method = HELD[part]
    return changed(
        "import os",
        f"from {module} import {owner} as owner",
        f"work = owner.{method}",
        "def held(*about):",
        f"    if os.path.exists({str(pipe)!r}):",
        f"        open({str(pipe)!r}).read()",
        "    return work(*about)",
        f"owner.{method} = held",
        "from ecd.memory.disk import disk_reads",
        f"disk_reads.PATIENCE_S = {HANG_S}",  # a read that is held is not given up
    )


def put(client: Client, key: str) -> None:
    client.put_bytes(key, bytes(NBYTES), "uint8", (NBYTES,))


@pytest.mark.parametrize("part", HELD)
def test_a_part_is_idle_once_it_has_done_its_work(
    part: str, make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    disk = {"ECD_DISK_POOL_BYTES": "256MiB", "ECD_DISK_DIR": str(tmp_path / "disk")}
    (tmp_path / "disk").mkdir()
    daemon = make_daemon("32MiB", ECD_FETCH_TIMEOUT_S=str(HANG_S), **disk)
    daemon.command = holding(part, pipe)
    daemon.start()
    daemon.wait_idle()
    with Client(daemon.address) as client:
        for number in range(6):  # more than memory holds
            put(client, str(number))
            daemon.wait_idle()
        os.mkfifo(pipe)
        if part == "settled":
            [gone, *_] = {f"{number}" for number in range(6)} - set(daemon.names())
            client.get_async([gone], HANG_S, only_if_written=True)
        else:
            put(client, "more")
        eventually(lambda: not getattr(daemon.status().idle, part))
        cli = [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address]
        shown = json.loads(run([*cli, "status", "--json"], capture_output=True).stdout)["idle"]
        assert shown[part] is False
        assert shown["drained"] is True
        assert shown["settled"] is (part != "settled")

        def lets_go() -> bool:
            with contextlib.suppress(OSError):  # nobody waits for it now
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            return getattr(daemon.status().idle, part)

        eventually(lets_go)
        daemon.wait_idle(part)


def test_a_daemon_that_makes_room_is_not_drained(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    held = tmp_path / "held"
    held.touch()
    daemon = make_daemon("32MiB")
    daemon.command = changed(
        "import os",
        "from ecd.core.evictor import Evictor",
        "trim = Evictor.trim",
        f"Evictor.trim = lambda *about: os.path.exists({str(held)!r}) or trim(*about)",
    )
    daemon.start()
    daemon.wait_idle("drained")
    daemon.crowd(40)
    eventually(lambda: not daemon.status().idle.drained)
    held.unlink()
    daemon.wait_idle("drained")


def test_a_daemon_that_nobody_uses_is_idle(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    daemon.wait_idle()
    with Client(daemon.address) as client:
        put(client, "k")
    daemon.wait_idle("drained", "hashed", "settled", "written")
