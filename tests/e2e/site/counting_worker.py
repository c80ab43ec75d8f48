"""An extension of vLLM's worker, which says in the log when its vision tower encodes pictures.

With STEP_GATE=FILE each step passes that gate (`e2e.gates.Gate`). With CALM an engine that encodes
waits longer until its puts are seen than a busy machine takes.
"""

import os
from pathlib import Path

from vllm.model_executor.models.clip import CLIPVisionModel
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VisionTransformer,
    Qwen2_5_VLForConditionalGeneration,
)

from e2e.gates import pass_gate
from ecd_client.vllm.worker import worker
from support.waiting import HANG_S

TOWERS = Qwen2_5_VisionTransformer, CLIPVisionModel
step = Qwen2_5_VLForConditionalGeneration.forward


def saying(forward):
    def forward_and_say(self, *arguments, **named):
        print("pictures are encoded", flush=True)
        return forward(self, *arguments, **named)

    return forward_and_say


def pass_and_step(self, *arguments, **named):
    pass_gate(Path(os.environ["STEP_GATE"]))
    return step(self, *arguments, **named)


for tower in TOWERS:
    tower.forward = saying(tower.forward)
if "STEP_GATE" in os.environ:
    Qwen2_5_VLForConditionalGeneration.forward = pass_and_step
if os.environ.get("CALM"):
    worker.SEEN_WITHIN_S = HANG_S


class Counting:
    pass
