"""The class that vLLM loads: forwards to the role it was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from ecd_client.vllm.scheduler import SchedulerRole
from ecd_client.vllm.settings import Settings
from ecd_client.vllm.stats import EcdPromMetrics, EcdStats
from ecd_client.vllm.transfer import EcdMetadata, EcdWorkerMetadata
from ecd_client.vllm.worker import WorkerRole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request


class EcdConnector(ECConnectorBase):
    """Shares encoder outputs with every engine of this node through the ecd daemon.

    `"ec_connector": "EcdConnector", "ec_connector_module_path": "ecd_client.vllm"`, and any
    `ec_role`. In `ec_connector_extra_config`, all optional: `ecd_address`, `ecd_namespace`,
    `ecd_load_timeout_s`, `ecd_on_unavailable`.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        settings = Settings.of(vllm_config)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = SchedulerRole(
                settings,
                vllm_config.model_config,
                is_producer=self.is_producer,
                is_consumer=self.is_consumer,
                workers=vllm_config.parallel_config.tensor_parallel_size,
            )
        else:
            self._worker = WorkerRole(settings)

    def shutdown(self) -> None:
        for part in (self._scheduler, self._worker):
            if part is not None:
                part.close()

    # -- worker --------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step()

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EcdMetadata)
        self._worker.load(metadata.loads, encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        assert self._worker is not None
        if self.is_producer:
            self._worker.save(mm_hash, encoder_cache[mm_hash])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        return None, self._worker.take_loaded() or None

    def build_connector_worker_meta(self) -> EcdWorkerMetadata | None:
        assert self._worker is not None
        stats = self._worker.take_stats()
        return None if stats.is_empty() else EcdWorkerMetadata(stats)

    # -- scheduler -----------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        assert self._scheduler is not None
        return self._scheduler.ensure(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        assert self._scheduler is not None
        return self._scheduler.promise(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        assert self._scheduler is not None
        return EcdMetadata(self._scheduler.take_loads())

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        assert self._scheduler is not None
        self._scheduler.loaded(connector_output.finished_recving or ())
        worker_meta = connector_output.ec_connector_worker_meta
        if isinstance(worker_meta, EcdWorkerMetadata):
            self._scheduler.stats.aggregate(worker_meta.stats)

    def take_unavailable_requests(self) -> set[str]:
        assert self._scheduler is not None
        return self._scheduler.take_unavailable()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)

    # -- stats ---------------------------------------------------------------------------------

    def get_ec_connector_stats(self) -> EcdStats | None:
        if self._scheduler is None or self._scheduler.stats.is_empty():
            return None  # the worker's counts travel with its metadata
        return self._scheduler.stats.take()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EcdStats:
        return EcdStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> EcdPromMetrics:
        return EcdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
