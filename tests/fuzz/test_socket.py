"""Callers that send altered messages in live sessions, and bytes, to the daemon's socket."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ecd_client import Client
from ecd_client.session.channel import open_channel
from ecd_proto.contract import CONTRACT_VERSION, DTYPES
from ecd_proto.shm.files import lock_byte
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from ecd_proto.v1 import peer_pb2, peer_pb2_grpc
from fuzz.conftest import NODE
from support.daemon import Daemon
from support.fuzz import drive, mutated, pick, spoilt, watched
from support.waiting import HANG_S, eventually, value_of

BATCH = 8
METHODS: dict[str, tuple[type[Message], type[Message]]] = {
    method.name: tuple(getattr(pb, side.name) for side in (method.input_type, method.output_type))
    for method in pb.DESCRIPTOR.services_by_name["Cache"].methods
}
ENGINE = pb.Engine(
    id="e",
    model="m",
    namespace="fuzz",
    stores=True,
    loads=True,
    parts={"dtype": "x"},
    shares="image",
)
EXCHANGED = {field.name for field in pb.ExchangeRequest.DESCRIPTOR.fields}


class Intruder:
    """Sessions that were opened properly, and messages that refer to what they were given."""

    def __init__(self, address: str) -> None:
        self.channel = open_channel(address)
        self._lock = threading.Lock()
        self._found: dict[str, deque[Any]] = {
            name: deque([0], 16) for name in ("reservations", "leases", "tickets", "ids")
        } | {"session": deque(["none"], 4)}
        self.sessions = [_Session(self) for _ in range(3)]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.channel.close()

    def learn(self, name: str, value: Any) -> None:
        with self._lock:
            self._found[name].append(value)

    def known(self) -> dict[str, list[Any]]:
        with self._lock:
            found = {name: list(values) for name, values in self._found.items()}
        return {
            **found,
            "namespace": ["fuzz"],
            "mm_hash": [f"k{number}" for number in range(20)],
            "dtype": [*DTYPES],
            "nbytes": [1, 4096, 60_000],
            "shape": [1, 4096, 60_000],
            "nodes": ["127.0.81.1:9465", "127.0.81.2:9465", "127.0.81.3:1"],
            "reservation": found["reservations"],
        }

    def request(self, chance: Random) -> tuple[str, Message]:
        """A method and what could be asked of it now."""
        known = self.known()

        def some(name: str, count: int) -> list[Any]:
            return [pick(chance, known[name]) for _ in range(count)]

        def key() -> pb.Key:
            return pb.Key(namespace="fuzz", mm_hash=chance.choice(known["mm_hash"]))

        count = chance.choice((1, 1, 2, 5))
        nbytes = chance.choice(known["nbytes"])
        content = pb.Content(
            dtype="uint8", shape=[nbytes], nbytes=nbytes, metadata=b"m", cost_s=0.1
        )
        token = pick(chance, known["session"])
        extent = pb.Extent(offset=4096, nbytes=nbytes)
        hint = pb.Hint(nodes=some("nodes", 2), extents=[extent, extent])
        method = chance.choice([*METHODS, "Reserve", "Commit", "Acquire"])
        match method:
            case "Session" | "Exchange":
                return method, METHODS[method][0]()
            case "Reserve":
                items = [pb.ReserveItem(key=key(), content=content) for _ in range(count)]
                return method, pb.ReserveRequest(session=token, items=items)
            case "Commit" | "Abort":
                chosen = some("reservations", count)
                return method, METHODS[method][0](session=token, reservations=chosen)
            case "Acquire":
                wait_s = chance.choice((0.0, 0.0, 0.01, 30.0))
                return method, pb.AcquireRequest(
                    session=token,
                    keys=[key() for _ in range(count)],
                    wait_s=wait_s,
                    only_if_written=chance.random() < 0.5,
                    hints=[hint],
                    to_pin=chance.random() < 0.2,
                )
            case "Release":
                return method, pb.ReleaseRequest(session=token, leases=some("leases", count))
            case "Contains" | "Locate":
                return method, METHODS[method][0](keys=[key() for _ in range(count)])
            case "Evict":  # of everybody's, too
                which = key() if chance.random() < 0.9 else None
                return method, pb.EvictRequest(key=which, dry_run=chance.random() < 0.3)
            case "EndClients":  # by mutation a citizen's, too
                return method, pb.EndClientsRequest(ids=some("ids", count))
            case "List":
                return method, pb.ListRequest(namespace="fuzz", after=1, limit=5)
            case "Offer":
                return method, pb.OfferRequest(keys=[key()], nodes=some("nodes", 2))
            case _:
                return method, METHODS[method][0]()

    def send(self, chance: Random) -> None:
        """Send some messages by every kind of call; they are answered in time."""
        answers = []
        for _ in range(BATCH):
            method, request = self.request(chance)
            number = chance.randrange(len(self.sessions))
            session = self.sessions[number]
            if method == "Session" or chance.random() < 0.05:
                if not session.tell(chance):
                    session.close()
                    self.sessions[number] = _Session(self)
                continue
            if method == "Exchange" or (method.lower() in EXCHANGED and chance.random() < 0.5):
                name = method.lower()
                wrapped = pb.ExchangeRequest(
                    **(
                        {name: request}
                        if method != "Exchange"
                        else {"contains": pb.ContainsRequest()}
                    )
                )
                session.exchange(mutated(wrapped, chance, self.known()))
                continue
            call = self.channel.unary_unary(f"/ecd.v1.Cache/{method}")
            data = mutated(request, chance, self.known())
            answers.append((method, call.future(data, timeout=HANG_S)))
        for method, answer in answers:
            with answered():
                self.read(METHODS[method][1].FromString(answer.result()))

    def read(self, reply: Any) -> None:
        """Remember what was given."""
        if isinstance(reply, pb.ExchangeReply):
            name = reply.WhichOneof("reply")
            assert name is not None
            reply = getattr(reply, name)
        for outcome in getattr(reply, "outcomes", ()):
            match outcome.WhichOneof("outcome"):
                case "reserved":
                    self.learn("reservations", outcome.reserved.reservation)
                case "leased":
                    self.learn("leases", outcome.leased.lease)
                case "waiting":
                    self.learn("tickets", outcome.waiting.ticket)


class _Session:
    def __init__(self, intruder: Intruder) -> None:
        self._intruder = intruder
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._events = intruder.channel.stream_stream("/ecd.v1.Cache/Session")(
            iter(self._outbox.get, None)
        )
        hello = pb.Hello(contract_version=CONTRACT_VERSION, client="an intruder", pid=1)
        self._outbox.put(pb.SessionRequest(hello=hello).SerializeToString())
        welcome = pb.SessionEvent.FromString(next(self._events)).welcome
        self.welcome = welcome
        self._lock_fd = os.open(welcome.lock_path, os.O_RDWR)
        lock_byte(self._lock_fd, welcome.lock_offset)
        intruder.learn("session", welcome.session)
        intruder.learn("ids", welcome.lock_offset)
        threading.Thread(target=self._drain, daemon=True).start()
        self._asked: queue.SimpleQueue[bytes | None] | None = None

    def close(self) -> None:
        self._events.cancel()
        self._outbox.put(None)
        self._hang_up()
        os.close(self._lock_fd)

    def _drain(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for event in self._events:
                said = pb.SessionEvent.FromString(event)
                for ended in said.waits_ended.ended:
                    if ended.outcome.HasField("leased"):
                        self._intruder.learn("leases", ended.outcome.leased.lease)

    def tell(self, chance: Random) -> bool:
        """Something on the session's stream. False: it is over."""
        known = self._intruder.known()
        kind = chance.randrange(4)
        request = (
            pb.SessionRequest(renew=pb.Renew(leases=known["leases"])),
            pb.SessionRequest(cancel_waits=pb.CancelWaits(tickets=known["tickets"])),
            pb.SessionRequest(hello=pb.Hello(contract_version=CONTRACT_VERSION)),
            pb.SessionRequest(engine=ENGINE),
        )[kind]
        self.send(mutated(request, chance, known))
        return not self.is_over

    def send(self, data: bytes) -> None:
        self._outbox.put(data)

    @property
    def is_over(self) -> bool:
        return not self._events.is_active()

    def exchange(self, data: bytes) -> None:
        if self._asked is None:
            self._asked = queue.SimpleQueue()
            self._replies = self._intruder.channel.stream_stream("/ecd.v1.Cache/Exchange")(
                iter(self._asked.get, None)
            )
        self._asked.put(data)
        late = threading.Timer(HANG_S, self._replies.cancel)
        late.start()
        try:
            with answered():
                self._intruder.read(pb.ExchangeReply.FromString(next(self._replies)))
                return
        finally:
            late.cancel()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._asked is not None:
            self._asked.put(None)
            self._replies.cancel()
            self._asked = None


