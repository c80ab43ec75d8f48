"""The scheduler's role: lease what requests need, promise only that, and keep it until loaded.

No call here waits. A request's items are looked up when it is first seen; until the answers are
there, or their time is over, the scheduler is told "not yet". A lease is held while a request
still has the item ahead of it, and while a load of it is on its way to the workers.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.logger import init_logger

from ecd_client.calls import CALL_TIMEOUT_S
from ecd_client.client import Client
from ecd_client.errors import DaemonUnavailable, EcdError, InvalidArgument
from ecd_client.item import Item
from ecd_client.reader import close_unseen
from ecd_client.vllm.compat import CAN_FAIL_ONE_REQUEST, PlaceholderMetadata
from ecd_client.vllm.hints import add_hints, consumers_in, hints_in
from ecd_client.vllm.settings import FAIL, Settings
from ecd_client.vllm.stats import EcdStats
from ecd_client.vllm.transfer import Load
from ecd_proto.contract import Hint

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)

ENOUGH_LEFT = 1 / 2
"""Of a lease's TTL, to let a request be scheduled: a step later it is still enough to load."""
LEAST_LEFT = 1 / 3
"""Of a lease's TTL, to promise the item to the step that is being scheduled."""
ASK_AGAIN_S = 0.05
CONNECT_S = 2.0
"""How long an engine that starts waits for the daemon, so that its first requests share."""
MAX_LOAD_S = 300.0
"""After this, a load that no worker reported is taken for lost with its step."""

User: TypeAlias = "tuple[str, int] | int"
"""Who needs an item: the index of one request's item, or a load."""


@dataclass(eq=False, slots=True)
class _Wanted:
    """An item that somebody still needs. `expected`: the embeddings each user counts on."""

    identifier: str
    expected: dict[User, int] = field(default_factory=dict)
    hints: list[Hint] = field(default_factory=list)  # nodes that are said to have it
    answer: Future[Item | None] | None = None
    item: Item | None = None
    length: int = -1  # of the item: its embeddings
    missing: bool = False
    mismatched: bool = False
    cause: str = "it was not looked up yet"
    ask_again_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Request:
    """What one unfinished request needs, in the order of its prompt."""

    ends: list[int]
    items: list[tuple[int, str, int]]  # index in mm_features, identifier, number of embeddings
    deadline_s: float
    preemptions: int
    hints: dict[str, list[Hint]] = field(default_factory=dict)  # where it says that items are
    done: int = 0  # items that the request has computed past
    given: set[int] = field(default_factory=set)  # indices whose item was handed to a load
    failed: bool = False


@dataclass(eq=False, slots=True)
class _Loading:
    wanted: _Wanted
    missing_ranks: set[int]
    since_s: float


