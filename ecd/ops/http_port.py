"""The daemon's HTTP port: a thread for each connection, up to a bound, and an end to each.

`by_path` is the door for all that is asked there: it knows the paths, and turns away pages of other
sites.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from ipaddress import ip_address
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ecd.base.clock import Clock

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Connections served at one time; more are told to retry."""
BACKLOG = 128
"""Connections queued by the kernel: the library's five would delay those of a burst."""
SILENCE_S = 10.0
"""How long a client may be silent within its request."""
WHOLE_S = 30.0
"""How long one connection may last: a client that sends a byte at a time is never silent."""
SWEEP_S = 0.5
"""How often the port looks for connections that have lasted too long."""
FULL = (
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n\r\n"
    b'{"error": "too many connections to this port: ask again"}'
)


HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(:[0-9]+)?")
"""The header of a request that a browser or a scraper makes: a host, and its port."""


class Refused(Exception):
    """The request is not answered; the text says what to do."""

    def __init__(self, status: HTTPStatus, text: str, *headers: tuple[str, str]) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


def check_reads(environ: WSGIEnvironment) -> None:
    """Raise Refused unless the request is a GET or a HEAD."""
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        allow = "Allow", "GET, HEAD"
        raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "this page can only be read", allow)


def send(
    environ: WSGIEnvironment,
    start_response: StartResponse,
    status: HTTPStatus,
    body: bytes,
    kind: str = "application/json",
    headers: Iterable[tuple[str, str]] = (),
) -> Iterable[bytes]:
    """Send an answer, to HEAD without its body."""
    sizes = ("Content-Type", kind), ("Content-Length", str(len(body)))
    start_response(f"{status.value} {status.phrase}", [*headers, *sizes])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def refuse(
    environ: WSGIEnvironment,
    start_response: StartResponse,
    refused: Refused,
    headers: Iterable[tuple[str, str]] = (),
) -> Iterable[bytes]:
    """Send a refusal, as JSON."""
    body = json.dumps({"error": str(refused)}).encode()
    headers = *headers, *refused.headers
    if refused.status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers = *headers, ("Retry-After", "1")
    return send(environ, start_response, refused.status, body, headers=headers)


def with_head(application: WSGIApplication) -> WSGIApplication:
    """The application, which knows no HEAD, with answers to it: those to GET without their body."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "HEAD":
            return application(environ, start_response)
        said: list[tuple[str, list[tuple[str, str]]]] = []

        def note(status: str, headers: list[tuple[str, str]], *_: Any) -> Callable[..., object]:
            said.append((status, headers))
            return lambda _: None

        body = b"".join(application(environ | {"REQUEST_METHOD": "GET"}, note))
        [(status, headers)] = said
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return []

    return answer


def by_path(answers: Mapping[str, WSGIApplication]) -> WSGIApplication:
    """Route each path to its application, if the request may be answered at all."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            check_host(environ)
            found = answers.get(environ["PATH_INFO"])
            if found is None:
                known = ", ".join(sorted(answers))
                raise Refused(HTTPStatus.NOT_FOUND, f"there is no such path; there are {known}")
        except Refused as refused:
            return refuse(environ, start_response, refused)
        return found(environ, start_response)

    return answer


def check_host(environ: WSGIEnvironment) -> None:
    """Refuse a page of another site that a browser on this machine shows. Raises Refused.

    A site may have its own name lead to this machine (DNS rebinding). A browser says that name.
    """
    if "HTTP_HOST" not in environ:
        return
    client = ip_address(environ["REMOTE_ADDR"])
    if (getattr(client, "ipv4_mapped", None) or client).is_loopback:
        said = HOST.fullmatch(environ["HTTP_HOST"])
        host = said[1].lower().removesuffix(".") if said else ""
        if host != "localhost" and not _is_address(host.strip("[]")):
            text = "from this machine, ask by an IP address or as localhost"
            raise Refused(HTTPStatus.FORBIDDEN, text)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class HttpPort(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application on a thread of its own, from `start` to `close`."""

    daemon_threads = True
    request_queue_size = BACKLOG
    timeout = 0  # of handle_request, which is called when there is one

    def __init__(self, host: str, port: int, refused: Callable[[], None], clock: Clock) -> None:
        """Bind. `refused` is called for each refused connection. Raises OSError."""
        [found, *_] = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family = found[0]
        self._refused, self._clock = refused, clock
        self._until_s: dict[Any, float] = {}
        """When each connection ends at the latest."""
        self._lock = threading.Lock()
        super().__init__(found[4], Handler)  # type: ignore[arg-type]
        self._ends, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.send(b"x")
        self._thread.join()
        self.server_close()
        self._end.close()
        self._ends.close()

    def _serve(self) -> None:
        """Serve until `close`, at once: `serve_forever` would see that at its next poll."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            ends = selector.register(self._ends, selectors.EVENT_READ)
            while ends not in (key for key, _ in selector.select(SWEEP_S)):
                self.handle_request()
                self.service_actions()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            has_room = len(self._until_s) < MAX_CONNECTIONS
            if has_room:
                self._until_s[request] = self._clock.now_s() + WHOLE_S
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
        """Close connections that have lasted too long."""
        now_s = self._clock.now_s()
        with self._lock:
            late = [request for request, until_s in self._until_s.items() if until_s <= now_s]
            for request in late:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """Log faults of this server; clients may disconnect at any time."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logger.error("a request to the HTTP port failed", exc_info=error)
