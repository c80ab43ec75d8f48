"""Watches vLLM's engine core for what it tells no connector: requests, and weights that change.

Every front end talks to `EngineCore`, in its own process or in theirs. It owns the scheduler and
the scheduler's connector. `reset_encoder_cache` is vLLM's sign that earlier embeddings are stale;
another is a call to the workers that is not known to leave the weights alone. A sleep of level 1
moves the weights aside, and waking up restores them.

A request's items get their names before vLLM names the request's blocks by them: a connector for KV
reads those before ecd is asked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

HARMLESS = frozenset(
    (
        *("add_lora", "remove_lora", "pin_lora", "list_loras"),
        *("check_health", "compute_weight_checksums", "execute_dummy_batch", "profile"),
        *("get_encoder_timing_stats", "get_model_inspection", "get_supported_tasks"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
        *("release_late_interaction_query_cache", "reset_mm_cache", "save_sharded_state"),
        *("save_tensorized_model", "synchronize_device", "take_draft_token_ids"),
        "update_max_model_len",
    )
)
"""Calls to the workers that leave the encoder's weights as they are."""

KEEPS_WEIGHTS = 1
"""The level of sleep that moves the weights to the host's memory; 2 drops them."""


class Watcher(Protocol):
    """The scheduler's connector, notified of requests, and of calls that may change weights."""

    def name_items(self, request: EngineCoreRequest) -> bool: ...

    def is_harmless(self, call: str) -> bool: ...

    def weights_changed(self, cause: str) -> None: ...

    def weights_are(self, version: str) -> None: ...

    def weights_sleep(self, are_kept: bool) -> None: ...

    def weights_wake(self) -> None: ...


_names: ContextVar[Watcher | None] = ContextVar("names", default=None)
"""The connector of the engine core that is making a request on this thread."""


def watch(kind: type) -> None:
    """Make this process's engine core notify its scheduler's connector, if that is a `kind`."""
    if getattr(EngineCore, "_ecd_watches", False):
        return
    _name_items_first()
    EngineCore._ecd_watches = True

    def told_by(
        name: str,
        before: Callable[[Any, Any, dict[str, Any]], Any],
        after: Callable[[Any, Any, Any], None],
    ) -> None:
        original = getattr(EngineCore, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def watched(core: Any, *args: Any, **kwargs: Any) -> Any:
            connector = getattr(getattr(core, "scheduler", None), "ec_connector", None)
            if not isinstance(connector, kind):
                return original(core, *args, **kwargs)
            call = signature.bind(core, *args, **kwargs)
            call.apply_defaults()
            known = before(connector, core, call.arguments)
            try:
                return original(core, *args, **kwargs)
            finally:
                after(connector, core, known)

        setattr(EngineCore, name, watched)

    def nothing(*_: Any) -> None:
        pass

    told_by("preprocess_add_request", _naming, _named)
    told_by("collective_rpc", _called, nothing)
    told_by("set_weight_version", _version_set, nothing)
    told_by("reset_encoder_cache", lambda to, *_: to.weights_changed("a reset"), nothing)
    told_by("sleep", _fell_asleep, nothing)
    told_by("wake_up", lambda _, core, __: core.model_executor.is_sleeping, _woke)


def _naming(connector: Watcher, *_: Any) -> Token[Watcher | None]:
    return _names.set(connector)


def _named(_: Watcher, __: Any, token: Token[Watcher | None]) -> None:
    _names.reset(token)


def _name_items_first() -> None:
    """Have a request's items named once vLLM has them all, and has not named a block yet."""
    make = Request.from_engine_core_request.__func__

    @functools.wraps(make)
    def named(kind: type, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> Request:
        if (connector := _names.get()) is not None:
            connector.name_items(request)
        return make(kind, request, *args, **kwargs)

    Request.from_engine_core_request = classmethod(named)


def _called(connector: Watcher, _: Any, call: dict[str, Any]) -> None:
    """Report a call to the workers before it is made: it may fail halfway."""
    method = call["method"]
    if isinstance(method, str) and (method in HARMLESS or connector.is_harmless(method)):
        return
    name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
    connector.weights_changed(name)


def _version_set(connector: Watcher, _: Any, call: dict[str, Any]) -> None:
    connector.weights_are(str(call["weight_version"]))


def _fell_asleep(connector: Watcher, core: Any, call: dict[str, Any]) -> None:
    """Report a sleep before it begins. It resets the encoder cache, which is reported, too."""
    is_awake = not core.model_executor.is_sleeping
    connector.weights_sleep(call["level"] == KEEPS_WEIGHTS and is_awake)


def _woke(connector: Watcher, core: Any, slept: bool) -> None:
    """Report the wake-up once everything is awake. Waking an engine that is awake does nothing."""
    if slept and not core.model_executor.is_sleeping:
        connector.weights_wake()
