"""The words of the core: keys, extents, entries and what an operation can answer.

Everything here is immutable. Sizes are bytes, times are seconds on a monotonic clock that the
caller owns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType, Union

SessionId = NewType("SessionId", int)
EntryId = NewType("EntryId", int)
LeaseId = NewType("LeaseId", int)
Ticket = NewType("Ticket", int)


class Key(NamedTuple):
    """What an entry is found by. Compared whole, never truncated."""

    namespace: str
    mm_hash: str


class Extent(NamedTuple):
    """Where an entry's bytes lie. `nbytes` is what was asked for, not what was rounded up to."""

    pool: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Content:
    """What a writer says about the tensor it stores."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    metadata: bytes = b""
    cost_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Bounds on what one cache, and one session of it, may hold."""

    sessions: int = 4096
    reservations_per_session: int = 1024
    leases_per_session: int = 65536
    waits_per_session: int = 4096
    granted_share: float = 1 / 8  # of the pool, to all sessions together
    high_watermark: float = 0.95
    low_watermark: float = 0.90


# -- outcomes of reserve ---------------------------------------------------------------------


@dataclass(frozen=True)
class Reserved:
    entry: EntryId
    extent: Extent


@dataclass(frozen=True)
class AlreadyStored:
    """The key is committed: there is nothing to copy."""


@dataclass(frozen=True)
class BeingWritten:
    """Another reservation for the key is open: wait for its commit, or for its abort."""


@dataclass(frozen=True)
class PoolFull:
    """No set of unleased entries makes room."""

    nbytes: int
    largest_free_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class MakingRoom:
    """Room is being made, a bounded part of it with each call: ask again in the next turn."""


@dataclass(frozen=True)
class EntryTooLarge:
    nbytes: int
    pool_bytes: int


@dataclass(frozen=True)
class LimitReached:
    """A bound of `Limits` was met; `what` names it."""

    what: str
    limit: int


@dataclass(frozen=True)
class SessionEnded:
    """The session is unknown or over: whatever it owned is gone."""


Reservation = Union[
    Reserved, AlreadyStored, BeingWritten, PoolFull, EntryTooLarge, LimitReached, SessionEnded
]
"""What comes of asking for space, once no room has to be made for it."""

# -- outcomes of commit and abort ------------------------------------------------------------


@dataclass(frozen=True)
class Committed:
    """Visible from now on. `woken` are the waits that this commit ended."""

    woken: tuple[Wakeup, ...] = ()


@dataclass(frozen=True)
class Aborted:
    woken: tuple[Wakeup, ...] = ()


@dataclass(frozen=True)
class NotReserved:
    """No such open reservation in this session."""


Commitment = Union[Committed, NotReserved]
Abortion = Union[Aborted, NotReserved]

# -- outcomes of acquire ---------------------------------------------------------------------


@dataclass(frozen=True)
class Leased:
    lease: LeaseId
    key: Key
    content: Content
    extent: Extent
    expires_s: float
    entry: EntryId
    checksum: int | None


@dataclass(frozen=True)
class Stored:
    """It is there, and not leased: for those who pin."""


@dataclass(frozen=True)
class Missing:
    """Not stored; nobody is writing it, and it is not expected from elsewhere."""


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
    """A lease that ran out: the session is told, so that it stops renewing."""

    session: SessionId
    lease: LeaseId


# -- what operators see ----------------------------------------------------------------------


@dataclass(frozen=True)
class EntryInfo:
    entry: EntryId
    key: Key
    content: Content
    extent: Extent
    leases: int
    hits: int
    created_s: float
    used_s: float
    checksum: int | None


@dataclass(frozen=True)
class Selection:
    """Which entries an eviction means. All given conditions must hold."""

    key: Key | None = None
    namespace: str | None = None
    idle_s: float = 0.0
    age_s: float = 0.0


@dataclass(frozen=True)
class EvictionReport:
    entries: int
    nbytes: int
    leased: int
    next_after: EntryId | None
