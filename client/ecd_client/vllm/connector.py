"""The class that vLLM loads; it forwards each hook to the role that it was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from ecd_client.vllm.base.settings import Settings
from ecd_client.vllm.base.stats import EcdPromMetrics, EcdStats
from ecd_client.vllm.base.transfer import EcdMetadata
from ecd_client.vllm.scheduler.scheduler import SchedulerRole
from ecd_client.vllm.worker.worker import WorkerRole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request


class EcdConnector(ECConnectorBase):
    """Shares encoder outputs with every engine of this node through the ecd daemon.

    `"ec_connector": "EcdConnector", "ec_connector_module_path": "ecd_client.vllm"`, and any
    `ec_role`. In `ec_connector_extra_config`, all optional: the keys of `settings.KEYS`.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._settings = settings = Settings.of(vllm_config)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        if role is ECConnectorRole.SCHEDULER:
            from ecd_client.vllm.base.engine_core import (
                watch,  # which only an engine core can import
            )

            watch(EcdConnector)
            self._scheduler = SchedulerRole(
                settings,
                vllm_config,
                is_producer=self.is_producer,
                is_consumer=self.is_consumer,
            )
        else:
            self._worker = WorkerRole(
                settings, is_producer=self.is_producer, is_consumer=self.is_consumer
            )

    def shutdown(self) -> None:
        for role in (self._scheduler, self._worker):
            if role is not None:
                role.close()

    # -- worker --------------------------------------------------------------------------------

    @property
    def _step(self) -> EcdMetadata:
        """The scheduler's message of the step that the worker is in."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EcdMetadata)
        return metadata

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(self._step)

    def start_save_caches(self, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.begin_saves(self._step, kwargs["encoder_cache"])

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.load(self._step.loads, encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        assert self._worker is not None
        self._worker.save(mm_hash, encoder_cache)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        self._worker.end_step()
        return None, None

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
        return self._scheduler.end_step(scheduler_output.total_num_scheduled_tokens)

    def take_unavailable_requests(self) -> set[str]:
        assert self._scheduler is not None
        return self._scheduler.take_unavailable()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)

    # -- told by the engine core (engine_core.py) ----------------------------------------------

    def name_items(self, request: EngineCoreRequest) -> bool:
        assert self._scheduler is not None
        return self._scheduler.name_items(request)

    def weights_changed(self, cause: str) -> None:
        assert self._scheduler is not None
        self._scheduler.weights_changed(cause)

    def weights_are(self, version: str) -> None:
        assert self._scheduler is not None
        self._scheduler.weights_are(version)

    def is_harmless(self, call: str) -> bool:
        return call in self._settings.harmless_calls

    def weights_sleep(self, are_kept: bool) -> None:
        assert self._scheduler is not None
        self._scheduler.weights_sleep(are_kept)

    def weights_wake(self) -> None:
        assert self._scheduler is not None
        self._scheduler.weights_wake()

    # -- stats ---------------------------------------------------------------------------------

    def get_ec_connector_stats(self) -> EcdStats | None:
        if self._scheduler is None:
            return None  # the scheduler has the workers' counts, too
        return self._scheduler.take_stats()

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
