"""Qwen's models and those built like them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from e2e.models.sizes import HEARING, TEXT
from e2e.models.table import architecture

if TYPE_CHECKING:
    from e2e.models.checkpoint import Checkpoint


def tokens(to: Checkpoint, *more: str) -> dict[str, int]:
    """Qwen's special tokens; returns the ids that a configuration names."""
    named = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    to.tokens("<|im_start|>", "<|im_end|>", "<|vision_pad|>", *more, **named)
    return {
        "image_token_id": to.id("<|image_pad|>"),
        "video_token_id": to.id("<|video_pad|>"),
        "vision_start_token_id": to.id("<|vision_start|>"),
        "vision_end_token_id": to.id("<|vision_end|>"),
    }


def processor(to: Checkpoint, kind: str, images: str, videos: str, patch: int = 14) -> None:
    about: dict[str, Any] = {
        "processor_class": kind,
        "min_pixels": (2 * patch) ** 2,
        "max_pixels": 1 << 16,
        "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": 1 << 16},
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    to.json("preprocessor_config", image_processor_type=images, **about)
    to.json("video_preprocessor_config", video_processor_type=videos, **about)


def processor_3(to: Checkpoint) -> None:
    """Qwen3-VL's, which several models have."""
    processor(to, "Qwen3VLProcessor", "Qwen2VLImageProcessorFast", "Qwen3VLVideoProcessor", 16)


def text(**more: Any) -> dict[str, Any]:
    return TEXT | {"rope_parameters": {"rope_theta": 10000.0, **MROPE}} | more


MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6]}
TOWER_2_5 = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 64,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}


@architecture("Qwen", "Qwen2VLForConditionalGeneration", "image video", by_metadata="image video")
def qwen2_vl(to: Checkpoint) -> None:
    from transformers import Qwen2VLConfig

    tower = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    ids = tokens(to)
    config = Qwen2VLConfig(text_config=text(), vision_config=tower, **ids)
    to.config(config)
    processor(to, "Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor")


@architecture(
    "Qwen",
    "Qwen2_5_VLForConditionalGeneration",
    "image video",
    by_metadata="image video",
    by_outline="video",
    rate_by_option=True,
    quick=True,
)
def qwen2_5_vl(to: Checkpoint) -> None:
    from transformers import Qwen2_5_VLConfig

    config = Qwen2_5_VLConfig(text_config=text(), vision_config=TOWER_2_5, **tokens(to))
    to.config(config)
    processor(to, "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor")


@architecture(
    "Qwen",
    "Qwen3VLForConditionalGeneration",
    "image video",
    by_metadata="image video",
    quick=True,
    by_outline="video",
)
def qwen3_vl(to: Checkpoint) -> None:
    from transformers import Qwen3VLConfig

    config = Qwen3VLConfig(
        text_config=text(rope_parameters=ROPE_3),
        vision_config=TOWER_3_DEEP,
        **tokens(to),
    )
    to.config(config)
    processor_3(to)


TOWER_3 = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
TOWER_3_DEEP = TOWER_3 | {"deepstack_visual_indexes": [0]}
ROPE_3 = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}
ROPE_3_5 = ROPE_3 | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


@architecture(
    "Qwen",
    "Qwen3VLMoeForConditionalGeneration",
    "image video",
    by_metadata="image video",
    by_outline="video",
)
def qwen3_vl_moe(to: Checkpoint) -> None:
    from transformers import Qwen3VLMoeConfig

    config = Qwen3VLMoeConfig(
        text_config=text(rope_parameters=ROPE_3, **EXPERTS),
        vision_config=TOWER_3_DEEP,
        **tokens(to),
    )
    to.config(config)
    processor_3(to)


BF16 = {"dtype": "bfloat16"}
"""What linear attention needs on a CPU."""
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}


@architecture(
    "Qwen",
    "Qwen3_5ForConditionalGeneration",
    "image video",
    by_metadata="image video",
    quick=True,
    engine=BF16,
    by_outline="video",
)
def qwen3_5(to: Checkpoint) -> None:
    from transformers import Qwen3_5Config

    of_text = text(rope_parameters=ROPE_3_5, **LINEAR)
    config = Qwen3_5Config(text_config=of_text, vision_config=TOWER_3, **tokens(to))
    to.config(config)
    processor_3(to)


