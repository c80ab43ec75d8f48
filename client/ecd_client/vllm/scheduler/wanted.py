"""The items that requests and loads still need, each with its lease or with why there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from ecd_client.item import Item
from ecd_client.reader import close_unseen
from ecd_client.vllm.base.compat import CAN_FAIL_ONE_REQUEST
from ecd_client.vllm.base.outputs import Outputs
from ecd_client.vllm.scheduler.request_items import NeededItem, RequestItems, RequestUser
from ecd_proto.contract import Hint
from ecd_proto.placeholders import Placeholder


@dataclass(eq=False, slots=True)
class Loading:
    """A load on its way to the workers, which keeps its item's lease until every rank reports."""

    wanted: WantedItem
    since_s: float


User: TypeAlias = "RequestUser | Loading"
"""A holder of an item: one place of a request, or a load."""


@dataclass(eq=False, slots=True)
class WantedItem:
    """An item with at least one user, what is known of it, and its lease.

    `expected` has the number of embeddings that each user counts on. The users in `bare` cannot do
    without the item: their requests brought no media to encode.
    """

    identifier: str
    modalities: set[str] = field(default_factory=set)
    expected: dict[User, int] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)  # of users, by what they expect
    bare: dict[User, Placeholder | None] = field(default_factory=dict)  # what each came with
    hints: list[Hint] = field(default_factory=list)  # nodes that are said to have it
    answer: Future[Item | None] | None = None
    item: Item | None = None
    embeddings: int | None = None  # of `item`; None: this engine's encoder cannot have made it
    promised: bool = False  # to the step that is being scheduled
    absent: bool = False  # not in memory, and it was not decided yet who encodes it
    is_far: bool = False  # an absent item: the next step cannot encode it
    may_come: bool = False  # an absent item: a call could find it
    locked_until_s: float = 0.0  # by this engine, which is to encode it; looked at again then
    gave_way: bool = False  # this engine did not encode it in time: it locks it as it begins
    missing: bool = False  # the engine is to encode it
    encoded: bool = False  # by this engine, for one of the users
    denied: bool = False  # the last answer: no node has it
    contested: bool = False  # other users have waited in vain for those in `bare` to finish
    mismatched: bool = False
    cause: str = "it was not looked up yet"
    ask_again_s: float = 0.0
    is_awaited: bool = False  # another engine encodes it
    asked_s: float = 0.0  # when the daemon was asked
    makes_s: float | None = None  # what it was told: how long another node is waited for
    is_told: bool = False  # the daemon, that this engine makes it, and nothing came of that yet

    def take(self, item: Item, outputs: Outputs) -> None:
        """Hold a leased item from now on."""
        self.item = item
        self.measure(outputs)
        self.missing = self.denied = self.absent = False
        self.is_awaited = self.is_told = False

    def measure(self, outputs: Outputs) -> None:
        """Compare the item with what this engine's encoder makes of each modality."""
        if self.item is not None:
            dtype, shape = self.item.dtype, self.item.shape
            fits = all(outputs.fit(modality, dtype, shape) for modality in self.modalities)
            self.embeddings = shape[0] if fits else None

    def has_left(self, share: float) -> bool:
        """Whether the item is leased, with this share of the lease's TTL ahead."""
        return self.item is not None and self.item.has_left(share)

    def count_use(self, *, for_another: bool) -> None:
        """Count the hit of a promised item in the daemon's figures, as in this engine's."""
        if self.item is not None:
            self.item.count_use(for_another=for_another)

    def serves_all(self, share_left: float) -> bool:
        """Whether the item is leased for long enough, and is what every user expects.

        Each request with the item asks in each step, so this looks at no user.
        """
        return self.has_left(share_left) and self.counts.keys() <= {self.embeddings}

    def add(self, user: User, embeddings: int) -> None:
        """Note a user that counts on so many embeddings."""
        self.remove(user)
        self.expected[user] = embeddings
        self.counts[embeddings] += 1

    def remove(self, user: User) -> int | None:
        """Remove a user; returns what it expected. None: the user is unknown."""
        embeddings = self.expected.pop(user, None)
        if embeddings is not None:
            self.counts[embeddings] -= 1
            if not self.counts[embeddings]:
                del self.counts[embeddings]
        return embeddings

    def serves(self, user: User, share_left: float) -> bool:
        """Whether the item is leased for long enough, and is what this user expects.

        An engine ends, or answers wrong, where metadata arrange the embeddings in another way.
        """
        return (
            self.expected[user] == self.embeddings
            and self.has_left(share_left)
            and (user not in self.bare or self._is_described_by(self.bare[user]))
        )

    def _is_described_by(self, said: Placeholder | None) -> bool:
        """Whether the entry has this metadata, or the model's items have none."""
        assert self.item is not None
        return said is None or said.is_of(self.item.metadata)

    def give_up(self, cause: str) -> None:
        """Drop the item and any answer under way; loads on their way keep the lease they have."""
        self.cause = cause
        loadings = [user for user in self.expected if isinstance(user, Loading)]
        if loadings and self.item is not None:
            kept = WantedItem(self.identifier, item=self.item)
            for loading in loadings:
                kept.add(loading, self.expected[loading])
                self.remove(loading)
                loading.wanted = kept
        elif self.item is not None:
            self.item.close()
        elif self.answer is not None and not self.answer.cancel():
            self.answer.add_done_callback(close_unseen)
        self.item = self.answer = self.makes_s = None
        self.mismatched = self.absent = False

    def start_over(self, cause: str) -> None:
        """Give up, and have the item looked up as if for the first time."""
        self.give_up(cause)
        self.missing = self.denied = False
        self.ask_again_s = 0.0
        self.is_awaited = False


