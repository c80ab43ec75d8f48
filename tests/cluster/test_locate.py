"""The question which nodes hold a key: by the client, `ecd-cli locate` and HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ecd_client import Client, Holder, InvalidArgument, Located
from ecd_proto.contract import MAX_BATCH
from support.daemon import Daemon, changed
from support.processes import run
from support.redis import RedisServer
from support.waiting import HANG_S, eventually, value_of

IMPATIENT = changed(
    *("from ecd.ops import http", "http.BODY_S = 2.0"),
    *("from ecd.ops import http_port", "http_port.Handler.timeout = 2.0"),
)
"""A daemon that waits for two seconds for a body."""
MakePeer = Callable[..., Daemon]
ClientOf = Callable[[Daemon], Client]


@pytest.fixture
def daemon(unused_daemon: Daemon) -> Daemon:
    return unused_daemon


def put(client: Client, key: str, nbytes: int = 100) -> None:
    client.put_bytes(key, b"x" * nbytes, "uint8", (nbytes,))


def over_http(daemon: Daemon, body: bytes, method: str = "POST") -> tuple[int, dict]:
    url = daemon.metrics_url().replace("/metrics", "/v1/locate")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, method=method)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def asked(*keys: str, namespace: str = "default") -> bytes:
    return json.dumps({"namespace": namespace, "mm_hashes": keys}).encode()


def locate(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address, "locate"]
    return run([*command, *arguments], capture_output=True, text=True)


def test_a_daemon_alone_says_what_it_holds(daemon: Daemon, client: Client) -> None:
    hits = daemon.status().counters.hits
    put(client, "k", 100)
    node = f"{socket.gethostname()}/{daemon.name}"
    found = client.locate(["absent", "k"])
    [[], [holder]] = found.holders
    assert (holder.node, holder.nbytes, found.is_partial) == (node, 100, True)
    status, answer = over_http(daemon, asked("k", "absent", namespace=client.namespace))
    assert (status, answer["incarnation"], answer["is_partial"]) == (200, client.incarnation, True)
    [told] = answer["located"]["k"]
    assert answer["located"]["absent"] == []
    assert (told["node"], told["nbytes"]) == (node, 100)
    assert told["age_s"] > holder.age_s >= 0.0
    assert client.locate([]).holders == []
    assert daemon.status().counters.hits == hits, "it is no use of the entry"


def test_the_command_shows_it_and_finds_the_namespace(daemon: Daemon, client: Client) -> None:
    client.put_bytes("[red]k", b"x", "uint8", (1,), namespace="n")
    done = locate(daemon, "[red]k")
    assert done.returncode == 0, done.stderr
    assert "may hold more" in done.stdout
    assert f"{socket.gethostname()}/{daemon.name}" in done.stdout
    assert "[red]k" in done.stdout
    told = json.loads(locate(daemon, "[red]k", "--json").stdout)
    assert told["namespace"] == "n"
    assert [at["nbytes"] for at in told["located"]["[red]k"]] == [1]
    nowhere = locate(daemon, "other", "--namespace", "n")
    assert (nowhere.returncode, "nowhere" in nowhere.stdout) == (1, True)
    unnamed = locate(daemon, "other")
    assert (unnamed.returncode, "looked in the namespace 'default'" in unnamed.stderr) == (1, True)
    client.put_bytes("[red]k", b"x", "uint8", (1,), namespace="m")
    assert locate(daemon, "[red]k").returncode == 2


def test_a_request_that_breaks_the_contract_is_told_so(daemon: Daemon, client: Client) -> None:
    with pytest.raises(InvalidArgument, match=f"at most {MAX_BATCH}"):
        client.locate(["k"] * (MAX_BATCH + 1))
    with pytest.raises(InvalidArgument, match="list"):
        client.locate("k")
    with pytest.raises(InvalidArgument, match="empty"):
        client.locate([""])
    assert len(client.locate(["k"] * MAX_BATCH).holders) == MAX_BATCH
    deep, many = b"[" * 100_000, asked(*["k"] * (MAX_BATCH + 1))
    for body in (b"", b"{", b"[]", b"null", b'"x"', b'{"namespace": "n"}', b"\xff", deep, many):
        status, answer = over_http(daemon, body)
        assert (status, "POST {" in answer["error"]) == (400, True), body[:50]
    for said in (
        {"namespace": "", "mm_hashes": ["k"]},
        {"namespace": "n", "mm_hashes": "k"},
        {"namespace": "n", "mm_hashes": [1]},
        {"namespace": "n", "mm_hashes": ["\ud800"]},
        {"namespace": "n" * 2000, "mm_hashes": ["k"]},
    ):
        status, answer = over_http(daemon, json.dumps(said).encode())
        assert (status, "POST {" in answer["error"]) == (400, True), said
    assert over_http(daemon, b"x" * ((256 << 10) + 1))[0] == 413
    assert over_http(daemon, b"", "PUT")[0] == 405
    assert "the namespace is missing" in over_http(daemon, b"{}")[1]["error"]
    place = urlsplit(daemon.metrics_url())
    unsized = http.client.HTTPConnection(place.hostname, place.port, timeout=HANG_S)
    unsized.putrequest("POST", "/v1/locate")
    unsized.endheaders()
    assert unsized.getresponse().status == 411
    unsized.close()
    assert over_http(daemon, asked("k"))[0] == 200
    assert "ecd_entries" in daemon.metrics(), "the port still serves metrics"


def stall(daemon: Daemon) -> socket.socket:
    """A request whose body does not come."""
    place = urlsplit(daemon.metrics_url())
    head = b"POST /v1/locate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 200000\r\n\r\n{"
    connection = socket.create_connection((place.hostname, place.port), timeout=HANG_S)
    with contextlib.suppress(ConnectionError):  # it was too late for the daemon
        connection.sendall(head)
    return connection


def last_words(connection: socket.socket) -> bytes:
    """What is said to a stalled request; nothing where its head came too late."""
    with connection, contextlib.suppress(ConnectionError):
        return connection.recv(100)
    return b""


def test_bodies_that_do_not_come_hold_up_nobody(daemon: Daemon) -> None:
    stalled = [stall(daemon) for _ in range(32)]
    assert over_http(daemon, asked("k"))[0] == 200
    assert "ecd_entries" in daemon.metrics()
    assert not select.select(stalled, [], [], 0)[0], "they are waited for still"
    for each in stalled:
        each.close()


def test_bodies_that_do_not_come_are_given_up(make_daemon: Callable[..., Daemon]) -> None:
    """A byte of the body now and then is no reason to wait longer."""
    daemon = make_daemon()
    daemon.command = IMPATIENT
    stalled = [stall(daemon.start()), *(stall(daemon) for _ in range(31))]
    is_over = threading.Event()
    drip = threading.Thread(target=_drip, args=(daemon, stalled[0], is_over))
    drip.start()
    try:
        for each in stalled:
            said = last_words(each) or value_of(lambda: last_words(stall(daemon)))
            assert b" 408 " in said
    finally:
        is_over.set()
        drip.join(HANG_S)


def _drip(daemon: Daemon, connection: socket.socket, is_over: threading.Event) -> None:
    """Send a byte of the body after every question to the daemon."""
    with contextlib.suppress(OSError):
        while not is_over.is_set():
            daemon.status()
            connection.sendall(b" ")


def test_connections_are_bounded_and_may_break_off(daemon: Daemon) -> None:
    place = urlsplit(daemon.metrics_url())
    address = place.hostname, place.port
    begun = b"GET / HTTP/1.1\r\nHost: "
    for said in (b"", b"GE", begun):
        with socket.create_connection(address, timeout=HANG_S) as broken:
            broken.sendall(said)
            broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    before = threads(daemon)
    held = [socket.create_connection(address, timeout=HANG_S) for _ in range(200)]
    for each in held:
        with contextlib.suppress(OSError):  # that it is turned away
            each.sendall(begun)
    eventually(lambda: threads(daemon) >= before + 60)
    eventually(lambda: len(select.select(held, [], [], 0)[0]) > 100, "the others are turned away")
    assert threads(daemon) < before + 80
    for each in held:
        each.close()
    eventually(lambda: threads(daemon) < before + 10)
    turned_away = r"^ecd_http_refused_total ([0-9.]+)$"
    assert float(re.search(turned_away, daemon.metrics(), re.MULTILINE)[1]) > 100
    assert "Traceback" not in daemon.text()


def threads(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/task"))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "localhost.evil.example", "[", "[::1", "[v1]"]
)
def test_a_page_of_another_site_is_told_nothing(daemon: Daemon, host: str) -> None:
    place = urlsplit(daemon.metrics_url())
    body = asked("k")
    with socket.create_connection((place.hostname, place.port), timeout=HANG_S) as connection:
        head = f"POST /v1/locate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert b" 403 " in connection.recv(100)


def test_a_daemon_that_does_not_serve_yet_says_so(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Its pool is populated once the gate is open."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    daemon = make_daemon()
    daemon.command = changed(
        *("import os", "from ecd.memory.host import HostPool as at", "populate = at.populate"),
        "def populate_at_a_gate(*about):",
        f"    os.read(os.open({str(gate)!r}, os.O_RDWR), 1)",
        "    populate(*about)",
        "at.populate = populate_at_a_gate",
    )
    daemon.start(wait=False)
    eventually(lambda: "metrics on" in daemon.text())
    status, said = over_http(daemon, asked("k"))
    assert status == 503
    assert "populating its pool" in said["error"]
    assert "ask again" in said["error"]
    with gate.open("r+b", buffering=0) as pipe:
        pipe.write(b"x")
        while (status := over_http(daemon, asked("k"))[0]) != 200:
            assert status == 503


def whole(client: Client, keys: Sequence[str]) -> list[list[Holder]]:
    """What is found once all others have answered in time."""

    def look() -> Located | None:
        found = client.locate(keys)
        return None if found.is_partial else found

    return value_of(look, "others answer in time").holders


def test_redis_knows_the_other_holders(
    shared_redis: RedisServer, unused_pair: list[Daemon], make_peer: MakePeer, client_of: ClientOf
) -> None:
    there, third = unused_pair
    here = make_peer(ECD_DIRECTORY=shared_redis.url).start()
    client = client_of(here)
    put(client, "both")
    for other in (there, third):
        put(client_of(other), "both")
    client_of(there).put_bytes("far", bytes(77), "uint8", (77,), metadata=b"\x01 with a space\xff")
    client_of(there).put_bytes("long", bytes(77), "uint8", (77,), metadata=bytes(129))
    for daemon in (here, there, third):
        daemon.wait_idle("settled")

    assert {holder.node for holder in whole(client, ["both"])[0]} == {
        here.peer,
        there.peer,
        third.peer,
    }
    far, long = Holder(there.peer, 77, None, b"\x01 with a space\xff"), Holder(there.peer, 77, None)
    assert whole(client, ["far", "long"]) == [[far], [long]]
    assert client_of(there).locate(["long"]).holders[0][0].metadata == bytes(129)
    assert whole(client, ["both"])[0][0].node == here.peer, "this node comes first"
    many = whole(client, [*(f"absent-{n}" for n in range(MAX_BATCH - 1)), "far"])
    assert [len(holders) for holders in many] == [0] * (MAX_BATCH - 1) + [1]
    metadata = b64encode(far.metadata).decode()
    said = {"node": there.peer, "nbytes": 77, "age_s": None, "metadata": metadata}
    eventually(lambda: over_http(here, asked("far"))[1]["located"]["far"] == [said])

    def is_shown() -> bool:
        done = locate(here, "far", "--namespace", "default")
        return (done.returncode, there.peer in done.stdout) == (0, True)

    eventually(is_shown, "the command shows it")
