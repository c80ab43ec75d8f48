"""Operations as an engine does them: now and then, between other work, on memory that is new.

A pause comes before each: 64 MiB of other memory written, then 5 ms of sleep. The source of a put
and the target of a copy are tensors made for it. Clients are made the default way, and torch has
one thread. Writer and reader are two processes at the same time, and each key is read once. Plain
copies have the same pauses and tensors: into touched shared memory for a put, from there to a new
tensor for a private copy (page faults included), between touched tensors for the rest.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections import defaultdict
from collections.abc import Callable
from ctypes import Array, c_int64
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from statistics import median

import torch
from common import MIB, PLAIN, PLAIN_WRITER, SIZES, shared_memory
from peers import ALONE, PEERS, Peer, run_for
from rich.console import Console

PAUSE_BYTES, PAUSE_S = 64 * MIB, 0.005
SMALL_BYTES = 64 << 10
PLAIN_NEW = f"{PLAIN}, new tensor"
PLAIN_SMALL = f"{PLAIN} of 64 KiB"
INTO = "get, into touched memory"
AT_ONCE = "handle at once after the put"
PUT_TO_HANDLE = "put to handle"
FIRST_PROCESSES = 5
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
READY, RETURNED = 0, 1
"""Words that writer and reader share: the round that the reader is ready for, the last put's."""
Took = defaultdict[str, list[float]]

_other = torch.zeros(PAUSE_BYTES, dtype=torch.uint8)


def settle() -> None:
    """Let torch have one thread, and large new tensors new pages whatever was freed before."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)


def pause() -> None:
    _other.fill_(1)
    time.sleep(PAUSE_S)


def timed(action: Callable[[], object]) -> float:
    """Microseconds, without the end of what the action returns."""
    started = time.perf_counter()
    result = action()
    took_us = (time.perf_counter() - started) * 1e6
    del result
    return took_us


def fresh(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


def plain_copy(target: torch.Tensor) -> float:
    source = fresh(target.nbytes)
    pause()
    return timed(lambda: target.copy_(source))


def plain_clone(source: torch.Tensor) -> float:
    pause()
    return timed(source.clone)


def write(client: Peer, keys: list[str], nbytes: int) -> Took:
    """Put each of the keys once, from a new tensor."""
    took: Took = defaultdict(list)
    target = shared_memory(nbytes).fill_(1)
    for key in keys:
        took[PLAIN_WRITER].append(plain_copy(target))
        source = fresh(nbytes)
        pause()
        took["put"].append(timed(lambda k=key, s=source: client.put(k, s)))
        client.tidy()
    return took


def read(client: Peer, keys: list[str], nbytes: int) -> Took:
    """Get each of the keys: by turns into a new tensor and into a touched one."""
    took: Took = defaultdict(list)
    source = shared_memory(nbytes).fill_(1)
    for number, key in enumerate(keys):
        took[PLAIN_SMALL].append(plain_copy(fresh(SMALL_BYTES)))
        for name, action in (("contains", client.contains), ("get, handle", client.hold)):
            if action is not None:
                pause()
                took[name].append(timed(partial(action, key)))
        if number % 2 or not client.into:
            took[PLAIN_NEW].append(plain_clone(source))
            pause()
            took["get, private copy"].append(timed(partial(client.fresh, key)))
        else:
            took[PLAIN].append(plain_copy(fresh(nbytes)))
            target = fresh(nbytes)
            pause()
            took[INTO].append(timed(partial(client.copy, key, target)))
    return took


def look(client: Peer, keys: list[str], words: Array[c_int64]) -> tuple[list[float], list[float]]:
    """Wait by turns for a key, and for its put's return.

    When the handles of the first kind were there, in seconds; what the others took.
    """
    hold = client.hold
    assert hold is not None
    seen_s, took_us = [], []
    for number, key in enumerate(keys, 1):
        if number % 2:
            words[READY] = number
            while (held := client.look(key)) is None:
                pass
            seen_s.append(time.monotonic())
            del held
        else:
            pause()
            words[READY] = number
            while words[RETURNED] < number:
                pass
            took_us.append(timed(partial(hold, key)))
    return seen_s, took_us


def race(
    client: Peer, keys: list[str], nbytes: int, words: Array[c_int64], process: SpawnProcess
) -> list[float]:
    """Put each of the keys when the reader is ready; when the puts began that it waits for."""
    began_s = []
    for number, key in enumerate(keys, 1):
        source = fresh(nbytes)
        while words[READY] < number:
            assert process.is_alive(), "the reader has failed"
            time.sleep(0.001)
        pause()
        began_s.append(time.monotonic())
        client.put(key, source)
        words[RETURNED] = number
        client.tidy()
    return began_s[::2]


def reader(
    peer: str,
    place: str,
    nbytes: int,
    keys: list[str],
    races: list[str],
    words: Array[c_int64],
    pipe: Connection,
) -> None:
    """The second process, from the first read to the last handle."""
    settle()
    client = PEERS[peer](place, nbytes)
    pipe.send(read(client, keys, nbytes))
    if races:
        pipe.send(look(client, races, words))
    pipe.recv()


def live(peer: str, place: str, nbytes: int, rounds: int, turn: int) -> dict[str, float]:
    """Puts; then another process's gets of what is still there; then both at the same time."""
    settle()
    client = PEERS[peer](place, nbytes)
    keys = [f"{turn}-{number}" for number in range(rounds)]
    took = write(client, keys, nbytes)
    here = [key for key in keys if client.contains(key)]
    assert here, f"{peer} has kept nothing"
    if peer == ALONE:  # nobody else can get what it keeps
        took |= read(client, here, nbytes)
    else:
        processes = get_context("spawn")
        pipe, theirs = processes.Pipe()
        words = processes.RawArray("q", 2)
        races = [f"{key}-race-{way}" for key in keys for way in "ab" if client.hold is not None]
        arguments = (peer, place, nbytes, here, races, words, theirs)
        process = processes.Process(target=reader, args=arguments, daemon=True)
        process.start()
        theirs.close()
        took |= pipe.recv()
        if races:
            began_s = race(client, races, nbytes, words, process)
            seen_s, took[AT_ONCE] = pipe.recv()
            both = zip(began_s, seen_s, strict=True)
            took[PUT_TO_HANDLE] = [(seen - began) * 1e6 for began, seen in both]
        pipe.send(None)
        process.join()
    return {name: median(values) for name, values in took.items()}