@contextlib.contextmanager
def answered() -> Any:
    """A refusal is an answer; none in time is not."""
    try:
        yield
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            raise AssertionError("not answered in time") from error


def test_messages_to_the_socket(make_node: Callable[..., Daemon]) -> None:
    daemon = make_node().start()
    with watched(daemon) as watch, contextlib.closing(Intruder(daemon.address)) as intruder:

        def send(chance: Random) -> None:
            intruder.send(chance)
            watch.now_and_then(10)

        drive("socket", 0.25, send, BATCH)


def connected(address: str) -> socket.socket:
    """A connection to a server that may be about to listen again, as a caller has ended it."""

    def connect() -> socket.socket | None:
        intruder = socket.socket(socket.AF_UNIX)
        intruder.settimeout(HANG_S)
        try:
            intruder.connect(address.removeprefix("unix://"))
            return intruder
        except ConnectionRefusedError:
            intruder.close()
            return None

    return value_of(connect, "the socket is heard")


def test_bytes_to_the_socket(daemon: Daemon, tmp_path: Path) -> None:
    """HTTP/2 as grpc speaks it, recorded, spoilt and broken off."""
    spoken = recorded(daemon, tmp_path / "recorder.sock")
    with watched(daemon) as watch:

        def send(chance: Random) -> None:
            data = spoken
            if chance.random() < 0.5:
                data = spoken[: 1 + int(chance.random() * len(spoken))]
            if chance.random() < 0.05:
                data = chance.randbytes(chance.choice((1, 24, 500)))
            elif chance.random() < 0.8:
                data = spoilt(data, chance)
            with connected(daemon.address) as intruder, contextlib.suppress(ConnectionError):
                intruder.sendall(data)
                if chance.random() < 0.3:
                    intruder.recv(1 << 16)
            watch.now_and_then(50)

        drive("bytes on the socket", 0.1, send)


