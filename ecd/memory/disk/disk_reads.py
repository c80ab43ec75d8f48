"""Reading entries back from disk, into reservations: a source of flights.

A read that takes too long is given up, and its flight goes on. Its extent is set aside until the
read returns, and its thread is not replaced: a disk that hangs costs READERS threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any, Protocol

from ecd.core.demotion import rounded
from ecd.core.disk_catalog import OnDisk
from ecd.core.model.outcomes import AlreadyStored, BeingWritten, Committed, LimitReached, Reserved
from ecd.core.model.types import Content, Key
from ecd.live.flights import Flight, Outcome
from ecd.live.live import LiveCache
from ecd.live.slow_log import Stage
from ecd.memory.disk.disk_files import DiskFiles
from ecd.memory.disk.disk_format import CorruptFile, Header, file_name
from ecd.memory.disk.disk_limits import Breaker
from ecd.memory.disk.threads import Threads
from ecd_proto.contract import shown
from ecd_proto.mapped_file import MappedFile

logger = logging.getLogger(__name__)

READERS = 4
PATIENCE_S = 1.0
"""How long a read may wait for a thread, and how long it may take, besides the time for its bytes.
"""
SLOWEST_BYTES_PER_S = 100e6
STEPS = 10
"""Steps of a wait; a pause of this process uses up only one, as it is not the disk's."""


class WritablePool(Protocol):
    """One pool's memory."""

    @property
    def readable(self) -> MappedFile: ...

    @property
    def writable(self) -> MappedFile: ...


