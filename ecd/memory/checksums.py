"""Checksums of stored entries, each computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from ecd.base.checksum import digests, fold
from ecd.core.model.outcomes import Leased
from ecd.core.model.types import EntryId, Extent, Key
from ecd.live.effects import Changes
from ecd.live.live import LiveCache
from ecd_proto.mapped_file import MappedFile

INLINE_BYTES = 1 << 20
"""Entries up to here are hashed on the event loop: it takes less than handing them over."""
PAUSE_S = 0.1
"""How long a new entry may wait for its checksum: puts have priority."""
TURN = 8
"""Small entries hashed before the event loop gets its turn."""
PAGE = 1000


class ReadablePool(Protocol):
    """One pool's memory, for hashing."""

    @property
    def readable(self) -> MappedFile: ...


class Checksums:
    """Computes checksums, once each, and keeps them with their entries; one per daemon."""

    def __init__(self, live: LiveCache, pools: Mapping[int, ReadablePool]) -> None:
        """`pools` are all of the cache's, by their numbers."""
        self._live, self._pools = live, pools
        self._hashing: dict[EntryId, asyncio.Future[int]] = {}
        self._followed: Changes | None = None
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="ecd-checksum")

    def of(self, leased: Leased) -> int | Awaitable[int]:
        """The checksum of a leased entry; at once where it is known."""
        if leased.checksum is not None:
            return leased.checksum
        return self._checksum(leased.entry, leased.extent)

    async def follow(self) -> None:
        """Hash entries some time after they are put, in batches, until cancelled."""
        self._followed = self._live.follow_changes()
        while True:
            changes = await self._followed.next(PAUSE_S)
            await self.note_all([key for key, is_stored in changes.items() if is_stored])

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being hashed, and, if puts are followed, earlier puts are hashed."""
        return not self._hashing and (self._followed is None or self._followed.is_idle)

    async def complete(self) -> None:
        """Hash all entries that have no checksum yet."""
        after: EntryId | None = EntryId(0)
        while after is not None:
            entries, after = self._live.cache.views.page(after, PAGE)
            await self.note_all([entry.key for entry in entries if entry.checksum is None])

    async def note_all(self, keys: Sequence[Key]) -> None:
        for number, key in enumerate(keys):
            await self.note(key)
            if number % TURN == 0:
                await self._live.clock.sleep(0)

    async def note(self, key: Key) -> None:
        """Hash the key's entry, if it is stored and has no checksum."""
        info = self._live.cache.views.info(key)
        if info is not None and info.checksum is None:
            checksum = self._checksum(info.entry, info.extent)
            if not isinstance(checksum, int):
                await checksum

    async def compute(self, extent: Extent) -> int:
        """The checksum of the bytes that are there, whatever they are."""
        if extent.nbytes <= INLINE_BYTES:
            await self._live.clock.sleep(0)
            return self._read(extent)
        return await self._hand_over(extent)

    def _hand_over(self, extent: Extent) -> asyncio.Future[int]:
        return asyncio.get_running_loop().run_in_executor(self._hasher, self._read, extent)

    def _read(self, extent: Extent) -> int:
        memory = self._pools[extent.pool].readable
        return fold(digests(memory.view(extent.offset, extent.nbytes)))

    def close(self) -> None:
        self._hasher.shutdown(wait=False, cancel_futures=True)

    def _checksum(self, entry: EntryId, extent: Extent) -> int | Awaitable[int]:
        """The entry's checksum; discarded if the entry is evicted meanwhile."""
        if extent.nbytes <= INLINE_BYTES:
            checksum = self._read(extent)
            self._live.cache.note_checksum(entry, checksum)
            return checksum
        if entry not in self._hashing:
            computing = self._hashing[entry] = self._hand_over(extent)
            computing.add_done_callback(lambda done: self._hashed(entry, done))
        return asyncio.shield(self._hashing[entry])

    def _hashed(self, entry: EntryId, done: asyncio.Future[int]) -> None:
        del self._hashing[entry]
        if not done.cancelled():
            self._live.cache.note_checksum(entry, done.result())
