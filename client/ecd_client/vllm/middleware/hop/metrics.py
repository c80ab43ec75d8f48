"""Metrics of the encode hop, which the API server's /metrics shows."""

from __future__ import annotations

import contextlib
from functools import cache

from prometheus_client import Counter, Gauge

OUTCOMES = "encoded", "refused", "failed", "cancelled"
"""How a call ends."""


class HopMetrics:
    """Counters and a gauge."""

    def __init__(self) -> None:
        self._media = Counter(
            "vllm:ecd_hop_pictures",
            "Media that ecd had not: promised by an encoder, joined (another request's call was "
            "waited for), given_up, late, or full (no place in time).",
            ["outcome"],
        )
        self.calls = Counter(
            "vllm:ecd_encoder_calls",
            "Calls of encoders: encoded, refused, failed or cancelled.",
            ["encoder", "outcome"],
        )
        self.active = Gauge(
            "vllm:ecd_encoder_active_tokens",
            "Estimated tokens of the media that an encoder has been sent and not answered for.",
            ["encoder"],
            multiprocess_mode="livesum",
        )

    def forget(self, encoder: str) -> None:
        """Remove an encoder's series: those that come and go would add up."""
        with contextlib.suppress(KeyError):
            self.active.remove(encoder)
        for outcome in OUTCOMES:
            with contextlib.suppress(KeyError):
                self.calls.remove(encoder, outcome)

    def count(self, outcome: str) -> None:
        self._media.labels(outcome).inc()


metrics = cache(HopMetrics)
"""The metrics of this process, which can be registered once."""
