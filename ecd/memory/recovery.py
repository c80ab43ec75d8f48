"""Recovery of the entries that earlier daemons had stored.

At the start their places are reserved, so that nothing else is stored there. Each reservation is
committed when its bytes have the checksum in its row, and aborted otherwise: at once if a client
asks for the key, in the background if not. An entry without a checksum is committed unseen: there
is nothing to compare, and the daemon after this one must find it in this one's index.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ecd.core.model.outcomes import Committed, LimitReached
from ecd.core.model.types import EntryId, Key
from ecd.live.live import LiveCache
from ecd.memory.checksums import Checksums
from ecd.memory.leftovers import LeftoverEntry, Leftovers
from ecd.memory.shared_index import SharedIndex
from ecd_proto.contract import count_text, shown

logger = logging.getLogger(__name__)


class Recovery:
    """Verifies leftovers and commits the good ones; one per daemon that found some."""

    def __init__(
        self, live: LiveCache, checksums: Checksums, leftovers: Leftovers, index: SharedIndex
    ) -> None:
        """Reserve the entries' places, before anything else is stored."""
        self._live, self._checksums = live, checksums
        self._leftovers, self._index = leftovers, index
        session = live.cache.open_session()
        assert not isinstance(session, LimitReached)
        self._session = session
        self._kept = 0
        self._unhashed: list[Key] = []
        found, self._dropped = leftovers.entries()
        reserved: list[tuple[EntryId, LeftoverEntry]] = []
        for each in found:
            entry = live.cache.recover(session, each.key, each.content, each.extent, each.put)
            if entry is None:
                self._dropped += 1
            else:
                reserved.append((entry, each))
        reserved.sort(key=lambda pair: (pair[1].generation, pair[1].put, pair[1].number))
        self._unseen: dict[Key, tuple[EntryId, LeftoverEntry]] = {}
        for entry, each in reserved:  # in the order in which they were stored
            if each.checksum:
                self._unseen[each.key] = entry, each
            else:
                self._commit(entry, None)
                self._unhashed.append(each.key)
        self._verifying: dict[Key, asyncio.Task[None]] = {}
        self._is_over = False
        self.is_done = False
        index.note_unseen(len(self._unseen))
        index.note_taken()
        index.begin_counting(leftovers.uses())

    async def run(self) -> None:
        """Verify leftovers that no client asks for, then remove their files."""
        started_s = self._live.clock.now_s()
        logger.info("%s of the last daemon to verify", count_text(len(self._unseen), "entry"))
        await self.settle(None)
        self._leftovers.remove()
        self._live.leave_session(self._session)
        self._live.close_session(self._session)
        self._is_over = True
        await self._checksums.note_all(self._unhashed)
        self.is_done = True
        logger.info(
            "took over %s of the last daemon, dropped %d in doubt, in %.1f s",
            count_text(self._kept, "entry"),
            self._dropped,
            self._live.clock.now_s() - started_s,
        )

    async def settle(self, keys: Sequence[Key] | None) -> None:
        """Verify these keys, or all, now."""
        if self._is_over:
            return
        if keys is not None:
            for key in keys:
                await self._settle(key)
            return
        while self._unseen or self._verifying:
            await self._settle(next(iter(self._unseen or self._verifying)))

    async def _settle(self, key: Key) -> None:
        if key in self._unseen:
            entry, leftover = self._unseen.pop(key)
            self._verifying[key] = asyncio.ensure_future(self._verify(entry, leftover))
        if key in self._verifying:
            await asyncio.shield(self._verifying[key])

    async def _verify(self, entry: EntryId, leftover: LeftoverEntry) -> None:
        try:
            checksum = await self._checksums.compute(leftover.extent)
            if checksum == leftover.checksum:
                self._commit(entry, checksum)
                return
            self._live.abort(self._session, entry)
            self._dropped += 1
            name, about = shown(leftover.key.mm_hash), leftover.key._asdict()
            logger.warning("the bytes of %s are not what they were: dropped", name, extra=about)
        finally:
            del self._verifying[leftover.key]
            self._index.note_unseen(len(self._unseen) + len(self._verifying))

    def _commit(self, entry: EntryId, checksum: int | None) -> None:
        outcome = self._live.commit(self._session, entry, checksum)
        assert isinstance(outcome, Committed)
        self._kept += 1
