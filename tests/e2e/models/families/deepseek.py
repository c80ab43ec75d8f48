"""DeepSeek's and OpenBMB's models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from e2e.models.families.qwen import BF16, LINEAR
from e2e.models.sizes import TEXT, TOWER
from e2e.models.table import architecture

if TYPE_CHECKING:
    from e2e.models.checkpoint import Checkpoint

MLA: dict[str, Any] = {
    **TEXT,
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
}
"""DeepSeek-V2's language model."""
MHA: dict[str, Any] = {
    **MLA,
    "kv_lora_rank": None,
    "use_mla": False,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "v_head_dim": 0,
}


@architecture(
    "DeepSeek",
    "DeepseekVLV2ForCausalLM",
    "image",
    fails=("timm", "its tower is timm's, which is not installed"),
)
def deepseek_vl2(to: Checkpoint) -> None:
    to.tokens("<image>")
    to.json(
        "config",
        model_type="deepseek_vl_v2",
        architectures=[to.kind],
        vision_config={"image_size": 28, "patch_size": 14, "width": 64, "layers": 2, "heads": 2},
        projector_config={"input_dim": 64, "n_embed": 64},
        language_config=MHA,
        tile_tag="2D",
        candidate_resolutions=[[28, 28], [28, 56]],
    )
    to.json(
        "processor_config",
        processor_class="DeepseekVLV2Processor",
        pad_token="<pad>",
        candidate_resolutions=[[28, 28], [28, 56]],
        patch_size=14,
        downsample_ratio=2,
    )


@architecture(
    "MiniCPM", "MiniCPMV4_6ForConditionalGeneration", "image video", quick=True, engine=BF16
)
def minicpm_v4_6(to: Checkpoint) -> None:
    from transformers import (
        MiniCPMV4_6Config,
        MiniCPMV4_6ImageProcessor,
        MiniCPMV4_6Processor,
        MiniCPMV4_6VideoProcessor,
    )

    tokens = to.tokens(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        image_start_token="<image>",
        image_end_token="</image>",
        slice_start_token="<slice>",
        slice_end_token="</slice>",
        image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
    )
    config = MiniCPMV4_6Config(
        text_config={"model_type": "qwen3_5_text", **TEXT, **LINEAR},
        vision_config=TOWER | {"image_size": 56},
        image_token_id=to.id("<|image_pad|>"),
        video_token_id=to.id("<|video_pad|>"),
    )
    to.config(config)
    size = {"scale_resolution": 56, "max_slice_nums": 4}
    MiniCPMV4_6Processor(
        MiniCPMV4_6ImageProcessor(**size), MiniCPMV4_6VideoProcessor(**size), tokens
    ).save_pretrained(to.directory)
