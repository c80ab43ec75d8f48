"""Limits of a run of tests: a test that hangs is named and ended, and so is a run.

pytest-timeout raises in a test that takes too long. That does not end one whose cleaning up waits
for a process that nobody ends; so a thread kills what such a test has started, and then its worker.
A process that has run its tests is limited as well: what they left must not keep it from ending.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing.resource_tracker import _resource_tracker
from pathlib import Path

import pytest
from xdist.workermanage import WorkerController

from support.processes import GRACE_S, Terminated, kill_all, started
from support.waiting import HANG_S, LOOK_S

RUN_LIMIT_S = 55 * 60.0
LAST_WORDS_S = 10.0
"""How long a test or a run may take to fail once its processes are killed."""
END_S = 2 * HANG_S
"""How long a process may take to end after its tests."""
WORKER_EXIT_S = 5.0
"""How long a worker may join its threads: xdist kills it after 10 s, and says nothing."""
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


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


class EndLimit:
    """In a worker: it ends after its tests. It is made while pytest captures nothing."""

    def __init__(self) -> None:
        self._voice = Voice()
        self._name = os.environ.get("PYTEST_XDIST_WORKER", "")
        self._ran: dict[str, tuple[float, float]] = {}
        """When each test began and ended; the last one is last."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        began_s, _ = self._ran.pop(report.nodeid, (report.start, 0.0))
        self._ran[report.nodeid] = began_s, report.stop

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        timer = Timer(END_S, self._does_not_end)
        try:
            return (yield)
        finally:
            timer.cancel()  # xdist ends this process when all workers have run their tests
            # Python calls it before it joins threads, those of executors first.
            threading._register_atexit(Timer, WORKER_EXIT_S, self._does_not_end)

    def _does_not_end(self) -> None:
        main, threads = threading.main_thread(), threading.enumerate()
        kept = [each for each in threads if each != main and not each.daemon and each.native_id]
        by = [f"thread {each.name}, {self._origin(each.native_id)}" for each in kept]
        by += [f"process {pid} {what}" for pid, what in self._with_origin(started()).items()]
        last = f"nothing that a test left; the last: {self._last()}"
        said = f"{self._name} does not end after its tests. It waits for:"
        self._voice.say("\n".join([said, *(by or [last])]))
        self._voice.dump_threads()
        self._kill()

    def _kill(self) -> None:
        os._exit(pytest.ExitCode.TESTS_FAILED)

    def _last(self) -> str:
        return ", ".join([*self._ran][-3:]) or "no test"

    def _with_origin(self, processes: dict[int, str]) -> dict[int, str]:
        return {pid: f"{what}, {self._origin(pid)}" for pid, what in processes.items()}

    def _origin(self, task: int) -> str:
        """The test that ran when a process or a thread began; it may be one of several workers'."""
        try:
            stat = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "which has ended"
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) * TICK_S
        at_s = time.time() - age_s  # or up to a tick later
        amid = [
            nodeid
            for nodeid, (began_s, ended_s) in self._ran.items()
            if began_s - TICK_S <= at_s <= ended_s
        ]
        return f"begun amid {', '.join(amid) or 'no test'}"


class RunLimit(EndLimit):
    """In the process that the run began with. It is made while pytest captures nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._name = "the run"
        self._since_s = time.time()
        self._running: dict[str, None] = {}
        self._failures: list[str] = []
        self._workers: list[subprocess.Popen[bytes]] = []
        self._code = pytest.ExitCode.INTERRUPTED
        self._reporter: pytest.TerminalReporter | None = None
        self._end = threading.Lock()  # whoever has it ends the run: it is not given back
        self._timer = Timer(seconds, self._over, seconds)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._reporter = session.config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: WorkerController) -> None:
        self._workers.append(node.gateway._io.popen)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Interrupt the workers, which a terminal does on Ctrl-C, and xdist after 5 s only."""
        if excinfo.errisinstance(Terminated):
            for worker in self._workers:
                worker.terminate()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        if report.failed:
            self._failures.append(f"{report.nodeid}, {report.when}:\n{report.longreprtext}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Around all that ends with a session, the summary of its failures included."""
        if self._end.acquire(blocking=False):
            self._timer.cancel()
            self._code = pytest.ExitCode.TESTS_FAILED
        Timer(END_S, self._does_not_end)
        try:
            result = yield
            self._failures.clear()  # they are in the summary
            return result
        finally:
            self._end_what_is_left(session)

    def _end_what_is_left(self, session: pytest.Session) -> None:
        """Look for what this process and its workers left behind: a worker cannot, as it lives.

        Nothing waits for multiprocessing's tracker, which ends with this process and with all that
        were forked from it.
        """

        def look() -> dict[int, str]:
            tracker = _resource_tracker._pid
            return {pid: what for pid, what in started().items() if pid != tracker}

        until_s = time.monotonic() + GRACE_S
        while (left := look()) and time.monotonic() < until_s:  # some may be about to end
            time.sleep(LOOK_S)
        if left:
            self._voice.say("tests left processes behind:", self._with_origin(left))
            kill_all()
        if left or pytest.ExitCode.TESTS_FAILED in [each.poll() for each in self._workers]:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        remove_abandoned(self._since_s)

    def _over(self, seconds: float) -> None:
        """Interrupt the run, so that it reports what has failed."""
        if not self._end.acquire(blocking=False):
            return
        amid = ", ".join(self._running) or f"no test; the last: {self._last()}"
        self._voice.say(f"the run is ended after {seconds:.0f} s, amid: {amid}")
        os.kill(os.getpid(), signal.SIGINT)
        self._kill()

    def _kill(self) -> None:
        """Kill what this process may wait for, and then itself."""
        kill_all()
        Timer(LAST_WORDS_S, self._exit)

    def _exit(self) -> None:
        if self._failures:
            self._voice.say("\n\n".join(["it had failed:", *self._failures]))
        with contextlib.suppress(ValueError):  # it is closed
            if self._reporter is not None:
                self._reporter.flush()
        kill_all()
        os._exit(self._code)
