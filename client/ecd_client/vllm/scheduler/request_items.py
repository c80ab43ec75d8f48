"""The media items of one unfinished request, in the order of its prompt."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ecd_proto.contract import Hint
from ecd_proto.placeholders import Placeholder

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

RequestUser: TypeAlias = "tuple[str, int]"
"""One item of one request: the request's id, and the item's index in `mm_features`."""


@dataclass(eq=False, slots=True)
class NeededItem:
    """One place in a prompt that embeddings have to fill.

    `index` is the item's in `mm_features`, `start` the first token of the place. A bare item came
    without its media, so this engine cannot encode it; `described` is the metadata that came.
    """

    index: int
    start: int
    identifier: str
    embeddings: int
    modality: str
    is_bare: bool
    described: Placeholder | None = None

    @classmethod
    def of(
        cls,
        feature: MultiModalFeatureSpec,
        index: int,
        is_bare: bool,
        described: Placeholder | None,
    ) -> NeededItem:
        place = feature.mm_position
        return cls(
            index,
            place.offset,
            feature.identifier,
            place.get_num_embeds(),
            feature.modality,
            is_bare,
            described,
        )


@dataclass(eq=False, slots=True)
class RequestItems:
    """The items that one request needs, and how far the request is in its prompt.

    `deadline_s` ends the wait for missing items. `seen` counts the request's `mm_features` that
    were read; those whose items are not shared are not in `needed`. The first `judged` of these
    may have tokens that another request has computed, which vLLM has taken for this one; of the
    first `noted` it is known with which metadata this one computes them. `given` has the indices of
    items that were handed to a load.
    """

    request_id: str
    deadline_s: float
    preemptions: int
    awaits_until_s: float = 0.0  # other engines, since the first question or wait; 0: none yet
    needed: list[NeededItem] = field(default_factory=list)
    hints: dict[str, list[Hint]] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    seen: int = 0
    judged: int = 0
    noted: int = 0
    failed: bool = False
    _ends: list[int] = field(default_factory=list)  # token positions, one for each needed item
    _past: int = 0  # the first items of `needed`, which the request has computed past

    def add(self, item: NeededItem, place: PlaceholderRange) -> None:
        self.needed.append(item)
        self._ends.append(place.offset + place.length)

    def user(self, item: NeededItem) -> RequestUser:
        return self.request_id, item.index

    def before(self, num_computed_tokens: int) -> list[NeededItem]:
        """The items that end within the computed tokens."""
        return self.needed[: bisect_right(self._ends, num_computed_tokens)]

    def begun_within(self, num_computed_tokens: int) -> Iterator[NeededItem]:
        """The items that are not judged, and begin within the computed tokens."""
        for item in self.needed[self.judged :]:
            if item.start >= num_computed_tokens:
                return
            yield item

    def ahead(self) -> list[NeededItem]:
        """The items that the request has not computed past and that no load was given."""
        return [item for item in self.needed[self._past :] if item.index not in self.given]

    @property
    def is_past_all(self) -> bool:
        return self._past == len(self.needed)

    def advance(self, num_computed_tokens: int) -> list[NeededItem]:
        """Note how much is computed; return the items that the request computed past just now."""
        past = bisect_right(self._ends, num_computed_tokens)
        if past < self._past:
            self.given.clear()  # vLLM computes some tokens again
        left = self.needed[self._past : past]
        self._past = past
        return left

    def restart(self, preemptions: int, deadline_s: float) -> None:
        """Note a preemption: vLLM repeats earlier loads."""
        self.preemptions, self.deadline_s = preemptions, deadline_s
        self.given.clear()
        self.judged = self.noted = 0  # its tokens may be others' now
