"""The disk tier: entries are written before memory evicts them, and read back on a miss.

A disk that fails, hangs or is full costs the tier alone: after failures reads, or writes, rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ecd.core.model.types import Selection
from ecd.live.live import LiveCache
from ecd.memory.disk.disk_dir import DiskDir
from ecd.memory.disk.disk_files import DiskFiles
from ecd.memory.disk.disk_reads import DiskReads, WritablePool
from ecd.memory.disk.disk_writes import DiskWrites
from ecd_proto.v1 import cache_pb2 as pb


class DiskTier:
    """The entries on disk of one daemon, on its event loop. `reads` is a source of flights."""

    def __init__(
        self,
        live: LiveCache,
        directory: DiskDir,
        pools: Mapping[int, WritablePool],
        nbytes: int,
        write_bytes_per_s: int,
    ) -> None:
        """`pools` are all of the cache's that hold no copies, by their numbers."""
        self._files = DiskFiles(live, directory, nbytes)
        self.reads = DiskReads(live, self._files, pools)
        self._writes = DiskWrites(live, self._files, pools, write_bytes_per_s)

    async def run(self) -> None:
        """Find the existing files, then write ahead, until cancelled."""
        await self._files.find()
        await asyncio.gather(self._writes.run(), self._files.expire())

    def close(self) -> None:
        """Stop; reads and writes under way end by themselves."""
        for part in (self.reads, self._writes, self._files):
            part.close()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to find, to write or to remove."""
        return self._files.is_idle and self._writes.is_idle

    async def erase(self, selection: Selection, dry_run: bool) -> tuple[Mapping[str, int], int]:
        """Erase the selected: the bytes of each by its file's name, and how many files are left."""
        return await self._files.erase(selection, dry_run)

    async def reapply_rules(self) -> None:
        """Apply the rules of the cache, which have changed, to the entries on disk."""
        await self._files.reapply_rules()

    def status(self) -> pb.DiskStatus:
        catalog, writes = self._files.catalog, self._writes.breaker
        return pb.DiskStatus(
            path=str(self._files.directory.path),
            pool_bytes=catalog.nbytes,
            used_bytes=catalog.used_bytes,
            entries=len(catalog),
            reads_rest=self.reads.breaker.is_resting,
            writes_rest=writes.is_resting,
            is_full=writes.is_resting and writes.cause == "full",
            write_bytes_per_s=self._writes.budget.bytes_per_s,
            **vars(self._files.counters),
        )
