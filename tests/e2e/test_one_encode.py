"""Several engines that need one new picture at one time: one of them encodes it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from e2e.engines import Engine
from e2e.test_one_node import tokens
from ecd_client import Client, PoolFull
from ecd_client.item import Item
from ecd_proto.contract import MAKING_S
from support.daemon import Daemon, eventually

pytestmark = pytest.mark.timeout(600)
SLOW_S = 0.25
"""An encoding that takes as long as that of a large picture: requests come in meanwhile."""
PAUSE_S = 11.0
"""More than an engine rests after it has waited in vain."""
seeds = itertools.count(9000)


def new(count: int = 1) -> list[list[int]]:
    """Pictures that nobody has seen."""
    return [[336, 224, next(seeds)] for _ in range(count)]


def ask(*images: list[int], text: str = "what is in this picture?") -> dict:
    return {"text": text, "images": list(images)}


@pytest.fixture(scope="module")
def started(shared_daemon: Daemon) -> Daemon:
    return shared_daemon.start()


@pytest.fixture(scope="module")
def engines(started: Daemon, start_engine: Callable[..., Engine]) -> tuple[Engine, Engine]:
    pair = start_engine("ec_both"), start_engine("ec_both")
    for engine in pair:  # each has encoded once: the first time takes long
        engine.generate([ask(*new())])
    return pair


@pytest.fixture
def serving(started: Daemon, engines: tuple[Engine, Engine]) -> Iterator[Client]:
    """The engines with an empty daemon; a client of it."""
    started.close()
    started.start()
    started.wait_for_clients(4)
    with Client(started.address) as client:
        yield client


def holds_three_times(holds: Callable[[], bool]) -> None:
    """After a wait in vain, as a slow machine may have, an engine waits for nobody for a while."""
    held = 0
    for _ in range(6):
        if holds():
            held += 1
            if held == 3:
                return
        else:
            time.sleep(PAUSE_S)
    raise AssertionError(f"{held} of six times")


def at_once(engines: tuple[Engine, ...], *requests: list[dict], **options: object) -> list[dict]:
    for engine, some in zip(engines, requests, strict=True):
        engine.send({"do": "generate", "requests": some, "encode_s": SLOW_S, **options})
    return [engine.receive() for engine in engines]


def are_right(plain: Engine, replies: list[dict], *requests: list[dict]) -> bool:
    return all(
        tokens(reply) == tokens(plain.generate(some))
        for reply, some in zip(replies, requests, strict=True)
    )


def test_of_eight_requests_for_a_new_picture_one_encodes_it(
    serving: Client, engines: tuple[Engine, Engine], plain: Engine
) -> None:

    def is_encoded_once() -> bool:
        [image] = new()
        some = [ask(image, text=f"what is in picture {number}?") for number in range(4)]
        replies = at_once(engines, some, some)
        assert are_right(plain, replies, some, some)
        return sum(reply["encoded"] for reply in replies) == 1

    holds_three_times(is_encoded_once)


def test_pictures_in_another_order_make_nobody_wait_for_another(
    serving: Client, engines: tuple[Engine, Engine], plain: Engine
) -> None:

    def is_each_encoded_once() -> bool:
        one, two, three = new(3)
        first, second = [ask(one, two, three)], [ask(three, two, one)]
        replies = at_once(engines, first, second)
        assert all(reply["seconds"] < 3 * SLOW_S + 3 * MAKING_S for reply in replies)
        assert are_right(plain, replies, first, second)
        return sum(reply["encoded"] for reply in replies) == 3

    holds_three_times(is_each_encoded_once)


def awaited(engines: tuple[Engine, Engine]) -> int:
    return sum(engine.metrics().get("awaited", 0) for engine in engines)


def test_an_item_that_is_waited_for_is_counted(
    serving: Client, engines: tuple[Engine, Engine], version: str
) -> None:
    counts = version != "0.28.0"  # which takes no counters of a connector

    def is_counted() -> bool:
        before = awaited(engines)
        [image] = new()
        at_once(engines, [ask(image)], [ask(image)])
        return awaited(engines) == before + counts

    holds_three_times(is_counted)


def test_an_engine_killed_while_it_encodes_is_waited_for_no_more(
    serving: Client,
    engines: tuple[Engine, Engine],
    plain: Engine,
    start_engine: Callable[..., Engine],
) -> None:
    [image] = new()
    killed = start_engine("ec_both").wait_ready()
    killed.send({"do": "generate", "requests": [ask(image)], "encode_s": 60.0})
    eventually(lambda: any_lock(serving), 30, "the engine encodes")
    engines[0].send({"do": "generate", "requests": [ask(image)]})
    time.sleep(0.3)
    os.kill(killed._process.pid, signal.SIGKILL)
    began_s = time.monotonic()
    reply = engines[0].receive()
    assert time.monotonic() - began_s < MAKING_S
    assert reply["encoded"] == 1
    assert are_right(plain, [reply], [ask(image)])
    killed._ready = False  # its end is an error


def any_lock(client: Client) -> bool:
    """Whether any client has locked a key of its daemon."""
    session = client._connection.session()
    found = Path("/proc/locks").read_text()
    return found.count("OFDLCK") > 0 and _locks_of(session.key_locks._fd, found)


def _locks_of(fd: int, found: str) -> bool:
    inode = os.fstat(fd).st_ino
    mine = [line.split() for line in found.splitlines() if f":{inode} " in line]
    return any(int(fields[-2]) >= 1 << 62 for fields in mine)


def test_a_stopped_engine_is_waited_for_a_while(
    serving: Client, engines: tuple[Engine, Engine], plain: Engine
) -> None:
    stopped, other = engines
    [image] = new()
    stopped.send({"do": "generate", "requests": [ask(image)], "encode_s": 3.0})
    eventually(lambda: any_lock(serving), 10, "the engine encodes")
    os.kill(stopped._process.pid, signal.SIGSTOP)
    try:
        reply = other.generate([ask(image)])
        assert reply["encoded"] == 1
        assert reply["seconds"] < MAKING_S + 2
        assert are_right(plain, [reply], [ask(image)])
    finally:
        os.kill(stopped._process.pid, signal.SIGCONT)
    assert are_right(plain, [stopped.receive()], [ask(image)])


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
    serving: Client, engines: tuple[Engine, Engine], plain: Engine
) -> None:
    held = list(filled(serving))
    waited = 0
    for _ in range(5):
        [image] = new()
        replies = at_once(engines, [ask(image)], [ask(image)])
        assert are_right(plain, replies, [ask(image)], [ask(image)])
        waited += sum(reply["seconds"] > MAKING_S + SLOW_S for reply in replies)
    assert waited <= len(engines), "each waits in vain at most once in ten seconds"
    assert all(item.tensor is not None for item in held)
