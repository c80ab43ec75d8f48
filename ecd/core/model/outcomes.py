"""Outcomes: the answers of the cache's operations, all immutable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Union

from ecd.core.model.types import Content, EntryId, Extent, Key, LeaseId, SessionId, Ticket

# -- any operation ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LimitReached:
    """A bound of `Limits` was met; `what` names it."""

    what: str
    limit: int


@dataclass(frozen=True)
class SessionEnded:
    """The session is unknown or over, and everything that it owned is gone."""


# -- reserve -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reserved:
    entry: EntryId
    extent: Extent


@dataclass(frozen=True)
class AlreadyStored:
    """The pool has a committed copy: there is nothing to write."""


@dataclass(frozen=True)
class BeingWritten:
    """Another writer has the key: wait for its commit, or for its abort."""


@dataclass(frozen=True)
class PoolFull:
    """No set of entries that may be evicted makes room, or none of a namespace at its quota."""

    nbytes: int
    largest_free_bytes: int
    held_bytes: int  # leased, kept or being written
    quota_bytes: int = 0  # the quota, if that is what is full


@dataclass(frozen=True)
class MakingRoom:
    """Room is being made, a bounded part of it with each call: ask again in the next turn."""


@dataclass(frozen=True)
class EntryTooLarge:
    nbytes: int
    pool_bytes: int
    quota_bytes: int = 0  # less, if the namespace has such a quota


Reservation = Union[
    Reserved, AlreadyStored, BeingWritten, PoolFull, EntryTooLarge, LimitReached, SessionEnded
]
"""The final outcomes of `reserve`, which `MakingRoom` only postpones."""

# -- commit and abort --------------------------------------------------------------------------


@dataclass(frozen=True)
class Committed:
    """The entry is visible from now on. `woken` are the waits that the commit ended."""

    woken: tuple[Wakeup, ...] = ()


@dataclass(frozen=True)
class Aborted:
    woken: tuple[Wakeup, ...] = ()


@dataclass(frozen=True)
class NotReserved:
    """The session has no such open reservation."""


Commitment = Union[Committed, NotReserved]
Abortion = Union[Aborted, NotReserved]

# -- acquire -----------------------------------------------------------------------------------


class Leased(NamedTuple):
    """The key is stored and leased. A tuple, because every call that hits builds one."""

    lease: LeaseId
    key: Key
    content: Content
    extent: Extent
    expires_s: float
    entry: EntryId
    checksum: int | None
    is_handover: bool = False  # to another node, whose next hit saves no encode


@dataclass(frozen=True)
class Stored:
    """The key is stored; no lease was taken, because the client pins the entry itself."""


@dataclass(frozen=True)
class Missing:
    """The key is not stored, not being written, and not expected from a fetch."""


@dataclass(frozen=True)
class Waiting:
    """The answer comes later, as a `Wakeup` that carries this ticket."""

    ticket: Ticket


Acquisition = Union[Leased, Stored, Missing, Waiting, LimitReached, SessionEnded]


@dataclass(frozen=True)
class Wakeup:
    """The end of a wait, for the session that waited."""

    session: SessionId
    ticket: Ticket
    outcome: Leased | Stored | Missing | LimitReached


@dataclass(frozen=True)
class Expired:
    """A lease that ran out. Its session must be told, so that it stops renewing the lease."""

    session: SessionId
    lease: LeaseId


# -- keep ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """An operator keeps the entry: it is not evicted for room."""


@dataclass(frozen=True)
class KeptTooMuch:
    """With this entry, operators would keep more of its pool than they may."""

    nbytes: int
    kept_bytes: int
    most_bytes: int


Keeping = Union[Kept, KeptTooMuch, Missing]
