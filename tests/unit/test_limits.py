"""Whatever a test does, a run of tests ends, names what was wrong, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.limits import END_S, LAST_WORDS_S, WORKER_EXIT_S
from support.processes import run
from support.waiting import HANG_S, eventually
from support.warm import Fork, Interpreter

TESTS = Path(__file__).parents[1]
CONFTEST = """
import os, threading
from pathlib import Path
from support import limits, processes

def now():
    clock = Path(__file__).with_name("clock")
    return float(clock.read_text()) if clock.exists() else 0.0

class Timer:
    def __init__(self, seconds, function, *arguments):
        self._cancelled = threading.Event()
        about = now() + seconds, function, arguments
        threading.Thread(target=self._wait, args=about, daemon=True).start()

    def _wait(self, until, function, arguments):
        while not self._cancelled.wait(0.01):
            if now() >= until:
                return function(*arguments)

    def cancel(self):
        self._cancelled.set()

limits.Timer = Timer
processes.mark()

def pytest_addoption(parser):
    parser.addoption("--run-limit", type=float, default=limits.RUN_LIMIT_S)

def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    limit = limits.EndLimit() if is_worker else limits.RunLimit(config.getoption("--run-limit"))
    config.pluginmanager.register(limits.TestLimits())
    config.pluginmanager.register(limit)
"""
"""The limits as tests/conftest.py sets them, on a clock that the test moves."""
TEST = """
import os, signal, subprocess, sys, threading
from pathlib import Path

HERE = Path(__file__).parent

def it_is(seconds):
    (HERE / "next").write_text(str(seconds))
    (HERE / "next").rename(HERE / "clock")

def ignoring(**about):
    script = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); "
    script += "print(flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, **about)
    process.stdout.readline()
    with (HERE / "pids").open("a") as pids:
        print(process.pid, file=pids)
    return process
"""
"""Begins each test; only SIGKILL ends an `ignoring` process."""
LIMIT_S = 100.0
HUNG_S = LIMIT_S + HANG_S
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def pytest_of(tmp_path: Path) -> Run:
    """Runs pytest on a file with these lines, and its conftest with those."""

    def run_it(
        test: str, *options: str, conftest: str = "", prefix: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "conftest.py").write_text(CONFTEST + conftest)
        (tmp_path / "test_it.py").write_text(TEST + test)
        plugins = "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "xdist.plugin"
        plain = *plugins, "-o", f"timeout={LIMIT_S}", "--rootdir", str(tmp_path)
        # This process may be a worker itself, and no worker of that run.
        around = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        environment = {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return run(
            [*prefix, sys.executable, "-m", "pytest", *plain, *options, str(tmp_path)],
            capture_output=True,
            text=True,
            env=around | environment,
        )

    return run_it


def lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def are_dead(tmp_path: Path) -> Callable[[], bool]:
    """Whether the `ignoring` processes have all ended."""

    def look() -> bool:
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        return bool(pids) and not any(map(lives, pids))

    return look


def test_a_test_that_hangs_in_its_cleaning_up_is_ended_and_named(
    pytest_of: Run, are_dead: Callable[[], bool]
) -> None:
    done = pytest_of(f"""
def test_hangs():
    with ignoring():
        it_is({HUNG_S})
        raise AssertionError("Popen waits for its process, without end")

def test_goes_on():
    pass
""")
    assert (done.returncode, "1 failed, 1 passed" in done.stdout) == (1, True), done.stdout
    assert "test_it.py::test_hangs HANGS" in done.stderr
    assert "in test_hangs\n" in done.stderr.split("are killed:")[0], "what it does"
    assert "signal.pause()" in done.stderr.split("are killed:")[1]
    eventually(are_dead)


def test_a_run_removes_what_its_killed_processes_left_in_shared_memory(
    pytest_of: Run, tmp_path: Path
) -> None:
    shared = Path("/dev/shm")
    left, used, older = (shared / f"sem.mp-{tmp_path.name}-{n}" for n in ("left", "used", "older"))
    older.touch()
    try:
        done = pytest_of(f"""
def test_leaves():
    Path({str(left)!r}).touch()
    with open({str(used)!r}, "wb+") as file:
        file.truncate(1)
        globals()["mapped"] = mmap.mmap(file.fileno(), 1)
import mmap
""")
        assert done.returncode == 0, done.stdout
        assert [path.exists() for path in (left, used, older)] == [False, True, True]
    finally:
        for path in (left, used, older):
            path.unlink(missing_ok=True)


def test_a_test_that_hangs_by_itself_is_killed_and_named(
    pytest_of: Run, are_dead: Callable[[], bool]
) -> None:
    done = pytest_of(f"""
