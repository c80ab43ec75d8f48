"""No engine ends, hangs or answers wrongly because of ecd (invariant 5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.engines import Engine
from e2e.shared import CONTRACT, WORDS, Engines, Pictures, Plain, anew, await_sessions, tokens
from support.daemon import Daemon
from support.waiting import eventually

pytestmark = [pytest.mark.timeout(600), CONTRACT]
IMPATIENT = {"ecd_load_timeout_s": 1.0}
FAIL = {"ecd_on_unavailable": "fail"}


@pytest.fixture
def first(shared: Callable[..., Engine]) -> Engine:
    return shared("ec_both", enable_mm_embeds=True)


@pytest.fixture
def second(shared: Callable[..., Engine]) -> Engine:
    return shared("ec_both", 1, enable_mm_embeds=True)


def test_an_engine_serves_without_a_daemon_and_shares_once_there_is_one(
    make_daemon: Callable[..., Daemon],
    start_engine: Callable[..., Engine],
    plain: Plain,
    new: Pictures,
) -> None:
    daemon = make_daemon()
    engine = start_engine("ec_both", daemon=daemon)
    requests = new.requests(4)
    reply = engine.generate(requests)
    assert tokens(reply) == tokens(plain.generate(requests))
    assert reply["encoded"] == 4
    assert "every item is a miss for now" in engine.text()
    assert "start the daemon" in engine.text(), "the log says what to try"
    daemon.start()
    await_sessions(engine, daemon)
    engine.generate(new.requests(2))
    eventually(lambda: daemon.status().entries == 2)
    assert "the daemon answers again" in engine.text()


def test_a_second_engine_reuses_the_first_ones_work_and_encodes_the_rest(
    daemon: Daemon, first: Engine, second: Engine, plain: Plain, new: Pictures
) -> None:
    known, unknown = new.requests(4), new.requests(3)
    assert first.generate(known)["encoded"] == 4
    eventually(lambda: daemon.status().entries == 4)
    reply = second.generate([*known, *unknown])
    assert reply["encoded"] == 3
    assert tokens(reply) == tokens(plain.generate([*known, *unknown]))
    eventually(lambda: daemon.status().entries == 7)


def test_a_pool_too_small_for_the_work(
    daemon: Daemon, engines: Engines, first: Engine, second: Engine, plain: Plain, new: Pictures
) -> None:
    anew(daemon, engines, "1MiB")  # the pictures below take 1.5 MiB
    requests = new.requests(64)
    expected = tokens(plain.generate(requests))
    for order in (1, -1):
        for engine in (first, second):
            engine.send({"do": "generate", "requests": requests[::order]})
        for engine in (first, second):
            assert tokens(engine.receive()) == expected[::order]
    status = daemon.status()
    assert sum(status.counters.evictions.values()) > 0
    assert status.pools[0].pool_bytes == 1 << 20


def test_the_daemon_killed_in_the_middle_and_started_again(
    daemon: Daemon, first: Engine, second: Engine, plain: Plain, new: Pictures
) -> None:
    for _ in range(2):
        known, unknown = new.requests(12), new.requests(12)
        requests = [r for pair in zip(known, unknown, strict=True) for r in pair]
        expected = tokens(plain.generate(requests))
        first.generate(known)
        before = daemon.status().counters.hits
        second.send({"do": "generate", "requests": requests})
        eventually(lambda before=before: daemon.status().counters.hits > before + 2, "loads")
        daemon.kill()
        assert tokens(second.receive()) == expected
        assert tokens(first.generate(requests)) == expected, "while the daemon is away"
        daemon.start()
        for engine in (first, second):
            await_sessions(engine, daemon)
    daemon.evict_all()  # what it took over, too
    known = new.requests(4)
    first.generate(known)
    eventually(lambda: daemon.status().entries >= 4)
    assert second.generate(known)["encoded"] == 0, "reuse resumes without restarting engines"
    assert first.alive
    assert second.alive


def test_a_daemon_that_stands_still_is_a_miss(
    daemon: Daemon, shared: Callable[..., Engine], plain: Plain, new: Pictures
) -> None:
    engine = shared("ec_both", extra=IMPATIENT, enable_mm_embeds=True)
    requests = new.requests(3)
    expected = tokens(plain.generate(requests))
    with daemon.stopped():
        reply = engine.generate(requests)
    assert (tokens(reply), reply["encoded"]) == (expected, 3)
    await_sessions(engine, daemon)

    def is_used() -> bool:
        engine.generate(new.requests(1))
        return daemon.status().entries > 0

    eventually(is_used)


def test_one_uuid_for_two_pictures_is_a_miss(
    daemon: Daemon, first: Engine, second: Engine, plain: Plain, new: Pictures
) -> None:
    large = {"text": "what", "images": [new.image((448, 336))]}
    small = {"text": "what", "images": [new.image((224, 224))]}
    expected = tokens(plain.generate([large]))
    name = {"uuids": ["users-own-uuid"]}
    assert first.generate([{**small, **name}])["encoded"] == 1
    eventually(lambda: daemon.status().entries == 1)
    reply = second.generate([{**large, **name}])
    assert (tokens(reply), reply["encoded"]) == (expected, 1)
    assert "one uuid to different media" in second.text()
    assert "the model may encode a picture otherwise where others stand beside it" in second.text()


def test_an_engine_without_an_encoder_fails_only_the_request_that_cannot_be_served(
    daemon: Daemon,
    first: Engine,
    shared: Callable[..., Engine],
    start_engine: Callable[..., Engine],
    plain: Plain,
    new: Pictures,
    version: str,
) -> None:
    how = {"enable_mm_embeds": True, "encoder_less": True}
    if version == "0.28.0":
        engine = start_engine("ec_consumer", extra=FAIL, **how)
        with pytest.raises(AssertionError, match="needs a vLLM whose scheduler can fail a single"):
            engine.wait_ready()
        return
    engine = shared("ec_consumer", extra=FAIL | IMPATIENT, **how)
    known, unknown = new.requests(3), new.requests(1)
    requests = [*known, *unknown, WORDS]
    expected = tokens(plain.generate(requests))
    first.generate(known)
    eventually(lambda: daemon.status().entries == 3)
    eventually(lambda: set(reasons(engine.generate(known))) == {"length"}, "they load in time")
    reply = engine.generate(requests)
    assert reasons(reply) == ["length"] * 3 + ["error"] + ["length"]
    served = [0, 1, 2, 4]
    assert [tokens(reply)[i] for i in served] == [expected[i] for i in served]
    assert "nobody has stored it" in engine.text()

    patient = shared("ec_consumer", extra=FAIL, **how)
    patient.send({"do": "generate", "requests": unknown})
    eventually(lambda: daemon.status().waits, "it waits")
    first.generate(unknown)  # in time: the waiting request is served after all
    assert tokens(patient.receive()) == [expected[3]]

    daemon.kill()
    await_sessions(engine, None)
    reply = engine.generate([*new.requests(1), WORDS])
    assert reasons(reply) == ["error", "length"]
    assert "nothing answers on" in engine.text()
    assert engine.alive


def reasons(reply: dict) -> list[str]:
    return [output["finish_reason"] for output in reply["outputs"]]
