"""What an engine's weights are called, by where vLLM has them from; and its code, by its source."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ecd_client.vllm.base.identity.code_name import PLACES, digest_of_kinds, modules_of, source_of
from ecd_client.vllm.base.identity.digest import Unnamed
from ecd_client.vllm.base.identity.identity import Identity, _started_s
from ecd_client.vllm.base.identity.sources import Sources, weights_of

NEVER = float("inf")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_model(directory: Path, **settings: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "model.safetensors").write_bytes(bytes(64))
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", hidden_size=64)


def engine(model: Path | str, load: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The part of vLLM's configuration that says where things come from."""
    config: dict[str, Any] = {}
    for directory in (model, fields.get("hf_config_path")):
        if directory and Path(directory).is_dir():
            config = json.loads((Path(directory) / "config.json").read_text())
    config |= fields.pop("config", {})
    unset = dict.fromkeys(("revision", "tokenizer_revision", "code_revision", "hf_config_path"))
    model_config = unset | {
        "model": str(model),
        "tokenizer": str(model),
        "model_weights": "",
        "seed": 0,
        "hf_overrides": {},
        "trust_remote_code": False,
        "hf_config": SimpleNamespace(to_dict=lambda: config, _commit_hash=None),
        **fields,
    }
    said: dict[str, Any] = {"load_format": "auto", "model_loader_extra_config": {}}
    said |= {"download_dir": None, "ignore_patterns": ["original/**/*"]}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model_config),
        load_config=SimpleNamespace(**said | (load or {})),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def name_of(*arguments: Any, **fields: Any) -> str:
    return weights_of(engine(*arguments, **fields), NEVER)


@pytest.mark.parametrize(
    "load_format", ["ipc_cache", "modelexpress", "tensorizer", "gguf", "a plugin's"]
)
def test_weights_that_come_from_elsewhere_have_no_name(load_format: str, model: Path) -> None:
    with pytest.raises(Unnamed, match="load-format"):
        name_of(model, {"load_format": load_format})


def test_weights_of_no_known_place_have_no_name(model: Path) -> None:
    pattern = {"pattern": "/mnt/others/rank-{rank}.safetensors"}
    for load, fields in (
        ({"load_format": "sharded_state", "model_loader_extra_config": pattern}, {}),
        ({"load_format": "runai_streamer"}, {"model_weights": "s3://bucket/model"}),
        ({}, {"hf_overrides": lambda config: config}),
    ):
        with pytest.raises(Unnamed):
            name_of(model, load, **fields)


