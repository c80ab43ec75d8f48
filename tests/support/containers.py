"""A daemon as a container runtime runs it: its user, its volume, a root that it cannot write."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from support.nodes import LET_OTHERS_IN, SEEN
from support.processes import child
from support.waiting import eventually

CONTAINER = f"""
set -e
mount --make-rprivate /
mkdir "$PLACE/keep"
{LET_OTHERS_IN}
mount -t tmpfs none /run
mkdir /run/ecd
mount -t tmpfs -o "$VOLUME" none /run/ecd
setpriv --groups=10001 --no-new-privs --bounding-set=-all --inh-caps=-all $PREPARE
mount -o remount,bind,ro /
ip link set lo up
exec setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --bounding-set=-all \\
  --inh-caps=-all "$ECD" serve
"""


class Contained(NamedTuple):
    """The daemon, the process around it, and its log."""

    pid: int
    around: subprocess.Popen[bytes]
    log: Path

    @property
    def inside(self) -> list[str]:
        """Before a command that runs beside the daemon."""
        return ["nsenter", "--target", str(self.pid), "--mount", "--net"]


@contextlib.contextmanager
def contained(
    place: Path, settings: Mapping[str, str], volume: str, prepare: Sequence[str] = ("true",)
) -> Iterator[Contained]:
    """The daemon with these variables once it serves; a tmpfs with options `volume` at /run/ecd."""
    log = place / "log"
    with child(
        ["unshare", "--mount", "--net", "--fork", "--kill-child", "sh", "-c", CONTAINER],
        env={
            **settings,
            "PATH": os.environ["PATH"],
            "SEEN": SEEN,
            "PREPARE": shlex.join(prepare),
            "PLACE": str(place),
            "VOLUME": volume,
            "ECD": str(Path(sys.executable).with_name("ecd")),
        },
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    ) as process:
        eventually(lambda: "serving on " in log.read_text(), log.read_text())
        [daemon] = _children(process)
        yield Contained(daemon, process, log)


def _children(process: subprocess.Popen[bytes]) -> list[int]:
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(child) for child in file.read_text().split()]
