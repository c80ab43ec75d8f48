"""One real vLLM engine, told what to do by a test. Run in a vLLM environment.

Reads one JSON command a line from standard input, writes one JSON reply a line to the file
descriptor of its first argument; its second argument is the engine's configuration.
"""

import gc
import importlib
import json
import os
import sys
from pathlib import Path
from timeit import default_timer

gc.disable()  # or what is imported is looked through now, at every shutdown and at the end: seconds

from transformers import ProcessorMixin
from vllm import LLM, SamplingParams
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.lora.request import LoRARequest

sys.path.append(str(Path(__file__).parents[1]))
from e2e.as_on_gpus import encode_as_on_gpus, schedule_ahead
from e2e.gates import pass_gate
from e2e.prompts import prompt

gc.freeze()
gc.enable()

RESETS = {
    "reset_encoder_cache": lambda engine: engine.llm_engine.reset_encoder_cache(),
    "reload_weights": lambda engine: engine.collective_rpc("reload_weights"),
    "sleep": lambda engine: engine.sleep(1),
    "sleep without weights": lambda engine: engine.sleep(2),
    "sleep in vain": lambda engine: sleep_in_vain(engine),
    "get_kv_cache_spec": lambda engine: engine.collective_rpc("get_kv_cache_spec"),
    "warm up": lambda engine: engine.collective_rpc("execute_dummy_batch"),
    "wake_up": lambda engine: engine.wake_up(),
    "only the worker": lambda engine: runner(engine).reset_encoder_cache(),
    "only the scheduler": lambda engine: (
        engine.llm_engine.engine_core.engine_core.scheduler.encoder_cache_manager.reset()
    ),
}
encoded: list[int] = []
may_encode = True
gate: Path | None = None
"""A pipe that a test lets a forward of the vision tower pass (`e2e.gates.Gate`)."""


def count_encoded(module: str, name: str) -> None:
    """Note how many images each forward of a vision tower encodes."""
    tower = getattr(__import__(module, fromlist=[name]), name)
    forward = tower.forward

    def counted(self, x, grid_thw, *args, **kwargs):
        assert may_encode, "an engine without an encoder was made to encode"
        encoded.append(len(grid_thw))
        if gate is not None:
            pass_gate(gate)
        return forward(self, x, grid_thw, *args, **kwargs)

    tower.forward = counted


count_encoded("vllm.model_executor.models.qwen2_5_vl", "Qwen2_5_VisionTransformer")
count_encoded("vllm.model_executor.models.qwen3_vl", "Qwen3_VisionTransformer")


def tell_of_waits() -> None:
    """Say beside the gate that this process waits for another one to encode."""
    from ecd_client.vllm.scheduler.encodes import Encodes

    decide = Encodes._waits_for

    def decide_and_tell(*arguments):
        waits = decide(*arguments)
        if waits and gate is not None:
            gate.with_name(f"{gate.name}.{os.getpid()}-waits").touch()
        return waits

    Encodes._waits_for = decide_and_tell


def let_metadata_in() -> None:
    """vLLM 0.28 was made for a transformers that lets a placeholder without its picture pass."""
    ProcessorMixin.validate_inputs = lambda *_, **__: None


def generate(engine: LLM, command: dict) -> dict:
    global gate
    gate = Path(command["gate"]) if "gate" in command else None
    encoded.clear()
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=request.get("max_tokens", command.get("max_tokens", 6)),
            ignore_eos=True,
            logprobs=0,
            extra_args={"ec_transfer_params": request.get("ec_transfer_params")},
        )
        for request in command["requests"]
    ]
    asked = command["requests"]
    prompts = [r.get("messages") or prompt(r) for r in asked]
    answer = engine.chat if all("messages" in r for r in asked) else engine.generate
    adapters = [LoRARequest("of tests", 1, r["adapter"]) for r in asked if r.get("adapter")]
    started = default_timer()
    outputs = answer(prompts, sampling, use_tqdm=False, lora_request=adapters or None)
    return {
        "seconds": default_timer() - started,
        "outputs": [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    round(logprob.logprob, 4)
                    for place in output.outputs[0].logprobs or ()
                    for logprob in place.values()
                ],
                "finish_reason": output.outputs[0].finish_reason,
                "ec_transfer_params": getattr(output, "ec_transfer_params", None),
            }
            for output in outputs
        ],
        "encoded": sum(encoded),
    }


def embed(engine: LLM, requests: list[dict]) -> dict:
    encoded.clear()
    outputs = engine.embed([prompt(request) for request in requests], use_tqdm=False)
    vectors = [[round(value, 4) for value in each.outputs.embedding] for each in outputs]
    return {"vectors": vectors, "encoded": sum(encoded)}


def runner(engine: LLM):
    """The model runner, where the engine runs in this process."""
    return (
        engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    )


