"""What workers tell their scheduler, in memory that both have mapped.

vLLM carries a worker's message only with the output of a step that generates, and only from the
last pipeline stage. The encoder runs in the first stage, and not every engine generates.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from ecd_client import clock
from ecd_client.vllm.base.stats import COUNTERS, EcdStats
from ecd_proto.mapped_file import memory_file

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

NAME = "ecd-reports"
SLOTS = 1 << 14
"""More loads than are ever on their way at one time: an encoder cache has no room for them."""
_FORGOTTEN, _STEP, _COUNTS = 0, 1, 2
_WORD_OF = {name: number for number, name in enumerate(COUNTERS, _COUNTS)}
_LOADS = _COUNTS + len(COUNTERS)
_WORDS = _LOADS + SLOTS
"""Words of 8 bytes that a rank writes, in this order: the move in which its cache was emptied, the
last step that it has done, its counts, and the loads that it has done."""


def loading_ranks(parallel: ParallelConfig) -> int:
    """The number of workers that load every item: those of the first pipeline stage.

    Decode context parallelism adds none: its groups are made of these.
    """
    ranks: int = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return ranks


class Reports:
    """The scheduler's side."""

    def __init__(self, ranks: int) -> None:
        """`ranks` is the number of workers that load every item."""
        self._ranks = ranks
        name = f"{NAME}-{clock.secret(8)}"
        self._fd = memory_file(name, 8 * _WORDS * ranks)
        self._words = memoryview(mmap.mmap(self._fd, 8 * _WORDS * ranks)).cast("Q")
        self._taken = [[0] * len(COUNTERS) for _ in range(ranks)]
        self._heard = [0] * ranks
        self.place = f"/proc/{os.getpid()}/fd/{self._fd}", f"/memfd:{name} (deleted)"
        """The path for this engine's workers, and where it leads to: on another machine, or in a
        container, the process of this id may be another engine's."""

    def have_news(self) -> bool:
        """Whether a rank has ended a step since the last call: it reports at no other time."""
        steps = [self._words[rank * _WORDS + _STEP] for rank in range(self._ranks)]
        before, self._heard = self._heard, steps
        return steps != before

    def are_done(self, load: int) -> bool:
        """Whether every rank has done a load. Ids count up."""
        at = _LOADS + load % SLOTS
        return all(self._words[at + rank * _WORDS] >= load for rank in range(self._ranks))

    def step(self) -> int:
        """The last step that every rank had done when news were asked for; 0: none."""
        return min(self._heard)

    def forgotten(self) -> int:
        """The last move in which a rank's cache was emptied, if not by the scheduler; or -1."""
        return max(self._words[rank * _WORDS + _FORGOTTEN] for rank in range(self._ranks)) - 1

    def take_counts(self) -> EcdStats:
        """The counts that all ranks together have added since the last call."""
        added = EcdStats()
        for rank, taken in enumerate(self._taken):
            begin = rank * _WORDS + _COUNTS
            counts = self._words[begin : begin + len(COUNTERS)].tolist()
            if counts != taken:
                for name, now, was in zip(COUNTERS, counts, taken, strict=True):
                    if now != was:
                        added.count(name, now - was)
                self._taken[rank] = counts
        return added

    def close(self) -> None:
        os.close(self._fd)


class RankReports:
    """One worker's side."""

    def __init__(self, place: tuple[str, str], rank: int) -> None:
        """Map the scheduler's memory. Raises OSError: that is on another machine, or has ended."""
        path, file = place
        if os.readlink(path) != file:
            raise FileNotFoundError(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            words = memoryview(mmap.mmap(fd, 0)).cast("Q")
        finally:
            os.close(fd)
        self._words = words[rank * _WORDS : (rank + 1) * _WORDS]

    def done(self, load: int) -> None:
        """Report that this rank no longer needs the scheduler's hold of a load's item."""
        self._words[_LOADS + load % SLOTS] = load

    def end_step(self, number: int) -> None:
        """Show what was reported since the last step."""
        self._words[_STEP] = number

    def forgot(self, move: int) -> None:
        """Report in which move the cache was emptied, if not by the scheduler; or -1."""
        self._words[_FORGOTTEN] = move + 1

    def add(self, stats: EcdStats) -> None:
        for name, count in stats.data.items():
            self._words[_WORD_OF[name]] += count
