"""A request in parts: its kind, its body, a client that may disconnect, and attempts to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from ecd_client.vllm.middleware.hop.protocol import MAX_BODY_BYTES

CHAT = "/v1/chat/completions"
DOORS = frozenset((CHAT, f"{CHAT}/batch", "/v1/embeddings", "/pooling", "/classify"))
"""Paths whose requests have messages in the form of chat completions."""
_STREAMED_ERROR = b'data: {"error"'


def door_of(scope: Scope) -> str | None:
    """The path of a request that may have media. None: it is another one."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path if path in DOORS else None


def caller_of(scope: Scope, has_keys: bool) -> str:
    """The sender of a request, as far as a caller cannot choose it: its address, and its key."""
    key = dict(scope["headers"]).get(b"authorization", b"") if has_keys else b""
    host, _ = scope.get("client") or ("", 0)
    return repr((host, key))


def is_stream(start: Message) -> bool:
    headers = dict(start.get("headers", ()))
    return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))


async def whole_body(receive: Receive) -> tuple[bytes | None, Receive]:
    """The body, and a `receive` that returns it again. None: it is too large, or did not come."""
    messages: list[Message] = []
    nbytes, is_last = 0, False
    while not is_last and nbytes <= MAX_BODY_BYTES:
        message = await receive()
        messages.append(message)
        nbytes += len(message.get("body", b""))
        is_last = message["type"] != "http.request" or not message.get("more_body", False)
    is_whole = is_last and messages[-1]["type"] == "http.request"
    body = b"".join(message.get("body", b"") for message in messages) if is_whole else None

    async def again() -> Message:
        return messages.pop(0) if messages else await receive()

    return body, again


def with_body(scope: Scope, body: bytes, receive: Receive) -> tuple[Scope, Receive]:
    """The request with this body; `receive` brings what comes after it."""
    scope = {**scope, "headers": list(scope["headers"])}
    MutableHeaders(scope=scope)["content-length"] = str(len(body))
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return scope, again


def with_header(send: Send, name: str, holds: Callable[[], bool]) -> Send:
    """The same, for an answer that has one more header if this holds as it begins."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200 and holds():
            message = {**message, "headers": [*message.get("headers", ()), (name.encode(), b"1")]}
        await send(message)

    return sending


class Leaving:
    """Notices a client that disconnects, after the request's body has come."""

    def __init__(self, receive: Receive) -> None:
        self._left = asyncio.ensure_future(_left(receive))

    async def receive(self) -> Message:
        """The next message, that the client has disconnected; all listeners get it."""
        return await asyncio.shield(self._left)

    async def interrupts(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, unless the client disconnects."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()

    def close(self) -> None:
        self._left.cancel()


async def _left(receive: Receive) -> Message:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return message


class Attempt:
    """One way to serve a request. An answer with a status of `fails_from` or more is not sent.

    `begun` is called when the answer begins, and it is known whether it has failed.

    A stream says that it fails in its first chunk with content. What comes before, which is the
    answer's start and a chunk that names the role, is held until then.
    """

    def __init__(
        self, send: Send, fails_from: int | None = None, begun: Callable[[], None] | None = None
    ) -> None:
        self._send, self._fails_from, self._begun = send, fails_from, begun
        self._held: list[Message] = []
        self.has_failed = self.has_begun = False
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.has_failed = self.status >= (self._fails_from or 500)
            if is_stream(message):
                self._held = [message]
                return
        elif self._held and not self.has_failed:
            self.has_failed = message.get("body", b"").startswith(_STREAMED_ERROR)
            if len(self._held) == 1 and not self.has_failed and message.get("more_body", False):
                self._held.append(message)
                return
        if not (self.has_failed and self._fails_from):
            if not self.has_begun and self._begun is not None:
                self._begun()
            self.has_begun = True
            held, self._held = self._held, []
            for each in (*held, message):
                await self._send(each)
