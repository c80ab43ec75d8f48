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
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.envs import VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
from vllm.logger import init_logger

from ecd_client.calls import CALL_TIMEOUT_S
from ecd_client.client import Client
from ecd_client.errors import DaemonUnavailable, EcdError, InvalidArgument
from ecd_client.item import Item
from ecd_client.reader import close_unseen
from ecd_client.vllm.compat import CAN_FAIL_ONE_REQUEST, PlaceholderMetadata, fail_by_itself
from ecd_client.vllm.hints import add_hints, consumers_in, hints_in
from ecd_client.vllm.identity import Identity, why_nothing_is_shared
from ecd_client.vllm.outputs import Outputs
from ecd_client.vllm.settings import FAIL, Settings
from ecd_client.vllm.stats import EcdStats
from ecd_client.vllm.transfer import Load
from ecd_proto.contract import Hint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

ENOUGH_LEFT = 1 / 2
"""Of a lease's TTL, to let a request be scheduled: a step later it is still enough to load."""
LEAST_LEFT = 1 / 3
"""Of a lease's TTL, to promise the item to the step that is being scheduled."""
ASK_AGAIN_S = 0.05
CONNECT_S = 2.0
"""How long an engine that starts waits for the daemon, so that its first requests share."""
NEWS_S = 1.0
"""How long after it was asked for first what no node has may still be news on its way here."""
MAX_LOAD_S = VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS + 60.0
"""After this, a load that no worker reported is lost: a step that takes longer ends the engine."""

User: TypeAlias = "tuple[str, int] | int"
"""Who needs an item: the index of one request's item, or a load."""


