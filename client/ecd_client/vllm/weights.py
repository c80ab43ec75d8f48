"""Weights that change in a running engine: vLLM tells no connector, so its engine core is watched.

Every front end talks to `EngineCore`, in its own process or in theirs. It owns the scheduler and
the scheduler's connector. `reset_encoder_cache` is vLLM's sign that earlier embeddings are stale;
another is a call to the workers that is not known to leave the weights alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from vllm.v1.engine.core import EngineCore

HARMLESS = frozenset(
    (
        *("add_lora", "remove_lora", "pin_lora", "list_loras"),
        *("check_health", "compute_weight_checksums", "execute_dummy_batch", "profile"),
        *("get_encoder_timing_stats", "get_model_inspection", "get_supported_tasks"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
        *("reset_mm_cache", "save_sharded_state", "save_tensorized_model", "synchronize_device"),
        *("take_draft_token_ids", "update_max_model_len"),
    )
)
"""Calls to the workers that leave the encoder's weights as they are."""


class Watcher(Protocol):
    """The scheduler's connector, told of calls that may change weights."""

    def weights_changed(self, cause: str) -> None: ...

    def weights_are(self, version: str) -> None: ...


def watch(kind: type) -> None:
    """Have this process's engine core tell its scheduler's connector, if that is a `kind`."""
    if getattr(EngineCore, "_ecd_watches", False):
        return
    EngineCore._ecd_watches = True

    def told_by(name: str, tell: Callable[[Any, Any], None]) -> None:
        original = getattr(EngineCore, name)

        @functools.wraps(original)
        def watched(core: Any, *args: Any, **kwargs: Any) -> Any:
            connector = getattr(getattr(core, "scheduler", None), "ec_connector", None)
            if isinstance(connector, kind):
                tell(connector, args[0] if args else next(iter(kwargs.values()), None))
            return original(core, *args, **kwargs)

        setattr(EngineCore, name, watched)

    told_by("collective_rpc", _called)
    told_by("set_weight_version", lambda connector, version: connector.weights_are(str(version)))
    told_by("reset_encoder_cache", lambda connector, _: connector.weights_changed("a reset"))
    told_by("wake_up", lambda connector, _: connector.weights_changed("the engine woke up"))


def _called(connector: Watcher, method: Any) -> None:
    """Tell of a call to the workers before it is made: it may fail half way."""
    if method not in HARMLESS:
        name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
        connector.weights_changed(name)
