"""Drives the connector on the stand-in's GPU, through vLLM's own code of both model runners.

    python gpu_order.py ADDRESS MODEL PLACE

PLACE is where loads come from: the host's pool, the device's, or views of the latter. Prints what
each step did, waited for and left in the encoder cache, as JSON.
"""

import json
import sys
import threading
from contextlib import contextmanager
from functools import partial
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
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin

import ecd_client.vllm.worker.encode_time
import ecd_client.vllm.worker.loader
from ecd_client import Client
from ecd_client.device import completions
from ecd_client.device import pool as device_pool
from ecd_client.device.copies import Copies
from ecd_client.vllm.base.identity.identity import Identity
from support.cuda.gpu import CallsByThread, StandinGpu
from support.cuda.standin import Control, Hold
from support.waiting import HANG_S, eventually

address, model, place = sys.argv[1:]
control = Control.of_this_process()
gpu = StandinGpu.use()
calls = CallsByThread(gpu)
outlast, Copies._outlast = Copies._outlast, lambda *which: outlast_and_recover(*which)
device_pool.LISTED_WITHIN_S = HANG_S  # nobody asks for the copies again
ecd_client.vllm.worker.loader._device = lambda: torch.device("cuda:0")
# This torch has no events: its own raise, and vLLM's CPU worker puts others in their place.
ecd_client.vllm.worker.encode_time._recorded = lambda: None
transfer_config = ECTransferConfig(
    ec_connector="EcdConnector",
    ec_connector_module_path="ecd_client.vllm",
    ec_role="ec_both",
    ec_connector_extra_config={"ecd_address": address, "ecd_device_views": place == "views"},
)
config = EngineArgs(model=model, ec_transfer_config=transfer_config).create_engine_config()
from vllm.config import set_current_vllm_config  # noqa: E402

with set_current_vllm_config(config):
    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)

scheduler = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
state = sys.modules["vllm.distributed.ec_transfer.ec_transfer_state"]
state.ensure_ec_transfer_initialized(config)
worker = state.get_ec_transfer()
cache: dict[str, torch.Tensor] = {}
client = Client(address, namespace=Identity.of(config, None, None).namespace)
for role in (scheduler._scheduler, worker._worker):
    role._client.wait_connected(HANG_S)
STEP = SimpleNamespace(total_num_scheduled_tokens=8)
SHAPE = (8, 128)


@contextmanager
def first_runner(output: SimpleNamespace):
    """The hooks in the order of vLLM's first runner, which saves as it encodes."""
    with ECConnectorModelRunnerMixin._get_ec_connector_output(output, cache) as result:
        yield result


try:
    from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

    second_runner = ActiveECConnector(config, cache).maybe_get_output
except ImportError:  # vLLM 0.28
    second_runner = None


