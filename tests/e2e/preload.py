"""What a start of vLLM imports late, imported: for the Python that is forked for engines.

vLLM's processes look at their queues without a pause until one second after a message, for the next
one's sake. With several engines on two cores that takes what others need: here they pause.
"""

import contextlib
import functools
import time

import mistral_common.tokens.tokenizers.mistral  # noqa: F401
import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors  # noqa: F401
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING
from vllm.distributed.device_communicators import shm_broadcast

with contextlib.suppress(ImportError):  # of models that need what is not installed
    list(VIDEO_PROCESSOR_MAPPING.items())
shm_broadcast.sched_yield = functools.partial(time.sleep, 0.001)
