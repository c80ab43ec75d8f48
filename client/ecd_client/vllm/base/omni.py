"""vLLM-Omni, whose engines are stages of a model: what ecd must not do in them.

Checked with vLLM-Omni 0.28 (docs/vllm-omni.md).
"""

from __future__ import annotations

from typing import Any

PACKAGE = "vllm_omni"
THINKER = "thinker"
KNOWN = "Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"
"""Models whose encoders only make embeddings. Others leave on the model, while they encode, what
its forward or a later stage needs: with a loaded embedding it would be missing, or another's."""


def stage_of(model_config: Any) -> str | None:
    """Which stage of a model the engine runs; None if it is none of vLLM-Omni's."""
    stage = getattr(model_config, "model_stage", None)
    return None if stage is None else str(stage)


def why_model_shares_nothing(kind: type, stage: str | None) -> str | None:
    """The reason why a model of this class shares no item; None if it may."""
    if kind.__module__.partition(".")[0] != PACKAGE:
        return None
    if stage not in (None, THINKER):
        return f"vLLM-Omni's stage {stage!r} encodes no media: give the connector to the thinker"
    if kind.__name__ in KNOWN:
        return None
    return (
        f"vLLM-Omni's {kind.__name__} is not known to need no more of an item than its embedding; "
        f"{KNOWN[0]} is"
    )
