"""The namespace of an engine: equal where two engines' embeddings of one item are equal.

vLLM names an item by its content and by the request's own processor settings. The namespace holds
the rest: model, weights, and every setting of the engine that changes its encoder's output.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecd_client import clock
from ecd_client.vllm.base.identity.code_name import code_of
from ecd_client.vllm.base.identity.digest import Unnamed, content_of
from ecd_client.vllm.base.identity.sources import weights_of
from ecd_proto.contract import MAX_NAMESPACE_BYTES
from ecd_proto.engines import NAMESPACE, SHOWN, is_value

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CHANGING = {
    "ModelConfig": (
        *("trust_remote_code", "code_revision", "config_format", "hf_config_path"),
        *(
            "tokenizer_mode",
            "hf_overrides",
            "model_class_overrides",
            "model_impl",
            "quantization_config",
        ),
    ),
    "MultiModalConfig": (
        *("media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize"),
        *("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
        *("mm_encoder_tp_mode", "video_pruning_rate", "video_pruning_method"),
    ),
    "LoadConfig": ("load_format", "model_loader_extra_config", "ignore_patterns"),
}
"""Fields of vLLM's configuration that the namespace's digest holds, where they are set.

Model, revision, dtype and quantization stand beside the digest in the clear. docs/design-vllm.md
gives the reason for each field; tests/e2e/test_identity.py lists those that change no embedding.
"""
CHOSEN_DECODER = {"backend": "torchcodec", "device": "cuda"}
"""What vLLM adds to a video's settings by role (`VllmConfig._resolve_mm_video_decode_device`)."""
ONE_MACHINE = (None, "uni", "mp")
"""Executors whose workers are on the scheduler's machine."""
PRIVATE = "private-"
PART_DIGITS = 8
_READABLE = re.compile(r"[A-Za-z0-9._+-]{1,128}")


@dataclass(frozen=True)
class Identity:
    """The two parts of an engine's namespace: its settings, with its code, and its weights."""

    settings: str
    weights: str
    why_private: str = ""
    """Why no other engine can have this namespace, and what helps; "" if one can."""
    settings_parts: Mapping[str, str] = field(default_factory=dict)
    """The parts of the settings, in short words or digests (`ecd_proto.engines`)."""

    @property
    def is_private(self) -> bool:
        """Whether no other engine can have this namespace."""
        return self.weights.startswith(PRIVATE)

    @cached_property
    def namespace(self) -> str:
        namespace = "|".join(filter(None, (self.settings, self.weights)))
        if len(namespace.encode()) > MAX_NAMESPACE_BYTES or not namespace.isprintable():
            return hashlib.sha256(namespace.encode()).hexdigest()
        return namespace

    @property
    def parts(self) -> dict[str, str]:
        """The parts of the namespace, in short words or digests (`ecd_proto.engines`)."""
        is_versioned = self.weights.startswith(("version-", "run-"))
        name = "ecd_weights_version" if is_versioned else "weights"
        weights = {name: _digest(self.weights)} if self.weights else {}
        return {**self.settings_parts, **weights}

    def with_version(self, version: str, run: str) -> Identity:
        """The same settings, with the weights that had this version in a run of training."""
        return replace(self, weights=_version(version, run), why_private="")

    def alone(self) -> Identity:
        """The same settings, with weights that no other engine has."""
        return replace(self, weights=_private(), why_private="")

    @classmethod
    def of(
        cls,
        vllm_config: VllmConfig,
        namespace: str | None = None,
        weights_version: str | None = None,
        *,
        weights_run: str | None = None,
        code_version: str | None = None,
    ) -> Identity:
        """Derive both parts; given values replace those that would be found."""
        if namespace is None:
            settings, parts = _settings_of(vllm_config)
        else:
            settings, parts = namespace, {NAMESPACE: _digest(namespace)}
        weights = _version(weights_version, weights_run) if weights_version else ""
        if code_version:
            settings += f"|{_readable(code_version)}"
            parts["ecd_code_version"] = _digest(code_version)
        elif namespace is None:
            try:
                code = code_of(vllm_config)
            except Unnamed as unnamed:
                return cls(
                    settings,
                    _private(),
                    f"{unnamed}. Engines of equal code may be given one ecd_code_version",
                    parts,
                )
            settings += f"|{code}"
            parts |= _parts_of_code(code)
        if namespace is None and not weights_version:
            try:
                weights = weights_of(vllm_config, _started_s())
            except Unnamed as unnamed:
                return cls(
                    settings,
                    _private(),
                    f"what its weights are is unknown, as {unnamed}. Give engines of equal weights "
                    "the same ecd_weights_version",
                    parts,
                )
        return cls(settings, weights, "", parts)


