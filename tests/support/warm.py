"""Scripts as forks of a Python that has imported what takes long: they begin at once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from support.processes import end, start
from support.waiting import HANG_S

PROGRAM = Path(__file__).with_name("warm_interpreter.py")
IMPORT_S = 480.0
"""How long the imports may take, beside other tests' processes."""


class Interpreter:
    """The process that forks. It ends with `close`, and in any case with this process.

    Its forks get SIGTERM then.
    """

    def __init__(
        self, python: Path | str, modules: Sequence[str], log: Path, environ: Mapping[str, str]
    ) -> None:
        """`environ` is all that its forks find there, but for what each is given."""
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.log = log
        self.forks = 0
        command = [python, PROGRAM, str(theirs.fileno()), *modules]
        with theirs, log.open("wb") as written:
            self._process = start(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        self.line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(HANG_S)
        end(self._process)


class Fork:
    """A script run by a fork, with the part of Popen that is used here."""

    stdout = stderr = None

    def __init__(
        self,
        warm: Interpreter,
        command: Sequence[str],
        out: IO[bytes],
        *passed: int,
        node: int = 0,
        spares: Sequence[int] = (),
        **environ: str,
    ) -> None:
        """`command` is Python's: a script or -m or -c, and arguments.

        The numbers of the descriptors `passed` become the script's first arguments.

        `node` is a process whose network and mounts the script shares. The first `spares[0]`
        processes that the script spawns are forks as well, with the rest of `spares` for theirs.
        """
        self._warm = warm
        self._warm.forks += 1
        self._code: int | None = None
        self._ended, tell = os.pipe()
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        message = json.dumps([command, environ, node, spares]).encode()
        try:
            descriptors = [read, out.fileno(), tell, *passed]
            socket.send_fds(self._warm.line, [message], descriptors)
        finally:
            os.close(read)
            os.close(tell)
        assert select.select([self._ended], [], [], IMPORT_S)[0], self._warm.log.read_text()[-6000:]
        told = os.read(self._ended, 4)
        assert told, self._warm.log.read_text()[-6000:]
        (self.pid,) = struct.unpack("i", told)

    @property
    def returncode(self) -> int | None:
        return self._code

    def poll(self) -> int | None:
        if self._code is None and select.select([self._ended], [], [], 0)[0]:
            self.wait()
        return self._code

    def wait(self, timeout: float = HANG_S) -> int:
        if self._code is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            told = os.read(self._ended, 4)
            (self._code,) = struct.unpack("i", told) if told else (-signal.SIGKILL,)
            os.close(self._ended)
            self._warm.forks -= 1
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self, grace_s: float = 0.0) -> int:
        """Have the script end within `grace_s` of its input's end, or kill it and its group."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self.wait(HANG_S)
