"""Processes that tests start: each ends with its test, whatever fails in it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from support.waiting import HANG_S

MARK = "TEST_RUN_OF"
"""A variable of the environment, by which all processes that come of a test run are found.

It names a process and those that it comes of: a run finds what its workers have started.
"""
GRACE_S = 10.0
"""How long a process that is asked to end may clean up; it is killed then, which fails nothing."""

Command = Sequence[str | os.PathLike[str]]


@contextlib.contextmanager
def child(
    command: Command, *, grace: bool = False, **about: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A process in a session of its own, which ends with the block, as all that it started.

    With `grace` it gets SIGTERM first, to clean up. `about` is Popen's.
    """
    process = start(command, **about)
    try:
        yield process
    finally:
        end(process, grace=grace)


def run(
    command: Command,
    *,
    input: Any = None,
    capture_output: bool = False,
    check: bool = False,
    **about: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`, and for the whole of the process's session.

    It may take long, if it says something: without a word for HANG_S it is taken for hung.
    """
    if capture_output:
        about |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        about["stdin"] = subprocess.PIPE
    with child(command, **about) as process:
        heard, out, err = "None None", None, None
        while process.returncode is None:
            try:
                out, err = process.communicate(input, timeout=HANG_S)
            except subprocess.TimeoutExpired as late:
                said, input = f"{late.stdout!r} {late.stderr!r}", None
                if said == heard:
                    raise AssertionError(f"{command} did not end: {said}") from None
                heard = said
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def start(command: Command, **about: Any) -> subprocess.Popen[Any]:
    """Start a process in a session of its own, for an object that has to `end` it."""
    return subprocess.Popen(command, start_new_session=True, **about)


def end(process: subprocess.Popen[Any], *, grace: bool = False) -> None:
    """End a process that was started in a session of its own, and its group: SIGKILL last."""
    if process.poll() is None and grace:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(HANG_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


# -- all that a run has started ----------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """SIGTERM ends a run as Ctrl-C does: fixtures clean up."""


def mark() -> None:
    """Mark this process, and so all that it will start, and have SIGTERM interrupt it alone.

    No signal stays ignored in what it starts. A shell's background job ignores SIGINT, and so would
    each child that is to be interrupted.
    """
    os.environ[MARK] = f"{os.environ.get(MARK, '')}/{os.getpid()}"
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            is_int = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _terminate)
    os.register_at_fork(
        before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_default_sigterm
    )


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # the next would end the cleaning up
    raise Terminated


_before_fork = threading.local()


def _hold_sigterm() -> None:
    """Python forgets a signal that a fork gets before it has begun; the kernel keeps it."""
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _default_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_sigterm()


def started() -> dict[int, str]:
    """The processes that live and come of this one, however: their commands by their ids."""
    me, found = psutil.Process(), {}
    children = set(me.children(recursive=True))
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is not ours to look at
            is_child = each in children or str(me.pid) in each.environ().get(MARK, "").split("/")
            if is_child and each != me:
                found[each.pid] = " ".join(each.cmdline())
    return found


def kill_all() -> dict[int, str]:
    """End all that this process has started; returns what lived."""
    killed: dict[int, str] = {}
    while left := {pid: what for pid, what in started().items() if pid not in killed}:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= left
    return killed
