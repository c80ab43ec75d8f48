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
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecd_client import Client
from support.daemon import Daemon, changed
from support.node_client import content, put
from support.nodes import NodeClient, NodeDaemon
from support.pairs import Apart, Pair, cable, patient_apart, patient_pair
from support.processes import run
from support.waiting import HANG_S, eventually, value_of

MakePeer = Callable[..., Daemon]
OnNode = Callable[..., tuple[NodeDaemon, NodeClient]]
MIB = 1 << 20


@pytest.fixture(scope="module")
def lasting(make_lasting_peer: MakePeer) -> Pair:
    return patient_pair(make_lasting_peer, "64MiB")


@pytest.fixture
def peers(lasting: Pair, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with lasting.for_test(request.node.name) as pair:
        yield pair


@pytest.fixture(scope="module")
def lasting_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with patient_apart(tmp_path_factory.mktemp("apart")) as apart:
        yield apart


@pytest.fixture
def apart(lasting_apart: Apart) -> Iterator[Apart]:
    lasting_apart.check_nothing_leaked()
    yield lasting_apart
    lasting_apart.near.throttle("10gbit")
    lasting_apart.check_nothing_leaked()


def got(client: Client, key: str, node: str) -> bytes | None:
    """The bytes that a fetch brings; None: a miss."""
    [found] = client.get_async([key], 2 * HANG_S, only_if_written=True, nodes=[[node]])
    item = found.result(2 * HANG_S)
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
    with socket.create_connection((host, int(port)), HANG_S) as connection:
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


def test_connections_that_died_fail_one_read_each_and_no_fetch(peers: Pair) -> None:
    (a, b), (here, there) = (peers.a, peers.b), (peers.here, peers.there)
    data_port = handshake(a.peers().engine)["tcp_data_port"]
    for number in range(26):
        put(here, f"k{number}", MIB, number)
    founds = there.get_async([f"k{n}" for n in range(20)], HANG_S, nodes=[[here.node]] * 20)
    for found in founds:
        found.result(HANG_S).close()
    assert len(lanes_of(b, data_port)) > 1
    for number in range(20, 26):
        assert cut(b, data_port) > 0
        assert got(there, f"k{number}", here.node) == content(MIB, number)
    counted = peers.counted
    assert counted["failed_reads"] > 0, "the cost is in the metrics"
    status = b.peers()
    [peer] = status.peers
    assert f"ecd_read_retries_total {float(peer.failed_reads)}" in b.metrics()
    assert {name: counted[name] for name in status.fetches if counted[name]} == {"fetched": 26}


@pytest.fixture(scope="module")
def lasting_restarting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarting]:
    with cable() as (near, far):
        # Ports of the life before are free at once, instead of after a minute.
        near.run("sysctl", "-qw", "net.ipv4.tcp_max_tw_buckets=0", "net.ipv4.tcp_fin_timeout=1")
        with Apart(near, far, tmp_path_factory.mktemp("restarting")).running() as apart:
            yield Restarting(apart)


@pytest.fixture
def restarting(lasting_restarting: Restarting) -> Restarting:
    lasting_restarting.again("18200-18201")
    return lasting_restarting


class Restarting:
    """A daemon whose engine has few ports, and another that reads from it."""

    def __init__(self, apart: Apart) -> None:
        self.near, self.has, self.wants = apart.near, apart.has, apart.wants
        self.owner, self.asker = apart.owner, apart.asker

    def again(self, ports: str) -> dict:
        """Another life, on ports of this range; what its engine says of itself."""
        self.has.kill()
        self.has._settings["ECD_ENGINE_PORTS"] = ports

        def starts() -> bool:
            with contextlib.suppress(AssertionError):
                self.has.start()
                return True
            return False

        eventually(starts, "the ports are free again")
        return self.engine()

    def engine(self) -> dict:
        """Ports of the daemon's engine."""
        code = (
            "import asyncio, json, sys; from ecd.cluster.transport.handshake import describe; "
            "print(json.dumps(asyncio.run(describe(sys.argv[1]))))"
        )
        return json.loads(self.near.run(sys.executable, "-c", code, self.has.peers().engine))

    def arrives(self, key: str, seed: int) -> None:
        """Soon, and nothing else in its place before."""

        def found() -> bool:
            got = self.asker.get(key, nodes=[self.near.peer], seed=seed)
            assert not got["found"] or got["right"], "wrong bytes"
            return got["found"]

        eventually(found, "the new life is read")


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


