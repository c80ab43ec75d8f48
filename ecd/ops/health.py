"""Health over HTTP, for Docker and load balancers, which speak no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ecd.ops.http_port import Refused, check_reads, refuse, send
from ecd.ops.on_loop import on_loop

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

ALIVE, READY = "/healthz", "/readyz"
ANSWER_S = 1.0
"""How long the event loop may take to come round."""


class Health:
    """Answers "ok", or 503 with the reason: whether the daemon's event loop runs, and it serves."""

    def __init__(self, unavailable: Callable[[], str | None]) -> None:
        """`unavailable` says why calls are refused now. Made on the daemon's event loop."""
        self._unavailable, self._loop = unavailable, asyncio.get_running_loop()

    @property
    def answers(self) -> dict[str, WSGIApplication]:
        """The application of each path."""
        return {
            ALIVE: partial(self._answer, self._is_alive),
            READY: partial(self._answer, self._is_ready),
        }

    async def _is_alive(self) -> None:
        return

    async def _is_ready(self) -> None:
        if reason := self._unavailable():
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, reason)

    def _answer(
        self,
        ask: Callable[[], Coroutine[Any, Any, None]],
        environ: WSGIEnvironment,
        start_response: StartResponse,
    ) -> Iterable[bytes]:
        try:
            check_reads(environ)
            on_loop(self._loop, ask, ANSWER_S)
        except Refused as refused:
            return refuse(environ, start_response, refused)
        return send(environ, start_response, HTTPStatus.OK, b"ok\n", "text/plain; charset=utf-8")
