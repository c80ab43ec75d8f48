"""The worker of vLLM-Omni's autoregressive stages on a CPU: its model runner over vLLM's for CPUs.

It says in the log when media are encoded. Weights are the matrix's.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

from e2e.models import weights  # noqa: F401, as it fills models


class Runner(GPUARModelRunner, CPUModelRunner):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._postprocess_tensors()  # of the buffers that were made since

    def load_model(self, *arguments: Any, **named: Any) -> None:
        self.compilation_config.max_cudagraph_capture_size = 0  # it is asked, and CPUs set none
        super().load_model(*arguments, **named)
        self._postprocess_tensors()
        encode = self.model.embed_multimodal

        def saying(**items: Any) -> Any:
            print("media are encoded", flush=True)
            return encode(**items)

        self.model.embed_multimodal = saying


class Worker(OmniWorkerMixin, CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner = Runner(self.vllm_config, self.device)
