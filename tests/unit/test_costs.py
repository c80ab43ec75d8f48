"""The fit of what entries cost, and what entries rank by and save by it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecd.core.cache import Cache
from ecd.core.costs import GUESS_PER_ROW_S, GUESS_S, MAX_GROUPS, Costs
from ecd.core.counters import Counters
from ecd.core.model.entry import HANDOVER_S, Entry
from ecd.core.model.outcomes import Committed, Leased, LimitReached, Reserved
from ecd.core.model.types import Content, Key, Selection, SessionId
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import REFETCHED_S, Pool
from support.examples import draws
from support.reserving import reserve

ROW_BYTES = 7168
ROWS = (16, 64, 256, 1024, 4096, 16384)
IMAGE = b'\x01{"image":{"image_grid_thw":[1,54,72]}}'
VIDEO = b'\x01{"video":{"video_grid_thw":[2,54,72]}}'


def content(rows: int, cost_s: float = 0.0, metadata: bytes = IMAGE) -> Content:
    return Content("bfloat16", (rows, ROW_BYTES // 2), rows * ROW_BYTES, metadata, cost_s)


def fitted(costs: Costs, rows: int, metadata: bytes = IMAGE) -> float:
    return costs.of("n", content(rows, metadata=metadata)).seconds


@draws(100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 62),
            st.floats(0.0, allow_nan=False, allow_infinity=False),
            st.sampled_from((IMAGE, VIDEO, b"", b'\x01{"', b"\x02" + IMAGE)),
        ),
        max_size=40,
    ),
    st.integers(0, 1 << 62),
)
def test_no_cost_is_negative_or_without_bounds(
    reports: list[tuple[int, float, bytes]], rows: int
) -> None:
    costs = Costs(Counters())
    for report in reports:
        costs.learn("n", content(*report))
        for asked in (0, 1, rows):
            assert 0.0 <= fitted(costs, asked) < 1e6 * (1 + asked)


@draws(50)
@given(
    st.integers(0, 1 << 32),
    st.floats(3e-3, 0.05),
    st.floats(1e-5, 1e-4),
    st.integers(0, 299),
    st.sampled_from((1e-9, 1e9)),
)
def test_the_truth_is_recovered_from_noise_and_one_absurd_report(
    seed: int, a: float, b: float, absurd_at: int, absurd: float
) -> None:
    costs, rng = Costs(Counters()), random.Random(seed)
    for number in range(300):
        rows = rng.choice(ROWS)
        seconds = (a + b * rows) * rng.uniform(0.7, 1.3)
        costs.learn("n", content(rows, absurd if number == absurd_at else seconds))
    for rows in ROWS:
        assert fitted(costs, rows) == pytest.approx(a + b * rows, rel=0.4)


def test_a_batch_whose_first_item_is_charged_all_does_no_harm() -> None:
    costs = Costs(Counters())
    for number in range(400):
        costs.learn("n", content(1024, 0.8 if number % 8 == 0 else 0.025))
    assert fitted(costs, 1024) < 2 * 0.025


def test_entries_of_one_size_scale_the_guess() -> None:
    costs = Costs(Counters())
    for _ in range(200):
        costs.learn("n", content(1024, 4 * (GUESS_S + 1024 * GUESS_PER_ROW_S)))
    for rows in ROWS:
        assert fitted(costs, rows) == pytest.approx(4 * (GUESS_S + rows * GUESS_PER_ROW_S), rel=0.1)


@pytest.mark.parametrize(
    "slopes", [(-0.03, 5e-5), (0.2, -1e-5)], ids=["worse than linear", "large ones are cheaper"]
)
def test_neither_the_start_nor_the_slope_is_negative(slopes: tuple[float, float]) -> None:
    costs, (a, b) = Costs(Counters()), slopes
    for number in range(2000):
        rows = (1024, 2048, 4096)[number % 3]
        costs.learn("n", content(rows, a + b * rows))
    assert 0.0 <= fitted(costs, 0) <= fitted(costs, 16384)
    assert fitted(costs, 2048) == pytest.approx(a + b * 2048, rel=0.3)


def test_a_faster_encoder_is_noticed() -> None:
    costs, rng = Costs(Counters()), random.Random(1)
    for tenfold in (10, 1):
        for _ in range(5000):
            rows = rng.choice(ROWS)
            costs.learn("n", content(rows, tenfold * (0.01 + rows * 2e-5)))
    assert fitted(costs, 1024) == pytest.approx(0.01 + 1024 * 2e-5, rel=0.2)


def test_each_namespace_and_modality_has_its_own_fit() -> None:
    costs = Costs(Counters())
    assert costs.of("n", content(1000)) == (GUESS_S + 1000 * GUESS_PER_ROW_S, False)
    costs.learn("n", content(1000, 1.0, VIDEO))
    assert fitted(costs, 1000, VIDEO) == pytest.approx(1.0)
    assert not costs.of("n", content(1000)).is_known
    assert not costs.of("another", content(1000, metadata=VIDEO)).is_known


def test_groups_are_bounded_and_the_one_reported_longest_ago_goes() -> None:
    counters = Counters()
    costs = Costs(counters)
    for number in range(MAX_GROUPS):
        costs.learn(str(number), content(10, 1.0))
    costs.learn("0", content(10, 1.0))
    assert counters.costs_forgotten == 0
    costs.learn("one more", content(10, 1.0))
    assert counters.costs_forgotten == 1
    assert costs.of("0", content(10)).is_known
    assert not costs.of("1", content(10)).is_known


# -- entries -----------------------------------------------------------------------------------


class Stored:
    """A cache of one pool, and its one session."""

    def __init__(self, pages: int = 256) -> None:
        self.pool = Pool(Allocator(0, pages * 4096, 4096))
        self.cache = Cache([self.pool])
        session = self.cache.open_session()
        assert isinstance(session, int)
        self.session = SessionId(session)

    def put(self, name: str, rows: int, cost_s: float, refetch_s: float | None = None) -> Entry:
        key, told = Key("n", name), Content("int8", (rows, 64), rows * 64, IMAGE, cost_s)
        reserved = reserve(self.cache, self.session, key, told, 0.0)
        assert isinstance(reserved, Reserved)
        how = {} if refetch_s is None else {"refetch_s": refetch_s}
        committed = self.cache.commit(self.session, reserved.entry, 0.0, **how)
        assert isinstance(committed, Committed)
        entry = self.cache._entries.stored(key)
        assert entry is not None
        self.cache.check()
        return entry

    def use(self, name: str, now_s: float) -> None:
        leased = self.cache.acquire(self.session, Key("n", name), now_s)
        assert isinstance(leased, Leased)
        self.cache.release(self.session, leased.lease)
        self.cache.check()


def test_an_entry_ranks_by_the_fit_and_saves_what_was_reported() -> None:
    stored = Stored()
    for number in range(20):
        stored.put(f"k{number}", 100, 1.0)
    odd = stored.put("odd", 100, 30.0)
    untold = stored.put("untold", 100, 0.0)
    assert odd.cost_s == pytest.approx(untold.cost_s) == pytest.approx(1.0, rel=0.3)
    stored.use("odd", 0.0)
    assert stored.cache.counters.saved_s == 30.0
    stored.use("untold", 0.0)
    assert stored.cache.counters.saved_s == 30.0 + untold.cost_s


def test_where_nobody_reports_a_cost_entries_rank_by_the_guess_and_no_second_is_counted() -> None:
    stored = Stored()
    entry = stored.put("k", 100, 0.0, refetch_s=1e-3)
    assert entry.cost_s == GUESS_S + 100 * GUESS_PER_ROW_S
    stored.use("k", 0.0)
    assert (stored.cache.counters.saved_s, stored.pool.worth_s) == (0.0, 0.0)


def test_a_fetched_entry_costs_a_fetch_until_it_is_used_a_minute_later() -> None:
    stored = Stored()
    entry = stored.put("k", 100, 2.0, refetch_s=0.5)
    assert entry.cost_s == stored.pool.worth_s == 0.5
    stored.use("k", REFETCHED_S)
    assert entry.cost_s == 0.5
    stored.use("k", REFETCHED_S + 1.0)
    assert entry.cost_s == stored.pool.worth_s == pytest.approx(2.0)
    assert stored.cache.counters.saved_s == 4.0, "encoding it was saved each time"
    assert stored.put("far", 100, 2.0, refetch_s=9.0).cost_s == pytest.approx(2.0)


def test_what_is_evicted_for_room_is_given_up() -> None:
    stored = Stored(pages=4)
    for number in range(5):
        stored.put(f"k{number}", 64, 1.0)
    assert stored.pool.worth_s == pytest.approx(4.0)
    assert stored.pool.given_up_s == pytest.approx(1.0)
    stored.cache.evictor.evict_selected(Selection(), 0.0, 100)
    stored.cache.check()
    assert stored.pool.worth_s == pytest.approx(0.0)
    assert stored.pool.given_up_s == pytest.approx(1.0), "the rest was evicted on request"


def test_a_copy_is_worth_nothing_and_reports_nothing() -> None:
    stored, copies = Stored(), Pool(Allocator(1, 4 * 4096, 4096), "device", holds_replicas=True)
    stored.cache = Cache([stored.pool, copies])
    stored.cache.open_session()
    entry = stored.put("k", 64, 1.0)
    for _ in range(9):
        reserved = stored.cache.reserve_replica(stored.session, entry.key, entry.id, copies, 0.0)
        assert isinstance(reserved, Reserved)
        stored.cache.commit(stored.session, reserved.entry, 0.0)
        stored.cache.check()
        assert (copies.worth_s, copies.given_up_s) == (0.0, 0.0)
        stored.cache.evictor.evict_selected(Selection(entry.key, pool=1), 0.0, 9)
        stored.cache.pins.step()
    for number in range(4):
        stored.put(f"k{number}", 64, 3.0)
    assert stored.put("untold", 64, 0.0).cost_s == pytest.approx(3.0), "four of five say so"


def test_reports_without_rows_do_not_pull_a_steep_fit_down() -> None:
    costs = Costs(Counters())
    for number in range(3000):
        rows = 4000 if number % 2 else 100
        steep = Content("int8", (rows,), rows, cost_s=1e-4 * rows * rows / 4000)
        costs.learn("n", steep)
        costs.learn("n", Content("int8", (0,), 0, cost_s=1e-6))
    assert costs.of("n", Content("int8", (4000,), 4000)).seconds > 0.1


def test_a_hand_over_that_nobody_takes_is_forgotten() -> None:
    cache = Cache([Pool(Allocator(0, 1 << 20, 4096))])
    session = cache.open_session(hands_over=True)
    assert not isinstance(session, LimitReached)
    for key in ("taken", "late"):
        stored = Content("int8", (1,), 1, cost_s=2.0)
        reserved = reserve(cache, session, Key("n", key), stored, 0.0)
        assert isinstance(reserved, Reserved)
        cache.commit(session, reserved.entry, 0.0)
    cache.acquire(session, Key("n", "taken"), HANDOVER_S)
    assert (cache.counters.handed_over, cache.counters.saved_s) == (1, 0.0)
    cache.acquire(session, Key("n", "late"), HANDOVER_S + 1.0)
    assert (cache.counters.handed_over, cache.counters.saved_s) == (1, 2.0)
