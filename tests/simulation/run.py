"""Runs scenarios, checks what must hold after every step, and shrinks a scenario that fails.

A simulation of the world beneath ecd's own code: no socket, no thread, no Redis, no Mooncake. Those
are tested with the real ones elsewhere (tests/cluster, tests/e2e). Here the interleavings are.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import NamedTuple
from unittest import mock

from simulation.clock import START_S, VirtualLoop
from simulation.disk import SimulatedThreads
from simulation.invariants import Watch
from simulation.scenario import Scenario
from simulation.world import Run

SCALE = {
    "ecd.base.checksum.PIECE_BYTES": 16 << 10,
    "ecd.cluster.deliveries.BYTES_WITH_LEASE": 2 << 10,
    "ecd.rpc.peer.inbound_link.BYTES_WITH_LEASE": 2 << 10,
    "ecd.cluster.deliveries.SPECULATIVE_BYTES": 64 << 10,
    "ecd.cluster.peers.link.SPECULATIVE_BYTES": 64 << 10,
    "ecd.rpc.peer.inbound_link.SPECULATIVE_BYTES": 64 << 10,
    "ecd.cluster.deliveries.READ_FIRST_BYTES": 16 << 10,
    "ecd.cluster.transport.read_queue.READ_BYTES": 32 << 10,
    "ecd.cluster.transport.transfers.LARGE_BYTES": 16 << 10,
    "ecd.memory.checksums.INLINE_BYTES": 16 << 10,
    "ecd.cluster.peers.rates.LEAST_BYTES": 4 << 10,
}
"""Sizes in the daemon, some fifty times smaller, as the entries here are."""


class Violation(Exception):
    """What must hold did not."""


class Result(NamedTuple):
    violation: str | None
    digest: str  # equal for two runs that went alike
    steps: int


class _Errors(logging.Handler):
    def __init__(self, run: Run) -> None:
        super().__init__(logging.ERROR)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._run.fail(f"logged: {record.getMessage()} {error!r}")


@contextmanager
def small(links: int = Scenario.links) -> Iterator[None]:
    """Have the daemon's sizes be those of SCALE, and its disk tier run on no threads.

    It takes so many links of peers.
    """
    patches = [mock.patch(name, value) for name, value in SCALE.items()]
    patches.append(mock.patch("ecd.rpc.peer.peer_service.MAX_LINKS", links))
    for part in ("disk_files", "disk_reads", "disk_writes"):
        patches.append(mock.patch(f"ecd.memory.disk.{part}.Threads", SimulatedThreads))
    patches.append(mock.patch("ecd.memory.disk.disk_files.gc"))  # freezing would keep every world
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def simulate(scenario: Scenario) -> Result:
    """Run one scenario; the result is the same each time."""
    rng = Random(scenario.seed + 2)
    loop = VirtualLoop(rng)
    asyncio.set_event_loop(loop)
    gc.disable()  # it would end tasks of dead daemons at any moment
    try:
        with small(scenario.links):
            return _simulate(loop, scenario)
    finally:
        loop.settled = None
        _abandon(loop)
        asyncio.set_event_loop(None)
        gc.enable()


def _simulate(loop: VirtualLoop, scenario: Scenario) -> Result:
    run = Run(loop, scenario)
    watch, digest, steps = Watch(run), hashlib.blake2b(digest_size=8), 0

    def settled() -> None:
        nonlocal steps
        steps += 1
        watch.check()
        run.violations += loop.errors
        if run.violations:
            raise Violation(f"{run.violations[0]} (at {loop.now_s - START_S:.4f} s)")
        digest.update(repr((loop.now_s, watch.figures)).encode())

    loop.settled = settled
    violation = None
    with _errors_of(run):
        try:
            loop.run_until_complete(run.run())
            settled()
        except Violation as error:
            violation = str(error)
    return Result(violation, digest.hexdigest(), steps)


@contextmanager
def _errors_of(run: Run) -> Iterator[None]:
    """What the daemon logs as an error is a violation."""
    logger, errors = logging.getLogger("ecd"), _Errors(run)
    level = logger.level
    logger.setLevel(logging.ERROR)
    logger.addHandler(errors)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(errors)
        logger.setLevel(level)


def _abandon(loop: VirtualLoop) -> None:
    """Forget a world. What its unfinished tasks do as they are collected is of no interest."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task._log_destroy_pending = False
    loop.close()
    if left:
        del task
        left.clear()
        logging.disable()
        with mock.patch.object(sys, "unraisablehook"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
        logging.disable(logging.NOTSET)


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """A scenario with as few actions as still fail (Zeller, IEEE TSE 28(2), 2002: ddmin)."""
    actions, parts = list(scenario.actions), 2
    while len(actions) >= 2:
        size = -(-len(actions) // parts)
        for start in range(0, len(actions), size):
            rest = actions[:start] + actions[start + size :]
            if fails(replace(scenario, actions=tuple(rest))):
                actions, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(actions):
                break
            parts = min(2 * parts, len(actions))
    return replace(scenario, actions=tuple(actions))