@architecture(
    "Qwen",
    "Qwen3_5MoeForConditionalGeneration",
    "image video",
    by_metadata="image video",
    engine=BF16,
    by_outline="video",
)
def qwen3_5_moe(to: Checkpoint) -> None:
    from transformers import Qwen3_5MoeConfig

    experts = EXPERTS | {"shared_expert_intermediate_size": 64}
    of_text = text(rope_parameters=ROPE_3_5, **LINEAR, **experts)
    config = Qwen3_5MoeConfig(text_config=of_text, vision_config=TOWER_3, **tokens(to))
    to.config(config)
    processor_3(to)


def omni(to: Checkpoint, kind: str, begin: str, end: str, audio: str, **processing: Any) -> dict:
    """The processor of a model that also hears; returns the ids that its configuration names."""
    from transformers import WhisperFeatureExtractor

    named = {
        "image_token": "<|IMAGE|>" if "2_5" in kind else "<|image_pad|>",
        "video_token": "<|VIDEO|>" if "2_5" in kind else "<|video_pad|>",
        "audio_token": audio,
        "vision_bos_token": "<|vision_bos|>" if "2_5" in kind else "<|vision_start|>",
        "vision_eos_token": "<|vision_eos|>" if "2_5" in kind else "<|vision_end|>",
        "audio_bos_token": begin,
        "audio_eos_token": end,
    }
    to.tokens("<|im_start|>", "<|im_end|>", **named)
    WhisperFeatureExtractor(feature_size=128).save_pretrained(to.directory)
    heard = to.read("preprocessor_config")
    processor(to, kind, "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", **processing)
    to.json("preprocessor_config", **heard | to.read("preprocessor_config"))
    return {
        "image_token_id": to.id(named["image_token"]),
        "video_token_id": to.id(named["video_token"]),
        "audio_token_id": to.id(audio),
        "audio_start_token_id": to.id(begin),
        "audio_end_token_id": to.id(end),
        "vision_start_token_id": to.id(named["vision_bos_token"]),
        "vision_end_token_id": to.id(named["vision_eos_token"]),
    }


@architecture(
    "Qwen",
    "Qwen2_5OmniForConditionalGeneration",
    "image video audio",
    by_metadata="image video audio",
    rate_by_option=True,
    quick=True,
)
def qwen2_5_omni(to: Checkpoint) -> None:
    from transformers import Qwen2_5OmniConfig

    sounds = "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"
    ids = omni(to, "Qwen2_5OmniProcessor", *sounds)
    thinker = {
        **ids,
        **{k.replace("_id", "_index"): v for k, v in ids.items() if k.count("_") == 2},
        "text_config": text(),
        "audio_config": HEARING | {"output_dim": 64},
        "vision_config": TOWER_2_5,
    }
    config = Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False)
    to.config(config)


@architecture(
    "Qwen",
    "Qwen3OmniMoeForConditionalGeneration",
    "image video audio",
    by_metadata="audio",
    tolerance=0.005,
)
def qwen3_omni(to: Checkpoint) -> None:
    from transformers import Qwen3OmniMoeConfig

    sounds = "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"
    ids = omni(to, "Qwen3OmniMoeProcessor", *sounds, patch=16)
    thinker = {
        **ids,
        "text_config": text(rope_parameters=ROPE_3, **EXPERTS),
        "audio_config": HEARING | {"output_dim": 64, "downsample_hidden_size": 32},
        "vision_config": TOWER_3_DEEP | {"image_size": 56, "apply_vit_abs_pos_embed": True},
    }
    config = Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False)
    to.config(config)


@architecture("Qwen", "Qwen2VLForConditionalGeneration", "image", pools="embed", encoder="ec_both")
def qwen2_vl_pooling(to: Checkpoint) -> None:
    qwen2_vl(to)


@architecture("Qwen", "ColQwen3", "image", pools="token_embed", encoder="ec_both", quick=True)
def colqwen3(to: Checkpoint) -> None:
    from vllm.transformers_utils.configs.colqwen3 import ColQwen3Config

    config = ColQwen3Config(
        text_config=text(rope_parameters=ROPE_3),
        vision_config=TOWER_3_DEEP,
        embed_dim=32,
        **tokens(to),
    )
    to.config(config)
    processor_3(to)


@architecture(
    "Qwen",
    "Qwen2_5_VLForConditionalGeneration",
    "image video",
    encoder="ec_both",
    engine={"model_impl": "transformers"},
)
def qwen2_5_vl_in_transformers(to: Checkpoint) -> None:
    """The backend that runs the code of transformers."""
    qwen2_5_vl(to)