class WantedItems:
    """The wanted items by identifier. An item leaves with its last user, and so does its lease."""

    def __init__(self, outputs: Outputs, left: Callable[[WantedItem], None]) -> None:
        """`left` is called with each item that its last user leaves."""
        self._outputs, self._left = outputs, left
        self._items: dict[str, WantedItem] = {}

    def __len__(self) -> int:
        return len(self._items)

    def get(self, identifier: str) -> WantedItem | None:
        return self._items.get(identifier)

    def want(self, request: RequestItems, needed: NeededItem) -> WantedItem:
        """Note that the request needs an item; a new user has a missing item looked up again."""
        user = request.user(needed)
        wanted = self._items.get(needed.identifier)
        if wanted is None:
            wanted = self._items[needed.identifier] = WantedItem(needed.identifier)
        elif wanted.missing and user not in wanted.expected:
            wanted.start_over(wanted.cause)
        wanted.add(user, needed.embeddings)
        if needed.modality not in wanted.modalities:
            wanted.modalities.add(needed.modality)
            wanted.measure(self._outputs)
        if needed.is_bare and user not in wanted.bare:
            wanted.bare[user] = needed.described
            if wanted.item is None:  # an answer that others wait for may be long in coming
                wanted.give_up(wanted.cause)
        if request.hints:
            wanted.hints = request.hints.get(needed.identifier, wanted.hints)
        return wanted

    def leave_all(self, request: RequestItems, items: Iterable[NeededItem]) -> None:
        """End the request's use of some of its items."""
        for needed in items:
            wanted = self._items.get(needed.identifier)
            if wanted is not None:
                self.leave(wanted, request.user(needed))

    def leave(self, wanted: WantedItem, user: User) -> None:
        """End one use of an item; the last one ends the lease."""
        wanted.bare.pop(user, None)
        if wanted.remove(user) is None or wanted.expected:
            return
        self._left(wanted)
        wanted.give_up(wanted.cause)
        if self._items.get(wanted.identifier) is wanted:
            del self._items[wanted.identifier]

    def start_over(self, cause: str) -> None:
        """Give every item up; those that only loads held leave."""
        for wanted in list(self._items.values()):
            wanted.promised = False
            if wanted.bare and not CAN_FAIL_ONE_REQUEST:
                continue  # a running request's, which vLLM 0.28 would have the engine encode
            wanted.start_over(cause)
            if not wanted.expected:
                del self._items[wanted.identifier]
