"""Engines that save and load by DMA while the daemon evicts and reuses as fast as it can.

    python tests/support/cuda/dma_stress.py [--kind KIND] [--seconds 60] [--without RULE]

Runs on the stand-in for CUDA's driver, whose copies are late and in two halves, or the first two
kinds on a GPU (ECD_TEST_CUDA=device), where a fault ends a process. Four processes compare every
byte that they get; their sessions break off, and some processes are killed. Kinds:

engines  all of them encode, put and get on GPUs, with copies of 1.5 ms
near     as engines, on one GPU that has a device pool
slow     two have GPUs, with copies of 60 ms; the other two put and get by the CPU, so that what a
         slow copy reads or writes is evicted and reused meanwhile, if it can be
doomed   as slow; the two with GPUs are killed in the middle of a save, which outlives them

With a rule of docs/gpu-rules.md taken out, or a step of the argument for copies in device pools,
the run must find wrong bytes or a fault of the device: that it does is what makes the other runs
worth something. Prints one line of JSON; exits with 0 if no byte was wrong and nothing leaked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.warm import Interpreter

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from support.waiting import HANG_S

RULES = {
    **dict.fromkeys(("W1", "W2", "W3", "R3", "R4"), "engines"),
    **dict.fromkeys(("R1", "R2"), "slow"),
}
"""The rules, each with the kind of run that shows what it is for. D1 has tests of its own."""
COPY_STEPS = ("hide", "scan", "pin")
"""What the daemon does before it reuses a copy's memory, and a reader before it reads there."""
ORIGIN_STEPS = ("copies", "original")
"""What the daemon does so that a copy is of the key's entry: `tests/gpu/scenarios.py` needs them.

It evicts an entry's copies with the entry, and commits none whose original has gone.
"""
KINDS = {"engines": 1500, "near": 1500, "slow": 60_000, "doomed": 60_000}
"""Time of each operation of the stand-in, in us."""
LATE_KINDS = "slow", "doomed"
"""Those that only the stand-in shows."""
KEYS = 40
SIZES = (4096, 16384, 65536, 262144)
POOLS = {"engines": "2MiB", "near": "3MiB", "slow": "2MiB", "doomed": "6MiB"}
"""So small that what is evicted is reused at once; the dead hold a part of it for a while."""
LATE = 4
"""Loads that a process has under way before it compares the first of them."""


# -- the daemon ------------------------------------------------------------------------------------


def run_daemon(without: str) -> None:
    from ecd.__main__ import main
    from ecd.core.cache import Cache
    from ecd.core.entries import Entries
    from ecd.memory.checksums import Checksums
    from ecd.memory.shared_index import SharedIndex
    from ecd.rpc.cache.attach import DmaProcesses
    from ecd.rpc.cache.sessions import SessionStreams

    if until := os.environ.get("DMA_GRACE_UNTIL"):
        may_copy = DmaProcesses.may_copy
        DmaProcesses.may_copy = lambda *about: may_copy(*about) or not os.path.exists(until)
    if without == "D1":  # memory is taken back as soon as the lock is free
        SessionStreams._may_copy = lambda self, session: False
    hide, show, pinned = SharedIndex.hide, SharedIndex.show, SharedIndex.pinned
    if without == "hide":  # a copy's row stays until the next entry has one
        late = []

        def show_then_hide(self, info) -> None:
            show(self, info)
            while late:
                hide(self, *late.pop())

        def hide_late(self, entry, key, replica_in: int = 0) -> None:
            late.append((entry, key, replica_in)) if replica_in else hide(self, entry, key)

        SharedIndex.show, SharedIndex.hide = show_then_hide, hide_late
    if without == "scan":  # pins of copies are not seen
        copies = set()

        def show_and_note(self, info) -> None:
            show(self, info)
            if info.replica_in:
                copies.add(info.entry)

        def pinned_originals(self, live, starts):
            for portion in pinned(self, live, starts):
                yield portion._replace(pinned=portion.pinned - copies)

        SharedIndex.show, SharedIndex.pinned = show_and_note, pinned_originals
    if without == "copies":
        Entries.replicas_of = lambda self, entry: []

        async def hash_nothing(self, keys) -> None:
            """What is left of an entry is its copy, which the daemon cannot read."""

        Checksums.note_all = hash_nothing
    if without == "original":
        commit = Cache.commit

        def commit_unchecked(self, session, reservation, *rest, **named):
            found = self._writers.find(session, reservation)
            if found is not None:
                found[1].original = None
            return commit(self, session, reservation, *rest, **named)

        Cache.commit = commit_unchecked
    sys.argv = ["ecd", "serve"]
    main()


