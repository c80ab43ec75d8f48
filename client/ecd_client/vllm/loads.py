"""Loads on their way to the workers: each keeps its item's lease until every rank reports it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from vllm.envs import VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS

from ecd_client.vllm.transfer import Load
from ecd_client.vllm.wanted import Loading, WantedItem, WantedItems

MAX_LOAD_S = VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS + 60.0
"""After this, a load that no worker reported is lost: a step that takes longer ends the engine."""


class Loads:
    """The loads that were told to the workers and are not over, the oldest first."""

    def __init__(self, items: WantedItems, ranks: int) -> None:
        self._items = items
        self._ranks = frozenset(range(ranks))
        self._loading: dict[int, Loading] = {}
        self._new: list[Load] = []
        self._last = 0

    def __len__(self) -> int:
        return len(self._loading)

    def begin(self, wanted: WantedItem) -> None:
        """Have the workers load a leased item in the step that is being scheduled."""
        self._last += 1
        assert wanted.item is not None
        item = wanted.item
        load = Load(self._last, wanted.identifier, item.handle(), item.cost_s, item.metadata)
        self._new.append(load)
        loading = Loading(wanted, set(self._ranks), time.monotonic())
        wanted.expected[loading] = load.handle.shape[0]
        self._loading[load.id] = loading

    def take_new(self) -> list[Load]:
        """The loads begun since the last call; lost ones end here."""
        while self._loading:
            oldest, loading = next(iter(self._loading.items()))
            if time.monotonic() - loading.since_s < MAX_LOAD_S:
                break
            self._end(oldest)
        loads, self._new = self._new, []
        return loads

    def reported(self, reports: Iterable[str]) -> None:
        """Note the workers' reports, each `<rank>/<load>`; the last rank's report ends a load."""
        for report in reports:
            rank, _, load = report.partition("/")
            loading = self._loading.get(int(load))
            if loading is not None:
                loading.missing_ranks.discard(int(rank))
                if not loading.missing_ranks:
                    self._end(int(load))

    def _end(self, load: int) -> None:
        loading = self._loading.pop(load)
        self._items.leave(loading.wanted, loading)
