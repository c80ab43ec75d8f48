"""The tables are the whole truth: every pair either leads where they say or raises."""

import itertools
from enum import Enum

import pytest

from ecd.core.model.states import (
    ENTRY,
    SESSION,
    EntryEvent,
    EntryState,
    IllegalTransition,
    SessionEvent,
    SessionState,
    apply,
)


@pytest.mark.parametrize(
    ("table", "states", "events"),
    [(ENTRY, EntryState, EntryEvent), (SESSION, SessionState, SessionEvent)],
)
def test_every_pair_is_in_the_table_or_illegal(
    table: dict, states: type[Enum], events: type[Enum]
) -> None:
    for state, event in itertools.product(states, events):
        if (state, event) in table:
            assert apply(table, state, event) is table[state, event]
        else:
            with pytest.raises(IllegalTransition):
                apply(table, state, event)


@pytest.mark.parametrize(
    ("table", "first", "last"),
    [
        (ENTRY, EntryState.RESERVED, EntryState.GONE),
        (SESSION, SessionState.OPEN, SessionState.CLOSED),
    ],
)
def test_every_state_is_reached_and_leads_to_the_end(table: dict, first: Enum, last: Enum) -> None:
    def closure(start: Enum) -> set[Enum]:
        found, todo = {start}, [start]
        while todo:
            state = todo.pop()
            new = {to for (at, _), to in table.items() if at is state} - found
            found |= new
            todo.extend(new)
        return found

    assert closure(first) == set(type(first))
    assert all(last in closure(state) for state in type(first))
