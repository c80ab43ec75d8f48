"""Threads for the event loop's blocking work, which the process's end does not wait for.

The threads of `concurrent.futures` are joined when the process ends, however long a disk hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Threads:
    """Runs jobs in order of arrival, `count` at a time, for the loop that made it."""

    def __init__(self, count: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._count = count
        self._unsettled = 0
        for number in range(count):
            name_of = f"{name}-{number}"
            threading.Thread(target=self._run, name=name_of, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether every job is done and the loop knows of it."""
        return self._unsettled == 0

    def do(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run the job; the future has its result or error.

        Cancelling the future does not stop the job.
        """
        done: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((job, done))
        self._unsettled += 1
        return done

    def close(self) -> None:
        """End each thread after the jobs that it has."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _run(self) -> None:
        while (taken := self._jobs.get()) is not None:
            job, done = taken
            try:
                result, error = job(), None
            except Exception as raised:
                result, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._settle, done, result, error)
            del job, done, taken, result, error

    def _settle(self, done: asyncio.Future[Any], result: object, error: Exception | None) -> None:
        self._unsettled -= 1
        if done.done():
            return  # it was cancelled
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)
            done.exception()  # perhaps nobody waits for it any more
