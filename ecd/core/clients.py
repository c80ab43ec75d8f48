"""Clients that do not ask: what they are shown, and what the core must know of them.

They find entries in a table that they can see, and pin what they read. This is hazard pointers
(Michael, IEEE TPDS 15(6), 2004): an entry is taken out of the table first, and its extent is free
only if a look at all pins, made after that, does not find it. Writers take memory from a grant in
the same way: it is taken back first, and what a writer had announced by then stays its own.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ecd.core.types import Content, EntryId, EntryInfo, Extent, Key, SessionId

MAX_PIECES = 16
"""Of memory, in one grant: a pool that is full has free memory in small pieces."""


@dataclass(frozen=True)
class Uses:
    """What was read without asking since the last look; only the last `entries` are known."""

    entries: tuple[EntryId, ...] = ()
    hits: int = 0
    nbytes: int = 0
    misses: int = 0
    duplicates: int = 0


class Portion(NamedTuple):
    """Of a look at all pins: what some sessions pin."""

    pinned: set[EntryId]
    is_last: bool = False


@dataclass(frozen=True)
class Put:
    """Bytes that a client writes where it was granted memory, and what it says they are."""

    place: int  # among those of its session
    number: int
    key: Key
    content: Content
    extent: Extent


class Clients(Protocol):
    def show(self, info: EntryInfo) -> None:
        """From now on the entry can be found."""

    def note_reservations(self, count: int) -> None:
        """So many keys are being written by those who asked."""

    def prove(self, entry: EntryId, key: Key, checksum: int) -> None:
        """What the entry's bytes add up to: for a daemon after this one."""

    def hide(self, entry: EntryId, key: Key) -> None:
        """From now on it cannot: whoever pins it later sees that the pin does not hold."""

    def pinned(self, live: KeysView[EntryId]) -> Iterator[Portion]:
        """The entries of `live` that somebody may be reading, those of some sessions at a time.

        A reader who found its entry before the first portion, and reads it after the last, is in
        one of them.
        """

    def take_uses(self) -> Uses: ...

    def grant(self, session: SessionId, pieces: Sequence[Extent]) -> list[Extent] | None:
        """The session may write entries there, and begin none where it was granted memory before.

        What it has begun there, or finished and not been told. None: it cannot be told.
        """

    def revoke(self, sessions: Sequence[SessionId]) -> list[list[Extent]]:
        """They may begin no more entries. What each has begun, or finished and not been told."""

    def look_at_claims(self) -> Iterator[None]:
        """Learn what is being written where memory was granted, some of it at a time.

        What was claimed before the first step, and still is, is known after the last.
        """

    def is_putting(self, key: Key) -> bool:
        """Whether somebody writes this key where memory was granted, as far as it is known."""

    def forget(self, session: SessionId) -> None:
        """The session's process can read and write no more."""


class NoClients:
    """Everybody asks."""

    def show(self, info: EntryInfo) -> None:
        pass

    def note_reservations(self, count: int) -> None:
        pass

    def prove(self, entry: EntryId, key: Key, checksum: int) -> None:
        pass

    def hide(self, entry: EntryId, key: Key) -> None:
        pass

    def pinned(self, live: KeysView[EntryId]) -> Iterator[Portion]:
        return iter((Portion(set(), is_last=True),))

    def take_uses(self) -> Uses:
        return Uses()

    def grant(self, session: SessionId, pieces: Sequence[Extent]) -> list[Extent] | None:
        return None

    def revoke(self, sessions: Sequence[SessionId]) -> list[list[Extent]]:
        return [[] for _ in sessions]

    def look_at_claims(self) -> Iterator[None]:
        return iter(())

    def is_putting(self, key: Key) -> bool:
        return False

    def forget(self, session: SessionId) -> None:
        pass
