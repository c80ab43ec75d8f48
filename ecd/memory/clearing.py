"""The files that an ended daemon left, in memory and on disk: how to list and remove them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ecd.memory import pool_dir
from ecd.memory.disk import disk_dir
from ecd.memory.pool_dir import PoolError
from ecd_proto.contract import size_text
from ecd_proto.leftovers import is_in_use, leftover
from ecd_proto.shm.files import pool_dir as directory_of


@dataclass(frozen=True)
class Left:
    """The files of one daemon in one directory."""

    name: str  # the daemon's
    path: Path
    nbytes: int
    about: str  # for people

    def __str__(self) -> str:
        return f"{self.path}, {self.about or size_text(self.nbytes)}"


def left_by(shm_dir: str, disk: Path, name: str) -> list[Left]:
    """List the files of the daemon of this name. Raises PoolError if it runs."""
    path = directory_of(shm_dir, name)
    if is_in_use(path):
        raise PoolError(pool_dir.IN_USE_TO_CLEAR.format(path=path))
    found = []
    if each := leftover(shm_dir, name):
        found.append(Left(name, each.path, each.nbytes or 0, str(each).partition(", ")[2]))
    if nbytes := disk_dir.left(disk, name):
        found.append(Left(name, directory_of(str(disk), name), nbytes, ""))
    return found


def clear(shm_dir: str, disk: Path, name: str) -> Iterator[Left]:
    """Remove the files of the daemon of this name, first in memory; yield each as it is removed.

    Raises PoolError, and DiskError.
    """
    for place, remove in ((shm_dir, pool_dir.clear), (str(disk), disk_dir.clear)):
        if nbytes := remove(place, name):
            yield Left(name, directory_of(place, name), nbytes, "")
