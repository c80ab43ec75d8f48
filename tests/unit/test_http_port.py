"""The HTTP port ends a connection that lasts, and tells who is on this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from ecd import http_port
from ecd.http_port import HttpPort
from ecd.rpc.http import Refused, check_host


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpPort]:
    monkeypatch.setattr(http_port, "WHOLE_S", 1.0)
    port = HttpPort("127.0.0.1", 0, lambda: None)
    port.start()
    yield port
    port.close()


def test_a_client_that_is_never_silent_is_ended(port: HttpPort) -> None:
    with socket.create_connection(port.server_address, timeout=0.1) as slow:
        until_s = time.monotonic() + 8.0  # less than SILENCE_S
        while time.monotonic() < until_s:
            try:
                slow.sendall(b"G")
                if not slow.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return
    pytest.fail("the connection goes on")


@pytest.mark.parametrize("client", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_known_in_every_form(client: str) -> None:
    check_host({"REMOTE_ADDR": client, "HTTP_HOST": "localhost:9464"})
    with pytest.raises(Refused):
        check_host({"REMOTE_ADDR": client, "HTTP_HOST": "evil.example"})
