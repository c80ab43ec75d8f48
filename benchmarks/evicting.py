"""What the policies of eviction cost in a pool of many entries.

    python benchmarks/evicting.py [--entries N] [--output FILE.md]

The core alone, without a daemon, over a full pool of entries of 1 to 16 granules in contiguous
memory, whose costs and uses differ: the policies' own calls, and the cache's operations. Python's
collector of garbage is off. The policies' calls are in processor time, so that the longest of them
are not those that another process interrupted.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from common import machine, markdown, show, write_page
from growth import measure
from rich.console import Console

from ecd.core.model.block import Block
from ecd.core.model.entry import Entry
from ecd.core.model.states import EntryState
from ecd.core.model.types import Content, EntryId, SessionId
from ecd.core.policy.policy import Lru, Policy
from ecd.core.policy.value_density import ValueDensity
from ecd.core.pool.allocator import Allocator
from ecd.core.pool.pool import Pool
from ecd_proto.shm.files import GRANULE_BYTES

USES, EVICTIONS, SWITCHES = 100_000, 10_000, 50
LARGEST = 16
POLICIES: dict[str, Callable[[int], Policy]] = {"lru": lambda _: Lru(), "value": ValueDensity}


class Full:
    """A full pool, its entries used twice on average; `took` has the microseconds of each call."""

    def __init__(self, entries: int, policy: Callable[[int], Policy]) -> None:
        self._chance = random.Random(1)
        sizes = [self._chance.randint(1, LARGEST) * GRANULE_BYTES for _ in range(entries)]
        allocator = Allocator(0, sum(sizes), GRANULE_BYTES)
        self._pool = Pool(allocator, policy=policy(allocator.nbytes))
        self._policy = self._pool.policy
        self._now_s = 0.0
        self.entries: list[Entry] = []
        for nbytes in sizes:
            block = allocator.allocate(nbytes)
            assert block is not None
            self._admit(block)
        for _ in range(2 * entries):
            self._use(self._chance.choice(self.entries))
        self.took: dict[str, list[float]] = {}

    def use_some(self) -> None:
        for _ in range(USES):
            entry = self._chance.choice(self.entries)
            self._timed("use", self._use, entry)
            self._timed("hold", self._policy.hold, entry)
            self._timed("let go", self._policy.let_go, entry)

    def evict_some(self) -> None:
        for _ in range(EVICTIONS):
            self._timed("the coldest", next, self._policy.coldest())
            nbytes = self._chance.randint(1, LARGEST) * GRANULE_BYTES
            block = self._pool.allocator.allocate(nbytes)
            if block is None:
                block = self._timed(
                    "make room", self._pool.evict_for, nbytes, self._evict, lambda: True
                )
            self._timed("admit", self._admit, block)

    def switch(self) -> None:
        if isinstance(self._policy, ValueDensity):
            for _ in range(SWITCHES):
                self._timed("another weighing", self._policy._queues.weigh, 0)

    def _timed(self, name: str, action: Callable[..., Any], *arguments: object) -> Any:
        started = time.thread_time_ns()
        result = action(*arguments)
        self.took.setdefault(name, []).append((time.thread_time_ns() - started) / 1000)
        return result

    def _use(self, entry: Entry) -> None:
        self._now_s += 0.1
        self._policy.use(entry, self._now_s)
        entry.used_s = self._now_s

    def _admit(self, block: Block) -> None:
        number = len(self.entries)
        content = Content("int8", (block.nbytes,), block.nbytes)
        entry = Entry(EntryId(number), "n", f"{number:064x}", content, block, SessionId(1))
        entry.state, entry.cost_s = EntryState.COMMITTED, self._chance.uniform(0.005, 0.5)
        block.owner = entry
        self.entries.append(entry)
        self._policy.admit(entry)

    def _evict(self, entry: Entry, reason: str) -> None:
        self._pool.drop(entry, reason, is_counted=True)
        self._pool.allocator.free(entry.block)


def cell(took: list[float] | None) -> str:
    return "" if took is None else f"{median(took):.1f} us, {max(took) / 1000:.2f} ms"


def main(
    entries: Annotated[int, typer.Option(help="How many the pool holds.")] = 1_000_000,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    out = Console(highlight=False, width=120)
    gc.disable()
    took: dict[str, dict[str, list[float]]] = {}
    core: dict[str, dict[str, float]] = {}
    for name, policy in POLICIES.items():
        full = Full(entries, policy)
        full.use_some()
        full.evict_some()
        full.switch()
        took[name] = full.took
        del full
        core[name] = measure(entries, policy)
    calls = [["call of the policy, median and longest", *POLICIES]]
    calls += [[call, *(cell(took[p].get(call)) for p in POLICIES)] for call in took["value"]]
    operations = [["operation of the core, median", *POLICIES]]
    operations += [[o, *(f"{core[p][o]:.1f} us" for p in POLICIES)] for o in core["lru"]]
    text = f"{machine()}. {entries:,} entries.\n"
    for title, rows in (("The policies alone", calls), ("The core", operations)):
        show(out, title, rows)
        text += f"\n{title}.\n\n{markdown(rows)}"
    if output is not None:
        write_page(output, text)


if __name__ == "__main__":
    typer.run(main)