def request(name: str, identifier: str) -> SimpleNamespace:
    feature = SimpleNamespace(
        identifier=identifier,
        mm_position=SimpleNamespace(offset=0, length=8, get_num_embeds=lambda: 8),
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
    scheduler.build_connector_meta(STEP)
    return False


def is_still() -> bool:
    counted = control.counters()
    return counted.copies == counted.finished


def step(runner, asked: SimpleNamespace, byte: int | None, is_aborted: bool = False) -> dict:
    """One step; it encodes the item if `byte` is given. No copy and no fill begins meanwhile."""
    identifier = asked.mm_features[0].identifier
    eventually(lambda: is_ready(asked))
    promised = scheduler.has_cache_item(identifier)
    scheduler.update_state_after_alloc(asked, 0)
    output = SimpleNamespace(
        ec_connector_metadata=scheduler.build_connector_meta(STEP), finished_req_ids=set()
    )
    eventually(is_still)
    before = control.counters()
    control.hold = Hold.START | Hold.FILLS
    with runner(output) as result:
        loaded = identifier in cache
        if byte is not None:
            cache[identifier] = gpu.encode(SHAPE, torch.bfloat16, byte)
            if runner is first_runner:
                ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(cache, identifier)
    after = control.counters()
    from_host, from_device = after.bytes_h2d - before.bytes_h2d, after.bytes_d2d - before.bytes_d2d
    control.hold = Hold.NOTHING
    scheduler.update_connector_output(result)
    scheduler.request_finished(asked)
    done = {
        "promised": promised,
        "loaded": loaded,
        "waits": after.main_waits - before.main_waits,
        "pageable": after.pageable_copies - before.pageable_copies,
        "waited": after.finished > before.finished,
        "loads under way": len(scheduler._scheduler._loads),
        "from the host": from_host,
        "within the device": from_device,
    }
    if is_aborted:
        del cache[identifier]
        return done
    return done | {"right": set(gpu.content(cache[identifier])) == {byte or 7}}


def step_of_many(runner, name: str) -> dict:
    """One step that loads four items, twice: the second time their end cannot be marked at first.

    The driver's calls are those of the worker's thread.
    """
    names, thread = [f"{name} {number}" for number in range(4)], threading.current_thread().name
    for number, each in enumerate(names):
        step(runner, request(f"{each} encoded", each), byte=number + 1)
        del cache[each]
        if place != "host":
            eventually(lambda each=each: is_near(each))
    found = {}
    for case in ("at once", "again"):
        asked = [request(f"{each} {case}", each) for each in names]
        eventually(lambda asked=asked: all(is_ready(each) for each in asked))
        for each in asked:
            assert scheduler.has_cache_item(each.mm_features[0].identifier)
            scheduler.update_state_after_alloc(each, 0)
        output = SimpleNamespace(
            ec_connector_metadata=scheduler.build_connector_meta(STEP), finished_req_ids=set()
        )
        eventually(is_still)
        may_ask = threading.Event()
        completions.aside(partial(may_ask.wait, HANG_S))  # as this thread is faster than that one
        control.delay_us = 20_000
        if case == "again":
            control.fail({"cuEventRecord": 1})
        before = calls.counts[thread]
        with runner(output) as result:
            made = calls.counts[thread] - before
            control.fail({})
            right = [set(gpu.content(cache[each])) == {n + 1} for n, each in enumerate(names)]
        control.delay_us = 500
        may_ask.set()
        found[case] = {"right": right} | ({"calls": made} if case == "at once" else {})
        scheduler.update_connector_output(result)
        for each in asked:
            scheduler.request_finished(each)
            del cache[each.mm_features[0].identifier]
        found[case]["under way"] = len(scheduler._scheduler._loads)
    return found


def outlast_and_recover(own: Copies, stream: int) -> BaseException | None:
    came = outlast(own, stream)
    control.fail({})
    return came


def pinned() -> bool:
    pool = worker._worker._client._connection.session().pools.granted
    return pool._pinned is not None and pool._pinned.pinned_bytes == pool.nbytes


def is_near(identifier: str) -> bool:
    """Whether the device pool has a copy."""
    loader = worker._worker._client
    session = loader._connection.session()
    with loader.get(identifier, timeout=HANG_S) as item:
        key = loader.namespace, identifier
        held = session.near.hold(session, key, item._hold.entry, item.nbytes)
    if held is not None:
        held.end()
    return held is not None


control.delay_us = 500
worker._worker._loader.device  # noqa: B018  pins, as the first load would
eventually(pinned)
if place != "host":
    eventually(lambda: worker._worker._client._connection.session().near is not None)
steps = {}
for name, runner in (("first", first_runner), ("second", second_runner)):
    if runner is None:
        continue
    encoded = step(runner, request(f"{name}-a", f"{name} picture"), byte=7)
    del cache[f"{name} picture"]  # its tensor goes while the save may be under way
    gpu.encode(SHAPE, torch.bfloat16, 255)
    with client.get(f"{name} picture", timeout=HANG_S) as item:
        encoded["stored"] = set(bytes(item.view)) == {7}
    if place != "host":
        eventually(lambda name=name: is_near(f"{name} picture"))
    loaded = step(runner, request(f"{name}-b", f"{name} picture"), byte=None)
    del cache[f"{name} picture"]
    aborted = step(runner, request(f"{name}-c", f"{name} picture"), byte=None, is_aborted=True)
    again = step(runner, request(f"{name}-d", f"{name} picture"), byte=None)
    del cache[f"{name} picture"]
    steps[name] = {"encoded": encoded, "loaded": loaded, "aborted": aborted, "again": again}
    steps[name]["many"] = step_of_many(runner, name)
stats = scheduler.get_ec_connector_stats()
steps["stats"] = None if stats is None else stats.data
steps["faults"] = control.counters().faults
print("RESULT", json.dumps(steps))
scheduler.shutdown()
worker.shutdown()
client.close()
