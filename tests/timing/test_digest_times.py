"""How long it takes to name weights: engines do it as they start."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from ecd_client.vllm.base.identity.digest import digest_of

Figure = Callable[[str, float, str, str], None]
SHARDS, TENSORS, TENSOR_BYTES = 4, 500, 10 << 20


def test_20_gb(tmp_path: Path, figure: Figure) -> None:
    for shard in range(SHARDS):
        offsets = [number * TENSOR_BYTES for number in range(TENSORS)]
        header = {
            f"visual.{number}": {"data_offsets": [start, start + TENSOR_BYTES]}
            for number, start in enumerate(offsets)
        }
        packed = json.dumps(header).encode()
        with (tmp_path / f"{shard}.safetensors").open("wb") as file:
            file.write(len(packed).to_bytes(8, "little") + packed)
            file.truncate(8 + len(packed) + TENSORS * TENSOR_BYTES)
    took_s = []
    for _ in range(3):
        begun_s = time.perf_counter()
        digest_of(tmp_path, since_s=0)
        took_s.append(time.perf_counter() - begun_s)
    figure("sparse", min(took_s), "s", "below 1: engines start no later for it")
