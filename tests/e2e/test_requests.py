"""A request that cannot be served fails alone, and what can be served is.

Some requests bring no picture, only its name and the metadata that sizes its placeholder, because
a proxy was told that ecd has the embedding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.engines import Engine
from e2e.gates import Gate
from e2e.shared import (
    WORDS,
    Engines,
    Pictures,
    Plain,
    anew,
    await_sessions,
    constants,
    tokens,
)
from e2e.test_failures import FAIL, IMPATIENT, reasons
from support.daemon import Daemon, changed
from support.squeeze import being_written
from support.waiting import eventually

pytestmark = pytest.mark.timeout(600)
GRID = list(Pictures.GRID)
ENTRY_BYTES = Pictures.EMBEDDINGS * 128 * 4


def bare(request: dict, grid: list[int] = GRID) -> dict:
    """The same request as a proxy rewrites it."""
    return {
        "text": request["text"],
        "uuids": request["uuids"],
        "grids": [grid] * len(request["uuids"]),
    }


def unnamed(request: dict) -> dict:
    return {"text": request["text"], "images": request["images"]}


def announced(reply: dict) -> list[bool]:
    """Whether a proxy would rewrite the item, for each item of the answers."""
    params = [output["ec_transfer_params"] for output in reply["outputs"]]
    return [bool(item["metadata"]) for each in params for item in each.values()]


HOW: dict[str, dict] = {
    "producer": {"role": "ec_producer"},
    "consumer": {"role": "ec_consumer", "extra": FAIL, "encoder_less": True},
    "both": {"role": "ec_both"},
}
"""An engine that only encodes, one without an encoder, and one that does all."""


@pytest.fixture
def engine_of(shared: Callable[..., Engine]) -> Callable[..., Engine]:
    def engine_of(name: str, **extra: object) -> Engine:
        how = dict(HOW[name])
        if extra:
            how["extra"] = {**how.get("extra", {}), **extra}
        embeds = {} if name == "producer" else {"enable_mm_embeds": True}
        return shared(**how, **embeds)

    return engine_of


@pytest.fixture
def producer(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of("producer")


@pytest.fixture
def consumer(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of("consumer")


@pytest.fixture
def both(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of("both")


@pytest.fixture(params=["consumer", "both"])
def asked(request: pytest.FixtureRequest, engine_of: Callable[..., Engine]) -> Engine:
    return engine_of(request.param)


UNTRIMMED = "from ecd.core.pool.pool import Pool", "Pool.needs_trim = lambda pool: False"
Squeezed = Callable[..., contextlib.AbstractContextManager]


@pytest.fixture
def squeezed(daemon: Daemon, engines: Engines) -> Squeezed:
    """Reserve all of the smallest pool but so many bytes, in a daemon that was started anew.

    It is above its high watermark, but nothing is evicted for that: what fits is stored for good.
    The daemon runs `lines` of Python before it begins.
    """

    @contextlib.contextmanager
    def squeezed(left_bytes: int, *lines: str) -> Iterator[None]:
        daemon.command = changed(*UNTRIMMED, *lines)
        anew(daemon, engines, "1MiB")
        with being_written(daemon.address, (1 << 20) - left_bytes):
            yield

    return squeezed


def stored(daemon: Daemon, producer: Engine, *requests: dict) -> None:
    before = daemon.status().entries
    producer.generate(list(requests), max_tokens=1)
    pictures = sum(len(request["images"]) for request in requests)
    eventually(lambda: daemon.status().entries == before + pictures, "stored")


def test_metadata_of_what_nobody_has_fails_its_request_at_once(
    daemon: Daemon, asked: Engine, producer: Engine, plain: Plain, new: Pictures
) -> None:
    """An engine that waited would do so for longer than a reply is waited for."""
    known, unknown = new.named(), new.named()
    stored(daemon, producer, known)
    reply = asked.generate([bare(unknown), bare(known), WORDS])
    assert reasons(reply) == ["error", "length", "length"]
    assert tokens(reply)[1:] == tokens(plain.generate([unnamed(known), WORDS]))
    assert reply["encoded"] == 0
    assert f"{unknown['uuids'][0]} cannot be had" in asked.text()
    assert "nobody has stored it" in asked.text()
    assert reasons(asked.generate([WORDS])) == ["length"]


def test_metadata_waits_for_a_daemon(
    daemon: Daemon,
    asked: Engine,
    producer: Engine,
    plain: Plain,
    new: Pictures,
) -> None:
    known = new.named()
    stored(daemon, producer, known)
    daemon.kill()
    await_sessions(asked, None)
    asked.send({"do": "generate", "requests": [bare(known)]})
    daemon.start()  # with what the last one had
    assert tokens(asked.receive()) == tokens(plain.generate([unnamed(known)]))


@pytest.mark.parametrize("name", ["consumer", "both"])
def test_metadata_waits_for_a_daemon_no_longer_than_it_may(
    name: str, daemon: Daemon, engine_of: Callable[..., Engine], producer: Engine, new: Pictures
) -> None:
    asked = engine_of(name, **IMPATIENT)
    known = new.named()
    stored(daemon, producer, known)
    daemon.kill()
    await_sessions(asked, None)
    assert reasons(asked.generate([bare(known), WORDS])) == ["error", "length"]
    assert "nothing answers on" in asked.text()


def test_metadata_that_does_not_fit_the_entry_fails_its_request_alone(
    daemon: Daemon, asked: Engine, producer: Engine, plain: Plain, new: Pictures
) -> None:
    known = new.named()
    stored(daemon, producer, known)
    width, height = GRID[1:]
    others = [1, 8, 8], [1, height, width], [1, width // 2, height * 2]
    [right] = tokens(plain.generate([unnamed(known)]))
    requests = [bare(known), *(bare(known, grid) for grid in others), bare(known)]
    for order in (requests, requests[::-1], requests[1:]):
        reply = asked.generate(order)
        expected = ["length" if str(r["grids"]) == str([GRID]) else "error" for r in order]
        assert reasons(reply) == expected
        assert [t for t in tokens(reply) if t] == [right] * expected.count("length")


def test_metadata_under_a_name_that_is_not_shared_fails_its_request(
    daemon: Daemon, asked: Engine
) -> None:
    names = ["renderer0-mm-1-image-0", "x" * 5000]
    requests = [{"text": "what", "uuids": [name], "grids": [GRID]} for name in names]
    assert reasons(asked.generate([*requests, WORDS])) == ["error", "error", "length"]
    assert f"{'x' * 128}... (5,000 characters) cannot be had" in asked.text()
    assert "x" * 129 not in asked.text()


@pytest.mark.parametrize("encoder", ["producer", "both"])
@pytest.mark.parametrize("loss", ["evicted", "restarted"])
def test_what_left_ecd_comes_back_when_its_producer_is_asked_again(
    loss: str,
    encoder: str,
    daemon: Daemon,
    engines: Engines,
    consumer: Engine,
    plain: Plain,
    new: Pictures,
    engine_of: Callable[..., Engine],
) -> None:
    engine = engine_of(encoder)
    asked = new.named(2)
    expected = tokens(plain.generate([unnamed(asked)]))
    stored(daemon, engine, asked)
    if loss == "evicted":
        daemon.evict_all()
    else:
        anew(daemon, engines)
    assert reasons(consumer.generate([bare(asked)])) == ["error"]
    again = engine.generate([asked], max_tokens=1)
    assert again["encoded"] == 0, "it is in the engine's own cache"
    eventually(lambda: daemon.status().entries == 2)
    assert any(entry.content.cost_s > 0 for entry in daemon.entries())
    reply = consumer.generate([bare(asked)])
    assert (tokens(reply), reply["encoded"]) == (expected, 0)


def test_what_a_producer_found_in_ecd_it_stores_again(
    daemon: Daemon, producer: Engine, both: Engine, new: Pictures
) -> None:
    asked = new.named()
    stored(daemon, both, asked)
    assert producer.generate([asked], max_tokens=1)["encoded"] == 0
    daemon.evict_all()
    assert producer.generate([asked], max_tokens=1)["encoded"] == 0
    eventually(lambda: daemon.status().entries == 1, "it is stored again")


def test_what_is_announced_is_stored(
    daemon: Daemon,
    engines: Engines,
    producer: Engine,
    squeezed: Squeezed,
    new: Pictures,
) -> None:
    """A consumer that is sent metadata has nothing else to make an embedding of."""

    def told(*requests: dict) -> list[bool]:
        return announced(producer.generate(list(requests), max_tokens=1))

    one, more, again = new.named(), new.named(3), new.named(2)
    assert told(one) == [True]
    assert told(more, one) == [True] * 4
    daemon.evict_all()
    assert told(one) == [True], "it was stored again"

    with squeezed(ENTRY_BYTES - 4096):
        assert told(new.named()) == [False]
        assert told(one) == [False]
    with squeezed(2 * ENTRY_BYTES):
        assert told(new.named()) == [True]
        assert told(new.named(3)) == [False] * 3

    daemon.kill()
    await_sessions(producer, None)
    assert told(again, one) == [False] * 3
    anew(daemon, engines)
    assert told(again, one) == [True] * 3


def test_a_save_that_was_answered_late_leaves_later_ones_to_be_announced(
    daemon: Daemon,
    producer: Engine,
    squeezed: Squeezed,
    new: Pictures,
    gate: Gate,
) -> None:
    """The daemon grants the second reservation, the first save's, when the gate is open.

    `worker_seams.py` shows which saves a step waits for.
    """

    def told() -> list[bool]:
        return announced(producer.generate([new.named()], max_tokens=1))

    gated = (
        "import asyncio",
        "from ecd.live.live import LiveCache",
        "import os",
        "reserve, gates = LiveCache._reserve, [None, PATH]".replace("PATH", repr(str(gate.path))),
        "async def reserve_at_a_gate(*about):",
        "    gate = gates.pop(0) if gates else None",
        "    if gate is not None:",
        "        await asyncio.to_thread(os.read, os.open(gate, os.O_RDWR), 1)",
        "    return await reserve(*about)",
        "LiveCache._reserve = reserve_at_a_gate",
    )
    with squeezed(4 * ENTRY_BYTES, *gated):
        with constants(producer, worker__worker__SEEN_WITHIN_S=0.1):
            assert told() == [False]
        gate.open()
        eventually(lambda: daemon.status().counters.puts == 1)
        eventually(lambda: told() == [True], "there may be no room beside the last one yet")


def test_the_counters_say_what_was_stored_and_what_was_missed(
    daemon: Daemon,
    engines: Engines,
    producer: Engine,
    both: Engine,
    squeezed: Squeezed,
    new: Pictures,
) -> None:
    producer.generate([WORDS], max_tokens=1)  # a save is counted with the step after it
    before = producer.metrics()
    asked = new.named(3)
    stored(daemon, producer, asked)

    def is_dropped() -> bool:
        producer.generate([WORDS], max_tokens=1)
        dropped = "dropped_saves"
        return producer.metrics().get(dropped, 0) > before.get(dropped, 0)

    with squeezed(ENTRY_BYTES - 4096):
        producer.generate([new.named()], max_tokens=1)
        eventually(is_dropped)
    counted = {name: value - before.get(name, 0) for name, value in producer.metrics().items()}
    assert counted["saves"] == 3
    assert counted["saved_bytes"] == 3 * ENTRY_BYTES
    assert counted["dropped_saves"] == 1
    assert counted["misses"] == 4

    before = both.metrics()
    anew(daemon, engines)
    assert both.generate([unnamed(asked)])["encoded"] == 3
    for _ in range(3):
        anew(daemon, engines)
        assert both.generate([unnamed(asked)])["encoded"] == 0
    misses = both.metrics()["misses"] - before.get("misses", 0)
    assert misses == 3, "what is in the engine's own cache is asked of nobody"


def by_name(replies: list[dict]) -> dict:
    """vLLM's example proxy: each item's description under its name, the last one counts."""
    merged = {}
    for params in replies:
        for mm_hash, reported in params.items():
            assert isinstance(reported.get("item_indices", []), list)
            merged[mm_hash] = reported
    return merged


def by_key(replies: list[dict]) -> dict:
    """llm-d's sidecar: JSON objects, merged by key."""
    return {key: value for params in replies for key, value in params.items()}


