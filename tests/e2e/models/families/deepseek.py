"""DeepSeek's models, and OpenBMB's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from e2e.models.families.qwen import BF16, LINEAR
from e2e.models.sizes import TEXT, TOWER
from e2e.models.table import architecture

if TYPE_CHECKING:
    from e2e.models.checkpoint import Checkpoint


RESIZED = "with a smaller tower than the one in vLLM's code"
HEADS = {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "num_key_value_heads": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
DEEPSEEK = {**TEXT, **HEADS, **EXPERTS, **SHARED, "topk_method": "greedy"}
DEEPSEEK |= {"kv_lora_rank": None, "q_lora_rank": None}


@architecture("DeepSeek", "DeepseekOCRForCausalLM", "image", remark=RESIZED, by_outline="image")
def deepseek_ocr(to: Checkpoint) -> None:
    from vllm.model_executor.models import deepencoder, deepseek_ocr

    def clip(**sizes: Any) -> Any:
        return deepencoder.CLIPVisionConfig(**sizes | {"num_hidden_layers": 1})

    deepseek_ocr.build_sam_vit_b = lambda: deepencoder._build_sam(768, 2, 12, [1])
    deepseek_ocr.CLIPVisionConfig = clip
    deepseek_ocr.BASE_SIZE, deepseek_ocr.IMAGE_SIZE = 128, 64
    to.tokens("<image>")
    to.json(
        "config",
        model_type="deepseek_vl_v2",
        architectures=[to.kind],
        language_config=DEEPSEEK,
        projector_config={"projector_type": "linear", "input_dim": 2048, "n_embed": 64},
        tile_tag="2D",
    )


@architecture("DeepSeek", "DeepseekVLV2ForCausalLM", "image", needs_more=True, remark=RESIZED)
def deepseek_vl2(to: Checkpoint) -> None:
    import timm

    create = timm.create_model
    timm.create_model = lambda *of, **more: create(*of, **more, depth=1)
    to.tokens("<image>")
    tiles = [[56, 56], [56, 112], [112, 56]]
    to.json(
        "config",
        model_type="deepseek_vl_v2",
        architectures=[to.kind],
        language_config=DEEPSEEK,
        vision_config={"image_size": 56, "patch_size": 14},
        projector_config={"input_dim": 1152, "n_embed": 64},
        candidate_resolutions=tiles,
        tile_tag="2D",
    )
    cuts = {"candidate_resolutions": tiles, "patch_size": 14, "downsample_ratio": 2}
    to.json("processor_config", processor_class="DeepseekVLV2Processor", **cuts)


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
