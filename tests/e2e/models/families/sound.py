"""Models that hear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from e2e.models.sizes import HEARING, MISTRAL_FORMAT, TEXT, mistral_params
from e2e.models.table import architecture

if TYPE_CHECKING:
    from e2e.models.checkpoint import Checkpoint

HUB = "its processor is code of its repository, and no test downloads any"
QWEN2 = {"model_type": "qwen2", **TEXT}
LLAMA = {"model_type": "llama", **TEXT}


@architecture(
    "Qwen", "Qwen2AudioForConditionalGeneration", "audio", by_metadata="audio", quick=True
)
def qwen2_audio(to: Checkpoint) -> None:
    from transformers import Qwen2AudioConfig, Qwen2AudioProcessor, WhisperFeatureExtractor

    named = {"audio_token": "<|AUDIO|>"}
    tokens = to.tokens("<|audio_bos|>", "<|audio_eos|>", **named)
    config = Qwen2AudioConfig(
        audio_config=HEARING, text_config=QWEN2, audio_token_index=to.id("<|AUDIO|>")
    )
    to.config(config)
    extractor = WhisperFeatureExtractor(feature_size=128)
    Qwen2AudioProcessor(extractor, tokens).save_pretrained(to.directory)


@architecture(
    "Audio Flamingo",
    "AudioFlamingo3ForConditionalGeneration",
    "audio",
    by_metadata="audio",
    most={"audio": 1},
)
def audio_flamingo3(to: Checkpoint) -> None:
    from transformers import AudioFlamingo3Config, AudioFlamingo3Processor, WhisperFeatureExtractor

    tokens = to.tokens("<sound>", audio_token="<sound>")
    hearing = {**HEARING, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AudioFlamingo3Config(
        audio_config=hearing | {"intermediate_size": 128},
        text_config=QWEN2,
        audio_token_id=to.id("<sound>"),
    )
    to.config(config)
    extractor = WhisperFeatureExtractor(feature_size=128)
    AudioFlamingo3Processor(extractor, tokens).save_pretrained(to.directory)


@architecture(
    "Ultravox",
    "UltravoxModel",
    "audio",
    fails=("Invalid type of HuggingFace processor", HUB),
)
def ultravox(to: Checkpoint) -> None:
    from transformers import WhisperFeatureExtractor
    from vllm.transformers_utils.configs.ultravox import UltravoxConfig

    to.tokens("<|audio|>", "<|reserved_special_token_0|>")
    config = UltravoxConfig(
        audio_config={"model_type": "whisper", **HEARING, "num_mel_bins": 80},
        text_config=LLAMA,
        audio_token_index=to.id("<|reserved_special_token_0|>"),
        hidden_size=64,
        stack_factor=8,
    )
    to.config(config)
    WhisperFeatureExtractor().save_pretrained(to.directory)
    to.json("processor_config", processor_class="UltravoxProcessor")


@architecture("GLM", "GlmAsrForConditionalGeneration", "audio", by_outline="audio")
def glm_asr(to: Checkpoint) -> None:
    from transformers import GlmAsrConfig, GlmAsrProcessor, WhisperFeatureExtractor

    tokens = to.tokens("<|begin_of_audio|>", "<|end_of_audio|>", audio_token="<|pad|>")
    hearing = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_mel_bins": 128,
    }
    config = GlmAsrConfig(audio_config=hearing, text_config=LLAMA, audio_token_id=to.id("<|pad|>"))
    to.config(config)
    extractor = WhisperFeatureExtractor(feature_size=128)
    GlmAsrProcessor(extractor, tokens, audio_token="<|pad|>").save_pretrained(to.directory)


@architecture(
    "Granite",
    "GraniteSpeechForConditionalGeneration",
    "audio",
    most={"audio": 1},
    needs_more=True,
    by_outline="audio",
)
def granite_speech(to: Checkpoint) -> None:
    from transformers import (
        GraniteSpeechConfig,
        GraniteSpeechFeatureExtractor,
        GraniteSpeechProcessor,
    )

    tokens = to.tokens(audio_token="<|audio|>")
    encoder = {"num_layers": 2, "hidden_dim": 64, "num_heads": 2, "output_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = GraniteSpeechConfig(
        encoder_config=encoder,
        text_config={"model_type": "granite", **TEXT},
        projector_config={**sizes, "num_attention_heads": 2, "encoder_hidden_size": 64},
        audio_token_index=to.id("<|audio|>"),
        has_lora_adapter=False,
    )
    to.config(config)
    GraniteSpeechProcessor(GraniteSpeechFeatureExtractor(), tokens).save_pretrained(to.directory)


@architecture(
    "Voxtral", "VoxtralForConditionalGeneration", "audio", needs_more=True, **MISTRAL_FORMAT
)
def voxtral(to: Checkpoint) -> None:
    spectrum = {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}
    rates = {"sampling_rate": 16_000, "frame_rate": 12.5, "chunk_length_s": 1.0}
    size = to.tekken(audio={**rates, "audio_encoding_config": spectrum})
    encoder = {
        "audio_encoding_args": {**spectrum, **rates},
        "dim": 64,
        "n_layers": 2,
        "head_dim": 32,
        "hidden_dim": 128,
        "n_heads": 2,
        "vocab_size": size,
        "max_source_positions": 50,  # of a second
    }
    hears = {"encoder_args": encoder, "downsample_args": {"downsample_factor": 4}}
    to.json("params", **mistral_params(size), multimodal={"whisper_model_args": hears})
