"""Single keys that somebody presses while a command shows something."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from ecd_client import clock


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key, for so many seconds at most.

    It returns "" after that time, as always where standard input is no terminal.
    """
    if not sys.stdin.isatty():
        yield _pause
        return
    typed = sys.stdin.fileno()
    before = termios.tcgetattr(typed)
    tty.setcbreak(typed)
    try:
        yield lambda seconds: _key(typed, seconds)
    finally:
        termios.tcsetattr(typed, termios.TCSADRAIN, before)


def _pause(seconds: float) -> str:
    clock.sleep(seconds)
    return ""


def _key(typed: int, seconds: float) -> str:
    ready, _, _ = select.select([typed], [], [], seconds)
    if not ready:
        return ""
    if key := os.read(typed, 1):
        return key.decode(errors="replace")
    return _pause(seconds)  # the terminal has hung up
