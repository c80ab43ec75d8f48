"""Counters of one engine, in the form that vLLM's metrics need."""

from __future__ import annotations

from typing import Any

from ecd_client.vllm.base.compat import ECConnectorPromMetrics, ECConnectorStats

COUNTERS = {
    "hits": "Items that ecd had when the engine needed them.",
    "misses": "Items that ecd did not have when the engine needed them.",
    "awaited": "Items that another engine encoded meanwhile, and that were waited for.",
    "awaited_in_vain": "Items waited for that no other engine stored in time.",
    "mismatches": "Items whose number of embeddings, width or dtype was not what is expected.",
    "failures": "Lookups that ended with an error or too late.",
    "unavailable": "Requests failed because their embeddings could not be had.",
    "loads": "Items loaded into the engine's encoder cache.",
    "loaded_bytes": "Bytes of these.",
    "device_loads": "Of the loads, those from a copy in the GPU's device pool.",
    "reloads": "Loads whose lease had run out and that had to get the item again.",
    "pin_failures": "Pools that CUDA refused to pin: copies of them take three times as long.",
    "copy_failures": "Workers that leave copies to torch, as one failed on their GPU.",
    "pinned_bytes": "Bytes of pools pinned for GPU copies, again after a restart of the daemon.",
    "pin_ms": "Milliseconds that this took, in the background.",
    "saves": "Items stored in ecd.",
    "saved_bytes": "Bytes of these.",
    "duplicates": "Items encoded here that ecd had already.",
    "dropped_hints": "Requests with more hints than are looked at.",
    "dropped_saves": "Items not stored: too many on the way, or ecd full or away.",
}


class EcdStats(ECConnectorStats):
    """Counts since the last report."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, int] = dict(data or {})

    def count(self, name: str, by: int = 1) -> None:
        assert name in COUNTERS, name
        self.data[name] = self.data.get(name, 0) + by

    def take(self) -> EcdStats:
        """Return the counts, and begin again at zero."""
        taken = EcdStats(self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: EcdStats) -> EcdStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"ecd_{name}": value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class EcdPromMetrics(ECConnectorPromMetrics):
    """One Prometheus counter for each of COUNTERS, labelled as vLLM's own are."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: self._counter_cls(
                name=f"vllm:ecd_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in COUNTERS.items()
        }
        self._counters = {
            engine: {name: counter.labels(*labels) for name, counter in counters.items()}
            for engine, labels in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        counters = self._counters[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in counters:
                counters[name].inc(value)
