"""Google's models, and Llama 4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from e2e.models.sizes import SQUARE, TEXT, TOWER
from e2e.models.table import architecture

if TYPE_CHECKING:
    from e2e.models.checkpoint import Checkpoint

SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False}


@architecture("Gemma", "PaliGemmaForConditionalGeneration", "image", most={"image": 1})
def paligemma(to: Checkpoint) -> None:
    from transformers import PaliGemmaConfig, PaliGemmaProcessor, SiglipImageProcessor

    tokens = to.tokens("\n", image_token="<image>")
    config = PaliGemmaConfig(
        vision_config=SIGLIP | {"projection_dim": 64, "num_image_tokens": 4},
        text_config={"model_type": "gemma", **TEXT, "hidden_activation": "gelu_pytorch_tanh"},
        image_token_index=to.id("<image>"),
        projection_dim=64,
    )
    to.config(config)
    images = SiglipImageProcessor(**SQUARE, image_seq_length=4)
    PaliGemmaProcessor(images, tokens).save_pretrained(to.directory)


@architecture("Gemma", "Gemma3ForConditionalGeneration", "image", quick=True, by_outline="image")
def gemma3(to: Checkpoint) -> None:
    from transformers import Gemma3Config, Gemma3ImageProcessor, Gemma3Processor

    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokens = to.tokens(*("\n" * count for count in (1, 2, 3, 4)), **named)
    config = Gemma3Config(
        vision_config=SIGLIP | {"image_size": 56},
        text_config=TEXT | {"sliding_window": 64, "query_pre_attn_scalar": 32},
        mm_tokens_per_image=4,
        boi_token_index=to.id(named["boi_token"]),
        eoi_token_index=to.id(named["eoi_token"]),
        image_token_index=to.id(named["image_token"]),
    )
    to.config(config)
    images = Gemma3ImageProcessor(size={"height": 56, "width": 56})
    Gemma3Processor(images, tokens, image_seq_length=4).save_pretrained(to.directory)


@architecture("Gemma", "Gemma4ForConditionalGeneration", "image video", by_outline="image video")
def gemma4(to: Checkpoint) -> None:
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4Config,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    named = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "video_token": "<|video|>",
    }
    tokens = to.tokens(**named)
    text = {
        **TEXT,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": TEXT["vocab_size"],
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {**TOWER, "num_key_value_heads": 2, "head_dim": 32, "patch_size": 16}
    config = Gemma4Config(
        text_config=text,
        vision_config=vision
        | {"pooling_kernel_size": 2, "position_embedding_size": 64}
        | {"default_output_length": 70},
        audio_config=None,
        image_token_id=to.id("<|image|>"),
        video_token_id=to.id("<|video|>"),
        audio_token_id=to.id("<|audio|>"),
        boi_token_id=to.id("<|image>"),
        eoi_token_id=to.id("<image|>"),
        boa_token_id=to.id("<|audio>"),
        eoa_token_index=to.id("<audio|>"),
        vision_soft_tokens_per_image=70,
    )
    to.config(config)
    size = {"patch_size": 16, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(**size),
        tokens,
        Gemma4VideoProcessor(**size),
        image_seq_length=70,
    ).save_pretrained(to.directory)


@architecture(
    "Gemma",
    "Gemma3nForConditionalGeneration",
    "image audio",
    needs_more=True,
    by_outline="audio image",
)
def gemma3n(to: Checkpoint) -> None:
    from transformers import (
        Gemma3nAudioFeatureExtractor,
        Gemma3nConfig,
        Gemma3nProcessor,
        SiglipImageProcessor,
    )

    named = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "audio_token": "<audio_soft_token>",
        "boa_token": "<start_of_audio>",
        "eoa_token": "<end_of_audio>",
    }
    tokens = to.tokens(*("\n" * count for count in (1, 2, 3, 4)), **named)
    config = Gemma3nConfig(
        text_config=TEXT
        | {"vocab_size_per_layer_input": TEXT["vocab_size"], "num_kv_shared_layers": 0},
        audio_config={
            "hidden_size": 64,
            "conf_num_hidden_layers": 2,
            "conf_num_attention_heads": 2,
            "vocab_offset": TEXT["vocab_size"] - 128,  # of the last tokens, as in Gemma 3n
        },
        vision_config={
            "architecture": "test_convnext",
            "hidden_size": 64,
            "vocab_offset": TEXT["vocab_size"] - 256,
        },
        image_token_id=to.id("<image_soft_token>"),
        audio_token_id=to.id("<audio_soft_token>"),
    )
    to.config(config)
    Gemma3nProcessor(
        Gemma3nAudioFeatureExtractor(),
        SiglipImageProcessor(size={"height": 512, "width": 512}),
        tokens,
    ).save_pretrained(to.directory)


@architecture("Llama", "Llama4ForConditionalGeneration", "image", quick=True, by_outline="image")
def llama4(to: Checkpoint) -> None:
    from transformers import Llama4Config, Llama4ImageProcessor, Llama4Processor

    begin_and_end = "<|image_start|>", "<|image_end|>"
    separators = "<|tile_x_separator|>", "<|tile_y_separator|>"
    tokens = to.tokens("<|image|>", "<|patch|>", *begin_and_end, *separators)
    vision = {
        **TOWER,
        "image_size": 56,
        "intermediate_size": 256,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "pixel_shuffle_ratio": 0.5,
    }
    text = TEXT | {"intermediate_size_mlp": 128, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = Llama4Config(
        vision_config=vision,
        text_config=text,
        boi_token_index=to.id("<|image_start|>"),
        eoi_token_index=to.id("<|image_end|>"),
        image_token_index=to.id("<|patch|>"),
    )
    to.config(config)
    images = Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
    Llama4Processor(
        images,
        tokens,
        patch_size=14,
        pixel_shuffle_ratio=0.5,
        fake_image_token="<|image|>",
        start_of_img_token="<|image_start|>",
        end_of_img_token="<|image_end|>",
        patch_token="<|patch|>",
    ).save_pretrained(to.directory)
