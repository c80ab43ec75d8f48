"""The rest of pictures that failed to be left out: theirs alone, longer each time, and bounded."""

from __future__ import annotations

from ecd_client.vllm.middleware.rests import MAX_RESTS, RESTS, Rests

FIRST_S, LONGEST_S = RESTS
BOTH = frozenset("ab")


def test_the_same_pictures_rest_each_time_for_longer_up_to_a_bound() -> None:
    rests, now_s, expected_s = Rests(), 10.0, FIRST_S
    for _ in range(9):
        rests.note_failed(BOTH, now_s)
        assert rests.are_resting(frozenset("ba"), now_s + expected_s - 0.01)
        now_s += expected_s
        assert not rests.are_resting(BOTH, now_s)
        expected_s = min(2 * expected_s, LONGEST_S)
    rests.note_served(BOTH)
    rests.note_failed(BOTH, now_s)
    assert not rests.are_resting(BOTH, now_s + FIRST_S)


def test_no_other_pictures_rest() -> None:
    rests = Rests()
    rests.note_failed(BOTH, 0.0)
    for others in ("a", "b", "abc", "c"):
        assert not rests.are_resting(frozenset(others), 0.0)


def test_a_name_that_a_client_has_chosen_is_held_against_nobody() -> None:
    rests = Rests()
    rests.note_failed(None, 0.0)
    rests.note_served(None)
    assert not rests.are_resting(None, 0.0)


def test_the_oldest_are_forgotten_first() -> None:
    rests = Rests()
    pictures = [frozenset({f"{number}"}) for number in range(MAX_RESTS + 1)]
    for each in (*pictures[:-1], pictures[0], pictures[-1]):
        rests.note_failed(each, 0.0)
    assert [rests.are_resting(each, 0.0) for each in pictures[:3]] == [True, False, True]
