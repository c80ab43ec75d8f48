"""Weights of models that are not loaded, for `load_format="dummy"`: importing this puts them in."""

from __future__ import annotations

from zlib import crc32

import torch
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


def fill(loader: DummyModelLoader, model: torch.nn.Module, model_config: object) -> None:
    """Give each parameter values by its name, so that every engine has the same.

    What a layer multiplies with keeps the variance of what comes in: media reach the answer.
    """
    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor) or tensor.device.type == "meta":
            continue
        drawn = torch.Generator().manual_seed(crc32(name.encode()))
        normal = torch.randn(tensor.shape, generator=drawn)
        if tensor.ndim == 0:
            continue
        if tensor.ndim == 1:
            grows = "bias" not in name and ("norm" in name or name.endswith(("weight", "_var")))
            normal = 1 + 0.1 * normal if grows else 0.1 * normal
        elif "embed" not in name:
            inputs = tensor.shape[-1] if tensor.ndim == 3 else tensor[0].numel()
            normal /= inputs**0.5
        tensor.copy_(normal)


DummyModelLoader.load_weights = fill
