"""Ways of running an engine in which vLLM drops what workers say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.engines import SPREAD, Engine
from e2e.shared import WORDS, Engines, Pictures
from support.daemon import Daemon
from support.waiting import eventually

pytestmark = pytest.mark.timeout(600)

PICTURES = 30


@pytest.fixture
def stored(daemon: Daemon, shared: Callable[..., Engine], new: Pictures) -> list[dict]:
    """Requests for as many pictures, which an encoder has stored."""
    requests = new.requests(PICTURES)
    before = daemon.status().entries
    shared("ec_producer").generate(requests, max_tokens=1)
    eventually(lambda: daemon.status().entries == before + PICTURES, "every picture stored")
    return requests


def has_loaded(engine: Engine, daemon: Daemon) -> None:
    """Each picture was loaded, told, and let go of, though the engine takes no step more."""
    eventually(lambda: daemon.status().leases == 0, "leases of finished requests")
    counted = engine.metrics()
    assert counted["hits"] == counted["loads"] == PICTURES
    assert counted.get("misses", 0) == counted.get("failures", 0) == counted.get("saves", 0) == 0


def stores(
    daemon: Daemon, ask: Callable[[list[dict]], dict], engine: Engine, new: Pictures
) -> None:
    """New pictures are encoded, stored, told of with a further step, and not loaded."""
    puts = daemon.status().counters.puts
    ask(new.requests(PICTURES))
    eventually(lambda: daemon.status().counters.puts == puts + PICTURES, "every picture stored")

    def counted() -> dict[str, int]:
        ask([WORDS])
        return engine.metrics()

    eventually(lambda: counted().get("saves", 0) == PICTURES, "each save told once")
    said = engine.metrics()
    assert (said["misses"], said["hits"], said["loads"]) == (PICTURES,) * 3
    assert said["saves"] == PICTURES
    assert said.get("failures", 0) == said.get("dropped_saves", 0) == 0
    eventually(lambda: daemon.status().leases == 0, "leases of finished requests")


def test_a_pipelines_first_stage_reports_what_it_loads_and_stores(
    daemon: Daemon,
    stored: list[dict],
    start_engine: Callable[..., Engine],
    new: Pictures,
) -> None:
    how = {"pipeline_parallel_size": 2, "environ": SPREAD}
    extra = {"ecd_harmless_calls": ["execute_dummy_batch"]}
    engine = start_engine("ec_both", extra=extra, **how).wait_ready()
    reply = engine.generate(stored)
    assert all(output["finish_reason"] == "length" for output in reply["outputs"])
    has_loaded(engine, daemon)
    stores(daemon, engine.generate, engine, new)


def test_an_engine_that_pools_reports_what_it_loads_and_stores(
    daemon: Daemon,
    stored: list[dict],
    engines: Engines,
    start_engine: Callable[..., Engine],
    new: Pictures,
) -> None:
    plain = engines.start("0.32.0", runner="pooling").wait_ready()
    expected = plain.do("embed", requests=stored)["vectors"]
    plain.close()
    engine = start_engine("ec_both", runner="pooling").wait_ready()
    assert engine.do("embed", requests=stored) == {"vectors": expected, "encoded": 0}
    assert len({tuple(vector) for vector in expected}) == PICTURES
    has_loaded(engine, daemon)
    stores(daemon, lambda asked: engine.do("embed", requests=asked), engine, new)
