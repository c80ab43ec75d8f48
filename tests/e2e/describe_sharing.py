"""What engines say of themselves, by vLLM's own configuration. In a vLLM environment.

    python describe_sharing.py QWEN AUDIO WHISPER WORDS

prints JSON. All are directories of tiny models; that of WORDS takes no media.
"""

import json
import sys

from vllm.config import ECTransferConfig
from vllm.engine.arg_utils import EngineArgs

from ecd_client.vllm.compat import PlaceholderMetadata
from ecd_client.vllm.description import Description
from ecd_client.vllm.settings import Settings
from ecd_client.vllm.sharing import Sharing

qwen, audio, whisper, words = sys.argv[1:]


def said(model: str = qwen, role: str = "ec_both", extra: dict | None = None, **engine: object):
    transfer = ECTransferConfig(
        ec_connector="EcdConnector",
        ec_connector_module_path="ecd_client.vllm",
        ec_role=role,
        ec_connector_extra_config={"ecd_address": "unix:///nowhere", **(extra or {})},
    )
    arguments = {"model": model, "max_model_len": 256, "ec_transfer_config": transfer, **engine}
    config = EngineArgs(**arguments).create_engine_config()
    settings = Settings.of(config)
    how = {"is_producer": transfer.is_ec_producer, "is_consumer": transfer.is_ec_consumer}
    metadata = PlaceholderMetadata(config.model_config)
    sharing = Sharing(settings, config)
    description = Description(config, settings, sharing, metadata.media, **how)
    description.log()
    return {**vars(description.engine), "id": ""}


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
print("RESULT", json.dumps(engines))
