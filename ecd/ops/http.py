"""The question which nodes hold keys, over HTTP: for routers that speak no gRPC.

Requests come on threads of the metrics' port; the answer is the Cache service's, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ecd.base.clock import Clock
from ecd.base.wire import InvalidRequest, check_batch
from ecd.ops.http_port import Refused, refuse, send
from ecd.ops.on_loop import on_loop
from ecd_proto.contract import MAX_BATCH
from ecd_proto.v1 import cache_pb2 as pb

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

PATH = "/v1/locate"
MAX_BODY_BYTES = 256 << 10
"""Largest request: a JSON parser does not let other threads run, so more would block the loop."""
MAX_REQUESTS = 16
"""Requests answered at one time."""
ANSWER_S = BODY_S = 5.0
FORM = (
    f'POST {{"namespace": "...", "mm_hashes": ["...", ...]}} to {PATH}, at most {MAX_BATCH} of them'
)

Locate = Callable[[pb.LocateRequest, Any], Awaitable[pb.LocateReply]]


class LocateOverHttp:
    """Answers one path of the daemon's HTTP port: a WSGI application."""

    def __init__(self, locate: Locate, unavailable: Callable[[], str | None], clock: Clock) -> None:
        """`unavailable` says why calls are refused now. Made on the daemon's event loop."""
        self._locate, self._unavailable, self._clock = locate, unavailable, clock
        self._loop = asyncio.get_running_loop()
        self._room = threading.BoundedSemaphore(MAX_REQUESTS)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            body = json.dumps(self._answer(environ)).encode()
        except Refused as refused:
            return refuse(environ, start_response, refused)
        return send(environ, start_response, HTTPStatus.OK, body)

    def _answer(self, environ: WSGIEnvironment) -> dict[str, Any]:
        if environ["REQUEST_METHOD"] != "POST":
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, FORM, ("Allow", "POST"))
        body = _body(environ, self._clock)
        if not self._room.acquire(blocking=False):
            text = f"{MAX_REQUESTS} requests are being answered: ask again"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, text)
        try:
            return self._located(_request_from(body))
        finally:
            self._room.release()

    def _located(self, request: pb.LocateRequest) -> dict[str, Any]:
        if reason := self._unavailable():
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}: ask again")

        async def ask() -> pb.LocateReply:
            return await self._locate(request, None)

        try:
            reply = on_loop(self._loop, ask, ANSWER_S, "no answer within {:g} s: ask again")
        except InvalidRequest as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"{error}. {FORM}") from None
        return _to_json(request, reply)


def _body(environ: WSGIEnvironment, clock: Clock) -> bytes:
    """The request's body. Raises Refused."""
    said = environ.get("CONTENT_LENGTH") or ""
    if not (said.isascii() and said.isdigit()):
        raise Refused(HTTPStatus.LENGTH_REQUIRED, "send the body with its Content-Length")
    if len(said) > 9 or int(said) > MAX_BODY_BYTES:
        text = (
            f"a body of {said[:20]} bytes; at most {MAX_BODY_BYTES}: ask for fewer keys at a time"
        )
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
    body, until_s = b"", clock.now_s() + BODY_S
    try:
        while len(body) < int(said) and clock.now_s() < until_s:
            piece: bytes = environ["wsgi.input"].read1(int(said) - len(body))
            if not piece:
                break
            body += piece
    except OSError:
        pass
    if len(body) != int(said):
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, "the body ended before its Content-Length")
    return body


def _request_from(body: bytes) -> pb.LocateRequest:
    """The request in the body. Raises Refused."""
    try:
        said = json.loads(body)
        if not isinstance(said, dict) or not isinstance(said.get("namespace"), str):
            raise ValueError("the namespace is missing, or no text")
        mm_hashes = said.get("mm_hashes")
        if not isinstance(mm_hashes, list):
            raise ValueError("mm_hashes are missing, or no list")
        check_batch(mm_hashes)
        keys = [pb.Key(namespace=said["namespace"], mm_hash=mm_hash) for mm_hash in mm_hashes]
        return pb.LocateRequest(keys=keys)
    except (ValueError, TypeError, RecursionError, InvalidRequest) as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"{str(error)[:200]}. {FORM}") from None


def _to_json(request: pb.LocateRequest, reply: pb.LocateReply) -> dict[str, Any]:
    return {
        "incarnation": reply.incarnation,
        "is_partial": reply.is_partial,
        "located": {
            key.mm_hash: [
                {
                    "node": holder.node,
                    "nbytes": holder.nbytes or None,
                    "age_s": holder.age_s if holder.HasField("age_s") else None,
                    "metadata": b64encode(holder.metadata).decode() or None,
                }
                for holder in located.holders
            ]
            for key, located in zip(request.keys, reply.located, strict=True)
        },
    }
