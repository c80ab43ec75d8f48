"""The scheduler's role: lease what requests need, promise only that, and keep it until loaded.

No call here waits. A request's items are looked up when it is first seen; until the answers are
there, or their time is over, the scheduler is told "not yet". A lease is held while a request
still has the item ahead of it, and while a load of it is on its way to the workers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import DaemonUnavailable, InvalidArgument
from ecd_client.vllm.base.compat import CAN_FAIL_ONE_REQUEST, reach_of_step
from ecd_client.vllm.base.description import Description
from ecd_client.vllm.base.hints import consumers_in, hints_in
from ecd_client.vllm.base.identity.shared_namespace import SharedNamespace
from ecd_client.vllm.base.metadata import PlaceholderMetadata, keep_media
from ecd_client.vllm.base.names import brought_with, name_apart, outer_name
from ecd_client.vllm.base.outputs import Outputs
from ecd_client.vllm.base.reports import Reports, loading_ranks
from ecd_client.vllm.base.settings import FAIL, Settings
from ecd_client.vllm.base.sharing import Sharing
from ecd_client.vllm.base.stats import EcdStats
from ecd_client.vllm.base.transfer import EcdMetadata
from ecd_client.vllm.scheduler.computed import ComputedItems
from ecd_client.vllm.scheduler.encodes import Encodes
from ecd_client.vllm.scheduler.loads import Loads
from ecd_client.vllm.scheduler.lookup import Lookup
from ecd_client.vllm.scheduler.producer import Producer
from ecd_client.vllm.scheduler.readiness import Readiness
from ecd_client.vllm.scheduler.request_items import NeededItem, RequestItems
from ecd_client.vllm.scheduler.wanted import WantedItems

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

LEAST_LEFT = 1 / 3
"""Share of a lease's TTL that lets the item be promised to the step that is being scheduled."""
CONNECT_S = 2.0
"""How long an engine that starts waits for the daemon, so that its first requests share."""


Method = TypeVar("Method", bound=Callable[..., Any])


