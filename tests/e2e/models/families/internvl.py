"""InternVL's models: tiles, a tower of InternViT, pixels shuffled into channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from e2e.models.sizes import TEXT, TOWER
from e2e.models.table import architecture

if TYPE_CHECKING:
    from e2e.models.checkpoint import Checkpoint

QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **TEXT}
VIT = {
    **TOWER,
    "model_type": "intern_vit_6b",
    "qkv_bias": True,
    "qk_normalization": False,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "initializer_factor": 0.1,
    "hidden_act": "gelu",
    "num_channels": 3,
}


@architecture(
    "InternVL",
    "InternVLForConditionalGeneration",
    "image video",
    quick=True,
    by_outline="image video",
)
def internvl(to: Checkpoint) -> None:
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLConfig,
        InternVLProcessor,
        InternVLVideoProcessor,
    )

    tokens = to.tokens(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    vision = TOWER | {"image_size": [28, 28], "patch_size": [14, 14]}
    image = {"image_token_id": to.id("<IMG_CONTEXT>"), "image_seq_length": 1}
    config = InternVLConfig(vision_config=vision, text_config=QWEN2, downsample_ratio=0.5, **image)
    to.config(config)
    size = {"size": {"height": 28, "width": 28}}
    InternVLProcessor(
        GotOcr2ImageProcessor(min_patches=1, max_patches=3, **size),
        tokens,
        InternVLVideoProcessor(**size),
        image_seq_length=1,
    ).save_pretrained(to.directory)


def chat(to: Checkpoint, model_type: str, *tokens: str, **more: Any) -> None:
    to.tokens(*tokens)
    to.unknown_config(
        model_type,
        vision_config=VIT,
        llm_config=QWEN2,
        select_layer=-1,
        downsample_ratio=0.5,
        ps_version="v2",
        min_dynamic_patch=1,
        max_dynamic_patch=3,
        dynamic_image_size=True,
        use_thumbnail=True,
        force_image_size=28,
        **more,
    )


@architecture("InternVL", "InternVLChatModel", "image video", by_outline="image video")
def internvl_chat(to: Checkpoint) -> None:
    tokens = "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<|video_pad|>"
    chat(to, "internvl_chat", *tokens)


@architecture("InternVL", "SkyworkR1VChatModel", "image", by_outline="image")
def skywork_r1v(to: Checkpoint) -> None:
    tokens = "<img>", "</img>", "<IMG_CONTEXT>"
    chat(to, "skywork_chat", *tokens)


@architecture("InternVL", "H2OVLChatModel", "image")
def h2ovl(to: Checkpoint) -> None:
    tokens = "<img>", "</img>", "<IMG_CONTEXT>"
    chat(to, "h2ovl_chat", *tokens, use_msac=False)


@architecture("InternVL", "NVLM_D", "image", by_outline="image")
def nvlm_d(to: Checkpoint) -> None:
    tiles = [f"<tile_{n}>" for n in range(1, 8)]
    tokens = "<Image>", "</Image>", "<|vision_pad|>", "<tile_global_thumbnail>", *tiles
    chat(to, "NVLM_D", *tokens)
