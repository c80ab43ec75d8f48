"""Loops over warm code and memory: what an operation costs in a process that does nothing else.

Clients have prepared what a process that lives long may. Every round times a plain copy and the
operation one after the other, over buffers that rotate, so that neither finds its bytes in the
processor's caches; what copies nothing is timed in a loop of its own.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch
from common import MIB, PLAIN, PLAIN_WRITER, SIZES, shared_memory, timed_us
from peers import ALONE, WARM, run_for
from rich.console import Console

RING_BYTES = 512 * MIB
SHORT_ROUNDS = 400
"""Of what copies nothing."""


class Ring:
    """Buffers in turn, more of them than the caches hold."""

    def __init__(self, nbytes: int, shared: bool = False) -> None:
        count = max(2, RING_BYTES // nbytes)
        if shared:
            self._buffers = list(shared_memory(count * nbytes).split(nbytes))
        else:
            self._buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
        for number, buffer in enumerate(self._buffers):
            buffer.fill_(number % 251)
        self._next = 0

    def take(self) -> torch.Tensor:
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next]


def rounds_of(rounds: int, nbytes: int) -> int:
    return max(20, rounds // max(1, nbytes // MIB))


def write(peer: str, place: str, nbytes: int, rounds: int, turn: int) -> dict[str, float]:
    """Puts, each with a plain copy before it."""
    torch.set_num_threads(1)
    client = WARM[peer](place, nbytes)
    time.sleep(2.0)  # page tables fill in the background
    sources, targets = Ring(nbytes), Ring(nbytes, shared=True)
    copies, puts = [], []
    for index in range(rounds_of(rounds, nbytes)):
        target, source = targets.take(), sources.take()
        copies.append(timed_us(lambda t=target, s=source: t.copy_(s)))
        source = sources.take()
        puts.append(timed_us(lambda i=index, s=source: client.put(f"{turn}-{i}", s)))
        client.tidy()
    return {PLAIN_WRITER: median(copies), "put": median(puts)}


def read(peer: str, place: str, nbytes: int, rounds: int, turn: int) -> dict[str, float]:
    """Read the entries of this turn's writer, in the order of its last puts."""
    torch.set_num_threads(1)
    client = WARM[peer](place, nbytes)
    total = rounds_of(rounds, nbytes)
    if peer == ALONE:  # nobody else can get what it keeps
        for index in range(total):
            client.put(f"{turn}-{index}", torch.full((nbytes,), index % 251, dtype=torch.uint8))
    here = [key for i in range(total) if client.contains(key := f"{turn}-{i}")][-200:]
    assert here, f"{peer} has kept nothing"
    time.sleep(2.0)
    sources, targets = Ring(nbytes), Ring(nbytes)
    took: dict[str, list[float]] = {PLAIN: [], "get, private copy": []}
    for step in range(total):
        key = here[step % len(here)]
        target, source = targets.take(), sources.take()
        took[PLAIN].append(timed_us(lambda t=target, s=source: t.copy_(s)))
        target = targets.take()
        took["get, private copy"].append(timed_us(lambda k=key, t=target: client.copy(k, t)))
    for name, action in (("get, handle", client.hold), ("contains", client.contains)):
        if action is not None:
            keys = (here * SHORT_ROUNDS)[:SHORT_ROUNDS]
            took[name] = [timed_us(partial(action, key)) for key in keys]
    return {name: median(values) for name, values in took.items()}


def measure(
    peer: str, place: str, rounds: int, processes: int, progress: Console
) -> dict[str, dict[str, float]]:
    """By size, the medians over some writers and readers, in microseconds."""
    results = {}
    for name, nbytes in SIZES.items():
        progress.print(f"{peer}, {name}, warm ...")
        turns = []
        for turn in range(processes):
            written = run_for(peer, "warm", "write", peer, place, nbytes, rounds, turn)
            turns.append(written | run_for(peer, "warm", "read", peer, place, nbytes, rounds, turn))
        results[name] = {key: median(each[key] for each in turns) for key in turns[0]}
    return results
