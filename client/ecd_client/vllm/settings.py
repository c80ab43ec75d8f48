"""What an engine is configured to do, and under which names it shares."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ecd_client.calls import resolve
from ecd_client.errors import InvalidArgument
from ecd_proto.contract import MAX_MM_HASH_BYTES, MAX_NAMESPACE_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENCODE, FAIL = "encode", "fail"
LOAD_TIMEOUT_S = {ENCODE: 2.0, FAIL: 30.0}

_PER_PROCESS = re.compile(r"^(?:.*:)?renderer\d+-mm-\d+-")
"""Identifiers that vLLM counts up in each process when its processor and prefix caches are off.

Two engines give the same one to different images.
"""


@dataclass(frozen=True)
class Settings:
    """`ec_connector_extra_config`, checked."""

    address: str
    namespace: str
    load_timeout_s: float
    on_unavailable: str
    private_adapters: bool

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Settings:
        """Raises InvalidArgument: the message names the key and what it may be."""
        transfer_config = vllm_config.ec_transfer_config
        assert transfer_config is not None
        extra = dict(transfer_config.ec_connector_extra_config or {})
        address = extra.pop("ecd_address", None)
        namespace = extra.pop("ecd_namespace", None)
        on_unavailable = extra.pop("ecd_on_unavailable", ENCODE)
        if on_unavailable not in LOAD_TIMEOUT_S:
            raise InvalidArgument(
                f"ecd_on_unavailable is {on_unavailable!r}; it must be {ENCODE!r}, or {FAIL!r} for "
                "an engine that has no encoder"
            )
        load_timeout_s = extra.pop("ecd_load_timeout_s", LOAD_TIMEOUT_S[on_unavailable])
        if not isinstance(load_timeout_s, int | float) or not 0 < load_timeout_s <= 3600:
            raise InvalidArgument(
                f"ecd_load_timeout_s is {load_timeout_s!r}; it must be seconds, above 0"
            )
        if namespace is not None and (
            not isinstance(namespace, str) or not 0 < len(namespace.encode()) <= MAX_NAMESPACE_BYTES
        ):
            raise InvalidArgument(
                f"ecd_namespace must be a string of 1 to {MAX_NAMESPACE_BYTES} bytes"
            )
        unknown = [key for key in extra if key.startswith("ecd_")]
        if unknown:
            raise InvalidArgument(
                f"unknown in ec_connector_extra_config: {', '.join(unknown)}; known are "
                "ecd_address, ecd_namespace, ecd_load_timeout_s and ecd_on_unavailable"
            )
        lora = vllm_config.lora_config
        return cls(
            address=resolve(address),
            namespace=namespace or default_namespace(vllm_config.model_config),
            load_timeout_s=float(load_timeout_s),
            on_unavailable=on_unavailable,
            private_adapters=bool(namespace is None and lora and lora.enable_tower_connector_lora),
        )

    def shares(self, identifier: str) -> bool:
        """Whether the identifier says what the content is, on every engine of the namespace.

        Adapters of the vision tower are known by names that another engine may give to other
        weights, so their items are shared only in a namespace that somebody chose.
        """
        return (  # for every item of every request: most need no look by the pattern
            not ("renderer" in identifier and _PER_PROCESS.match(identifier))
            and not (self.private_adapters and ":" in identifier)
            and 0 < len(identifier.encode()) <= MAX_MM_HASH_BYTES
        )


def default_namespace(model_config: Any) -> str:
    """What must be equal for two engines to get equal embeddings of one image.

    Model, revision, dtype and quantization, readable; whatever else the engine was told that
    changes its embeddings and that vLLM does not hash with the image, as a digest.
    """
    multimodal = model_config.multimodal_config
    rest = {
        "mm_processor_kwargs": getattr(multimodal, "mm_processor_kwargs", None),
        "video_pruning_rate": getattr(multimodal, "video_pruning_rate", None),
        "hf_overrides": model_config.hf_overrides,
    }
    parts = [
        model_config.model,
        str(model_config.revision or "main"),
        str(model_config.dtype).removeprefix("torch."),
        str(model_config.quantization or "none"),
    ]
    if any(rest.values()):
        described = json.dumps(rest, sort_keys=True, default=repr)
        parts.append(hashlib.sha256(described.encode()).hexdigest()[:32])
    namespace = "|".join(parts)
    if len(namespace.encode()) > MAX_NAMESPACE_BYTES:
        return hashlib.sha256(namespace.encode()).hexdigest()
    return namespace
