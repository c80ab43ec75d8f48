"""Whether a request may be scheduled: each item is leased, or known to be missing."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from ecd_client import clock
from ecd_client.vllm.base.compat import CAN_FAIL_ONE_REQUEST, fail_by_itself
from ecd_client.vllm.base.settings import FAIL, Settings
from ecd_client.vllm.base.sharing import Sharing
from ecd_client.vllm.base.stats import EcdStats
from ecd_client.vllm.scheduler.lookup import ENOUGH_LEFT, Lookup
from ecd_client.vllm.scheduler.request_items import NeededItem, RequestItems
from ecd_client.vllm.scheduler.wanted import User, WantedItem, WantedItems
from ecd_proto.contract import shown

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

NEWS_S = 1.0
"""How long an entry may take to become known to this node, counted from the first question."""


class _Verdict(enum.Enum):
    """The meaning of one item for its request."""

    READY = enum.auto()
    NOT_YET = enum.auto()
    FAILS = enum.auto()


class Readiness:
    """Judges requests by their items, and fails those that cannot be served."""

    def __init__(
        self,
        settings: Settings,
        sharing: Sharing,
        items: WantedItems,
        lookup: Lookup,
        stats: EcdStats,
        step_tokens: int,
        step_embeddings: int,
    ) -> None:
        """A step asks for items within so many tokens, and encodes so many embeddings at most."""
        self._sharing, self._items, self._lookup = sharing, items, lookup
        self._wait_s = settings.load_timeout_s
        self._fails = settings.on_unavailable == FAIL
        self._stats = stats
        self._step_tokens, self._step_embeddings = step_tokens, step_embeddings
        self.failed: set[str] = set()
        """Ids of failed requests, for vLLM's scheduler to end; vLLM 0.28 ends them by itself."""

    def is_ready(self, request: Request, state: RequestItems, num_computed_tokens: int) -> bool:
        """Look up every item that the request still needs, and judge by them."""
        needs = state.ahead()
        ahead = [(self._items.want(state, needed), state.user(needed)) for needed in needs]
        for wanted, _ in ahead:
            self._lookup.look(wanted)
        if any(wanted.absent for wanted, _ in ahead):
            wanteds = [wanted for wanted, _ in ahead]
            self._take_on(state, needs, wanteds, num_computed_tokens)
        is_ready = True
        for wanted, user in ahead:
            if user in wanted.bare:
                verdict = self._judge_bare(state, wanted, user)
                why = "it came without media to encode"
            else:
                verdict = self._judge(state, wanted, user)
                why = "this engine has no encoder"
            if verdict is _Verdict.FAILS:
                self._lookup.count_miss()
                self._fail(request, state, wanted.identifier, why, wanted.cause)
                return False
            is_ready = is_ready and verdict is _Verdict.READY
        return is_ready

    def _take_on(
        self,
        state: RequestItems,
        needs: Sequence[NeededItem],
        wanteds: Sequence[WantedItem],
        num_computed_tokens: int,
    ) -> None:
        """Have the absent items encoded that the next step can encode, by this engine or another.

        The others are not locked: who needs nothing but those would wait for long.
        """
        near: dict[str, WantedItem] = {}
        end, left = num_computed_tokens + self._step_tokens, self._step_embeddings
        for needed, wanted in zip(needs, wanteds, strict=True):
            if not wanted.absent or wanted.identifier in near:
                continue
            left -= needed.embeddings
            wanted.is_far = needed.start >= end or (left < 0 and bool(near))
            if wanted.is_far:
                self._lookup.take_far(wanted)
            else:
                near[wanted.identifier] = wanted
        if near:
            self._lookup.take_on(list(near.values()), state)

    def _judge(self, state: RequestItems, wanted: WantedItem, user: User) -> _Verdict:
        """Judge an item that the engine can encode, unless it has no encoder."""
        if wanted.missing or wanted.serves_all(ENOUGH_LEFT):
            return _Verdict.READY
        if wanted.absent:  # else another engine encodes it, which is waited for
            return _Verdict.READY if wanted.is_far else _Verdict.NOT_YET
        is_late = self._lookup.is_late(wanted, state.deadline_s)
        if wanted.item is not None:
            self._lookup.note_mismatch(wanted)
            serves = wanted.serves(user, ENOUGH_LEFT)
            # Bare users count on the entry as it is: they go first, while it lasts.
            wanted.contested = is_late and bool(wanted.bare) and not serves
            if self._fails:
                return _Verdict.FAILS if is_late or not serves else _Verdict.NOT_YET
            return _Verdict.READY if serves or not wanted.bare else _Verdict.NOT_YET
        if not is_late:
            return _Verdict.NOT_YET
        if self._fails:
            return _Verdict.FAILS
        if self._lookup.goes_on(wanted):
            return _Verdict.NOT_YET
        self._lookup.note_late(wanted)
        wanted.missing = True
        return _Verdict.READY

    def _judge_bare(self, state: RequestItems, wanted: WantedItem, user: User) -> _Verdict:
        """Judge an item that only ecd can give."""
        serves = wanted.serves(user, ENOUGH_LEFT)
        if wanted.contested or (not serves and self._is_beyond_hope(state, wanted)):
            return _Verdict.FAILS
        return _Verdict.READY if serves else _Verdict.NOT_YET

    def _is_beyond_hope(self, state: RequestItems, wanted: WantedItem) -> bool:
        """Whether waiting for an item would be in vain."""
        now_s = clock.now_s()
        if wanted.item is not None:
            self._lookup.note_mismatch(wanted)
            return True
        if not self._sharing.includes(wanted.identifier):
            wanted.cause = "its name does not say what it is, so that it is not shared"
            return True
        if wanted.denied:
            asked_s = state.deadline_s - self._wait_s
            news_s = NEWS_S if self._lookup.has_peers() else 0
            return now_s >= min(asked_s + news_s, state.deadline_s)
        if now_s < state.deadline_s:
            return False
        if self._lookup.is_asking(wanted):
            self._lookup.note_late(wanted)
        return True

    def refuse(self, request: Request, state: RequestItems, identifier: str) -> None:
        """Fail a request whose statement about an item is malformed."""
        why = "the engine would not outlive that"
        self._fail(request, state, identifier, why, "what the request says of it makes no sense")

    def _fail(
        self, request: Request, state: RequestItems, identifier: str, why: str, cause: str
    ) -> None:
        if state.failed:
            return
        self._stats.count("unavailable")
        logger.error(
            "ecd: request %s fails: its item %s cannot be had, and %s: %s",
            shown(request.request_id),
            shown(identifier),
            why,
            cause,
        )
        state.failed = True
        self._items.leave_all(state, state.needed)
        if CAN_FAIL_ONE_REQUEST:
            self.failed.add(request.request_id)
        else:
            fail_by_itself(request, cause)

    def take_failed(self) -> set[str]:
        failed, self.failed = self.failed, set()
        return failed
