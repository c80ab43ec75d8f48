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
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from ecd_client import Client
from ecd_client.calls import open_channel
from ecd_client.events import Change, Subscriber
from ecd_proto.events import END, SNAPSHOT
from ecd_proto.v1 import cache_pb2 as pb
from ecd_proto.v1 import cache_pb2_grpc as pb_grpc
from support.daemon import Daemon, eventually

PUTS = 10_000
LONG = "x" * 900
"""Begins names that fill buffers."""
MakeDaemon = Callable[..., Daemon]


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
    return make_daemon("8MiB", ECD_EVENTS_ADDRESS=f"127.0.96.1:{port}").start()


def places(daemon: Daemon) -> tuple[str, str]:
    status = daemon.status()
    return status.events, status.events_replay


def listed(daemon: Daemon) -> dict[tuple[str, str], int]:
    """All that the daemon lists, by key, with its bytes."""
    found, request = {}, pb.ListRequest(limit=1000)
    with open_channel(daemon.address) as channel:
        stub = pb_grpc.CacheStub(channel)
        while True:
            page = stub.List(request, timeout=30.0)
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


def catches_up(subscriber: Subscriber, daemon: Daemon, known: dict | None = None) -> None:
    """The subscriber's entries, and those that its changes add up to, become the daemon's list."""

    def is_equal() -> bool:
        changes = subscriber.changes(0.1)
        if known is not None:
            apply(known, changes)
        [feed] = subscriber.feeds
        return subscriber.is_current and feed.entries == listed(daemon)

    eventually(is_equal, 90.0, "the subscriber has what the daemon lists")
    assert known is None or known == subscriber.feeds[0].entries


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


@pytest.mark.timeout(300)
def test_after_losses_and_a_restart_the_set_is_the_daemons_list(publishing: Daemon) -> None:
    events, replay = places(publishing)
    relay, known = Relay(events), {}
    chosen = random.Random(1)
    with (
        Subscriber([(relay.address, replay)]) as cut,
        Subscriber([(events, replay)], unread=1) as stopped,
    ):
        catches_up(stopped, publishing)
        with Client(publishing.address) as client:
            for number in range(PUTS):
                put(client, f"{LONG}{number}", f"n{number % 50}", 1 + number % 4000)
                if number % 10 == 0:
                    apply(known, cut.changes())
                if number % 1000 == 999:
                    relay.cut()
                    was = chosen.randrange(number - 500, number)
                    publishing.evict(pb.Key(namespace=f"n{was % 50}", mm_hash=f"{LONG}{was}"))
        assert publishing.status().pools[0].evictions > PUTS / 2
        catches_up(cut, publishing, known)
        assert counted(publishing, "event_losses") > 0, "nobody was too slow"
        catches_up(stopped, publishing)
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
            catches_up(subscriber, publishing, known if subscriber is cut else None)
            assert subscriber.feeds[0].snapshots > snapshots or subscriber is stopped
            assert subscriber.feeds[0].malformed == 0
    relay.close()


def test_what_was_lost_is_replayed_without_a_snapshot(publishing: Daemon) -> None:
    events, replay = places(publishing)
    relay = Relay(events)
    with Subscriber([(relay.address, replay)]) as subscriber, Client(publishing.address) as client:
        put(client, "first")
        catches_up(subscriber, publishing)
        with relay.pause:
            relay.cut()
            put(client, "lost", nbytes=77)
            eventually(lambda: counted(publishing, "event_batches") == 3, what="it is published")
        catches_up(subscriber, publishing)
        [feed] = subscriber.feeds
        assert (feed.replays, feed.snapshots) == (1, 1)
        assert subscriber.holders("n", "lost") == [feed.node]
        assert subscriber.holders("n", "another") == []
    relay.close()


def test_a_lost_last_message_is_missed_though_nothing_follows(publishing: Daemon) -> None:
    """Signs of life carry the last sequence; so does the first message after a connection."""
    events, replay = places(publishing)
    with Subscriber([(events, replay)]) as subscriber, Client(publishing.address) as client:
        put(client, "first")
        catches_up(subscriber, publishing)
        subscriber.feeds[0]._sub.unsubscribe(b"ec@")
        time.sleep(0.2)  # no answer tells that it is unsubscribed
        put(client, "lost")
        eventually(lambda: counted(publishing, "event_batches") == 3, what="it is published")
        subscriber.feeds[0]._sub.subscribe(b"ec@")
        catches_up(subscriber, publishing)


def test_the_entries_of_a_daemon_that_is_silent_are_not_current(publishing: Daemon) -> None:
    with Subscriber([places(publishing)]) as subscriber:
        catches_up(subscriber, publishing)
        os.kill(publishing.pid, signal.SIGSTOP)
        eventually(lambda: not (subscriber.changes(), subscriber.is_current)[1], 10.0)
        os.kill(publishing.pid, signal.SIGCONT)
        catches_up(subscriber, publishing)


def ask(socket: zmq.Socket, *request: bytes) -> Iterator[list[bytes]]:
    """The messages of an answer: topic, sequence, batch."""
    socket.send_multipart([b"", *request])
    while True:
        assert socket.poll(10_000), "no answer"
        empty, *message = socket.recv_multipart()
        assert empty == b""
        if message[1] == END:
            return
        yield message


