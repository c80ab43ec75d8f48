"""Clients that do not ask: what they are shown, and what the core must know of them.

They find entries in a table that they can see, and pin what they read. This is hazard pointers
(Michael, IEEE TPDS 15(6), 2004): an entry is taken out of the table first, and its extent is free
only if a look at all pins, made after that, does not find it. Writers take memory from a grant in
the same way: it is taken back first, and what a writer had announced by then stays its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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

    def pinned(self) -> set[EntryId]:
        """Every entry that somebody may be reading who found it before the last `hide`.

        What was pinned before, and is not in here, is read by nobody any more. May hold numbers
        that are no entry's.
        """

    def take_uses(self) -> Uses: ...

    def grant(self, session: SessionId, pieces: Sequence[Extent]) -> list[Extent] | None:
        """The session may write entries there, and begin none where it was granted memory before.

        What it has begun there, or finished and not been told. None: it cannot be told.
        """

    def revoke(self, session: SessionId) -> list[Extent]:
        """It may begin no more entries. What it has begun, or finished and not been told."""

    def is_putting(self, key: Key) -> bool:
        """Whether somebody writes this key where memory was granted."""

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

    def pinned(self) -> set[EntryId]:
        return set()

    def take_uses(self) -> Uses:
        return Uses()

    def grant(self, session: SessionId, pieces: Sequence[Extent]) -> list[Extent] | None:
        return None

    def revoke(self, session: SessionId) -> list[Extent]:
        return []

    def is_putting(self, key: Key) -> bool:
        return False

    def forget(self, session: SessionId) -> None:
        pass