def test_more_requests_than_a_peers_queue_holds(peers: Pair) -> None:
    """Beyond about 2,000 at a time Mooncake's queue can stop for good; we keep to 64."""
    here, there = peers.here, peers.there
    count = 4000
    for number in range(count):
        here.put_bytes(f"k{number}", bytes([number % 251]) * 4096, "uint8", (4096,))
    waiting = set(range(count))
    for _attempt in range(8):  # a daemon has at most 1,024 keys on their way
        keys = sorted(waiting)
        about = {"only_if_written": True, "nodes": [[here.node]] * len(keys)}
        founds = there.get_async([f"k{n}" for n in keys], 2 * HANG_S, **about)
        for number, found in zip(keys, founds, strict=True):
            item = found.result(2 * HANG_S)
            if item is not None:
                with item:
                    assert bytes(item.view) == bytes([number % 251]) * 4096
                waiting.discard(number)
        if not waiting:
            break
    assert not waiting
    put(here, "after", MIB, 5)
    assert got(there, "after", here.node) == content(MIB, 5), "the queue still works"
    assert peers.counted["late"] == peers.counted["read_failed"] == 0


# -- on a slow cable -------------------------------------------------------------------------------


def test_a_read_that_was_given_up_and_completes_late_harms_nobody(
    apart: Apart, on_node: OnNode
) -> None:
    """Given up after 1 s, complete half a minute later: its extent is nobody else's in between."""
    near, far, owner = apart.near, apart.far, apart.owner
    beside = {"ECD_PEER_ADDRESS": f"{far.address}:9466", "ECD_ENGINE_PORTS": "18300-18331"}
    wants, asker = on_node(far, "64MiB", ECD_FETCH_TIMEOUT_S="1", **beside)
    owner.put("big", 48 * MIB, seed=1)
    owner.put("small")
    eventually(lambda: asker.get("small", nodes=[near.peer])["found"])
    near.throttle("8mbit")

    def is_given_up() -> bool:
        """Or the peer stood still, and nothing of it was read."""
        before = wants.peers().fetches["late"]
        assert not asker.get("big", nodes=[near.peer])["found"]
        assert wants.peers().fetches["late"] == before + 1
        return wants.peers().set_aside_bytes > 0

    eventually(is_given_up)
    assert wants.peers().set_aside_bytes == 48 * MIB
    refused = asker.ask("put", key="too much", nbytes=30 * MIB, seed=1)
    assert "PoolFull" in refused["error"], "what is set aside is not given away"
    # All the room there is, over and over, while the late bytes arrive.
    for number in range(12):
        asker.put(f"k{number}", 5 * MIB, seed=number)
        assert asker.get(f"k{number}", timeout=0.0, seed=number)["right"]
    near.throttle("10gbit")
    eventually(lambda: wants.peers().set_aside_bytes == 0, "the late read is over")
    assert asker.ask("put", key="now", nbytes=50 * MIB, seed=7)["stored"]
    assert asker.get("now", timeout=0.0, seed=7)["right"]
    wants.check_nothing_leaked()


