"""The entry: one copy of a key's bytes, in one pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ecd.core.model.block import Block
from ecd.core.model.states import ENTRY, EntryEvent, EntryState, apply
from ecd.core.model.types import Content, EntryId, EntryInfo, Extent, Key, SessionId, Terms

MAX_COST_S = 3600.0
"""Largest cost that counts: a report of more saves no more."""


HANDOVER_S = 300.0
"""How long an unused entry owes a hand-over: a consumer that has the item in its own cache, or has
failed, never takes it."""


@dataclass(slots=True, eq=False)
class Entry:
    """The life of one copy in one pool. `state` changes only through `step`."""

    id: EntryId
    namespace: str
    mm_hash: str
    content: Content
    block: Block = field(repr=False)
    writer: SessionId
    state: EntryState = EntryState.RESERVED
    leases: int = 0  # pins that a scan has found included
    hits: int = 0
    created_s: float = 0.0
    used_s: float = 0.0
    checksum: int | None = None  # None until somebody has read all bytes
    cost_s: float = 0.0  # what the policy ranks by
    encode_s: float = 0.0  # by the fit; 0 where no producer reported a cost
    handovers: int = 0  # hits to come that only bring it to whom it was encoded for
    terms: Terms | None = None  # what operators have set
    replica_in: int = 0  # the pool's number if that holds replicas
    original: Entry | None = field(default=None, repr=False)  # what a reserved copy is made of
    farther: Entry | None = field(default=None, repr=False)  # the key's next copy
    colder: Entry | None = field(default=None, repr=False)  # neighbours in the policy's order
    warmer: Entry | None = field(default=None, repr=False)
    # The policy's own, for `ValueDensity`:
    rank: Any = field(default=None, repr=False)  # the queue
    fingerprint: int = field(default=0, repr=False)
    frequency: int = field(default=0, repr=False)
    floor: float = field(default=0.0, repr=False)  # L, when the entry was last touched
    place: int = field(default=0, repr=False)  # of that touch, on the clock of touched bytes

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.mm_hash)

    @property
    def pool(self) -> int:
        """The number of the pool that holds the copy."""
        return self.block.allocator.pool_number

    @property
    def extent(self) -> Extent:
        return self.block.extent(self.content.nbytes)

    @property
    def saves_s(self) -> float:
        """The seconds of encoding that one read saves: as reported, else by the fit."""
        return min(self.content.cost_s, MAX_COST_S) or self.encode_s

    @property
    def worth_s(self) -> float:
        """The seconds to get the entry again; 0 for a copy, and where no cost was reported."""
        return self.cost_s if self.encode_s and not self.replica_in else 0.0

    @property
    def is_kept(self) -> bool:
        """Whether an operator keeps the entry."""
        return self.terms is not None and self.terms.kept_until_s > 0.0

    def is_handover(self, now_s: float) -> bool:
        """Whether the next hit only brings the entry to the engine for which it was encoded."""
        return self.handovers > 0 and now_s - self.used_s <= HANDOVER_S

    def step(self, event: EntryEvent) -> None:
        """Change the state. Raises IllegalTransition."""
        self.state = apply(ENTRY, self.state, event)

    def info(self) -> EntryInfo:
        return EntryInfo(
            self.id,
            self.key,
            self.content,
            self.extent,
            self.leases,
            self.hits,
            self.created_s,
            self.used_s,
            self.checksum,
            self.replica_in,
            self.terms,
        )
