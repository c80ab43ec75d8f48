"""Tasks that run in the background, without a waiting caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


async def first_of(*awaitables: Awaitable[object]) -> set[asyncio.Future[object]]:
    """Run until the first ends, and cancel the rest; returns those that have ended.

    Their errors are the caller's to raise or to leave. Whoever cancels this cancels all of them.
    """
    tasks: list[asyncio.Future[object]] = [asyncio.ensure_future(each) for each in awaitables]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return ended


async def until_first(*awaitables: Awaitable[object]) -> None:
    """As `first_of`. Raises what the first has raised."""
    for ended in await first_of(*awaitables):
        ended.result()


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """Wait for it, cancelled where it takes longer. Raises its error, or asyncio.TimeoutError.

    Before Python 3.12 asyncio.wait_for loses a cancellation that meets the end of what it waits
    for, so that a loop around it goes on for ever (python/cpython#86296).
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait((task,), timeout=seconds)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        _ = task.cancelled() or task.exception()  # nobody asks for it where this was cancelled
    raise asyncio.TimeoutError


class Background:
    """Keeps tasks from being collected while they run, and cancels them with their owner.

    An exception in a task is logged.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    def spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task in the background failed", exc_info=error)

    def cancel(self) -> None:
        """Cancel all tasks, without waiting for their end."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks, and wait for their end."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
