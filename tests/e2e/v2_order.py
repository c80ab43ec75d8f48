"""Drives the connector code of vLLM's second model runner, hook by hook. In a vLLM environment.

    python v2_order.py ADDRESS MODEL

Prints what each step left in the encoder cache and in ecd, as JSON.
"""

import json
import sys
from types import SimpleNamespace

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

from ecd_client import Client
from ecd_client.vllm.base.identity.identity import Identity
from support.waiting import HANG_S, eventually

address, model = sys.argv[1:]
transfer_config = ECTransferConfig(
    ec_connector="EcdConnector",
    ec_connector_module_path="ecd_client.vllm",
    ec_role="ec_both",
    ec_connector_extra_config={"ecd_address": address},
)
config = EngineArgs(model=model, ec_transfer_config=transfer_config).create_engine_config()
from vllm.config import set_current_vllm_config  # noqa: E402

with set_current_vllm_config(config):
    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)

scheduler = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
state = sys.modules["vllm.distributed.ec_transfer.ec_transfer_state"]
state.ensure_ec_transfer_initialized(config)
cache: dict[str, torch.Tensor] = {}
runner = ActiveECConnector(config, cache)
client = Client(address, namespace=Identity.of(config, None, None).namespace)

for role in (scheduler._scheduler, state.get_ec_transfer()._worker):
    role._client.wait_connected(HANG_S)


STEP = SimpleNamespace(total_num_scheduled_tokens=8)


def request(name: str, identifier: str) -> SimpleNamespace:
    position = SimpleNamespace(offset=0, length=8, get_num_embeds=lambda: 8)
    feature = SimpleNamespace(
        identifier=identifier,
        mm_position=position,
        modality="image",
        data=MultiModalKwargsItem.dummy(),
    )
    return SimpleNamespace(
        request_id=name,
        mm_features=[feature],
        num_preemptions=0,
        num_computed_tokens=0,
        resumable=False,
        ec_transfer_params=None,
        cache_salt=None,
    )


def is_ready(asked: SimpleNamespace) -> bool:
    if scheduler.ensure_cache_available(asked, 0):
        return True
    scheduler.build_connector_meta(STEP)  # as every step does, whatever it schedules
    return False


def step(asked: SimpleNamespace, encode: bool) -> dict:
    """One step as the V2 runner takes it: hooks, forward, save of whatever is new."""
    identifier = asked.mm_features[0].identifier
    eventually(lambda: is_ready(asked))
    promised = scheduler.has_cache_item(identifier)
    scheduler.update_state_after_alloc(asked, 0)
    output = SimpleNamespace(
        ec_connector_metadata=scheduler.build_connector_meta(STEP), finished_req_ids=set()
    )
    with runner.maybe_get_output(output) as result:
        loaded = identifier in cache
        if encode:
            torch.manual_seed(len(identifier))
            cache[identifier] = torch.randn(8, 128).bfloat16()
    scheduler.update_connector_output(result)
    scheduler.request_finished(asked)
    return {"promised": promised, "loaded": loaded, "sum": cache[identifier].float().sum().item()}


steps = [step(request("a", "picture"), encode=True)]
with client.get("picture", timeout=HANG_S) as item:
    steps.append({"stored": item.tensor.float().sum().item(), "shape": item.shape})
del cache["picture"]
steps.append(step(request("b", "picture"), encode=False))
more = request("d", "more").mm_features[0]
more.mm_position.offset = 8
client.put("more", torch.zeros(8, 128).bfloat16())
resumed = request("d", "picture")
scheduler.ensure_cache_available(resumed, 0)
resumed.mm_features.append(more)
steps.append({"ready": scheduler.ensure_cache_available(resumed, 8)})
steps[-1]["promised"] = scheduler.has_cache_item("more")
scheduler.request_finished(resumed)
config.model_config.multimodal_config.mm_processor_cache_gb = 0
config.cache_config.enable_prefix_caching = False
steps.append(step(request("c", "counted"), encode=True))
eventually(lambda: all(saved.done() for _, saved, _ in state.get_ec_transfer()._worker._saves))
with runner.maybe_get_output(
    SimpleNamespace(
        ec_connector_metadata=scheduler.build_connector_meta(STEP), finished_req_ids=set()
    )
) as result:
    pass
scheduler.update_connector_output(result)
steps.append({"stats": scheduler.get_ec_connector_stats().data})
print("RESULT", json.dumps(steps))
scheduler.shutdown()
state.get_ec_transfer().shutdown()
client.close()
