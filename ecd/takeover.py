"""Taking over what the life before had stored.

Its rows become reservations at the start, so that nothing else is stored in their places. Each is
committed when its bytes are what its row says, and aborted otherwise: whoever asks for one has it
looked at first, the others are in the background. What says nothing of its bytes is committed at
once: there is nothing to compare, and a daemon after this one must find it in this one's index.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from ecd.cluster.checksum import Checksums
from ecd.core.cache import Cache
from ecd.core.types import (
    Aborted,
    Committed,
    EntryId,
    Key,
    LimitReached,
    Wakeup,
)
from ecd.memory.before import Before, Left

logger = logging.getLogger(__name__)


class Takeover:
    """One per daemon that found something."""

    def __init__(
        self,
        cache: Cache,
        checksums: Checksums,
        before: Before,
        deliver: Callable[[Iterable[Wakeup]], None],
        note_unseen: Callable[[int], None],
    ) -> None:
        """Reserve the entries' places. `note_unseen` is told how many nobody has looked at."""
        self._cache, self._checksums, self._before = cache, checksums, before
        self._deliver, self._note_unseen = deliver, note_unseen
        session = cache.open_session()
        assert not isinstance(session, LimitReached)
        self._session = session
        self._kept = 0
        self._unproved: list[Key] = []
        left, self._dropped = before.entries()
        adopted: list[tuple[EntryId, Left]] = []
        for each in left:
            entry = cache.adopt(session, each.key, each.content, each.extent)
            if entry is None:
                self._dropped += 1
            else:
                adopted.append((entry, each))
        adopted.sort(key=lambda pair: (pair[1].life, pair[1].put, pair[1].number))  # as stored
        self._unseen: dict[Key, tuple[EntryId, Left]] = {}
        for entry, each in adopted:
            if each.proof:
                self._unseen[each.key] = entry, each
            else:
                self._commit(entry, None)
                self._unproved.append(each.key)
        self._looks: dict[Key, asyncio.Task[None]] = {}
        self._over = False
        note_unseen(len(self._unseen))

    async def run(self) -> None:
        """Look at everything that nobody has asked for before."""
        started_s = time.monotonic()
        logger.info("%d entries of the last daemon are to be looked at", len(self._unseen))
        await self.settle(None)
        self._before.remove()
        self._cache.leave_session(self._session)
        self._cache.close_session(self._session)
        self._over = True
        await self._checksums.note_all(self._unproved)
        logger.info(
            "took over %d entries of the last daemon, dropped %d in doubt, in %.1f s",
            *(self._kept, self._dropped, time.monotonic() - started_s),
        )

    async def settle(self, keys: Sequence[Key] | None) -> None:
        """Look at these, or at all, now."""
        if self._over:
            return
        if keys is not None:
            for key in keys:
                await self._look(key)
            return
        while self._unseen or self._looks:
            await self._look(next(iter(self._unseen or self._looks)))

    async def _look(self, key: Key) -> None:
        if key in self._unseen:
            entry, left = self._unseen.pop(key)
            self._looks[key] = asyncio.ensure_future(self._verify(entry, left))
        if key in self._looks:
            await asyncio.shield(self._looks[key])

    async def _verify(self, entry: EntryId, left: Left) -> None:
        try:
            checksum = await self._checksums.compute(left.extent)
            if checksum == left.proof:
                self._commit(entry, checksum)
                return
            outcome = self._cache.abort(self._session, entry)
            assert isinstance(outcome, Aborted)
            self._dropped += 1
            logger.warning("the bytes of %s are not what they were: dropped", left.key.mm_hash)
            self._deliver(outcome.woken)
        finally:
            del self._looks[left.key]
            self._note_unseen(len(self._unseen) + len(self._looks))

    def _commit(self, entry: EntryId, checksum: int | None) -> None:
        outcome = self._cache.commit(self._session, entry, time.monotonic(), checksum)
        assert isinstance(outcome, Committed)
        self._kept += 1
        self._deliver(outcome.woken)
