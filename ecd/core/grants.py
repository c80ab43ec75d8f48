"""Memory given to writers ahead of need: allocated, but no entry's as yet."""

from __future__ import annotations

from collections.abc import Iterable

from ecd.core.allocator import GRANULE_BYTES, Allocator, Block
from ecd.core.types import Extent, SessionId


class Grants:
    """What each session may still turn into entries, as pieces of the pool.

    A session has one grant that it takes from, and what is left of those before it that it had
    begun to write to: some pieces, so that going through them all is cheap.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.nbytes = 0
        self._allocator = allocator
        self._pieces: dict[SessionId, dict[Block, None]] = {}

    def __contains__(self, session: SessionId) -> bool:
        return session in self._pieces

    def sessions(self) -> list[SessionId]:
        return list(self._pieces)

    def add(self, session: SessionId, piece: Block) -> None:
        self._pieces.setdefault(session, {})[piece] = None
        self.nbytes += piece.nbytes

    def room(self, session: SessionId, nbytes: int) -> int:
        """For how many extents of so many bytes, whole granules."""
        return sum(piece.nbytes // nbytes for piece in self._pieces.get(session, ()))

    def take(self, session: SessionId, extent: Extent) -> Block | None:
        """Cut an extent out for an entry. None: it is not in the session's pieces."""
        if extent.pool != 0 or extent.offset % GRANULE_BYTES:
            return None
        start = extent.offset // GRANULE_BYTES
        end = start + self._allocator.rounded_bytes(extent.nbytes) // GRANULE_BYTES
        for piece in self._pieces.get(session, ()):
            if piece.start <= start and end <= piece.end:
                return self._cut(session, piece, start, end)
        return None

    def give_back(self, session: SessionId, keep: Iterable[Extent] = ()) -> None:
        """Free all that the session was granted, but for what it has begun to write to."""
        kept = [self.take(session, extent) for extent in keep]
        for piece in self._pieces.pop(session, ()):
            self.nbytes -= piece.nbytes
            self._allocator.free(piece)
        for block in kept:
            if block is not None:
                self.add(session, block)

    def _cut(self, session: SessionId, piece: Block, start: int, end: int) -> Block:
        pieces = self._pieces[session]
        del pieces[piece]
        wanted = piece
        if piece.start < start:
            wanted = self._allocator.split(piece, start)
            pieces[piece] = None
        if end < wanted.end:
            pieces[self._allocator.split(wanted, end)] = None
        if not pieces:
            del self._pieces[session]
        self.nbytes -= wanted.nbytes
        return wanted

    def check(self) -> None:
        """Raise AssertionError unless every piece is allocated, and no entry's. O(n)."""
        pieces = [piece for pieces in self._pieces.values() for piece in pieces]
        assert all(self._pieces.values()), "an empty group was kept"
        assert not any(piece.is_free or piece.owner for piece in pieces)
        assert self.nbytes == sum(piece.nbytes for piece in pieces)
