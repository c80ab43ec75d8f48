"""Mooncake between simulated nodes: one-sided reads of real memory, in virtual time.

A transfer reads whatever memory answers at the engine's name when it is served: that of a process
that started there since, too. It may be served in two parts, fail, or hang; until it is over it may
write to its target. `tests/cluster/test_simulated_mooncake.py` compares this with Mooncake.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ecd.cluster.transport.engine import EngineError
from ecd.cluster.transport.identity import Identities
from ecd.cluster.transport.read_queue import SWEEP_S, ReadQueue
from ecd.cluster.transport.reads import Reading
from ecd.cluster.transport.transfers import Progress, Read, RemoteExtent
from ecd_proto.mapped_file import MappedFile
from simulation.clock import OUTSIDE, Hashers, Process
from simulation.network import Network

HANG_S = 3.0
"""After which the engine itself gives a transfer up."""
PART_BYTES = 4096


@dataclass(eq=False)
class Transfer:
    engine: str
    target: int
    source: int
    nbytes: int
    reader: SimulatedEngine
    progress: Progress = Progress.UNDER_WAY
    served: int = 0  # bytes, from the first on
    may_write: Callable[[], None] = lambda: None
    """Raises unless the target still belongs to the read."""


class Engines:
    """All engines that answer, by their names."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.answering: dict[str, SimulatedEngine] = {}
        self.owner: Callable[[Transfer], Callable[[], None]] = lambda _: lambda: None
        """The check of a new transfer's target, to be made whenever it writes."""

    def begin(self, transfer: Transfer) -> None:
        network, rng = self.network, self.network.rng
        transfer.may_write = self.owner(transfer)
        weather = network.weather
        took_s = network.delay_s() + transfer.nbytes / weather.bytes_per_s
        fate = rng.random()
        later = network.loop.call_later
        if fate < weather.hung_reads:
            if rng.random() < 0.5:
                late_s = rng.uniform(0.0, HANG_S)
                later(late_s, self._serve, transfer, 0, transfer.nbytes, context=OUTSIDE)
            later(HANG_S, self._over, transfer, Progress.FAILED, context=OUTSIDE)
        elif fate < weather.hung_reads + weather.failed_reads:
            later(took_s, self._over, transfer, Progress.FAILED, context=OUTSIDE)
        else:
            middle = rng.randrange(0, transfer.nbytes + 1, PART_BYTES)
            first_s = took_s * rng.random()
            later(first_s, self._serve, transfer, 0, middle, context=OUTSIDE)
            later(took_s, self._serve, transfer, middle, transfer.nbytes, True, context=OUTSIDE)
            later(HANG_S, self._over, transfer, Progress.FAILED, context=OUTSIDE)

    def _serve(self, transfer: Transfer, start: int, end: int, is_last: bool = False) -> None:
        """Copy a part. A cut network or a stopped process is asked again until the read is over."""
        if transfer.progress is not Progress.UNDER_WAY or not transfer.reader.process.alive:
            return
        source, reader = self.answering.get(transfer.engine), transfer.reader
        if source is None and self.network.rng.random() < 0.5:
            return self._over(transfer, Progress.FAILED)
        nodes = (source.node if source else "", reader.node)
        is_cut = nodes in self.network.cut or nodes[::-1] in self.network.cut
        if source is None or is_cut or source.process.is_paused or reader.process.is_paused:
            again = self._serve, transfer, start, end, is_last
            self.network.loop.call_later(0.05, *again, context=OUTSIDE)
            return
        if start < end or transfer.served < start:
            start = min(start, transfer.served)  # the part before may still wait
            if not source.has(transfer.source, transfer.nbytes):  # Mooncake refuses all of it
                return self._over(transfer, Progress.FAILED)
            transfer.may_write()
            ctypes.memmove(transfer.target + start, transfer.source + start, end - start)
            transfer.served = max(transfer.served, end)
            if source.lies:
                ctypes.c_ubyte.from_address(transfer.target + start).value ^= 1
        if is_last:
            self._over(transfer, Progress.ARRIVED)

    def _over(self, transfer: Transfer, progress: Progress) -> None:
        if transfer.progress is Progress.UNDER_WAY and transfer.reader.is_open:
            transfer.progress = progress
            transfer.reader.reads.wake()


