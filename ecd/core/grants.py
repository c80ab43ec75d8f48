"""Memory given to writers ahead of need: allocated, but no entry's as yet."""

from __future__ import annotations

from collections.abc import Iterable

from ecd.core.allocator import GRANULE_BYTES, Allocator
from ecd.core.types import Extent, SessionId


class Grants:
    """What each session may still turn into entries, as pieces of the pool.

    A session has one grant that it takes from, and what is left of those before it that it had
    begun to write to: some pieces, so that going through them all is cheap.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.nbytes = 0
        self._allocator = allocator
        self._pieces: dict[SessionId, dict[int, int]] = {}  # start: end

    def __contains__(self, session: SessionId) -> bool:
        return session in self._pieces

    def sessions(self) -> list[SessionId]:
        return list(self._pieces)

    def add(self, session: SessionId, extent: Extent) -> None:
        start, end = self._allocator.span(extent.offset)
        self._pieces.setdefault(session, {})[start] = end
        self.nbytes += end - start

    def room(self, session: SessionId, nbytes: int) -> int:
        """For how many extents of so many bytes, whole granules."""
        return sum((e - s) // nbytes for s, e in self._pieces.get(session, {}).items())

    def take(self, session: SessionId, extent: Extent) -> bool:
        """Cut an extent out for an entry. False: it is not in the session's pieces."""
        if extent.pool != 0 or extent.offset % GRANULE_BYTES:
            return False
        start, end = extent.offset, extent.offset + self._allocator.rounded_bytes(extent.nbytes)
        for piece, piece_end in self._pieces.get(session, {}).items():
            if piece <= start and end <= piece_end:
                self._cut(session, piece, start, end)
                return True
        return False

    def give_back(self, session: SessionId, keep: Iterable[Extent] = ()) -> None:
        """Free all that the session was granted, but for what it has begun to write to."""
        kept = [extent for extent in keep if self.take(session, extent)]
        for start, end in self._pieces.pop(session, {}).items():
            self.nbytes -= end - start
            self._allocator.free(Extent(0, start, end - start))
        for extent in kept:
            self.add(session, extent)

    def _cut(self, session: SessionId, piece: int, start: int, end: int) -> None:
        pieces = self._pieces[session]
        piece_end = pieces.pop(piece)
        if piece < start:
            self._allocator.split(piece, start)
            pieces[piece] = start
        if end < piece_end:
            self._allocator.split(start, end)
            pieces[end] = piece_end
        if not pieces:
            del self._pieces[session]
        self.nbytes -= end - start

    def check(self) -> None:
        """Raise AssertionError unless every piece is allocated as one. O(n)."""
        spans = [span for pieces in self._pieces.values() for span in pieces.items()]
        assert all(self._pieces.values()), "an empty group was kept"
        assert all(self._allocator.span(start) == (start, end) for start, end in spans)
        assert self.nbytes == sum(end - start for start, end in spans)
