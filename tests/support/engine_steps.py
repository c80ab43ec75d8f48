"""One engine, real or simulated, and steps that a test has it take.

python engine_steps.py HOST PORTS ENDPOINT: a real one. It takes steps as lines of JSON and answers
each with one. ENDPOINT is the one it must get, or empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import sys
import zlib
from typing import Any, NamedTuple

from ecd.cluster.transport.engine import EngineError, EngineSettings, ReadEngine
from ecd.cluster.transport.reads import ReadFailed, Reading
from ecd.cluster.transport.transfers import Progress, RemoteExtent, Transfers
from ecd_proto.mapped_file import _mapped
from support.waiting import eventually_async, value_of

NBYTES = 12 << 20
ADDRESS = 1 << 44
"""Where a real engine's process has its memory, in each life."""
MAP_FIXED_NOREPLACE = 0x100000


class Region(NamedTuple):
    """Memory to be registered, as `MappedFile` says it."""

    address: int
    nbytes: int


class EngineSteps:
    """An engine and NBYTES of memory, which peers read and it reads into."""

    def __init__(self, engine: Any, transfers: Transfers, address: int) -> None:
        self._engine, self._transfers, self.address = engine, transfers, address
        self._memory = memoryview((ctypes.c_ubyte * NBYTES).from_address(address)).cast("B")
        self._readings: list[tuple[int, Reading]] = []  # with the offsets of their targets

    async def start(self, letter: str) -> list[Any]:
        """Fill the memory: its pages differ, and each begins with an identity of this letter."""
        pages = (letter.encode() * 16 + bytes([page % 251]) * 4080 for page in range(NBYTES >> 12))
        self._memory[:] = b"".join(pages)
        await self._engine.verify("tcp")
        return [self._engine.endpoint, self.address, self._engine.identity_address]

    async def register(self, *regions: list[int]) -> str:
        try:
            await self._engine.register(
                *(Region(self.address + start, nbytes) for start, nbytes in regions)
            )
        except EngineError:
            return "refused"
        return "registered"

    async def transfer(self, endpoint: str, source: int, nbytes: int) -> list[Any]:
        """How one transfer ends, and the target then."""
        self._memory[:] = bytes(NBYTES)
        number = self._transfers.submit(endpoint, self.address, source, nbytes)
        progress = Progress.UNDER_WAY

        def is_over() -> bool:
            nonlocal progress
            progress = self._transfers.progress(number)
            return progress is not Progress.UNDER_WAY

        await eventually_async(is_over)
        return [progress.name, self._crc(0, NBYTES)]

    async def read(self, letter: str, *extents: list[Any]) -> list[Any]:
        """How reads end that begin at one time, and what each has brought."""
        self._begin(letter, *extents)
        return await self.outcomes()

    async def begin(self, letter: str, *extents: list[Any]) -> None:
        """Begin large reads, and be there when the transfers of four are under way."""
        self._begin(letter, *extents)
        reads = [reading.read for _, reading in self._readings]
        await eventually_async(lambda: sum(read.in_flight for read in reads) == 4)

    async def give_up(self) -> int:
        """Give all up, and say how many have ended once one has: that which waits for its turn."""
        for _, reading in self._readings:
            reading.give_up()
        ended = [reading.ended for _, reading in self._readings]
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        return sum(each.done() for each in ended)

    async def outcomes(self) -> list[Any]:
        return [await self._outcome(*each) for each in self._readings]

    async def given_up(self) -> list[Any]:
        """As `outcomes`, sorted, and whether bytes came: the stand-in begins reads in any order."""
        empty = zlib.crc32(bytes(self._readings[0][1].read.source.nbytes))
        return sorted([how, crc != empty] for how, crc in await self.outcomes())

    async def close(self) -> None:
        self._engine.close()

    async def left(self) -> list[bool]:
        """Which of the reads that were begun have ended."""
        return [reading.ended.done() for _, reading in self._readings]

    def _begin(self, letter: str, *extents: list[Any]) -> None:
        self._memory[:] = bytes(NBYTES)
        self._readings, target = [], 0
        for extent in extents:
            source = RemoteExtent(*extent, letter.encode() * 16)
            reading = self._engine.reads.read(source, self.address + target, 0.0)
            self._readings.append((target, reading))
            target += source.nbytes

    async def _outcome(self, target: int, reading: Reading) -> list[Any]:
        try:
            told: Any = await reading.ended
        except ReadFailed as error:
            told = str(error)
        return [told, self._crc(target, reading.read.source.nbytes)]

    def _crc(self, start: int, nbytes: int) -> int:
        return zlib.crc32(self._memory[start : start + nbytes])


def started(settings: EngineSettings, endpoint: str) -> ReadEngine:
    """An engine there, as soon as the ports are free. It draws its two ports of the range."""

    def attempt() -> ReadEngine | None:
        with contextlib.suppress(EngineError):
            engine = ReadEngine(settings, b"i" * 16)
            if endpoint in ("", engine.endpoint):
                return engine
            del engine._transfers._mooncake, engine._engine  # it frees the ports
        return None

    return value_of(attempt, "an engine on these ports")


async def main(host: str, ports: str, endpoint: str) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    _mapped(ADDRESS, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    engine = started(EngineSettings(host, "tcp", ports), endpoint)
    steps = EngineSteps(engine, engine._transfers, ADDRESS)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        step, *about = json.loads(line)
        print(json.dumps(await getattr(steps, step)(*about)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