def test_the_form_is_that_of_vllms_kv_events(publishing: Daemon) -> None:
    events, replay = places(publishing)
    with zmq.Context() as context:
        sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        sub.subscribe(b"")
        sub.connect(f"tcp://{events}")
        dealer.connect(f"tcp://{replay}")
        assert sub.poll(10_000), "no sign of life"
        with Client(publishing.address) as client:
            put(client, "k", "name@space", 100)
            publishing_node = publishing.status()
        while True:
            assert sub.poll(10_000)
            topic, sequence, said = sub.recv_multipart()
            ts, happened, rank, epoch = msgspec.msgpack.decode(said)
            assert (rank, epoch) == (None, publishing_node.incarnation)
            assert abs(time.time() - ts) < 60.0
            if happened:
                break
        assert topic == f"ec@{socket.gethostname()}/{publishing.name}@name@space".encode()
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


def test_requests_without_sense_cost_nothing_but_themselves(publishing: Daemon) -> None:
    events, replay = places(publishing)
    random_bytes = random.Random(2).randbytes
    with zmq.Context() as context, Client(publishing.address) as client:
        put(client, "k")
        for frames in ([b""], [b"x"], [b"", b"x"], [b"", bytes(9)], [b"x", bytes(8)], [b""] * 20):
            dealer = context.socket(zmq.DEALER)
            dealer.connect(f"tcp://{replay}")
            for _ in range(100):
                dealer.send_multipart(frames)
            assert list(ask(dealer, b"\xff" * 8)) == [], "of a sequence that is not reached"
            dealer.close()
        refused = counted(publishing, "event_requests_refused")
        assert refused >= 600
        large = context.socket(zmq.DEALER)
        large.linger = 0
        large.connect(f"tcp://{replay}")
        large.send_multipart([b"", bytes(1 << 20)])
        assert not large.poll(300), "it is closed"
        for address in (events, replay):
            host, port = address.split(":")
            for number in range(50):
                with socket.create_connection((host, int(port))) as plain:
                    plain.sendall(random_bytes(1 + 97 * number))
        large.close()
    with Subscriber([(events, replay)]) as subscriber:
        catches_up(subscriber, publishing)
        assert subscriber.feeds[0].entries == {("n", "k"): 8}
    assert "ERROR" not in publishing.text()
    assert "Traceback" not in publishing.text()


@pytest.mark.timeout(240)
def test_askers_that_take_nothing_are_given_up(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("64MiB", ECD_EVENTS_ADDRESS="127.0.0.1:0").start()
    events, replay = places(daemon)
    with zmq.Context() as context, Client(daemon.address) as client:
        for number in range(14_000):
            put(client, f"{LONG}{number}")
        stalled = []
        for _ in range(20):
            stalled.append(context.socket(zmq.DEALER))
            stalled[-1].linger, stalled[-1].rcvhwm = 0, 1
            stalled[-1].connect(f"tcp://{replay}")
            stalled[-1].send_multipart([b"", SNAPSHOT])
        eventually(lambda: counted(daemon, "event_requests_refused") >= 4, 10.0, "16 at a time")
        started = time.monotonic()
        put(client, "meanwhile")
        assert time.monotonic() - started < 1.0
        eventually(lambda: counted(daemon, "event_answers_given_up") >= 16, 60.0)
        with Subscriber([(events, replay)]) as subscriber:
            catches_up(subscriber, daemon)
        for each in stalled:
            each.close()


def test_messages_that_break_the_protocol_change_nothing() -> None:
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
            router.send_multipart([asker, b"", b"ec@node@n"])
            router.send_multipart([asker, b"", b"", END, b""])
            eventually(lambda: (subscriber.changes(), feed.malformed)[1] == 7)
            assert (feed.entries, subscriber.is_current) == ({}, False)
            eventually(lambda: (subscriber.changes(), router.poll(10))[1], 10.0, "asked again")
        pub.close()
        router.close()


def test_a_port_that_is_taken_is_named_in_the_error(make_daemon: MakeDaemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        daemon = make_daemon(ECD_EVENTS_ADDRESS=address).start(wait=False)
        eventually(lambda: "cannot publish events" in daemon.text(), 20.0)
        assert daemon._process.wait(20.0) == 1
    assert address in daemon.text()
    assert "ECD_EVENTS_ADDRESS" in daemon.text()
    assert "Traceback" not in daemon.text()


def watching(daemon: Daemon, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address, "watch"]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)


def test_watch_prints_what_is_there_and_what_changes(publishing: Daemon) -> None:
    with Client(publishing.address) as client:
        put(client, "there")
        with watching(publishing, "--json") as told, watching(publishing) as shown:
            node = f"{socket.gethostname()}/{publishing.name}"
            there = {"node": node, "namespace": "n", "mm_hash": "there", "nbytes": 8}
            assert json.loads(told.stdout.readline()) == there
            assert shown.stdout.readline().split() == ["stored", "8", "bytes", "n", "there"]
            publishing.evict(pb.Key(namespace="n", mm_hash="there"))
            assert json.loads(told.stdout.readline()) == {**there, "nbytes": None}
            assert shown.stdout.readline().split() == ["removed", "n", "there"]
            for each in (told, shown):
                each.send_signal(signal.SIGINT)
                assert each.wait(10.0) == 0


def test_watch_says_how_to_have_events_published(daemon: Daemon) -> None:
    with watching(daemon) as watch:
        assert watch.wait(20.0) == 1