@dataclass(eq=False, slots=True)
class _Wanted:
    """An item that somebody still needs. `expected`: the embeddings each user counts on.

    The users in `bare` cannot do without it: their requests brought no media to encode.
    """

    identifier: str
    modalities: set[str] = field(default_factory=set)
    expected: dict[User, int] = field(default_factory=dict)
    bare: set[User] = field(default_factory=set)
    hints: list[Hint] = field(default_factory=list)  # nodes that are said to have it
    answer: Future[Item | None] | None = None
    item: Item | None = None
    length: int = -1  # of the item: its embeddings; -1: they are none of this engine's
    missing: bool = False
    denied: bool = False  # the last answer: nobody has it
    contested: bool = False  # others wait in vain for those in `bare` to be through
    mismatched: bool = False
    cause: str = "it was not looked up yet"
    ask_again_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Request:
    """What one unfinished request needs, in the order of its prompt."""

    deadline_s: float
    preemptions: int
    ends: list[int] = field(default_factory=list)
    items: list[tuple[int, str, int]] = field(default_factory=list)
    """Index in mm_features, identifier, number of embeddings."""
    modalities: dict[int, str] = field(default_factory=dict)  # by index
    seen: int = 0  # of mm_features
    hints: dict[str, list[Hint]] = field(default_factory=dict)  # where it says that items are
    bare: set[int] = field(default_factory=set)  # indices of items that came without their media
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
        vllm_config: VllmConfig,
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
        self._vllm_config, self._identity = vllm_config, settings.identity
        self._outputs = Outputs(vllm_config)
        self._metadata = PlaceholderMetadata(vllm_config.model_config)
        self._metadata.fields_for("image")  # takes long the first time: no request is to wait
        self._client = Client(
            settings.address,
            namespace=settings.identity.namespace,
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
        self.moves = 0
        """How often the namespace was set anew: the same one may come back with other weights."""
        self._to_ask: dict[str, _Wanted] = {}
        self._to_offer: dict[tuple[str, ...], list[str]] = {}
        self._to_save: set[str] = set()
        self._to_keep: set[str] = set()
        self._away = False
        logger.info("ecd: namespace %s on %s", self._identity.namespace, settings.address)
        if settings.identity.is_private:
            logger.warning(
                "ecd: this engine shares with no other, because what its weights are cannot be "
                "told: they come from a bucket, of no known commit, or changed as it started. "
                "Give engines of equal weights the same ecd_weights_version"
            )
        if not settings.trusts_uuids:
            logger.warning(
                "ecd: nothing is shared: ecd_uuids is refuse, and no version of vLLM tells the "
                "connector a client's uuid from a hash of content. To share, have the gateway "
                "remove uuids and let ecd_uuids be trust"
            )
        elif why := why_nothing_is_shared(vllm_config):
            logger.warning("ecd: nothing is shared: %s", why)

    def close(self) -> None:
        self._client.close()

    # -- weights -------------------------------------------------------------------------------

    @property
    def namespace(self) -> str | None:
        """What this engine's items are stored in now; None: they say nothing of content."""
        return self._identity.namespace if self._shares else None

    @property
    def _shares(self) -> bool:
        return self._settings.trusts_uuids and why_nothing_is_shared(self._vllm_config) is None

    def _is_shared(self, identifier: str) -> bool:
        return self._shares and self._settings.shares(identifier)

    def weights_changed(self, cause: str) -> None:
        """Use nothing that was encoded before, and let nobody else use what is encoded now."""
        self._move(self._identity.alone())
        logger.warning(
            "ecd: weights may have changed (%s): this engine shares with no other from now on, "
            "under %s. Tell vLLM their weight version, after the last such call, and it shares "
            "with engines that were told the same",
            *(cause, self._identity.namespace),
        )

    def weights_are(self, version: str) -> None:
        """Share with engines whose weights have this version."""
        self._move(self._identity.with_version(version))
        logger.info("ecd: namespace %s", self._identity.namespace)

    def forgotten(self, move: int) -> None:
        """A worker's encoder cache was emptied in a step of this number of moves."""
        if move == self.moves:
            self.weights_changed("a worker's encoder cache was emptied")

    def _move(self, identity: Identity) -> None:
        self.moves += 1
        self._identity, self._client.namespace = identity, identity.namespace
        self._promised.clear()
        self._to_ask.clear()
        self._to_offer.clear()
        self._to_save.clear()
        self._to_keep.clear()
        for state in self._requests.values():
            state.given.clear()
        for wanted in list(self._wanted.values()):
            if wanted.bare and not CAN_FAIL_ONE_REQUEST:
                continue  # of a running request, which vLLM 0.28 would have the engine encode
            self._give_up(wanted, "weights changed")
            wanted.missing = wanted.denied = False
            wanted.ask_again_s = 0.0
            if not wanted.expected:
                del self._wanted[wanted.identifier]

    # -- what vLLM asks ------------------------------------------------------------------------

    def ensure(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request may be scheduled: every item it still needs is leased or missing."""
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = self._admit(request)
            self._note_gone(state, num_computed_tokens)
        elif state.seen != len(request.mm_features):  # more input came for a resumable request
            self._take_in(state, request)
            state.deadline_s = time.monotonic() + self._settings.load_timeout_s
        if state.preemptions != request.num_preemptions:
            state.preemptions = request.num_preemptions
            state.given.clear()
            state.deadline_s = time.monotonic() + self._settings.load_timeout_s
        done = bisect_right(state.ends, num_computed_tokens)
        if done < state.done:
            state.given.clear()  # vLLM computes some of it again
        if done != state.done:
            for index, identifier, _ in state.items[state.done : done]:
                self._leave(self._wanted.get(identifier), (request.request_id, index))
            state.done = done
        if done == len(state.items):
            return True
        return not state.failed and self._all_settled(request, state)

    def promise(self, identifier: str) -> bool:
        """Whether the item is leased, so that the step now being scheduled can load it."""
        wanted = self._wanted.get(identifier)
        if wanted is not None and (
            self._serves(wanted, LEAST_LEFT)
            or any(self._serves_one(wanted, user, LEAST_LEFT) for user in wanted.bare)
        ):
            self._promised.add(identifier)
            return True
        self._promised.discard(identifier)
        return False

    def allocated(self, request: Request, index: int) -> None:
        """The engine made room for an item: what was promised is loaded, the rest it encodes."""
        identifier = request.mm_features[index].identifier
        if identifier not in self._wanted:
            return
        if identifier not in self._promised:
            self.stats.count("misses")
            return
        self.stats.count("hits")
        if not self._is_consumer:
            self._to_keep.add(identifier)
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

    def take_saves(self) -> tuple[list[str], list[str]]:
        """What ecd lacks, and what ecd has that the engine takes its own encoder cache to hold."""
        saves, self._to_save = self._to_save, set()
        keeps, self._to_keep = self._to_keep, set()
        return list(saves), list(keeps)

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
            self._leave_all(request.request_id, state)
        if not self._is_producer:
            return None
        stored = self._stored({identifier for _, identifier, _ in state.items} if state else ())
        params = self._metadata.of(request.mm_features, stored)
        if params and self._settings.announces_node:
            add_hints(params, self._hints(stored))
        return params

    # -- steps ---------------------------------------------------------------------------------

    def _admit(self, request: Request) -> _Request:
        deadline_s = time.monotonic() + self._settings.load_timeout_s
        state = _Request(deadline_s, request.num_preemptions)
        self._take_in(state, request)
        if params := request.ec_transfer_params:
            identifiers = [name for _, name, _ in state.items if self._is_shared(name)]
            state.hints = hints_in(params, identifiers, self.stats.count)
            consumers = consumers_in(params)
            if self._is_producer and consumers and identifiers:
                self._to_offer.setdefault(tuple(consumers), []).extend(identifiers)
        return state

    def _take_in(self, state: _Request, request: Request) -> None:
        """Note the items of the request that were not there before."""
        for index, feature in enumerate(request.mm_features[state.seen :], state.seen):
            if self._is_consumer and self._metadata.is_all_of(feature):
                state.bare.add(index)
            if index in state.bare or self._is_shared(feature.identifier):
                position = feature.mm_position
                state.ends.append(position.offset + position.length)
                state.items.append((index, feature.identifier, position.get_num_embeds()))
                state.modalities[index] = feature.modality
        state.seen = len(request.mm_features)

    def _note_gone(self, state: _Request, num_computed_tokens: int) -> None:
        """What is computed already is not looked up, but a producer keeps it stored."""
        if self._is_producer:
            done = state.items[: bisect_right(state.ends, num_computed_tokens)]
            items = {identifier for _, identifier, _ in done}
            self._to_save |= items - self._stored(items)

    def _stored(self, identifiers: Iterable[str]) -> set[str]:
        """Those that memory shows stored, or being copied to where they will be."""
        with contextlib.suppress(DaemonUnavailable):
            return {
                identifier
                for identifier in identifiers
                if self._is_shared(identifier) and self._client.is_shown(identifier)
            }
        return set()

    def _hints(self, identifiers: Iterable[str]) -> dict[str, Hint]:
        with contextlib.suppress(DaemonUnavailable):
            found = {identifier: self._client.hint(identifier) for identifier in identifiers}
            return {identifier: hint for identifier, hint in found.items() if hint}
        return {}

    def _all_settled(self, request: Request, state: _Request) -> bool:
        ahead = []
        for index, identifier, expected in state.items[state.done :]:
            if index not in state.given:
                user = (request.request_id, index)
                ahead.append((self._want(state, user, identifier, expected), user))
        for wanted, _ in ahead:
            self._look(wanted)
        settled = True
        for wanted, user in ahead:
            if user in wanted.bare:
                serves = self._serves_one(wanted, user, ENOUGH_LEFT)
                if wanted.contested or (not serves and self._is_beyond_hope(state, wanted)):
                    self._fail(request, state, wanted, "it came without media to encode")
                    return False
                settled = settled and serves
                continue
            if wanted.missing or self._serves(wanted, ENOUGH_LEFT):
                continue
            late = time.monotonic() >= state.deadline_s
            serves = self._serves_one(wanted, user, ENOUGH_LEFT)
            if wanted.item is not None:
                self._note_mismatch(wanted)
                # Those without media count on the entry as it is: they go first, while it lasts.
                wanted.contested = late and bool(wanted.bare) and not serves
                settled = settled and not self._fails and (serves or not wanted.bare)
            elif not late:
                settled = False
            elif not self._fails:
                self._note_late(wanted)
                wanted.missing = True
            if self._fails and (late or (wanted.item and not serves)):
                self._fail(request, state, wanted, "this engine has no encoder")
                return False
        return settled

    def _is_beyond_hope(self, state: _Request, wanted: _Wanted) -> bool:
        """Whether waiting for an item would be in vain."""
        now_s = time.monotonic()
        if wanted.item is not None:
            self._note_mismatch(wanted)
            return True
        if not self._is_shared(wanted.identifier):
            wanted.cause = "its name does not say what it is, so that it is not shared"
            return True
        if wanted.denied:
            asked_s = state.deadline_s - self._settings.load_timeout_s
            return now_s >= min(asked_s + (NEWS_S if self._has_peers() else 0), state.deadline_s)
        if now_s < state.deadline_s:
            return False
        if wanted.answer is not None or wanted.identifier in self._to_ask:
            self._note_late(wanted)
        return True

    def _has_peers(self) -> bool:
        with contextlib.suppress(DaemonUnavailable):
            return bool(self._client.node)
        return False

    def _want(
        self, state: _Request, user: tuple[str, int], identifier: str, expected: int
    ) -> _Wanted:
        wanted = self._wanted.get(identifier)
        if wanted is None or (wanted.missing and user not in wanted.expected):
            # Somebody may have stored it since it was found missing.
            if wanted is not None:
                self._give_up(wanted, wanted.cause)
                wanted.missing = wanted.denied = False
                wanted.ask_again_s = 0.0
            else:
                wanted = self._wanted[identifier] = _Wanted(identifier)
        wanted.expected[user] = expected
        if state.modalities[user[1]] not in wanted.modalities:
            wanted.modalities.add(state.modalities[user[1]])
            if wanted.item is not None:
                self._measure(wanted, wanted.item)
        if user[1] in state.bare and user not in wanted.bare:
            wanted.bare.add(user)
            if wanted.item is None:  # an answer that others wait for may be long in coming
                self._give_up(wanted, wanted.cause)
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
            or (wanted.missing and not wanted.bare)
            or wanted.identifier in self._to_ask
            or (wanted.bare and not self._is_shared(wanted.identifier))
            or (wanted.ask_again_s and time.monotonic() < wanted.ask_again_s)
        ):
            return
        try:
            item, may_come = self._client.get_now(wanted.identifier)
        except EcdError as error:
            self._note_failure(wanted, error)
            return
        if item is None and self._is_producer:
            self._to_save.add(wanted.identifier)
        if item is not None:
            self._note_hit(wanted, item)
        elif may_come or (self._fails and not wanted.bare):
            self._to_ask[wanted.identifier] = wanted
        else:
            self._note_miss(wanted, "nobody has stored it")

    def _send(self) -> None:
        """One message for all that this step did not find, and one for each group of consumers."""
        asked, self._to_ask = self._to_ask, {}
        for is_bare in (False, True):
            unique = [w for w in asked.values() if w.expected and bool(w.bare) == is_bare]
            if unique:
                self._ask(unique, only_if_written=is_bare or not self._fails)
        offers, self._to_offer = self._to_offer, {}
        for consumers, identifiers in offers.items():
            with contextlib.suppress(DaemonUnavailable):  # then there is nothing to offer
                self._client.offer(identifiers, consumers)

    def _ask(self, unique: list[_Wanted], only_if_written: bool) -> None:
        try:
            answers = self._client.get_async(
                [wanted.identifier for wanted in unique],
                self._settings.load_timeout_s,
                only_if_written=only_if_written,
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
        wanted.item = item
        self._measure(wanted, item)
        wanted.missing = wanted.denied = self._away = False

    def _measure(self, wanted: _Wanted, item: Item) -> None:
        fits = (self._outputs.fit(m, item.dtype, item.shape) for m in wanted.modalities)
        wanted.length = item.shape[0] if all(fits) else -1

    def _note_miss(self, wanted: _Wanted, cause: str) -> None:
        self._away = False
        wanted.denied = True
        self._not_there(wanted, cause)

    def _note_failure(self, wanted: _Wanted, error: BaseException) -> None:
        self.stats.count("failures")
        self._note_away(error)
        wanted.denied = False
        self._not_there(wanted, str(error))

    def _note_late(self, wanted: _Wanted) -> None:
        self.stats.count("failures")
        self._note_away("it did not answer in time")
        self._give_up(wanted, "ecd did not answer in time")

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

    def _serves_one(self, wanted: _Wanted, user: User, share_left: float) -> bool:
        """`_serves`, whatever the others expect."""
        alone = {user: wanted.expected[user]}
        return self._serves(replace(wanted, expected=alone), share_left)

    def _fail(self, request: Request, state: _Request, wanted: _Wanted, why: str) -> None:
        self.stats.count("unavailable")
        logger.error(
            "ecd: request %s fails: its item %s cannot be had, and %s: %s",
            request.request_id,
            wanted.identifier,
            why,
            wanted.cause,
        )
        state.failed = True
        self._leave_all(request.request_id, state)
        if CAN_FAIL_ONE_REQUEST:
            self._unavailable.add(request.request_id)
        else:
            fail_by_itself(request, wanted.cause)

    def _note_away(self, cause: object) -> None:
        if not self._away:
            self._away = True
            logger.warning("ecd: every item is a miss for now: %s", cause)

    def _note_mismatch(self, wanted: _Wanted) -> None:
        assert wanted.item is not None
        wanted.cause = (
            f"the entry is {wanted.item.dtype} of shape {wanted.item.shape}, but "
            f"{set(wanted.expected.values())} embeddings of {self._outputs} are expected: a client "
            "may have given one uuid to different media, or stored something else under it"
        )
        if not wanted.mismatched:
            wanted.mismatched = True
            self.stats.count("mismatches")
            logger.warning("ecd: %s is a miss: %s", wanted.identifier, wanted.cause)

    # -- letting go ----------------------------------------------------------------------------

    def _end_load(self, load: int) -> None:
        self._leave(self._loading.pop(load).wanted, load)

    def _leave_all(self, request_id: str, state: _Request) -> None:
        for index, identifier, _ in state.items:
            self._leave(self._wanted.get(identifier), (request_id, index))

    def _leave(self, wanted: _Wanted | None, user: User) -> None:
        """One user less; the last one ends the lease."""
        if wanted is not None:
            wanted.bare.discard(user)
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
