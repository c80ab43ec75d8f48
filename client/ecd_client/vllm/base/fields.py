"""The fields of vLLM's processed items, and who reads them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ecd_proto.placeholders import MAX_NUMBERS, STEP

ENCODERS_OWN = {
    *("pixel_values", "pixel_values_videos", "video_pixel_values", "patch_positions"),
    *("tgt_sizes", "video_tgt_sizes", "input_features", "input_audio_features", "audio_features"),
    *("feature_attention_mask", "chunk_counts"),
    *("audio_lens", "audio_token_len", "audio_num_chunks"),
}
"""Fields of processed items that only the model's encoder reads."""
AUDIO_IN_VIDEO = "use_audio_in_video"
GRID, TIMES = "_grid_thw", "timestamps"
ASSUMED = {STEP: 1.0, AUDIO_IN_VIDEO: 0.0}
"""Fields that some items have, and the value that models assume for items without the field."""


def is_long(value: Any) -> bool:
    """Whether a field has more numbers than one may have, so that it is not looked at."""
    count = value.numel() if isinstance(value, torch.Tensor) else len(value)
    return count > MAX_NUMBERS


def is_made(name: str, value: Any) -> bool:
    """Whether a field of one item has the form in which a processor makes it."""
    return isinstance(value, torch.Tensor) and (value.ndim == 1 or not name.endswith(GRID))


def is_all_said(feature: Any, fields: Collection[str]) -> bool:
    """Whether the model's language part reads no more of an item than these fields."""
    return all(
        name in fields or name in ENCODERS_OWN or is_assumed(name, element.data)
        for name, element in (feature.data or {}).items()
    )


def is_assumed(name: str, value: Any) -> bool:
    """Whether an item's field is absent, or has the value that its model assumes without it."""
    if value is None:
        return True
    if name not in ASSUMED:
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and bool(value == ASSUMED[name])
    return isinstance(value, int | float) and value == ASSUMED[name]


def is_interleaved(feature: Any) -> bool:
    """Whether an item is a video whose audio lies between its frames in the prompt."""
    element = (feature.data or {}).get(AUDIO_IN_VIDEO)
    return element is not None and not is_assumed(AUDIO_IN_VIDEO, element.data)


def has_more(data: Any, fields: set[str]) -> bool:
    """Whether a processed item has something besides these fields that an encoder could read.

    None that stays on the CPU: vLLM says AUDIO_IN_VIDEO of each video of Qwen2.5-Omni, with media
    or without, and its server for tokens sends all such fields without the media.
    """
    return any(
        element.data is not None and name not in fields and not element.field.keep_on_cpu
        for name, element in data.items()
    )
