"""The differences between vLLM 0.28 and 0.33; no other file checks which version runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.logger import init_logger
from vllm.multimodal.parse import DictEmbeddingItems
from vllm.multimodal.processing import BaseMultiModalProcessor

from ecd_client.errors import EcdError
from ecd_proto.placeholders import may_be_said

if TYPE_CHECKING:
    from vllm.config import VllmConfig

try:  # since 0.32
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorPromMetrics,
        ECConnectorStats,
    )
except ImportError:  # nothing asks for stats then
    ECConnectorStats = ECConnectorPromMetrics = object

try:  # since 0.32
    from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
    from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache as ReceiverCache
    from vllm.multimodal.image import open_image
    from vllm.multimodal.utils import strip_covered_mm_data
except ImportError:
    collect_ec_item_metadata = ReceiverCache = open_image = strip_covered_mm_data = None

try:  # since 0.33
    from vllm.connections import MediaRequestDownloadBudget as DownloadBudget
    from vllm.multimodal.media import MediaDecodedBudget as DecodedBudget
except ImportError:
    DownloadBudget = DecodedBudget = None

__all__ = [
    "ASKS_OF_RUNNING",
    "CAN_FAIL_ONE_REQUEST",
    "CAN_LEAVE_OUT_MEDIA",
    "TELLS_WHAT_TO_SAVE",
    "ECConnectorPromMetrics",
    "ECConnectorStats",
    "ReceiverCache",
    "caches_as_vllm",
    "collect_ec_item_metadata",
    "fail_by_itself",
    "gpu_bytes",
    "is_mistrals",
    "media_budgets",
    "open_image",
    "reach_of_step",
    "strip_covered_mm_data",
    "takes_prefilled",
]

logger = init_logger(f"vllm.{__name__}")

MAX_FIELD_NUMBERS = 1 << 16
"""Most numbers of one field of all items of a request."""

CAN_FAIL_ONE_REQUEST = hasattr(ECConnectorBase, "take_unavailable_requests")
ASKS_OF_RUNNING = CAN_FAIL_ONE_REQUEST  # whether the scheduler asks the connector in every step
"""Whether the scheduler asks which requests the connector cannot serve."""
CAN_LEAVE_OUT_MEDIA = ReceiverCache is not None
"""Whether the server takes placeholder metadata as JSON, in place of an item's media."""
TELLS_WHAT_TO_SAVE = hasattr(ECConnectorBase, "start_save_caches")
"""Whether a producer's worker receives its encoder cache at the beginning of each step."""

OF_ONE_REQUEST = {
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
    *("MooncakeConnector", "MoRIIOConnector"),
}
"""Connectors that bring the tokens of one request, which another engine has computed for this one.
The others bring those that any request had."""