def why_nothing_is_shared(vllm_config: VllmConfig) -> str | None:
    """The reason why no item of this engine is shared, and the remedy; None if items are shared.

    With both of its caches off vLLM counts items up in each process, and hashes that counter with
    the request's processor settings into a value that looks like a digest of the content. vLLM
    reads these two fields whenever an item comes, so callers ask anew each time.
    """
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model_config.multimodal_config is None:
        return "the model takes no media"
    if model_config.is_encoder_decoder:
        return "encoder-decoder models read their encoder's outputs past the encoder cache"
    if model_config.is_multimodal_raw_input_only_model:
        return "this model takes its inputs raw, past the encoder cache"
    if parallel.nnodes > 1:
        return (
            f"this engine's workers are on {parallel.nnodes} machines, and the memory that its "
            "scheduler promises is on one of them. Start an engine on each machine, or run without "
            "the connector"
        )
    if (executor := parallel.distributed_executor_backend) not in ONE_MACHINE:
        return (
            f"the executor {executor} may have workers on other machines, or several schedulers "
            "that must decide alike. Give --distributed-executor-backend mp"
        )
    multimodal = model_config.multimodal_config
    if (
        multimodal is not None
        and multimodal.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        transfer = vllm_config.ec_transfer_config
        only_encodes = transfer.is_ec_producer and not transfer.is_ec_consumer
        remedy = "let ec_role be ec_both" if only_encodes else "give --enable-prefix-caching"
        return (
            "with --mm-processor-cache-gb 0 and without prefix caching, which no engine has that "
            "only encodes, vLLM names items by a counter instead of their content. Leave "
            f"--mm-processor-cache-gb at its default, or {remedy}"
        )
    return None


# -- what is configured ----------------------------------------------------------------------------


def _settings_of(vllm_config: VllmConfig) -> tuple[str, dict[str, str]]:
    """The settings as the namespace has them, and their parts."""
    model = vllm_config.model_config
    configs: dict[str, Any] = {
        "ModelConfig": model,
        "MultiModalConfig": model.multimodal_config,
        "LoadConfig": vllm_config.load_config,
    }
    said = {
        f"{config}.{name}": value
        for config, names in CHANGING.items()
        for name in names
        if (value := _said(name, getattr(configs[config], name, None))) not in (None, {}, [], "")
    }
    described = json.dumps(said, sort_keys=True, default=_shown)
    clear = {
        "model": model.model,
        "revision": str(model.revision or "main"),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or "none"),
    }
    digest = hashlib.sha256(described.encode()).hexdigest()[:16]
    parts = {name: _short(name, value) for name, value in clear.items()}
    for name, value in said.items():
        parts[name.partition(".")[2]] = _digest(json.dumps(value, sort_keys=True, default=_shown))
    return "|".join((*clear.values(), digest)), parts


def _parts_of_code(code: str) -> dict[str, str]:
    """The parts of the name of an engine's code, which code_name.py gives it."""
    named = re.fullmatch(r"vllm-(?P<vllm>.+)-transformers-(?P<transformers>.+)-(?P<code>.+)", code)
    said = named.groupdict() if named else {"code": code}
    return {name: _short(name, value) for name, value in said.items()}


def _short(name: str, value: str) -> str:
    """A part's value, if it is a word for people, else its digest."""
    return value if name in SHOWN and is_value(value) else _digest(value)


def _digest(value: str) -> str:
    """Enough of a digest to tell two values apart, and too little to find one."""
    return hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()[:PART_DIGITS]


def _said(name: str, value: Any) -> Any:
    if name == "mm_processor_kwargs":
        return _without_device(value)
    if name == "media_io_kwargs":
        return _without_device(_without_chosen_decoder(value))
    if name == "mm_encoder_fp8_scale_path" and value:
        return content_of(value) or value
    return value


def _without_device(kwargs: Any) -> Any:
    """Processor settings without `device`, at any depth: it changes no embedding."""
    if not isinstance(kwargs, Mapping):
        return kwargs
    said = {name: _without_device(value) for name, value in kwargs.items() if name != "device"}
    return {name: value for name, value in said.items() if value not in (None, {})}


def _without_chosen_decoder(kwargs: Any) -> Any:
    """Media settings without the decoder that vLLM itself gives an encode-only engine on a GPU.

    A consumer of equal flags decodes no video. Where it does, a video is named by its frames.
    """
    video = kwargs.get("video") if isinstance(kwargs, Mapping) else None
    if not isinstance(video, Mapping) or {**video, **CHOSEN_DECODER} != video:
        return kwargs
    return {**kwargs, "video": {k: v for k, v in video.items() if k not in CHOSEN_DECODER}}


def _shown(value: Any) -> str:
    return str(getattr(value, "name", None) or repr(value))


# -- weights ---------------------------------------------------------------------------------------


def _version(version: str, run: str | None) -> str:
    named = f"version-{_readable(version)}"
    return f"run-{_readable(run)}|{named}" if run else named


def _readable(name: str) -> str:
    """The name, or a digest of one that is long or has other signs than a namespace should."""
    readable = _READABLE.fullmatch(name)
    return name if readable else hashlib.sha256(name.encode()).hexdigest()[:32]


def _private() -> str:
    return f"{PRIVATE}{clock.secret(8)}"


def _started_s() -> float:
    """The time when the engine's first process began; nothing of the model was read before."""
    parent = multiprocessing.parent_process()  # which has read the model's configuration
    began = [_began_s("self"), *([_began_s(str(parent.pid))] if parent else [])]
    return min(began)


def _began_s(process: str) -> float:
    """The time of day when a process began (proc(5)); now for one that has ended."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return clock.unix_s()
    return clock.booted_s() + ticks / os.sysconf("SC_CLK_TCK")
