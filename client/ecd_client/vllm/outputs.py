"""The dtypes and widths that one embedding of this engine's encoder can have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LEVELS = "deepstack_visual_indexes"
"""Layers of a vision tower whose features follow an embedding's own, each as wide (Qwen3-VL)."""
MAX_VALUE = 1e4
"""Largest number in an embedding that a client brings. Larger ones overflow in some layer, and what
is no number stays in the engine's KV cache for others."""
MAX_DEPTH = 4
"""Depth to which configurations within a configuration are searched."""


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
        self._dtypes = {str(model.dtype).removeprefix("torch."), "float32"}
        self._width: int = model.get_inputs_embeds_size()
        self._is_pruned = bool(getattr(model.multimodal_config, "video_pruning_rate", None))
        configs = list(configs_in(model.hf_config))
        levels = [list(config[LEVELS] or ()) for config in configs if LEVELS in config]
        self._multiples = {1, *(1 + len(level) for level in levels)}
        self._is_known = bool(levels) or not any("deepstack" in n for c in configs for n in c)

    def fit(self, modality: str, dtype: str | None, shape: tuple[int, ...]) -> bool:
        """Whether embeddings of this shape, (embeddings, width), fit the modality.

        `dtype` is their entry's; None: vLLM converts them.
        """
        if len(shape) != 2 or (dtype is not None and dtype not in self._dtypes):
            return False
        width = shape[1]
        if measured := self._measured.get(modality):
            return width == measured
        if self._is_pruned:  # with places behind each embedding
            return width >= self._width
        multiple, rest = divmod(width, self._width)
        return rest == 0 and (multiple in self._multiples or (multiple > 0 and not self._is_known))

    def __str__(self) -> str:
        """The dtypes and widths that fit, for a message."""
        widths = self._measured or [multiple * self._width for multiple in sorted(self._multiples)]
        return f"{' or '.join(sorted(self._dtypes))}, {widths} wide"


def configs_in(config: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The fields of a model's configuration, then of each configuration within it."""
    fields: dict[str, Any] = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    yield fields
    if depth < MAX_DEPTH:
        for name, value in fields.items():
            if name.endswith("config"):
                yield from configs_in(value, depth + 1)
