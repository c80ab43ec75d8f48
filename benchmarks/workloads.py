"""Eight workloads of multimodal serving as accesses to an encoder cache, seeded.

    python benchmarks/workloads.py NAME --seed N --output FILE.csv

writes one as `ecd replay` reads it. No public trace of multimodal serving says which requests carry
the same picture, so these are made up: docs/design-eviction.md has their sources.
"""

from __future__ import annotations

import csv
import random
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import accumulate, count, islice
from math import log
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ecd.replay.reading import Accesses, TracedKey

ACCESSES = 40_000
SERVEGEN = Path(__file__).with_name("servegen_image_tokens.csv")


class Model(NamedTuple):
    """What an encoder's output takes, and how long it runs: a + b rows + c rows^2 a group.

    The seconds count the operations of public configurations, 400 tera a second, of attention 250.
    """

    number: int
    row_bytes: int
    a_s: float
    b_s: float
    c_s: float

    def item(self, key: int, rows: int, group_rows: int | None = None) -> TracedKey:
        """A medium of `rows`, of which `group_rows` at a time attend to each other."""
        quadratic_s = self.c_s * rows * (rows if group_rows is None else group_rows)
        cost_s = self.a_s + self.b_s * rows + quadratic_s
        return TracedKey(key, self.number, rows * self.row_bytes, rows, cost_s)


QWEN3_VL = Model(1, 32 << 10, 8e-3, 9e-6, 8e-9)  # 8B: 4096 x (1 + 3 DeepStack levels) x 2 bytes
QWEN25_VL = Model(2, 7 << 10, 10e-3, 13.5e-6, 1.3e-9)  # 7B, windowed attention
Access = tuple[float, TracedKey]
"""A time in seconds and what is asked for then."""


class Zipf:
    """Ranks from 0 on, the probability of each proportional to (rank + 1) ** -alpha."""

    def __init__(self, size: int, alpha: float) -> None:
        self._sums = list(accumulate((rank + 1) ** -alpha for rank in range(size)))

    def draw(self, chance: random.Random) -> int:
        return bisect(self._sums, chance.random() * self._sums[-1])


class ServeGenSizes:
    """Rows of pictures, as ServeGen's clients send them."""

    def __init__(self) -> None:
        lines = [line for line in SERVEGEN.read_text().splitlines() if not line.startswith("#")]
        pairs = [tuple(map(int, line.split(","))) for line in lines]
        self._rows = [rows for rows, _ in pairs]
        self._sums = list(accumulate(share for _, share in pairs))

    def draw(self, chance: random.Random) -> int:
        return self._rows[bisect(self._sums, chance.random() * self._sums[-1])]


def chat(chance: random.Random, prefix_share: float = 0.0) -> Iterator[Access]:
    """Conversations that send all their pictures again with each turn.

    `prefix_share` of the turns within five minutes find their prefix in the KV cache, and ask for
    new pictures alone.
    """
    keys, sizes, shared = count(1 << 20), ServeGenSizes(), Zipf(2000, 0.8)
    rows_of_shared = [sizes.draw(chance) for _ in range(2000)]

    def picture() -> TracedKey:
        if chance.random() < 0.15:
            key = shared.draw(chance)
            return QWEN3_VL.item(key, rows_of_shared[key])
        return QWEN3_VL.item(next(keys), sizes.draw(chance))

    def conversation(begin_s: float) -> Iterator[Access]:
        now_s = begin_s
        pictures = [picture() for _ in range(1 + (chance.random() < 0.3))]
        asked = pictures
        while True:
            yield from ((now_s, item) for item in asked)
            if chance.random() < 1 / 3.5:
                return
            gap_s = chance.lognormvariate(log(60.0), 1.6)
            now_s += gap_s
            new = [picture() for _ in range(chance.random() < 0.2)]
            pictures = pictures + new
            is_hidden = gap_s < 300.0 and chance.random() < prefix_share
            asked = new if is_hidden else pictures

    return _overlapping(chance, conversation, 2.0)


def rag(
    chance: random.Random, model: Model = QWEN3_VL, scan: bool = False, per_s: float = 1.0
) -> Iterator[Access]:
    """Queries that retrieve two or three pages of each of two documents out of a thousand.

    With `scan` a batch job sends every page once, half of the load from a third of the trace on.
    """
    documents = Zipf(1000, 0.8)
    order = chance.sample(range(1000), 1000)
    pages = [model.item(key, int(chance.lognormvariate(log(1500), 0.35))) for key in range(20_000)]
    scanned = iter(pages)
    asked = 0
    for now_s in _poisson(chance, per_s):
        for _ in range(2):
            first = 20 * order[documents.draw(chance)]
            for page in chance.sample(range(20), chance.randint(2, 3)):
                yield now_s, pages[first + page]
                asked += 1
                if scan and ACCESSES // 3 < asked < ACCESSES // 2:
                    yield now_s, next(scanned)


