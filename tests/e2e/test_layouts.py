"""Ways of running an engine in which vLLM drops what workers say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.engines import SPREAD, Engine
from e2e.shared import Engines, Pictures
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
    assert counted.get("misses", 0) == counted.get("failures", 0) == 0


def test_a_pipelines_first_stage_reports_what_it_loaded(
    daemon: Daemon,
    stored: list[dict],
    start_engine: Callable[..., Engine],
) -> None:
    how = {"pipeline_parallel_size": 2, "environ": SPREAD}
    extra = {"ecd_harmless_calls": ["execute_dummy_batch"]}
    engine = start_engine("ec_consumer", extra=extra, **how).wait_ready()
    reply = engine.generate(stored)
    assert all(output["finish_reason"] == "length" for output in reply["outputs"])
    has_loaded(engine, daemon)


def test_an_engine_that_pools_reports_what_it_loaded(
    daemon: Daemon,
    stored: list[dict],
    engines: Engines,
    start_engine: Callable[..., Engine],
) -> None:
    plain = engines.start("0.32.0", runner="pooling").wait_ready()
    expected = plain.do("embed", requests=stored)["vectors"]
    plain.close()
    engine = start_engine("ec_consumer", runner="pooling").wait_ready()
    assert engine.do("embed", requests=stored) == {"vectors": expected, "encoded": 0}
    assert len({tuple(vector) for vector in expected}) == PICTURES
    has_loaded(engine, daemon)
