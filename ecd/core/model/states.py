"""The states of entries and sessions, and the events that change them, as tables.

A pair that is not in its table is a bug in the core and raises `IllegalTransition`. The pictures of
docs/architecture.md are drawn from the tables.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar


class EntryState(Enum):
    RESERVED = "reserved"  # a writer copies into the extent
    ORPHANED = "orphaned"  # the writer's session ended, but the writer may still be copying
    COMMITTED = "committed"  # visible, immutable
    DOOMED = "doomed"  # evicted while leased: invisible, bytes kept
    GONE = "gone"  # the extent is free again


class EntryEvent(Enum):
    COMMIT = "commit"
    ABORT = "abort"
    WRITER_LOST = "writer lost"
    WRITER_GONE = "writer gone"
    EVICT = "evict"
    LAST_RELEASE = "last release"


ENTRY: dict[tuple[EntryState, EntryEvent], EntryState] = {
    (EntryState.RESERVED, EntryEvent.COMMIT): EntryState.COMMITTED,
    (EntryState.RESERVED, EntryEvent.ABORT): EntryState.GONE,
    (EntryState.RESERVED, EntryEvent.WRITER_LOST): EntryState.ORPHANED,
    (EntryState.ORPHANED, EntryEvent.WRITER_GONE): EntryState.GONE,
    (EntryState.COMMITTED, EntryEvent.EVICT): EntryState.DOOMED,
    (EntryState.DOOMED, EntryEvent.LAST_RELEASE): EntryState.GONE,
}


class SessionState(Enum):
    OPEN = "open"
    LEAVING = "leaving"  # its stream ended; its process may still touch the memory
    CLOSED = "closed"


class SessionEvent(Enum):
    STREAM_ENDED = "stream ended"
    PROCESS_GONE = "process gone"


SESSION: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (SessionState.OPEN, SessionEvent.STREAM_ENDED): SessionState.LEAVING,
    (SessionState.LEAVING, SessionEvent.PROCESS_GONE): SessionState.CLOSED,
}


class IllegalTransition(Exception):
    """An event met a state for which the table has no step."""


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


def apply(table: dict[tuple[S, E], S], state: S, event: E) -> S:
    """The state after `event`. Raises IllegalTransition for a pair the table does not list."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.value!r} in state {state.value!r}") from None