# -- an engine -------------------------------------------------------------------------------------


def take_out(without: str) -> None:
    """Break one rule in this process."""
    from ecd_client.device import accelerator, completions, copies, driver
    from ecd_client.session.session import Session
    from ecd_client.shared.index import IndexReader
    from ecd_client.tensors import TensorSource

    match without:
        case "W1":

            class Nothing:
                def precede(self, stream: int) -> None:
                    pass

                def note_over(self) -> None:
                    pass

            copies.Copies.queued = lambda self: Nothing()
        case "W2":
            copies.Copies._outlast = lambda self, stream: None
        case "W3":

            class Address:
                def __init__(self, tensor) -> None:
                    self.data_ptr = tensor.data_ptr().__int__

            def copy_to(self, pool, extent) -> None:
                address, self._tensor = Address(self._tensor), None
                pool.use_dma(self._copies.device)
                self._copies.save(address, self._ready, pool.save_parts(extent))

            TensorSource.copy_to = copy_to
        case "R1":
            announce = IndexReader._announce

            def forget(self, entry: int) -> int:
                pin = announce(self, entry)
                self._words[pin] = 0
                return pin

            IndexReader._announce = forget
        case "pin":
            pin_copy = IndexReader.pin_copy

            def forget_copy(self, *which):
                found = pin_copy(self, *which)
                if found is not None:
                    self._words[found[1]] = 0
                return found

            IndexReader.pin_copy = forget_copy
        case "R2":
            completions.after = lambda events, end: end()
        case "R3":
            precede = driver.Event.precede

            def precede_saves(event, stream: int) -> None:
                if stream != accelerator.find().stream.cuda_stream:
                    precede(event, stream)

            driver.Event.precede = precede_saves
        case "R4":
            end = Session.end

            def let_go(self) -> None:
                end(self)
                self.pools.close()

            Session.end = let_go


def run_worker(address: str, without: str, has_gpu: bool) -> None:
    from ecd_client import Client
    from support.cuda.gpu import StandinGpu

    take_out(without)
    random.seed(os.getpid())
    gpu = StandinGpu.use() if has_gpu else None
    counts = dict.fromkeys(("gets", "puts", "misses", "wrong", "broken"), 0)
    engine = Engine(gpu, counts, breaks=0.3 if without == "R4" else 0.01)
    told = time.monotonic()
    with Client(address, namespace="stress", connect_timeout=HANG_S) as client:
        client.pin()
        while True:
            engine.step(client)
            if time.monotonic() - told > 0.2:
                told = time.monotonic()
                print(json.dumps(counts), flush=True)


def run_doomed(address: str) -> None:
    """Fork engines, which begin quickly, and kill each between the halves of a copy."""
    import torch

    from ecd_client import Client
    from support.cuda.gpu import StandinGpu
    from support.cuda.standin import Control

    assert torch
    control = Control.of_this_process()
    found = {"killed": 0, "amid": 0}
    while True:
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            random.seed(os.getpid())
            gpu = StandinGpu.use()
            with Client(address, namespace="stress", connect_timeout=HANG_S) as client:
                save_without_end(client, Engine(gpu, {}, 0.0), tell)
        os.close(tell)
        os.read(told, 1)
        before = control.counters().halfway
        wait_until(lambda before=before: control.counters().halfway > before, 1.0)
        counters = control.counters()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        found["killed"] += 1
        found["amid"] += counters.halfway > max(before, counters.finished)
        print(json.dumps(found), flush=True)


def save_without_end(client, engine, tell: int) -> None:
    """Save by DMA, and say so with the first."""
    from ecd_client import EcdError

    client.pin()
    pool = client._connection.session().pools.granted
    wait_until(lambda: pool._dma.may_write and client.pinning.nbytes, 30.0)
    while True:
        key = random.randrange(KEYS)
        with contextlib.suppress(EcdError):  # full of what others hold
            engine.save(client, f"{os.getpid()} {time.monotonic()}", key, SIZES[key % len(SIZES)])
            os.write(tell, b".")
        time.sleep(0.01)


