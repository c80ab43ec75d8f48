"""Loads on their way to the workers: each keeps its item's lease until every rank has done it."""

from __future__ import annotations

import threading

from vllm.envs import VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
from vllm.logger import init_logger

from ecd_client import clock
from ecd_client.vllm.base.reports import Reports
from ecd_client.vllm.base.transfer import Load
from ecd_client.vllm.scheduler.wanted import Loading, WantedItem, WantedItems

logger = init_logger(f"vllm.{__name__}")

MAX_LOAD_S = VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS + 60.0
"""After this, a load that no worker reported is lost: a step that takes longer ends the engine."""
UNSURE_S = 30.0
"""After so long without a report of the oldest load, no more are begun."""
LOOK_S = 0.5
"""Between two looks at loads that are on their way while the engine takes no step."""


class Loads:
    """The loads that were told to the workers and are not over, the oldest first.

    A thread looks after them where no step does. `lock` is held by whoever uses an object of this
    class or one of `items`.
    """

    def __init__(self, items: WantedItems, reports: Reports, lock: threading.RLock) -> None:
        self._items, self._reports, self._lock = items, reports, lock
        self._loading: dict[int, Loading] = {}
        self._new: list[Load] = []
        self._last = 0
        self._has_warned = False
        self._begun, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._look_on, name="ecd-loads", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._begun.set()

    def __len__(self) -> int:
        return len(self._loading)

    @property
    def are_reported(self) -> bool:
        """Whether workers report their finished loads, as far as this engine can tell."""
        return not self._loading or self._oldest_s() < UNSURE_S

    def begin(self, wanted: WantedItem) -> None:
        """Have the workers load a leased item in the step that is being scheduled."""
        self._last += 1
        assert wanted.item is not None
        item = wanted.item
        load = Load(self._last, wanted.identifier, item.handle(), item.cost_s, item.metadata)
        self._new.append(load)
        loading = Loading(wanted, clock.now_s())
        wanted.add(loading, load.handle.shape[0])
        self._loading[load.id] = loading
        if not self._begun.is_set():
            self._begun.set()

    def take_new(self) -> list[Load]:
        """The loads begun since the last call."""
        loads, self._new = self._new, []
        return loads

    def look(self) -> None:
        """End the loads that are done, and those that are lost."""
        for load in [load for load in self._loading if self._reports.are_done(load)]:
            self._end(load)
        while self._loading and self._oldest_s() >= MAX_LOAD_S:
            self._end(next(iter(self._loading)))
        if self._loading and not self._has_warned and self._oldest_s() >= UNSURE_S:
            self._has_warned = True
            logger.warning(
                "ecd: no worker has reported a load for %.0f s: the engine encodes for itself "
                "until one does. If no step takes that long here, ecd cannot serve this layout of "
                "workers: start the engine without the connector, and report it",
                UNSURE_S,
            )

    def _look_on(self) -> None:
        while self._begun.wait() and not self._closed.wait(LOOK_S):
            with self._lock:
                self.look()
                if not self._loading:
                    self._begun.clear()

    def _oldest_s(self) -> float:
        return clock.now_s() - next(iter(self._loading.values())).since_s

    def _end(self, load: int) -> None:
        loading = self._loading.pop(load)
        self._items.leave(loading.wanted, loading)