class SimulatedEngine:
    """In place of `Engine`: transfers and the event loop's view of them."""

    def __init__(
        self, engines: Engines, process: Process, node: str, endpoint: str, identity: MappedFile
    ) -> None:
        """`identity` is the page that peers read to know whose memory they have read."""
        self.process, self.node, self.endpoint, self.protocol = process, node, endpoint, "tcp"
        self.identity_address = identity.address
        self.lies = False  # it sends bytes that are not its memory's
        self._engines, self._identity = engines, identity
        self._memory: list[MappedFile] = []
        self._transfers: dict[int, Transfer] = {}
        self._numbers = itertools.count(1)
        self.reads = SimulatedReads(self, engines.network)

    async def verify(self, protocol: str) -> None:
        self._engines.answering[self.endpoint] = self

    async def register(self, *pools: MappedFile) -> None:
        if self._memory:  # the identity would be registered twice, which Mooncake refuses
            raise EngineError("registered already")
        self._memory = [self._identity, *pools]
        await asyncio.sleep(0.001)

    def close(self) -> None:
        if self._engines.answering.get(self.endpoint) is self:
            del self._engines.answering[self.endpoint]
        self.reads.close()

    @property
    def is_open(self) -> bool:
        """Whether its reads may end: they stay open once it is closed, and may still write."""
        return self.process.alive and not self.reads.is_closed

    def has(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are registered, as one region."""
        return any(
            memory.address <= address and address + nbytes <= memory.address + memory.nbytes
            for memory in self._memory
        )

    # -- Transfers -----------------------------------------------------------------------------

    @property
    def under_way(self) -> list[Transfer]:
        return [t for t in self._transfers.values() if t.progress is Progress.UNDER_WAY]

    def submit(self, engine: str, target: int, source: int, nbytes: int) -> int:
        number = next(self._numbers)
        transfer = self._transfers[number] = Transfer(engine, target, source, nbytes, self)
        self._engines.begin(transfer)
        return number

    def progress(self, transfer: int) -> Progress:
        progress = self._transfers[transfer].progress
        if progress is not Progress.UNDER_WAY:
            del self._transfers[transfer]
        return progress


class SimulatedReads:
    """In place of `Reads`: drives its read queues on the event loop instead of a thread."""

    def __init__(self, engine: SimulatedEngine, network: Network) -> None:
        self.failed: asyncio.Future[None] = network.loop.create_future()
        self._engine, self._network = engine, network
        self._identities = Identities(64)
        self._queues: dict[str, ReadQueue] = {}
        self._readings: dict[Read, Reading] = {}
        self._hashers = Hashers(network.loop, network.rng)
        self._is_woken = self.is_closed = False

    def read(self, source: RemoteExtent, target: int, asked_s: float) -> Reading:
        loop = self._network.loop
        reading = Reading(Read(source, target, asked_s), loop.create_future())
        loop.call_later(self._network.rng.uniform(0.0, 0.0002), self._submit, reading)
        return reading

    def wake(self) -> None:
        """A transfer is over: have the queues polled soon."""
        if not self._is_woken:
            self._is_woken = True
            pause_s = self._network.rng.uniform(0.0, 0.0005)
            self._engine.process.context.run(self._network.loop.call_later, pause_s, self._woken)

    def close(self) -> None:
        self.is_closed = True

    @property
    def is_idle(self) -> bool:
        return not self._queues and not self._readings

    def _submit(self, reading: Reading) -> None:
        name = reading.read.source.engine
        if name not in self._queues:
            self._queues[name] = ReadQueue(name, self._engine, self._identities)
            self._network.loop.call_later(SWEEP_S, self._sweep, name, self._queues[name])
        self._readings[reading.read] = reading
        self._queues[name].add(reading.read)
        self._turn()

    def _sweep(self, name: str, waiting: ReadQueue) -> None:
        if self._queues.get(name) is waiting and not self.is_closed:
            self._turn()
            self._network.loop.call_later(SWEEP_S, self._sweep, name, waiting)

    def _woken(self) -> None:
        self._is_woken = False
        self._turn()

    def _turn(self) -> None:
        """What the polling thread does in one pass."""
        if self.is_closed:
            return
        ended = []
        for name, waiting in list(self._queues.items()):
            for piece in waiting.poll():
                self._readings[piece.read].hash(piece, self._hashers)
            ended += waiting.advance(self._network.loop.now_s)
            if waiting.is_empty:
                del self._queues[name]
        for read, failure in ended:
            reading = self._readings.pop(read)
            resolve = partial(self._network.loop.call_soon, reading.resolve, failure)
            if reading.is_hashed():
                resolve()
            else:
                reading.when_hashed(resolve)