def test_hangs():
    process = ignoring(start_new_session=True)
    it_is({HUNG_S})
    process.wait()
    it_is({HUNG_S + LAST_WORDS_S})
    signal.pause()
""")
    assert done.returncode == -signal.SIGKILL
    assert "test_it.py::test_hangs hangs still: its process is killed" in done.stderr
    eventually(are_dead)


def test_processes_that_tests_leave_behind_fail_the_run(
    pytest_of: Run, are_dead: Callable[[], bool]
) -> None:
    """A worker does not say how it ended, so the process that started it looks."""
    test = """
def test_leaves_one_behind():
    ignoring(start_new_session=True)

def test_leaves_an_orphan_behind():
    if not os.fork():
        ignoring(start_new_session=True)
        os._exit(0)
    os.wait()
"""
    done = pytest_of(test, "-n", "1", conftest="limits.GRACE_S = 0.0")
    assert (done.returncode, "2 passed" in done.stdout) == (1, True), done.stdout
    assert done.stderr.split("left processes behind:")[1].count("signal.pause()") == 2
    eventually(are_dead)


def test_what_ends_with_its_test_or_with_the_run_fails_nothing(pytest_of: Run) -> None:
    done = pytest_of("""
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from support.processes import child

def test_ends():
    with ProcessPoolExecutor(1, get_context("spawn")) as side:  # it starts a tracker besides
        assert side.submit(abs, -1).result() == 1
    with child(["sh", "-c", "sleep infinity & echo; wait"], stdout=subprocess.PIPE) as shell:
        shell.stdout.readline()
""")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_that_takes_too_long_names_what_ran(
    pytest_of: Run, are_dead: Callable[[], bool]
) -> None:
    test = """
def test_is_short():
    pass

def test_takes_long():
    ignoring(start_new_session=True)
    last = HERE / "last"  # this worker may be ahead of the process that writes it
    while not last.exists() or "takes_long" not in last.read_text():
        pass
    it_is(50.0)
    signal.pause()
"""
    told = """
def pytest_runtest_logstart(nodeid):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        Path(__file__).with_name("last").write_text(nodeid)
"""
    done = pytest_of(test, "-n", "1", "--run-limit", "50", conftest=told)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "ended after 50 s, amid: test_it.py::test_takes_long\n" in done.stderr
    eventually(are_dead)


def test_a_run_that_takes_too_long_tells_what_has_failed(pytest_of: Run) -> None:
    """Though the test that it ends is deaf to the interrupt."""
    test = """
def test_fails():
    assert "this is" == "told"

def test_takes_long():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    it_is(50.0)
    signal.pause()
"""
    done = pytest_of(test, "--run-limit", "50", conftest="limits.LAST_WORDS_S = 0.0")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "ended after 50 s, amid: test_it.py::test_takes_long\n" in done.stderr
    assert "'this is' == 'told'" in done.stderr.split("it had failed:")[1]


AFTER_ANOTHER = """
def test_is_another():
    pass

def go_on():
    began_s = os.times().elapsed
    while os.times().elapsed < began_s + 0.05:
        pass
"""
"""What a test begins after `go_on` is its own: the kernel notes hundredths of a second."""


@pytest.mark.parametrize(
    ("name", "late_s", "options"), [("the run", END_S, ()), ("gw0", WORKER_EXIT_S, ("-n", "1"))]
)
def test_a_thread_that_a_test_leaves_behind_is_named_and_ends_the_run(
    pytest_of: Run, name: str, late_s: float, options: tuple[str, ...]
) -> None:
    test = f"""
def stay():
    threading.main_thread().join()  # until the process ends
    it_is({late_s})
    threading.Event().wait()

def test_leaves_a_thread():
    go_on()
    threading.Thread(target=stay, name="left").start()
"""
    done = pytest_of(AFTER_ANOTHER + test, *options, conftest="limits.LAST_WORDS_S = 0.0")
    assert (done.returncode, "2 passed" in done.stdout) == (1, True), done.stdout
    assert f"{name} does not end after its tests. It waits for:\nthread left, " in done.stderr
    assert "begun amid test_it.py::test_leaves_a_thread\n" in done.stderr
    assert "in _shutdown\n" in done.stderr, "what it does"


def test_the_last_tests_are_named_if_a_run_does_not_end_and_they_left_nothing(
    pytest_of: Run,
) -> None:
    test = f"""
