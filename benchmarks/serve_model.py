"""The models of `serve.py`: a tiny one, or the shape of Qwen2.5-VL for dummy weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from e2e import engines as e2e

LAYERS = "num_hidden_layers"
VISION = {
    "depth": 32,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "window_size": 112,
}
SHAPES: dict[str, dict[str, int]] = {
    "3B": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        LAYERS: 36,
        "num_key_value_heads": 2,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        LAYERS: 28,
        "num_key_value_heads": 4,
    },
}
"""The language models; both have the vision tower VISION and heads of 128."""


def make_model(version: str, kind: str, directory: Path) -> Path:
    """The directory of a model: `tiny`, one of SHAPES without weights, or a directory itself."""
    if kind not in ("tiny", *SHAPES):
        return Path(kind).absolute()
    model = e2e.make_model(version, "qwen2_5_vl", directory / "model")
    if shape := SHAPES.get(kind):
        file = model / "config.json"
        config = json.loads(file.read_text())
        text = config.get("text_config", config)
        text |= {**shape, "head_dim": 128, "layer_types": ["full_attention"] * shape[LAYERS]}
        text["max_window_layers"] = shape[LAYERS]
        for name in ("rope_scaling", "rope_parameters"):
            if name in text:
                text[name] |= {"mrope_section": [16, 24, 24]}
        config["vision_config"] |= {**VISION, "out_hidden_size": shape["hidden_size"]}
        file.write_text(json.dumps(config))
        for weights in model.glob("*.safetensors"):
            weights.unlink()
    return model