def test_all_that_is_read_beside_the_weights_is_in_their_name(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (tmp_path / "code").mkdir()
    beside: list[dict[str, Any]] = [
        {"hf_config_path": str(other)},
        {"tokenizer": str(other)},
        {"config": {"audio_model_id": str(other)}},
    ]
    names = [name_of(model), *(name_of(model, **fields) for fields in beside)]
    write_model(other, hidden_size=65)
    names += [name_of(model, **fields) for fields in beside]
    assert len(set(names)) == 2 * len(beside) + 1
    moved = shutil.copytree(other, tmp_path / "moved")
    assert name_of(model, tokenizer=str(moved)) == name_of(model, tokenizer=str(other))


def test_the_checkpoint_that_vllm_ignores_is_no_part_of_a_name(model: Path) -> None:
    """Other patterns keep vLLM from downloading files, not from loading what is there."""
    other = {"ignore_patterns": ["model.safetensors", "below"]}
    names = [name_of(model), name_of(model, other)]
    write_model(model / "original")
    assert name_of(model) == names[0]
    assert name_of(model, other) != names[1]
    write_model(model / "below" / "original")
    assert name_of(model) != names[0]


def test_weights_from_a_seed_are_those_of_one_configuration(model: Path) -> None:
    dummy = {"load_format": "dummy"}
    names = {name_of(model, dummy), name_of(model, dummy, seed=1), name_of(model)}
    write_model(model, hidden_size=65)
    assert len({*names, name_of(model, dummy)}) == 4


def test_code_of_another_repository_is_the_codes_that_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a name where it lies in the hub's cache, and none without."""
    auto_map = {"AutoModel": "some/code--modeling.Model", "AutoTokenizer": ["tok.Tok", None]}
    write_model(model, auto_map=auto_map)
    constants = SimpleNamespace(HF_HUB_CACHE=str(tmp_path / "hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)  # it is vLLM's
    assert name_of(model).startswith("files-")
    with pytest.raises(Unnamed, match="some/code is neither"):
        name_of(model, trust_remote_code=True)
    home = tmp_path / "hub" / "models--some--code"
    names = set()
    for source in ("MEAN = 0", "MEAN = 1"):
        (home / "snapshots" / COMMIT).mkdir(parents=True, exist_ok=True)
        (home / "snapshots" / COMMIT / "modeling.py").write_text(source)
        names.add(name_of(model, trust_remote_code=True, code_revision=COMMIT))
    assert len(names) == 2


def test_a_repository_is_what_lies_in_its_caches(tmp_path: Path) -> None:
    hub, weights = tmp_path / "hub", tmp_path / "weights"
    for cache in (hub, weights):
        home = cache / "models--some--model"
        write_model(home / "snapshots" / COMMIT, cache=cache.name)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(COMMIT)

    def name(revision: str | None = None, weights_cache: Path | None = None) -> str:
        told = str(weights_cache) if weights_cache else None
        return Sources(NEVER, told, hub).name_of("some/model", revision)[0]

    assert name() == name("main") == name(COMMIT)
    assert name() in name(weights_cache=weights)
    assert name() != name(weights_cache=weights)
    for revision, cache in (("another", hub), (COMMIT[::-1], hub), (None, tmp_path)):
        with pytest.raises(Unnamed):
            name(revision, cache)


def test_a_branch_that_moved_while_the_engine_started_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    home = hub / "models--some--model"
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    (home / "snapshots" / COMMIT).mkdir(parents=True)
    blob = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # of nothing, as git calls it
    (home / "blobs" / blob).touch()
    (home / "snapshots" / COMMIT / "config.json").symlink_to(f"../../blobs/{blob}")
    constants = SimpleNamespace(HF_HUB_CACHE=str(hub))
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    config = engine("some/model")
    config.model_config.hf_config._commit_hash = COMMIT
    assert weights_of(config, NEVER).startswith(f"commit-{COMMIT}-")
    config.model_config.hf_config._commit_hash = COMMIT[::-1]
    with pytest.raises(Unnamed, match="moved"):
        weights_of(config, NEVER)
    (home / "snapshots" / COMMIT / "config.json").unlink()
    write_model(home / "snapshots" / COMMIT)  # no links, as in a copy that follows them
    with pytest.raises(Unnamed, match="moved"):
        weights_of(config, NEVER)
    config.model_config.hf_config._commit_hash = COMMIT
    assert weights_of(config, NEVER).startswith("files-")


# -- versions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/two\nlines", "/\x1b[31mred", "/no\xa0break", "/" + "x" * 2000])
def test_a_namespace_is_a_line_whatever_the_models_path(path: str) -> None:
    namespace = Identity(path, "files-1").namespace
    assert len(namespace) == 64
    assert namespace.isalnum()
    assert namespace != Identity(path, "files-2").namespace


def test_a_version_is_a_name_within_its_run() -> None:
    said = Identity("settings", "files-1")
    names = [
        said.with_version(version, run).namespace
        for run in ("A", "B", "A|version-1", "ä")
        for version in ("1", "2", "1|run-A")
    ]
    assert len(set(names)) == 12
    assert names[0] == "settings|run-A|version-1"
    started = [
        Identity.of(None, "chosen", "1", **more).namespace  # type: ignore[arg-type]
        for more in ({}, {"weights_run": "A"}, {"code_version": "7"})
    ]
    assert started == ["chosen|version-1", "chosen|run-A|version-1", "chosen|7|version-1"]


def test_an_engine_began_before_its_test() -> None:
    assert _started_s() < os.stat("/proc/self").st_ctime


# -- code ------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package whose model takes its tower from another module."""
    root = tmp_path / "mended"
    root.mkdir()
    (root / "__init__.py").write_text("import json")
    (root / "tower.py").write_text("class Tower: pass")
    (root / "model.py").write_text("from mended.tower import Tower\nfrom mended import unused")
    (root / "unused.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "mended"]:
        del sys.modules[name]


def test_a_mended_tower_is_other_code(package: Path) -> None:
    importlib.import_module("mended.model")

    def code() -> dict[str, str]:
        modules = modules_of({"mended.model", "json"}, ())
        return {name: source_of(module) for name, module in modules.items()}

    before = code()
    assert set(before) == {"mended.model", "mended.tower", "mended.unused"}
    (package / "tower.py").write_text("class Tower: size = 2")
    changed = {name for name, source in code().items() if source != before[name]}
    assert changed == {"mended.tower"}
    (package / "tower.py").unlink()
    with pytest.raises(Unnamed, match=r"mended\.tower"):
        code()


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with vLLM's places, whose model takes its processor from another of them."""
    root = tmp_path / "vllm"
    for file, source in {
        "model_executor/models/some.py": "from vllm.transformers_utils.processors.some import P\n"
        "from vllm.multimodal.parse import parse\nclass Model: pass",
        "transformers_utils/processors/some.py": "class P: MEAN = 0.5",
        "multimodal/parse.py": "def parse(): pass",
    }.items():
        (root / file).parent.mkdir(parents=True)
        (root / file).write_text(source)
    for directory in (root, *root.rglob("*/")):
        if directory.is_dir():
            (directory / "__init__.py").touch()

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "vllm"]

    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield root
    for name in loaded():
        del sys.modules[name]


def test_a_processor_of_vllm_is_code_of_its_model(
    vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = importlib.import_module("vllm.model_executor.models.some").Model
    assert set(modules_of({model.__module__}, PLACES)) == {
        "vllm.model_executor.models.some",
        "vllm.transformers_utils.processors.some",
        "vllm.multimodal.parse",
    }
    names = {digest_of_kinds([model])}
    for file in ("transformers_utils/processors/some.py", "multimodal/parse.py"):
        (vllm / file).write_text("MEAN = 0")
        names.add(digest_of_kinds([model]))
    for library in ("torchvision", "Pillow"):
        versions = {library: "99"}
        monkeypatch.setattr("importlib.metadata.version", lambda name, v=versions: v.get(name, "1"))
        names.add(digest_of_kinds([model]))
    assert len(names) == 5


def test_a_package_beside_vllm_has_its_version_in_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as vLLM-Omni's: it makes parts of a model late, which its class names nowhere."""
    (tmp_path / "beside.py").write_text("class Model: ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("beside").Model
    names = set()
    for version in "12":
        monkeypatch.setattr(
            "importlib.metadata.version", lambda name, v=version: v if name == "beside" else "1"
        )
        names.add(digest_of_kinds([model]))
    monkeypatch.delitem(sys.modules, "beside")
    assert len(names) == 2
