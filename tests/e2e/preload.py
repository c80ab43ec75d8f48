"""For the Python that is forked for engines: does once what each start of vLLM does late.

Its forks share memory, which a look through all that is imported would copy.
"""

import contextlib
import functools
import gc
import os
from datetime import timedelta

import mistral_common.tokens.tokenizers.mistral  # noqa: F401
import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors  # noqa: F401
from torch.distributed import ProcessGroupGloo, Store
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING
from vllm.platforms import current_platform

with contextlib.suppress(ImportError):  # of models that need what is not installed
    list(VIDEO_PROCESSOR_MAPPING.items())

platform = type(current_platform)
if hasattr(platform, "register_triton_kernel_overrides"):  # which looks through all modules
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda _: None)

gc.unfreeze = lambda: None  # as an engine does at its shutdown, before it collects garbage

device = functools.cache(ProcessGroupGloo.create_default_device)
make_group = ProcessGroupGloo.__init__


def make_group_on_one_device(
    self: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta
) -> None:
    """A device has a thread that wakes a hundred times a second, and vLLM makes 13 groups."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return make_group(self, store, rank, size, timeout)
    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = [device()], timeout
    return make_group(self, store, rank, size, options)


ProcessGroupGloo.__init__ = make_group_on_one_device
