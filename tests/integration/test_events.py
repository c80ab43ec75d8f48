"""The stream of stored and removed entries: whatever is lost, a subscriber ends with the truth."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from ecd_client import Client, InvalidArgument
from ecd_client.events import ASK_S, SILENT_S, Change, Subscriber
from ecd_client.session.channel import open_channel
from ecd_proto.events import END, SNAPSHOT
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.daemon import Daemon, changed
from support.processes import child
from support.waiting import HANG_S, eventually

PUTS = 5_000
LONG = "x" * 900
"""Begins names that fill buffers."""
MakeDaemon = Callable[..., Daemon]


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("shared"), ECD_EVENTS_ADDRESS="127.0.0.1:0").start()
    yield daemon
    daemon.close()


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


@pytest.fixture
def publishing(make_daemon: MakeDaemon) -> Daemon:
    """A daemon that publishes on the same two ports in each of its lives.

    No connection begins from their address, so none has them as its own port meanwhile.
    """
    while True:
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.96.1", 0))
            port = first.getsockname()[1]
            second.bind(("127.0.96.1", port + 1))
            break
    return make_daemon("2MiB", ECD_EVENTS_ADDRESS=f"127.0.96.1:{port}").start()


class Clock:
    """Stands still until a test moves it."""

    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of subscribers."""
    clock = Clock()
    monkeypatch.setattr("ecd_client.events.clock", clock)
    return clock


def places(daemon: Daemon) -> tuple[str, str]:
    status = daemon.status()
    return status.events, status.events_replay


def listed(daemon: Daemon) -> dict[tuple[str, str], int]:
    """All that the daemon lists, by key, with its bytes."""
    found, request = {}, pb.ListRequest(limit=1000)
    with open_channel(daemon.address) as channel:
        stub = pb_grpc.CacheStub(channel)
        while True:
            page = stub.List(request, timeout=HANG_S)
            found |= {(e.key.namespace, e.key.mm_hash): e.content.nbytes for e in page.entries}
            request.after = page.next_after
            if not request.after:
                return found


