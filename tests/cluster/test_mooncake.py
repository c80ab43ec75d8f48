"""Mooncake's own faults, one test each, through our engine: reads recover, or fail in time.

The engines are those of daemons, each in a process of its own, as on two machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from ecd_client import Client
from support.daemon import Daemon, eventually
from support.node_client import content, put
from support.nodes import Node, NodeClient, NodeDaemon

MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]
OnNode = Callable[..., tuple[NodeDaemon, NodeClient]]
BOUND_S = 6.0
MIB = 1 << 20


def got(client: Client, key: str, node: str) -> bytes | None:
    """The bytes that a fetch brings within its deadline; None: a miss."""
    started = time.monotonic()
    [found] = client.get_async([key], 5.5, only_if_written=True, nodes=[[node]])
    item = found.result(BOUND_S)
    assert time.monotonic() - started < BOUND_S
    if item is None:
        return None
    with item:
        return bytes(item.view)


def lanes_of(daemon: Daemon, port: int) -> list[int]:
    """The daemon's descriptors of connections to a port."""
    inodes = {
        line.split()[9]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{daemon.pid}/net/{table}").read_text().splitlines()[1:]
        if line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "01"
    }
    found = []
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:[") and target[8:-1] in inodes:
                found.append(int(link.name))
    return found


def handshake(endpoint: str) -> dict:
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(struct.pack("<Q", 3) + b"\x01{}")
        with connection.makefile("rb") as answer:
            (length,) = struct.unpack("<Q", answer.read(8))
            return json.loads(answer.read(length)[1:])


def cut(daemon: Daemon, port: int) -> int:
    """End the daemon's connections to a port, as a firewall that forgot them does."""
    cut = 0
    for fd in lanes_of(daemon, port):
        pidfd = os.pidfd_open(daemon.pid)
        libc = ctypes.CDLL(None, use_errno=True)
        copy = libc.syscall(438, pidfd, fd, 0)  # pidfd_getfd
        os.close(pidfd)
        assert copy >= 0, os.strerror(ctypes.get_errno())
        with socket.socket(fileno=copy) as lane:
            with contextlib.suppress(OSError):
                lane.shutdown(socket.SHUT_RDWR)
            cut += 1
    return cut


class IdlePair:
    """Two daemons whose connections lie idle from `since_s` on."""

    def __init__(self, make_peer: MakePeer) -> None:
        self.a, self.b = make_peer("128MiB").start(), make_peer("128MiB").start()
        self.here, self.there = Client(self.a.address), Client(self.b.address)
        for number in range(7):
            put(self.here, f"k{number}", 8 * MIB, number)
        self.check(0)

    def check(self, number: int) -> None:
        assert got(self.there, f"k{number}", self.here.node) == content(8 * MIB, number)
        self.since_s = time.monotonic()

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture(scope="module", autouse=True)
def idle(make_lasting_peer: MakePeer) -> Iterator[IdlePair]:
    """Idle while the other tests of this module run."""
    with contextlib.closing(IdlePair(make_lasting_peer)) as pair:
        yield pair


def test_connections_that_died_fail_one_read_each_and_no_fetch(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    a, b = make_peer("128MiB").start(), make_peer("128MiB").start()
    here, there = client_of(a), client_of(b)
    data_port = handshake(a.peers().engine)["tcp_data_port"]
    for number in range(40):
        put(here, f"k{number}", MIB, number)
    founds = there.get_async([f"k{n}" for n in range(20)], 5.0, nodes=[[here.node]] * 20)
    for found in founds:
        found.result(10).close()
    assert len(lanes_of(b, data_port)) > 1
    for number in range(20, 26):
        assert cut(b, data_port) > 0
        assert got(there, f"k{number}", here.node) == content(MIB, number)
    status = b.peers()
    [peer] = status.peers
    assert peer.failed_reads > 0, "the cost is in the metrics"
    assert f"ecd_read_retries_total {float(peer.failed_reads)}" in b.metrics()
    assert status.fetches["fetched"] == 26
    assert sum(status.fetches.values()) == 26
    for daemon in (a, b):
        daemon.check_nothing_leaked()


@pytest.fixture
def restarting(pair: tuple[Node, Node], on_node: OnNode) -> Restarting:
    """A daemon whose engine has few ports, and another that reads from it."""
    near, _ = pair
    # Ports of the life before are free at once, instead of after a minute.
    near.run("sysctl", "-qw", "net.ipv4.tcp_max_tw_buckets=0", "net.ipv4.tcp_fin_timeout=1")
    return Restarting(*pair, on_node)


class Restarting:
    def __init__(self, near: Node, far: Node, on_node: OnNode) -> None:
        self.near = near
        self.has, self.owner = on_node(near, "64MiB", ECD_ENGINE_PORTS="18200-18201")
        self.wants, self.asker = on_node(far, "64MiB")

    def again(self, ports: str) -> dict:
        """Another life, on ports of this range; what its engine says of itself."""
        self.has.kill()
        self.has._settings["ECD_ENGINE_PORTS"] = ports
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(AssertionError):
                self.has.start()
                break
            assert time.monotonic() < deadline, self.has.text()
        return self.engine()

    def engine(self) -> dict:
        """Ports of the daemon's engine."""
        code = (
            "import asyncio, json, sys; from ecd.cluster.handshake import describe; "
            "print(json.dumps(asyncio.run(describe(sys.argv[1]))))"
        )
        return json.loads(self.near.run(sys.executable, "-c", code, self.has.peers().engine))

    def arrives(self, key: str, seed: int) -> None:
        """Soon, and nothing else in its place before."""

        def found() -> bool:
            got = self.asker.get(key, nodes=[self.near.peer], seed=seed)
            assert got["seconds"] < BOUND_S
            assert not got["found"] or got["right"], "wrong bytes"
            return got["found"]

        eventually(found, 20.0, "the new life is read")


def test_a_peer_that_restarts_on_the_same_ports_is_not_taken_for_its_old_self(
    restarting: Restarting,
) -> None:
    """The new life's memory lies where the old one's did; nothing of it is taken for an entry."""
    two = restarting
    two.owner.put("old", seed=1)
    two.owner.put("other", seed=2)
    two.arrives("old", seed=1)
    before = two.engine()
    for seed in range(3, 31):  # the engine draws its two ports at random: every other time the same
        now = two.again("18200-18201")
        two.owner.put("other", seed=seed)
        two.wants.evict_all()
        two.arrives("other", seed=seed)
        same = ("name", "tcp_data_port")
        if [now[port] for port in same] == [before[port] for port in same]:
            return
        before = now
    pytest.fail("two ports, and never the same twice")


def test_the_same_rpc_port_with_another_data_port(restarting: Restarting) -> None:
    """Mooncake keeps what it once learned of a peer's ports; bounded, it learns anew."""
    two = restarting
    two.owner.put("k", seed=1)
    two.arrives("k", seed=1)
    before = two.engine()
    for attempt in range(2, 30):
        # Two ports: the rpc port of before, and one that was not its data port.
        rpc, data = int(before["name"].rpartition(":")[2]), before["tcp_data_port"]
        now = two.again(f"{rpc - 1}-{rpc}" if data > rpc else f"{rpc}-{rpc + 1}")
        two.owner.put(f"k{attempt}", seed=attempt)
        two.arrives(f"k{attempt}", seed=attempt)
        if now["name"] == before["name"] and now["tcp_data_port"] != before["tcp_data_port"]:
            return
        before = now
    pytest.fail("the engine never kept its rpc port with another data port")


def test_more_requests_than_a_peers_queue_holds(make_peer: MakePeer, client_of: ClientOf) -> None:
    """Beyond about 2,000 at a time Mooncake's queue can stop for good; we keep to 64."""
    a, b = make_peer("64MiB").start(), make_peer("64MiB").start()
    here, there = client_of(a), client_of(b)
    count = 4000
    for number in range(count):
        here.put_bytes(f"k{number}", bytes([number % 251]) * 4096, "uint8", (4096,))
    waiting = set(range(count))
    for _attempt in range(8):  # a daemon has at most 1,024 keys on their way
        keys = sorted(waiting)
        founds = there.get_async(
            [f"k{n}" for n in keys], 5.5, only_if_written=True, nodes=[[here.node]] * len(keys)
        )
        for number, found in zip(keys, founds, strict=True):
            item = found.result(10)
            if item is not None:
                with item:
                    assert bytes(item.view) == bytes([number % 251]) * 4096
                waiting.discard(number)
        if not waiting:
            break
    assert not waiting
    put(here, "after", MIB, 5)
    assert got(there, "after", here.node) == content(MIB, 5), "the queue still works"
    status = b.peers()
    assert status.fetches["late"] == status.fetches["read failed"] == 0
    for daemon in (a, b):
        daemon.check_nothing_leaked()


def test_a_read_that_was_given_up_and_completes_late_harms_nobody(
    pair: tuple[Node, Node], on_node: OnNode
) -> None:
    """Given up after 1 s, complete seconds later: its extent is nobody else's in between."""
    near, far = pair
    has, owner = on_node(near, "64MiB")
    wants, asker = on_node(far, "64MiB", ECD_FETCH_TIMEOUT_S="1")
    owner.put("big", 48 * MIB, seed=1)
    owner.put("small")
    assert asker.get("small", nodes=[near.peer])["right"]
    near.throttle("64mbit")
    reply = asker.get("big", nodes=[near.peer])
    assert reply["found"] is False
    assert reply["seconds"] < 2
    assert wants.peers().set_aside_bytes == 48 * MIB
    refused = asker.ask("put", key="too much", nbytes=30 * MIB, seed=1)
    assert "PoolFull" in refused["error"], "what is set aside is not given away"
    # All the room there is, over and over, while the late bytes arrive.
    for number in range(12):
        asker.put(f"k{number}", 5 * MIB, seed=number)
        assert asker.get(f"k{number}", timeout=0.0, seed=number)["right"]
    eventually(lambda: wants.peers().set_aside_bytes == 0, 20, "the late read is over")
    assert asker.ask("put", key="now", nbytes=50 * MIB, seed=7)["stored"]
    assert asker.get("now", timeout=0.0, seed=7)["right"]
    near.throttle("10gbit")
    for daemon in (has, wants):
        daemon.check_nothing_leaked()


def test_a_small_read_does_not_wait_for_a_large_one(
    pair: tuple[Node, Node], on_node: OnNode
) -> None:
    """The pieces of the large read that are under way take 6 s."""
    near, far = pair
    has, owner = on_node(near, "64MiB")
    wants, asker = on_node(far, "64MiB", ECD_FETCH_TIMEOUT_S="20")
    for key, nbytes in (("first", 4096), ("large", 40 * MIB), ("small", 4096)):
        owner.put(key, nbytes, seed=1)
    assert asker.get("first", nodes=[near.peer])["right"]
    # Else the large one's connections fill the queue, and what is lost of the small one is late.
    near.run("sysctl", "-qw", "net.ipv4.tcp_wmem=4096 16384 131072")
    near.throttle("40mbit")
    other = NodeClient(wants)
    other.send("get", key="large", timeout=25.0, nodes=[near.peer], seed=1)
    eventually(lambda: any(peer.in_flight for peer in wants.peers().peers), 10, "it is under way")
    time.sleep(0.2)
    reply = asker.get("small", nodes=[near.peer])
    assert reply["right"]
    assert reply["seconds"] < 3
    [peer] = wants.peers().peers
    assert peer.in_flight == 1, "the large one is still on its way"
    near.throttle("10gbit")
    assert other.receive()["right"]
    other.close()
    for daemon in (has, wants):
        daemon.check_nothing_leaked()


def test_what_has_arrived_does_not_wait_for_others_to_begin(
    pair: tuple[Node, Node], on_node: OnNode
) -> None:
    """Four large reads are under way at a time, and twelve wait for their turn."""
    near, far = pair
    has, owner = on_node(near, "64MiB")
    wants, asker = on_node(far, "64MiB", ECD_FETCH_TIMEOUT_S="20")
    keys = [f"k{number}" for number in range(16)]
    for key in keys:
        owner.put(key, 2 * MIB)
    near.throttle("64mbit")
    asker.send("get_many", keys=keys, timeout=25.0, nodes=[near.peer])
    eventually(lambda: wants.peers().fetches["fetched"], 10, "one has arrived")
    [peer] = wants.peers().peers
    assert peer.in_flight > 4, "others have not begun"
    near.throttle("10gbit")
    assert asker.receive() == {"found": [True] * len(keys)}
    for daemon in (has, wants):
        daemon.check_nothing_leaked()


def test_a_read_too_slow_for_its_lease_to_vouch_for_it(
    pair: tuple[Node, Node], on_node: OnNode
) -> None:
    """The peer's identity is read after it, though it was read before."""
    near, far = pair
    has, owner = on_node(near, "16MiB")
    wants, asker = on_node(far, "16MiB")
    owner.put("quick")
    owner.put("slow", MIB, seed=1)
    assert asker.get("quick", nodes=[near.peer])["right"]
    near.throttle("80mbit")
    reply = asker.get("slow", nodes=[near.peer])
    assert reply["right"]
    assert reply["seconds"] > 0.05
    near.throttle("10gbit")
    [peer] = wants.peers().peers
    assert (peer.reads, peer.failed_reads) == (2, 0)
    for daemon in (has, wants):
        daemon.check_nothing_leaked()


def test_first_contact_with_nobody_holds_up_no_other(
    pair: tuple[Node, Node], on_node: OnNode
) -> None:
    near, far = pair
    _, owner = on_node(near)
    wants, asker = on_node(far)
    for number in range(30):
        owner.put(f"k{number}", 64 << 10, seed=number)
    assert asker.get("k0", nodes=[near.peer], seed=0)["right"]
    nobody = [f"10.77.0.{n}:9465" for n in range(100, 108)]  # no machine answers there
    second = NodeClient(wants)
    try:
        second.send("get_many", keys=["x"] * 8, timeout=5.0, nodes=nobody)
        took_s = []
        for number in range(1, 30):
            reply = asker.get(f"k{number}", nodes=[near.peer], seed=number)
            assert reply["right"]
            took_s.append(reply["seconds"])
        assert median(took_s) < 0.1
        assert max(took_s) < 2.0, "contact with a dead address takes 5 s and more"
        second.receive()
    finally:
        second.close()


# -- what Mooncake's ports expose ------------------------------------------------------------------


def one_sided(host: str, port: int, opcode: int, address: int, data: bytes, nbytes: int) -> bytes:
    """Send one request to Mooncake's data port, as anybody can without credentials."""
    with socket.create_connection((host, port), 5) as connection:
        with contextlib.suppress(ConnectionError):  # a write is refused before its last byte
            connection.sendall(struct.pack("<QQB7x", nbytes, address, opcode) + data)
        connection.settimeout(1)
        answer = bytearray()
        with contextlib.suppress(OSError):
            while len(answer) < nbytes and (chunk := connection.recv(1 << 20)):
                answer += chunk
        return bytes(answer)


def test_an_intruder_reads_every_registered_byte_and_can_write_none(
    make_peer: MakePeer, client_of: ClientOf
) -> None:
    """The reason for docs/security.md: keep these ports to yourself."""
    a = make_peer().start()
    here = client_of(a)
    secret = content(MIB, 9)
    put(here, "k", MIB, 9)
    told = handshake(a.peers().engine)
    host, port = told["tcp_data_host"], told["tcp_data_port"]
    pool = max(told["buffers"], key=lambda buffer: buffer["length"])
    read = one_sided(host, port, 0, pool["addr"], b"", pool["length"])
    assert secret in read, "nobody asks who reads"
    one_sided(host, port, 1, pool["addr"], b"\xee" * MIB, MIB)
    for buffer in told["buffers"]:
        one_sided(host, port, 1, buffer["addr"], b"\xee" * 16, 16)
    with here.get("k") as item:
        assert bytes(item.view) == secret, "written from outside"
    after = one_sided(host, port, 0, pool["addr"], b"", pool["length"])
    assert b"\xee" * 64 not in after
    b = make_peer().start()
    assert got(client_of(b), "k", here.node) == secret, "and it serves on"


ENGINE = """
import asyncio, json, sys
from pathlib import Path
from ecd.cluster.engine import Engine, EngineError, EngineSettings
from ecd.cluster.handshake import describe
from ecd_proto.mapping import Mapping

def access(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(at, 16) for at in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[1][:2]

async def main():
    engine = Engine(EngineSettings("127.0.0.1", sys.argv[1], "18200-18231"), b"i" * 16)
    pool = Mapping.of_memory(1 << 20)
    await engine.register(pool)
    buffers = (await describe(engine.endpoint))["buffers"]
    places = {"identity": engine.identity_address, "scratch": engine.reads.scratch.address}
    registered = {b["addr"] for b in buffers}
    print(json.dumps({n: (a in registered, access(a)) for n, a in places.items()}))
    try:
        await engine.register(pool)
    except EngineError as error:
        print(error)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("protocol", "identity", "scratch"),
    [("tcp", (True, "r-"), (False, "rw")), ("rdma", (True, "rw"), (True, "rw"))],
)
def test_devices_get_memory_that_they_can_register_and_read_into(
    protocol: str, identity: tuple[bool, str], scratch: tuple[bool, str]
) -> None:
    """Where there is no device, what is registered can still be seen: Mooncake takes tcp then."""
    ran = subprocess.run(
        [sys.executable, "-c", ENGINE, protocol], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    told, refused = ran.stdout.splitlines()[-2:]
    told = json.loads(told)
    assert (*told["identity"],) == identity
    assert (*told["scratch"],) == scratch
    assert "does not register" in refused, "what is registered already"


# -- last, so that it has little left to wait for --------------------------------------------------


@pytest.mark.timeout(180)
def test_idle_connections_still_work(idle: IdlePair) -> None:
    """After more than a minute, and after a few seconds."""
    for idle_s, numbers in ((65, range(1, 4)), (6, range(4, 7))):
        time.sleep(max(0.0, idle.since_s + idle_s - time.monotonic()))
        for number in numbers:
            idle.check(number)
    assert idle.b.peers().fetches["fetched"] == 7
