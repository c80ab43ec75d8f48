"""The connector of `ttft.py`: in one engine, each request shares in the way that it names.

Two processes of the same engine differ by several percent, for as long as they live, by where their
memory happens to lie; that is more than connectors do. So they are compared in one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

from ecd_client.vllm import EcdConnector

HOOKS = (
    *("bind_connector_metadata", "clear_connector_metadata", "start_load_caches", "save_caches"),
    *("get_finished", "build_connector_worker_meta", "get_ec_connector_stats", "has_cache_item"),
    *("take_unavailable_requests", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished"),
)


class Nothing(ECConnectorBase):
    """Shares nothing."""

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        pass

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
        pass

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        return ECConnectorMetadata()


class Switching(ECConnectorBase):
    """Forwards to the connector that the last request named in `ec_transfer_params`.

    For one request at a time, and for an engine that is one process: both roles are told at once.
    """

    way = "Nothing"

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        kinds = (EcdConnector, ECExampleConnector, Nothing)
        self._ways = {kind.__name__: kind(vllm_config, role) for kind in kinds}

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        Switching.way = request.ec_transfer_params["way"]
        return self._ways[self.way].ensure_cache_available(request, num_computed_tokens)

    def shutdown(self) -> None:
        for connector in self._ways.values():
            connector.shutdown()

    build_ec_connector_stats = EcdConnector.build_ec_connector_stats
    build_prom_metrics = EcdConnector.build_prom_metrics


def _forward(hook: str) -> Callable[..., Any]:
    def call(self: Switching, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._ways[self.way], hook)(*args, **kwargs)

    return call


for _hook in HOOKS:
    setattr(Switching, _hook, _forward(_hook))
abc.update_abstractmethods(Switching)