class SchedulerRole:
    """One per scheduler; called from its thread only."""

    def __init__(
        self,
        settings: Settings,
        model_config: Any,
        *,
        is_producer: bool,
        is_consumer: bool,
        workers: int,
    ) -> None:
        if settings.on_unavailable == FAIL and not CAN_FAIL_ONE_REQUEST:
            raise InvalidArgument(
                "ecd_on_unavailable=fail needs a vLLM whose scheduler can fail a single request "
                "for its connector (0.32 can, 0.28 cannot)"
            )
        self._settings = settings
        self._fails = settings.on_unavailable == FAIL
        self._is_producer, self._is_consumer = is_producer, is_consumer
        self._ranks = frozenset(range(workers))
        self._metadata = PlaceholderMetadata(model_config)
        self._client = Client(
            settings.address,
            namespace=settings.namespace,
            name="vllm scheduler",
            connect_timeout=0.0,
            call_timeout=min(CALL_TIMEOUT_S, settings.load_timeout_s),
        )
        with contextlib.suppress(DaemonUnavailable):  # it may come later
            self._client.wait_connected(CONNECT_S)
        self.stats = EcdStats()
        self._wanted: dict[str, _Wanted] = {}
        self._requests: dict[str, _Request] = {}
        self._promised: set[str] = set()
        self._new_loads: list[Load] = []
        self._loading: dict[int, _Loading] = {}
        self._last_load = 0
        self._unavailable: set[str] = set()
        self._to_ask: dict[str, _Wanted] = {}
        self._to_offer: dict[tuple[str, ...], list[str]] = {}
        self._away = False
        logger.info("ecd: namespace %s on %s", settings.namespace, settings.address)

    def close(self) -> None:
        self._client.close()

    # -- what vLLM asks ------------------------------------------------------------------------

    def ensure(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request may be scheduled: every item it still needs is leased or missing."""
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = self._admit(request)
        if state.preemptions != request.num_preemptions:
            state.preemptions = request.num_preemptions
            state.given.clear()
            state.deadline_s = time.monotonic() + self._settings.load_timeout_s
        done = bisect_right(state.ends, num_computed_tokens)
        if done != state.done:
            for index, identifier, _ in state.items[state.done : done]:
                self._leave(self._wanted.get(identifier), (request.request_id, index))
            state.done = done
        if done == len(state.items):
            return True
        return not state.failed and self._all_settled(request.request_id, state)

    def promise(self, identifier: str) -> bool:
        """Whether the item is leased, so that the step now being scheduled can load it."""
        wanted = self._wanted.get(identifier)
        if wanted is not None and self._serves(wanted, LEAST_LEFT):
            self._promised.add(identifier)
            return True
        self._promised.discard(identifier)
        return False

    def allocated(self, request: Request, index: int) -> None:
        """The engine made room for an item: what was promised is loaded, the rest it encodes."""
        identifier = request.mm_features[index].identifier
        if not self._is_consumer or identifier not in self._promised:
            return
        wanted = self._wanted[identifier]
        self._last_load += 1
        load = _load(self._last_load, wanted)
        self._new_loads.append(load)
        wanted.expected[load.id] = load.shape[0]
        self._loading[load.id] = _Loading(wanted, set(self._ranks), time.monotonic())
        state = self._requests.get(request.request_id)
        if state is not None:
            state.given.add(index)
        self._leave(wanted, (request.request_id, index))

    def take_loads(self) -> list[Load]:
        """What the workers are to load in the step just scheduled; tells the daemon of the step."""
        if self._to_ask or self._to_offer:
            self._send()
        while self._loading:
            oldest, loading = next(iter(self._loading.items()))
            if time.monotonic() - loading.since_s < MAX_LOAD_S:
                break
            self._end_load(oldest)
        loads, self._new_loads = self._new_loads, []
        return loads

    def loaded(self, reports: Iterable[str]) -> None:
        """Workers report loads as `<rank>/<load>`; the lease goes with the last rank."""
        for report in reports:
            rank, _, load = report.partition("/")
            loading = self._loading.get(int(load))
            if loading is not None:
                loading.missing_ranks.discard(int(rank))
                if not loading.missing_ranks:
                    self._end_load(int(load))

    def take_unavailable(self) -> set[str]:
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Let go of all that the request needed; what its consumers need to know of its items."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            for index, identifier, _ in state.items:
                self._leave(self._wanted.get(identifier), (request.request_id, index))
        if not self._is_producer:
            return None
        params = self._metadata.of(request.mm_features)
        if params and state is not None:
            add_hints(params, self._hints(identifier for _, identifier, _ in state.items))
        return params

    # -- steps ---------------------------------------------------------------------------------

    def _admit(self, request: Request) -> _Request:
        ends, items = [], []
        for index, feature in enumerate(request.mm_features):
            if self._settings.shares(feature.identifier):
                position = feature.mm_position
                ends.append(position.offset + position.length)
                items.append((index, feature.identifier, position.get_num_embeds()))
        deadline_s = time.monotonic() + self._settings.load_timeout_s
        state = _Request(ends, items, deadline_s, request.num_preemptions)
        if params := request.ec_transfer_params:
            state.hints = hints_in(params)
            consumers = consumers_in(params)
            if self._is_producer and consumers and items:
                offered = self._to_offer.setdefault(tuple(consumers), [])
                offered.extend(identifier for _, identifier, _ in items)
        return state

    def _hints(self, identifiers: Iterable[str]) -> dict[str, Hint]:
        with contextlib.suppress(DaemonUnavailable):
            found = {identifier: self._client.hint(identifier) for identifier in identifiers}
            return {identifier: hint for identifier, hint in found.items() if hint}
        return {}

    def _all_settled(self, request_id: str, state: _Request) -> bool:
        ahead = []
        for index, identifier, expected in state.items[state.done :]:
            if index not in state.given:
                ahead.append((self._want(request_id, state, index, identifier, expected), expected))
        for wanted, _ in ahead:
            self._look(wanted)
        settled = True
        for wanted, expected in ahead:
            if wanted.missing or self._serves(wanted, ENOUGH_LEFT):
                continue
            late = time.monotonic() >= state.deadline_s
            if wanted.item is not None:
                self._note_mismatch(wanted)
                settled = settled and not self._fails
            elif not late:
                settled = False
            elif not self._fails:
                self.stats.count("failures")
                self._note_away("it did not answer in time")
                self._give_up(wanted, "ecd did not answer in time")
                wanted.missing = True
            if self._fails and (late or (wanted.item and wanted.length != expected)):
                self._fail(request_id, state, wanted)
                return False
        return settled

    def _want(
        self, request_id: str, state: _Request, index: int, identifier: str, expected: int
    ) -> _Wanted:
        wanted = self._wanted.get(identifier)
        user = (request_id, index)
        if wanted is None or (wanted.missing and user not in wanted.expected):
            # Somebody may have stored it since it was found missing.
            if wanted is not None:
                self._give_up(wanted, wanted.cause)
                wanted.missing, wanted.ask_again_s = False, 0.0
            else:
                wanted = self._wanted[identifier] = _Wanted(identifier)
        wanted.expected[user] = expected
        if state.hints:
            wanted.hints = state.hints.get(identifier, wanted.hints)
        return wanted

    def _look(self, wanted: _Wanted) -> None:
        """See whether the item is there; what memory does not show goes into the next message."""
        if wanted.answer is not None:
            self._take_answer(wanted)
        if wanted.item is not None and not _has_left(wanted.item, ENOUGH_LEFT):
            self._give_up(wanted, "its lease ran out: the daemon is away")
        if (
            wanted.item is not None
            or wanted.answer is not None
            or wanted.missing
            or wanted.identifier in self._to_ask
            or (wanted.ask_again_s and time.monotonic() < wanted.ask_again_s)
        ):
            return
        try:
            item, may_come = self._client.get_now(wanted.identifier)
        except EcdError as error:
            self._note_failure(wanted, error)
            return
        if item is not None:
            self._note_hit(wanted, item)
        elif may_come or self._fails:
            self._to_ask[wanted.identifier] = wanted
        else:
            self._note_miss(wanted, "nobody has stored it")

    def _send(self) -> None:
        """One message for all that this step did not find, and one for each group of consumers."""
        asked, self._to_ask = self._to_ask, {}
        if unique := [wanted for wanted in asked.values() if wanted.expected]:
            self._ask(unique)
        offers, self._to_offer = self._to_offer, {}
        for consumers, identifiers in offers.items():
            with contextlib.suppress(DaemonUnavailable):  # then there is nothing to offer
                self._client.offer(identifiers, consumers)

    def _ask(self, unique: list[_Wanted]) -> None:
        try:
            answers = self._client.get_async(
                [wanted.identifier for wanted in unique],
                self._settings.load_timeout_s,
                only_if_written=not self._fails,
                nodes=[wanted.hints for wanted in unique],
            )
        except EcdError as error:
            for wanted in unique:
                self._note_failure(wanted, error)
            return
        for wanted, answer in zip(unique, answers, strict=True):
            wanted.answer = answer
            wanted.cause = "nobody has stored it"

    def _take_answer(self, wanted: _Wanted) -> None:
        answer = wanted.answer
        assert answer is not None
        if not answer.done():
            return
        wanted.answer = None
        error = answer.exception()
        if error is not None:
            self._note_failure(wanted, error)
            return
        item = answer.result()
        if item is None:
            self._note_miss(wanted, wanted.cause)
            return
        self._note_hit(wanted, item)

    def _note_hit(self, wanted: _Wanted, item: Item) -> None:
        wanted.item, wanted.length = item, next(iter(item.shape), -1)
        self._away = False
        self.stats.count("hits")

    def _note_miss(self, wanted: _Wanted, cause: str) -> None:
        self._away = False
        self.stats.count("misses")
        self._not_there(wanted, cause)

    def _note_failure(self, wanted: _Wanted, error: BaseException) -> None:
        self.stats.count("failures")
        self._note_away(error)
        self._not_there(wanted, str(error))

    def _not_there(self, wanted: _Wanted, cause: str) -> None:
        wanted.cause = cause
        wanted.missing = not self._fails
        wanted.ask_again_s = time.monotonic() + ASK_AGAIN_S

    def _serves(self, wanted: _Wanted, share_left: float) -> bool:
        """Whether the item is here and is what each of its users expects."""
        item = wanted.item
        if item is None or not _has_left(item, share_left):
            return False
        return all(map(wanted.length.__eq__, wanted.expected.values()))

    def _fail(self, request_id: str, state: _Request, wanted: _Wanted) -> None:
        self.stats.count("unavailable")
        logger.error(
            "ecd: request %s fails: its item %s could not be had within %g s, and this engine "
            "has no encoder: %s",
            request_id,
            wanted.identifier,
            self._settings.load_timeout_s,
            wanted.cause,
        )
        state.failed = True
        self._unavailable.add(request_id)

    def _note_away(self, cause: object) -> None:
        if not self._away:
            self._away = True
            logger.warning("ecd: every item is a miss for now: %s", cause)

    def _note_mismatch(self, wanted: _Wanted) -> None:
        assert wanted.item is not None
        wanted.cause = (
            f"the entry has the shape {wanted.item.shape}, but {set(wanted.expected.values())} "
            "embeddings are expected: a client may have given one uuid to different media"
        )
        if not wanted.mismatched:
            wanted.mismatched = True
            self.stats.count("mismatches")
            logger.warning("ecd: %s is a miss: %s", wanted.identifier, wanted.cause)

    # -- letting go ----------------------------------------------------------------------------

    def _end_load(self, load: int) -> None:
        self._leave(self._loading.pop(load).wanted, load)

    def _leave(self, wanted: _Wanted | None, user: User) -> None:
        """One user less; the last one ends the lease."""
        if wanted is None or wanted.expected.pop(user, None) is None or wanted.expected:
            return
        self._give_up(wanted, wanted.cause)
        if self._wanted.get(wanted.identifier) is wanted:
            del self._wanted[wanted.identifier]
            self._promised.discard(wanted.identifier)

    def _give_up(self, wanted: _Wanted, cause: str) -> None:
        """Neither item nor answer from here on; a load on its way keeps the lease it has."""
        wanted.cause = cause
        loads = [user for user in wanted.expected if isinstance(user, int)]
        if loads and wanted.item is not None:
            kept = _Wanted(wanted.identifier, item=wanted.item)
            for load in loads:
                kept.expected[load] = wanted.expected.pop(load)
                self._loading[load].wanted = kept
        elif wanted.item is not None:
            wanted.item.close()
        elif wanted.answer is not None and not wanted.answer.cancel():
            wanted.answer.add_done_callback(close_unseen)
        wanted.item = wanted.answer = None
        wanted.mismatched = False


def _has_left(item: Item, share: float) -> bool:
    lease = item.lease
    if lease.expires_s == inf:
        return True
    left_s = lease.expires_s - time.monotonic()
    return left_s >= share * lease.conversation.lease_ttl_s


def _load(load: int, wanted: _Wanted) -> Load:
    assert wanted.item is not None
    lease = wanted.item.lease
    conversation, content, extent = lease.conversation, lease.content, lease.extent
    return Load(  # in order, as naming each takes longer than all the rest
        load,
        wanted.identifier,
        conversation.incarnation,
        conversation.pool_path,
        conversation.pool_fd_path,
        conversation.pool_bytes,
        extent.offset,
        extent.nbytes,
        content.dtype,
        tuple(content.shape),
        lease.expires_s,
    )
