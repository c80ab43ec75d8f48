"""The encode hop: pictures that ecd has not are encoded by other engines, one call a picture.

Each call is a chat completion with one picture under the name that it has here. The answer's
`ec_transfer_params` say that the picture is stored, and what an engine needs to do without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from prometheus_client import Counter, Gauge

from ecd_client.client import Client
from ecd_client.errors import DaemonUnavailable
from ecd_client.vllm.encoders import Encoder, Encoders, Missing
from ecd_client.vllm.hints import CONSUMERS, hints_in
from ecd_proto.contract import Hint

if TYPE_CHECKING:
    from starlette.types import Scope

    from ecd_client.vllm.pictures import Look

logger = logging.getLogger(f"vllm.{__name__}")

CALL_S, CONNECT_S = 10.0, 2.0
"""How long an encoder may take for a picture, and to take a connection."""
PICTURE_S = 30.0
"""How long a picture may take with all encoders together."""
MAX_CALLS, MAX_FLIGHTS = 64, 1024
"""Calls at once, and pictures that are called for or wait for their call."""
MAX_ANSWER_BYTES = 64 << 10
IS_HOP = "x-ecd-hop"
"""Header of a call: an engine that gets it does not ask another one."""
_IDLE_S = 2.0
"""How long a connection is kept without a call: vLLM closes it after 5 s."""
_REFUSALS = (400, 413, 422)
"""Statuses that blame the picture: no other encoder will take it."""


class Promise(NamedTuple):
    """The metadata of a picture that an encoder has stored, and where it lies."""

    fields: dict[str, Any]
    hints: list[Hint]


class NotEncoded(Exception):
    """No encoder has stored the picture."""


class _Failed(Exception):
    """Why a call has failed, by the encoder's fault."""


class _Refused(Exception):
    """An encoder has refused the picture."""


class _Flight:
    """The one search for an encoder that all requests for a picture wait for."""

    def __init__(self, task: asyncio.Task[Promise | None]) -> None:
        self.task, self.waiting = task, 0