def recorded(daemon: Daemon, path: Path) -> bytes:
    """Record the bytes that a client sends on its connection in one short life."""
    spoken = bytearray()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def relay() -> None:
            near, _ = listening.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(daemon.address.removeprefix("unix://"))
            back = threading.Thread(target=_pump, args=(far, near, bytearray()))
            back.start()
            _pump(near, far, spoken)
            back.join()

        relaying = threading.Thread(target=relay)
        relaying.start()
        with Client(f"unix://{path}") as client:
            client.put_bytes("recorded", b"x" * 1000, "uint8", (1000,))
            client.get("recorded").close()
            client.contains(["x" * 500])
            client.get("nothing", 0.01)
        relaying.join()
    return bytes(spoken)


def _pump(source: socket.socket, target: socket.socket, copied: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            copied += data
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def send_millions(intruder: Intruder) -> Iterator[None]:
    """Send messages of millions of numbers; the daemon takes none. Comes back meanwhile."""
    asked = pb.AcquireRequest(
        session=intruder.sessions[0].welcome.session,
        keys=[pb.Key(namespace="n", mm_hash="k")],
        wait_s=0.01,
        hints=[pb.Hint(index=1)] * 2_000_000,
    )
    call = intruder.channel.unary_unary("/ecd.v1.Cache/Acquire")
    answer = call.future(asked.SerializeToString(), timeout=HANG_S)
    while not answer.done():
        yield
    assert answer.code() is grpc.StatusCode.INVALID_ARGUMENT
    many = [1] * 5_000_000
    renew = pb.SessionRequest(renew=pb.Renew(leases=many))
    cancel = pb.SessionRequest(cancel_waits=pb.CancelWaits(tickets=many))
    renewing, cancelling = intruder.sessions[:2]
    renewing.send(renew.SerializeToString())
    while not renewing.is_over:
        yield
    cancelling.send(cancel.SerializeToString())  # which is passed over
    yield


def test_a_message_of_millions_of_numbers_is_refused(daemon: Daemon) -> None:
    with watched(daemon) as watch, contextlib.closing(Intruder(daemon.address)) as intruder:
        for _ in send_millions(intruder):
            watch.check()
        eventually(lambda: "sends what is passed over" in daemon.text())


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def head(path: bytes) -> bytes:
    """HTTP/2 that begins a call."""
    fields = (
        *((b":method", b"POST"), (b":scheme", b"http"), (b":path", path)),
        *((b":authority", b"a"), (b"te", b"trailers"), (b"content-type", b"application/grpc")),
    )
    headers = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields
    )
    return frame(4, 0, 0, b"") + frame(1, 4, 1, headers)


