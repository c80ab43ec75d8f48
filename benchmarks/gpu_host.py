"""What `gpu.py` measures of an engine's step: the time of its thread, and its calls of the driver.

Also on the stand-in for CUDA's driver (`gpu.py --standin`): its calls cost less than a GPU's, so
what counts there is their number, and the difference between two versions of the program.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from statistics import median, median_low, quantiles
from typing import Any

import torch
from common import MIB
from gpu_client import ITEM_BYTES
from gpu_common import Row, daemon_of, new_tensor

from ecd_client import Client
from ecd_client.device import completions
from ecd_client.device.pool import DevicePool
from ecd_client.item import Handle

ROOT = Path(__file__).parents[1]
HOST_BYTES, DEVICE_BYTES = 512 * MIB, 128 * MIB
KEYS = "a", "b", "c", "d"
"""The items of a step."""
WARM, ROUNDS = 20, 100
COUNTED = 10
"""Rounds of which the median of calls is shown: now and then an event has to be made."""
TARGETS_US = {"a load": 60.0, "a put": 80.0}
"""For one item of 8 MiB on a GPU."""

_standin: Any = None


def use_standin() -> None:
    """Take the stand-in's GPU for torch's, in this program begun anew where that is needed."""
    global _standin
    sys.path.append(str(ROOT / "tests"))
    from support.cuda.standin import Control, environment

    if "CUDA_STANDIN_CONTROL" not in os.environ:  # the library's path is read as a process starts
        with tempfile.TemporaryDirectory() as directory:
            found = environment(Control(Path(directory) / "cuda-control"))
            done = subprocess.run([sys.executable, *sys.argv], env=os.environ | found)
        raise SystemExit(done.returncode)
    from support.cuda.gpu import StandinGpu

    _standin = StandinGpu.use()


class _Device:
    """The GPU: torch's, or the stand-in's.

    On the latter no copy goes on while the caller is timed, and the time in which its tensors are
    made is left out: torch's are made in C++.
    """

    def __init__(self) -> None:
        sys.path.append(str(ROOT / "tests"))
        from support.cuda.standin import Control, Hold

        self._hold, self._control, self._apart_s = Hold, None, 0.0
        if _standin is not None:
            self._control = Control.of_this_process()
            self._empty, _standin.empty = _standin.empty, self._make_apart

    def _make_apart(self, *arguments: Any, **named: Any) -> torch.Tensor:
        started = time.perf_counter()
        tensor: torch.Tensor = self._empty(*arguments, **named)
        self._apart_s += time.perf_counter() - started
        return tensor

    def tensor(self) -> torch.Tensor:
        if _standin is None:
            return new_tensor(ITEM_BYTES)
        tensor: torch.Tensor = _standin.encode((ITEM_BYTES,), torch.uint8, 1)
        return tensor

    def held_us(self, queue: Callable[[], Any]) -> float:
        """How long `queue` holds this thread; what it queued is over after that."""
        self.settle()
        if self._control is not None:
            self._control.hold = self._hold.START
        self._apart_s = 0.0
        started = time.perf_counter()
        queued = queue()
        held = time.perf_counter() - self._apart_s
        if self._control is not None:
            self._control.hold = self._hold.NOTHING
        if isinstance(queued, Future):
            assert queued.result(60)
        self.settle()
        return (held - started) * 1e6

    def settle(self) -> None:
        if _standin is None:
            torch.cuda.synchronize()
        else:
            _standin.wait()


def host() -> list[Row]:
    """A warm load, a step of four loads and a put, with the host pool and with a device pool."""
    device = _Device()
    near = {"ECD_DEVICE_POOL_BYTES": str(DEVICE_BYTES)}
    with daemon_of(HOST_BYTES, **near) as (_, address), Client(address) as client:
        if _standin is None:
            torch.cuda.init()
        client.pin()
        session = client._connection.session()
        _wait(lambda: client.pinning.nbytes == HOST_BYTES and session.near is not None)
        pool = session.near
        assert pool is not None
        for key in KEYS:
            assert client.put_async(key, device.tensor()).result(60)
        _wait(lambda: all(_has_copy(client, key) for key in KEYS))
        items = [client.get(key) for key in KEYS]
        ways = _ways(client, pool, {item.mm_hash: item.handle() for item in items if item})
        places = {"host pool": None, "device pool": pool}
        dma = session._dma
        took: dict[tuple[str, str], list[float]] = defaultdict(list)
        made: dict[tuple[str, str], list[dict[str, int]]] = defaultdict(list)

        def each_way(measure: Callable[[tuple[str, str], Callable[[], Any]], None]) -> None:
            for place, dma.near in places.items():
                for way, queue in ways.items():
                    measure((way, place), partial(queue, device.tensor()))

        def time_it(what: tuple[str, str], queue: Callable[[], Any]) -> None:
            took[what].append(device.held_us(queue))

        for _ in range(WARM + ROUNDS):
            each_way(time_it)
        from support.cuda.gpu import CallsByThread

        calls = CallsByThread(_standin)  # from now on, as counting takes time

        def count_it(what: tuple[str, str], queue: Callable[[], Any]) -> None:
            found: list[tuple[Counter[str], int]] = []

            def counted() -> Any:
                before = calls.counts.copy()
                queued = queue()
                found.append((before, calls.since(before)["caller"]))
                return queued

            device.held_us(counted)
            pool._side.submit(int).result(60)  # copies of puts
            ended = threading.Event()
            completions.aside(ended.set)
            assert ended.wait(60)
            [(before, own)] = found
            made[what].append(calls.since(before) | {"caller": own})

        for _ in range(COUNTED):
            each_way(count_it)
        for item in filter(None, items):
            item.close()
    return [_row(*what, us[WARM:], made[what]) for what, us in took.items()]


def _ways(
    client: Client, pool: DevicePool, handles: dict[str, Handle]
) -> dict[str, Callable[[torch.Tensor], Any]]:
    """What an engine's step does, of which the tensor is an encoder's output."""
    names = map(str, itertools.count())

    def load(key: str) -> torch.Tensor:
        with client.hold(key, handles[key]) as item:
            return item.to("cuda", non_blocking=True)

    def step() -> list[torch.Tensor]:
        with pool.copies.together():
            return [load(key) for key in KEYS]

    return {
        "a load": lambda _: load(KEYS[0]),
        "four loads, one by one": lambda _: [load(key) for key in KEYS],
        "four loads of a step": lambda _: step(),
        "a put": lambda tensor: client.put_async(next(names), tensor),
    }


def _row(way: str, place: str, us: list[float], made: list[dict[str, int]]) -> Row:
    target = None if _standin else TARGETS_US.get(way)
    middle, high = median(us), quantiles(us, n=20)[-1]
    threads = sorted({name for each in made for name in each})
    calls = {name: median_low(each.get(name, 0) for each in made) for name in threads}
    others = "".join(f", {count} by {name}" for name, count in calls.items() if name != "caller")
    return Row(
        f"{way}, {ITEM_BYTES // MIB} MiB each, {place}, warm: caller held",
        f"{middle:.0f} us (95 %: {high:.0f}), {calls['caller']} calls of the driver{others}",
        "",
        "" if target is None else f"<= {target:.0f} us",
        None if target is None else middle <= target,
        {"us": us, "calls": calls},
    )


def _has_copy(client: Client, key: str) -> bool:
    with client.get(key) as item:
        return item.device_view("cuda") is not None


def _wait(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline_s, "the pool is not pinned, or no copy was made: see log"
        time.sleep(0.01)
