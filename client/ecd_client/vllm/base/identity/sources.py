"""Where an engine's weights and settings come from, and the name of what lies there.

`Unnamed` says that a source cannot be named: then the engine shares with no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecd_client.vllm.base.identity.digest import Unnamed, commit_of, digest_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FROM_THE_MODEL = frozenset(
    (
        *("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors"),
        *("instanttensor", "runai_streamer", "runai_streamer_sharded", "sharded_state"),
    )
)
"""Load formats that read the files of the model, wherever it lies.

All but these and FROM_A_SEED, those of plugins among them, may have weights from elsewhere.
tests/e2e/test_identity.py fails if vLLM has a format that nobody has looked at.
"""
FROM_A_SEED = "dummy"
NOT_LOADED = "original/**/*"
"""What vLLM's `ignore_patterns` are by default: it neither downloads nor reads such files."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_SETTINGS_BYTES = 16 << 20


def weights_of(vllm_config: VllmConfig, since_s: float) -> str:
    """Name the weights, and all else that the engine read beside them since `since_s`.

    Raises Unnamed.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in FROM_THE_MODEL | {FROM_A_SEED}:
        raise Unnamed(f"--load-format {load.load_format} has them from elsewhere")
    if getattr(model, "model_weights", None):
        raise Unnamed("they come from a bucket")
    extra = load.model_loader_extra_config
    if any("/" in value for value in (extra or {}).values() if isinstance(value, str)):
        raise Unnamed("--model-loader-extra-config says where they are")
    if callable(model.hf_overrides):
        raise Unnamed("hf_overrides is a function")

    without = frozenset(("original",) if NOT_LOADED in load.ignore_patterns else ())
    sources = Sources(since_s, load.download_dir, without=without)
    weights, directory = sources.name_of(model.model, model.revision)
    committed = getattr(model.hf_config, "_commit_hash", None)
    is_of_hub, is_of_model = not Path(model.model).exists(), not model.hf_config_path
    if is_of_hub and is_of_model and committed and committed != directory.name:
        raise Unnamed(f"the revision of {model.model} has moved")
    if load.load_format == FROM_A_SEED:
        ranks = vllm_config.parallel_config.tensor_parallel_size
        weights = f"dummy-{model.seed}-{ranks}-{weights}"

    others = {
        f"config.{name}": (value, None)
        for name, value in model.hf_config.to_dict().items()
        if name.endswith("_model_id") and isinstance(value, str) and value
    }
    """Further weights, as those of Ultravox."""
    if model.hf_config_path:
        others["hf_config_path"] = model.hf_config_path, model.revision
    if model.tokenizer and model.tokenizer != model.model:
        others["tokenizer"] = model.tokenizer, model.tokenizer_revision
    if model.trust_remote_code:
        if is_of_hub and model.code_revision not in (None, model.revision):
            others["code"] = model.model, model.code_revision
        for repository in _repositories_of_code(directory):
            others[f"code of {repository}"] = repository, model.code_revision
    if others:
        named = {name: sources.name_of(*source)[0] for name, source in sorted(others.items())}
        described = json.dumps(named, sort_keys=True)
        weights += f"+{hashlib.sha256(described.encode()).hexdigest()[:16]}"
    return weights


class Sources:
    """Finds what a name of the hub or a path means on this node, and names its content."""

    def __init__(
        self,
        since_s: float,
        weights_cache: str | None = None,
        hub_cache: Path | None = None,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """`weights_cache` is vLLM's `--download-dir`; `hub_cache` is the hub's library's.

        Directories of the names `without` do not count.
        """
        self._since_s, self._without = since_s, without
        self._weights_cache, self._hub_cache = weights_cache, hub_cache

    def name_of(self, source: str, revision: str | None) -> tuple[str, Path]:
        """The name of a directory, file or repository of the hub, and where it is on this node.

        Raises Unnamed.
        """
        path = Path(source)
        if path.exists():
            return self._named(path), path
        snapshots = self._snapshots(source, revision)
        return "+".join(dict.fromkeys(map(self._named, snapshots))), snapshots[-1]

    def _named(self, path: Path) -> str:
        commit = commit_of(path, self._without)
        digest = digest_of(path, self._since_s, self._without, is_snapshot=commit is not None)
        if digest.changed:
            raise Unnamed(f"{path} has changed since the engine began to start")
        return f"commit-{commit}-{digest.hex}" if commit else f"files-{digest.hex}"

    def _snapshots(self, repository: str, revision: str | None) -> list[Path]:
        """The repository's files in the cache of weights, and in the one of all else."""
        if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
            raise Unnamed(f"{repository} is ModelScope's")
        hub_cache = self._hub_cache or Path(import_module("huggingface_hub.constants").HF_HUB_CACHE)
        weights_cache = Path(self._weights_cache or hub_cache)
        weights = _snapshot(weights_cache, repository, revision)
        if weights is None:
            raise Unnamed(f"{repository} is neither a path nor in {weights_cache}")
        others = _snapshot(hub_cache, repository, revision)
        return [weights] if others in (None, weights) else [weights, others]


def _snapshot(cache: Path, repository: str, revision: str | None) -> Path | None:
    home = cache / f"models--{repository.replace('/', '--')}"
    commit = str(getattr(revision, "resolved", revision) or "main")
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (home / "refs" / commit).read_text().strip()
        except (OSError, ValueError):
            return None
    snapshot = home / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def _repositories_of_code(directory: Path) -> set[str]:
    """The repositories beside the model's own that its settings have code from (`auto_map`)."""
    found: set[str] = set()

    def look_in(value: Any) -> None:
        if isinstance(value, str):
            repository, is_another, _ = value.partition("--")
            found.update([repository] if is_another else [])
        elif isinstance(value, (list, tuple)):
            for each in value:
                look_in(each)

    for file in sorted(directory.glob("*.json")):
        try:
            if file.stat().st_size > _MAX_SETTINGS_BYTES:
                continue
            settings = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # neither can transformers read it
        names = settings.get("auto_map") if isinstance(settings, dict) else None
        for value in names.values() if isinstance(names, dict) else ():
            look_in(value)
    return found
