"""An extension of vLLM's worker, which says in the log when its vision tower encodes pictures."""

from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer

forward = Qwen2_5_VisionTransformer.forward


def forward_and_say(self, *arguments, **named):
    print("pictures are encoded", flush=True)
    return forward(self, *arguments, **named)


Qwen2_5_VisionTransformer.forward = forward_and_say


class Counting:
    pass
