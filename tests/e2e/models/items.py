"""The items of the matrix's rows, as vLLM's processors take them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from e2e.models.table import MEDIA
from e2e.prompts import picture

FRAME = 56, 56
RATE = 16_000


@cache
def medium(item: str) -> Any:
    kind, *how, seed = MEDIA[item]
    if kind == "image":
        return picture([*how[0], seed])
    drawn = np.random.default_rng(seed)
    if kind == "audio":
        samples = int(RATE * how[0])
        steps = drawn.integers(100, 2000, 1 + samples // 1600).repeat(1600)[:samples]
        return np.sin(np.cumsum(steps) * 2 * np.pi / RATE).astype(np.float32), RATE
    count, rate = how
    frames = np.stack([np.asarray(picture([*FRAME, 100 * seed + at])) for at in range(count)])
    about = {
        "fps": rate,
        "duration": count / rate,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return frames, about


def by_kind(items: list[str], values: list[Any]) -> dict[str, list[Any]]:
    kinds: dict[str, list[Any]] = {}
    for item, value in zip(items, values, strict=True):
        kinds.setdefault(MEDIA[item][0], []).append(value)
    return kinds
