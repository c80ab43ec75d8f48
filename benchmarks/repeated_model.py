"""Writes a model of `repeated.py` that has no placeholder metadata, in an environment of vLLM.

    python repeated_model.py FAMILY DIRECTORY

The models' matrix's checkpoint of the family without weights, but with the sizes of pictures, tiles
and patches that the family's models have. Prints a chat template for it behind RESULT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY

from e2e.models import families  # noqa: F401, as it fills the table
from e2e.models.checkpoint import Checkpoint
from e2e.models.server import template
from e2e.models.table import ARCHITECTURES

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "internvl": (
        {"vision_config": {"image_size": [448, 448]}, "image_seq_length": 256},
        {"image_processor": {"size": square(448), "max_patches": 12}, "image_seq_length": 256},
    ),
    "gemma3": (
        {"vision_config": {"image_size": 896}, "mm_tokens_per_image": 256},
        {"image_processor": {"size": square(896)}, "image_seq_length": 256},
    ),
    "llama4": (
        {"vision_config": {"image_size": 336}},
        {"image_processor": {"size": square(336), "max_patches": 16}},
    ),
    "llava_next": (
        {"vision_config": {"image_size": 336}, "image_grid_pinpoints": PINPOINTS},
        {
            "image_processor": {
                "size": {"shortest_edge": 336},
                "crop_size": square(336),
                "image_grid_pinpoints": PINPOINTS,
            }
        },
    ),
    "pixtral": (
        {"vision_config": {"image_size": 1024, "patch_size": 16}},
        {"image_processor": {"size": {"longest_edge": 1024}, "patch_size": 16}, "patch_size": 16},
    ),
    "idefics3": (
        {"vision_config": {"image_size": 364}},
        {
            "image_processor": {
                "size": {"longest_edge": 1456},
                "max_image_size": {"longest_edge": 364},
            },
            "image_seq_len": 169,
        },
    ),
    "glm4v": (
        {
            "vision_config": {"image_size": 1120, "num_positions": 6401},
            "seq_length": 8192,
            "max_position_embeddings": 8192,
        },
        {},
    ),
}
"""What differs in `config.json` and in `processor_config.json`, by family."""


def put(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    """Change settings in their place."""
    for name, value in changes.items():
        if isinstance(value, dict):
            put(settings.setdefault(name, {}), value)
        else:
            settings[name] = value


def main(family: str, directory: str) -> None:
    tried, to = ARCHITECTURES[family], Path(directory)
    to.mkdir()
    checkpoint = Checkpoint(to, tried.kind)
    tried.make(checkpoint)
    for name, changes in zip(("config", "processor_config"), SIZES[family], strict=True):
        if changes:
            settings = checkpoint.read(name)
            put(settings, changes)
            checkpoint.json(name, **settings)
    processor = MULTIMODAL_REGISTRY.create_processor(ModelConfig(directory, dtype="float32"))
    mark = processor.dummy_inputs.get_dummy_text({"image": 1})
    print("RESULT", json.dumps(template({"image": mark})))


if __name__ == "__main__":
    main(*sys.argv[1:])
