"""Grants: memory allocated to sessions ahead of need, for puts that make no call."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ecd.core.model.block import Block
from ecd.core.model.board import Board
from ecd.core.model.types import Extent, SessionId
from ecd.core.pool.allocator import Allocator

REVOKED_AT_A_TIME = 32
"""Grants taken back by one call: each takes some 20 us, and every session may have one."""


class Grants:
    """The pieces of one pool that each session may still turn into entries.

    A session has at most one open grant, where it may begin entries. Of its earlier grants it
    keeps the extents that it had begun to write.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.nbytes = 0
        self._allocator = allocator
        self._open: dict[SessionId, None] = {}  # sessions with an open grant, the oldest first
        self._pieces: dict[SessionId, dict[Block, None]] = {}

    @property
    def are_open(self) -> bool:
        """Whether any session has an open grant in this pool."""
        return bool(self._open)

    def grant(self, session: SessionId, pieces: Iterable[Block]) -> None:
        """Open a grant of allocated pieces; the session has no other open grant."""
        self._open[session] = None
        for piece in pieces:
            self._add(session, piece)

    def room(self, session: SessionId, nbytes: int) -> int:
        """How many extents of `nbytes`, whole granules, the session's pieces can hold."""
        return sum(piece.nbytes // nbytes for piece in self._pieces.get(session, ()))

    def nbytes_of(self, session: SessionId) -> int:
        return sum(piece.nbytes for piece in self._pieces.get(session, ()))

    def take(self, session: SessionId, extent: Extent) -> Block | None:
        """Cut an extent out for an entry; None if it is not inside one of the session's pieces."""
        span = self._span(session, extent)
        return None if span is None else self._cut(session, *span)

    def give_back(self, session: SessionId, begun: Iterable[Extent] = ()) -> None:
        """Close the session's grant and free its pieces, but for what it has `begun` to write.

        Extents that overlap are kept as one piece: at most one of them is a live claim, the others
        are stale or hostile, and freeing a stale one must not free part of the live one.
        """
        self._open.pop(session, None)
        if session not in self._pieces:
            return
        spans = sorted(span for extent in begun if (span := self._span(session, extent)))
        kept = [self._cut(session, *span) for span in _united(spans)]
        for piece in self._pieces.pop(session, ()):
            self.nbytes -= piece.nbytes
            self._allocator.free(piece)
        for block in kept:
            self._add(session, block)

    def revoke(self, board: Board) -> bool:
        """Close some open grants, the oldest first; returns whether none is left open."""
        sessions = list(islice(self._open, REVOKED_AT_A_TIME))
        begun = board.revoke(sessions) if sessions else []
        for session, extents in zip(sessions, begun, strict=True):
            self.give_back(session, extents)
        return not self._open

    def _add(self, session: SessionId, piece: Block) -> None:
        self._pieces.setdefault(session, {})[piece] = None
        self.nbytes += piece.nbytes

    def _span(self, session: SessionId, extent: Extent) -> tuple[int, int] | None:
        """The extent's first granule and its end; None if none of the pieces contains it."""
        allocator = self._allocator
        start, misplaced = divmod(extent.offset, allocator.granule_bytes)
        end = start + allocator.rounded_bytes(extent.nbytes) // allocator.granule_bytes
        if extent.pool != allocator.pool_number or misplaced:
            return None
        pieces = self._pieces.get(session, ())
        return (start, end) if any(p.start <= start and end <= p.end for p in pieces) else None

    def _cut(self, session: SessionId, start: int, end: int) -> Block:
        """Take granules out of the piece that contains them, and keep the rest of it."""
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
        """Raise AssertionError unless every piece is allocated and has no entry. O(n)."""
        pieces = [piece for pieces in self._pieces.values() for piece in pieces]
        assert all(self._pieces.values()), "an empty group was kept"
        assert not any(piece.is_free or piece.owner for piece in pieces)
        assert self.nbytes == sum(piece.nbytes for piece in pieces)


def _united(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted spans with overlapping ones merged; spans that only touch may lie in two pieces."""
    united: list[tuple[int, int]] = []
    for start, end in spans:
        if united and start < united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((start, end))
    return united
