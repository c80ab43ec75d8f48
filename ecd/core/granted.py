"""Puts without a call: entries that clients write in memory that was granted to them."""

from __future__ import annotations

from ecd.core.entries import Entries
from ecd.core.evictor import Evictor
from ecd.core.model.outcomes import (
    AlreadyStored,
    BeingWritten,
    Commitment,
    Committed,
    NotReserved,
)
from ecd.core.model.types import Content, Extent, Key, SessionId
from ecd.core.pins import Pins
from ecd.core.pool.pool import Pool
from ecd.core.readers import Readers
from ecd.core.writers import Writers


class Granted:
    """Grants memory to sessions, and stores what they have written there."""

    def __init__(
        self, entries: Entries, pins: Pins, evictor: Evictor, readers: Readers, writers: Writers
    ) -> None:
        self._entries, self._pins, self._evictor = entries, pins, evictor
        self._readers, self._writers = readers, writers

    def grant(
        self, session: SessionId, nbytes: int, least: int, most: int, now_s: float, pool: Pool
    ) -> bool:
        """Grant memory for up to `most` entries of `nbytes`, in place of the session's last grant.

        Takes free memory, and evicts a few entries for the first `least`. The memory goes back
        when the session ends, or when room is needed. Returns False, and changes nothing, if
        there is none, or if room is being made for a reservation.
        """
        return self._writers.grant(pool, session, nbytes, least, most, now_s)

    def put(
        self, session: SessionId, key: Key, content: Content, extent: Extent, now_s: float
    ) -> Commitment | AlreadyStored | BeingWritten:
        """Make an entry of an extent that the session, open or leaving, wrote in its grants."""
        pool = self._entries.pool(extent.pool)
        block = None if pool is None else pool.grants.take(session, extent)
        if pool is None or block is None:
            return NotReserved()
        self._evictor.end_late(key, now_s)
        refusal = self._writers.taken(key, pool)
        if refusal is not None:
            self._pins.retire(self._writers.discard_granted(session, key, content, block))
            return refusal
        entry = self._writers.publish_granted(session, key, content, block, now_s)
        self._pins.take(entry)
        return Committed(self._readers.wake(entry, now_s))

    def refuse(self, session: SessionId, key: Key, content: Content, extent: Extent) -> None:
        """Retire an extent that the session wrote in its grants: a client may read it already."""
        pool = self._entries.pool(extent.pool)
        block = None if pool is None else pool.grants.take(session, extent)
        if block is not None:
            self._pins.retire(self._writers.discard_granted(session, key, content, block))

    def room(self, session: SessionId, nbytes: int, pool: Pool) -> int:
        """How many entries of `nbytes` the session's grants in the pool can hold."""
        return pool.grants.room(session, pool.rounded_bytes(nbytes))
