"""Readers that ask nobody: what they are shown, and what the core must know of them.

They find entries in a table that they can see, and pin what they read. This is hazard pointers
(Michael, IEEE TPDS 15(6), 2004): an entry is taken out of the table first, and its extent is free
only if a look at all pins, made after that, does not find it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ecd.core.types import EntryId, EntryInfo, SessionId


@dataclass(frozen=True)
class Uses:
    """What was read without asking since the last look; only the last `entries` are known."""

    entries: tuple[EntryId, ...] = ()
    hits: int = 0
    nbytes: int = 0
    misses: int = 0


class Readers(Protocol):
    def show(self, info: EntryInfo) -> None:
        """From now on the entry can be found."""

    def hide(self, entry: EntryId) -> None:
        """From now on it cannot: whoever pins it later sees that the pin does not hold."""

    def pinned(self) -> set[EntryId]:
        """Every entry that somebody may be reading who found it before the last `hide`.

        What was pinned before, and is not in here, is read by nobody any more. May hold numbers
        that are no entry's.
        """

    def take_uses(self) -> Uses: ...

    def forget(self, session: SessionId) -> None:
        """The session's process can read no more."""


class NoReaders:
    """Everybody asks."""

    def show(self, info: EntryInfo) -> None:
        pass

    def hide(self, entry: EntryId) -> None:
        pass

    def pinned(self) -> set[EntryId]:
        return set()

    def take_uses(self) -> Uses:
        return Uses()

    def forget(self, session: SessionId) -> None:
        pass
