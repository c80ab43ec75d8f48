"""The encode hop: pictures that ecd has not are encoded by other engines, one call a picture.

Each call is a chat completion with one picture under the name that it has here. The answer's
`ec_transfer_params` say that the picture is stored, and what an engine needs to do without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Collection
from functools import cache
from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client import Counter, Gauge

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.vllm.base.hints import CONSUMERS, hints_in
from ecd_client.vllm.middleware.hop.encoders import Encoder, Encoders
from ecd_client.vllm.middleware.hop.places import Asker, Places
from ecd_client.vllm.middleware.media import Look, Missing, Promise
from ecd_proto.contract import shown
from ecd_proto.placeholders import Placeholder, may_be_together

if TYPE_CHECKING:
    from starlette.types import Scope


logger = logging.getLogger(f"vllm.{__name__}")

SHARE_TO_CONNECT = 1 / 4
"""Share of a picture's time in which an encoder has to be reached."""
CALM_S = 10.0
"""An encoder that served a picture within this time is busy, not dead, if it is late."""
MAX_CALLS = 64
"""Pictures requested at one time; more wait, or are left to the engine."""
MAX_OF_REQUEST, MAX_OF_CALLER = 16, 48
"""Pictures at one time of one request, which come in turns, and of one caller."""
SAID_EVERY_S = 60.0
"""Pause between two messages about pictures that encoders refuse."""
MAX_ANSWER_BYTES = 64 << 10
IS_HOP = "x-ecd-hop"
"""Header of a call: an engine that gets it does not ask another one."""
IS_HOP_PARAM = "ecd_hop"
"""The same in the body, as gateways drop headers."""
OUTCOMES = "encoded", "refused", "failed", "cancelled"
"""How a call ends, in the metrics."""
_IDLE_S = 2.0
"""How long a connection is kept without a call: vLLM closes it after 5 s."""
_REFUSALS = (400, 413, 422)
"""Statuses that blame the picture: other encoders would refuse it, too."""


class NotEncoded(Exception):
    """No encoder has stored the picture."""


class _Failed(Exception):
    """Why a call has failed, through the encoder's fault."""


