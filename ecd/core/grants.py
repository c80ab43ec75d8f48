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

    def add(self, session: SessionId, piece: Block) -> None:
        self._pieces.setdefault(session, {})[piece] = None
        self.nbytes += piece.nbytes

    def room(self, session: SessionId, nbytes: int) -> int:
        """For how many extents of so many bytes, whole granules."""
        return sum(piece.nbytes // nbytes for piece in self._pieces.get(session, ()))

    def take(self, session: SessionId, extent: Extent) -> Block | None:
        """Cut an extent out for an entry. None: it is not in the session's pieces."""
        span = self._span(session, extent)
        return None if span is None else self._cut(session, *span)

    def give_back(self, session: SessionId, keep: Iterable[Extent] = ()) -> None:
        """Free all that the session was granted, but for what it has begun to write to.

        Claims may overlap: one of them is stale, or the client is hostile. What overlapping claims
        cover together stays one piece, so that a stale claim frees nothing of a live one.
        """
        spans = sorted(span for extent in keep if (span := self._span(session, extent)))
        kept = [self._cut(session, *span) for span in _united(spans)]
        for piece in self._pieces.pop(session, ()):
            self.nbytes -= piece.nbytes
            self._allocator.free(piece)
        for block in kept:
            self.add(session, block)

    def _span(self, session: SessionId, extent: Extent) -> tuple[int, int] | None:
        """Where it starts and ends, in granules. None: it lies in none of the session's pieces."""
        start, offset = divmod(extent.offset, GRANULE_BYTES)
        end = start + self._allocator.rounded_bytes(extent.nbytes) // GRANULE_BYTES
        pieces = self._pieces.get(session, ())
        if extent.pool or offset or not any(p.start <= start and end <= p.end for p in pieces):
            return None
        return start, end

    def _cut(self, session: SessionId, start: int, end: int) -> Block:
        pieces = self._pieces[session]
        piece = next(p for p in pieces if p.start <= start and end <= p.end)
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


def _united(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted spans, those that overlap as one; spans that only touch may lie in two pieces."""
    united: list[tuple[int, int]] = []
    for start, end in spans:
        if united and start < united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((start, end))
    return united