def test_a_small_read_does_not_wait_for_a_large_one(apart: Apart) -> None:
    """The pieces of the large read that are under way take 12 s."""
    near, owner, asker, wants = apart.near, apart.owner, apart.asker, apart.wants

    def sent() -> int:
        [told] = json.loads(near.run("ip", "-s", "-j", "link", "show", "dev", "eth0"))
        return told["stats64"]["tx"]["bytes"]

    for key, nbytes in (("first", 4096), ("large", 40 * MIB), ("small", 4096)):
        owner.put(key, nbytes, seed=1)
    assert asker.get("first", nodes=[near.peer])["right"]
    # Else the large one's connections fill the queue, and what is lost of the small one is late.
    before = near.run("sysctl", "-n", "net.ipv4.tcp_wmem")
    near.run("sysctl", "-qw", "net.ipv4.tcp_wmem=4096 16384 131072")
    near.throttle("20mbit")
    sent_before = sent()
    with contextlib.closing(NodeClient(wants)) as other:
        other.send("get", key="large", timeout=HANG_S, nodes=[near.peer], seed=1)
        eventually(lambda: sent() > sent_before + MIB // 2, "it is under way")
        assert asker.get("small", nodes=[near.peer])["right"]
        assert apart.status().in_flight == 1, "the large one is still on its way"
        near.throttle("10gbit")
        near.run("sysctl", "-qw", f"net.ipv4.tcp_wmem={before.strip()}")
        assert other.receive()["right"]


def test_what_has_arrived_does_not_wait_for_others_to_begin(apart: Apart) -> None:
    """Four large reads are under way at a time, and twelve wait for their turn."""
    near, owner, asker, wants = apart.near, apart.owner, apart.asker, apart.wants
    keys, before = [f"k{number}" for number in range(16)], apart.outcomes()["fetched"]
    for key in keys:
        owner.put(key, 2 * MIB)
    near.throttle("64mbit")
    asker.send("get_many", keys=keys, timeout=HANG_S, nodes=[near.peer])
    one_has_come = lambda: (s := wants.peers()).fetches["fetched"] > before and s  # noqa: E731
    [in_flight] = [p.in_flight for p in value_of(one_has_come).peers if p.node == apart.peer]
    assert in_flight > 4, "others have not begun"
    near.throttle("10gbit")
    assert asker.receive() == {"found": [True] * len(keys)}


def test_a_read_too_slow_for_its_lease_to_vouch_for_it(apart: Apart) -> None:
    """The peer's identity is read after it, though it was read before."""
    near, owner, asker = apart.near, apart.owner, apart.asker
    owner.put("quick")
    owner.put("slow", MIB, seed=1)
    assert asker.get("quick", nodes=[near.peer])["right"]
    before = apart.status()
    near.throttle("80mbit")  # a tenth of a second; the lease vouches for a fiftieth
    assert asker.get("slow", nodes=[near.peer])["right"]
    peer = apart.status()
    assert (peer.reads - before.reads, peer.failed_reads - before.failed_reads) == (1, 0)


def test_first_contact_with_nobody_holds_up_no_other(apart: Apart) -> None:
    near, far, owner, asker, wants = apart.near, apart.far, apart.owner, apart.asker, apart.wants
    for number in range(30):
        owner.put(f"k{number}", 64 << 10, seed=number)
    assert asker.get("k0", nodes=[near.peer], seed=0)["right"]
    address = "10.77.0.100"  # what is sent there is lost, and nobody says so
    far.run("sysctl", "-qw", "net.ipv4.tcp_syn_retries=6")
    far.run("ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "dev", "eth0")
    nobody = f"{address}:9465"

    def is_tried() -> bool:
        return [p.state for p in wants.peers().peers if p.node == nobody] == ["connecting"]

    with contextlib.closing(NodeClient(wants)) as second:
        second.send("get_many", keys=["x"] * 8, timeout=1.0, nodes=[nobody])
        eventually(is_tried, "contact has begun")
        for number in range(1, 30):
            assert asker.get(f"k{number}", nodes=[near.peer], seed=number)["right"]
        assert is_tried(), "contact takes 20 s"
        second.receive()


# -- what Mooncake's ports expose ------------------------------------------------------------------


def one_sided(host: str, port: int, opcode: int, address: int, data: bytes, nbytes: int) -> bytes:
    """Send one request to Mooncake's data port, as anybody can without credentials."""
    with socket.create_connection((host, port), HANG_S) as connection:
        answer = bytearray()
        with contextlib.suppress(ConnectionError):  # a write is refused before its last byte
            connection.sendall(struct.pack("<QQB7x", nbytes, address, opcode) + data)
            while len(answer) < nbytes and (chunk := connection.recv(1 << 20)):
                answer += chunk
        return bytes(answer)


def test_an_intruder_reads_every_registered_byte_and_can_write_none(peers: Pair) -> None:
    """The reason for docs/security.md: keep these ports to yourself."""
    secret = content(MIB, 9)
    put(peers.here, "k", MIB, 9)
    told = handshake(peers.a.peers().engine)
    host, port = told["tcp_data_host"], told["tcp_data_port"]
    pool = max(told["buffers"], key=lambda buffer: buffer["length"])
    read = one_sided(host, port, 0, pool["addr"], b"", pool["length"])
    assert secret in read, "nobody asks who reads"
    mark = os.urandom(16)
    one_sided(host, port, 1, pool["addr"], mark * (MIB // 16), MIB)
    for buffer in told["buffers"]:
        one_sided(host, port, 1, buffer["addr"], mark, 16)
    with peers.here.get("k") as item:
        assert bytes(item.view) == secret, "written from outside"
    after = one_sided(host, port, 0, pool["addr"], b"", pool["length"])
    assert mark not in after
    assert got(peers.there, "k", peers.a.peer) == secret, "and it serves on"


ENDLESS = changed(
    "import signal",
    "from ecd.cluster.transport import engine",
    "class Endless:",
    "    def __init__(self, mooncake): self._mooncake = mooncake",
    "    def __getattr__(self, name): return getattr(self._mooncake, name)",
    "    def __del__(self, pause=signal.pause):",
    "        while True: pause()",
    "start = engine.start_transfer_engine",
    "engine.start_transfer_engine = lambda settings: Endless(start(settings))",
)


def test_a_daemon_ends_though_its_engine_does_not(make_peer: MakePeer) -> None:
    """Mooncake's takes a minute to end while a peer stands still, and lets nothing else run."""
    daemon = make_peer()
    daemon.command = ENDLESS
    daemon.start()
    assert daemon.terminate() == 0
    assert not daemon.shm.exists()


ENGINE = """
import asyncio, json, sys
from pathlib import Path
from ecd.cluster.transport.engine import EngineError, EngineSettings, ReadEngine
from ecd.cluster.transport.handshake import describe
from ecd_proto.mapped_file import MappedFile

def access(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(at, 16) for at in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[1][:2]

async def main():
    engine = ReadEngine(EngineSettings("127.0.0.1", sys.argv[1], "18200-18231"), b"i" * 16)
    pool = MappedFile.of_memory(1 << 20)
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
    ran = run([sys.executable, "-c", ENGINE, protocol], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    told, refused = ran.stdout.splitlines()[-2:]
    told = json.loads(told)
    assert (*told["identity"],) == identity
    assert (*told["scratch"],) == scratch
    assert "does not register" in refused, "what is registered already"
