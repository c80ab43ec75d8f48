"""What a campaign asks of a client process."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from campaign.content import (
    CALL_TIMEOUT_S,
    NAMESPACES,
    RECOVERY_LIMIT_S,
    Found,
    Known,
    put,
)
from ecd_client import Client, DaemonUnavailable, EcdError
from ecd_client.shared.puts import NewEntry
from fuzz.test_page import Vandal
from support.lying_peer import NBYTES
from support.node_client import content
from support.waiting import HANG_S

if TYPE_CHECKING:
    from campaign.worker import Worker

RECOVERY_GOAL_S = 1.0
"""What takes longer is explained in clients.log."""


def pause(worker: Worker) -> None:
    for idle in worker.idle:
        idle.clear()
    worker.paused.set()
    for idle in worker.idle:
        idle.wait(HANG_S)


def go_on(worker: Worker) -> None:
    worker.paused.clear()


def fork(worker: Worker) -> int:
    """A child is forked amid the requests, and uses what is not its own. Returns its code."""
    pid = os.fork()
    if pid == 0:
        code = 7
        try:
            signal.alarm(10)
            worker.client.get("k", namespace=NAMESPACES[0])
        except DaemonUnavailable:
            worker.client.close()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def orphan(worker: Worker, seconds: float) -> int:
    """A child that lives for so long, whoever else dies. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    return pid


def reopen(worker: Worker) -> bool:
    """Close the client while other threads are amid puts and gets, and make another."""
    old = worker.client
    old.close()
    worker.connect()
    return True


def works(worker: Worker, key: str) -> float:
    """When a put and a get of it have worked, on the node's monotonic clock; -1: never."""
    begun_s, number = time.monotonic(), 0
    said = ""
    while time.monotonic() < begun_s + RECOVERY_LIMIT_S:
        number += 1
        tried = Known("probe", f"{key} {number}", 2000)
        try:
            with contextlib.closing(Found(worker.ledger, tried)) as found:
                worker.client.wait_connected(1.0)
                put(worker.client, tried, 100.0)
                found.item = worker.client.get(tried.mm_hash, namespace="probe")
                found.look()
                if found.item is not None:
                    if (took_s := time.monotonic() - begun_s) > RECOVERY_GOAL_S:
                        print(f"{worker.name}, {key}: {took_s:.2f} s, {said}", file=sys.stderr)
                    return time.monotonic()
                said = "a miss"
        except EcdError as error:
            said = str(error)
        said = f"at {time.monotonic() - begun_s:.2f} s still {said}"
        time.sleep(0.01)
    return -1.0


def keep(worker: Worker, key: str, cost: float) -> bool:
    return put(worker.client, Known("probe", key, 3000), cost)


def kept(worker: Worker, key: str, wait_s: float, nodes: list[str]) -> bool:
    wanted = Known("probe", key, 3000)
    with contextlib.closing(Found(worker.ledger, wanted)) as found:
        found.item = worker.client.get(key, wait_s, namespace="probe", nodes=nodes)
        found.look()
        return found.item is not None


def vandalize(worker: Worker, seed: str, acts: int) -> None:
    about: Any = SimpleNamespace(address=worker.address, shm=Path(worker.shm))
    with Client(worker.address, namespace="vandal", call_timeout=CALL_TIMEOUT_S) as client:
        session = client._connection.session()
        if session.puts is None:
            return  # the daemon's index is of another version
        try:
            vandal = Vandal(about, client)
            for number in range(acts):
                vandal.act(random.Random(f"{seed} {number}"))
        except Exception:
            for _ in range(200):  # the daemon may be away, and the end of its stream not be read
                if client._connection.current is not session:
                    return
                time.sleep(0.01)
            raise


def spoil_socket(worker: Worker, seed: str, node: str) -> None:
    """Garbage to the daemon's socket, or to its port for peers, from this node."""
    chance = random.Random(seed)
    host, _, port = node.partition(":")
    family = socket.AF_INET if node else socket.AF_UNIX
    at: Any = (host, int(port)) if node else worker.address.removeprefix("unix://")
    start = chance.choice((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"))
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as peer:
        peer.settimeout(0.2)
        peer.connect(at)
        peer.sendall(start + chance.randbytes(chance.choice((1, 9, 100, 20_000))))
        if chance.random() < 0.5:
            peer.recv(100)


def squeeze(worker: Worker, nbytes: int, seconds: float) -> None:
    """A put that takes so long: what it writes to cannot be evicted meanwhile."""
    about = f"squeeze {time.monotonic()}", "uint8", (nbytes,), nbytes, b"", 0.0
    with Client(worker.address, call_timeout=CALL_TIMEOUT_S) as client:
        client._writer.put(NewEntry("probe", *about), lambda *_: time.sleep(seconds), 5.0)


def believe(worker: Worker, node: str) -> str:
    """Get by a hint what a peer says it has: its true bytes, or nothing."""
    item = worker.client.get(f"from {node} {time.monotonic()}", 1.5, nodes=[node])
    if item is None:
        return "miss"
    with item:
        if bytes(item.view) != content(NBYTES, 1)[: item.nbytes]:
            worker.complain("wrong", f"a lie of {node} was believed")
    return "hit"


ASKED: dict[str, Callable[..., object]] = {
    asked.__name__: asked
    for asked in (
        *(pause, go_on, fork, orphan, reopen, works, keep, kept, vandalize, spoil_socket),
        *(squeeze, believe),
    )
}