def agents(chance: random.Random, at_once: int = 80) -> Iterator[Access]:
    """Agents of 15 steps, each of which sends the last five screenshots. Some are common."""
    keys, common = count(1000), Zipf(200, 0.8)

    def agent(begin_s: float) -> Iterator[Access]:
        screens: list[TracedKey] = []
        for step in range(15):
            is_common = chance.random() < 0.08
            key = common.draw(chance) if is_common else next(keys)
            screens = [*screens, QWEN3_VL.item(key, 2040)][-5:]
            now_s = begin_s + 10.0 * step * chance.uniform(0.9, 1.1)
            yield from ((now_s, screen) for screen in screens)

    return _overlapping(chance, agent, at_once / 150)


def video_and_thumbnails(chance: random.Random) -> Iterator[Access]:
    """Many small popular thumbnails, and few large videos."""
    thumbnails, videos = Zipf(20_000, 0.9), Zipf(800, 0.7)
    small = [QWEN25_VL.item(key, chance.randint(64, 256)) for key in range(20_000)]
    large = [
        QWEN25_VL.item((1 << 20) + key, 128 * chance.randint(8, 128), 256) for key in range(800)
    ]
    for now_s in _poisson(chance, 10.0):
        is_video = chance.random() < 0.15
        yield now_s, large[videos.draw(chance)] if is_video else small[thumbnails.draw(chance)]


def catalogue_shift(chance: random.Random) -> Iterator[Access]:
    """A shop's pictures: what is popular changes, and at half time the model does."""
    products, sizes = Zipf(10_000, 0.9), ServeGenSizes()
    rows = [sizes.draw(chance) for _ in range(10_000)]
    ranked = chance.sample(range(10_000), 10_000)
    for asked, now_s in enumerate(_poisson(chance, 10.0)):
        if asked and asked % (ACCESSES // 8) == 0:
            moved = chance.sample(range(10_000), 3_000)
            redrawn = chance.sample([ranked[place] for place in moved], 3_000)
            for place, product in zip(moved, redrawn, strict=True):
                ranked[place] = product
        product = ranked[products.draw(chance)]
        key = product + 10_000 * (asked >= ACCESSES // 2)
        yield now_s, QWEN3_VL.item(key, rows[product])


def mixed_two_models(chance: random.Random) -> Iterator[Access]:
    """Chat and agents on one model, documents and videos on another, a quarter of the load each."""
    length = ACCESSES // 4
    parts = (
        chat(chance, 0.7),
        agents(chance, 20),
        rag(chance, QWEN25_VL, per_s=2.0),
        video_and_thumbnails(chance),
    )
    streams = [
        [(now_s, item._replace(key=4 * item.key + number)) for now_s, item in islice(part, length)]
        for number, part in enumerate(parts)
    ]
    return merge(*streams, key=lambda access: access[0])


def _poisson(chance: random.Random, per_s: float) -> Iterator[float]:
    return accumulate(chance.expovariate(per_s) for _ in count())


def _overlapping(
    chance: random.Random, one: Callable[[float], Iterable[Access]], per_s: float
) -> Iterator[Access]:
    """The accesses of many, one after another's begin, in order of time."""
    begun = [list(one(begin_s)) for begin_s in islice(_poisson(chance, per_s), ACCESSES // 4)]
    return iter(sorted((access for each in begun for access in each), key=lambda access: access[0]))


WORKLOADS: dict[str, Callable[[random.Random], Iterator[Access]]] = {
    "chat": chat,
    "chat-prefix": lambda chance: chat(chance, 0.7),
    "rag": rag,
    "rag-scan": lambda chance: rag(chance, scan=True),
    "agents": agents,
    "video+thumbs": video_and_thumbnails,
    "catalogue-shift": catalogue_shift,
    "mixed-two-models": mixed_two_models,
}


def workload(name: str, seed: int) -> Accesses:
    """The first ACCESSES accesses of a workload, and the items in order of their first."""
    found = Accesses()
    numbers: dict[tuple[int, int], int] = {}
    for now_s, item in islice(WORKLOADS[name](random.Random(f"{name} {seed}")), ACCESSES):
        # Keys are spread over 64 bits, as those of a daemon are.
        key = random.Random(f"{seed} {item.namespace} {item.key}").getrandbits(64)
        number = numbers.setdefault((item.namespace, item.key), len(numbers))
        if number == len(found.items):
            found.items.append(item._replace(key=key))
        found.order.append(number)
        found.times_s.append(now_s)
    return found


def main(
    name: Annotated[str, typer.Argument(help=", ".join(WORKLOADS))],
    output: Annotated[Path, typer.Option(help="A CSV of time, id, size and cost.")],
    seed: int = 1,
) -> None:
    found = workload(name, seed)
    with output.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("time", "id", "size", "cost"))
        for number, now_s in zip(found.order, found.times_s, strict=True):
            item = found.items[number]
            rows.writerow((f"{now_s:.3f}", f"{item.key:016x}", item.nbytes, f"{item.cost_s:.6f}"))


if __name__ == "__main__":
    typer.run(main)
