"""What one operation of the core costs with 1,000 and with 1,000,000 entries.

    python benchmarks/core_growth.py [--output FILE.md]

Pure Python, no daemon: the same operations on two caches, medians of many.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from common import markdown, show, timed_us
from rich.console import Console

from ecd.core.allocator import GRANULE_BYTES
from ecd.core.cache import Cache
from ecd.core.types import Content, Key, Leased, LimitReached, Limits, Reserved, SessionId

COUNTS = (1_000, 1_000_000)
SAMPLES = 5_000


def content(granules: int) -> Content:
    nbytes = granules * GRANULE_BYTES
    return Content("int8", (nbytes,), nbytes)


def filled(count: int, chance: random.Random) -> tuple[Cache, SessionId]:
    """A cache of `count` entries of 1 to 16 granules, the pool full to the last few."""
    sizes = [chance.randint(1, 16) for _ in range(count)]
    limits = Limits(high_watermark=1.0, low_watermark=1.0)
    cache = Cache((sum(sizes) + 64) * GRANULE_BYTES, lease_ttl_s=30.0, limits=limits)
    session = cache.open_session()
    assert not isinstance(session, LimitReached)
    for index, granules in enumerate(sizes):
        reserved = cache.reserve(session, Key("n", f"k{index}"), content(granules), 0.0)
        assert isinstance(reserved, Reserved)
        cache.commit(session, reserved.entry, 0.0)
    return cache, session


def measure(count: int) -> dict[str, float]:
    chance = random.Random(1)
    cache, session = filled(count, chance)
    took: dict[str, list[float]] = {
        name: [] for name in ("contains", "acquire", "release", "reserve, evicting", "commit")
    }
    for step in range(SAMPLES):
        key = Key("n", f"k{chance.randrange(count)}")
        took["contains"].append(timed_us(lambda k=key: cache.contains(k)))
        started = time.perf_counter()
        leased = cache.acquire(session, key, float(step))
        took["acquire"].append((time.perf_counter() - started) * 1e6)
        if isinstance(leased, Leased):
            took["release"].append(timed_us(lambda x=leased: cache.release(session, x.lease)))
        wanted = content(chance.randint(1, 16))
        started = time.perf_counter()
        reserved = cache.reserve(session, Key("n", f"new{step}"), wanted, float(step))
        took["reserve, evicting"].append((time.perf_counter() - started) * 1e6)
        assert isinstance(reserved, Reserved)
        took["commit"].append(
            timed_us(lambda r=reserved, s=step: cache.commit(session, r.entry, float(s)))
        )
    return {name: median(values) for name, values in took.items()}


def main(
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    results = {count: measure(count) for count in COUNTS}
    small, large = (results[count] for count in COUNTS)
    rows = [["operation", *(f"{count:,} entries" for count in COUNTS), "ratio"]]
    for name in small:
        ratio = large[name] / small[name]
        rows.append([name, f"{small[name]:.1f} us", f"{large[name]:.1f} us", f"{ratio:.2f}"])
    show(Console(), "The core alone, medians", rows)
    if output is not None:
        output.write_text(f"The core alone, medians.\n\n{markdown(rows)}")


if __name__ == "__main__":
    typer.run(main)