class _Late(_Failed):
    """An encoder has not answered in time."""


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
        checked: Callable[[str, Any], Placeholder | None],
        *,
        key: str | None,
        in_need: bool,
        within_s: float,
    ) -> None:
        """`model` is the served one's name, `checked` says what metadata of a modality may be.

        `key` is sent to encoders as a bearer token. `in_need` is for an engine that has no encoder
        of its own: its pictures wait for a place, and encoders that are left out are called where
        no other is left. The pictures of a request have `within_s` seconds, with all encoders.
        """
        self._encoders, self._client, self._model = encoders, client, model
        self._checked, self._key, self._in_need = checked, key, in_need
        self._within_s, self._quiet_until_s = within_s, 0.0
        self._flights: dict[tuple[str, str], _Flight] = {}
        self._places = Places(MAX_CALLS, MAX_OF_CALLER)
        self._session: aiohttp.ClientSession | None = None
        self._metrics = metrics()

    async def close(self) -> None:
        for flight in self._flights.values():
            flight.task.cancel()
        if self._session is not None:
            await self._session.close()

    def is_call(self, scope: Scope, request: dict[str, Any]) -> bool:
        """Whether the request comes from an engine's hop: it is encoded here."""
        params = request.get("ec_transfer_params")
        return any(name == IS_HOP.encode() for name, _ in scope["headers"]) or (
            isinstance(params, dict) and IS_HOP_PARAM in params
        )

    def blame(self, look: Look) -> None:
        """Leave out the encoders whose promises made a request fail.

        None is left out where a client has named a picture: it can give one name to two pictures.
        """
        if look.names is None:
            return
        now_s = clock.now_s()
        for encoder in {promise.encoder for _, promise in look.promised}:
            self._note_failed(encoder, now_s, _Failed("what it promised cannot be loaded"))

    def use(self, urls: Collection[str], kept_s: float) -> None:
        """Call these encoders from now on, and those listed in the last `kept_s` seconds."""
        for gone in self._encoders.use(urls, clock.now_s(), kept_s):
            self._metrics.forget(gone.url)

    async def complete(self, look: Look, caller: str) -> None:
        """Get promises for all pictures that the request lacks, or leave it as it was."""
        until_s = clock.now_s() + self._within_s
        asker, turns = Asker(caller), asyncio.Semaphore(MAX_OF_REQUEST)

        async def in_turn(missing: Missing) -> Promise:
            async with turns:
                return await self.promise(missing, asker, until_s)

        flights = [asyncio.ensure_future(in_turn(missing)) for missing in look.missing]
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
        placeholders = [promise.placeholder for promise in promises]
        found = (each.said for each in look.found if isinstance(each.said, Placeholder))
        if may_be_together([*found, *placeholders]):
            look.promised = list(zip(look.missing, promises, strict=True))

    async def promise(
        self, missing: Missing, asker: Asker | None = None, until_s: float | None = None
    ) -> Promise:
        """Have a picture encoded once for all requests that want it. Raises NotEncoded.

        The search ends with a result, with its time, or when no request waits for it.
        """
        if until_s is None:
            until_s = clock.now_s() + self._within_s
        asker = asker or Asker("")
        key = missing.namespace, missing.stored_name
        if key not in self._flights:
            await self._take_place(asker, until_s)
            if key in self._flights:  # another request was faster
                self._places.give(asker)
        flight = self._flights.get(key)
        if flight is None:
            search = asyncio.ensure_future(self._search(missing, until_s))
            search.add_done_callback(lambda _: self._places.give(asker))
            flight = self._flights[key] = _Flight(search)
            flight.task.add_done_callback(lambda _: self._forget(key, flight))
        else:
            self._metrics.count("joined")
        flight.waiting += 1
        try:
            promise = await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                flight.task.cancel()
                self._forget(key, flight)  # a newcomer starts anew
        if promise is None:
            raise NotEncoded
        return promise

    async def _take_place(self, asker: Asker, until_s: float) -> None:
        """Take a place; only an engine without an encoder waits for one. Raises NotEncoded."""
        if self._places.take(asker):
            return
        if self._in_need:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._places.wait(asker), until_s - clock.now_s())
                return
        self._metrics.count("full")
        raise NotEncoded

    def _forget(self, key: tuple[str, str], flight: _Flight | None) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    # -- one picture ---------------------------------------------------------------------------

    async def _search(self, missing: Missing, until_s: float) -> Promise | None:
        """Ask one encoder after the other, each at most once. None: none has stored it."""
        body: bytes | None = None
        tried: set[Encoder] = set()
        while True:
            began_s = clock.now_s()
            if began_s >= until_s:
                self._metrics.count("late")
                return None
            encoder = self._encoders.choose(missing.tokens, tried, began_s, in_need=self._in_need)
            if encoder is None:
                self._metrics.count("given_up")
                return None
            tried.add(encoder)
            active = self._metrics.active.labels(encoder.url)
            active.inc(missing.tokens)
            outcome = "cancelled"
            try:
                if body is None:
                    body = await asyncio.to_thread(self._body, missing)
                answer = await self._call(encoder, body, until_s)
                promise = self._promise_in(answer, missing.name, encoder)
                self._encoders.note_served(encoder, clock.now_s())
                outcome = "encoded"
                self._metrics.count("promised")
                return promise
            except _Refused as error:
                outcome = "refused"
                self._note_refused(encoder, error)
                self._metrics.count("given_up")
                return None
            except _Failed as error:
                outcome = "failed"
                if not (isinstance(error, _Late) and encoder.has_served(began_s - CALM_S)):
                    self._note_failed(encoder, began_s, error)
            finally:
                self._encoders.release(encoder, missing.tokens)
                active.dec(missing.tokens)
                self._metrics.calls.labels(encoder.url, outcome).inc()
                if not self._encoders.has(encoder.url):  # it left during the call
                    self._metrics.forget(encoder.url)

    def _note_failed(self, encoder: Encoder, began_s: float, error: _Failed) -> None:
        if self._encoders.note_failed(encoder, began_s, clock.now_s()):
            rest_s, said = encoder.rest_s, shown(str(error))
            logger.warning("ecd: encoder %s is left out for %g s: %s", encoder.url, rest_s, said)

    def _note_refused(self, encoder: Encoder, error: _Refused) -> None:
        now_s = clock.now_s()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + SAID_EVERY_S
            said = shown(str(error))
            logger.warning("ecd: encoder %s refuses a picture: %s", encoder.url, said)

    def _body(self, missing: Missing) -> bytes:
        picture = {"type": "image_url", "image_url": {"url": missing.url}}
        request: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": [{**picture, "uuid": missing.name}]}],
            "max_tokens": 1,
        }
        params: dict[str, Any] = {IS_HOP_PARAM: True}
        with contextlib.suppress(EcdError):
            if node := self._client.node:
                params[CONSUMERS] = [node]
        request["ec_transfer_params"] = params
        if missing.salt:
            request["cache_salt"] = missing.salt
        return json.dumps(request).encode()

    async def _call(self, encoder: Encoder, body: bytes, until_s: float) -> bytes:
        """The encoder's answer. Raises _Refused and _Failed."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # a bound counts what comes, not what it becomes
            )
        # `connect` has the time to resolve the name in it, which `sock_connect` has not.
        timeout = aiohttp.ClientTimeout(
            total=max(0.001, until_s - clock.now_s()),
            connect=self._within_s * SHARE_TO_CONNECT,
        )
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            IS_HOP: "1",
        }
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        answer = b""
        try:
            async with self._session.post(
                f"{encoder.url}/v1/chat/completions",
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as reply:
                if reply.status in _REFUSALS:
                    said = await reply.content.read(200)
                    raise _Refused(f"{reply.status} {said.decode(errors='replace')}")
                if reply.status != 200:
                    raise _Failed(f"it answered with status {reply.status}")
                if reply.headers.get("Content-Encoding", "identity") != "identity":
                    raise _Failed("its answer is compressed, which it was not asked for")
                async for chunk in reply.content.iter_any():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise _Failed("its answer is too long")
        except aiohttp.ConnectionTimeoutError:
            raise _Failed("it cannot be reached in time") from None
        except asyncio.TimeoutError:
            raise _Late("it did not answer in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Failed(f"{type(error).__name__}: {error}") from None
        return answer

    def _promise_in(self, answer: bytes, name: str, encoder: Encoder) -> Promise:
        """The promise that an answer makes of the picture of this name. Raises _Failed."""
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            params = json.loads(answer)["ec_transfer_params"]
            placeholder = self._checked("image", params[name]["metadata"])
            if placeholder is not None:
                return Promise(placeholder, hints_in(params, [name]).get(name, []), encoder)
        raise _Failed("it has not stored the picture, or does not say its size")


class Metrics:
    """Counters and a gauge, which the API server's /metrics shows."""

    def __init__(self) -> None:
        self._pictures = Counter(
            "vllm:ecd_hop_pictures",
            "Pictures that ecd had not: promised by an encoder, joined (another request's call was "
            "waited for), given_up, late, or full (no place in time).",
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

    def forget(self, encoder: str) -> None:
        """Remove an encoder's series: those that come and go would add up."""
        with contextlib.suppress(KeyError):
            self.active.remove(encoder)
        for outcome in OUTCOMES:
            with contextlib.suppress(KeyError):
                self.calls.remove(encoder, outcome)

    def count(self, outcome: str) -> None:
        self._pictures.labels(outcome).inc()


metrics = cache(Metrics)
"""The metrics of this process, which can be registered once."""
