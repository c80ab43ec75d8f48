"""Sessions: clients as the daemon sees them, and the reservations of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ecd.core.model.states import SESSION, SessionEvent, SessionState, apply
from ecd.core.model.types import EntryId, SessionId


@dataclass
class Session:
    id: SessionId
    hands_over: bool = False  # what it puts, as another client is to use that first
    state: SessionState = SessionState.OPEN
    reservations: set[EntryId] = field(default_factory=set)

    def step(self, event: SessionEvent) -> None:
        self.state = apply(SESSION, self.state, event)


class Sessions:
    """Sessions that are open, and those whose processes may still touch the memory."""

    def __init__(self) -> None:
        self._sessions: dict[SessionId, Session] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[SessionId]:
        return iter(self._sessions)

    def open(self, *, hands_over: bool) -> Session:
        self._last += 1
        session = Session(SessionId(self._last), hands_over)
        self._sessions[session.id] = session
        return session

    def get(self, session: SessionId) -> Session | None:
        """The session, if it is open."""
        found = self._sessions.get(session)
        return found if found is not None and found.state is SessionState.OPEN else None

    def hands_over(self, session: SessionId) -> bool:
        """Whether another client is to use first what the session puts; it may be leaving."""
        found = self._sessions.get(session)
        return found is not None and found.hands_over

    def leave(self, session: SessionId) -> Session | None:
        """Mark an open session as leaving: its stream ended. None if it was not open."""
        found = self.get(session)
        if found is not None:
            found.step(SessionEvent.STREAM_ENDED)
        return found

    def leaving(self, session: SessionId) -> Session | None:
        """The session, if it is leaving."""
        found = self._sessions.get(session)
        return found if found is not None and found.state is SessionState.LEAVING else None

    def close(self, session: SessionId) -> None:
        """Forget a leaving session: its process can no longer touch the memory."""
        self._sessions.pop(session).step(SessionEvent.PROCESS_GONE)

    def reservations_of(self, session: SessionId) -> set[EntryId]:
        """The session's open or orphaned reservations; none if it is closed."""
        found = self._sessions.get(session)
        return set() if found is None else found.reservations

    def reservations(self) -> set[EntryId]:
        """All open or orphaned reservations. O(n), for `check`."""
        return {entry for session in self._sessions.values() for entry in session.reservations}
