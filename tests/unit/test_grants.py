"""The memory of a grant that a session keeps when the rest is taken back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ecd.core.model.block import Block
from ecd.core.model.board import NoBoard
from ecd.core.model.types import Extent, PoolLimits, SessionId
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.grants import REVOKED_AT_A_TIME, Grants
from ecd.core.pool.pool import Pool
from support.examples import draws
from support.reserving import is_one_free_extent

GRANULE_BYTES = 4096
POOL = 5
SESSION = SessionId(1)
PIECES = ((0, 8), (8, 12), (20, 24))
"""In granules; the first two touch."""


def granted() -> tuple[Grants, Allocator]:
    allocator = Allocator(POOL, 32 * GRANULE_BYTES, GRANULE_BYTES)
    grants, pieces = Grants(allocator), []
    for start, end in PIECES:
        extent = Extent(POOL, start * GRANULE_BYTES, (end - start) * GRANULE_BYTES)
        piece = allocator.allocate_at(extent)
        assert piece is not None
        pieces.append(piece)
    grants.grant(SESSION, pieces)
    return grants, allocator


def extent(start: int, length: int) -> Extent:
    return Extent(POOL, start * GRANULE_BYTES, length * GRANULE_BYTES)


def test_a_stale_claim_takes_nothing_from_a_live_put_that_it_overlaps() -> None:
    grants, allocator = granted()
    stale, live = extent(1, 1), extent(0, 2)
    grants.give_back(SESSION, [stale, live])
    assert grants.nbytes == live.nbytes
    assert allocator.allocate(live.nbytes).extent() not in (stale, live)  # type: ignore[union-attr]
    assert grants.take(SESSION, live) is not None
    assert grants.nbytes == 0


claims = st.lists(st.builds(extent, st.integers(0, 26), st.integers(1, 6)), max_size=6)


@draws(100)
@given(claims, claims)
def test_what_is_kept_is_what_claims_within_pieces_cover(
    first: list[Extent], second: list[Extent]
) -> None:
    """Twice in a row, as a grant is followed by another."""
    grants, allocator = granted()
    pieces = [set(range(*piece)) for piece in PIECES]
    for keep in (first, second):
        grants.give_back(SESSION, keep)
        spans = [
            set(range(each.offset // GRANULE_BYTES, (each.offset + each.nbytes) // GRANULE_BYTES))
            for each in keep
        ]
        held = [span for span in spans if any(span <= piece for piece in pieces)]
        kept = set().union(*held)
        assert grants.nbytes == allocator.used_bytes == len(kept) * GRANULE_BYTES
        grants.check()
        allocator.check()
        pieces = _runs(kept, held)
    for each, span in zip(second, spans, strict=True):
        if span in held:
            assert grants.take(SESSION, each) is not None
            break


def _runs(kept: set[int], held: list[set[int]]) -> list[set[int]]:
    """The pieces that overlapping claims make."""
    runs: list[set[int]] = []
    for span in held:
        joined = span.union(*(run for run in runs if run & span))
        runs = [run for run in runs if not run & span] + [joined]
    assert set().union(*runs) == kept
    return runs


class Claims(NoBoard):
    """A board that answers what each session has claimed."""

    def __init__(self, claimed: dict[SessionId, list[Extent]]) -> None:
        self.claimed = claimed
        self.revoked: list[SessionId] = []

    def revoke(self, sessions: Sequence[SessionId]) -> list[list[Extent]]:
        self.revoked += sessions
        return [self.claimed.get(session, []) for session in sessions]


def test_what_was_claimed_outlasts_a_revoked_grant_and_can_still_be_put() -> None:
    grants, allocator = granted()
    board = Claims({SESSION: [extent(2, 3)]})
    assert grants.are_open
    assert grants.revoke(board)
    assert (grants.are_open, grants.nbytes, allocator.used_bytes) == (
        False,
        3 * GRANULE_BYTES,
        3 * GRANULE_BYTES,
    )
    assert grants.take(SESSION, extent(0, 2)) is None, "it was given back"
    assert grants.take(SESSION, extent(2, 3)) is not None
    grants.check()


def test_grants_are_revoked_some_at_a_time_the_oldest_first() -> None:
    sessions = [SessionId(number) for number in range(REVOKED_AT_A_TIME + 5)]
    allocator = Allocator(POOL, len(sessions) * GRANULE_BYTES, GRANULE_BYTES)
    grants, board = Grants(allocator), Claims({})
    for session in sessions:
        piece = allocator.allocate(GRANULE_BYTES)
        assert piece is not None
        grants.grant(session, [piece])
    assert not grants.revoke(board)
    assert board.revoked == sessions[:REVOKED_AT_A_TIME]
    assert grants.nbytes == 5 * GRANULE_BYTES
    assert grants.revoke(board)
    assert is_one_free_extent(allocator)


def test_only_whole_extents_in_a_sessions_own_pieces_are_taken() -> None:
    grants, _ = granted()
    others = SessionId(2)
    assert grants.take(others, extent(0, 1)) is None
    assert grants.take(SESSION, extent(7, 2)) is None, "it lies in two pieces"
    assert grants.take(SESSION, extent(12, 1)) is None, "in none"
    assert grants.take(SESSION, Extent(POOL, 1, 1)) is None, "not on a granule"
    assert grants.take(SESSION, Extent(POOL + 1, 0, 1)) is None, "in another pool"
    assert grants.take(SESSION, extent(3, 2)) is not None
    assert grants.take(SESSION, extent(4, 1)) is None, "it is an entry's now"
    assert grants.take(SESSION, extent(0, 3)) is not None
    assert grants.take(SESSION, extent(5, 3)) is not None
    grants.check()


def test_room_counts_whole_extents_in_each_piece() -> None:
    grants, _ = granted()
    assert grants.room(SESSION, 3 * GRANULE_BYTES) == 2 + 1 + 1
    assert grants.room(SessionId(2), GRANULE_BYTES) == 0


def test_a_grant_takes_free_memory_in_few_pieces_and_makes_room_for_the_least_only() -> None:
    pool = Pool(
        Allocator(POOL, 32 * GRANULE_BYTES, GRANULE_BYTES), limits=PoolLimits(granted_share=0.5)
    )
    taken = [pool.allocator.allocate(2 * GRANULE_BYTES) for _ in range(16)]
    for block in taken[2:5] + taken[8:9]:
        assert block is not None
        pool.allocator.free(block)
    made: list[int] = []

    def make_room(nbytes: int) -> Block | None:
        made.append(nbytes)
        block = taken[len(made) - 1]
        assert block is not None
        pool.allocator.free(block)
        return pool.allocator.allocate(nbytes)

    sizes = [piece.granules for piece in pool.pieces(2 * GRANULE_BYTES, 5, 9, make_room)]
    assert sizes == [6, 2, 2], "three in a row, one apart, and room for the fifth"
    assert made == [2 * GRANULE_BYTES]
    assert pool.pieces(2 * GRANULE_BYTES, 0, 9, make_room) == []


def test_all_grants_together_stay_within_their_share() -> None:
    pool = Pool(
        Allocator(POOL, 32 * GRANULE_BYTES, GRANULE_BYTES), limits=PoolLimits(granted_share=0.25)
    )
    pool.grants.grant(SESSION, pool.pieces(GRANULE_BYTES, 1, 6, lambda _: None))
    assert pool.granted_bytes == 6 * GRANULE_BYTES
    pool.grants.grant(SessionId(2), pool.pieces(GRANULE_BYTES, 1, 6, lambda _: None))
    assert pool.granted_bytes == 8 * GRANULE_BYTES
    assert pool.pieces(GRANULE_BYTES, 1, 1, lambda _: None) == []
