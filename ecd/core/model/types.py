"""The words of the core: keys, extents, contents, limits, and what operators see and select.

Everything here is immutable. Sizes are bytes, times are seconds on a monotonic clock that the
caller owns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import NamedTuple, NewType

SessionId = NewType("SessionId", int)
EntryId = NewType("EntryId", int)
LeaseId = NewType("LeaseId", int)
Ticket = NewType("Ticket", int)
Start = tuple[int, int]
"""The pool and the offset at which an extent starts."""


class Key(NamedTuple):
    """The name of a content. Compared whole, never truncated."""

    namespace: str
    mm_hash: str


class Extent(NamedTuple):
    """The place of an entry's bytes. `nbytes` is the size asked for, not rounded to granules."""

    pool: int
    offset: int
    nbytes: int

    @property
    def start(self) -> Start:
        return self.pool, self.offset


@dataclass(frozen=True, slots=True)
class Content:
    """A writer's description of the tensor that it stores."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    metadata: bytes = b""
    cost_s: float = 0.0


class Answer(Enum):
    """The form in which a reader gets a stored key."""

    LEASE = "lease"
    PIN = "pin"  # `Stored`, without a lease: the reader pins the entry itself
    LOOK = "look"  # the same, and the reader counts its hit or miss itself
    LOOK_LEASE = "look, leased"  # a lease, and the reader counts
    PEER = "peer"  # a lease for another node, which counts the hit or the miss of its own reader


NO_LEASE = Answer.PIN, Answer.LOOK  # no set: an enum is hashed in Python
UNCOUNTED = Answer.PEER, Answer.LOOK, Answer.LOOK_LEASE
"""Answers whose hits and misses are counted by the reader."""


class WaitFor(Enum):
    """How long a reader waits for a key that is not stored, within its time."""

    ANY = "any"  # until the key is stored
    WRITER = "writer"  # only while somebody writes the key, or a fetch is expected to bring it


@dataclass(frozen=True)
class Limits:
    """Bounds on what one cache, and one session of it, may hold."""

    sessions: int = 4096
    reservations_per_session: int = 1024
    leases_per_session: int = 65536
    waits_per_session: int = 4096


@dataclass(frozen=True)
class PoolLimits:
    """Shares of one pool: the most for all grants together, and where trimming starts and ends.

    `ahead_share`: what lies so near to its eviction is written to a staged pool.
    """

    granted_share: float = 1 / 8
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    ahead_share: float = 1 / 4


class Terms(NamedTuple):
    """An operator's terms for one entry: by the rules for its namespace, and by `keep`."""

    put_s: float
    """When the entry was put, on whichever node."""
    expires_s: float = inf
    kept_until_s: float = 0.0
    """0: not kept; infinite: kept without a limit."""
    has_quota: bool = False


class EntryInfo(NamedTuple):
    """A committed entry as operators and the board see it."""

    entry: EntryId
    key: Key
    content: Content
    extent: Extent
    leases: int
    hits: int
    created_s: float
    used_s: float
    checksum: int | None
    replica_in: int = 0
    """The number of the entry's pool if that holds replicas, which clients look for by it."""
    terms: Terms | None = None


class NamespaceSum(NamedTuple):
    """How many entries a namespace has, copies apart, and how large all of them are."""

    entries: int = 0
    nbytes: int = 0


class Held(NamedTuple):
    """The memory that one session holds, or several do. Bytes count whole extents."""

    entries: int = 0
    """Leased or pinned, each once for a session."""
    leased_bytes: int = 0
    leases: int = 0
    pins: int = 0
    reserved_bytes: int = 0
    granted_bytes: int = 0


@dataclass(frozen=True)
class Selection:
    """The conditions for an eviction: it evicts the entries that meet all that are given.

    Only the core uses `pool`: no message of the contract can name one (docs/decisions.md).
    """

    key: Key | None = None
    namespace: str | None = None
    idle_s: float = 0.0
    age_s: float = 0.0
    pool: int | None = None


@dataclass(frozen=True)
class EvictionReport:
    entries: int
    nbytes: int
    leased: int
    next_after: EntryId | None
    kept: int = 0
