"""A local disk in the simulated world, under ecd's own disk tier: files in memory, slow or bad.

It stands in for `DiskDir`, with which integration/test_simulated_disk.py compares it, and for the
tier's threads. Files tell no age.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ecd.base.checksum import digests, fold
from ecd.core.demotion import rounded
from ecd.core.model.types import Content, Key
from ecd.memory.disk.disk_dir import new_name
from ecd.memory.disk.disk_format import SUFFIX, CorruptFile, Found, Header, file_name
from simulation.clock import PROCESS, VirtualLoop


class _File(NamedTuple):
    header: Header
    data: bytes


class SimulatedDisk:
    """What lies on one node's disk; it outlives the daemons."""

    path = Path("/simulated")

    def __init__(self, rng: Random, failures: float) -> None:
        self._rng, self._failures = rng, failures
        self.read_error: OSError | None = None  # of every read from now on
        self.write_error: OSError | None = None
        self._files: dict[str, _File] = {}
        self.may_write: Callable[[memoryview], None] = lambda _: None
        """Raises unless a read may write there."""

    def names(self) -> list[str]:
        return [name for name in self._files if name.endswith(SUFFIX)]

    def read_header(self, name: str) -> Found:
        header = self._files[name].header
        if file_name(header.key) != name:
            raise CorruptFile("it was being written when its daemon died")
        return Found(header, len(header.pack()) + rounded(header.content.nbytes), 1.0, 1.0)

    def write(
        self, name: str, key: Key, content: Content, memory: memoryview, age_s: float = 0.0
    ) -> int:
        self._fail_sometimes(self.write_error)
        checksum = fold(digests(memory))
        self._files[new_name(name)] = _File(Header(key, content, checksum), bytes(memory))
        return checksum

    def publish(self, name: str) -> None:
        self._files[name] = self._files.pop(new_name(name))

    def remove(self, name: str) -> None:
        self._files.pop(name, None)

    def read(
        self, name: str, key: Key, nbytes: int, target: memoryview, is_wanted: Callable[[], bool]
    ) -> Header:
        if name not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        self._fail_sometimes(self.read_error)
        self.may_write(target)
        target[:nbytes] = self._files[name].data
        if not is_wanted():
            raise OSError(errno.ECANCELED, "not wanted any more")
        return self._files[name].header

    def space(self) -> tuple[int, Path]:
        return 1 << 40, self.path

    def close(self) -> None: ...

    def _fail_sometimes(self, error: OSError | None) -> None:
        if error is not None:
            raise error
        if self._rng.random() < self._failures:
            raise OSError(errno.EIO, "a bad block")


class SimulatedThreads:
    """In place of the disk tier's `Threads`: jobs that take as long as the loop's disk does."""

    def __init__(self, count: int, name: str) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop, self._free = loop, count
        self._jobs: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()

    def do(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        done = self._loop.create_future()
        self._jobs.append((job, done))
        self._begin()
        return done

    def close(self) -> None: ...

    def _begin(self) -> None:
        if self._free and self._jobs:
            self._free -= 1
            self._loop.call_later(self._loop.disk_s(), self._end, *self._jobs.popleft())

    def _end(self, job: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        self._free += 1
        process = PROCESS.get()
        if process is None or not process.alive:
            return
        try:
            result, error = job(), None
        except Exception as raised:
            result, error = None, raised
        if not done.done():
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)
                done.exception()
        self._begin()
