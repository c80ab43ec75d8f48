"""Several engines that need one new picture at one time: one of them encodes it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from e2e.engines import Engine
from e2e.gates import Gate
from e2e.shared import AND_NEXT, PATIENT, Pictures, Plain, constants, tokens
from ecd_client import Client, PoolFull
from ecd_client.item import Item
from ecd_proto.contract import MAKING_S
from support.daemon import Daemon
from support.waiting import HANG_S, stopped

pytestmark = [pytest.mark.timeout(600), AND_NEXT]
Pair = tuple[Engine, Engine]
HASTY = {
    "scheduler__encodes__MAKING_S": MAKING_S,
    "scheduler__encodes__TIMES_WAITED": MAKING_S / PATIENT["ecd_load_timeout_s"],
    "scheduler__encodes__RESTS_S": 10 * HANG_S,
}
"""An engine waits for another for a while, and then no more within the test."""


@pytest.fixture
def pair(shared: Callable[..., Engine]) -> Iterator[Pair]:
    """Two engines that wait for each other for longer than a test lasts, unless it sets that."""
    pair = tuple(shared("ec_both", which, enable_mm_embeds=True) for which in range(2))
    with constants(*pair, scheduler__encodes__MAKING_S=10 * HANG_S):
        yield pair


def awaited(pair: Pair, in_vain: bool = False) -> int:
    name = "awaited_in_vain" if in_vain else "awaited"
    return sum(engine.metrics().get(name, 0) for engine in pair)


@pytest.mark.parametrize("each", [1, 4])
def test_of_several_requests_for_a_new_picture_one_encodes_it(
    each: int, daemon: Daemon, pair: Pair, plain: Plain, new: Pictures, gate: Gate
) -> None:
    """The others wait for it, and their engine counts the item once."""
    before = awaited(pair)
    image = new.image()
    some = [{"text": f"what is in picture {n}?", "images": [image]} for n in range(each)]
    expected = tokens(plain.generate(some))
    one, other = pair
    one.send({"do": "generate", "requests": some, "gate": str(gate.path)})
    gate.await_seen(here=1)
    other.send({"do": "generate", "requests": some, "gate": str(gate.path)})
    gate.await_seen(here=1, waiting=1)
    gate.open()
    replies = [engine.receive() for engine in pair]
    assert [tokens(reply) for reply in replies] == [expected, expected]
    assert [reply["encoded"] for reply in replies] == [1, 0]
    assert awaited(pair) == before + 1


def test_pictures_in_another_order_make_nobody_wait_for_another(
    daemon: Daemon, pair: Pair, plain: Plain, new: Pictures, gate: Gate
) -> None:
    """Engines that waited for each other would do so for longer than a reply is waited for."""
    request = new.request(3)
    turned = {**request, "images": request["images"][::-1]}
    expected = [tokens(plain.generate([each])) for each in (request, turned)]
    one, other = pair
    one.send({"do": "generate", "requests": [request], "gate": str(gate.path)})
    gate.await_seen(here=1)
    other.send({"do": "generate", "requests": [turned], "gate": str(gate.path)})
    gate.await_seen(here=1, waiting=1)
    gate.open()
    replies = [engine.receive() for engine in pair]
    assert [tokens(reply) for reply in replies] == expected
    assert sum(reply["encoded"] for reply in replies) == 3


def test_an_engine_killed_while_it_encodes_is_waited_for_no_more(
    daemon: Daemon,
    pair: Pair,
    plain: Plain,
    new: Pictures,
    gate: Gate,
    start_engine: Callable[..., Engine],
) -> None:
    requests = new.requests(1)
    killed = start_engine("ec_both")
    killed.send({"do": "generate", "requests": requests, "gate": str(gate.path)})
    gate.await_seen(here=1)
    pair[0].send({"do": "generate", "requests": requests, "gate": str(gate.path)})
    gate.await_seen(here=1, waiting=1)
    killed.kill()
    gate.open()
    reply = pair[0].receive()
    assert reply["encoded"] == 1
    assert tokens(reply) == tokens(plain.generate(requests))


def test_a_stopped_engine_is_waited_for_a_while(
    daemon: Daemon, pair: Pair, plain: Plain, new: Pictures, gate: Gate
) -> None:
    one, other = pair
    before = awaited(pair, in_vain=True)
    requests = new.requests(1)
    expected = tokens(plain.generate(requests))
    one.send({"do": "generate", "requests": requests, "gate": str(gate.path)})
    gate.await_seen(here=1)
    with constants(other, **HASTY), stopped(one.pid):
        reply = other.generate(requests)
        assert (tokens(reply), reply["encoded"]) == (expected, 1)
    gate.open()
    assert tokens(one.receive()) == expected
    assert awaited(pair, in_vain=True) == before + 1


def filled(client: Client) -> Iterator[Item]:
    """Entries that fill the pool to the last granule, held: nothing can be evicted for another."""
    numbers = itertools.count()
    for nbytes in (1 << 20, 1 << 16, 1 << 12):
        with contextlib.suppress(PoolFull):
            while True:
                key = f"filling {next(numbers)}"
                client.put(key, torch.zeros(nbytes, dtype=torch.uint8))
                if item := client.get(key):
                    yield item


def test_nobody_waits_again_and_again_where_nothing_can_be_stored(
    daemon: Daemon, pair: Pair, plain: Plain, new: Pictures
) -> None:
    before = awaited(pair, in_vain=True)
    with constants(*pair, **HASTY), Client(daemon.address, namespace="filled") as client:
        held = list(filled(client))
        for _ in range(5):
            requests = new.requests(1)
            for engine in pair:
                engine.send({"do": "generate", "requests": requests})
            expected = tokens(plain.generate(requests))
            assert [tokens(engine.receive()) for engine in pair] == [expected, expected]
        assert all(item.tensor is not None for item in held)
        for item in held:
            item.close()
    assert awaited(pair, in_vain=True) - before <= len(pair), "each waits in vain but once"
