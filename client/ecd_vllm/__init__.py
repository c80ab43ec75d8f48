"""vLLM's plugin: what its API server needs of ecd, where an engine is started with the connector.

vLLM loads it in every process of every engine, so it imports nothing of ecd before that.
"""

from __future__ import annotations

import functools
from typing import Any

CONNECTOR = ["ecd_client", "vllm"]
"""The package of `ec_connector_module_path`, which may name a module in it."""


def register() -> None:
    """Have a process that configures an engine with ecd's connector check what clients send it."""
    from vllm.engine.arg_utils import EngineArgs

    configure = EngineArgs.create_engine_config

    @functools.wraps(configure)
    def configured(*args: Any, **kwargs: Any) -> Any:
        config = configure(*args, **kwargs)
        transfer = config.ec_transfer_config
        path = "" if transfer is None else transfer.ec_connector_module_path or ""
        if path.split(".")[:2] == CONNECTOR:
            from ecd_client.vllm.base.compat import refuse_undeclared

            refuse_undeclared(config.model_config)
        return config

    EngineArgs.create_engine_config = configured