def unless_they_differ(replies: list[dict]) -> dict:
    """llm-d's coordinator: two descriptions of one item must be equal."""
    merged: dict = {}
    for params in replies:
        for key, value in params.items():
            assert merged.setdefault(key, value) == value, f"conflicting descriptors for {key}"
    return merged


def test_the_answers_of_two_producers_are_merged(
    daemon: Daemon,
    producer: Engine,
    consumer: Engine,
    both: Engine,
    plain: Plain,
    new: Pictures,
) -> None:
    first, second, twice = new.named(), new.named(), new.named()
    stored(daemon, both, second)  # it waits for no answer of the daemon
    asked = [(producer, first), (both, second), (producer, twice), (both, twice)]
    replies = [
        engine.generate([request], max_tokens=1)["outputs"][0]["ec_transfer_params"]
        for engine, request in asked
    ]
    names = [*first["uuids"], *second["uuids"], *twice["uuids"]]
    images = [*first["images"], *second["images"], *twice["images"]]
    whole = {"text": "which picture is the other?", "images": images, "uuids": names}
    expected = tokens(plain.generate([unnamed(whole)]))
    for merge in (by_name, by_key, unless_they_differ):
        params = merge(replies)
        assert sorted(params) == sorted(names), "no key is lost"
        requests = [{**whole, "ec_transfer_params": params}]
        grids = [params[name]["metadata"]["image_grid_thw"] for name in names]
        requests.append({**requests[0], "images": [], "grids": grids})
        reply = consumer.generate(requests)
        assert tokens(reply) == expected * len(requests)
        assert reply["encoded"] == 0


@pytest.mark.usefixtures("daemon")
def test_a_salted_request_beside_a_connector_for_kv_is_answered(
    start_engine: Callable[..., Engine], plain: Plain, new: Pictures, tmp_path: Path
) -> None:
    """That connector is asked for a prompt's KV by its items' names in the engine alone."""
    request = {**new.request(), "text": "what is in this picture? " * 40}
    salted = {**request, "cache_salt": "of a tenant"}
    right = tokens(plain.generate([request]))
    engine = start_engine("ec_both", kv=str(tmp_path / "kv")).wait_ready()
    for asked, has_kv in ((request, False), (salted, False), (salted, True)):
        hits = engine.log.read_text().count("External Cache Hit")
        assert tokens(engine.generate([asked])) == right
        assert (engine.log.read_text().count("External Cache Hit") > hits) == has_kv
        engine.do("reset", calls=[])  # of vLLM's own cache of prefixes