def first(peer: str, place: str, verb: str, key: str) -> dict[str, float]:
    """A client and one operation of it, in a process that has only imported."""
    settle()
    for module in PEERS[peer].needs:
        importlib.import_module(module)
    source = fresh(SMALL_BYTES)
    pause()
    started = time.perf_counter()
    client = PEERS[peer](place, SMALL_BYTES)
    made_us = (time.perf_counter() - started) * 1e6
    if verb == "get" and peer == ALONE:
        client.put(key, source)
    pause()
    action = (lambda: client.put(key, source)) if verb == "put" else (lambda: client.fresh(key))
    return {"client made": made_us, f"first {verb}": timed(action)}


def measure_first(peer: str, place: str, progress: Console) -> dict[str, float]:
    """Medians over processes that each do one operation, in microseconds."""
    progress.print(f"{peer}, first operation ...")
    took: Took = defaultdict(list)
    for verb in ("put", "get"):
        for number in range(FIRST_PROCESSES):
            one = run_for(peer, "life", "first", peer, place, verb, f"first-{number}")
            for name, took_us in one.items():
                took[name].append(took_us)
    return {name: median(values) for name, values in took.items()}


def measure(
    peer: str, place: str, rounds: int, processes: int, progress: Console
) -> dict[str, dict[str, float]]:
    """By size, the medians over some pairs of processes, in microseconds."""
    results = {}
    for name, nbytes in SIZES.items():
        progress.print(f"{peer}, {name}, life ...")
        turns = [
            run_for(peer, "life", "live", peer, place, nbytes, rounds, turn)
            for turn in range(processes)
        ]
        results[name] = {key: median(each[key] for each in turns) for key in turns[0]}
    return results
