"""The steps of a get and of a put, with cold caches and once each ms, beside bare ones.

    python benchmarks/steps.py [--rounds N] [--output FILE.md]

Cold means as in `life.py`: 64 MiB of other memory written and 5 ms of sleep before each. A step
that is part of another one costs less within it, as the other has warmed some of what both touch.
The bare steps show what Python and the kernel take for as little as a call that does nothing.
Calls and bytecodes are those of Python functions; what C does within them is not counted.
"""

from __future__ import annotations

import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest import mock

import typer
from common import MIB, end_daemon, report, start_daemon
from life import fresh, pause, settle, timed

from ecd_client import Client
from ecd_client.shared.index import OnMiss
from ecd_client.tensors import TensorSource
from ecd_client.writer import describe_entry
from ecd_proto.shm.rows import key_record, row_is_whole

NBYTES = 64 << 10
Step = Callable[[], object]


def counted(step: Step) -> tuple[int, int]:
    """Calls of Python functions in one such step, and their bytecodes."""
    calls, bytecodes = 0, 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal calls, bytecodes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        calls += event == "call"
        bytecodes += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        kept = step()
    finally:
        sys.settrace(None)
    del kept
    return calls, bytecodes


class Finished:
    """Ends what a timed step began, once the step's time is taken."""

    def __init__(self, end: Step) -> None:
        self._end = end

    def __del__(self) -> None:
        self._end()


def bare() -> dict[str, Step]:
    """Steps that have nothing to do with ecd."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    lock, packed, data = threading.Lock(), struct.Struct("<QQQ"), bytes(256)
    source, target = fresh(NBYTES), fresh(NBYTES)

    def locked() -> None:
        with lock:
            pass

    def send() -> None:
        ours.send(b"x")
        theirs.recv(1)

    return {
        "a call that does nothing": lambda: None,
        "a lock": locked,
        "three words unpacked": lambda: packed.unpack_from(data),
        "a datagram sent and received": send,
        "a copy of 64 KiB by torch": lambda: target.copy_(source),
    }


def of_ecd(client: Client) -> dict[str, Step]:
    """Steps of this client's gets and puts; the daemon has `k0`."""
    session: Any = client._connection.session()
    index, puts = session.index, session.puts
    numbers = count(1)
    held = client.get("k0")
    assert held is not None

    def get() -> None:
        with client.get("k0") as item:
            _ = item.tensor

    def pin() -> None:
        index.unpin(index.pin(client.namespace, "k0", OnMiss.COUNT)[1])

    def put() -> None:
        client.put(f"k{next(numbers)}", source)

    def claim() -> object:
        key = client.namespace, f"claimed {next(numbers)}"
        claimed = puts.claim(describe_entry(key, "uint8", (NBYTES,), 0.0, b""))
        return Finished(partial(puts.write, claimed, TensorSource(source).copy_to))

    source = fresh(NBYTES)
    record = index.record(client.namespace, "k0")
    row = index._find(record)[1]
    return {
        "contains": lambda: client.contains(["k0"]),
        "- the key as a row has it": lambda: key_record(1, "k0"),
        "- its row found": lambda: index._find(record),
        "- - the row's checksum": lambda: row_is_whole(row),
        "get, tensor, close": get,
        "- pin and unpin": pin,
        "- the tensor": lambda: held.tensor,
        "put of 64 KiB": put,
        "- the claim": claim,
        "- ring": puts._ring,
    }


def by_calls(address: str, clients: ExitStack) -> dict[str, Step]:
    """Gets and puts of clients that read no shared memory: their kernels lack membarrier(2).

    With the stream that blocking calls share (`Exchange`), and with a unary call for each.
    """
    source, steps = fresh(NBYTES), dict[str, Callable[[], object]]()
    for way in ("over one stream", "by unary calls"):
        with mock.patch("ecd_client.shared.board.join_barriers", return_value=False):
            client = clients.enter_context(Client(address, namespace=way))
        session: Any = client._connection.session()
        if way == "by unary calls":
            session.calls.now = session.calls.alone
        client.put("k0", source)
        numbers = count(1)

        def get(client: Client = client) -> None:
            with client.get("k0") as item:
                _ = item.tensor

        def put(client: Client = client, numbers: Iterator[int] = numbers) -> None:
            client.put(f"k{next(numbers)}", source)

        steps |= {f"get, tensor, close {way}": get, f"put of 64 KiB {way}": put}
    return steps


def main(
    rounds: Annotated[int, typer.Option(help="Of each step.")] = 60,
    output: Annotated[Path | None, typer.Option(help="Write Markdown here as well.")] = None,
) -> None:
    settle()
    rows = [["", "cold", "each ms", "calls", "bytecodes"]]
    with tempfile.TemporaryDirectory() as directory:
        daemon, address = start_daemon(Path(directory), "steps", 256 * MIB)
        try:
            with ExitStack() as clients:
                client = clients.enter_context(Client(address, namespace="steps"))
                client.put("k0", fresh(NBYTES))
                for number in range(3):
                    client.put(f"first {number}", fresh(NBYTES))
                steps = bare() | of_ecd(client) | by_calls(address, clients)
                for name, step in steps.items():
                    cold = []
                    for _ in range(rounds):
                        pause()
                        cold.append(timed(step))
                    warm = []
                    for _ in range(rounds):
                        time.sleep(0.001)  # the daemon answers a put meanwhile
                        warm.append(timed(step))
                    rows.append([name, f"{median(cold):,.0f} us", f"{median(warm):,.1f} us"])
                for row, step in zip(rows[1:], steps.values(), strict=True):
                    row += map(str, counted(step))  # last, as it slows Python down
        finally:
            end_daemon(daemon)
    report("The steps of a get and of a put, medians.", rows, output, 100)


if __name__ == "__main__":
    typer.run(main)