def forget(engine: LLM) -> None:
    """Have the engine look for every item anew, as if others had displaced it."""
    core = engine.llm_engine.engine_core.engine_core
    core.scheduler.encoder_cache_manager.reset()
    cache = runner(engine).encoder_cache
    cache = getattr(cache, "encoder_outputs", cache)  # of vLLM's second model runner
    for name in [name for name in cache if isinstance(name, str)]:
        del cache[name]
    engine.reset_prefix_cache()


def daemons(engine: LLM) -> list[str]:
    """The incarnation of the daemon with which each of both roles has a session; "" without."""
    from vllm.distributed.ec_transfer import get_ec_transfer

    scheduler = engine.llm_engine.engine_core.engine_core.scheduler.ec_connector
    found = []
    for role in (scheduler._scheduler, get_ec_transfer()._worker):
        session = role._client._connection.current
        found.append("" if session is None else session.incarnation)
    return found


def sleep_in_vain(engine: LLM) -> None:
    """A sleep that would keep the weights, and fails before anything else."""
    try:
        engine.llm_engine.engine_core.engine_core.sleep(1, mode="wait")
    except ValueError:
        return
    raise AssertionError("it was to fail")


def set_constants(constants: dict[str, float]) -> dict[str, float]:
    """Give constants of the connector other values, by `room.module.NAME`; returns the old ones."""
    were = {}
    for name, value in constants.items():
        at, _, constant = name.rpartition(".")
        module = importlib.import_module(f"ecd_client.vllm.{at}")
        were[name] = getattr(module, constant)
        setattr(module, constant, value)
    return were


def end_rest(engine: LLM) -> None:
    """Have the engine wait for others again, though it has waited in vain."""
    core = engine.llm_engine.engine_core.engine_core
    core.scheduler.ec_connector._scheduler._encodes._rests_until_s = 0.0


def scale(engine: LLM, factor: float) -> None:
    """Other weights: a norm of the vision tower times a factor, told to nobody."""
    runner(engine).get_model().visual.merger.ln_q.weight.data.mul_(factor)


def main() -> None:
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    setup = json.loads(sys.argv[2])
    kwargs = {
        "max_model_len": 2048,
        "dtype": "float32",  # sums are equal, whatever shares a step; and CPUs emulate bfloat16
        "enforce_eager": True,
        "limit_mm_per_prompt": {"image": 4, "video": 0},
        "max_num_seqs": 8,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": 64 << 20,  # else most of the memory, zeroed at each start
        **setup.get("engine", {}),
    }
    if "role" in setup:
        kwargs["ec_transfer_config"] = ECTransferConfig(
            ec_connector="EcdConnector",
            ec_connector_module_path="ecd_client.vllm",
            ec_role=setup["role"],
            ec_connector_extra_config=setup.get("extra", {}),
        )
    if "connector" in setup:
        kwargs["ec_transfer_config"] = ECTransferConfig(**setup["connector"])
    if "kv" in setup:
        kwargs["kv_transfer_config"] = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": setup["kv"]},
        )
    let_metadata_in()
    if kwargs.get("async_scheduling"):
        schedule_ahead()
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER"):
        encode_as_on_gpus()
    if "role" in setup:
        tell_of_waits()
        set_constants(setup.get("constants", {}))
    engine = LLM(model=setup["model"], **kwargs)
    if kwargs.get("pipeline_parallel_size", 1) > 1:
        RESETS["warm up"](engine)  # which makes the second stage's buffers
    global may_encode
    may_encode = not setup.get("encoder_less", False)
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "generate":
                reply = generate(engine, command)
            case "embed":
                reply = embed(engine, command["requests"])
            case "forget":
                forget(engine)
                reply = {}
            case "scale":
                scale(engine, command["factor"])
                for call in command["then"]:
                    RESETS[call](engine)
                engine.reset_prefix_cache()
                reply = {}
            case "reset":
                for call in command["calls"]:
                    RESETS[call](engine)
                engine.reset_prefix_cache()
                reply = {}
            case "daemons":
                reply = {"are": daemons(engine)}
            case "set":
                reply = set_constants(command["constants"])
                end_rest(engine)
            case "version":
                engine.llm_engine.set_weight_version(command["version"])
                reply = {}
            case "metrics":
                metrics = engine.get_metrics()
                reply = {
                    metric.name: metric.value
                    for metric in metrics
                    if metric.name.startswith("vllm:ecd_")
                }
        print(json.dumps(reply), file=replies)
    gc.freeze()
    gc.unfreeze = lambda: None  # as vLLM's shutdown does, to look through all: 2 s
    engine.llm_engine.engine_core.shutdown()
    gc.freeze()


if __name__ == "__main__":
    main()
