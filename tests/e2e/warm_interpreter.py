"""A Python that has imported vLLM, which takes ten seconds, and forks for each script.

    python warm_interpreter.py SOCKET

A message on SOCKET is JSON: a command line as Python's, and changes of the environment. With it
come file descriptors: the script's input, its output, where its process id and exit code go, and
any whose numbers become its first arguments.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
from pathlib import Path

WARM = (
    *("vllm.entrypoints.llm", "vllm.engine.arg_utils", "vllm.v1.engine.llm_engine"),
    *("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.entrypoints.openai.api_server"),
    *("vllm.model_executor.models.qwen2_5_vl", "vllm.model_executor.models.qwen3_vl"),
)


def supervise(child: int, tell: int) -> None:
    """Tell the tests which process it is, and how it ended."""
    os.write(tell, struct.pack("i", child))
    _, status = os.waitpid(child, 0)
    os.write(tell, struct.pack("i", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def next_command(requests: socket.socket) -> list[str]:
    """Serve requests; return in each fork that is to run a script, with its command line."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 8)
        if not message:
            os._exit(0)  # the tests are over
        if os.fork() > 0:
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        read, write, tell, *passed = descriptors
        if (child := os.fork()) > 0:
            for descriptor in (read, write, *passed):
                os.close(descriptor)
            supervise(child, tell)
        os.setsid()
        os.close(tell)
        os.dup2(read, 0)
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(read)
        os.close(write)
        (script, *arguments), environ = json.loads(message)
        os.environ.update(environ)
        return [script, *map(str, passed), *arguments]


if __name__ == "__main__":
    gc.disable()
    for module in WARM:
        importlib.import_module(module)
    gc.freeze()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"a fork has one thread, and this has {threads}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.argv = next_command(socket.socket(fileno=int(sys.argv[1])))
    gc.enable()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
