"""The simulation's disk does with files what the directory of the disk tier does."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from ecd.core.demotion import rounded
from ecd.core.model.types import Content, Key
from ecd.memory.disk.disk_dir import DiskDir
from ecd.memory.disk.disk_format import file_name
from simulation.disk import SimulatedDisk

ONE, TWO = Key("n", "one"), Key("n", "two")
NBYTES = 10_000
CONTENT = Content("uint8", (NBYTES,), NBYTES, b"metadata", 0.5)


def said(call: Callable[[], Any]) -> Any:
    """The result of a call, or its error."""
    try:
        return call()
    except OSError as error:
        return type(error), error.errno


def read(disk: Any, key: Key, is_wanted: bool) -> Any:
    with memoryview(mmap.mmap(-1, rounded(NBYTES))) as target:
        header = said(lambda: disk.read(file_name(key), key, NBYTES, target, lambda: is_wanted))
        return header, bytes(target[:NBYTES]) if is_wanted else b""


def story(disk: Any) -> list[Any]:
    with memoryview(mmap.mmap(-1, NBYTES)) as memory:
        memory[:] = Random(1).randbytes(NBYTES)
        told = [disk.write(file_name(key), key, CONTENT, memory) for key in (ONE, TWO)]
    assert disk.space()[0] > 0
    told.append(disk.names())
    disk.publish(file_name(ONE))
    told.append(disk.names())
    found = disk.read_header(file_name(ONE))
    told += [found.header, found.file_bytes]
    told += [read(disk, key, is_wanted) for key in (ONE, TWO) for is_wanted in (True, False)]
    disk.remove(file_name(ONE))
    disk.remove(file_name(ONE))
    return [*told, disk.names(), read(disk, ONE, is_wanted=True)[0]]


def test_it_does_as_the_directory_does(tmp_path: Path) -> None:
    real = DiskDir(tmp_path, "compared")
    assert story(SimulatedDisk(Random(1), 0.0)) == story(real)
    real.close()
