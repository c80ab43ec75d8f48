"""Limits of a run of tests: a test that hangs is named and ended, and so is a run.

pytest-timeout raises in a test that takes too long. That does not end one whose cleaning up waits
for a process that nobody ends; so a thread kills what such a test has started, and then its worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.resource_tracker import _resource_tracker
from pathlib import Path

import pytest

from support.processes import GRACE_S, kill_all, started
from support.waiting import HANG_S, LOOK_S

RUN_LIMIT_S = 55 * 60.0
LAST_WORDS_S = 10.0
"""How long a test may take to fail once its processes are killed."""


class Voice:
    """Stderr as it was before pytest captures it, for what a killed process could not report."""

    def __init__(self) -> None:
        self._stderr = os.dup(2)

    def say(self, text: str, of: dict[int, str] | None = None) -> None:
        lines = text, *(f"{pid} {command}" for pid, command in (of or {}).items())
        os.write(self._stderr, ("\n" + "\n".join(lines) + "\n").encode())

    def dump_threads(self) -> None:
        faulthandler.dump_traceback(self._stderr)


class Timer:
    """Calls back on a thread unless it is cancelled."""

    def __init__(self, seconds: float, function, *arguments: object) -> None:
        self._timer = threading.Timer(seconds, function, arguments)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()


class TestLimits:
    """In the process that runs tests. It is made while pytest captures nothing."""

    def __init__(self) -> None:
        self._voice = Voice()
        self._since_s = time.time()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        own = item.get_closest_marker("timeout")
        seconds = float(own.args[0] if own and own.args else item.config.getini("timeout"))
        timers = [
            Timer(seconds + HANG_S, self._hung, item.nodeid),
            Timer(seconds + HANG_S + LAST_WORDS_S, self._give_up, item.nodeid),
        ]
        try:
            return (yield)
        finally:
            for timer in timers:
                timer.cancel()

    def _hung(self, nodeid: str) -> None:
        self._voice.say(f"{nodeid} HANGS. What it does:")
        self._voice.dump_threads()
        self._voice.say("these processes of it are killed:", kill_all())

    def _give_up(self, nodeid: str) -> None:
        self._voice.say(f"{nodeid} hangs still: its process is killed")
        os.kill(os.getpid(), signal.SIGKILL)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """The process that the run began with looks for what all of its workers left behind."""
        _resource_tracker._stop()  # multiprocessing's, which would end with this process
        if hasattr(session.config, "workerinput"):
            return
        until_s = time.monotonic() + GRACE_S
        while (left := started()) and time.monotonic() < until_s:  # some may be about to end
            time.sleep(LOOK_S)
        if left:
            kill_all()
            self._voice.say("tests left processes behind:", left)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        remove_abandoned(self._since_s)


def remove_abandoned(since_s: float) -> None:
    """Remove what multiprocessing has made in /dev/shm since then, and no process has mapped.

    vLLM's processes that are killed, and with them those that would clean up, leave it.
    """
    shared = Path("/dev/shm")
    # They are listed first: what another run makes meanwhile is not looked for.
    found = [*shared.glob("sem.mp-*"), *shared.glob("psm_*")]
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            places = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
            # By inode: a semaphore is mapped before it has its name.
            mapped |= {int(at[4]) for at in places if at[5:] and at[5].startswith(str(shared))}
    for path in found:
        with contextlib.suppress(OSError):
            about = path.stat()
            if about.st_ctime >= since_s and about.st_ino not in mapped:
                path.unlink()


class RunLimit:
    """In the process that the run began with. It is made while pytest captures nothing."""

    def __init__(self, seconds: float) -> None:
        self._voice = Voice()
        self._running: dict[str, None] = {}
        self._end = threading.Lock()  # whoever has it ends the run: it is not given back
        self._timer = Timer(seconds, self._over, seconds)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._end.acquire()
        self._timer.cancel()

    def _over(self, seconds: float) -> None:
        self._end.acquire()
        self._voice.say(f"the run is ended after {seconds:.0f} s, amid: {', '.join(self._running)}")
        kill_all()
        os._exit(pytest.ExitCode.INTERRUPTED)
