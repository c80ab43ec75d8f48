"""Holds on an entry: the lease that a call grants, and the pin that takes its place without one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ecd_client import clock
from ecd_client.pools import MappedPool
from ecd_client.shared.index import IndexReader
from ecd_client.values import Extent
from ecd_proto.shm.rows import Row
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from ecd_client.session.session import Session


class Content(Protocol):
    """The writer's description of an entry: a message of the contract, or a row of the index."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Any: ...  # a sequence of int
    @property
    def nbytes(self) -> int: ...
    @property
    def metadata(self) -> bytes: ...
    @property
    def cost_s(self) -> float: ...


class Hold(Protocol):
    """A lease or a pin: the extent keeps its bytes until `end`, or until `expires_s`."""

    @property
    def session(self) -> Session: ...
    @property
    def pool(self) -> MappedPool: ...
    @property
    def content(self) -> Content: ...
    @property
    def extent(self) -> Extent: ...
    @property
    def expires_s(self) -> float:
        """The end on `clock.now_s`; infinite for a pin."""

    @property
    def holds(self) -> bool: ...
    @property
    def entry(self) -> int:
        """The entry's number in the index, by which a copy of it is found; 0: not known."""

    def has_left(self, share: float) -> bool:
        """Whether at least this share of a lease's TTL is left."""

    def note_use(self, namespace: str, mm_hash: str, *, for_another: bool) -> None:
        """Count a use that was not counted when the entry was found."""

    def end(self) -> None: ...


@dataclass(eq=False)
class Lease:
    """A hold by a call; `expires_s`, on `clock.now_s`, is never after the daemon's."""

    id: int
    session: Session
    pool: MappedPool
    content: pb.Content
    extent: pb.Extent
    expires_s: float
    number: int
    """The entry's number, for its figures alone."""
    _is_open: bool = True

    @property
    def holds(self) -> bool:
        return clock.now_s() < self.expires_s

    @property
    def entry(self) -> int:
        return 0

    def has_left(self, share: float) -> bool:
        return self.expires_s - clock.now_s() >= share * self.session.lease_ttl_s

    def note_use(self, namespace: str, mm_hash: str, *, for_another: bool) -> None:
        """Count the use, unless the daemon did as it granted the lease."""
        index, number = self.session.index, self.number
        if index is not None and self.session.takes_looks:
            index.note_use(namespace, mm_hash, number, self.content.nbytes, for_another=for_another)

    def end(self) -> None:
        """End the lease only once: an interrupted `pinned` may end it again."""
        is_open, self._is_open = self._is_open, False
        if is_open:
            self.session.release(self)


class Pin:
    """A hold without a call: a hazard pointer in the session's page, without a time limit."""

    __slots__ = ("_index", "_leased", "_pin", "content", "extent", "pool", "session")
    expires_s = math.inf
    holds = True

    def __init__(
        self,
        session: Session,
        index: IndexReader,
        row: Row,
        pin: int,
        pool: MappedPool,
        leased: int | None = None,
    ) -> None:
        """`leased`: the number of an entry that a call leased first, for its figures alone."""
        self.session, self.pool, self.content, self.extent = session, pool, row, row
        self._index, self._pin, self._leased = index, pin, leased

    @property
    def entry(self) -> int:
        """The entry's number in the index; 0 for a put that was not listed yet."""
        return self.extent.entry

    def has_left(self, share: float) -> bool:  # noqa: ARG002
        return True

    def note_use(self, namespace: str, mm_hash: str, *, for_another: bool) -> None:
        knows = self.session.takes_looks
        if self._leased is None or knows:
            entry, nbytes = self._leased or self.entry, self.content.nbytes
            for_another = for_another and knows
            self._index.note_use(namespace, mm_hash, entry, nbytes, for_another=for_another)

    def end(self) -> None:
        """End the pin only once: two items would share its word afterwards."""
        pin, self._pin = self._pin, 0
        if pin:
            self._index.unpin(pin)
            self.session.unref()
