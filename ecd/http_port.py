"""The daemon's HTTP port: a thread for each connection, up to a bound, and an end to each."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Connections that are served at one time; more are told to come again."""
BACKLOG = 128
"""Connections that wait to be taken: the library's five would let those of a burst wait."""
SILENCE_S = 10.0
"""How long a client may say nothing within its request."""
WHOLE_S = 30.0
"""How long one connection may last: a client that sends a byte at a time is never silent."""
FULL = (
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n\r\n"
    b'{"error": "too many connections to this port: ask again"}'
)


class Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class HttpPort(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application on a thread of its own, from `start` to `close`."""

    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, host: str, port: int, refused: Callable[[], None]) -> None:
        """Bind. `refused` is called for each connection that is turned away. Raises OSError."""
        [found, *_] = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family = found[0]
        self._refused = refused
        self._until_s: dict[Any, float] = {}
        """When each connection ends at the latest."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        super().__init__(found[4], Handler)  # type: ignore[arg-type]

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            has_room = len(self._until_s) < MAX_CONNECTIONS
            if has_room:
                self._until_s[request] = time.monotonic() + WHOLE_S
        if has_room:
            super().process_request(request, client_address)
            return
        self._refused()
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(FULL)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._until_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End what has lasted too long; called twice a second."""
        now_s = time.monotonic()
        with self._lock:
            late = [request for request, until_s in self._until_s.items() if until_s <= now_s]
            for request in late:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """Log what failed here; clients may leave as they like."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logger.error("a request to the HTTP port failed", exc_info=error)
