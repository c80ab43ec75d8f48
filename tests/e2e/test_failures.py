"""No engine ends, hangs or answers wrongly because of ecd (invariant 5)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from e2e.engines import Engine
from support.daemon import Daemon, eventually

pytestmark = pytest.mark.timeout(600)

seeds = itertools.count(1000)


def fresh(count: int, size: tuple[int, int] = (336, 224)) -> list[dict]:
    """Requests for pictures that nobody has seen."""
    return [
        {"text": "what is in this picture?", "images": [[*size, next(seeds)]]} for _ in range(count)
    ]


def tokens(reply: dict) -> list[list[int]]:
    return [output["tokens"] for output in reply["outputs"]]


@pytest.fixture(scope="module")
def first(shared_daemon: Daemon, start_engine: Callable[..., Engine]) -> Engine:
    """An engine that starts where there is no daemon."""
    assert not shared_daemon.shm.exists()
    return start_engine("ec_both").wait_ready()


@pytest.fixture(scope="module")
def second(first: Engine, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine("ec_both", extra={"ecd_load_timeout_s": 2.0})


@pytest.fixture
def daemon(shared_daemon: Daemon, first: Engine, second: Engine, plain: Engine) -> Daemon:
    """Serving, on the address that the engines have known since before it existed."""
    for engine in (first, second, plain):
        engine.wait_ready()
    shared_daemon.pool = "64MiB"
    shared_daemon.close()
    return shared_daemon.start()


def both_connected(daemon: Daemon) -> None:
    daemon.wait_for_clients(4)  # two of each engine


def test_engines_serve_without_a_daemon(
    shared_daemon: Daemon, first: Engine, second: Engine, plain: Engine
) -> None:
    requests = fresh(4)
    reply = first.generate(requests)
    assert tokens(reply) == tokens(plain.generate(requests))
    assert reply["encoded"] == 4
    assert "every item is a miss for now" in first.text()
    assert "start the daemon" in first.text(), "the log says what to try"


def test_a_second_engine_reuses_the_first_ones_work_and_encodes_the_rest(
    daemon: Daemon, first: Engine, second: Engine, plain: Engine
) -> None:
    both_connected(daemon)
    known, unknown = fresh(4), fresh(3)
    assert first.generate(known)["encoded"] == 4
    eventually(lambda: daemon.status().entries == 4)
    reply = second.generate([*known, *unknown])
    assert reply["encoded"] == 3
    assert tokens(reply) == tokens(plain.generate([*known, *unknown]))
    eventually(lambda: daemon.status().entries == 7)


def test_a_pool_too_small_for_the_work(
    shared_daemon: Daemon, daemon: Daemon, first: Engine, second: Engine, plain: Engine
) -> None:
    daemon.close()
    daemon.pool = "1MiB"  # the pictures below take 3 MiB
    daemon.start()
    both_connected(daemon)
    requests = fresh(64)
    expected = tokens(plain.generate(requests))
    for engine in (first, second):
        engine.send({"do": "generate", "requests": requests})
    for engine in (first, second):
        assert tokens(engine.receive()) == expected
    for engine in (first, second):
        engine.send({"do": "generate", "requests": requests[::-1]})
    for engine in (first, second):
        assert tokens(engine.receive()) == expected[::-1]
    status = daemon.status()
    assert sum(status.counters.evictions.values()) > 0
    assert status.pools[0].pool_bytes == 1 << 20


def test_the_daemon_killed_in_the_middle_and_started_again(
    daemon: Daemon, first: Engine, second: Engine, plain: Engine
) -> None:
    both_connected(daemon)
    for _ in range(3):
        known, unknown = fresh(12), fresh(12)
        requests = [r for pair in zip(known, unknown, strict=True) for r in pair]
        expected = tokens(plain.generate(requests))
        first.generate(known)
        before = daemon.status().counters.hits
        second.send({"do": "generate", "requests": requests})
        eventually(lambda before=before: daemon.status().counters.hits > before + 2, 20, "loads")
        daemon.kill()
        assert tokens(second.receive()) == expected
        assert tokens(first.generate(requests)) == expected, "while the daemon is away"
        daemon.start()
        both_connected(daemon)
    daemon.evict_all()  # what it took over, too
    known = fresh(4)
    first.generate(known)
    eventually(lambda: daemon.status().entries >= 4)
    assert second.generate(known)["encoded"] == 0, "reuse resumes without restarting engines"
    assert first.alive
    assert second.alive


def test_a_daemon_that_stands_still_is_a_miss(
    daemon: Daemon, first: Engine, second: Engine, plain: Engine
) -> None:
    import os
    import signal

    both_connected(daemon)
    requests = fresh(3)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        reply = second.generate(requests)
        assert tokens(reply) == tokens(plain.generate(requests))
        assert reply["encoded"] == 3
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    both_connected(daemon)
    first.generate(requests)
    eventually(lambda: daemon.status().entries >= 3)


def test_one_uuid_for_two_pictures_is_a_miss(
    daemon: Daemon, first: Engine, second: Engine, plain: Engine
) -> None:
    both_connected(daemon)
    small = {"text": "what", "images": [[224, 224, 1]], "uuids": ["users-own-uuid"]}
    large = {"text": "what", "images": [[448, 336, 2]], "uuids": ["users-own-uuid"]}
    expected = tokens(plain.generate([{k: large[k] for k in ("text", "images")}]))
    assert first.generate([small])["encoded"] == 1
    eventually(lambda: daemon.status().entries == 1)
    reply = second.generate([large])
    assert tokens(reply) == expected
    assert reply["encoded"] == 1
    assert "one uuid to different media" in second.text()


def test_an_engine_without_an_encoder_fails_only_the_request_that_cannot_be_served(
    daemon: Daemon,
    first: Engine,
    plain: Engine,
    start_engine: Callable[..., Engine],
    version: str,
) -> None:
    settings = {"ecd_on_unavailable": "fail", "ecd_load_timeout_s": 6.0}
    engine = start_engine("ec_consumer", extra=settings, encoder_less=True)
    if version == "0.28.0":
        with pytest.raises(AssertionError, match="needs a vLLM whose scheduler can fail a single"):
            engine.wait_ready()
        return
    engine.wait_ready()
    known, unknown = fresh(3), fresh(1)
    requests = [*known, *unknown, {"text": "no picture", "images": []}]
    expected = tokens(plain.generate(requests))
    first.generate(known)
    eventually(lambda: daemon.status().entries == 3)
    reply = engine.generate(requests)
    reasons = [output["finish_reason"] for output in reply["outputs"]]
    assert reasons == ["length"] * 3 + ["error"] + ["length"]
    served = [0, 1, 2, 4]
    assert [tokens(reply)[i] for i in served] == [expected[i] for i in served]
    assert "nobody has stored it" in engine.text()

    engine.send({"do": "generate", "requests": unknown})
    first.generate(unknown)  # in time: the waiting request is served after all
    assert tokens(engine.receive()) == [expected[3]]

    daemon.kill()
    reply = engine.generate([*fresh(1), {"text": "no picture", "images": []}])
    assert [output["finish_reason"] for output in reply["outputs"]] == ["error", "length"]
    assert "nothing answers on" in engine.text()
    assert engine.alive


def test_identifiers_that_are_not_content_stay_private(
    shared_daemon: Daemon, start_engine: Callable[..., Engine], plain: Engine, daemon: Daemon
) -> None:
    off = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    engines = [start_engine("ec_both", **off) for _ in range(2)]
    mine, yours = fresh(3), fresh(3)  # both engines count them 1, 2, 3
    expected = tokens(plain.generate([*mine, *yours]))
    for engine, requests, wanted in zip(
        engines, (mine, yours), (expected[:3], expected[3:]), strict=True
    ):
        reply = engine.generate(requests)
        assert tokens(reply) == wanted
        assert reply["encoded"] == 3
    assert daemon.status().entries == 0, "nothing was shared"
    assert daemon.status().counters.hits == daemon.status().counters.misses == 0
