"""Tiny sizes that most families take."""

from __future__ import annotations

from typing import Any

VOCABULARY = 512
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
"""A language model of most families."""
TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
"""A vision tower of most families: CLIP's and SigLIP's."""
HEARING: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "num_mel_bins": 128,
}
"""An encoder of sounds: Whisper's."""
SQUARE = {"size": {"height": 28, "width": 28}}
"""What such a tower's image processor resizes to."""
MISTRAL_FORMAT: dict[str, Any] = {
    "engine": {"tokenizer_mode": "mistral", "config_format": "mistral"},
    "remark": "in Mistral's format",
}
"""What the table says of a checkpoint in Mistral's own format."""


def mistral_params(vocabulary: int) -> dict[str, Any]:
    """A language model in Mistral's own format."""
    return {
        "dim": 64,
        "n_layers": 2,
        "head_dim": 32,
        "hidden_dim": 128,
        "n_heads": 2,
        "n_kv_heads": 1,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "dtype": "float32",
    }
