"""The items of the matrix's rows, as vLLM's processors take them and as a chat brings them."""

from __future__ import annotations

import wave
from base64 import b64encode
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import cv2
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


def part(item: str) -> dict[str, Any]:
    """The part of a chat's message that shows the item."""
    key = f"{MEDIA[item][0]}_url"
    return {"type": key, key: {"url": _url(item)}}


@cache
def _url(item: str) -> str:
    kind, shown = MEDIA[item][0], medium(item)
    file = BytesIO()
    if kind == "image":
        shown.save(file, "png")
        form = "image/png"
    elif kind == "audio":
        with wave.open(file, "wb") as out:
            out.setparams((1, 2, RATE, 0, "NONE", ""))
            out.writeframes((shown[0] * 32_767).astype(np.int16).tobytes())
        form = "audio/wav"
    else:
        file.write(_clip(shown[0], shown[1]["fps"]))
        form = "video/mp4"
    return f"data:{form};base64,{b64encode(file.getvalue()).decode()}"


def _clip(frames: np.ndarray, rate: float) -> bytes:
    with NamedTemporaryFile(suffix=".mp4") as file:
        writer = cv2.VideoWriter(file.name, cv2.VideoWriter_fourcc(*"mp4v"), rate, FRAME)
        assert writer.isOpened(), "this OpenCV writes no MPEG-4"
        for frame in frames:
            writer.write(frame[..., ::-1])
        writer.release()
        return Path(file.name).read_bytes()
