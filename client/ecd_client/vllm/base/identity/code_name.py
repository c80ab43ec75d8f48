"""The name of the code that makes embeddings: a corrected tower or processor has another name."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from ecd_client.vllm.base.identity.digest import Unnamed, content_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PLACES = (
    *("vllm.model_executor.models", "vllm.transformers_utils.processors", "vllm.multimodal"),
    "transformers.models",
)
"""Where models and processors are. The packages' versions name the rest of the packages."""
RESIZING = "torchvision", "Pillow"
"""Packages that processors change pictures with."""
ADAPTERS = "vllm.model_executor.models.adapters"
"""Where a model that generates is made one that pools, which changes no embedding of media."""
VERSIONED = frozenset(("vllm", "transformers"))
IGNORED = sys.stdlib_module_names | {"numpy", "PIL", "pydantic", "torch", "torchvision"}
EQUAL_ON_CPUS = {
    # Qwen2.5-VL
    "vllm-0.28.0-transformers-5.24.0-be6b6c3ed2f3": "vllm-0.32.0-transformers-5.19.0-ed04a016ef2f",
    # Qwen2-Audio
    "vllm-0.28.0-transformers-5.24.0-ba3a7f681c36": "vllm-0.32.0-transformers-5.19.0-086009ab234a",
}
"""Names of code whose embeddings were found to be equal to the byte, each with the name for both.

They were compared on CPUs (docs/design-vllm.md), so this table does not apply to engines on GPUs.
tests/e2e/test_identity.py compares them again.
"""


def code_of(vllm_config: VllmConfig) -> str:
    """Name vLLM, transformers, and the source of the model and its processor. Raises Unnamed."""
    name = measured_name(vllm_config)
    is_on_cpu = str(vllm_config.device_config.device_type) == "cpu"
    return EQUAL_ON_CPUS.get(name, name) if is_on_cpu else name


def measured_name(vllm_config: VllmConfig) -> str:
    """The name of this code alone.

    The processor of transformers is not made for it, which would take seconds: the model's files
    choose its class, transformers and torchvision have its code.
    """
    from vllm.version import __version__ as version

    digest = digest_of_kinds(_kinds_of(vllm_config))
    return f"vllm-{version}-transformers-{_version_of('transformers')}-{digest}"


def digest_of_kinds(kinds: Iterable[type]) -> str:
    """Name the source of classes, and what it takes from others and from libraries."""
    bases = {base for kind in kinds for base in kind.__mro__}
    described = sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in bases)
    modules = modules_of({kind.__module__ for kind in bases}, PLACES)
    for name in sorted(modules):
        described += name, source_of(modules[name])
    described += map(_version_of, RESIZING)
    described += _versions_of_others(kind.__module__ for kind in bases)
    return hashlib.sha256(repr(described).encode()).hexdigest()[:12]


def _versions_of_others(modules: Iterable[str]) -> list[str]:
    """The versions of packages besides vLLM and transformers that these modules are in.

    Such a package may make classes late that these name nowhere, or change those of vLLM.
    """
    packages = {module.partition(".")[0] for module in modules} - VERSIONED - IGNORED
    return [
        f"{name} {version}" for name in sorted(packages) if (version := _version_of(name)) != "none"
    ]


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def model_class_of(vllm_config: VllmConfig) -> type:
    """The model's own class, also where it pools."""
    from vllm.model_executor.model_loader import get_model_cls

    bases: tuple[type, ...] = get_model_cls(vllm_config.model_config).__mro__
    return next(base for base in bases if base.__module__ != ADAPTERS)


def _kinds_of(vllm_config: VllmConfig) -> list[type]:
    """The classes of the model and of its processor."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model_config = vllm_config.model_config
    kinds = [model_class_of(vllm_config)]
    with contextlib.suppress(Exception):  # the model's own code: it has none
        processor = MULTIMODAL_REGISTRY.create_processor(model_config)
        kinds += map(type, (processor, processor.info))
    return kinds


def modules_of(names: Iterable[str], places: Iterable[str]) -> dict[str, ModuleType]:
    """The modules of these names, and those that they took something from, within `places`.

    A module of another package than vLLM and transformers may take from all of its package. What a
    package's `__init__` holds is left out: it changes as parts of the package are imported.
    """
    found: dict[str, ModuleType] = {}
    left = sorted(names)
    while left:
        name = left.pop()
        module = sys.modules.get(name)
        package = name.partition(".")[0]
        if name in found or package in IGNORED or module is None:
            continue
        found[name] = module
        if hasattr(module, "__path__"):
            continue
        own = () if package in VERSIONED else (package,)
        for value in list(vars(module).values()):
            other = value.__name__ if isinstance(value, ModuleType) else None
            other = other or getattr(value, "__module__", None)
            if isinstance(other, str) and _is_within(other, (*places, *own)):
                left.append(other)
    return found


def _is_within(module: str, places: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{place}.") for place in places)


def source_of(module: ModuleType) -> str:
    """The digest of a module's file. Raises Unnamed."""
    file = getattr(module, "__file__", None)
    if file and (content := content_of(file)):
        return content
    raise Unnamed(f"the source of {module.__name__}, which computes embeddings, cannot be read")