def hook(method: Method) -> Method:
    """A method during which the thread of `Loads` waits."""

    @functools.wraps(method)
    def called(self: SchedulerRole, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(Method, called)


class SchedulerRole:
    """The hooks of vLLM's scheduler, called from its thread only."""

    def __init__(
        self,
        settings: Settings,
        vllm_config: VllmConfig,
        *,
        is_producer: bool,
        is_consumer: bool,
    ) -> None:
        if settings.on_unavailable == FAIL and not CAN_FAIL_ONE_REQUEST:
            raise InvalidArgument(
                "ecd_on_unavailable=fail needs a vLLM whose scheduler can fail a single request "
                "for its connector (0.32 can, 0.28 cannot)"
            )
        self._settings, self._lock = settings, threading.RLock()
        self._wait_s = settings.load_timeout_s
        self._fails = settings.on_unavailable == FAIL
        self._is_consumer = is_consumer
        self._sharing = Sharing(settings, vllm_config)
        self._outputs = outputs = Outputs(vllm_config)
        self._metadata = PlaceholderMetadata(vllm_config.model_config)
        self._metadata.fields_for("image")  # takes long the first time: no request is to wait
        keep_media(self._metadata)
        self._client = Client(
            settings.address,
            namespace=self._sharing.namespace,
            name="vllm scheduler",
            connect_timeout=0.0,
            call_timeout=settings.call_timeout_s,
        )
        with contextlib.suppress(DaemonUnavailable):  # it may come later
            self._client.wait_connected(CONNECT_S)
        self.stats = EcdStats()
        self._producer: Producer | None = None
        if is_producer:
            announces_node = settings.announces_node
            self._producer = Producer(
                self._client, self._sharing, self._metadata, announces_node=announces_node
            )
        self._encodes = Encodes(
            self._client, self.stats, settings.load_timeout_s, is_producer=is_producer
        )
        self._lookup = Lookup(
            self._client,
            settings,
            self._sharing,
            outputs,
            self.stats,
            self._producer,
            self._encodes,
        )
        self._items = WantedItems(outputs, self._encodes.left)
        self._computed = ComputedItems(vllm_config, self._client, self._sharing, self._metadata)
        self.reports = Reports(loading_ranks(vllm_config.parallel_config))
        self._loads = Loads(self._items, self.reports, self._lock)
        self._encoded_rows = 0  # by the step being scheduled
        self._steps = 0
        *reach, cached = reach_of_step(vllm_config)
        self._readiness = Readiness(
            settings, self._sharing, self._items, self._lookup, self.stats, *reach
        )
        self._requests: dict[str, RequestItems] = {}
        self._shown = SharedNamespace(vllm_config.instance_id)
        self._description = Description(
            vllm_config,
            settings,
            self._sharing,
            self._metadata.media,
            is_producer=is_producer,
            is_consumer=is_consumer,
        )
        self._show()
        self._sharing.log_start()
        self._description.log()
        self._description.log_room(outputs.bytes_of(cached))

    @hook
    def close(self) -> None:
        self._client.close()
        self._shown.close()
        self._loads.close()
        self.reports.close()

    # -- weights -------------------------------------------------------------------------------

    @property
    def namespace(self) -> str | None:
        """The namespace that workers store in now; None: they store nothing."""
        return self._sharing.namespace_to_store_in

    @property
    def moves(self) -> int:
        """How often the namespace was set anew."""
        return self._sharing.moves

    def _show(self) -> None:
        """Publish where this engine shares: to its API server's middleware, and to other engines.

        The middleware gets the namespace of pictures, if they are shared.
        """
        is_private = self._settings.keeps_private("image", is_streaming=False)
        self._shown.write(None if is_private else self.namespace)
        self._client.describe(self._description.engine, self._description.log_apart)

    @hook
    def weights_changed(self, cause: str) -> None:
        """Use no earlier embeddings, and share no later ones."""
        self._sharing.move_alone(cause)
        self._start_over()

    @hook
    def weights_are(self, version: str) -> None:
        """Share with engines of this training run whose weights have this version."""
        self._sharing.move_to_version(version)
        self._start_over()

    @hook
    def weights_sleep(self, are_kept: bool) -> None:
        """Note where the engine shares, before it falls asleep."""
        self._sharing.fall_asleep(are_kept)

    @hook
    def weights_wake(self) -> None:
        """Share as before the sleep, if no other change happened meanwhile."""
        self._sharing.wake_up()
        self._start_over()

    def _start_over(self) -> None:
        self._encodes.let_go()
        self._client.namespace = self._sharing.namespace
        self._show()
        self._lookup.forget()
        if self._producer is not None:
            self._producer.forget()
        for state in self._requests.values():
            state.given.clear()
        self._items.start_over("weights changed")

    # -- requests ------------------------------------------------------------------------------

    def name_items(self, request: Request | EngineCoreRequest) -> bool:
        """Give the items of a request the names that they have in this engine. False: all had.

        Before vLLM names the request's blocks by them, on whichever thread it does.
        """
        is_renamed = False
        for feature in request.mm_features or ():
            is_private = self._settings.keeps_private(
                feature.modality, is_streaming=request.resumable
            )
            is_renamed |= name_apart(feature, request.cache_salt, is_private=is_private)
        return is_renamed

    @hook
    def ensure(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request may be scheduled: every item it still needs is leased or missing."""
        state = self._requests.get(request.request_id)
        is_more = state is not None and state.seen != len(request.mm_features)
        if (state is None or is_more) and self.name_items(request):
            # vLLM made it in a way that is not known, and found tokens by the names of before.
            request.block_hashes.clear()
            request.update_block_hashes()
            return False
        if state is None:
            state = self._requests[request.request_id] = self._admit(request)
            if self._producer is not None:
                past = state.before(num_computed_tokens)  # not looked up, but kept stored
                self._producer.save_unless_stored(item.identifier for item in past)
        elif is_more:  # input of a resumable request
            self._take_in(state, request)
            state.deadline_s = clock.now_s() + self._wait_s
        if state.preemptions != request.num_preemptions:
            state.restart(request.num_preemptions, clock.now_s() + self._wait_s)
        if other := self._computed.others_in(request, state, num_computed_tokens):
            if request.skip_reading_prefix_cache:  # and vLLM 0.28 asks a connector for KV anyway
                self._readiness.refuse(request, state, other.identifier)
            request.skip_reading_prefix_cache = True
            return False
        if left := state.advance(num_computed_tokens):
            self._items.leave_all(state, left)
        if state.failed or state.is_past_all:
            return not state.failed
        is_ready = self._readiness.is_ready(request, state, num_computed_tokens)
        if is_ready:
            self._computed.note_bare(state)
        return is_ready

    def _admit(self, request: Request) -> RequestItems:
        deadline_s = clock.now_s() + self._wait_s
        state = RequestItems(request.request_id, deadline_s, request.num_preemptions)
        self._take_in(state, request)
        if params := request.ec_transfer_params:
            items = [item.identifier for item in state.needed]
            names = {outer_name(name): name for name in items if self._sharing.includes(name)}
            hints = hints_in(params, names, self.stats.count)
            state.hints = {names[name]: said for name, said in hints.items()}
            consumers = consumers_in(params)
            if self._producer is not None and consumers and names:
                self._producer.offer(list(names.values()), consumers)
        return state

    def _take_in(self, state: RequestItems, request: Request) -> None:
        """Note the request's items that were not seen before, if they are shared or bare.

        While workers seem to report no loads, none is, unless the engine has no encoder. The
        request fails if what it says of one makes no sense: vLLM ends over some of that.
        """
        may_load = self._fails or self._loads.are_reported
        for index, feature in enumerate(request.mm_features[state.seen :], state.seen):
            identifier = feature.identifier
            is_bare = self._is_consumer and self._metadata.is_all_of(feature)
            placeholder = self._metadata.of_bare(feature) if is_bare else None
            is_wrong = is_bare and placeholder is None and self._metadata.must_say(feature)
            brought = brought_with(feature)
            if is_wrong or (brought is not None and not self._is_sensible(feature, brought)):
                self._readiness.refuse(request, state, identifier)
            if is_bare or (may_load and self._sharing.includes(identifier)):
                state.add(NeededItem.of(feature, index, is_bare, placeholder), feature.mm_position)
        state.seen = len(request.mm_features)

    def _is_sensible(self, feature: Any, brought: Any) -> bool:
        """Whether embeddings that a client brought are what the model's language part takes."""
        modality, embeddings = feature.modality, feature.mm_position.get_num_embeds()
        return self._outputs.fit_brought(modality, brought, embeddings) and not (
            self._metadata.fields_for(modality) and self._metadata.of_item(feature) is None
        )

    @hook
    def finished(self, request: Request) -> dict[str, Any] | None:
        """Release all items of the request; return what its consumers need of them."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._items.leave_all(state, state.needed)
        self._hear()
        if self._producer is None:
            return None
        needed = state.needed if state is not None else ()
        return self._producer.answer(request, {item.identifier for item in needed})

    @hook
    def take_unavailable(self) -> set[str]:
        """The ids of requests that failed since the last call."""
        return self._readiness.take_failed()

    # -- steps ---------------------------------------------------------------------------------

    @hook
    def promise(self, identifier: str) -> bool:
        """Whether the item is leased, so that the step now being scheduled can load it."""
        wanted = self._items.get(identifier)
        if wanted is None:
            return False
        wanted.promised = wanted.serves_all(LEAST_LEFT) or any(
            wanted.serves(user, LEAST_LEFT) for user in wanted.bare
        )
        return wanted.promised

    @hook
    def allocated(self, request: Request, index: int) -> None:
        """Load a promised item, for which the engine made room now; it encodes the others."""
        feature = request.mm_features[index]
        wanted = self._items.get(feature.identifier)
        if self._is_consumer:  # others take no request without media, which alone is judged
            self._computed.note(feature)
        if wanted is None or not wanted.promised:
            if brought_with(feature) is None:
                self._encoded_rows += feature.mm_position.get_num_embeds()
            if self._producer is not None:
                self._producer.describe(feature)
        if wanted is None:
            return
        if not wanted.promised:
            self._encodes.begin(wanted)
            return
        self.stats.count("hits")
        wanted.count_use(for_another=not self._is_consumer)
        if not self._is_consumer:
            assert self._producer is not None
            self._producer.keep(wanted.identifier)
            return
        self._loads.begin(wanted)
        state = self._requests.get(request.request_id)
        if state is not None:
            state.given.add(index)
        self._items.leave(wanted, (request.request_id, index))

    @hook
    def end_step(self, num_scheduled_tokens: int) -> EcdMetadata:
        """Ask the daemon for what the step lacked; return the workers' part of the step."""
        self._hear()
        self._lookup.send()
        saves: list[str] = []
        keeps: list[str] = []
        if self._producer is not None:
            self._producer.send_offers()
            # Without tokens the first model runner of a consumer looks at no metadata.
            if not self._is_consumer or num_scheduled_tokens:
                saves, keeps = self._producer.take_saves()
        encoded_rows, self._encoded_rows = self._encoded_rows, 0
        self._steps += 1
        self._encodes.begin_step(self._steps)
        return EcdMetadata(
            self.namespace,
            self.moves,
            self._loads.take_new(),
            saves,
            keeps,
            self._steps,
            self.reports.place,
            {} if self._producer is None else self._producer.take_placeholders(),
            encoded_rows,
        )

    def _hear(self) -> None:
        """Process the workers' reports, once a step."""
        if not self.reports.have_news():
            return
        self._loads.look()
        self._encodes.end_steps(self.reports.step())
        by_workers = self.reports.take_counts()
        self.stats.aggregate(by_workers)
        if by_workers.data.get("dropped_saves"):
            self._encodes.let_go()
        if self.reports.forgotten() == self.moves:
            self.weights_changed("a worker's encoder cache was emptied")

    @hook
    def take_stats(self) -> EcdStats | None:
        """The counts of this role and its workers since the last call; None without any."""
        self._hear()
        return None if self.stats.is_empty() else self.stats.take()
