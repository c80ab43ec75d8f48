"""GLM's models, and others whose towers take pictures of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from e2e.models.families.qwen import MROPE
from e2e.models.sizes import TEXT, TOWER
from e2e.models.table import architecture

if TYPE_CHECKING:
    from e2e.models.checkpoint import Checkpoint

GLM_TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "out_hidden_size": 64,
    "intermediate_size": 128,
}


def tokens(to: Checkpoint) -> dict[str, int]:
    named = {"image_token": "<|image|>", "video_token": "<|video|>"}
    begins = [f"<|{side}_of_{kind}|>" for kind in ("image", "video") for side in ("begin", "end")]
    to.tokens(*begins, **named)
    return {
        "image_token_id": to.id("<|image|>"),
        "video_token_id": to.id("<|video|>"),
        **{
            f"{kind}_{side}_token_id": to.id(f"<|{word}_of_{kind}|>")
            for kind in ("image", "video")
            for side, word in (("start", "begin"), ("end", "end"))
        },
    }


def processor(to: Checkpoint, kind: str) -> None:
    size = {"shortest_edge": 28 * 28, "longest_edge": 1 << 16}
    about: dict[str, Any] = {
        "processor_class": kind,
        "size": size,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    to.json("preprocessor_config", image_processor_type="Glm4vImageProcessor", **about)
    to.json("video_preprocessor_config", video_processor_type="Glm4vVideoProcessor", **about)


ROPE = {"rope_theta": 10000.0, **MROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
TEXT_4V = TEXT | {"rope_parameters": ROPE, "partial_rotary_factor": 0.5}


SHORT = {"a video at 10 frames a second, in a chat": "max() arg is an empty sequence"}
"""What vLLM's server says of a video of 0.4 s."""


@architecture(
    "GLM",
    "Glm4vForConditionalGeneration",
    "image video",
    most={"video": 1},
    without=SHORT,
    quick=True,
)
def glm4_1v(to: Checkpoint) -> None:
    from transformers import Glm4vConfig

    config = Glm4vConfig(text_config=TEXT_4V, vision_config=GLM_TOWER, **tokens(to))
    to.config(config)
    processor(to, "Glm4vProcessor")


@architecture(
    "GLM", "Glm4vMoeForConditionalGeneration", "image video", most={"video": 1}, without=SHORT
)
def glm4_5v(to: Checkpoint) -> None:
    from transformers import Glm4vMoeConfig

    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    more = {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    text = TEXT_4V | experts | more | {"use_qk_norm": False}
    config = Glm4vMoeConfig(text_config=text, vision_config=GLM_TOWER, **tokens(to))
    to.config(config)
    processor(to, "Glm4vProcessor")


@architecture(
    "GLM", "GlmOcrForConditionalGeneration", "image video", most={"video": 1}, without=SHORT
)
def glm_ocr(to: Checkpoint) -> None:
    from transformers import GlmOcrConfig

    text = TEXT | {"rope_parameters": ROPE}
    config = GlmOcrConfig(text_config=text, vision_config=GLM_TOWER, **tokens(to))
    to.config(config)
    processor(to, "Glm46VProcessor")


@architecture("GLM", "GLM4VForCausalLM", "image", most={"image": 1}, by_outline="image")
def glm4v(to: Checkpoint) -> None:
    """GLM-4V-9B."""
    to.tokens("<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>")
    vision = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "intermediate_size": 128,
        "image_size": 56,
        "patch_size": 14,
        "in_channels": 3,
        "num_positions": 17,
        "dropout_prob": 0.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "scaling_factor": 8,
    }
    from vllm.transformers_utils.configs.chatglm import ChatGLMConfig

    config = ChatGLMConfig(
        num_layers=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=to.id("<|endoftext|>"),
        padded_vocab_size=TEXT["vocab_size"],
        hidden_size=64,
        ffn_hidden_size=128,
        kv_channels=32,
        num_attention_heads=2,
        seq_length=2048,
        add_qkv_bias=True,
        original_rope=True,
        tie_word_embeddings=False,
        multi_query_attention=True,
        multi_query_group_num=1,
        rmsnorm=True,
        vision_config=vision,
        boi_token_id=to.id("<|begin_of_image|>"),
        eoi_token_id=to.id("<|end_of_image|>"),
    )
    to.config(config)


