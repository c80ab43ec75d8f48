"""What engines say of themselves, by vLLM's own configuration. In a vLLM environment.

    python describe_sharing.py QWEN AUDIO WHISPER WORDS

prints JSON. All are directories of tiny models; that of WORDS takes no media.
"""

import json
import sys
from dataclasses import replace
from logging.handlers import BufferingHandler
from typing import Any

from vllm.config import ECTransferConfig
from vllm.engine.arg_utils import EngineArgs

from ecd_client.errors import InvalidArgument
from ecd_client.vllm.base import description
from ecd_client.vllm.base.description import Description
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.base.settings import Settings
from ecd_client.vllm.base.sharing import Sharing
from ecd_proto.engines import Engine

qwen, audio, whisper, words = sys.argv[1:]


def described(
    model: str = qwen,
    role: str = "ec_both",
    extra: dict | None = None,
    rank: str = "",
    **engine: object,
) -> Description:
    transfer = ECTransferConfig(
        ec_connector="EcdConnector",
        ec_connector_module_path="ecd_client.vllm",
        ec_role=role,
        ec_connector_extra_config={"ecd_address": "unix:///nowhere", **(extra or {})},
    )
    arguments = {"model": model, "max_model_len": 256, "ec_transfer_config": transfer, **engine}
    config = EngineArgs(**arguments).create_engine_config()
    config.instance_id = f"an instance{rank}"
    settings = Settings.of(config)
    how = {"is_producer": transfer.is_ec_producer, "is_consumer": transfer.is_ec_consumer}
    metadata = PlaceholderMetadata(config.model_config)
    sharing = Sharing(settings, config)
    return Description(config, settings, sharing, metadata.media, **how)


def said(*model: str, **how: Any) -> dict:
    return vars(described(*model, **how).engine)


def told_of(*others: Engine, **how: Any) -> int:
    """How often the log of an engine tells of others from which it is apart."""
    engine = described(**how)
    logged = BufferingHandler(100)
    description.logger.addHandler(logged)
    for other in others:
        engine.log_apart(other)
    description.logger.removeHandler(logged)
    return len(logged.buffer)


def another(name: str, **how: Any) -> Engine:
    return replace(described(dtype="float32", **how).engine, id=name)


def start_line(role: str, **engine: Any) -> str:
    """What an engine of this role and layout says at its start."""
    try:
        return described(role=role, **engine).engine.shares
    except InvalidArgument as error:
        return f"refused: {error}"


COUNTERS = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
engines = {
    "plain": said(),
    "name": said(served_model_name=["tiny", "an alias"]),
    "images": said(extra={"ecd_modalities": ["image"]}),
    "one limit": said(role="ec_producer", limit_mm_per_prompt={"video": 0}),
    "no media": said(role="ec_producer", limit_mm_per_prompt={"video": 0, "image": 0}),
    "no modality": said(extra={"ecd_modalities": []}),
    "audio": said(audio),
    "uuids": said(extra={"ecd_uuids": "refuse"}),
    "counters": said(**COUNTERS),
    "whisper": said(whisper),
    "words": said(words),
    "no weights": said(load_format="tensorizer"),
    "dtype": said(dtype="float32"),
    "processor": said(mm_processor_kwargs={"max_pixels": 200704}, load_format="dummy"),
    "versions": said(extra={"ecd_weights_version": "7", "ecd_code_version": "8"}),
    "run": said(extra={"ecd_weights_version": "7", "ecd_weights_run": "r"}),
    "namespace": said(extra={"ecd_namespace": "chosen by /an operator/"}),
}
told = {
    "once for each": told_of(another("a"), another("a"), another("b")),
    "of one that loads": told_of(another("a", role="ec_consumer")),
    "who looks for nothing": told_of(another("a"), role="ec_producer"),
    "who shares with no other": told_of(another("a"), load_format="tensorizer"),
}
OWN = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "tensor": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "tensor and stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "data": {"data_parallel_size": 2},
    "pooling": {"runner": "pooling"},
    "pooling in stages": {"runner": "pooling", "pipeline_parallel_size": 2},
    "machines": {"tensor_parallel_size": 2, "nnodes": 2},
    "stages on machines": {"pipeline_parallel_size": 2, "nnodes": 2},
    "launcher": {"distributed_executor_backend": "external_launcher"},
    "own executor": {
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    },
}
ways = {
    f"{layout}, {role}": start_line(role, **engine)
    for layout, engine in LAYOUTS.items()
    for role in ("ec_producer", "ec_consumer", "ec_both")
}
ranks = {described(rank=rank).engine.id for rank in ("", "_dp0", "_dp1")}
done = {"engines": engines, "told": told, "ways": ways, "ranks": len(ranks)}
print("RESULT", json.dumps(done))