def takes_prefilled(vllm_config: VllmConfig) -> bool:
    """Whether the engine takes tokens from another that has computed the same request."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_consumer:
        return False
    parts = transfer.kv_connector_extra_config.get("connectors", [])  # of a MultiConnector
    names = {transfer.kv_connector, *(part.get("kv_connector") for part in parts)}
    return not names.isdisjoint(OF_ONE_REQUEST)


def fail_by_itself(request: Any, cause: str) -> None:
    """Have the scheduler of vLLM 0.28 fail a request that it has not scheduled yet.

    That scheduler asks no connector for failed requests. But it ends a request whose grammar did
    not compile, alone and with FINISHED_ERROR, and reads neither the grammar nor the answer's form.
    """
    from vllm.v1.request import RequestStatus

    request.structured_output_request = SimpleNamespace(grammar=EcdError(cause))
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def reach_of_step(vllm_config: VllmConfig) -> tuple[int, int, int]:
    """How many tokens of a request one step looks for items in, and embeddings that it encodes.

    The third number is the embeddings for which the encoder cache has room.

    A drafter that has the model's hidden states reads further than the step computes, and an item
    that is larger than a step's tokens makes room for several small ones.
    """
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget  # of an engine core

    scheduler, drafts = vllm_config.scheduler_config, vllm_config.speculative_config
    tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if drafts is not None and drafts.use_eagle():
        tokens += drafts.num_speculative_tokens if drafts.use_multi_module_mtp() else 1
    if vllm_config.model_config.multimodal_config is None:
        return tokens, 0, 0
    budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY)
    return tokens, budget.encoder_compute_budget, budget.encoder_cache_size


def gpu_bytes() -> int:
    """All memory of this engine's GPU; 0 without one, or where nothing says it.

    Nothing does for a MIG instance, which vLLM takes for a whole GPU, nor without NVML, where vLLM
    would initialize CUDA in a process that may have no use for it.
    """
    from vllm.platforms import current_platform

    with contextlib.suppress(Exception):  # of a library for a GPU, which may lack anything
        has_nvml = "NonNvml" not in type(current_platform).__name__
        is_mig = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
        if current_platform.is_cuda() and has_nvml and not is_mig:
            return int(current_platform.get_device_total_memory())
    return 0


def refuse_undeclared(model_config: Any) -> None:
    """Have this process refuse what a client may not say of an item that it sends without media.

    vLLM's parser takes all fields of a processor's output. A worker ends over values that no
    processor made, and the API server over fields that make its prompt larger than its memory.
    """
    if (
        not CAN_LEAVE_OUT_MEDIA
        or getattr(DictEmbeddingItems, "_ecd_refuses", False)
        or getattr(model_config, "is_multimodal_raw_input_only_model", False)
    ):
        return
    DictEmbeddingItems._ecd_refuses = True
    begin = DictEmbeddingItems.__init__
    takes = inspect.signature(begin)

    @functools.wraps(begin)
    def checked(self: Any, *arguments: Any, **named: Any) -> None:
        said = takes.bind(self, *arguments, **named).arguments
        data, modality, required = said["data"], said["modality"], said["required_fields"]
        embeds = {f"{modality}_embeds"} & {*required, *said.get("optional_fields", ())}
        refused = [
            str(name)
            for name, value in data.items()
            if name not in embeds and not (name in required and may_be_said(name, _in_lists(value)))
        ]
        if refused:
            shown = ", ".join(sorted(refused))[:200]
            raise ValueError(f"an {modality} without its media may not come with such {shown}")
        begin(self, *arguments, **named)

    DictEmbeddingItems.__init__ = checked


def _in_lists(value: Any) -> Any:
    """A field's tensor, or its list of tensors, as lists; None if it is long."""
    if isinstance(value, torch.Tensor):
        return None if value.numel() > MAX_FIELD_NUMBERS else value.tolist()
    if isinstance(value, list | tuple) and len(value) <= MAX_FIELD_NUMBERS:
        return [_in_lists(each) if isinstance(each, torch.Tensor) else each for each in value]
    return None


def is_mistrals(model_config: Any) -> bool:
    """Whether the model's tokenizer is Mistral's own, which needs media to make a prompt."""
    from vllm.tokenizers.registry import tokenizer_args_from_config  # since 0.32

    return bool(tokenizer_args_from_config(model_config)[0] == "mistral")


def caches_as_vllm(processor: type) -> bool:
    """Whether a class of processors finds items in its cache as vLLM's own does.

    Some make another item of a medium that does not come alone, or number items in a prompt.
    """
    methods = (
        *("_cached_apply_hf_processor", "_get_cache_missing_items"),
        *("_merge_mm_kwargs", "_recompute_cached_prompt_update"),
    )
    return all(
        hasattr(BaseMultiModalProcessor, method)
        and getattr(processor, method) is getattr(BaseMultiModalProcessor, method)
        for method in methods
    )


def media_budgets() -> dict[str, Any]:
    """How many bytes one request may download and decode, as vLLM's media connectors take it."""
    if DecodedBudget is None:
        return {}
    return {"decoded_budget": DecodedBudget(), "download_budget": DownloadBudget()}
