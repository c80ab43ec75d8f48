"""vLLM's encoder-cache connector over ecd."""

from ecd_client.vllm.connector import EcdConnector

__all__ = ["EcdConnector"]
