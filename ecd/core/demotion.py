"""Demotion: which entries are written to disk before their eviction, and at which rate."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest

from ecd.core.disk_catalog import Catalog
from ecd.core.model.types import EntryInfo
from ecd.core.views import Views

BLOCK_BYTES = 4096
"""The disk tier keeps headers and entries in whole blocks."""
LOOKED_AT = 256
"""Entries looked at in one turn, the next to be evicted first."""
WRITTEN_AT_A_TIME = 16
"""Entries written before the next look."""
BURST_S = 5.0
"""How long the write budget is saved up."""


def rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class Budget:
    """A token bucket. One write may overdraw it, and the next ones wait for that."""

    def __init__(self, bytes_per_s: int, now_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._most = self._left = bytes_per_s * BURST_S
        self._at_s = now_s

    def wait_s(self, was_read: bool, now_s: float) -> float:
        """Seconds until the next write. A write of unread entries leaves half of the savings."""
        self._left = min(self._most, self._left + (now_s - self._at_s) * self.bytes_per_s)
        self._at_s = now_s
        return max(0.0, (0.0 if was_read else self._most / 2) - self._left) / self.bytes_per_s

    def take(self, nbytes: int) -> None:
        self._left -= nbytes


def next_demotions(
    views: Views, catalog: Catalog, read_time_s: Callable[[int], float]
) -> list[EntryInfo]:
    """The entries to be written next, those that save most seconds for their bytes first.

    An entry is written if a read of it takes less than half of its encoding. `read_time_s` takes
    bytes, and gives the seconds of a read.
    """
    found: list[tuple[float, EntryInfo]] = []
    for info in views.next_victims(LOOKED_AT):
        nbytes = info.content.nbytes
        if catalog.get(info.key) is not None or nbytes + 4 * BLOCK_BYTES > catalog.nbytes:
            continue
        cost_s, read_s = views.cost_s(info.key, info.content), read_time_s(nbytes)
        if read_s < cost_s / 2:
            density = (cost_s - read_s) / (nbytes + BLOCK_BYTES)
            found.append(((1 + info.hits) * density, info))
    chosen = nlargest(WRITTEN_AT_A_TIME, found, key=lambda each: each[0])
    return [info for _, info in chosen]
