"""The HTTP port ends a connection that lasts, and tells who is on this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ecd.ops import http_port
from ecd.ops.http_port import WHOLE_S, HttpPort, Refused, check_host
from support.clock import SetClock
from support.waiting import HANG_S, eventually


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def port(clock: SetClock) -> Iterator[HttpPort]:
    port = HttpPort("127.0.0.1", 0, lambda: None, clock)
    port.start()
    yield port
    port.close()


def test_a_client_that_is_never_silent_is_ended(
    port: HttpPort, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port.Handler, "timeout", 10 * HANG_S)
    with socket.create_connection(port.server_address, timeout=HANG_S) as slow:
        slow.sendall(b"G")
        eventually(lambda: port._until_s, "the connection is taken")
        clock.at_s = WHOLE_S - 0.1
        port.service_actions()
        slow.sendall(b"E")
        slow.setblocking(False)
        with pytest.raises(BlockingIOError):
            slow.recv(1)
        slow.settimeout(HANG_S)
        clock.at_s = WHOLE_S
        assert slow.recv(1) == b""


def test_a_port_that_nobody_asks_ends_at_once(
    clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "SWEEP_S", 100 * HANG_S)
    port = HttpPort("127.0.0.1", 0, lambda: None, clock)
    port.start()
    with socket.create_connection(port.server_address, timeout=HANG_S) as asked:
        asked.sendall(b"?\r\n\r\n")
        asked.recv(1)  # it serves
    port.close()


@pytest.mark.parametrize("client", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_known_in_every_form(client: str) -> None:
    check_host({"REMOTE_ADDR": client, "HTTP_HOST": "localhost:9464"})
    with pytest.raises(Refused):
        check_host({"REMOTE_ADDR": client, "HTTP_HOST": "evil.example"})


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:9464", "[::1]:9464", "localhost.:1"]
)
def test_hosts_of_this_machine(host: str) -> None:
    check_host({"REMOTE_ADDR": "127.0.0.1", "HTTP_HOST": host})


def test_who_names_no_host_is_no_browser() -> None:
    check_host({"REMOTE_ADDR": "127.0.0.1"})


FOREIGN = [
    "evil@localhost",
    "evil:x@127.0.0.1",
    "evil.example#@localhost",
    "localhost.evil.example",
    "localhost/evil",
    "localhost,evil",
    "localhost:",
    "localhost:\uff11",
    "[localhost]",
    "[::1]evil",
]


@pytest.mark.parametrize("host", ["", *FOREIGN])
def test_hosts_that_name_another_or_none(host: str) -> None:
    with pytest.raises(Refused):
        check_host({"REMOTE_ADDR": "127.0.0.1", "HTTP_HOST": host})
    check_host({"REMOTE_ADDR": "10.0.0.2", "HTTP_HOST": host})  # no browser of this machine
