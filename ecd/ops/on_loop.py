"""Questions to the daemon's event loop from the threads of its HTTP port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from http import HTTPStatus
from typing import Any, TypeVar

from ecd.ops.http_port import Refused

Answer = TypeVar("Answer")
LATE = "the daemon's event loop did not come round within {:g} s"
STOPPED = "the daemon has stopped"


class NoAnswer(Refused):
    """The event loop is blocked, or has ended; the message says which."""

    def __init__(self, text: str) -> None:
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, text)


def on_loop(
    loop: asyncio.AbstractEventLoop,
    ask: Callable[[], Coroutine[Any, Any, Answer]],
    within_s: float,
    late: str = LATE,
) -> Answer:
    """Run a coroutine on the loop and return what it returns.

    Raises what it raises, and NoAnswer: not within `within_s`, which `late` words, or never.
    """
    asking = ask()
    try:
        asked = asyncio.run_coroutine_threadsafe(asking, loop)
    except RuntimeError:  # the loop is closed
        asking.close()
        raise NoAnswer(STOPPED) from None
    try:
        return asked.result(within_s)
    except FutureTimeoutError:
        asked.cancel()
        raise NoAnswer(late.format(within_s)) from None
    except CancelledError:  # as the loop ended
        raise NoAnswer(STOPPED) from None
