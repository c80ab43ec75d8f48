"""A client that has reserved memory and says that its device writes to it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from support.daemon import Daemon
from support.processes import child

RESERVED_BYTES = 8 << 20
WRITER = """
import os, sys
from ecd_client import Client
from ecd_client.device.attach import attach
from ecd_proto.shm.session_page import DMA_OUTLASTS, DMA_WORD
from ecd_proto.v1 import cache_pb2 as pb

address, shm, nbytes, *steps = sys.argv[1:]
client = Client(address, namespace="n")
session = client._connection.session()
key = pb.Key(namespace="n", mm_hash="being written")
content = pb.Content(dtype="uint8", shape=[int(nbytes)], nbytes=int(nbytes))
item = pb.ReserveItem(key=key, content=content)
reply = session.calls.now("reserve", pb.ReserveRequest(session=session.token, items=[item]))
offset = reply.outcomes[0].reserved.extent.offset

def drop_lock():
    for fd in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{fd}").endswith(".sessions"):
            os.dup2(os.open("/dev/null", os.O_RDWR), int(fd))

for step in [*steps, "say", "line"]:
    if step == "attach":
        attach(f"{shm}/{session.incarnation}.attach", session.token)
    if step == "word":
        session.puts._words[DMA_WORD] = 1
    if step == "outlasts":
        session.puts._words[DMA_WORD] = DMA_OUTLASTS
    if step == "clear":
        session.puts._words[DMA_WORD] = 0
    if step == "close":
        client.close()
    if step == "lives on":
        session.ref()  # or the end of the stream closes the session's files
        drop_lock()
        session.abandon()
    if step == "say":
        print(offset, flush=True)
    if step == "line":
        sys.stdin.readline()
"""


@contextlib.contextmanager
def writer(daemon: Daemon, *steps: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The client once it has taken these steps, or has come to "say"; its memory's offset.

    The step "line" waits for a line of its input.
    """
    command = [sys.executable, "-c", WRITER, daemon.address, str(daemon.shm), str(RESERVED_BYTES)]
    about = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with child([*command, *steps], **about) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


def reserved(daemon: Daemon) -> int:
    return daemon.status().pools[0].reserved_bytes
