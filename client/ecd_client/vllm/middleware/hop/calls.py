"""Calls of encoders over HTTP, within bounds of time and of size."""

from __future__ import annotations

import asyncio
import contextlib
import json
from io import BytesIO
from typing import Any, NamedTuple

import aiohttp

from ecd_client.vllm.base.hints import CONSUMERS, DECODING
from ecd_client.vllm.middleware.hop.encoders import Encoder
from ecd_client.vllm.middleware.hop.protocol import HAS_OUTLINE, IS_HOP, IS_HOP_PARAM, UNLIKE
from ecd_client.vllm.middleware.media import MissingMedium

MAX_ANSWER_BYTES = 64 << 10
_IDLE_S = 2.0
"""How long a connection is kept without a call: vLLM closes it after 5 s."""
_REFUSALS = (400, 413, 422, 501, UNLIKE)
"""Statuses that blame the medium: other encoders would refuse it, too; but for the last."""
_LOST = aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError


class EncoderAnswer(NamedTuple):
    """An answer's body, and whether it has the header HAS_OUTLINE."""

    body: bytes
    has_outline: bool


class Failed(Exception):
    """Why a call has failed, through the encoder's fault."""


class Late(Failed):
    """An encoder has not answered in time."""


class ConnectionLost(Failed):
    """An encoder has ended the connection of a call, or has ended itself."""


class MediumRefused(Exception):
    """An encoder has refused the medium. `is_by_all`: others would refuse it, too."""

    def __init__(self, said: str, *, is_by_all: bool) -> None:
        super().__init__(said)
        self.is_by_all = is_by_all


class EncoderCalls:
    """An HTTP client for encoders. Used from one event loop."""

    def __init__(self, key: str | None, connect_s: float) -> None:
        """`key` is sent as a bearer token. An encoder has to be reached within `connect_s`."""
        self._key, self._connect_s = key, connect_s
        self._client: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # a bound counts what comes, not what it becomes
            )
        return self._client

    async def is_alive(self, encoder: Encoder, within_s: float) -> bool:
        """Whether the encoder's server answers anything but an error of its own."""
        timeout = aiohttp.ClientTimeout(total=max(0.001, within_s))
        with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError):
            async with self._session.get(
                f"{encoder.url}/health", timeout=timeout, allow_redirects=False
            ) as reply:
                return reply.status < 500
        return False

    @staticmethod
    def body_of(missing: MissingMedium, model: str, node: str | None) -> bytes:
        """The chat completion that has a medium encoded for the engine of this model and node."""
        params: dict[str, Any] = {IS_HOP_PARAM: True}
        if missing.decoding is not None:
            params[DECODING] = missing.decoding
        if node:
            params[CONSUMERS] = [node]
        request: dict[str, Any] = {"model": model, "max_tokens": 1, "ec_transfer_params": params}
        if missing.salt:
            request["cache_salt"] = missing.salt
        if not missing.is_safe:
            request["messages"] = [{"role": "user", "content": [missing.part]}]
            return json.dumps(request).encode()
        # To look through a long URL for what has to be escaped would hold up all requests.
        request["messages"] = [{"role": "user", "content": [missing._replace(url="").part]}]
        before, after = json.dumps(request).split('"url": ""')
        return b"".join((f'{before}"url": "'.encode(), missing.url.encode(), f'"{after}'.encode()))

    async def complete(self, encoder: Encoder, body: bytes, within_s: float) -> EncoderAnswer:
        """The answer to a chat completion. Raises MediumRefused and Failed."""
        # `connect` has the time to resolve the name in it, which `sock_connect` has not.
        timeout = aiohttp.ClientTimeout(total=max(0.001, within_s), connect=self._connect_s)
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            IS_HOP: "1",
        }
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        said, has_outline = b"", False
        try:
            async with self._session.post(
                f"{encoder.url}/v1/chat/completions",
                data=BytesIO(body),  # which is sent in pieces
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as reply:
                if reply.status in _REFUSALS:
                    why = (await reply.content.read(200)).decode(errors="replace")
                    is_by_all = reply.status != UNLIKE
                    raise MediumRefused(f"{reply.status} {why}", is_by_all=is_by_all)
                if reply.status != 200:
                    raise Failed(f"it answered with status {reply.status}")
                if reply.headers.get("Content-Encoding", "identity") != "identity":
                    raise Failed("its answer is compressed, which it was not asked for")
                has_outline = HAS_OUTLINE in reply.headers
                async for chunk in reply.content.iter_any():
                    said += chunk
                    if len(said) > MAX_ANSWER_BYTES:
                        raise Failed("its answer is too long")
        except aiohttp.ConnectionTimeoutError:
            raise Failed("it cannot be reached in time") from None
        except asyncio.TimeoutError:
            raise Late("it did not answer in time") from None
        except aiohttp.ClientConnectorError as error:
            raise Failed(f"{type(error).__name__}: {error}") from None
        except _LOST as error:
            raise ConnectionLost(f"it has ended the connection: {error}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Failed(f"{type(error).__name__}: {error}") from None
        return EncoderAnswer(said, has_outline)
