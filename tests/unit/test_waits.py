"""Waits: wakeups by commit, by a lost writer, by deadline and by session."""

from collections.abc import Iterable

from ecd.core.model.types import Answer, Key, SessionId, WaitFor
from ecd.core.waits import Wait, Waits

ONE, TWO = SessionId(1), SessionId(2)
KEY, OTHER = Key("n", "k"), Key("n", "other")


def tickets(waits: Iterable[Wait]) -> list[int]:
    return [wait.ticket for wait in waits]


def add(
    waits: Waits,
    session: SessionId = ONE,
    key: Key = KEY,
    due_s: float = 5.0,
    wait_for: WaitFor = WaitFor.ANY,
) -> int:
    return waits.add(session, key, due_s, wait_for, Answer.LEASE)


def test_a_commit_wakes_all_who_wait_for_its_key_the_oldest_first() -> None:
    waits = Waits()
    first, _, third = add(waits), add(waits, key=OTHER), add(waits, TWO, wait_for=WaitFor.WRITER)
    woken = waits.take_for_key(KEY)
    assert tickets(woken) == [first, third]
    assert [wait.session for wait in woken] == [ONE, TWO]
    assert waits.take_for_key(KEY) == []
    assert (len(waits), waits.count(ONE), waits.count(TWO)) == (1, 1, 0)
    waits.check()


def test_a_lost_writer_wakes_only_those_who_wait_for_it() -> None:
    waits = Waits()
    patient, impatient = add(waits), add(waits, wait_for=WaitFor.WRITER)
    add(waits, key=OTHER, wait_for=WaitFor.WRITER)
    assert tickets(waits.take_writer_lost(KEY)) == [impatient]
    assert tickets(waits.take_for_key(KEY)) == [patient]
    waits.check()


def test_a_wait_ends_at_its_deadline_and_no_earlier() -> None:
    waits = Waits()
    late, early = add(waits, due_s=7.0), add(waits, due_s=3.0)
    assert waits.next_s == 3.0
    assert waits.take_due(2.9, 10) == []
    assert tickets(waits.take_due(3.0, 10)) == [early]
    assert tickets(waits.take_due(9.0, 10)) == [late]
    assert waits.next_s is None


def test_as_many_waits_end_at_a_time_as_are_asked_for() -> None:
    waits = Waits()
    for _ in range(5):
        add(waits)
    assert len(waits.take_due(5.0, 3)) == 3
    assert waits.next_s == 5.0, "some are left"
    assert len(waits.take_due(5.0, 3)) == 2


def test_a_wait_is_cancelled_by_its_own_session_once() -> None:
    waits = Waits()
    ticket = add(waits)
    assert not waits.cancel(TWO, ticket)
    assert waits.cancel(ONE, ticket)
    assert not waits.cancel(ONE, ticket)
    assert waits.take_due(9.0, 10) == []
    waits.check()


def test_a_session_takes_its_waits_with_it() -> None:
    waits = Waits()
    add(waits)
    add(waits, key=OTHER)
    left = add(waits, TWO)
    waits.drop_session(ONE)
    assert tickets(waits.take_for_key(KEY)) == [left]
    assert len(waits) == 0
    waits.check()
