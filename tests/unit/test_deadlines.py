"""Deadlines, against a dict of them, and how many records they keep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ecd.core.model.deadlines import Deadlines
from support.examples import draws


@given(st.lists(st.tuples(st.sampled_from("aprt"), st.integers(0, 99), st.integers(0, 50))))
@draws(200)
def test_what_is_due_is_found_however_often_it_was_moved(
    steps: list[tuple[str, int, int]],
) -> None:
    deadlines, known = Deadlines[int](), dict[int, float]()
    for step, item, seconds in steps:
        if step == "a":
            if item in known:
                deadlines.remove(item)
            deadlines.add(item, float(seconds))
            known[item] = float(seconds)
        elif step == "p" and item in known:
            deadlines.postpone(item, float(seconds))
            known[item] = max(known[item], float(seconds))
        elif step == "r" and known.pop(item, None) is not None:
            deadlines.remove(item)
        elif step == "t":
            due = deadlines.take_due(float(seconds), 10_000)
            assert sorted(due) == sorted(each for each, s in known.items() if s <= seconds)
            known = {each: s for each, s in known.items() if s > seconds}
        deadlines.check()
        assert len(deadlines) == len(known)
        assert {each: deadlines.due_s(each) for each in known} == known
        assert not known or (deadlines.next_s or 0.0) <= min(known.values())


def test_items_removed_and_added_again_leave_nothing_behind() -> None:
    """As a reload of the rules does, and an operator who keeps entries again each minute."""
    deadlines = Deadlines[int]()
    for item in range(300):
        deadlines.add(item, 100.0)
    for round_s in range(50):
        for item in range(300):
            deadlines.remove(item)
            deadlines.add(item, 100.0 + round_s // 2)
    assert len(deadlines._heap) + len(deadlines._old) < 3 * 300
    deadlines.check()