class EncodeHop:
    """Has pictures encoded by other engines. Used from one event loop."""

    def __init__(
        self,
        encoders: Encoders,
        client: Client,
        model: str,
        fields: set[str],
        *,
        key: str | None,
        in_need: bool,
    ) -> None:
        """`model` is the served one's name, `fields` are those of a picture's metadata.

        `key` is sent to encoders as a bearer token. `in_need` calls encoders that are left out
        where no other is left: for an engine that has no encoder of its own.
        """
        self._encoders, self._client, self._model = encoders, client, model
        self._fields, self._key, self._in_need = fields, key, in_need
        self._flights: dict[tuple[str, str], _Flight] = {}
        self._turn = asyncio.Semaphore(MAX_CALLS)
        self._session: aiohttp.ClientSession | None = None
        self._metrics = metrics()

    async def close(self) -> None:
        for flight in self._flights.values():
            flight.task.cancel()
        if self._session is not None:
            await self._session.close()

    def is_call(self, scope: Scope) -> bool:
        """Whether the request comes from an engine's hop: it is encoded here."""
        return any(name == IS_HOP.encode() for name, _ in scope["headers"])

    async def complete(self, look: Look) -> None:
        """Have all pictures that the request lacks promised, or leave it as it was."""
        flights = [asyncio.ensure_future(self.promise(missing)) for missing in look.missing]
        try:
            promises = await asyncio.gather(*flights)
        except NotEncoded:
            return
        except Exception:
            logger.warning("ecd: the encode hop failed", exc_info=True)
            return
        finally:
            for flight in flights:
                flight.cancel()
        look.promised = list(zip(look.missing, promises, strict=True))

    async def promise(self, missing: Missing) -> Promise:
        """Have a picture encoded, once for all who ask for it meanwhile. Raises NotEncoded.

        The search ends when it has a result, after PICTURE_S, or when nobody waits for it.
        """
        key = missing.namespace, missing.name
        flight = self._flights.get(key)
        if flight is None:
            if len(self._flights) >= MAX_FLIGHTS:
                self._metrics.count("full")
                raise NotEncoded
            search = asyncio.wait_for(self._search(missing), PICTURE_S)
            flight = self._flights[key] = _Flight(asyncio.ensure_future(search))
            flight.task.add_done_callback(lambda _: self._forget(key, flight))
        else:
            self._metrics.count("joined")
        flight.waiting += 1
        try:
            promise = await asyncio.shield(flight.task)
        except asyncio.TimeoutError:
            self._metrics.count("late")
            raise NotEncoded from None
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                flight.task.cancel()
                self._forget(key, flight)  # a newcomer starts anew
        if promise is None:
            raise NotEncoded
        return promise

    def _forget(self, key: tuple[str, str], flight: _Flight | None) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    # -- one picture ---------------------------------------------------------------------------

    async def _search(self, missing: Missing) -> Promise | None:
        """Ask one encoder after the other, each at most once. None: none has stored it."""
        async with self._turn:
            body = await asyncio.to_thread(self._body, missing)
            tried: set[Encoder] = set()
            while True:
                began_s = time.monotonic()
                encoder = self._encoders.choose(
                    missing.tokens, tried, began_s, in_need=self._in_need
                )
                if encoder is None:
                    self._metrics.count("given_up")
                    return None
                tried.add(encoder)
                active = self._metrics.active.labels(encoder.url)
                active.inc(missing.tokens)
                outcome = "cancelled"
                try:
                    promise = self._promise_in(await self._call(encoder, body), missing.name)
                    self._encoders.note_served(encoder)
                    outcome = "encoded"
                    self._metrics.count("promised")
                    return promise
                except _Refused:
                    outcome = "refused"
                    self._encoders.note_served(encoder)
                    self._metrics.count("given_up")
                    return None
                except _Failed as error:
                    outcome = "failed"
                    if self._encoders.note_failed(encoder, began_s, time.monotonic()):
                        logger.warning(
                            "ecd: encoder %s is left out for %g s: %s",
                            *(encoder.url, encoder.rest_s, error),
                        )
                finally:
                    self._encoders.release(encoder, missing.tokens)
                    active.dec(missing.tokens)
                    self._metrics.calls.labels(encoder.url, outcome).inc()

    def _body(self, missing: Missing) -> bytes:
        picture = {"type": "image_url", "image_url": missing.part["image_url"]}
        request: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": [{**picture, "uuid": missing.name}]}],
            "max_tokens": 1,
        }
        with contextlib.suppress(DaemonUnavailable):
            if node := self._client.node:
                request["ec_transfer_params"] = {CONSUMERS: [node]}
        return json.dumps(request).encode()

    async def _call(self, encoder: Encoder, body: bytes) -> bytes:
        """The encoder's answer. Raises _Refused and _Failed."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=CALL_S, sock_connect=CONNECT_S),
            )
        headers = {"Content-Type": "application/json", IS_HOP: "1"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        answer = b""
        try:
            async with self._session.post(
                f"{encoder.url}/v1/chat/completions",
                data=body,
                headers=headers,
                allow_redirects=False,
            ) as reply:
                if reply.status in _REFUSALS:
                    raise _Refused
                if reply.status != 200:
                    raise _Failed(f"it answered with status {reply.status}")
                async for chunk in reply.content.iter_any():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise _Failed("its answer is too long")
        except asyncio.TimeoutError:
            raise _Failed("it did not answer in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Failed(f"{type(error).__name__}: {error}") from None
        return answer

    def _promise_in(self, answer: bytes, name: str) -> Promise:
        """What the answer says of the picture of this name. Raises _Failed."""
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            params = json.loads(answer)["ec_transfer_params"]
            fields = params[name]["metadata"]
            if fields.keys() == self._fields and all(map(_is_numbers, fields.values())):
                return Promise(fields, hints_in(params, [name]).get(name, []))
        raise _Failed("it has not stored the picture, or does not say its size")


def _is_numbers(value: Any, depth: int = 0) -> bool:
    """Whether a field is a number, or a short list of them or of such lists."""
    if isinstance(value, list):
        return depth < 2 and len(value) <= 16 and all(_is_numbers(v, depth + 1) for v in value)
    return type(value) in (int, float) and abs(value) < 1 << 31


class Metrics:
    """Counters and a gauge, which the API server's /metrics shows."""

    def __init__(self) -> None:
        self._pictures = Counter(
            "vllm:ecd_hop_pictures",
            "Pictures that ecd had not: promised by an encoder, joined (another request's call was "
            "waited for), given_up, late, or full (too many on their way).",
            ["outcome"],
        )
        self.calls = Counter(
            "vllm:ecd_encoder_calls",
            "Calls of encoders: encoded, refused, failed or cancelled.",
            ["encoder", "outcome"],
        )
        self.active = Gauge(
            "vllm:ecd_encoder_active_tokens",
            "Estimated tokens of the pictures that an encoder has been sent and not answered for.",
            ["encoder"],
            multiprocess_mode="livesum",
        )

    def count(self, outcome: str) -> None:
        self._pictures.labels(outcome).inc()


metrics = cache(Metrics)
"""The metrics of this process, which can be registered once."""
