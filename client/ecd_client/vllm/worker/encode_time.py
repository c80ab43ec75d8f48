"""The seconds that a step's encoder takes, split over its outputs by their rows.

vLLM's own figure (`encoder_forward_secs`, with `--enable-mm-processor-stats`) is kept by its model
runner, which no connector is shown, and waits for the GPU before and after each encode. So two
events on the stream of the step time the encoder on a GPU, and nothing waits for them: an output is
told what the last timed step of about as many rows took.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import torch

from ecd_client import clock

logger = logging.getLogger(__name__)

MAX_TIMED = 64
"""Steps whose events are not over yet; those of more steps are not timed."""


class EncodeTime:
    """Times the encoder of one worker; a step is in three parts: `begin`, its encoder, `cost_s`."""

    def __init__(
        self, device: Callable[[], torch.device], now_s: Callable[[], float] = clock.now_s
    ):
        """`device` is asked once a step that encodes has begun."""
        self._device, self._now_s = device, now_s
        self._rows = 0
        self._began_s = 0.0
        self._took_s: float | None = None  # this step's encoder, on a CPU
        self._began: torch.cuda.Event | None = None  # until the step's first output
        self._timed: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._row_s: dict[int, float] = {}  # seconds a row, by the logarithm of the step's rows

    def begin(self, rows: int) -> None:
        """Note a step whose encoder makes this many rows; the last call before it counts."""
        self._rows, self._began_s, self._took_s, self._began = rows, self._now_s(), None, None
        if rows and self._device().type == "cuda" and len(self._timed) < MAX_TIMED:
            self._began = _recorded()
        self._take_timed()

    def cost_s(self, rows: int) -> float:
        """The share of an output with so many rows, which follows the encoder; 0: unknown."""
        if self._rows and self._device().type == "cuda":
            began, self._began = self._began, None
            ended = None if began is None else _recorded()
            if began is not None and ended is not None:
                self._timed.append((self._rows, began, ended))
            return self.measured_s(self._rows, rows)
        if self._took_s is None:
            self._took_s = self._now_s() - self._began_s
        return self._took_s * min(1.0, rows / self._rows) if self._rows else 0.0

    def measured_s(self, step_rows: int, rows: int) -> float:
        """The share of `rows` in a step of `step_rows` on the GPU; 0 while none was timed."""
        return self._row_s.get(step_rows.bit_length(), 0.0) * rows

    def note(self, rows: int, seconds: float) -> None:
        """Record the time of a step on the GPU."""
        self._row_s[rows.bit_length()] = seconds / rows

    def _take_timed(self) -> None:
        try:
            while self._timed and self._timed[0][2].query():  # type: ignore[no-untyped-call]
                rows, began, ended = self._timed.popleft()
                self.note(rows, began.elapsed_time(ended) / 1e3)
        except RuntimeError as error:  # which the step will meet itself
            logger.debug("the encoder was not timed: %s", error)


def _recorded() -> torch.cuda.Event | None:
    """An event on the stream of the step; None where there is none to be had."""
    try:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
    except RuntimeError as error:
        logger.debug("the encoder is not timed: %s", error)
        return None
    return event