class Engine:
    """Puts and gets of one process: on its GPU, or by the CPU alone if it has none."""

    def __init__(self, gpu, counts: dict[str, int], breaks: float) -> None:
        self._gpu, self._counts, self._breaks = gpu, counts, breaks
        self._loads: deque = deque()

    def step(self, client) -> None:
        from ecd_client import EcdError

        number = random.randrange(KEYS)
        try:
            item = client.get(str(number))
            if item is None:
                self._counts["misses"] += 1
                self._put(client, number, SIZES[number % len(SIZES)])
            else:
                with item:
                    self._load(item)
                if random.random() < self._breaks:
                    self._counts["broken"] += 1
                    item._hold.session.abandon()  # the stream breaks, the copy goes on
                    time.sleep(0.02)
        except EcdError:
            time.sleep(0.01)  # full of what others hold, or between two sessions
        late = random.choice((0, LATE))  # at once, too: the model waits for its loads
        while len(self._loads) > late:
            byte, tensor = self._loads.popleft()
            content = self._gpu.content(tensor)
            self._counts["wrong"] += content != byte * len(content)

    def _put(self, client, number: int, size: int) -> None:
        import torch

        byte = random.randrange(1, 255)  # another with each put: the metadata says which
        if self._gpu is None:
            content, shape = bytes([byte]) * size, (size,)
            self._counts["puts"] += client.put_bytes(
                str(number), content, "uint8", shape, metadata=bytes([byte])
            )
            return
        is_kept = random.random() < 0.2
        kept, stored = self.save(client, str(number), byte, size, is_kept)
        for _ in range(3):  # the model goes on, in memory that may be free by now
            self._gpu.encode((size,), torch.uint8, 255)
        if is_kept or random.random() < 0.5:
            self._counts["puts"] += stored.result(HANG_S)
        if kept is not None:
            self._gpu.fill(kept, 255)

    def save(self, client, key: str, byte: int, size: int, is_kept: bool = False):
        """The tensor if it is kept, and the put's future."""
        import torch

        tensor = self._gpu.encode((size,), torch.uint8, byte)
        stored = client.put_async(key, tensor, metadata=bytes([byte]))
        return tensor if is_kept else None, stored

    def _load(self, item) -> None:
        self._counts["gets"] += 1
        if self._gpu is None:
            self._counts["wrong"] += item.view.tobytes() != item.metadata * item.nbytes
        else:
            self._loads.append((item.metadata, item.to("cuda", non_blocking=True)))


# -- the run ---------------------------------------------------------------------------------------


class Worker:
    def __init__(
        self, warm: Interpreter | None, address: str, role: str, without: str, env: dict[str, str]
    ) -> None:
        self.role, self._warm, self._env = role, warm, env
        self._command = [__file__, f"--{role}", address, "--without", without]
        self.counts: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        from support import processes
        from support.cuda.processes import scripts_environment
        from support.warm import Fork

        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        self.process: subprocess.Popen | Fork
        if self._warm is not None:
            self.process = Fork(self._warm, self._command, self.output, **self._env)
        else:
            command = [sys.executable, *self._command]
            about = {"env": scripts_environment() | self._env, "stdin": subprocess.DEVNULL}
            both = {"stdout": self.output, "stderr": self.output}
            self.process = processes.start(command, **about, **both)

    def collect(self) -> dict[str, int]:
        lines = [line for line in self.said().splitlines() if line.endswith("}")]
        return json.loads(lines[-1]) if lines else {}

    def said(self) -> str:
        """All output until now, read without moving the offset, which is the process's too."""
        fd = self.output.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode()

    def end(self) -> None:
        from support import processes

        processes.end(self.process)
        for name, count in self.collect().items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.output.close()


