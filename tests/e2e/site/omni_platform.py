"""A CPU as a platform of vLLM-Omni, which has none: a plugin, by the entry points beside it."""

from __future__ import annotations

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "omni_worker.Worker"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def synchronize(cls) -> None:
        pass

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False


def platform() -> str:
    return f"{__name__}.{CpuOmniPlatform.__name__}"
