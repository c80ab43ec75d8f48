"""Has vLLM's own scheduler ask for the items of a new request. In a vLLM environment.

    python scheduler_reach.py ADDRESS MODEL EAGLE

Prints, for each case, the items that the first step encodes, and those that other engines leave to
this one meanwhile, as JSON. Scheduler, connector and daemon are real; no model runs.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import ECTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from ecd_client import Client
from support.waiting import HANG_S, value_of

address, model, eagle = sys.argv[1:]
STEP, BLOCK, BLOCKS = 32, 16, 256
DRAFTS = {"method": "eagle3", "model": eagle, "num_speculative_tokens": 2}


def configured(**engine: Any) -> VllmConfig:
    transfer = ECTransferConfig(
        ec_connector="EcdConnector",
        ec_connector_module_path="ecd_client.vllm",
        ec_role="ec_both",
        ec_connector_extra_config={"ecd_address": address, "ecd_load_timeout_s": 10 * HANG_S},
    )
    told = {"max_num_batched_tokens": STEP, "max_num_seqs": 8, "max_model_len": 2048, **engine}
    told["enable_prefix_caching"] = False  # which would want hashes of the prompt
    config = EngineArgs(model=model, ec_transfer_config=transfer, **told).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


def asked(case: str, places: Sequence[tuple[int, int]], config: VllmConfig) -> dict[str, list[int]]:
    """The items that the first step of a request encodes, each of a place (offset, length)."""
    spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv_cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["a layer"], spec)])
    scheduler = Scheduler(config, kv_cache, StructuredOutputManager(config), BLOCK)
    role = scheduler.ec_connector._scheduler
    role._client.wait_connected(HANG_S)
    features = [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem.dummy(),
            modality="image",
            identifier=f"{case}, {number}",
            mm_position=PlaceholderRange(offset, length),
        )
        for number, (offset, length) in enumerate(places)
    ]
    sampling, prompt = SamplingParams(max_tokens=2), [1] * (sum(places[-1]) + STEP)
    scheduler.add_request(Request(case, prompt, sampling, None, mm_features=features))

    def step() -> Any:
        output = scheduler.schedule()
        return output if output.num_scheduled_tokens else None

    encoded = value_of(step, "a step").scheduled_encoder_inputs.get(case, [])
    with Client(address, namespace=role.namespace) as other:
        locked = [n for n, each in enumerate(features) if other.is_locked(each.identifier)]
    scheduler.shutdown()
    return {"encoded": encoded, "locked": locked}


modules = configured(speculative_config=DRAFTS)
modules.speculative_config.method = "mtp"
modules.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = 2
done = {
    "behind a step": asked("plain", [(STEP, 96)], configured()),
    "behind a step, with EAGLE": asked(
        "eagle", [(STEP, 96)], configured(speculative_config=DRAFTS)
    ),
    "further behind it": asked("far", [(STEP + 1, 96)], configured(speculative_config=DRAFTS)),
    "further, with modules of MTP": asked("mtp", [(STEP + 1, 96)], modules),
    "more embeddings than a step's tokens": asked("two", [(0, 24), (24, 24)], configured()),
}
print("RESULT", json.dumps(done))
