"""The board: what clients read without a call, and what they announce there.

The core shows committed entries on it and learns which of them are pinned (`core/pins.py`).
Grants work in the same way: a grant is revoked first, and an extent that its session had claimed
by then stays the session's.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ecd.core.model.types import Content, EntryId, EntryInfo, Extent, Key, SessionId, Start

MAX_PIECES = 16
"""Pieces of memory in one grant: the free memory of a full pool is in small pieces."""


@dataclass(frozen=True)
class Uses:
    """Reads without a call since the last drain; only the latest of them are named.

    `for_others`: those by an engine that found them for another one, which reads them next.
    `misses_in`: misses by their namespaces, as far as these are known. Of several clients
    `by_client` has each one's, and the other fields only sums.
    """

    entries: tuple[EntryId, ...] = ()
    hits: int = 0
    nbytes: int = 0
    misses: int = 0
    duplicates: int = 0
    is_all: bool = True  # False: more pages have some
    for_others: tuple[EntryId, ...] = ()
    misses_in: tuple[tuple[str, int], ...] = ()
    by_client: tuple[Uses, ...] = ()

    @property
    def named(self) -> int:
        """How many of the reads are named."""
        return len(self.entries) + len(self.for_others)

    @property
    def times(self) -> float:
        """How many reads each named one stands for: the others were like them."""
        return self.hits / self.named if self.named else 0.0


class Portion(NamedTuple):
    """One step's part of a scan: the entries that some sessions pin.

    `starts` are those of extents that were pinned before they had entries.
    """

    pinned: set[EntryId]
    is_last: bool = False
    starts: Set[Start] = frozenset()


@dataclass(frozen=True)
class Put:
    """An entry that a client has written in granted memory, as the client describes it."""

    place: int  # among its session's puts
    number: int
    key: Key
    content: Content
    extent: Extent


class Board(Protocol):
    """The memory shared with clients, as far as the core reads and writes it."""

    def show(self, info: EntryInfo) -> None:
        """Let clients find a committed entry."""

    def announce_reservations(self, count: int) -> None:
        """Publish how many keys are, or are about to be, reserved by calls.

        A client that claims a key while the count is above 0 asks how its put ended.
        """

    def note_checksum(self, entry: EntryId, key: Key, checksum: int) -> None:
        """Record the checksum of a shown entry's bytes, for a daemon's recovery."""

    def hide(self, entry: EntryId, key: Key, replica_in: int = 0) -> None:
        """Let no client find the entry; a pin set after this fails the client's recheck.

        `replica_in`: as in `EntryInfo`.
        """

    def pinned(self, live: KeysView[EntryId], starts: Set[Start]) -> Iterator[Portion]:
        """Scan the pins of all sessions, some sessions a step, for entries of `live` and `starts`.

        An entry that its reader found before the first step, and still reads after the last, is
        in one of the portions, or the start of its extent is.
        """

    def pinned_by(
        self, session: SessionId, live: KeysView[EntryId]
    ) -> tuple[Set[EntryId], Set[Start]]:
        """Read one session's pins: of entries of `live`, and of extents by their starts."""

    def drain_uses(self) -> Uses:
        """Take the reads without a call that clients counted since the last drain."""

    def grant(self, session: SessionId, pieces: Sequence[Extent]) -> list[Extent] | None:
        """Let the session begin entries in `pieces`, and no more in its earlier grant.

        Returns the extents that it has claimed, or finished and was not answered for, in earlier
        grants. Returns None, and changes nothing, if the session has no place on the board.
        """

    def revoke(self, sessions: Sequence[SessionId]) -> list[list[Extent]]:
        """Let the sessions begin no more entries; returns what each has claimed, as `grant`."""

    def scan_claims(self) -> Iterator[None]:
        """Learn which keys are claimed in granted memory, some sessions a step.

        A key claimed before the first step, and still claimed after the last, is known then.
        """

    def is_claimed(self, key: Key) -> bool:
        """Whether the last scan of the claims found the key claimed."""

    def forget(self, session: SessionId) -> None:
        """Drop the session's page: its process can neither read nor write any more."""


class NoBoard:
    """The board of a cache whose clients all make calls."""

    def show(self, info: EntryInfo) -> None:
        pass

    def announce_reservations(self, count: int) -> None:
        pass

    def note_checksum(self, entry: EntryId, key: Key, checksum: int) -> None:
        pass

    def hide(self, entry: EntryId, key: Key, replica_in: int = 0) -> None:
        pass

    def pinned(self, live: KeysView[EntryId], starts: Set[Start]) -> Iterator[Portion]:
        return iter((Portion(set(), is_last=True),))

    def pinned_by(
        self, session: SessionId, live: KeysView[EntryId]
    ) -> tuple[Set[EntryId], Set[Start]]:
        return frozenset(), frozenset()

    def drain_uses(self) -> Uses:
        return Uses()

    def grant(self, session: SessionId, pieces: Sequence[Extent]) -> list[Extent] | None:
        return None

    def revoke(self, sessions: Sequence[SessionId]) -> list[list[Extent]]:
        return [[] for _ in sessions]

    def scan_claims(self) -> Iterator[None]:
        return iter(())

    def is_claimed(self, key: Key) -> bool:
        return False

    def forget(self, session: SessionId) -> None:
        pass