class DiskReads:
    """All reads of the disk tier."""

    is_local = True

    def __init__(
        self, live: LiveCache, files: DiskFiles, pools: Mapping[int, WritablePool]
    ) -> None:
        self._live, self._files, self._pools = live, files, pools
        self._counters = files.counters
        session = live.cache.open_session()  # it owns the reservations
        assert not isinstance(session, LimitReached)
        self._session = session
        self.breaker = Breaker("reads from disk", files.counters, live.clock)
        self._readers = Threads(READERS, "ecd-disk-read")
        self._free = READERS
        self._ended_s = 0.0  # when the last read ended
        self._queue: list[asyncio.Future[None]] = []  # flights that wait for a reader
        self._asked_bytes = 0  # of reads under way and waiting

    def close(self) -> None:
        self._readers.close()

    def may_have(self, key: Key) -> bool:
        on_disk = self._files.catalog.get(key)
        return (
            on_disk is not None
            and on_disk.is_ready
            and not self.breaker.is_resting
            and on_disk.expires_s > self._live.clock.now_s()
        )

    async def bring(self, flight: Flight) -> Outcome:
        """Read the key's entry, unless every client that wants it can encode it sooner.

        Returns the outcome.
        """
        on_disk = self._files.catalog.get(flight.key)
        assert on_disk is not None
        flight.nbytes = on_disk.nbytes
        read_s = self._files.read_time.seconds(on_disk.nbytes + self._asked_bytes)
        if not flight.is_needed and read_s >= on_disk.cost_s:
            self._counters.skipped["slower"] += 1
            return Outcome.SLOWER
        patience_s = PATIENCE_S + on_disk.nbytes / SLOWEST_BYTES_PER_S
        self._asked_bytes += on_disk.nbytes
        try:
            if not await self._take_reader(patience_s):
                self._counters.skipped["waiting"] += 1
                return Outcome.LATE
            return await self._read(on_disk, patience_s)
        finally:
            self._asked_bytes -= on_disk.nbytes

    # -- readers -------------------------------------------------------------------------------

    async def _take_reader(self, patience_s: float) -> bool:
        """Wait for a thread, to be given back later. False: none came in time."""
        asked_s = self._live.clock.now_s()
        if self._free:
            self._free -= 1
            return True
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            with Stage("disk queue", self._live.clock):
                await _wait_for(turn, patience_s)
        except asyncio.CancelledError:
            if turn.done():
                self._give_reader_back()
            raise
        finally:
            if not turn.done():
                self._queue.remove(turn)
                if self._ended_s < asked_s:
                    self.breaker.failed("slow", "no read has ended meanwhile")
        return turn.done()

    def _give_reader_back(self) -> None:
        self._ended_s = self._live.clock.now_s()
        if self._queue:
            self._queue.pop(0).set_result(None)
        else:
            self._free += 1

    # -- one read ------------------------------------------------------------------------------

    async def _read(self, on_disk: OnDisk, patience_s: float) -> Outcome:
        """Read into a reservation, verify and commit, on a thread that was taken; the outcome."""
        key, nbytes, turns = on_disk.key, on_disk.nbytes, self._live.turns
        reserved: Reserved | None = None
        ended: asyncio.Future[Header] | None = None
        is_wanted = True
        try:
            with Stage("turns", self._live.clock):
                await turns.any()
            unknown = Content("uint8", (nbytes,), nbytes)
            outcome = await self._live.reserve(self._session, key, unknown, turns.pace())
            if isinstance(outcome, AlreadyStored | BeingWritten):
                return Outcome.LOCAL
            if not isinstance(outcome, Reserved):
                return Outcome.NO_ROOM
            reserved, begun_s = outcome, self._live.clock.now_s()
            pool, offset, _ = reserved.extent
            # Whole blocks, as an extent has whole granules.
            target = self._pools[pool].writable.view(offset, rounded(nbytes))
            read = self._files.directory.read
            ended = self._readers.do(
                lambda: read(file_name(key), key, nbytes, target, lambda: is_wanted)
            )
            with Stage("disk", self._live.clock):
                await _wait_for(ended, patience_s)
            if not ended.done():
                self.breaker.failed("slow", f"{nbytes} bytes take too long")
                return Outcome.LATE
            header = ended.result()
            now_s = self._live.clock.now_s()
            is_over = on_disk.is_erased or on_disk.expires_s <= now_s
            if is_over or self._files.catalog.get(key) is not on_disk:
                return Outcome.MISSING  # an erasure cannot know of what has left the catalog
            entry, reserved = reserved.entry, None
            as_read = header.checksum, header.content, math.inf, now_s - on_disk.created_s
            done = self._live.commit(self._session, entry, *as_read)
            assert isinstance(done, Committed)
            self._note(on_disk, self._live.clock.now_s() - begun_s)
            return Outcome.READ
        except (CorruptFile, FileNotFoundError) as error:
            if self._files.catalog.get(key) is not on_disk:
                return Outcome.MISSING  # removed for room meanwhile
            self._counters.failures["corrupt"] += 1
            name = shown(key.mm_hash)
            logger.warning("%s on disk is removed: %s", name, error, extra=key._asdict())
            self._files.remove(on_disk)
            return Outcome.CORRUPT
        except OSError as error:
            self.breaker.failed("read", error)
            return Outcome.FAILED
        except asyncio.CancelledError:  # its flight is late
            if ended is not None and not ended.done():
                self.breaker.failed("slow", f"{nbytes} bytes take too long")
            raise
        finally:
            is_wanted = False
            self._over(reserved, ended)

    def _note(self, on_disk: OnDisk, seconds: float) -> None:
        self.breaker.worked()
        self._files.read_time.learn(on_disk.nbytes, seconds)
        self._files.catalog.use(on_disk, self._live.clock.now_s())
        self._counters.reads += 1
        self._counters.read_bytes += on_disk.nbytes
        self._counters.read_s += seconds

    def _over(self, reserved: Reserved | None, ended: asyncio.Future[Header] | None) -> None:
        """Give the thread back, and an extent without an entry, once nothing writes there."""
        if ended is None or ended.done():
            self._give_reader_back()
            if reserved is not None:
                self._live.abort(self._session, reserved.entry)
            return
        ended.add_done_callback(lambda _: self._give_reader_back())
        if reserved is not None:
            entry = reserved.entry
            self._live.abandon(self._session, entry)
            ended.add_done_callback(lambda _: self._live.cache.reclaim(self._session, entry))


async def _wait_for(future: asyncio.Future[Any], patience_s: float) -> None:
    for _ in range(STEPS):
        await asyncio.wait((future,), timeout=patience_s / STEPS)
        if future.done():
            return
