"""What memory evicts is read back from disk: one that fails, hangs or is slow, in virtual time."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from ecd.memory.disk.disk_files import EXPIRY_S
from ecd.memory.disk.disk_limits import FAILURES, HALVED_IN_S, REST_S
from ecd.memory.disk.disk_reads import PATIENCE_S
from ecd_proto.contract import Hint
from ecd_proto.v1 import cache_pb2 as pb
from simulation.acts import Act, Engine, has, play, slow_events, store
from simulation.client import Client
from simulation.scenario import SIZES, key_of
from simulation.world import Run

DISK_S, MOMENT_S, TTL_S = 0.001, 0.01, 60.0
LEFT = 1
"""A key that costs a twentieth of a second to encode."""
NUMBERS = range(len(SIZES))
EIO, ENOSPC = OSError(errno.EIO, "a bad block"), OSError(errno.ENOSPC, "no space left")


def play_on_disk(nodes: int, act: Act, **about: Any) -> None:
    """Have nodes act that have 140 KiB of memory, too little for the keys, and a disk."""
    calm = {"pool_bytes": 140 << 10, "disk_s": (DISK_S, DISK_S), "directory": "none"}
    play(nodes, act, **{**calm, **about})


async def fill(run: Run, node: int = 0) -> list[int]:
    """Store all keys: those that are on disk alone then."""
    for number in NUMBERS:
        await store(run, node, number)
        await asyncio.sleep(0.5)
    daemon = run.daemons[node]
    away = [
        n for n in NUMBERS if daemon.has(key_of(n)) and not daemon.cache.views.contains(key_of(n))
    ]
    assert len(away) > FAILURES
    return away


def disk_of(run: Run, node: int = 0) -> pb.DiskStatus:
    return run.daemons[node].disk.status()


def slow(run: Run, seconds: float) -> None:
    """Have each operation of a disk that begins from now on take so long."""
    run.loop.disk_range_s = seconds, seconds


def test_a_disk_that_fails_to_read_rests_for_half_a_minute() -> None:
    async def act(run: Run) -> None:
        away, engine = await fill(run), Engine(run, 0)
        run.places[0].disk.read_error = EIO
        for number in away[:FAILURES]:
            assert not disk_of(run).reads_rest
            assert (await engine.ask(number)).outcome == "missing"
        began_s = run.loop.now_s
        assert disk_of(run).reads_rest
        assert (await engine.ask(away[FAILURES])).outcome == "missing"
        assert disk_of(run).failures["read"] == FAILURES, "it is not read"
        run.places[0].disk.read_error = None
        await asyncio.sleep(REST_S - 0.1 - (run.loop.now_s - began_s))
        assert (await engine.ask(away[0])).outcome == "missing"
        await asyncio.sleep(0.2)
        assert (await engine.ask(away[0])).outcome == "leased", "its files stay"

    play_on_disk(1, act)


@pytest.mark.parametrize("fetch_timeout_s", [5.0, 0.3])
def test_a_disk_that_hangs_rests(fetch_timeout_s: float) -> None:
    """Though its flights may end sooner."""

    async def act(run: Run) -> None:
        away, engine = await fill(run), Engine(run, 0)
        slow(run, 100.0)
        expected_s = min(PATIENCE_S, fetch_timeout_s)
        for number in away[:FAILURES]:
            outcome, took_s = await engine.ask(number)
            assert (outcome, took_s) == ("missing", pytest.approx(expected_s, abs=MOMENT_S))
        await asyncio.sleep(PATIENCE_S - expected_s)
        assert disk_of(run).reads_rest
        assert disk_of(run).failures["slow"] == FAILURES
        assert (await engine.ask(away[FAILURES])).took_s < MOMENT_S
        assert run.daemons[0].pool.reserved_bytes > 0, "set aside until the reads return"
        await asyncio.sleep(100.0)
        assert run.daemons[0].pool.reserved_bytes == 0

    play_on_disk(1, act, fetch_timeout_s=fetch_timeout_s)


@pytest.mark.parametrize(("error", "kind"), [(EIO, "write"), (ENOSPC, "full")])
def test_a_disk_that_takes_no_writes_rests_for_half_a_minute(error: OSError, kind: str) -> None:
    async def act(run: Run) -> None:
        engine, disk = Engine(run, 0), run.places[0].disk
        disk.write_error = error
        for number in NUMBERS[:-1]:
            await store(run, 0, number)
            assert (await engine.ask(number)).outcome == "leased", "memory serves"
            await asyncio.sleep(0.5)
        assert disk_of(run).writes_rest
        assert disk_of(run).failures[kind] <= FAILURES + 1, "two write at one time"
        assert (disk_of(run).entries, disk_of(run).used_bytes) == (0, 0)
        disk.write_error = None
        await asyncio.sleep(REST_S)
        assert not disk_of(run).writes_rest
        assert await fill(run)

    play_on_disk(1, act)


async def learn_that_it_is_slow(run: Run, *nodes: int) -> int:
    """Have engines that cannot encode read from the disks of these nodes; a key that is left."""
    for node in nodes:
        away = await fill(run, node)
        slow(run, 0.5)
        for number in set(away) - {LEFT}:
            answer = await Engine(run, node).ask(number, only_if_written=False)
            assert answer == ("leased", pytest.approx(0.5, abs=MOMENT_S))
        slow(run, DISK_S)
        assert LEFT in away
    slow(run, 0.5)
    return LEFT


def test_a_slow_disk_is_not_read_where_encoding_is_quicker() -> None:
    async def act(run: Run) -> None:
        number, engine = await learn_that_it_is_slow(run, 0), Engine(run, 0)
        outcome, took_s = await engine.ask(number, makes_s=0.0)
        assert outcome == "missing"
        assert took_s < MOMENT_S
        assert disk_of(run).skipped["slower"] == 1
        await asyncio.sleep(5 * HALVED_IN_S)
        slow(run, DISK_S)
        assert (await engine.ask(number, makes_s=0.0)).outcome == "leased", "it is tried again"

    play_on_disk(1, act)


def test_two_nodes_with_the_same_key_on_disk_do_not_wait_for_each_other() -> None:
    """Both are asked for it at once by engines that encode sooner than it is read."""

    async def act(run: Run) -> None:
        number = await learn_that_it_is_slow(run, 0, 1)
        asks = [Engine(run, node).ask(number, makes_s=0.0, wait_s=60.0) for node in range(2)]
        for outcome, took_s in await asyncio.gather(*asks):
            assert outcome == "missing"
            assert took_s < MOMENT_S

    play_on_disk(2, act, directory="static")


def test_a_slow_read_is_in_the_slow_log_with_what_it_waited_for() -> None:
    async def act(run: Run) -> None:
        [number, *_], engine = await fill(run), Engine(run, 0)
        slow(run, 0.2)
        assert await engine.ask(number) == ("leased", pytest.approx(0.2, abs=MOMENT_S))
        [event] = await slow_events(engine, "disk_read")
        said = event.mm_hash, event.nbytes, event.outcome
        assert said == (key_of(number).mm_hash, SIZES[number], "read_from_disk")
        assert event.stages["disk"] == pytest.approx(0.2, abs=MOMENT_S)
        assert event.seconds == pytest.approx(0.2, abs=MOMENT_S)

    play_on_disk(1, act)


def test_what_is_too_old_leaves_memory_and_disk() -> None:
    """Each is stored half a second after the one before."""

    async def act(run: Run) -> None:
        begun_s = run.loop.now_s
        away = await fill(run)
        there = [number for number in NUMBERS if has(run, number)]
        await asyncio.sleep(TTL_S - MOMENT_S - (run.loop.now_s - begun_s))
        assert [number for number in NUMBERS if has(run, number)] == there
        await asyncio.sleep(0.5 * len(NUMBERS) + EXPIRY_S)
        assert not any(has(run, number) for number in NUMBERS)
        assert disk_of(run).expired >= len(away)
        assert not run.places[0].disk.names()

    play_on_disk(1, act, settings={"namespace_ttls": {"n": TTL_S}})


@pytest.mark.parametrize("directory", ["static", "redis"])
def test_an_entry_on_the_disk_of_a_node_is_found_and_fetched(directory: str) -> None:
    """Redis knows what lies in memory: a hint leads to the others."""

    async def act(run: Run) -> None:
        away, engine, hints = await fill(run), Engine(run, 1), [Hint(run.places[0].node)]
        for count, number in enumerate(away):
            reply, _ = await engine.locate(key_of(number))
            assert len(reply.located[0].holders) == (directory == "static")
            assert (await engine.ask(number, hints=hints)).outcome == "leased"
            assert disk_of(run).reads == count + 1
        for node in (0, 1):
            await Client(run, node).evict(None)
        assert (await engine.ask(away[0], hints=hints)).outcome == "missing", "it is erased"

    play_on_disk(2, act, directory=directory)
