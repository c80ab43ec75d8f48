"""Drives the scheduler's role through what no engine does at will. In a vLLM environment.

    python scheduler_seams.py ADDRESS MODEL

The connector is real and so is the daemon; requests are no more than what the connector reads of
them. Prints what came of each case, as JSON.
"""

import json
import sys
from types import SimpleNamespace

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalKwargsItem

from ecd_client import Client
from support.waiting import HANG_S, value_of

WAIT_S = 1.0
address, model = sys.argv[1:]
transfer_config = ECTransferConfig(
    ec_connector="EcdConnector",
    ec_connector_module_path="ecd_client.vllm",
    ec_role="ec_both",
    ec_connector_extra_config={"ecd_address": address, "ecd_load_timeout_s": WAIT_S},
)
config = EngineArgs(model=model, ec_transfer_config=transfer_config).create_engine_config()
connector = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
role = connector._scheduler
role._client.wait_connected(HANG_S)
STEP = SimpleNamespace(total_num_scheduled_tokens=8)


def feature(name: str, length: int, offset: int = 0, bare: bool = False, modality: str = "image"):
    return SimpleNamespace(
        identifier=name,
        mm_position=SimpleNamespace(offset=offset, length=length, get_num_embeds=lambda: length),
        modality=modality,
        data=None if bare else MultiModalKwargsItem.dummy(),
    )


def request(name: str, *features: SimpleNamespace, params: dict | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        mm_features=list(features),
        num_preemptions=0,
        ec_transfer_params=params,
        structured_output_request=None,
        status=None,
    )


def settled(asked: SimpleNamespace, computed: int = 0, *others: SimpleNamespace) -> str:
    """The connector's last word on the request, when there is one: it goes on, or fails.

    Every step asks for all requests that wait.
    """

    def word() -> str:
        if connector.ensure_cache_available(asked, computed):
            return "goes on"
        if asked.status is not None or asked.request_id in role._readiness.failed:
            return "fails"
        for other in others:
            connector.ensure_cache_available(other, 0)
        connector.build_connector_meta(STEP)
        return ""

    return value_of(word)


def put(name: str, length: int) -> None:
    with Client(address, namespace=role.namespace) as client:
        client.put(name, torch.zeros(length, 128, dtype=config.model_config.dtype))


done: dict[str, object] = {}

put("given", 8)
half = request("half", feature("given", 8, bare=True))
assert settled(half) == "goes on"
assert connector.has_cache_item("given")
connector.update_state_after_alloc(half, 0)
connector.build_connector_meta(STEP)
connector.weights_changed("a reset")
done["given to a load before weights changed"] = settled(half, 4)
connector.request_finished(half)
role.loaded(["0/1"])

moves = role.moves
role.forgotten(moves - 1)
done["a report of before the last move is ignored"] = role.moves == moves
role.forgotten(moves)
done["a report of this move is not"] = role.moves == moves + 1

put("one name", 6)
contested = [
    request("with media", feature("one name", 4)),
    request("without", feature("one name", 6, bare=True, modality="video")),
]
connector.ensure_cache_available(contested[1], 0)
done["media of another size than the entry"] = settled(contested[0], 0, contested[1])
both = request("both", feature("one name", 4), feature("one name", 6, 10, True, "video"))
for asked in contested:
    connector.request_finished(asked)
done["one request with both"] = settled(both)
connector.request_finished(both)

named = request(
    "named",
    *(feature(name, 4, bare=True) for name in ("\ud800", "x" * 5000)),
    params={"ecd_consumers": ["10.0.0.1:9465"]},
)
done["names that are no text"] = settled(named)
connector.request_finished(named)
for name in ("ec_items", "ecd: gone when this cache is emptied"):
    asked = request(name, feature(name, 4))
    settled(asked)
    done[f"finishes with the name {name}"] = isinstance(connector.request_finished(asked), tuple)
connector.build_connector_meta(STEP)
done["left over"] = [len(role._items), len(role._requests), len(role._loads)]
print("RESULT", json.dumps(done))
connector.shutdown()
