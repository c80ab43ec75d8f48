"""The samples behind the status page's curves."""

from __future__ import annotations

from ecd.core.counters import CAUSES
from ecd.ops.history import KEPT_SAMPLES, LOT, Figures, History, lot
from ecd_proto.findings import REFUSALS
from support.clock import SetClock


def test_every_cause_of_a_refusal_is_told_in_words() -> None:
    assert set(CAUSES) == set(REFUSALS)


def test_samples_are_bounded_and_told_in_lots() -> None:
    hits = 0
    history = History(lambda: Figures(hits, 0, 0, 0.1 * hits, 0, {}), SetClock())
    for hits in range(KEPT_SAMPLES + 500):  # noqa: B007
        history.sample()
    told, number = [], 0
    while some := lot(history.samples(), number):
        assert len(some) <= LOT
        told += some
        number = some[-1].number + 1
    assert len(told) == KEPT_SAMPLES
    assert [sample.hits for sample in told] == list(range(500, KEPT_SAMPLES + 500))
    assert lot(told, told[-1].number) == told[-1:]
    assert lot(told, 10**9) == []


def test_a_refusal_has_a_time_from_the_first_look_after_it() -> None:
    refused, clock = {"waits": 3, "leases": 0}, SetClock()
    history = History(lambda: Figures(0, 0, 0, 0.0, 0, refused), clock)
    assert history.refused_s_ago() == {}, "these were before"
    refused = {"waits": 4, "leases": 0}
    assert history.refused_s_ago() == {"waits": 0.0}
    clock.at_s += 5.0
    assert history.refused_s_ago() == {"waits": 5.0}
