"""LLaVA's descendants: a tower of CLIP, SigLIP or Pixtral, a projector, a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from e2e.models.sizes import MISTRAL_FORMAT, SQUARE, TEXT, TOWER, mistral_params
from e2e.models.table import architecture

if TYPE_CHECKING:
    from e2e.models.checkpoint import Checkpoint

CLIP = {"model_type": "clip_vision_model", **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER}
PIXTRAL = {"model_type": "pixtral", **TOWER, "image_size": 112, "head_dim": 32}
LLAMA = {"model_type": "llama", **TEXT}
MISTRAL = {"model_type": "mistral", **TEXT}
QWEN2 = {"model_type": "qwen2", **TEXT}


def parts(vision: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    return {"vision_config": vision, "text_config": text}


PINPOINTS = [[28, 56], [56, 28], [56, 56]]


@architecture("LLaVA", "LlavaForConditionalGeneration", "image", by_outline="image")
def llava(to: Checkpoint) -> None:
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor

    tokens = to.tokens("<image>", image_token="<image>")
    config = LlavaConfig(**parts(CLIP, LLAMA), image_token_id=to.id("<image>"))
    to.config(config)
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    more = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(images, tokens, patch_size=14, **more).save_pretrained(to.directory)


@architecture("LLaVA", "LlavaNextForConditionalGeneration", "image", quick=True, by_outline="image")
def llava_next(to: Checkpoint) -> None:
    from transformers import LlavaNextConfig, LlavaNextImageProcessor, LlavaNextProcessor

    tokens = to.tokens(image_token="<image>")
    ids = {"image_token_id": to.id("<image>")}
    config = LlavaNextConfig(**parts(CLIP, LLAMA), image_grid_pinpoints=PINPOINTS, **ids)
    to.config(config)
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    images = LlavaNextImageProcessor(image_grid_pinpoints=PINPOINTS, **size)
    more = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaNextProcessor(images, tokens, patch_size=14, **more).save_pretrained(to.directory)


@architecture(
    "LLaVA",
    "LlavaNextVideoForConditionalGeneration",
    "video",
    most={"video": 1},
    by_outline="video",
)
def llava_next_video(to: Checkpoint) -> None:
    from transformers import (
        LlavaNextImageProcessor,
        LlavaNextVideoConfig,
        LlavaNextVideoProcessor,
        LlavaNextVideoVideoProcessor,
    )

    named = {"image_token": "<image>", "video_token": "<video>"}
    tokens, ids = to.tokens(**named), to.ids(**named)
    config = LlavaNextVideoConfig(**parts(CLIP | {"image_size": 224}, LLAMA), **ids)
    to.config(config)
    size = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
    more = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaNextVideoProcessor(
        video_processor=LlavaNextVideoVideoProcessor(**size),
        image_processor=LlavaNextImageProcessor(**size),
        tokenizer=tokens,
        patch_size=14,
        **more,
    ).save_pretrained(to.directory)


@architecture(
    "LLaVA",
    "LlavaOnevisionForConditionalGeneration",
    "image video",
    most={"video": 1},  # over two of other lengths vLLM's engine ends
    quick=True,
    by_outline="image video",
)
def llava_onevision(to: Checkpoint) -> None:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    named = {"image_token": "<image>", "video_token": "<video>"}
    tokens, ids = to.tokens(**named), to.ids(**named)
    config = LlavaOnevisionConfig(**parts(SIGLIP, QWEN2), image_grid_pinpoints=PINPOINTS, **ids)
    to.config(config)
    LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(image_grid_pinpoints=PINPOINTS, **SQUARE),
        tokens,
        LlavaOnevisionVideoProcessor(**SQUARE),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
    ).save_pretrained(to.directory)


def pixtral_processor(to: Checkpoint, merge: int) -> None:
    from transformers import PixtralImageProcessor, PixtralProcessor

    named = {
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    }
    tokens = to.tokens(**named)
    images = PixtralImageProcessor(size={"longest_edge": 112}, patch_size=14)
    more: dict[str, Any] = {"patch_size": 14, "spatial_merge_size": merge}
    PixtralProcessor(images, tokens, **more, **named).save_pretrained(to.directory)


@architecture("Pixtral", "LlavaForConditionalGeneration", "image", by_outline="image")
def pixtral(to: Checkpoint) -> None:
    from transformers import LlavaConfig

    pixtral_processor(to, 1)
    how = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    config = LlavaConfig(**parts(PIXTRAL, MISTRAL), image_token_id=to.id("[IMG]"), **how)
    to.config(config)


@architecture(
    "Pixtral", "Mistral3ForConditionalGeneration", "image", quick=True, by_outline="image"
)
def mistral3(to: Checkpoint) -> None:
    from transformers import Mistral3Config

    pixtral_processor(to, 2)
    config = Mistral3Config(
        **parts(PIXTRAL, MISTRAL), image_token_id=to.id("[IMG]"), spatial_merge_size=2
    )
    config.vision_feature_layer = -1
    to.config(config)


@architecture("Pixtral", "LightOnOCRForConditionalGeneration", "image", by_outline="image")
def lighton_ocr(to: Checkpoint) -> None:
    from transformers import Mistral3Config

    pixtral_processor(to, 2)
    text = {"model_type": "qwen3", **TEXT}
    ids = {"image_token_id": to.id("[IMG]"), "image_token_index": to.id("[IMG]")}
    config = Mistral3Config(**parts(PIXTRAL, text), spatial_merge_size=2, **ids)
    config.vision_feature_layer = -1
    to.config(config)


@architecture("Pixtral", "PixtralForConditionalGeneration", "image", **MISTRAL_FORMAT)
def pixtral_in_mistrals_format(to: Checkpoint) -> None:
    from mistral_common.tokens.tokenizers.base import SpecialTokens

    size = to.tekken(image={"image_patch_size": 14, "max_image_size": 112})
    more = {"num_channels": 3, "rope_theta": 10000.0}
    image = list(SpecialTokens).index(SpecialTokens.img)
    tower = TOWER | {"image_size": 112, "image_token_id": image, **more}
    to.json("params", **mistral_params(size), vision_encoder=tower)


def idefics(to: Checkpoint, config: type, images: Any, processor: type) -> None:
    named = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    tiles = (f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5))
    tokens = to.tokens(*tiles, **named)
    made = config(
        image_token_id=to.id("<image>"),
        vision_config=TOWER | {"image_size": 56},
        text_config=LLAMA,
        scale_factor=2,
    )
    to.config(made)
    size = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    processor(images(**size), tokens, image_seq_len=4).save_pretrained(to.directory)


@architecture(
    "Idefics", "Idefics3ForConditionalGeneration", "image", quick=True, by_outline="image"
)
def idefics3(to: Checkpoint) -> None:
    from transformers import Idefics3Config, Idefics3ImageProcessor, Idefics3Processor

    idefics(to, Idefics3Config, Idefics3ImageProcessor, Idefics3Processor)


@architecture(
    "Idefics", "SmolVLMForConditionalGeneration", "image", needs_more=True, by_outline="image"
)
def smolvlm(to: Checkpoint) -> None:
    from transformers import (
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    def processor(images: Any, tokens: Any, **more: Any) -> Any:
        return SmolVLMProcessor(images, tokens, SmolVLMVideoProcessor(), **more)

    idefics(to, SmolVLMConfig, SmolVLMImageProcessor, processor)


@architecture(
    "BLIP", "Blip2ForConditionalGeneration", "image", most={"image": 1}, by_outline="image"
)
def blip2(to: Checkpoint) -> None:
    from transformers import Blip2Config, Blip2Processor, BlipImageProcessor

    tokens = to.tokens("<image>", image_token="<image>")
    opt = {
        "model_type": "opt",
        "vocab_size": TEXT["vocab_size"],
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
    }
    former = {**TOWER, "encoder_hidden_size": 64, "vocab_size": TEXT["vocab_size"]}
    config = Blip2Config(
        vision_config=TOWER,
        qformer_config=former,
        text_config=opt,
        num_query_tokens=4,
        image_token_index=to.id("<image>"),
    )
    to.config(config)
    processor = Blip2Processor(BlipImageProcessor(**SQUARE), tokens, num_query_tokens=4)
    processor.save_pretrained(to.directory)


@architecture("Aria", "AriaForConditionalGeneration", "image", by_outline="image")
def aria(to: Checkpoint) -> None:
    from transformers import AriaConfig, AriaImageProcessor, AriaProcessor

    tokens = to.tokens("<fim_prefix>", "<fim_suffix>", image_token="<|img|>")
    text = {"model_type": "aria_text", **TEXT, "moe_num_experts": 4, "moe_topk": 2}
    config = AriaConfig(
        vision_config={"model_type": "idefics3_vision", **TOWER, "image_size": 490},
        text_config=text | {"moe_num_shared_experts": 1},
        image_token_id=to.id("<|img|>"),
        projector_patch_to_query_dict={1225: 128, 4900: 256},
    )
    to.config(config)
    images = AriaImageProcessor(max_image_size=490, min_image_size=28)
    AriaProcessor(images, tokens).save_pretrained(to.directory)


@architecture("Granite", "Granite4VisionForConditionalGeneration", "image", by_outline="image")
def granite4_vision(to: Checkpoint) -> None:
    from transformers import (
        Granite4VisionConfig,
        Granite4VisionProcessor,
        LlavaNextImageProcessor,
    )

    tokens = to.tokens(image_token="<image>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    former = {**sizes, "num_attention_heads": 2, "encoder_hidden_size": 64}
    config = Granite4VisionConfig(
        vision_config=SIGLIP | {"image_size": 56},
        text_config=TEXT,
        qformer_config={"model_type": "blip_2_qformer", **former},
        image_token_index=to.id("<image>"),
        image_grid_pinpoints=[[56, 56], [56, 112]],
        downsample_rate="1/2",
        vision_feature_select_strategy="full",
        deepstack_layer_map=[[0, 0]],
        spatial_target_layers=[],
    )
    to.config(config)
    size = {"height": 56, "width": 56}
    images = LlavaNextImageProcessor(
        size=size, crop_size=size, image_grid_pinpoints=[[56, 56], [56, 112]]
    )
    more = {"vision_feature_select_strategy": "full", "downsample_rate": "1/2"}
    Granite4VisionProcessor(images, tokens, patch_size=14, **more).save_pretrained(to.directory)


@architecture("Cohere", "Cohere2VisionForConditionalGeneration", "image", by_outline="image")
def cohere2_vision(to: Checkpoint) -> None:
    from transformers import (
        Cohere2VisionConfig,
        Cohere2VisionImageProcessor,
        Cohere2VisionProcessor,
    )

    tokens = to.tokens(
        boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>",
        image_token="<|IMG_PATCH|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )
    config = Cohere2VisionConfig(
        vision_config=SIGLIP | {"image_size": 56},
        text_config={"model_type": "cohere2", **TEXT, "sliding_window": 64},
        image_token_id=to.id("<|IMG_PATCH|>"),
        alignment_intermediate_size=128,
    )
    to.config(config)
    images = Cohere2VisionImageProcessor(
        size={"height": 56, "width": 56}, patch_size=2, max_patches=3
    )
    Cohere2VisionProcessor(images, tokens).save_pretrained(to.directory)


DIMS = {"conv_dim": 64, "block_dim": 64, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0}


@architecture("LFM", "Lfm2VlForConditionalGeneration", "image", by_outline="image")
def lfm2_vl(to: Checkpoint) -> None:
    from transformers import Lfm2VlConfig, Lfm2VlImageProcessor, Lfm2VlProcessor

    tiles = [f"<|img_row_{row}_col_{col}|>" for row in range(1, 5) for col in range(1, 5)]
    tokens = to.tokens(
        *("<|img_thumbnail|>", *tiles),
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail="<|img_thumbnail|>",
    )
    text = {"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention"]}
    vision = {"model_type": "siglip2_vision_model", **TOWER, "num_patches": 64}
    config = Lfm2VlConfig(
        vision_config=vision,
        text_config=text | {"block_ff_dim": 128, "conv_L_cache": 3, **DIMS},
        image_token_id=to.id("<image>"),
        projector_hidden_size=64,
    )
    to.config(config)
    images = Lfm2VlImageProcessor(
        encoder_patch_size=14, tile_size=56, min_image_tokens=4, max_image_tokens=16, max_tiles=4
    )
    Lfm2VlProcessor(images, tokens).save_pretrained(to.directory)


@architecture("Ovis", "Ovis", "image", encoder="ec_both", by_outline="image")
def ovis2(to: Checkpoint) -> None:
    from transformers import SiglipImageProcessor

    to.tokens(*(f"<unused{n}>" for n in (1, 2, 3, 0)))  # the last one is 7, as in vLLM's table
    visual = {"model_type": "siglip_visual_tokenizer", "vocab_size": 64}
    to.json(
        "config",
        model_type="ovis",
        architectures=[to.kind],
        llm_config={"model_type": "gemma2", **TEXT, "sliding_window": 64},
        visual_tokenizer_config=visual | {"backbone_config": SIGLIP},
        hidden_size=64,
        conversation_formatter_class="GemmaConversationFormatter",
    )
    SiglipImageProcessor(**SQUARE).save_pretrained(to.directory)
