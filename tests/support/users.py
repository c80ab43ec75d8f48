"""Other users of the machine: what they can do to a daemon, and what it does to them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.nodes import LET_OTHERS_IN, SEEN
from support.processes import run
from support.waiting import HANG_S

SERVICE, MALLORY = 12345, 54321
"""User ids that nobody has: the one that daemons run as, and one that means harm."""
AS_USER = f"""
set -e
mount --make-rprivate /
mkdir -p "$PLACE/keep"
{LET_OTHERS_IN}
exec setpriv --reuid="$RUN_AS" --regid="$RUN_AS" --groups="$GROUPS_TOO" "$@"
"""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="NOT TESTED: only root can act as a second user (CI does)"
)


@contextlib.contextmanager
def like_dev_shm() -> Iterator[Path]:
    """A directory on tmpfs that is open to all, where nobody can remove another's files."""
    with tempfile.TemporaryDirectory(prefix="test-users-", dir="/dev/shm") as made:
        directory = Path(made)
        directory.chmod(0o1777)
        yield directory


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """This process makes and opens files as this user within the block."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def prefix(directory: Path, uid: int, groups: str = "") -> list[str]:
    """The words that run a command as this user, who can then read Python and this tree."""
    if uid == 0:
        return []
    return [
        *("env", f"PLACE={directory}", f"SEEN={SEEN}", f"RUN_AS={uid}"),
        *(f"GROUPS_TOO={groups or uid}", "unshare", "--mount", "sh", "-c", AS_USER, "sh"),
    ]


def shell(uid: int, script: str, *arguments: Path) -> None:
    """Run a few commands as this user."""
    run(
        ["sh", "-ec", script, "sh", *map(str, arguments)],
        user=uid,
        group=uid,
        extra_groups=[],
        umask=0,
        cwd="/",
        check=True,
    )


class UsersDaemon(Daemon):
    """A daemon of some user; socket and pool lie below a directory that all can write to."""

    def __init__(self, place: Path, log: Path, uid: int, **settings: str) -> None:
        super().__init__(log, "16MiB", ECD_SHM_DIR=str(place), **settings)
        self.uid, self.place = uid, place
        self.prefix = prefix(log, uid)
        self.address = f"unix://{place}/{self.name}.sock"
        self.socket = place / f"{self.name}.sock"
        self.shm = place / f"ecd-{self.name}"

    def refused(self) -> str:
        """Start it, and see it end; what it said."""
        self.start(wait=False)
        assert self._process is not None
        assert self._process.wait(HANG_S) == 1, self.text()
        assert "Traceback" not in self.text(), self.text()
        return self.text()
