"""A Python that has imported what takes long, and forks for each script.

    python warm_interpreter.py SOCKET MODULE ...

A message on SOCKET is JSON: a command line as Python's, changes of the environment, a process
whose network and mounts the script shares or 0, and the spares to keep (see `keep_spares`). With
it come file descriptors: the script's input, its output, where its process id and exit code go,
and any whose numbers become its first arguments.
"""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
from multiprocessing import util
from pathlib import Path

PR_SET_PDEATHSIG = 1
OUT_OF_THE_WAY = 900
"""A descriptor above those that a process hands to one that it spawns."""


def supervise(child: int, tell: int) -> None:
    """Tell the tests how the process ended, which has told them its id."""
    _, status = os.waitpid(child, 0)
    os.write(tell, struct.pack("i", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def end_with(parent: int) -> None:
    """Get SIGTERM when the parent ends, or rather its thread that forked: it has no other."""
    assert ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) == 0
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), signal.SIGTERM)


def next_command(requests: socket.socket) -> list[str]:
    """Serve requests; return in each fork that is to run a script, with its command line."""
    interpreter = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 8)
        if not message:
            os._exit(0)  # the tests are over
        if os.fork() > 0:
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        end_with(interpreter)
        supervisor = os.getpid()
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        read, write, tell, *passed = descriptors
        if (child := os.fork()) > 0:
            for descriptor in (read, write, *passed):
                os.close(descriptor)
            supervise(child, tell)
        end_with(supervisor)
        os.setsid()
        os.write(tell, struct.pack("i", os.getpid()))  # now, as its group can be ended
        os.close(tell)
        os.dup2(read, 0)
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(read)
        os.close(write)
        (script, *arguments), environ, node, spares = json.loads(message)
        os.environ.update(environ)
        if node:
            enter(node)
        keep_spares(spares)
        return [script, *map(str, passed), *arguments]


def enter(node: int) -> None:
    """Share the network and the mounts of a process."""
    here, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{node}/ns/{name}", os.O_RDONLY) for name in ("net", "mnt")]
    for space in spaces:
        assert libc.setns(space, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(space)
    os.chdir(here)


def keep_spares(spares: list[int]) -> None:
    """Have the first `spares[0]` processes that this one spawns be forks, which import nothing.

    They are forked now, as this process has one thread, and wait for their command. Each of them
    keeps the rest of `spares` for those that it spawns itself.
    """
    if not spares:
        return
    waiting = [spare(spares[1:]) for _ in range(spares[0])]
    spawn = util.spawnv_passfds

    def spawn_or_wake(path: object, arguments: list, passed: list[int]) -> int:
        if "--multiprocessing-fork" not in arguments or not waiting:
            return spawn(path, arguments, passed)
        pid, line = waiting.pop(0)
        program = arguments[arguments.index("-c") + 1]
        message = json.dumps([program, list(passed), dict(os.environ)])
        with line:
            socket.send_fds(line, [message.encode()], list(passed))
        return pid

    util.spawnv_passfds = spawn_or_wake


def spare(spares: list[int]) -> tuple[int, socket.socket]:
    """Fork a process that becomes one which this process spawns, or ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) > 0:
        theirs.close()
        return pid, ours
    ours.close()
    line = socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY))
    theirs.close()
    os.closerange(3, OUT_OF_THE_WAY)  # as one that is spawned has nothing else
    message, came, _, _ = socket.recv_fds(line, 1 << 20, 64)
    line.close()
    if not message:
        os._exit(0)
    program, wanted, environ = json.loads(message)
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, OUT_OF_THE_WAY) for descriptor in came]
    os.closerange(3, OUT_OF_THE_WAY)
    for number, descriptor in zip(wanted, above, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    if "PROMETHEUS_MULTIPROC_DIR" in environ:  # which is read when this is imported
        values = importlib.import_module("prometheus_client.values")
        values.ValueClass = values.get_value_class()
    keep_spares(spares)
    gc.enable()
    sys.argv = ["-c", "--multiprocessing-fork"]
    exec(program, {"__name__": "__main__"})  # and exits


if __name__ == "__main__":
    gc.disable()
    del sys.path[0]  # where this file lies
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"a fork has one thread, and this has {threads}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.argv = next_command(socket.socket(fileno=int(sys.argv[1])))
    gc.enable()
    if sys.argv[0] == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    elif sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
