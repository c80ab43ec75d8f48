"""What a start of vLLM imports late, imported: for the Python that is forked for engines."""

import contextlib

import mistral_common.tokens.tokenizers.mistral  # noqa: F401
import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors  # noqa: F401
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

with contextlib.suppress(ImportError):  # of models that need what is not installed
    list(VIDEO_PROCESSOR_MAPPING.items())
