"""Tiny random models, as Hugging Face directories. Run in a vLLM environment.

python tiny_models.py qwen2_5_vl DIRECTORY
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_pad|>",
]
MAX_PIXELS = 560 * 560
"""Of a picture. An engine that stores encodes one of this size as it starts."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
    "{% elif c.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def write_tokenizer(directory: Path, more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["what is in this picture, and what is in the other?"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*SPECIAL[3:], *more],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return fast


def token_ids(tokenizer: PreTrainedTokenizerFast) -> dict:
    ids = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("image_pad", "video_pad", "vision_start", "vision_end", "im_end", "endoftext")
    }
    return {
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
    }


def write_weights(model: torch.nn.Module, directory: Path, deviation: float) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
            elif "bias" in name:
                parameter.zero_()
            else:
                parameter.fill_(1.0)
    model.to(torch.bfloat16).save_pretrained(directory)


def rename(directory: Path, said: str, read: str) -> None:
    """Mend names of weights: transformers 5 writes some that vLLM does not read."""
    file = directory / "model.safetensors"
    named = {name.replace(said, read): tensor for name, tensor in load_file(file).items()}
    save_file(named, file, {"format": "pt"})


def preprocessor(kind: str, processor: str, patch: int) -> dict:
    return {
        "image_processor_type": kind,
        "processor_class": processor,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "min_pixels": 3136,
        "max_pixels": MAX_PIXELS,
        "size": {"shortest_edge": 3136, "longest_edge": MAX_PIXELS},
        "merge_size": 2,
        "patch_size": patch,
        "temporal_patch_size": 2,
        "rescale_factor": 1 / 255,
        "resample": 3,
    }


def qwen2_5_vl(directory: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = write_tokenizer(directory)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        **token_ids(tokenizer),
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    write_weights(Qwen2_5_VLForConditionalGeneration(config), directory, 0.08)
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps(preprocessor("Qwen2VLImageProcessor", "Qwen2_5_VLProcessor", 14)))


def qwen3_vl(directory: Path) -> None:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = write_tokenizer(directory)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        **token_ids(tokenizer),
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.text_config.architectures = ["Qwen3ForCausalLM"]  # vLLM 0.28 on CPUs asks for one
    write_weights(Qwen3VLForConditionalGeneration(config), directory, 0.15)
    image = preprocessor("Qwen2VLImageProcessorFast", "Qwen3VLProcessor", 16)
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    video = {**image, "video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))


def qwen2_audio(directory: Path) -> None:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokens = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
    tokenizer = write_tokenizer(directory, tokens)
    config = Qwen2AudioConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
        },
        audio_config={
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids(tokens[0]),
    )
    config.architectures = ["Qwen2AudioForConditionalGeneration"]
    write_weights(Qwen2AudioForConditionalGeneration(config), directory, 0.08)
    rename(directory, "model.model", "model")
    extractor = WhisperFeatureExtractor(feature_size=128)
    Qwen2AudioProcessor(extractor, tokenizer).save_pretrained(directory)


def llava_next(directory: Path) -> None:
    """Write a model of pictures that has no placeholder metadata."""
    from transformers import (
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextImageProcessor,
        LlavaNextProcessor,
    )

    tokenizer = write_tokenizer(directory)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = LlavaNextConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "image_size": 28,
            "patch_size": 14,
            **layers,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            **layers,
        },
        image_grid_pinpoints=pinpoints,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
    )
    config.architectures = ["LlavaNextForConditionalGeneration"]
    write_weights(LlavaNextForConditionalGeneration(config), directory, 0.08)
    rename(directory, "vision_tower", "vision_tower.vision_model")
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    images = LlavaNextImageProcessor(image_grid_pinpoints=pinpoints, **size)
    more = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaNextProcessor(
        images, tokenizer, patch_size=14, image_token="<|image_pad|>", **more
    ).save_pretrained(directory)


def whisper(directory: Path) -> None:
    """Write a Whisper's configuration, without weights."""
    from transformers import WhisperConfig, WhisperFeatureExtractor

    tokenizer = write_tokenizer(directory)
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_target_positions=448,
    )
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(directory)
    WhisperFeatureExtractor().save_pretrained(directory)


def drafter(directory: Path) -> None:
    """Write a small language model that guesses what Qwen2.5-VL says."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = write_tokenizer(directory)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    write_weights(Qwen2ForCausalLM(config), directory, 0.08)


def eagle(directory: Path) -> None:
    """Write a head that guesses what Qwen2.5-VL says from its hidden states, as EAGLE-3 has."""
    from transformers import LlamaConfig

    tokenizer, width = write_tokenizer(directory), 128
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        draft_vocab_size=len(tokenizer),
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]},
        architectures=["Eagle3LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    mlp = (f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down"))
    shapes = dict.fromkeys(("midlayer.self_attn.o_proj", *mlp), (width, width))
    for part, size in (("q", 128), ("k", 64), ("v", 64)):
        shapes[f"midlayer.self_attn.{part}_proj"] = size, 2 * width
    shapes["fc"] = width, 2 * width
    shapes |= dict.fromkeys(("lm_head", "embed_tokens"), (len(tokenizer), width))
    norms = "input_layernorm", "hidden_norm", "post_attention_layernorm"
    generator = torch.Generator().manual_seed(7)
    weights = {
        f"{name}.weight": (torch.randn(shape, generator=generator) * 0.08).bfloat16()
        for name, shape in shapes.items()
    }
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        weights[f"{name}.weight"] = torch.ones(width).bfloat16()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def adapter(directory: Path, *modules: str) -> None:
    """Write a LoRA adapter of these modules of Qwen2.5-VL, each square and given with its width."""
    rank, generator = 4, torch.Generator().manual_seed(7)
    weights = {}
    for name, width in (module.split("=") for module in modules):
        for part, shape in (("A", (rank, int(width))), ("B", (int(width), rank))):
            drawn = torch.randn(shape, generator=generator).bfloat16()
            weights[f"base_model.model.{name}.lora_{part}.weight"] = drawn
    save_file(weights, directory / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    about["target_modules"] = sorted({module.split("=")[0].split(".")[-1] for module in modules})
    (directory / "adapter_config.json").write_text(json.dumps(about))


def language_adapter(directory: Path) -> None:
    adapter(directory, "model.language_model.layers.0.self_attn.o_proj=128")


def tower_adapter(directory: Path) -> None:
    adapter(directory, "model.visual.blocks.0.attn.proj=64")


MODELS = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen2_audio": qwen2_audio,
    "llava_next": llava_next,
    "whisper": whisper,
    "drafter": drafter,
    "eagle": eagle,
    "language_adapter": language_adapter,
    "tower_adapter": tower_adapter,
}

if __name__ == "__main__":
    kind, directory = sys.argv[1:]
    Path(directory).mkdir(parents=True, exist_ok=True)
    MODELS[kind](Path(directory))