def run(kind: str, seconds: float, without: str) -> dict:
    from support.cuda.processes import warm_interpreter
    from support.cuda.standin import Control, environment
    from support.daemon import Daemon

    roles = {
        "engines": ["engine"] * 4,
        "near": ["engine"] * 4,
        "slow": ["engine", "cpu"] * 2,
        "doomed": ["doomed", "cpu"] * 2,
    }
    is_standin = os.environ.get("ECD_TEST_CUDA") != "device"
    found: dict[str, object] = {"kind": kind, "without": without, "killed": 0, "wrong": 0}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        controls: list[Control] = []
        envs: list[dict[str, str]] = [{} for _ in roles[kind]]
        settings = {}
        if is_standin:
            controls = [Control(Path(directory) / f"cuda{number}") for number in range(len(envs))]
            for control in controls:
                control.delay_us = KINDS[kind]
            envs = [environment(control, afterlife=kind == "doomed") for control in controls]
        if kind == "near":
            settings = {"ECD_DEVICE_POOL_BYTES": "2MiB", "ECD_DEVICES": "0"}
            if is_standin:
                controls.append(Control(Path(directory) / "cuda-daemon"))
                settings |= environment(controls[-1])
        daemon = Daemon(Path(directory), POOLS[kind], **settings)
        daemon.command = (sys.executable, __file__, "--daemon", "--without", without)
        stack.callback(daemon.close)
        daemon.start()
        warm = stack.enter_context(warm_interpreter(Path(directory)))
        workers = [
            Worker(warm, daemon.address, role, without, env)
            for role, env in zip(roles[kind], envs, strict=True)
        ]

        def has_done_enough(kind: str) -> bool:
            """Or a busy machine would have shown nothing."""
            counters = daemon.status().counters
            evictions, copied = sum(counters.evictions.values()), counters.copies > 0
            amid = sum(worker.collect().get("amid", 0) for worker in workers)
            return evictions > 20 and (copied or kind != "near") and (amid > 3 or kind != "doomed")

        try:
            # A busy machine takes its time to import torch.
            wait_until(lambda: all(worker.collect() for worker in workers), 60.0)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline or not (without or has_done_enough(kind)):
                time.sleep(0.3)
                worker = random.choice(workers)
                if worker.process.poll() is not None:
                    found["ended"] = worker.said()[-2000:]
                    break
                if random.random() < 0.1 and worker.collect().get("puts"):
                    worker.end()
                    worker.start()
                    found["killed"] += 1
                if without and _is_found_out(controls, workers):
                    break
        finally:
            for worker in workers:
                worker.end()
        for worker in workers:
            for name, count in worker.counts.items():
                found[name] = found.get(name, 0) + count
        each = [control.counters() for control in controls]
        found["faults"] = sum(counters.faults for counters in each)
        found["pageable"] = sum(counters.pageable_copies for counters in each)
        found["copies"] = sum(counters.copies for counters in each)
        found["waits"] = sum(counters.main_waits for counters in each)
        of_daemon = daemon.status().counters
        found["evictions"] = sum(of_daemon.evictions.values())
        found["copies near"] = of_daemon.copies
        if not without:
            daemon.check_nothing_leaked()
    return found


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def _is_found_out(controls: list, workers: list[Worker]) -> bool:
    has_fault = any(control.counters().faults for control in controls)
    return has_fault or any(worker.collect().get("wrong") for worker in workers)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # all that it started ends, too
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=60.0)
    steps = ("", *RULES, "D1", *COPY_STEPS, *ORIGIN_STEPS)
    parser.add_argument("--without", default="", choices=steps)
    parser.add_argument("--engine")
    parser.add_argument("--cpu")
    parser.add_argument("--doomed")
    parser.add_argument("--daemon", action="store_true")
    given = parser.parse_args()
    if given.daemon:
        run_daemon(given.without)
    elif given.doomed:
        run_doomed(given.doomed)
    elif given.engine or given.cpu:
        run_worker(given.engine or given.cpu, given.without, has_gpu=bool(given.engine))
    else:
        kinds = RULES | dict.fromkeys(COPY_STEPS, "near")
        kind = given.kind or kinds.get(given.without, "engines")
        if kind in LATE_KINDS and os.environ.get("ECD_TEST_CUDA") == "device":
            parser.error(f"a GPU's copies are not as late as {kind} needs them")
        found = run(kind, given.seconds, given.without)
        print(json.dumps(found))
        sys.exit(1 if found["wrong"] or found["faults"] or "ended" in found else 0)


if __name__ == "__main__":
    main()
