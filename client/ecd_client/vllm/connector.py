"""The class that vLLM loads: forwards to the role it was made for."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from ecd_client.vllm.compat import TELLS_WHAT_TO_SAVE
from ecd_client.vllm.scheduler import SchedulerRole
from ecd_client.vllm.settings import Settings
from ecd_client.vllm.stats import EcdPromMetrics, EcdStats, SharedCounts
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
    `ec_role`. In `ec_connector_extra_config`, all optional: the keys of `settings.KEYS`.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        settings = Settings.of(vllm_config)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._only_encodes = self.is_producer and not self.is_consumer
        self._counts: SharedCounts | None = None
        self._encoder_cache: dict[str, torch.Tensor] | None = None
        if role is ECConnectorRole.SCHEDULER:
            from ecd_client.vllm.weights import watch  # which only an engine core can import

            watch(EcdConnector)
            self._scheduler = SchedulerRole(
                settings,
                vllm_config,
                is_producer=self.is_producer,
                is_consumer=self.is_consumer,
                workers=vllm_config.parallel_config.tensor_parallel_size,
            )
            if self._only_encodes:
                self._counts = SharedCounts()
        else:
            self._worker = WorkerRole(settings)

    def shutdown(self) -> None:
        for part in (self._scheduler, self._worker, self._counts):
            if part is not None:
                part.close()

    # -- worker --------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            assert isinstance(connector_metadata, EcdMetadata)
            self._worker.begin_step(connector_metadata.namespace, connector_metadata.move)
            if self.is_producer and not TELLS_WHAT_TO_SAVE and self._encoder_cache is not None:
                self.start_save_caches(encoder_cache=self._encoder_cache)

    def start_save_caches(self, **kwargs: Any) -> None:
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EcdMetadata)
        self._worker.look_at(kwargs["encoder_cache"])
        self._worker.keep(metadata.keeps, kwargs["encoder_cache"])
        self._worker.save_again(metadata.saves, kwargs["encoder_cache"])

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EcdMetadata)
        self._encoder_cache = encoder_cache
        self._worker.load(metadata.loads, encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        assert self._worker is not None
        if self.is_producer:
            self._encoder_cache = encoder_cache
            self._worker.save(mm_hash, encoder_cache)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        if self._only_encodes:
            self._worker.wait_seen()
        return None, self._worker.take_loaded() or None

    def build_connector_worker_meta(self) -> EcdWorkerMetadata | None:
        assert self._worker is not None
        stats, forgotten = self._worker.take_stats(), self._worker.forgotten
        if self._only_encodes:
            self._count(stats)
            return None
        if stats.is_empty() and forgotten < 0:
            return None
        return EcdWorkerMetadata(stats, forgotten)

    def _count(self, stats: EcdStats) -> None:
        """Tell the scheduler in another way than vLLM's, which loses what this engine reports."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EcdMetadata)
        if stats.is_empty():
            return
        if self._counts is None and metadata.counts_path is not None:
            with contextlib.suppress(OSError, ValueError):  # the scheduler is on another machine
                self._counts = SharedCounts(metadata.counts_path)
        if self._counts is not None:
            self._counts.add(stats)

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
        counts_path = None if self._counts is None else self._counts.path
        loads = self._scheduler.take_loads()
        saves: list[str] = []
        keeps: list[str] = []
        # Without tokens the first model runner of a consumer looks at no metadata.
        if not self.is_consumer or scheduler_output.total_num_scheduled_tokens:
            saves, keeps = self._scheduler.take_saves()
        namespace, move = self._scheduler.namespace, self._scheduler.moves
        return EcdMetadata(namespace, move, loads, saves, keeps, counts_path)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        assert self._scheduler is not None
        self._scheduler.loaded(connector_output.finished_recving or ())
        worker_meta = connector_output.ec_connector_worker_meta
        if isinstance(worker_meta, EcdWorkerMetadata):
            self._scheduler.stats.aggregate(worker_meta.stats)
            self._scheduler.forgotten(worker_meta.forgotten)

    def take_unavailable_requests(self) -> set[str]:
        assert self._scheduler is not None
        return self._scheduler.take_unavailable()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)

    # -- weights (weights.py) ------------------------------------------------------------------

    def weights_changed(self, cause: str) -> None:
        assert self._scheduler is not None
        self._scheduler.weights_changed(cause)

    def weights_are(self, version: str) -> None:
        assert self._scheduler is not None
        self._scheduler.weights_are(version)

    # -- stats ---------------------------------------------------------------------------------

    def get_ec_connector_stats(self) -> EcdStats | None:
        if self._scheduler is None:
            return None  # the worker's counts travel with its metadata
        if self._counts is not None:
            self._scheduler.stats.aggregate(self._counts.take())
        if self._scheduler.stats.is_empty():
            return None
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
