"""The connector of `ttft.py` and `connector.py`: one engine that shares in one way after another.

Two processes of the same engine differ by several percent, for as long as they live, by where their
memory happens to lie; that is more than connectors do. So they are compared in one.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from copy import copy
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

from ecd_client.vllm import EcdConnector

HOOKS = tuple(
    name
    for name, member in vars(ECConnectorBase).items()
    if inspect.isfunction(member) and not name.startswith("_") and name != "shutdown"
)
"""All that vLLM asks a connector while it runs."""


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


def _of_ecd(vllm_config: Any) -> Any:
    """The configuration with the settings of ecd alone, which takes no others."""
    told, transfer = copy(vllm_config), copy(vllm_config.ec_transfer_config)
    said = transfer.ec_connector_extra_config.items()
    transfer.ec_connector_extra_config = {key: each for key, each in said if key[:4] == "ecd_"}
    told.ec_transfer_config = transfer
    return told


class Switching(ECConnectorBase):
    """Forwards to the connector that the last request named in `ec_transfer_params`.

    All requests at one time name the same; the connector sees them without these parameters. The
    scheduler's message tells the worker, which may be another process.
    """

    way = "Nothing"

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._ways: dict[str, Any] = {
            kind.__name__: kind(told, role)
            for kind, told in (
                (EcdConnector, _of_ecd(vllm_config)),
                (ECExampleConnector, vllm_config),
                (Nothing, vllm_config),
            )
        }

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        if request.ec_transfer_params is not None:
            Switching.way = request.ec_transfer_params["way"]
            request.ec_transfer_params = None
        return self._ways[self.way].ensure_cache_available(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        metadata = self._ways[self.way].build_connector_meta(scheduler_output)
        metadata.way = self.way
        return metadata

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        Switching.way = connector_metadata.way
        self._ways[self.way].bind_connector_metadata(connector_metadata)

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
    if _hook not in vars(Switching):
        setattr(Switching, _hook, _forward(_hook))
abc.update_abstractmethods(Switching)