def call_of_no_text() -> bytes:
    """A call whose path is not UTF-8."""
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + head(b"/\xe5") + frame(0, 1, 1, bytes(5))


def test_a_call_that_ends_the_server_ends_nothing_else(make_node: Callable[..., Daemon]) -> None:
    """grpcio stops listening for good, at the socket and at the ports, for one such call."""
    health = "127.0.81.1:9466"
    daemon = make_node(ECD_HEALTH_ADDRESS=health).start()
    path = Path(daemon.address.removeprefix("unix://"))
    mode = path.stat().st_mode
    with Client(daemon.address) as client:
        client.put_bytes("k", b"right", "uint8", (5,))
        incarnation, session = client.incarnation, client._connection.session()
        for _ in range(3):
            for address in (str(path), NODE, health):
                end_server(daemon, address)
            eventually(lambda: said_of_itself(daemon.address), "the socket is heard again")
            eventually(lambda: said_of_itself(NODE), "the peer port is heard again")
            eventually(lambda: is_healthy(health), "the health port is heard again")
            assert client._connection.session() is session, "sessions go on"
            with client.get("k") as item:
                assert bytes(item.view) == b"right"
        assert client.incarnation == incarnation
    assert path.stat().st_mode == mode
    assert daemon.terminate() == 0


def test_a_server_that_cannot_listen_again_says_so_and_does_once_it_can(daemon: Daemon) -> None:
    path = daemon.address.removeprefix("unix://")
    in_the_way = Path(f"{path}~")
    in_the_way.mkdir()
    end_server(daemon, path)
    complaint = f"cannot listen again: {in_the_way} is not a socket of this user: it is a directory"
    eventually(lambda: complaint in daemon.text(), "the log says why")
    in_the_way.rmdir()
    eventually(lambda: said_of_itself(daemon.address), "the socket is heard again")
    assert daemon.text().count(complaint) == 1


def end_server(daemon: Daemon, address: str) -> None:
    host, _, port = address.partition(":")
    kind = socket.AF_INET if port else socket.AF_UNIX
    ended = daemon.text().count("a caller ended the server")
    with socket.socket(kind) as intruder:
        intruder.connect((host, int(port)) if port else address)
        intruder.sendall(call_of_no_text())
        eventually(
            lambda: daemon.text().count("a caller ended the server") > ended, "the server's end"
        )


def said_of_itself(address: str) -> bool:
    with open_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        if address.startswith("unix:"):
            return bool(pb_grpc.CacheStub(channel).Status(pb.StatusRequest(), timeout=1).pid)
        stub = peer_pb2_grpc.PeerStub(channel)
        return bool(stub.Describe(peer_pb2.DescribeRequest(), timeout=1).node)
    return False


def is_healthy(address: str) -> bool:
    with open_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        stub = health_pb2_grpc.HealthStub(channel)
        return bool(stub.Check(health_pb2.HealthCheckRequest(), timeout=1).status)
    return False
