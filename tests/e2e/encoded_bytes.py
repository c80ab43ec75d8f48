"""What an encoder makes of one item of each modality, and under which name. In a vLLM environment.

    python encoded_bytes.py MODEL

prints JSON: the code's name, and of each item the dtype, the shape and the digest of the bytes.
"""

import hashlib
import json
import sys

import numpy as np
import torch
from transformers import ProcessorMixin
from vllm import LLM, SamplingParams

from ecd_client.vllm.base.identity.code_name import measured_name

ProcessorMixin.validate_inputs = lambda *_, **__: None
"""vLLM 0.28 and 0.30 were made for a transformers without this check."""

VISION = "<|vision_start|><|{}_pad|><|vision_end|>"
FRAMES, RATE_HZ = 4, 16_000
random = np.random.default_rng(7)
blocks = random.integers(0, 256, (FRAMES, 6, 6, 3), dtype=np.uint8)
frames = blocks.repeat(40, axis=1).repeat(60, axis=2)
about = {"fps": 2.0, "total_num_frames": FRAMES, "duration": FRAMES / 2, "video_backend": "opencv"}
about["frames_indices"] = list(range(FRAMES))
tone = np.sin(np.arange(2 * RATE_HZ) / 9) + random.normal(0, 0.1, 2 * RATE_HZ)
ITEMS = {
    "image": (VISION.format("image"), frames[0]),
    "video": (VISION.format("video"), (frames, about)),
    "audio": ("<|audio_bos|><|AUDIO|><|audio_eos|>", (tone.astype(np.float32), RATE_HZ)),
}


def digest(embeddings: torch.Tensor) -> str:
    raw = embeddings.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def main() -> None:
    [model] = sys.argv[1:]
    has_audio = "audio" in model
    modalities = ("audio",) if has_audio else ("image", "video")
    engine = LLM(
        model=model,
        max_model_len=2048,
        enforce_eager=True,
        max_num_seqs=2,
        kv_cache_memory_bytes=64 << 20,
        limit_mm_per_prompt=dict.fromkeys(modalities, 1),
    )
    core = engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    cache = getattr(runner.encoder_cache, "encoder_outputs", runner.encoder_cache)
    made = {}
    for modality in modalities:
        marks, item = ITEMS[modality]
        cache.clear()
        prompt = f"<|im_start|>user\n{marks}what?<|im_end|>\n<|im_start|>assistant\n"
        engine.generate(
            {"prompt": prompt, "multi_modal_data": {modality: item}},
            SamplingParams(temperature=0, max_tokens=1),
            use_tqdm=False,
        )
        [embeddings] = cache.values()
        made[modality] = [str(embeddings.dtype), list(embeddings.shape), digest(embeddings)]
    name = measured_name(engine.llm_engine.vllm_config)
    print("RESULT", json.dumps({"code": name, "made": made}))


if __name__ == "__main__":
    main()
