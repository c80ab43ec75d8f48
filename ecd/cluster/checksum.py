"""What proves that an entry arrived as it left: XXH3 (Collet, 64 bits), in pieces.

An entry is hashed in pieces, so that what has arrived is hashed while the rest is on its way.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from ecd.core.cache import Cache
from ecd.core.types import EntryId, Extent, Key, Leased
from ecd_proto.mapping import Mapping

PIECE_BYTES = 1 << 20
"""Part of the contract between daemons (peer.proto, PeerLeased.checksum)."""
INLINE_BYTES = 1 << 20
"""Entries up to here are hashed on the event loop: it takes less than handing them over."""
PAUSE_S = 0.1
"""How long what was put may wait for its checksum: puts go first."""
TURN = 8
"""Small entries hashed before the event loop gets its turn."""
PAGE = 1000


def digests(data: memoryview) -> list[int]:
    """The XXH3 of each piece of PIECE_BYTES, the last one shorter."""
    return [
        xxhash.xxh3_64_intdigest(data[start : start + PIECE_BYTES])
        for start in range(0, len(data), PIECE_BYTES)
    ]


def fold(pieces: Sequence[int]) -> int:
    """The checksum of a whole entry, from the digests of its pieces in order."""
    folded: int = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(pieces)}Q", *pieces))
    return folded


class Checksums:
    """Of what is stored here, computed once each; one per daemon, on its event loop."""

    def __init__(self, cache: Cache, memory: Mapping) -> None:
        self._cache, self._memory = cache, memory
        self._hashing: dict[EntryId, asyncio.Future[int]] = {}
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="ecd-checksum")

    def of(self, leased: Leased) -> int | Awaitable[int]:
        """Of a leased entry; at once where it is known."""
        if leased.checksum is not None:
            return leased.checksum
        return self._checksum(leased.entry, leased.extent)

    async def follow(self, stored: asyncio.Event) -> None:
        """Note those of what is put, in batches behind it, until cancelled."""
        self._cache.take_changes()  # from here on they are noted
        while True:
            await stored.wait()
            await asyncio.sleep(PAUSE_S)
            stored.clear()
            await self.note_all([key for key, is_ in self._cache.take_changes().items() if is_])

    async def complete(self) -> None:
        """Note those of whatever has none yet."""
        after: EntryId | None = EntryId(0)
        while after is not None:
            entries, after = self._cache.page(after, PAGE)
            await self.note_all([entry.key for entry in entries if entry.checksum is None])

    async def note_all(self, keys: Sequence[Key]) -> None:
        for number, key in enumerate(keys):
            await self.note(key)
            if number % TURN == 0:
                await asyncio.sleep(0)

    async def note(self, key: Key) -> None:
        """Make sure that what is stored for the key has one."""
        info = self._cache.look(key)
        if info is not None and info.checksum is None:
            checksum = self._checksum(info.entry, info.extent)
            if not isinstance(checksum, int):
                await checksum

    async def compute(self, extent: Extent) -> int:
        """Of whatever lies there."""
        if extent.nbytes <= INLINE_BYTES:
            await asyncio.sleep(0)
            return self._read(extent)
        return await self._hand_over(extent)

    def _hand_over(self, extent: Extent) -> asyncio.Future[int]:
        return asyncio.get_running_loop().run_in_executor(self._hasher, self._read, extent)

    def _read(self, extent: Extent) -> int:
        return fold(digests(self._memory.view(extent.offset, extent.nbytes)))

    def close(self) -> None:
        self._hasher.shutdown(wait=False, cancel_futures=True)

    def _checksum(self, entry: EntryId, extent: Extent) -> int | Awaitable[int]:
        """Of an entry; what it turns out to be is forgotten if the entry has gone meanwhile."""
        if extent.nbytes <= INLINE_BYTES:
            checksum = self._read(extent)
            self._cache.note_checksum(entry, checksum)
            return checksum
        if entry not in self._hashing:
            computing = self._hashing[entry] = self._hand_over(extent)
            computing.add_done_callback(lambda done: self._hashed(entry, done))
        return asyncio.shield(self._hashing[entry])

    def _hashed(self, entry: EntryId, done: asyncio.Future[int]) -> None:
        del self._hashing[entry]
        if not done.cancelled():
            self._cache.note_checksum(entry, done.result())
