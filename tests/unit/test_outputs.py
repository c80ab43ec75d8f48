"""What an engine's embeddings take of its GPU, and what is said of that."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ecd_client.vllm.base.outputs import Outputs, room_for_loads

MIB, GIB = 1 << 20, 1 << 30


def outputs(width: int, dtype: torch.dtype, levels: int = 0, **measured: int) -> Outputs:
    """Those of a model of this width, whose tower adds so many levels, and of measured widths."""
    tower = {"vision_config": {"deepstack_visual_indexes": list(range(levels))}} if levels else {}
    model = SimpleNamespace(
        dtype=dtype,
        get_inputs_embeds_size=lambda: width,
        multimodal_config=None,
        hf_config=SimpleNamespace(**tower),
    )
    transfer = SimpleNamespace(mm_encoder_output_widths=measured)
    return Outputs(SimpleNamespace(model_config=model, ec_transfer_config=transfer))


def test_embeddings_take_the_widest_mediums_bytes() -> None:
    assert outputs(2048, torch.bfloat16).bytes_of(8192) == 32 * MIB
    assert outputs(2048, torch.float32).bytes_of(8192) == 64 * MIB
    assert outputs(4096, torch.bfloat16, levels=3).bytes_of(16384) == 512 * MIB
    assert outputs(4096, torch.bfloat16, audio=4096, image=16384).bytes_of(16384) == 512 * MIB
    assert outputs(4096, torch.bfloat16).bytes_of(0) == 0


def test_what_loads_may_take_is_said_in_numbers_that_suffice() -> None:
    said = room_for_loads(512 * MIB, 80 * GIB, is_kv_sized=False)
    assert said == (
        "loads may take about 512 MiB of the GPU beyond vLLM's profile; 0.007 less of "
        "--gpu-memory-utilization keeps that free"
    )
    said = room_for_loads(GIB + 1, 10 * GIB, is_kv_sized=False)
    assert "about 1,025 MiB of" in said
    assert "; 0.101 less of" in said
    said = room_for_loads(512 * MIB, 80 * GIB, is_kv_sized=True)
    assert said.endswith("; as much less of --kv-cache-memory-bytes keeps that free")
