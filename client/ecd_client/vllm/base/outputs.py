"""The dtypes and widths that one embedding of this engine's encoder can have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ecd_client.vllm.base.names import PROMPT

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LEVELS = "deepstack_visual_indexes"
"""Layers of a vision tower whose features follow an embedding's own, each as wide (Qwen3-VL)."""
MAX_VALUE = 1e4
"""Largest number in an embedding that a client brings. Larger ones overflow in some layer, and what
is no number stays in the engine's KV cache for others."""
BROUGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Those of embeddings that a client brings: torch computes with others in part only."""
MAX_DEPTH = 4
"""Depth to which configurations within a configuration are searched."""
MIB = 1 << 20


class Outputs:
    """Tells entries that this engine's encoder can have made from others.

    vLLM 0.32 measures the widths of an engine that produces. For other engines the model's
    configuration says enough to reject an entry that would end the engine: an embedding is as wide
    as the language model's, or as several of these.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        self._measured: dict[str, int] = getattr(
            vllm_config.ec_transfer_config, "mm_encoder_output_widths", {}
        )
        self._dtype: torch.dtype = model.dtype
        self._dtypes = {str(model.dtype).removeprefix("torch."), "float32"}
        self._width: int = model.get_inputs_embeds_size()
        self._is_pruned = bool(getattr(model.multimodal_config, "video_pruning_rate", None))
        configs = list(configs_in(model.hf_config))
        levels = [list(config[LEVELS] or ()) for config in configs if LEVELS in config]
        self._multiples = {1 + len(level) for level in levels} or {1}
        self._is_known = bool(levels) or not any("deepstack" in n for c in configs for n in c)

    def fit(self, modality: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether an entry of this dtype and shape, (embeddings, width), fits the modality."""
        if len(shape) != 2 or dtype not in self._dtypes:
            return False
        if self._is_pruned and not self._measured.get(modality):  # places stand behind each one
            return shape[1] >= self._width
        return self._is_wide(modality, shape[1])

    def fit_brought(self, modality: str, brought: Any, embeddings: int) -> bool:
        """Whether what a client brought are so many embeddings, as one of the modality may be."""
        return (
            isinstance(brought, torch.Tensor)
            and brought.dtype in BROUGHT_DTYPES
            and brought.ndim == 2
            and brought.shape[0] == embeddings
            and not (self._is_pruned and modality == "video")
            and self._is_wide(modality, brought.shape[1])
            and bool((brought.abs() <= MAX_VALUE).all())
        )

    def _is_wide(self, modality: str, width: int) -> bool:
        if measured := self._measured.get(modality):
            return width == measured
        multiple, rest = divmod(width, self._width)
        # The features of a vision tower's layers stand behind each of its embeddings.
        known = {1} if modality in ("audio", PROMPT) else self._multiples
        return rest == 0 and (multiple in known or (multiple > 0 and not self._is_known))

    def bytes_of(self, embeddings: int) -> int:
        """The size of so many embeddings of the widest medium, in the model's dtype."""
        widths = self._measured.values() or [max(self._multiples) * self._width]
        return embeddings * max(widths) * self._dtype.itemsize

    def __str__(self) -> str:
        """The dtypes and widths that fit, for a message."""
        widths = self._measured or [multiple * self._width for multiple in sorted(self._multiples)]
        return f"{' or '.join(sorted(self._dtypes))}, {widths} wide"


def room_for_loads(cache_bytes: int, gpu_bytes: int, *, is_kv_sized: bool) -> str:
    """Advice on how much of a GPU's memory vLLM is to leave to loads, all sizes being in bytes.

    vLLM's profile has the outputs of an encoder cache once, in memory of its model's stream. Loads
    from the host pool have a stream of their own, and torch keeps what was freed for the stream
    that had it: they may take as much again. `is_kv_sized`: the KV cache's bytes are set.
    """
    share = math.ceil(1000 * cache_bytes / gpu_bytes) / 1000
    how = f"{share:.3f} less of --gpu-memory-utilization"
    if is_kv_sized:
        how = "as much less of --kv-cache-memory-bytes"
    size = f"{math.ceil(cache_bytes / MIB):,} MiB"
    return f"loads may take about {size} of the GPU beyond vLLM's profile; {how} keeps that free"


def configs_in(config: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The fields of a model's configuration, then of each configuration within it."""
    fields: dict[str, Any] = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    yield fields
    if depth < MAX_DEPTH:
        for name, value in fields.items():
            if name.endswith("config"):
                yield from configs_in(value, depth + 1)
