"""The status page at the daemon's HTTP port, for people, and the JSON document that it shows.

Requests come on threads of the port. They share one look at the daemon a second, on its event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs

from ecd.base.clock import Clock
from ecd.ops.history import LOT, PERIOD_S, History, Sample, lot
from ecd.ops.http_port import Refused, check_reads, refuse, send
from ecd.ops.on_loop import LATE, NoAnswer, on_loop
from ecd_proto.findings import examine, refusal
from ecd_proto.plain import plain, status_document
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

PAGE, DOCUMENT = "/", "/status.json"
LOOK_S = 1.0
"""The age up to which a look is shown again, and the longest time for one."""
MAX_PEERS = 50
"""Peers shown, with those first that the settings name or that were ever reached."""
PEER_ORDER = {"unreachable": 0, "connected": 1, "connecting": 2}
HEADERS = (
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)


class PageFigures(NamedTuple):
    """The daemon's figures at one time."""

    status: pb.StatusReply
    peers: pb.PeersReply
    refused_s_ago: dict[str, float]
    samples: list[Sample]
    at_s: float


class StatusPage:
    """Answers two paths of the daemon's HTTP port, only by GET and HEAD."""

    def __init__(
        self,
        status: Callable[[], pb.StatusReply],
        peers: Callable[[], pb.PeersReply],
        history: History,
        clock: Clock,
    ) -> None:
        """`status` and `peers` are called on the event loop on which this is made."""
        self._status, self._peers, self._history = status, peers, history
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._looking = threading.Lock()
        self._seen: tuple[dict[str, Any], PageFigures] | None = None
        self._page = Path(__file__).with_suffix(".html").read_bytes()
        self._policy = _policy(self._page.decode())

    @property
    def answers(self) -> dict[str, WSGIApplication]:
        """The application of each path."""
        return {PAGE: self._answer_page, DOCUMENT: self._answer_document}

    def _answer_page(
        self, environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        def page() -> bytes:
            return self._page

        return self._answer(environ, start_response, "text/html; charset=utf-8", page)

    def _answer_document(
        self, environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        def document() -> bytes:
            return json.dumps(self._document(_since(environ))).encode()

        return self._answer(environ, start_response, "application/json", document)

    def _answer(
        self,
        environ: WSGIEnvironment,
        start_response: StartResponse,
        kind: str,
        make: Callable[[], bytes],
    ) -> Iterable[bytes]:
        headers = *HEADERS, ("Content-Security-Policy", self._policy)
        try:
            check_reads(environ)
            body = make()
        except Refused as refused:
            return refuse(environ, start_response, refused, headers)
        return send(environ, start_response, HTTPStatus.OK, body, kind, headers)

    def _document(self, number: int) -> dict[str, Any]:
        """The JSON document, with the first LOT samples from this number on. Raises Refused."""
        if not self._looking.acquire(timeout=LOOK_S):
            raise NoAnswer(LATE.format(LOOK_S))
        try:
            if self._seen is None or self._clock.now_s() - self._seen[1].at_s >= LOOK_S:
                look = on_loop(self._loop, self._look, LOOK_S)
                self._seen = described(look), look
            document, look = self._seen
        finally:
            self._looking.release()
        samples = lot(look.samples, number)
        history = {"period_s": PERIOD_S, "lot": LOT, "fields": Sample._fields, "samples": samples}
        return {**document, "history": history}

    async def _look(self) -> PageFigures:
        status, peers = self._status(), self._peers()
        peers.incarnation = status.incarnation
        ago, samples = self._history.refused_s_ago(), self._history.samples()
        return PageFigures(status, peers, ago, samples, self._clock.now_s())


def _since(environ: WSGIEnvironment) -> int:
    """The number that the query's `since` says; 0 without one. Raises Refused."""
    [text, *_] = parse_qs(environ.get("QUERY_STRING", "")[:100]).get("since", ["0"])
    if not (text.isascii() and text.isdigit()):
        raise Refused(HTTPStatus.BAD_REQUEST, "since is the number of a sample")
    return int(text)


def described(look: PageFigures) -> dict[str, Any]:
    """The document without its history: status and peers are as in `ecd-cli --json`.

    The address is left out.
    """
    peers = sorted(
        look.peers.peers,
        key=lambda peer: (
            not (peer.configured or peer.incarnation),
            PEER_ORDER.get(peer.state, 3),
            -peer.read_bytes,
        ),
    )
    document = plain(look.peers) | {"peers": [plain(peer) for peer in peers[:MAX_PEERS]]}
    return {
        "status": status_document(look.status),
        "peers": document,
        "peers_left_out": max(0, len(peers) - MAX_PEERS),
        "findings": [vars(finding) for finding in examine(look.status, look.peers)],
        "refusals": _refusals(look),
    }


def _refusals(look: PageFigures) -> list[dict[str, Any]]:
    """Each cause of refusals since the start, the last first, with what to do about it."""
    refused = look.status.counters.refused
    ago = look.refused_s_ago
    causes = [cause for cause, count in refused.items() if count]
    return [
        {
            "cause": cause,
            "found": refusal(cause).text(refused[cause]),
            "advice": refusal(cause).advice,
            "last_s_ago": ago.get(cause, 0.0),
        }
        for cause in sorted(causes, key=lambda cause: ago.get(cause, 0.0))
    ]


def _policy(page: str) -> str:
    """The Content-Security-Policy that lets the page's own script and style run, and no others."""
    script, style = (
        b64encode(sha256(inside.encode()).digest()).decode()
        for tag in ("script", "style")
        for inside in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
