"""vLLM's encoder-cache connector over ecd, and the middleware of its API server."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecd_client.vllm.connector import EcdConnector
    from ecd_client.vllm.middleware.reuse import ReuseMiddleware

__all__ = ["EcdConnector", "ReuseMiddleware"]


def __getattr__(name: str) -> Any:
    if name == "EcdConnector":
        from ecd_client.vllm.connector import EcdConnector

        return EcdConnector
    if name == "ReuseMiddleware":  # which an engine core does not import
        from ecd_client.vllm.middleware.reuse import ReuseMiddleware

        return ReuseMiddleware
    raise AttributeError(name)
