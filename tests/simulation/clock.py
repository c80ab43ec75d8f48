"""A virtual clock and the event loop on it, in which every node of a simulated cluster lives.

Time moves only when nothing is left to do at the present moment, so hours pass in milliseconds, and
one seed gives one run. Callbacks of one node keep their order, as asyncio promises.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, ContextVar
from random import Random

from ecd.base.clock import Clock

START_S = 1000.0
TURN_S = 5e-6
"""What one turn of the loop takes: a task that waits by turns must get somewhere."""
HASH_S = (0.0, 0.002)
"""How long what another thread does takes."""


class Process:
    """One process of the simulated world; its tasks and timers are known by their context."""

    def __init__(self) -> None:
        self.alive, self.is_paused = True, False
        self.context = Context()
        self.context.run(PROCESS.set, self)
        self.tasks: list[asyncio.Task[object]] = []
        self.held: list[asyncio.Handle] = []  # callbacks that came while it was stopped

    @property
    def running(self) -> list[asyncio.Task[object]]:
        self.tasks = [task for task in self.tasks if not task.done()]
        return self.tasks

    def start(self, work: object) -> asyncio.Task[object]:
        """Run a coroutine in this process."""
        return self.context.run(asyncio.get_running_loop().create_task, work)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
OUTSIDE = Context()
"""The context of what happens in no process: it goes on while processes are stopped."""


class _Task(asyncio.Task):
    """A task whose place in a set does not depend on its address."""

    def __init__(self, work, *, serial: int, **how) -> None:
        self.serial = serial  # asyncio puts it into a set at once
        super().__init__(work, **how)

    def __hash__(self) -> int:
        return self.serial


class _Future(asyncio.Future):
    serial = 0

    def __hash__(self) -> int:
        return self.serial


class VirtualClock(Clock):
    """The time of the simulation, and chance that its seed decides."""

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self._loop, self._rng = loop, rng

    def now_s(self) -> float:
        return self._loop.now_s

    def unix_s(self) -> float:
        return 1.75e9 + self._loop.now_s

    def block(self, seconds: float) -> None: ...

    def uniform(self, least: float, most: float) -> float:
        return self._rng.uniform(least, most)

    def secret(self, nbytes: int) -> bytes:
        return self._rng.randbytes(nbytes)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without sockets and threads, on virtual time."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.now_s = START_S
        self.errors: list[str] = []
        """What the loop could only report: exceptions that nobody took."""
        self.settled: Callable[[], None] = lambda: None
        """Called whenever time is about to move: all that could happen now has happened."""
        self.disk_range_s = (0.0, 0.0)
        self._rng, self._serials = rng, itertools.count(1)
        self.clock = VirtualClock(self, rng)
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self.now_s

    def disk_s(self) -> float:
        """How long the next operation of a disk takes."""
        return self._rng.uniform(*self.disk_range_s)

    def create_future(self) -> asyncio.Future:
        future = _Future(loop=self)
        future.serial = next(self._serials)
        return future

    def _make_task(self, loop: object, work: object, **how: object) -> asyncio.Task:
        task = _Task(work, loop=self, serial=next(self._serials), **how)
        if (process := PROCESS.get()) is not None:
            process.tasks.append(task)
        return task

    def call_soon_threadsafe(self, callback, *args, context=None):
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor, func, *args):
        """Run what a thread would run, after a while: another turn of the loop."""
        ended = self.create_future()

        def run() -> None:
            if not ended.done():
                try:
                    ended.set_result(func(*args))
                except Exception as error:
                    ended.set_exception(error)

        self.call_later(self._rng.uniform(*HASH_S), run)
        return ended

    def call_exception_handler(self, context: dict) -> None:
        handle = context.get("handle")
        process = None if handle is None else handle._context.get(PROCESS)
        if process is None or process.alive:
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    # -- processes -----------------------------------------------------------------------------

    def go_on(self, process: Process) -> None:
        """Run what came while the process was stopped."""
        self._ready.extend(process.held)
        process.held = []

    def _run_once(self) -> None:
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if self._ready:
            self.now_s += TURN_S
        elif not self._stopping:
            self.settled()
            if not self._ready:
                self.now_s = max(self.now_s, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self.now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            self._ready.append(handle)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and process.is_paused:
                process.held.append(handle)
            else:
                handle._run()

    def _process_events(self, events: object) -> None: ...

    def _write_to_self(self) -> None: ...


class Hashers:
    """In place of the threads that hash pieces of large reads."""

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self._loop, self._rng = loop, rng

    def submit(self, do: Callable[..., object], *args: object) -> Future:
        done: Future = Future()
        later = self._rng.uniform(*HASH_S)
        self._loop.call_later(later, lambda: done.set_result(do(*args)))
        return done