import atexit

def hang():
    it_is({END_S})
    signal.pause()

def test_leaves_a_hook():
    atexit.register(hang)
"""
    done = pytest_of(test, conftest="limits.LAST_WORDS_S = 0.0")
    assert (done.returncode, "1 passed" in done.stdout) == (1, True), done.stdout
    assert "nothing that a test left; the last: test_it.py::test_leaves_a_hook\n" in done.stderr


def test_a_fork_that_holds_what_the_process_waits_for_is_named_and_ended(
    pytest_of: Run, are_dead: Callable[[], bool]
) -> None:
    test = """
from multiprocessing import resource_tracker

def test_forks():
    go_on()
    resource_tracker.ensure_running()
    if pid := os.fork():
        (HERE / "pids").write_text(str(pid))
    else:
        signal.pause()
"""
    done = pytest_of(AFTER_ANOTHER + test, conftest="limits.GRACE_S = 0.0")
    assert (done.returncode, "2 passed" in done.stdout) == (1, True), done.stdout
    left = done.stderr.split("left processes behind:\n")[1].splitlines()
    assert [line.rpartition(", begun amid ")[2] for line in left] == ["test_it.py::test_forks"]
    eventually(are_dead)


@pytest.mark.parametrize("options", [[], ["-n", "1"]])
def test_a_failure_that_leaves_an_executor_behind_is_told(
    pytest_of: Run, options: list[str]
) -> None:
    test = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, resource_tracker

def test_fails():
    resource_tracker.ensure_running()
    side = ProcessPoolExecutor(1, get_context("fork"))
    assert side.submit(abs, -1).result() == 2
"""
    done = pytest_of(test, *options, conftest="limits.GRACE_S = 0.0")
    assert (done.returncode, "assert 1 == 2" in done.stdout) == (1, True), done.stdout


@pytest.mark.parametrize("options", [[], ["-n", "1"]])
def test_sigterm_ends_a_run_whose_fixtures_clean_up(
    pytest_of: Run, are_dead: Callable[[], bool], tmp_path: Path, options: list[str]
) -> None:
    test = """
import pytest
from support.processes import child

@pytest.fixture
def cleaned():
    yield
    (HERE / "cleaned").touch()

@pytest.fixture
def sleeper(cleaned):
    with child(["sleep", "infinity"]) as process:
        (HERE / "pids").write_text(str(process.pid))
        yield

def test_is_terminated(sleeper):
    run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    os.kill(run, signal.SIGTERM)
    signal.pause()
"""
    done = pytest_of(test, *options)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "Terminated" in done.stdout
    assert (tmp_path / "cleaned").exists()
    assert "left processes behind" not in done.stderr
    eventually(are_dead)


def test_a_second_sigterm_does_not_end_the_cleaning_up(pytest_of: Run, tmp_path: Path) -> None:
    """`timeout` sends one to the process, and one to its group."""
    test = """
import pytest

@pytest.fixture
def cleaned():
    yield
    os.kill(os.getpid(), signal.SIGTERM)
    (HERE / "cleaned").touch()

def test_is_terminated(cleaned):
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""
    done = pytest_of(test)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert (tmp_path / "cleaned").exists()


def test_sigterm_ends_a_fork_of_a_test_at_once(pytest_of: Run) -> None:
    done = pytest_of("""
def test_forks():
    if not (pid := os.fork()):
        signal.pause()
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM
""")
    assert done.returncode == 0, done.stdout


def test_forks_of_a_warm_interpreter_end_with_it(tmp_path: Path) -> None:
    warm = Interpreter(sys.executable, [], tmp_path / "log", os.environ)
    with contextlib.closing(warm), (tmp_path / "out").open("wb") as out:
        fork = Fork(warm, ["-c", "import signal; signal.pause()"], out)
        warm.close()  # as when the process of the tests has ended
        try:
            eventually(lambda: not lives(fork.pid))
        finally:
            fork.end()


def test_children_are_interrupted_though_the_run_began_in_the_background(pytest_of: Run) -> None:
    """A shell has its background jobs ignore SIGINT, and what they start inherits that."""
    test = """
from support.processes import child

def test_interrupts():
    with child(["sleep", "infinity"]) as sleeper:
        sleeper.send_signal(signal.SIGINT)
        assert sleeper.wait() == -signal.SIGINT
"""
    done = pytest_of(test, prefix=("sh", "-c", "trap '' INT; exec \"$@\"", "sh"))
    assert done.returncode == 0, done.stdout
