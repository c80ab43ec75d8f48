"""OpenBMB's models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from e2e.models.families.qwen import BF16, LINEAR
from e2e.models.sizes import TEXT, TOWER
from e2e.models.table import architecture

if TYPE_CHECKING:
    from e2e.models.checkpoint import Checkpoint


@architecture(
    "MiniCPM", "MiniCPMV4_6ForConditionalGeneration", "image video", quick=True, engine=BF16
)
def minicpm_v4_6(to: Checkpoint) -> None:
    from transformers import (
        MiniCPMV4_6Config,
        MiniCPMV4_6ImageProcessor,
        MiniCPMV4_6Processor,
        MiniCPMV4_6VideoProcessor,
    )

    tokens = to.tokens(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        image_start_token="<image>",
        image_end_token="</image>",
        slice_start_token="<slice>",
        slice_end_token="</slice>",
        image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
    )
    config = MiniCPMV4_6Config(
        text_config={"model_type": "qwen3_5_text", **TEXT, **LINEAR},
        vision_config=TOWER | {"image_size": 56},
        image_token_id=to.id("<|image_pad|>"),
        video_token_id=to.id("<|video_pad|>"),
    )
    to.config(config)
    size = {"scale_resolution": 56, "max_slice_nums": 4}
    MiniCPMV4_6Processor(
        MiniCPMV4_6ImageProcessor(**size), MiniCPMV4_6VideoProcessor(**size), tokens
    ).save_pretrained(to.directory)
