"""What a session keeps of its granted memory when the rest is taken back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ecd.core.allocator import GRANULE_BYTES, Allocator
from ecd.core.grants import Grants
from ecd.core.types import Extent, SessionId

SESSION = SessionId(1)
PIECES = ((0, 8), (8, 12), (20, 24))
"""In granules; the first two touch."""


def granted() -> tuple[Grants, Allocator]:
    allocator = Allocator(32 * GRANULE_BYTES)
    grants = Grants(allocator)
    for start, end in PIECES:
        extent = Extent(0, start * GRANULE_BYTES, (end - start) * GRANULE_BYTES)
        piece = allocator.allocate_at(extent)
        assert piece is not None
        grants.add(SESSION, piece)
    return grants, allocator


def extent(start: int, length: int) -> Extent:
    return Extent(0, start * GRANULE_BYTES, length * GRANULE_BYTES)


def test_a_stale_claim_takes_nothing_from_a_live_put_that_it_overlaps() -> None:
    grants, allocator = granted()
    stale, live = extent(1, 1), extent(0, 2)
    grants.give_back(SESSION, [stale, live])
    assert grants.nbytes == live.nbytes
    assert allocator.allocate(live.nbytes).extent() not in (stale, live)  # type: ignore[union-attr]
    assert grants.take(SESSION, live) is not None
    assert grants.nbytes == 0


claims = st.lists(st.builds(extent, st.integers(0, 26), st.integers(1, 6)), max_size=6)


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
