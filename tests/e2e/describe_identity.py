"""Under which namespaces engines share, by vLLM's own configuration. In a vLLM environment.

    python describe_identity.py QWEN WHISPER

prints JSON. Both are directories of tiny models.
"""

import dataclasses
import json
import os
import shutil
import sys
import tempfile
import typing
from pathlib import Path
from unittest.mock import patch

from vllm.config import ECTransferConfig, LoadConfig, ModelConfig, MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import LoadFormats

from ecd_client.vllm.base.engine_core import HARMLESS
from ecd_client.vllm.base.identity.code_name import measured_name
from ecd_client.vllm.base.identity.identity import CHANGING, Identity, why_nothing_is_shared

model, whisper = map(Path, sys.argv[1:])
other = Path(tempfile.mkdtemp(), "other")
shutil.copytree(model, other)
(other / "tokenizer_config.json").write_text(
    (other / "tokenizer_config.json").read_text().replace("{", '{"of_the_copy": true,', 1)
)


def namespace(
    said: str | None = None, version: str | None = None, code: str | None = None, **engine: object
) -> str:
    config = EngineArgs(
        **{"model": str(model), "max_model_len": 2048, **engine}
    ).create_engine_config()
    return Identity.of(config, said, version, code_version=code).namespace


def scaled(content: str) -> str:
    """The namespace with scales of fp8 from a file of this content."""
    scales = other.with_name("scales.json")
    scales.write_text(content)
    return namespace(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales))


ROLES = "ec_producer", "ec_consumer", "ec_both"


def of_role(role: str, **engine: object) -> object:
    """An engine of this role on a GPU, as far as vLLM settles its configuration by the two."""
    transfer = ECTransferConfig(
        ec_connector="EcdConnector", ec_connector_module_path="ecd_client.vllm", ec_role=role
    )
    asked = {"model": str(model), "max_model_len": 2048, "ec_transfer_config": transfer}
    config = EngineArgs(**asked, **engine).create_engine_config()
    with (
        patch("vllm.platforms.current_platform.device_type", "cuda"),
        patch("vllm.utils.import_utils.check_torchcodec_available"),
    ):
        for settle in ("_resolve_mm_processor_device", "_resolve_mm_video_decode_device"):
            getattr(config, settle, lambda: None)()  # which 0.28 has not
    return config


def fields_of(config: object) -> dict[str, str]:
    parts = config.model_config, config.model_config.multimodal_config, config.load_config
    return {
        f"{type(part).__name__}.{field.name}": repr(getattr(part, field.name))
        for part in parts
        for field in dataclasses.fields(part)
    }


on_gpus = {"mm_tensor_ipc": "torch_shm", "mm_processor_kwargs": {"device": "cuda"}}
by_role: dict[str, dict] = {}
for role in ROLES:
    plain, told = of_role(role), of_role(role, **on_gpus)
    by_role[role] = {
        "namespaces": [Identity.of(each).namespace for each in (plain, told)],
        "fields": fields_of(told),
    }
parted = {
    name
    for name, value in by_role["ec_producer"]["fields"].items()
    if any(by_role[role]["fields"][name] != value for role in ROLES)
}


def reason(role: str = "ec_both", backend: str = "mp", nnodes: int = 1, **engine: object) -> str:
    """Why an engine of this layout shares nothing."""
    config = of_role(role, **engine)
    config.parallel_config.distributed_executor_backend = backend
    config.parallel_config.nnodes = nnodes
    return str(why_nothing_is_shared(config))


def reason_of_raw_inputs() -> str:
    """The same of a model that takes its inputs raw: none is small enough for a test."""
    taken = patch.object(ModelConfig, "is_multimodal_raw_input_only_model", True)
    config = of_role("ec_both")
    with taken:
        return str(why_nothing_is_shared(config))


counters = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
reasons = {
    "one machine": reason(),
    "two machines": reason(nnodes=2),
    "ray": reason(backend="ray"),
    "external_launcher": reason(backend="external_launcher"),
    "raw inputs": reason_of_raw_inputs(),
    "counters": reason(**counters),
    "counters of an encoder": reason("ec_producer", **counters),
    "no processor cache": reason(**counters | {"enable_prefix_caching": True}),
}

namespaces = {
    "plain": namespace(),
    "device": namespace(mm_processor_kwargs={"device": "cpu"}),
    "device of images": namespace(mm_processor_kwargs={"images_kwargs": {"device": "cpu"}}),
    "limits": namespace(limit_mm_per_prompt={"image": 2}, mm_processor_cache_gb=1),
    "processor": namespace(mm_processor_kwargs={"max_pixels": 200704}),
    "empty media": namespace(media_io_kwargs={"video": {}, "image": {}}),
    "decoder": namespace(media_io_kwargs={"video": {"backend": "torchcodec"}}),
    "media": namespace(media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}}),
    "fp8": namespace(mm_encoder_attn_dtype="fp8"),
    "fp8 scales": scaled("{}"),
    "other fp8 scales": scaled('{"a": 1.0}'),
    "backend": namespace(mm_encoder_attn_backend="TORCH_SDPA"),
    "overrides": namespace(hf_overrides={"vision_config": {"window_size": 56}}),
    "implementation": namespace(model_impl="transformers"),
    "dtype": namespace(dtype="float32"),
    "format": namespace(load_format="safetensors"),
    "dummy weights": namespace(load_format="dummy"),
    "version": namespace(version="7"),
    "code": namespace(code="7"),
    "other settings": namespace(hf_config_path=str(other)),
    "other tokenizer": namespace(tokenizer=str(other)),
    "chosen": namespace("chosen"),
    "chosen and a version": namespace("chosen", "7"),
}
[weights] = model.glob("*.safetensors")
stat = weights.stat()
weights.touch()
namespaces["weights written meanwhile"] = namespace()
os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
print(
    "RESULT",
    json.dumps(
        {
            "changing": CHANGING,
            "fields": {
                config.__name__: [field.name for field in dataclasses.fields(config)]
                for config in (ModelConfig, MultiModalConfig, LoadConfig)
            },
            "namespaces": namespaces,
            "by role": {role: said["namespaces"] for role, said in by_role.items()},
            "parted": sorted(parted),
            "reasons": reasons,
            "harmless": sorted(HARMLESS),
            "load formats": typing.get_args(LoadFormats),
            "code": measured_name(EngineArgs(model=str(model)).create_engine_config()),
            "whisper": why_nothing_is_shared(EngineArgs(model=str(whisper)).create_engine_config()),
        }
    ),
)
