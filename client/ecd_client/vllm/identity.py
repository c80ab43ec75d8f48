"""The namespace of an engine: equal where two engines' embeddings of one item are equal.

vLLM names an item by its content and by the request's own processor settings. The namespace holds
the rest: model, weights, and every setting of the engine that changes its encoder's output.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecd_proto.contract import MAX_NAMESPACE_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CHANGING = {
    "ModelConfig": (
        *("trust_remote_code", "code_revision", "config_format", "hf_config_path"),
        *("hf_overrides", "model_class_overrides", "model_impl", "quantization_config"),
    ),
    "MultiModalConfig": (
        *("media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize"),
        *("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
        *("mm_encoder_tp_mode", "video_pruning_rate", "video_pruning_method"),
    ),
    "LoadConfig": ("load_format", "model_loader_extra_config", "ignore_patterns"),
}
"""Fields of vLLM's configuration that the namespace's digest holds, where they are set.

Model, revision, dtype and quantization stand beside the digest in the clear. docs/vllm.md gives the
reason for each field; tests/e2e/test_identity.py lists the fields that change no embedding.
"""
WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors", ".msgpack", ".h5")
)
CODE_SUFFIXES = frozenset((".json", ".py"))
MAX_CODE_BYTES = 16 << 20
"""Largest configuration or code file that is read; a larger one counts by its size and time."""
PRIVATE = "private-"
_READABLE = re.compile(r"[A-Za-z0-9._+-]{1,64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})(?:/|$)")
"""The directory of one commit in the hub's cache."""


@dataclass(frozen=True)
class Identity:
    """The two parts of an engine's namespace: its settings and its weights."""

    settings: str
    weights: str

    @property
    def is_private(self) -> bool:
        """Whether no other engine can have this namespace."""
        return self.weights.startswith(PRIVATE)

    @cached_property
    def namespace(self) -> str:
        namespace = "|".join(filter(None, (self.settings, self.weights)))
        if len(namespace.encode()) > MAX_NAMESPACE_BYTES:
            return hashlib.sha256(namespace.encode()).hexdigest()
        return namespace

    def with_version(self, version: str) -> Identity:
        """The same settings, with weights that an operator calls by this version."""
        return Identity(self.settings, _version(version))

    def alone(self) -> Identity:
        """The same settings, with weights that no other engine has."""
        return Identity(self.settings, _private())

    @classmethod
    def of(
        cls, vllm_config: VllmConfig, namespace: str | None, weights_version: str | None
    ) -> Identity:
        """Derive both parts; `namespace` takes the place of all but a `weights_version`."""
        if namespace is None:
            namespace = _settings_of(vllm_config)
            weights = _version(weights_version) if weights_version else _weights_of(vllm_config)
        else:
            weights = _version(weights_version) if weights_version else ""
        return cls(namespace, weights)


def why_nothing_is_shared(vllm_config: VllmConfig) -> str | None:
    """The reason why no item of this engine is shared, and the remedy; None if items are shared.

    With both of its caches off vLLM counts items up in each process, and hashes that counter with
    the request's processor settings into a value that looks like a digest of the content. vLLM
    reads these two fields whenever an item comes, so callers ask anew each time.
    """
    model_config = vllm_config.model_config
    if model_config.is_encoder_decoder:
        return "encoder-decoder models read their encoder's outputs past the encoder cache"
    multimodal = model_config.multimodal_config
    if (
        multimodal is not None
        and multimodal.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        return (
            "with --mm-processor-cache-gb 0 and without prefix caching vLLM names items by a "
            "counter instead of their content. Leave --mm-processor-cache-gb at its default, or "
            "give --enable-prefix-caching"
        )
    return None


# -- what is configured ----------------------------------------------------------------------------


def _settings_of(vllm_config: VllmConfig) -> str:
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
    parts = (
        model.model,
        str(model.revision or "main"),
        str(model.dtype).removeprefix("torch."),
        str(model.quantization or "none"),
        hashlib.sha256(described.encode()).hexdigest()[:16],
    )
    return "|".join(parts)


def _said(name: str, value: Any) -> Any:
    if name == "mm_processor_kwargs":
        return _without_device(value)
    if name in ("mm_encoder_fp8_scale_path", "hf_config_path") and value:
        return _content_of(Path(value)) or value
    return value


def _without_device(kwargs: Any) -> Any:
    """Processor settings without `device`, at any depth: it changes no embedding."""
    if not isinstance(kwargs, Mapping):
        return kwargs
    said = {name: _without_device(value) for name, value in kwargs.items() if name != "device"}
    return {name: value for name, value in said.items() if value not in (None, {})}


def _shown(value: Any) -> str:
    return str(getattr(value, "name", None) or repr(value))


# -- weights ---------------------------------------------------------------------------------------


def _version(version: str) -> str:
    readable = _READABLE.fullmatch(version)
    return f"version-{version if readable else hashlib.sha256(version.encode()).hexdigest()[:32]}"


def _weights_of(vllm_config: VllmConfig) -> str:
    """The hub's commit or a digest of the files; private where neither can be had."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy-{model.seed}-{vllm_config.parallel_config.tensor_parallel_size}"
    if getattr(model, "model_weights", None):  # a bucket, of which vLLM has only the rest here
        return _private()
    source = Path(model.model)
    if not source.exists():
        commit = getattr(model.hf_config, "_commit_hash", None) or model.revision or ""
        return f"commit-{commit}" if _COMMIT.fullmatch(commit) else _private()
    snapshot = _SNAPSHOT.search(str(source.resolve()))
    return f"commit-{snapshot[1]}" if snapshot else _files_of(source)


def _private() -> str:
    return f"{PRIVATE}{secrets.token_hex(8)}"


def _files_of(source: Path) -> str:
    """A digest of weight files' names, sizes and times, and of the content of code and settings."""
    described, newest_s = [], 0.0
    for path in sorted(_files(source)):
        try:
            stat = path.stat()
        except OSError:
            continue  # a link that leads nowhere: vLLM cannot load it either
        code = _content_of(path) if path.suffix in CODE_SUFFIXES else None
        name = path.name if path == source else str(path.relative_to(source))
        described.append((name, stat.st_size, code or stat.st_mtime_ns))
        newest_s = max(newest_s, stat.st_mtime, stat.st_ctime)
    if newest_s > _started_s():  # perhaps after they were read
        return _private()
    return f"files-{hashlib.sha256(repr(described).encode()).hexdigest()[:32]}"


def _files(source: Path) -> Iterator[Path]:
    """The files of a model: the source itself, or those in it and in the directories below it."""
    if source.is_file():
        yield source
        return
    for pattern in ("*", "*/*"):
        for path in source.glob(pattern):
            if path.suffix in WEIGHT_SUFFIXES | CODE_SUFFIXES and path.is_file():
                yield path


def _content_of(path: Path) -> str | None:
    """The digest of a small file; None for a large or an unreadable one."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_CODE_BYTES:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _started_s() -> float:
    """The time when this process began; no weights were read before (proc(5))."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