@architecture(
    "EXAONE", "Exaone4_5_ForConditionalGeneration", "image video", by_metadata="image video"
)
def exaone4_5(to: Checkpoint) -> None:
    from transformers import Exaone4_5_Config

    from e2e.models.families import qwen

    ids = qwen.tokens(to)
    tower = qwen.TOWER_2_5 | {"num_key_value_heads": 2}
    text = {"model_type": "exaone4", **TEXT, "sliding_window": 64, "sliding_window_pattern": 2}
    config = Exaone4_5_Config(text_config=text, vision_config=tower, **ids)
    to.config(config)
    images, videos = "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"
    qwen.processor(to, "Exaone4_5_Processor", images, videos)


@architecture("PaddleOCR", "PaddleOCRVLForConditionalGeneration", "image")
def paddleocr_vl(to: Checkpoint) -> None:
    from transformers import PaddleOCRVLConfig

    to.tokens("<|IMAGE_START|>", "<|IMAGE_END|>", image_token="<|IMAGE_PLACEHOLDER|>")
    text = TEXT | {"rope_parameters": {"rope_theta": 10000.0, **MROPE}}
    config = PaddleOCRVLConfig(
        text_config=text,
        vision_config=TOWER | {"image_size": 56, "spatial_merge_size": 2},
        image_token_id=to.id("<|IMAGE_PLACEHOLDER|>"),
        vision_start_token_id=to.id("<|IMAGE_START|>"),
        vision_end_token_id=to.id("<|IMAGE_END|>"),
    )
    to.config(config)
    to.json(
        "preprocessor_config",
        image_processor_type="PaddleOCRVLImageProcessor",
        processor_class="PaddleOCRVLProcessor",
        min_pixels=28 * 28,
        max_pixels=1 << 16,
        size={"shortest_edge": 28 * 28, "longest_edge": 1 << 16},
        patch_size=14,
        merge_size=2,
        temporal_patch_size=1,
    )


ERNIE = "spatial_conv_size", "vLLM reads a field that the configuration of transformers has not"


@architecture("Ernie", "Ernie4_5_VLMoeForConditionalGeneration", "image video", fails=ERNIE)
def ernie4_5_vl(to: Checkpoint) -> None:
    from transformers import (
        Ernie4_5_VLMoeConfig,
        Ernie4_5_VLMoeImageProcessor,
        Ernie4_5_VLMoeProcessor,
        Ernie4_5_VLMoeVideoProcessor,
    )

    named = {
        "image_token": "<|IMAGE_PLACEHOLDER|>",
        "image_start_token": "<|IMAGE_START|>",
        "image_end_token": "<|IMAGE_END|>",
        "video_token": "<|VIDEO_PLACEHOLDER|>",
        "video_start_token": "<|VIDEO_START|>",
        "video_end_token": "<|VIDEO_END|>",
    }
    made = to.tokens(**named)
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
    text = TEXT | experts | {"moe_intermediate_size": [64, 64]}
    config = Ernie4_5_VLMoeConfig(
        text_config=text,
        vision_config={"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128},
        **to.ids(**named),
    )
    to.config(config)
    size = {"size": {"shortest_edge": 28 * 28, "longest_edge": 1 << 16}}
    Ernie4_5_VLMoeProcessor(
        Ernie4_5_VLMoeImageProcessor(**size),
        made,
        Ernie4_5_VLMoeVideoProcessor(draw_on_frames=False, **size),
    ).save_pretrained(to.directory)
