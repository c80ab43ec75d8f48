"""The daemon's figures beside those of vLLM's own engines, to the item."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from e2e.engines import Engine
from e2e.shared import WORDS, Pictures
from support.daemon import Daemon
from support.waiting import eventually

pytestmark = pytest.mark.timeout(600)


class Figures(NamedTuple):
    """Hits, misses, and the hits that only handed an entry over."""

    hits: int
    misses: int
    handed_over: int

    @classmethod
    def of(cls, daemon: Daemon) -> Figures:
        counted = daemon.status().counters
        return cls(counted.hits, counted.misses, counted.handed_over)

    def since(self, before: Figures) -> Figures:
        return Figures(*(now - then for now, then in zip(self, before, strict=True)))


def test_each_lookup_of_an_engine_is_one_of_the_daemons(
    daemon: Daemon,
    shared: Callable[..., Engine],
    start_engine: Callable[..., Engine],
    new: Pictures,
) -> None:
    producer, consumer, both = map(shared, ("ec_producer", "ec_consumer", "ec_both"))
    handed, own = [new.request() for _ in range(3)], [new.request() for _ in range(2)]
    engines = [producer, consumer, both]
    were = [engine.metrics() for engine in engines]
    before, saved_s = Figures.of(daemon), daemon.status().counters.saved_s

    def figures() -> Figures:
        return Figures.of(daemon).since(before)

    def of_engines() -> tuple[int, int]:
        counted = [
            [engine.metrics().get(name, 0) - then.get(name, 0) for name in ("hits", "misses")]
            for engine, then in zip(engines, were, strict=True)
        ]
        return tuple(map(sum, zip(*counted, strict=True)))

    def stored(number: int) -> None:
        eventually(lambda: daemon.status().entries == number, "every picture stored")
        daemon.wait_idle()

    producer.generate(handed, max_tokens=1)
    stored(3)
    consumer.generate(handed)
    assert figures() == (3, 3, 3), "each was encoded, and handed over: nothing is saved"
    assert daemon.status().counters.saved_s == saved_s
    for engine in (producer, consumer):
        engine.do("forget")
        engine.generate(handed, max_tokens=1)
    assert figures() == (9, 3, 6), "three encodes are saved, not six"
    costs_s = sum(entry.content.cost_s for entry in daemon.entries())
    assert daemon.status().counters.saved_s - saved_s == pytest.approx(costs_s)
    both.generate(own)
    stored(5)
    consumer.generate(own)
    assert figures() == (11, 5, 6), "the engine that encoded them had used them itself"
    both.generate([*own, WORDS])
    assert figures() == (11, 5, 6), "vLLM's own cache had them"
    assert of_engines() == figures()[:2]
    killed = start_engine("ec_both").wait_ready()
    killed.generate([*own, new.request()])
    stored(6)
    killed.kill()
    eventually(lambda: figures() == (13, 6, 6), "what a killed engine counted")
