"""What differs between vLLM 0.28 and 0.33: the only file that asks."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.logger import init_logger

try:  # since 0.32
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorPromMetrics,
        ECConnectorStats,
    )
except ImportError:  # nothing asks for stats then
    ECConnectorStats = ECConnectorPromMetrics = object

try:  # since 0.32
    from vllm.distributed.ec_transfer.ec_connector.utils import (
        PlaceholderMetadataResolver,
        collect_ec_item_metadata,
    )
except ImportError:
    PlaceholderMetadataResolver = collect_ec_item_metadata = None

__all__ = [
    "CAN_FAIL_ONE_REQUEST",
    "ECConnectorPromMetrics",
    "ECConnectorStats",
    "PlaceholderMetadata",
]

logger = init_logger(__name__)

CAN_FAIL_ONE_REQUEST = hasattr(ECConnectorBase, "take_unavailable_requests")
"""Whether the scheduler asks which requests the connector cannot serve."""


class PlaceholderMetadata:
    """What a consumer needs of each item in order to skip its preprocessing.

    In the form that vLLM's own connectors of the same version return from `request_finished`.
    """

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._resolver: Any = None
        self._fields: dict[str, set[str]] = {}

    def of(self, mm_features: list[Any]) -> dict[str, Any] | None:
        if not mm_features:
            return None
        if collect_ec_item_metadata is not None:
            if self._resolver is None:
                self._resolver = PlaceholderMetadataResolver(self._model_config)
            items: dict[str, Any] = collect_ec_item_metadata(mm_features, self._resolver)
            return items
        return {"ec_items": [self._item(feature) for feature in mm_features]}

    def _item(self, feature: Any) -> dict[str, Any]:
        item = {"mm_hash": feature.identifier}
        if feature.data is not None:  # None: it came out of the processor's own cache
            wanted = self._wanted(feature.modality)
            for name, value in feature.data.get_data().items():
                if name in wanted and isinstance(value, torch.Tensor):
                    item[name] = value.tolist()
        return item

    def _wanted(self, modality: str) -> set[str]:
        if modality not in self._fields:
            self._fields[modality] = set()
            try:
                from vllm.multimodal import MULTIMODAL_REGISTRY

                info = MULTIMODAL_REGISTRY.create_processor(self._model_config).info
                self._fields[modality] = info.data_parser.placeholder_metadata_fields(modality)
            except Exception:  # the model's own code: its consumers preprocess for themselves
                logger.warning("no placeholder metadata for %s", modality, exc_info=True)
        return self._fields[modality]
