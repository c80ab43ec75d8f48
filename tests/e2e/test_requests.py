"""A request that cannot be served fails alone, and what can be served is.

Some requests bring no picture, only its name and the metadata that sizes its placeholder, because
a proxy was told that ecd has the embedding.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest

from e2e.engines import Engine
from support.daemon import Daemon, changed, eventually
from support.squeeze import being_written

pytestmark = pytest.mark.timeout(900)

SIZE, GRID = [336, 224], [1, 16, 24]
WAIT_S = 6.0
numbers = itertools.count(9000)


def named(count: int, size: list[int] = SIZE) -> dict:
    """A request for pictures that nobody has seen, under names that its client chose."""
    new = [next(numbers) for _ in range(count)]
    return {
        "text": "what is in this picture?",
        "images": [[*size, number] for number in new],
        "uuids": [f"picture-{number}" for number in new],
    }


def bare(request: dict, grid: list[int] = GRID) -> dict:
    """The same request as a proxy rewrites it."""
    return {
        "text": request["text"],
        "uuids": request["uuids"],
        "grids": [grid] * len(request["uuids"]),
    }


def unnamed(request: dict) -> dict:
    return {"text": request["text"], "images": request["images"]}


def tokens(reply: dict) -> list[list[int]]:
    return [output["tokens"] for output in reply["outputs"]]


def reasons(reply: dict) -> list[str]:
    return [output["finish_reason"] for output in reply["outputs"]]


def announced(reply: dict) -> list[bool]:
    """Whether a proxy would rewrite the item, for each item of the answers."""
    params = [output["ec_transfer_params"] for output in reply["outputs"]]
    return [bool(item["metadata"]) for each in params for item in each.values()]


WORDS = {"text": "what is what?", "images": []}


@pytest.fixture(scope="module")
def producer(shared_daemon: Daemon, start_engine: Callable[..., Engine]) -> Engine:
    shared_daemon.start()
    return start_engine("ec_producer")


@pytest.fixture(scope="module")
def consumer(start_engine: Callable[..., Engine], version: str) -> Engine:
    """An engine without an encoder, where the version has such a mode."""
    extra: dict = {"ecd_load_timeout_s": WAIT_S}
    if version != "0.28.0":
        extra["ecd_on_unavailable"] = "fail"
    return start_engine("ec_consumer", extra=extra, enable_mm_embeds=True)


@pytest.fixture(scope="module")
def both(start_engine: Callable[..., Engine]) -> Engine:
    return start_engine("ec_both", extra={"ecd_load_timeout_s": WAIT_S}, enable_mm_embeds=True)


@pytest.fixture
def daemon(
    shared_daemon: Daemon, producer: Engine, consumer: Engine, both: Engine, plain: Engine
) -> Daemon:
    """Anew and empty, on the address that all engines know."""
    for engine in (producer, consumer, both, plain):
        engine.wait_ready()
    return anew(shared_daemon)


def anew(daemon: Daemon, pool: str = "64MiB") -> Daemon:
    daemon.pool = pool
    daemon.close()
    daemon.start()
    daemon.wait_for_clients(6)  # two of each engine
    return daemon


@contextlib.contextmanager
def squeezed(daemon: Daemon, left_bytes: int) -> Iterator[None]:
    """Reserve all of the smallest pool but `left_bytes`."""
    anew(daemon, "1MiB")
    with being_written(daemon.address, (1 << 20) - left_bytes):
        yield


@pytest.fixture(params=["consumer", "both"])
def asked(request: pytest.FixtureRequest, daemon: Daemon) -> Engine:
    return request.getfixturevalue(request.param)


def test_metadata_of_what_nobody_has_fails_its_request_at_once(
    daemon: Daemon, asked: Engine, producer: Engine, plain: Engine
) -> None:
    known, unknown = named(1), named(1)
    producer.generate([known], max_tokens=1)
    eventually(lambda: daemon.status().entries == 1)
    reply = asked.generate([bare(unknown), bare(known), WORDS])
    assert reasons(reply) == ["error", "length", "length"]
    assert tokens(reply)[1:] == tokens(plain.generate([unnamed(known), WORDS]))
    assert reply["encoded"] == 0
    assert reply["seconds"] < WAIT_S, "it is known at once that nobody has it"
    assert f"{unknown['uuids'][0]} cannot be had" in asked.text()
    assert "nobody has stored it" in asked.text()
    assert reasons(asked.generate([WORDS])) == ["length"]
    eventually(lambda: daemon.status().leases == 0)


def test_metadata_waits_for_a_daemon_as_long_as_it_may(
    daemon: Daemon, asked: Engine, producer: Engine, plain: Engine
) -> None:
    known = named(1)
    producer.generate([known], max_tokens=1)
    eventually(lambda: daemon.status().entries == 1)
    daemon.kill()
    replies: list[dict] = []

    def is_missed() -> bool:  # it may not have seen yet that its daemon ended
        replies.append(asked.generate([bare(known), WORDS]))
        return reasons(replies[-1]) != ["length", "length"]

    eventually(is_missed)
    reply = replies[-1]
    assert reasons(reply) == ["error", "length"]
    assert WAIT_S <= reply["seconds"] < WAIT_S + 5
    assert "nothing answers on" in asked.text()
    anew(daemon)

    def is_stored_again() -> bool:
        producer.generate([known], max_tokens=1)
        return daemon.status().entries == 1

    eventually(is_stored_again, 10, "a client opens its session a moment after the daemon did")
    reply = asked.generate([bare(known)])
    assert tokens(reply) == tokens(plain.generate([unnamed(known)]))


def test_metadata_that_does_not_fit_the_entry_fails_its_request_alone(
    daemon: Daemon, asked: Engine, producer: Engine, plain: Engine, version: str
) -> None:
    known = named(1)
    producer.generate([known], max_tokens=1)
    eventually(lambda: daemon.status().entries == 1)
    width, height = GRID[1:]
    others = (
        [1, 8, 8],
        [1, height, width],
        [1, width // 2, height * 2],
        [4, width // 2, height // 2],
    )
    if version == "0.28.0":  # which tells a connector nothing of a name that it has seen before
        others = others[:1]
    requests = [bare(known), *(bare(known, grid) for grid in others), bare(known)]
    for order in (requests, requests[::-1], requests[1:]):
        reply = asked.generate(order)
        expected = ["error" if r["grids"] != [GRID] else "length" for r in order]
        assert reasons(reply) == expected
        [right] = tokens(plain.generate([unnamed(known)]))
        assert [t for t in tokens(reply) if t] == [right] * expected.count("length")


def test_metadata_under_a_name_that_is_not_shared_fails_its_request(
    daemon: Daemon, asked: Engine
) -> None:
    names = ["renderer0-mm-1-image-0", "x" * 5000]
    requests = [{"text": "what", "uuids": [name], "grids": [GRID]} for name in names]
    assert reasons(asked.generate([*requests, WORDS])) == ["error", "error", "length"]


@pytest.mark.parametrize("encoder", ["producer", "both"])
@pytest.mark.parametrize("loss", ["evicted", "restarted"])
def test_what_left_ecd_comes_back_when_its_producer_is_asked_again(
    loss: str,
    encoder: str,
    daemon: Daemon,
    consumer: Engine,
    plain: Engine,
    request: pytest.FixtureRequest,
) -> None:
    engine: Engine = request.getfixturevalue(encoder)
    asked = named(2)
    expected = tokens(plain.generate([unnamed(asked)]))
    engine.generate([asked], max_tokens=1)
    eventually(lambda: daemon.status().entries == 2)
    if loss == "evicted":
        daemon.evict_all()
    else:
        anew(daemon)
    assert reasons(consumer.generate([bare(asked)])) == ["error"]

    def is_stored_again() -> bool:
        again = engine.generate([asked], max_tokens=1)
        assert again["encoded"] == 0, "it is in the engine's own cache"
        return daemon.status().entries == 2

    eventually(is_stored_again, 10, "a client opens its session a moment after the daemon did")
    assert any(entry.content.cost_s > 0 for entry in daemon.entries())
    reply = consumer.generate([bare(asked)])
    assert (tokens(reply), reply["encoded"]) == (expected, 0)


def test_what_a_producer_found_in_ecd_it_stores_again(
    daemon: Daemon, producer: Engine, both: Engine
) -> None:
    asked = named(1)
    assert both.generate([asked], max_tokens=1)["encoded"] == 1
    eventually(lambda: daemon.status().entries == 1)
    assert producer.generate([asked], max_tokens=1)["encoded"] == 0
    daemon.evict_all()
    assert producer.generate([asked], max_tokens=1)["encoded"] == 0
    eventually(lambda: daemon.status().entries == 1, what="it is stored again")


ENTRY_BYTES = 96 * 256  # of a picture of SIZE: 24 KiB


def test_what_is_announced_is_stored(daemon: Daemon, producer: Engine, version: str) -> None:
    """A consumer that is sent metadata has nothing else to make an embedding of."""
    tells = version != "0.28.0"  # which reads none from JSON
    one, more, again = named(1), named(3), named(2)
    producer.generate([named(1)], max_tokens=1)  # a daemon's first put goes by calls, maybe late
    eventually(lambda: daemon.status().entries == 1)
    assert announced(producer.generate([one], max_tokens=1)) == [tells]
    assert announced(producer.generate([more, one], max_tokens=1)) == [tells] * 4
    daemon.evict_all()
    assert announced(producer.generate([one], max_tokens=1)) == [tells], "it was stored again"

    with squeezed(daemon, ENTRY_BYTES - 4096):
        assert announced(producer.generate([named(1)], max_tokens=1)) == [False]
        assert announced(producer.generate([one], max_tokens=1)) == [False]
    with squeezed(daemon, 2 * ENTRY_BYTES):
        is_told = lambda: announced(producer.generate([named(1)], max_tokens=1)) == [tells]  # noqa: E731
        eventually(is_told, 10, "a put by a call may be answered late")
        assert announced(producer.generate([named(3)], max_tokens=1)) == [False] * 3

    daemon.kill()
    eventually(lambda: announced(producer.generate([again, one], max_tokens=1)) == [False] * 3)
    anew(daemon)
    eventually(lambda: announced(producer.generate([again, one], max_tokens=1)) == [tells] * 3, 10)


SLOWLY = changed(
    "import asyncio",
    "from ecd.live import LiveCache",
    "reserve, pauses = LiveCache._reserve, [0.5, 0.0]",
    "async def reserve_late(*about):",
    "    await asyncio.sleep(pauses.pop() if pauses else 0.06)",
    "    return await reserve(*about)",
    "LiveCache._reserve = reserve_late",
)
"""A daemon that answers the second of those that ask for memory too late for their step, and the
others, but for the first, later than the rest of a step takes, and in time."""


def test_a_save_that_was_answered_late_leaves_later_ones_to_be_announced(
    daemon: Daemon, producer: Engine, version: str
) -> None:
    tells = version != "0.28.0"
    daemon.command = SLOWLY
    try:
        with squeezed(daemon, 2 * ENTRY_BYTES):  # which asks first; each save asks, too
            assert announced(producer.generate([named(1)], max_tokens=1)) == [False]
            eventually(lambda: daemon.status().entries == 1)
            told = [announced(producer.generate([named(1)], max_tokens=1)) for _ in range(10)]
            assert [tells] in told
    finally:
        daemon.command = Daemon.command
        anew(daemon)


def test_the_counters_say_what_was_stored_and_what_was_missed(
    daemon: Daemon, producer: Engine, both: Engine, version: str
) -> None:
    if version == "0.28.0":
        pytest.skip("vLLM 0.28 asks no connector for its counters")
    producer.generate([WORDS], max_tokens=1)  # a save is counted with the step after it
    before = producer.metrics()
    asked = named(3)
    producer.generate([asked], max_tokens=1)
    eventually(lambda: daemon.status().entries == 3)

    def is_dropped() -> bool:
        producer.generate([WORDS], max_tokens=1)
        dropped = "dropped_saves"
        return producer.metrics().get(dropped, 0) > before.get(dropped, 0)

    with squeezed(daemon, ENTRY_BYTES - 4096):
        producer.generate([named(1)], max_tokens=1)
        eventually(is_dropped)
    counted = {name: value - before.get(name, 0) for name, value in producer.metrics().items()}
    assert counted["saves"] == 3
    assert counted["saved_bytes"] == 3 * ENTRY_BYTES
    assert counted["dropped_saves"] == 1
    assert counted["misses"] == 4

    before = both.metrics()
    assert both.generate([unnamed(asked)])["encoded"] == 3
    for _ in range(3):
        anew(daemon)
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


@pytest.mark.parametrize("merge", [by_name, by_key, unless_they_differ])
def test_the_answers_of_two_producers_are_merged(
    merge: Callable[[list[dict]], dict],
    daemon: Daemon,
    producer: Engine,
    consumer: Engine,
    both: Engine,
    plain: Engine,
    version: str,
) -> None:
    first, second, twice = named(1), named(1), named(1)
    producer.generate([named(1)], max_tokens=1)  # its first put goes by calls, and may be late
    both.generate([second], max_tokens=1)  # which waits for no answer of the daemon
    eventually(lambda: daemon.status().entries == 2)
    asked = [(producer, first), (both, second), (producer, twice), (both, twice)]
    replies = [
        engine.generate([request], max_tokens=1)["outputs"][0]["ec_transfer_params"]
        for engine, request in asked
    ]
    params = merge(replies)
    names = [*first["uuids"], *second["uuids"], *twice["uuids"]]
    assert sorted(params) == sorted(names), "no key is lost"
    images = [*first["images"], *second["images"], *twice["images"]]
    whole = {"text": "which picture is the other?", "images": images, "uuids": names}
    requests = [{**whole, "ec_transfer_params": params}]
    if version != "0.28.0":
        grids = [params[name]["metadata"]["image_grid_thw"] for name in names]
        requests.append({**requests[0], "images": [], "grids": grids})
    reply = consumer.generate(requests)
    assert tokens(reply) == tokens(plain.generate([unnamed(whole)])) * len(requests)
    assert reply["encoded"] == 0
