"""Writing ahead: entries are written to disk shortly before memory evicts them.

A write holds no lease. It reads the entry's bytes from the pool, and the file counts only if the
entry is still stored afterwards: no extent is reused before its entry is evicted. So a write moves
no entry in the policy's order, and a slow disk keeps no memory.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping

from ecd.core.demotion import Budget, next_demotions, rounded
from ecd.core.model.types import EntryInfo
from ecd.live.live import LiveCache
from ecd.memory.disk.disk_dir import FULL
from ecd.memory.disk.disk_files import DiskFiles
from ecd.memory.disk.disk_format import Header, file_name
from ecd.memory.disk.disk_limits import Breaker
from ecd.memory.disk.disk_reads import WritablePool
from ecd.memory.disk.threads import Threads

WRITERS = 2
PAUSE_S = 0.05
"""How long changes are collected, and the budget is waited for, before the next look."""


class DiskWrites:
    """All writes of the disk tier."""

    def __init__(
        self,
        live: LiveCache,
        files: DiskFiles,
        pools: Mapping[int, WritablePool],
        bytes_per_s: int,
    ) -> None:
        self._live, self._files, self._pools = live, files, pools
        self._counters = files.counters
        self.breaker = Breaker("writes to disk", files.counters, live.clock)
        self.budget = Budget(bytes_per_s, live.clock.now_s())
        self._writers = Threads(WRITERS, "ecd-disk-write")
        self._has_changed = asyncio.Event()
        self._changes = live.follow_changes()
        self._is_writing = False

    def close(self) -> None:
        self._writers.close()

    @property
    def is_idle(self) -> bool:
        """Whether all changes are examined, and all entries chosen after them are written."""
        is_behind = self._is_writing or self._has_changed.is_set()
        return self._changes.is_idle and not is_behind

    async def run(self) -> None:
        """Write ahead, until cancelled."""
        await asyncio.gather(self._follow(), self._write_ahead())

    async def _follow(self) -> None:
        """Count evictions from memory, and wake the writer."""
        while True:
            for key, is_stored in (await self._changes.next(PAUSE_S)).items():
                on_disk = None if is_stored else self._files.catalog.get(key)
                is_kept = on_disk is not None and on_disk.expires_s > self._live.clock.now_s()
                self._counters.kept += is_kept
            lost = self._live.cache.views.evicted_for_room - self._counters.kept
            self._counters.lost = max(self._counters.lost, lost)
            self._has_changed.set()

    async def _write_ahead(self) -> None:
        while True:
            self._is_writing = False
            await self._has_changed.wait()
            self._is_writing = True
            self._has_changed.clear()
            while await self._write_some():
                pass

    async def _write_some(self) -> bool:
        """Write some of the entries that memory evicts next, the most valuable first.

        False: there is nothing to do.
        """
        if self.breaker.is_resting:
            return False
        chosen = next_demotions(
            self._live.cache.views, self._files.catalog, self._files.read_time.seconds
        )
        for start in range(0, len(chosen), WRITERS):
            some = chosen[start : start + WRITERS]
            wait_s = self.budget.wait_s(any(info.hits for info in some), self._live.clock.now_s())
            if wait_s > 0.0:
                self._counters.skipped["budget"] += 1
                await self._live.clock.sleep(min(wait_s, PAUSE_S))
                break  # others may be next by now
            await asyncio.gather(*map(self._write, some))
        return bool(chosen)

    async def _write(self, info: EntryInfo) -> None:
        """Write an entry, and keep the file if the entry stayed stored meanwhile."""
        key, content, begun_s = info.key, info.content, self._live.clock.now_s()
        if self.breaker.is_resting or not self._is_stored(info):
            return
        file_bytes = len(Header(key, content, 0).pack()) + rounded(content.nbytes)
        self.budget.take(file_bytes)
        self._counters.written_bytes += file_bytes
        pool, offset, nbytes = info.extent
        put_s = info.created_s if info.terms is None else info.terms.put_s
        memory = self._pools[pool].readable.view(offset, nbytes)
        age_s = self._live.clock.now_s() - put_s
        write = self._files.directory.write
        try:
            checksum = await self._writers.do(
                functools.partial(write, file_name(key), key, content, memory, age_s)
            )
            await self._files.make_room(file_bytes)  # and no turn passes until it is taken
            if not self._is_stored(info):
                self._counters.skipped["evicted"] += 1
                await self._files.discard(key)
                return
            if info.checksum is None:
                self._live.cache.note_checksum(info.entry, checksum)
            await self._files.publish(key, content, file_bytes, self._live.clock.now_s() - put_s)
        except OSError as error:
            self.breaker.failed("full" if error.errno in FULL else "write", error)
            return
        self.breaker.worked()
        self._counters.writes += 1
        self._counters.write_s += self._live.clock.now_s() - begun_s

    def _is_stored(self, info: EntryInfo) -> bool:
        """Whether this very entry is stored, and so has been all the time, its bytes unchanged."""
        now = self._live.cache.views.info(info.key)
        return now is not None and (now.entry, now.extent) == (info.entry, info.extent)
