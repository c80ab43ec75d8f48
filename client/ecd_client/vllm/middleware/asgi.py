"""A request in parts: its kind, its body, and a client that may disconnect meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope

PATH = "/v1/chat/completions"
MAX_BODY_BYTES = 256 << 20
"""Largest body that is parsed."""


def is_chat(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) == PATH


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