def counted(daemon: Daemon, name: str) -> int:
    found = re.search(rf"^ecd_{name}_total (\S+)", daemon.metrics(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def put(client: Client, key: str, namespace: str = "n", nbytes: int = 8) -> None:
    client.put_bytes(key, b"x" * nbytes, "uint8", (nbytes,), namespace=namespace)


def apply(known: dict[tuple[str, str], int], changes: list[Change]) -> None:
    for _, namespace, mm_hash, nbytes in changes:
        if nbytes is None:
            del known[namespace, mm_hash]
        else:
            known[namespace, mm_hash] = nbytes


def catches_up(
    subscriber: Subscriber, daemon: Daemon, known: dict | None = None, wait_s: float = 0.0
) -> None:
    """The subscriber's entries, and those that its changes add up to, become the daemon's list.

    It waits `wait_s` for a next message, where few of them are read ahead.
    """

    def is_equal() -> bool:
        while changes := subscriber.changes(wait_s):
            if known is not None:
                apply(known, changes)
        [feed] = subscriber.feeds
        return subscriber.is_current and feed.entries == listed(daemon)

    eventually(is_equal, "the subscriber has what the daemon lists")
    assert known is None or known == subscriber.feeds[0].entries


def listens(subscriber: Subscriber) -> None:
    """From now on it gets every message: the one that has come told that it is connected."""
    assert subscriber.feeds[0]._sub.poll(1000 * HANG_S), "no sign of life"


class Relay:
    """Carries connections to another port, and cuts them when told."""

    def __init__(self, to: str) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.pause = threading.Lock()  # while it is held, new connections wait
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        host, port = self._to.split(":")
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                with self.pause:
                    try:
                        theirs = socket.create_connection((host, int(port)))
                    except ConnectionRefusedError:
                        self._end(ours)
                        continue
                    self._open += ours, theirs
                for pair in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while some := source.recv(65536):
                sink.sendall(some)
        self._end(source, sink)

    def _end(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> None:
        """End all connections; new ones are carried."""
        ended, self._open = self._open, []
        self._end(*ended)

    def close(self) -> None:
        self._end(self._listener)
        self.cut()


def test_after_losses_and_a_restart_the_set_is_the_daemons_list(publishing: Daemon) -> None:
    events, replay = places(publishing)
    known: dict[tuple[str, str], int] = {}
    chosen = random.Random(1)
    with (
        closing(Relay(events)) as relay,
        Subscriber([(relay.address, replay)]) as cut,
        Subscriber([(events, replay)], unread=1) as stopped,
    ):
        catches_up(stopped, publishing, wait_s=0.01)
        with Client(publishing.address) as client:
            for number in range(PUTS):
                put(client, f"{LONG}{number}", f"{LONG}{number % 50}", 1 + number % 4000)
                if number % 10 == 0:
                    apply(known, cut.changes())
                if number % 500 == 499:
                    relay.cut()
                    was = chosen.randrange(number - 200, number)
                    publishing.evict(pb.Key(namespace=f"{LONG}{was % 50}", mm_hash=f"{LONG}{was}"))
        assert publishing.status().pools[0].evictions > PUTS / 2
        catches_up(cut, publishing, known)
        assert counted(publishing, "event_losses") > 0, "nobody was too slow"
        catches_up(stopped, publishing, wait_s=0.01)
        assert cut.feeds[0].gaps > 0
        assert stopped.feeds[0].gaps > 0
        before, snapshots = publishing.status().incarnation, cut.feeds[0].snapshots
        publishing.kill()
        publishing.start()
        assert publishing.status().incarnation != before
        with Client(publishing.address) as client:
            put(client, "in another life")
        publishing.evict(pb.Key(namespace="n", mm_hash="in another life"))
        for subscriber in (cut, stopped):
            catches_up(subscriber, publishing, known if subscriber is cut else None, 0.01)
            assert subscriber.feeds[0].snapshots > snapshots or subscriber is stopped
            assert subscriber.feeds[0].malformed == 0


def test_what_was_lost_is_replayed_without_a_snapshot(daemon: Daemon, clock: Clock) -> None:
    events, replay = places(daemon)
    with (
        closing(Relay(events)) as relay,
        Subscriber([(relay.address, replay)]) as subscriber,
        Subscriber([(events, replay)]) as witness,
        Client(daemon.address) as client,
    ):
        listens(subscriber)
        put(client, "first")
        catches_up(subscriber, daemon)
        catches_up(witness, daemon)
        [feed] = subscriber.feeds
        replays = feed.replays  # of what was published before it was connected
        with relay.pause:
            relay.cut()
            put(client, "lost", nbytes=77)
            eventually(lambda: witness.changes() and witness.holders("n", "lost"))
        catches_up(subscriber, daemon)
        assert (feed.replays - replays, feed.snapshots) == (1, 1)
        assert subscriber.holders("n", "lost") == [feed.node]
        assert subscriber.holders("n", "another") == []


def test_a_lost_last_message_is_missed_though_nothing_follows(daemon: Daemon) -> None:
    """Signs of life carry the last sequence."""
    with Subscriber([places(daemon)]) as subscriber, Client(daemon.address) as client:
        listens(subscriber)
        catches_up(subscriber, daemon)
        [feed] = subscriber.feeds
        gaps = feed.gaps  # of what was published before it was connected
        put(client, "lost")
        message: list[bytes] = []
        while b"lost" not in b"".join(message):
            assert feed.socket.poll(1000 * HANG_S), "it is not published"
            message = feed.socket.recv_multipart()
        catches_up(subscriber, daemon)
        assert feed.gaps - gaps == 1


def test_the_entries_of_a_daemon_that_is_silent_are_not_current(
    daemon: Daemon, clock: Clock
) -> None:
    with Subscriber([places(daemon)]) as subscriber:
        catches_up(subscriber, daemon)
        clock.at_s += SILENT_S - 0.1
        assert subscriber.is_current
        clock.at_s += 0.1
        assert not subscriber.is_current
        catches_up(subscriber, daemon)  # by a sign of life


def ask(socket: zmq.Socket, *request: bytes) -> Iterator[list[bytes]]:
    """The messages of an answer: topic, sequence, batch."""
    socket.send_multipart([b"", *request])
    while True:
        assert socket.poll(1000 * HANG_S), "no answer"
        empty, *message = socket.recv_multipart()
        assert empty == b""
        if message[1] == END:
            return
        yield message


def test_the_form_is_that_of_vllms_kv_events(daemon: Daemon) -> None:
    events, replay = places(daemon)
    with zmq.Context() as context:
        sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        sub.subscribe(b"")
        sub.connect(f"tcp://{events}")
        dealer.connect(f"tcp://{replay}")
        assert sub.poll(1000 * HANG_S), "no sign of life"
        with Client(daemon.address) as client:
            put(client, "k", "name@space", 100)
        topic = b""
        while not topic.endswith(b"name@space"):
            assert sub.poll(1000 * HANG_S)
            topic, sequence, said = sub.recv_multipart()
            ts, happened, rank, epoch = msgspec.msgpack.decode(said)
            assert (rank, epoch) == (None, daemon.status().incarnation)
            assert 1.7e9 < ts < 1e10, "Unix time, in seconds"
        assert topic == f"ec@{socket.gethostname()}/{daemon.name}@name@space".encode()
        stored = {"type": "EncodingStored", "keys": ["k"], "nbytes": [100], "medium": "CPU"}
        assert happened == [stored]
        replayed = list(ask(dealer, bytes(8)))
        assert replayed[-1] == [topic, sequence, said]
        assert [int.from_bytes(at, "big") for _, at, _ in replayed] == list(range(len(replayed)))
        [[_, _, first], [_, at, everything]] = list(ask(dealer, SNAPSHOT))
        assert msgspec.msgpack.decode(first)[1] == [{"type": "AllCleared"}]
        assert (msgspec.msgpack.decode(everything)[1], at) == ([stored], sequence)
        sub.close()
        dealer.close()


def test_requests_without_sense_cost_nothing_but_themselves(daemon: Daemon) -> None:
    events, replay = places(daemon)
    random_bytes = random.Random(2).randbytes
    before = counted(daemon, "event_requests_refused")
    with zmq.Context() as context, Client(daemon.address) as client:
        put(client, "k")
        for frames in ([b""], [b"x"], [b"", b"x"], [b"", bytes(9)], [b"x", bytes(8)], [b""] * 20):
            dealer = context.socket(zmq.DEALER)
            dealer.connect(f"tcp://{replay}")
            for _ in range(100):
                dealer.send_multipart(frames)
            assert list(ask(dealer, b"\xff" * 8)) == [], "of a sequence that is not reached"
            dealer.close()
        assert counted(daemon, "event_requests_refused") == before + 600
        large = context.socket(zmq.DEALER)
        large.linger = 0
        monitor = large.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        large.connect(f"tcp://{replay}")
        large.send_multipart([b"", bytes(1 << 20)])
        assert monitor.poll(1000 * HANG_S), "its connection is closed"
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        large.disable_monitor()
        for address in (events, replay):
            host, port = address.split(":")
            for number in range(50):
                with socket.create_connection((host, int(port))) as plain:
                    plain.sendall(random_bytes(1 + 97 * number))
        large.close()
    with Subscriber([(events, replay)]) as subscriber:
        catches_up(subscriber, daemon)
        assert subscriber.feeds[0].entries == {("n", "k"): 8}
    assert "ERROR" not in daemon.text()
    assert "Traceback" not in daemon.text()


PATIENT = """
import os, sys
from ecd.ops import events

class Asker(events._Asker):
    patience_s = property(lambda self: not os.path.exists({over!r}), lambda self, left: None)

events._Asker = Asker
"""
"""The daemon's patience with its askers is over once there is that file."""


def test_askers_that_take_nothing_are_given_up(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    over = tmp_path / "patience is over"
    daemon = make_daemon(ECD_EVENTS_ADDRESS="127.0.0.1:0")
    daemon.command = changed(PATIENT.format(over=str(over)))
    events, replay = places(daemon.start())
    with zmq.Context() as context, Client(daemon.address) as client:
        for number in range(3000):  # a message each, more than sockets buffer
            put(client, f"{LONG}{number}", f"{LONG}{number}")
        stalled = []
        for _ in range(20):
            stalled.append(context.socket(zmq.DEALER))
            stalled[-1].linger, stalled[-1].rcvhwm, stalled[-1].rcvbuf = 0, 1, 4096
            stalled[-1].connect(f"tcp://{replay}")
            stalled[-1].send_multipart([b"", SNAPSHOT])
        eventually(lambda: counted(daemon, "event_requests_refused") == 4, "16 at a time")
        put(client, "meanwhile")
        assert counted(daemon, "event_answers_given_up") == 0
        over.touch()
        eventually(lambda: counted(daemon, "event_answers_given_up") == 16)
        over.unlink()
        with Subscriber([(events, replay)]) as subscriber:
            catches_up(subscriber, daemon)
        for each in stalled:
            each.close()


def test_messages_that_break_the_protocol_change_nothing(clock: Clock) -> None:
    """A stranger on the daemon's port: the subscriber keeps asking, and believes nothing."""
    with zmq.Context() as context:
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        pub.linger = router.linger = 0
        at = [f"127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}" for each in (pub, router)]
        with Subscriber([(at[0], at[1])]) as subscriber:
            [feed] = subscriber.feeds
            asker, _, request = router.recv_multipart()
            assert request == SNAPSHOT
            stored = {"type": "EncodingStored", "keys": ["k"], "nbytes": [1, 2], "medium": "CPU"}
            for said in (
                b"",
                b"\xc1",
                msgspec.msgpack.encode([0.0, [stored], None, "e"]),
                msgspec.msgpack.encode([0.0, [{"type": "Other"}], None, "e"]),
                msgspec.msgpack.encode([0.0, [{"type": "EncodingRemoved", "keys": [1]}], None, ""]),
            ):
                router.send_multipart([asker, b"", b"ec@node@n", bytes(8), said])
            router.send_multipart([asker, b"", b"no topic", bytes(8), b""])
            cleared = msgspec.msgpack.encode([0.0, [{"type": "AllCleared"}], None, "e"])
            router.send_multipart([asker, b"", b"ec@node@n", b"\xff" * 9, cleared])
            router.send_multipart([asker, b"", b"ec@node@n"])
            router.send_multipart([asker, b"", b"", END, b""])
            eventually(lambda: (subscriber.changes(), feed.malformed)[1] == 8)
            assert (feed.entries, subscriber.is_current) == ({}, False)
            clock.at_s += ASK_S + 0.1
            eventually(lambda: (subscriber.changes(), router.poll(0))[1], "asked again")
        pub.close()
        router.close()


def test_a_port_that_is_taken_is_named_in_the_error(make_daemon: MakeDaemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        daemon = make_daemon(ECD_EVENTS_ADDRESS=address).start(wait=False)
        eventually(lambda: "cannot publish events" in daemon.text())
        assert daemon._process.wait(HANG_S) == 1
    assert address in daemon.text()
    assert "ECD_EVENTS_ADDRESS" in daemon.text()
    assert "Traceback" not in daemon.text()


@pytest.mark.parametrize(
    "daemons",
    [
        *("127.0.0.1:1", None, [5], [("127.0.0.1:1",)], [(1, 2)], [("\ud800", "127.0.0.1:1")]),
        *([("nowhere", "127.0.0.1:1")], [("127.0.0.1:1", "")], ["ab"], [("127.0.0.1:1",) * 3]),
        *([("127.0.0.1:1", f"127.0.0.1:{port}")] for port in (0, 65536, 99999, "1\0x", "\u0661")),
        [("127.0.0.1:1", "a;127.0.0.1:1")],
    ],
)
def test_what_is_no_daemons_address_is_told(daemons: Any) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        Subscriber(daemons)


def test_a_subscriber_without_a_socket_keeps_none() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(zmq.ZMQError, match="open files"):
        Subscriber([("127.0.0.1:1", "[::1]:1")] * 600)  # a context has 1,023
    assert len(os.listdir("/proc/self/fd")) == before


def test_odd_limits_of_a_subscriber_are_told() -> None:
    for unread in (0, -1, None, True, 1.0, 1 << 40):
        with pytest.raises(InvalidArgument, match="unread is"):
            Subscriber([], unread=unread)  # type: ignore[arg-type]
    with Subscriber([]) as subscriber:
        for timeout in (None, "1", -1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidArgument, match="timeout is"):
                subscriber.changes(timeout)  # type: ignore[arg-type]
        assert subscriber.changes() == []


def watching(daemon: Daemon, *options: str) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address, "watch"]
    return child([*command, *options], stdout=subprocess.PIPE, text=True)


def test_watch_prints_what_is_there_and_what_changes(daemon: Daemon) -> None:
    with Client(daemon.address) as client:
        put(client, "there")
        with watching(daemon, "--json") as told, watching(daemon) as shown:
            node = f"{socket.gethostname()}/{daemon.name}"
            there = {"node": node, "namespace": "n", "mm_hash": "there", "nbytes": 8}
            first, line = json.loads(told.stdout.readline()), shown.stdout.readline().split()
            times = [datetime.fromisoformat(each) for each in (first.pop("time"), line.pop(0))]
            assert all(each.tzinfo for each in times)
            assert (first, line) == (there, ["stored", "8", "bytes", "n", "there"])
            daemon.evict(pb.Key(namespace="n", mm_hash="there"))
            then = json.loads(told.stdout.readline())
            assert {**then, "time": None} == {**there, "nbytes": None, "time": None}
            assert shown.stdout.readline().split()[1:] == ["removed", "n", "there"]
            for each in (told, shown):
                each.send_signal(signal.SIGINT)
                assert each.wait(HANG_S) == 0
