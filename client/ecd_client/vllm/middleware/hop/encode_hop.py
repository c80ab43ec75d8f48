"""The encode hop: media that ecd has not are encoded by other engines, one call for each.

Each call is a chat completion with one medium under the name that it has here. The answer's
`ec_transfer_params` say that it is stored, and what an engine needs to do without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.vllm.base.hints import hints_in
from ecd_client.vllm.middleware.hop.calls import (
    ConnectionLost,
    EncoderAnswer,
    EncoderCalls,
    Failed,
    Late,
    MediumRefused,
)
from ecd_client.vllm.middleware.hop.encoders import Encoder, EncoderPool
from ecd_client.vllm.middleware.hop.metrics import metrics
from ecd_client.vllm.middleware.hop.places import Asker, Places
from ecd_client.vllm.middleware.hop.protocol import MAX_BODY_BYTES
from ecd_client.vllm.middleware.hop.sizes import MAX_SECONDS
from ecd_client.vllm.middleware.media import Look, MissingMedium, Promise, may_stand_together
from ecd_proto.contract import shown
from ecd_proto.placeholders import Placeholder

logger = logging.getLogger(f"vllm.{__name__}")

SHARE_TO_CONNECT = 1 / 4
"""Share of a picture's time in which an encoder has to be reached."""
CALM_S = 10.0
"""An encoder that served a medium within this time is busy, not dead, if it is late."""
TIMES_IF_BUSY = 5
"""How many times a picture's time an encoder may take that serves other media meanwhile."""
MAX_CALLS = 64
"""Media requested at one time; more wait, or are left to the engine."""
MAX_SENT_BYTES = 1 << 30
"""Their bytes, beyond which one goes alone."""
MAX_OF_REQUEST, MAX_OF_CALLER = 16, 48
"""Media at one time of one request, which come in turns, and of one caller."""
MAX_LOST = 3
"""Encoders that may end over one medium before the engine has it."""
SAID_EVERY_S = 60.0
"""Pause between two messages about media that encoders refuse, or store without outlines."""
_MALFORMED = AttributeError, KeyError, RecursionError, TypeError, ValueError


class NotEncoded(Exception):
    """No encoder has stored the medium."""


class _Flight:
    """The one search for an encoder that all requests for a medium wait for.

    `until_s` is when it ends.
    """

    def __init__(self, task: asyncio.Task[Promise | None], until_s: float) -> None:
        self.task, self.until_s, self.waiting = task, until_s, 0


class EncodeHop:
    """Has media encoded by other engines. Used from one event loop."""

    def __init__(
        self,
        encoders: EncoderPool,
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
        of its own: its media wait for a place, and encoders that are left out are called where
        no other is left. The pictures of a request have `within_s` seconds, with all encoders; it
        has longer if it lacks others (`MissingMedium.seconds`), from encoders that are alive, and,
        but in need, where an encoder is busy.
        """
        self._encoders, self._client, self._model = encoders, client, model
        self._checked, self._in_need = checked, in_need
        self._calls = EncoderCalls(key, within_s * SHARE_TO_CONNECT)
        self._within_s, self._sent_bytes = within_s, 0
        self._more_s = 0.0 if in_need else (TIMES_IF_BUSY - 1) * within_s
        self._quiet_until_s: dict[str, float] = {}
        self._flights: dict[tuple[str, str, str, bool], _Flight] = {}
        self._places = Places(MAX_CALLS, MAX_OF_CALLER)
        self._metrics = metrics()

    async def close(self) -> None:
        for flight in self._flights.values():
            flight.task.cancel()
        await self._calls.close()

    def may_send(self) -> bool:
        """Whether there is an encoder that would be asked now."""
        return self._encoders.are_any(clock.now_s(), in_need=self._in_need)

    def blame(self, look: Look) -> None:
        """Leave out the encoders whose promises made a request fail.

        None is left out where a client has named a medium: it can give one name to two media.
        """
        if look.names is None:
            return
        now_s = clock.now_s()
        for encoder in {promise.encoder for _, promise in look.promised}:
            self._note_failed(encoder, now_s, Failed("what it promised cannot be loaded"))

    def use(self, urls: Collection[str], kept_s: float) -> None:
        """Call these encoders from now on, and those listed in the last `kept_s` seconds."""
        for gone in self._encoders.use(urls, clock.now_s(), kept_s):
            self._metrics.forget(gone.url)

    async def complete(self, look: Look, caller: str) -> None:
        """Get promises for all media that the request lacks, or leave it as it was.

        All have the time of all: they may wait for each other at an encoder.
        """
        look.waits_until_s = until_s = self._until_s(*look.missing)
        asker, turns = Asker(caller), asyncio.Semaphore(MAX_OF_REQUEST)

        async def in_turn(missing: MissingMedium) -> Promise:
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
        if clock.now_s() > until_s:
            look.waits_until_s += self._more_s
        if may_stand_together(look.found, promises):
            media = [missing._replace(url="") for missing in look.missing]  # which are sent
            look.promised = list(zip(media, promises, strict=True))

    async def promise(
        self, missing: MissingMedium, asker: Asker | None = None, until_s: float | None = None
    ) -> Promise:
        """Have a medium encoded once for all requests that want it. Raises NotEncoded.

        The search ends with a result, with its time, or when no request waits for it.
        """
        if until_s is None:
            until_s = self._until_s(missing)
        asker, has_joined = asker or Asker(""), False
        while True:
            flight = await self._flight(missing, asker, until_s)
            if flight.waiting and not has_joined:
                has_joined = True
                self._metrics.count("joined")
            flight.waiting += 1
            left_s = until_s - clock.now_s() if until_s < flight.until_s else None
            try:
                await asyncio.wait((flight.task,), timeout=left_s)
            finally:
                flight.waiting -= 1
                if not flight.waiting:
                    flight.task.cancel()
                    self._forget(flight)  # a newcomer starts anew
            promise = flight.task.result() if flight.task.done() else None
            if promise is not None:
                return promise
            # Another request's search may have had less time than this one has.
            now_s = clock.now_s()
            if now_s < flight.until_s or until_s - now_s < self._within_s * SHARE_TO_CONNECT:
                raise NotEncoded

    async def _flight(self, missing: MissingMedium, asker: Asker, until_s: float) -> _Flight:
        """The search for an encoder of the medium, which may be another request's."""
        key = missing.namespace, missing.stored_name, missing.kind, missing.by_outline
        if key not in self._flights:
            await self._take_place(asker, until_s)
            if key in self._flights:  # another request was faster
                self._places.give(asker)
        flight = self._flights.get(key)
        if flight is not None:
            return flight
        search = asyncio.ensure_future(self._search(missing, until_s))
        search.add_done_callback(lambda _: self._places.give(asker))
        flight = self._flights[key] = _Flight(search, until_s)
        search.add_done_callback(lambda _: self._forget(flight))
        return flight

    def _until_s(self, *missing: MissingMedium) -> float:
        """When a request that lacks these has waited for as long as it may."""
        seconds = {(each.stored_name, each.kind): each.seconds for each in missing}
        return clock.now_s() + self._within_s + min(sum(seconds.values()), MAX_SECONDS)

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

    def _forget(self, flight: _Flight) -> None:
        self._flights = {key: each for key, each in self._flights.items() if each is not flight}

    # -- one medium ----------------------------------------------------------------------------

    async def _search(self, missing: MissingMedium, until_s: float) -> Promise | None:
        """Ask one encoder after the other, each at most once. None: none has stored it."""
        nbytes = len(missing.url)
        if self._sent_bytes and self._sent_bytes + nbytes > MAX_SENT_BYTES:
            self._metrics.count("full")
            return None
        self._sent_bytes += nbytes
        try:
            promise, outcome = await self._ask_all(missing, until_s)
        finally:
            self._sent_bytes -= nbytes
        self._metrics.count(outcome)
        return promise

    async def _ask_all(self, missing: MissingMedium, until_s: float) -> tuple[Promise | None, str]:
        """The promise of the first encoder that makes one, and how the search has ended."""
        body: bytes | None = None
        tried: set[Encoder] = set()
        lost = 0
        alive_by_s, latest_s = clock.now_s() + self._within_s, until_s + self._more_s
        while True:
            began_s = clock.now_s()
            has_time = began_s < until_s
            are_busy = self._encoders.serve(began_s - self._within_s)
            if not has_time and not (are_busy and began_s < latest_s):
                return None, "late"
            encoder = self._encoders.choose(
                missing.tokens,
                tried,
                began_s,
                decoding=missing.decoding,
                in_need=self._in_need,
            )
            if encoder is None:
                return None, "given_up"
            tried.add(encoder)
            is_long = has_time and until_s > alive_by_s and not encoder.is_hurried(began_s)
            active = self._metrics.active.labels(encoder.url)
            active.inc(missing.tokens)
            outcome = "cancelled"
            try:
                if body is None:
                    body = await asyncio.to_thread(self._body, missing)
                if len(body) > MAX_BODY_BYTES:  # of which nobody would compare the decoders
                    return None, "given_up"
                due_s = until_s if is_long else began_s + self._within_s
                due_s = min(due_s, until_s if has_time else latest_s)
                most_s = due_s if due_s < until_s else latest_s  # first another one is asked
                if is_long:
                    call = self._answer_if_alive(encoder, body, alive_by_s, most_s)
                else:
                    call = self._calls.complete(encoder, body, most_s - clock.now_s())
                answer = await self._while_it_serves(encoder, call, due_s, most_s)
                promise = self._promise_in(answer, missing, encoder)
                self._encoders.note_served(encoder, clock.now_s(), is_long=bool(missing.seconds))
                outcome = "encoded"
                return promise, "given_up" if promise is None else "promised"
            except MediumRefused as error:
                outcome = "refused"
                self._say(encoder, "refuses a medium", str(error))
                if error.is_by_all:
                    return None, "given_up"
                self._encoders.note_unlike(encoder, missing.decoding, clock.now_s())
            except Failed as error:
                outcome = "failed"
                is_late = isinstance(error, Late)
                if is_late and is_long:
                    self._encoders.note_late(encoder, clock.now_s())
                if not (is_late and encoder.has_served(began_s - CALM_S)):
                    self._note_failed(encoder, began_s, error)
                lost += isinstance(error, ConnectionLost)
                if lost >= MAX_LOST:
                    return None, "given_up"
            finally:
                self._encoders.release(encoder, missing.tokens)
                active.dec(missing.tokens)
                self._metrics.calls.labels(encoder.url, outcome).inc()
                if not self._encoders.has(encoder.url):  # it left during the call
                    self._metrics.forget(encoder.url)

    async def _while_it_serves(
        self,
        encoder: Encoder,
        call: Coroutine[Any, Any, EncoderAnswer],
        due_s: float,
        latest_s: float,
    ) -> EncoderAnswer:
        """An answer by `due_s`, or by `latest_s` while the encoder serves other media.

        Between two of them it has a picture's time. Raises Late, and what the call raises.
        """
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((answer,), timeout=due_s - clock.now_s()))[0]:
                due_s = min(encoder.served_s + self._within_s, latest_s)
                if due_s <= clock.now_s():
                    raise Late("it did not answer in time")
            return await answer
        finally:
            _end(answer)

    async def _answer_if_alive(
        self, encoder: Encoder, body: bytes, alive_by_s: float, until_s: float
    ) -> EncoderAnswer:
        """An answer that may take longer than a picture's, while the encoder says that it lives.

        It is asked after the time in which it has to be reached, until `alive_by_s`, and from then
        on again and again.
        """
        pause_s = self._within_s * SHARE_TO_CONNECT
        bound_s = max(alive_by_s - clock.now_s() - pause_s, pause_s)
        call = self._calls.complete(encoder, body, until_s - clock.now_s())
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((answer,), timeout=pause_s))[0]:
                alive = asyncio.ensure_future(self._calls.is_alive(encoder, bound_s))
                try:
                    await asyncio.wait((answer, alive), return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done() and not alive.result():
                        raise ConnectionLost("its server does not answer")
                finally:
                    alive.cancel()
                pause_s = bound_s = self._within_s
            return await answer
        finally:
            _end(answer)

    def _note_failed(self, encoder: Encoder, began_s: float, error: Failed) -> None:
        if self._encoders.note_failed(encoder, began_s, clock.now_s()):
            rest_s, said = encoder.rest_s, shown(str(error))
            logger.warning("ecd: encoder %s is left out for %g s: %s", encoder.url, rest_s, said)

    def _say(self, encoder: Encoder, what: str, why: str) -> None:
        now_s = clock.now_s()
        if now_s >= self._quiet_until_s.get(what, 0.0):
            self._quiet_until_s[what] = now_s + SAID_EVERY_S
            logger.warning("ecd: encoder %s %s: %s", encoder.url, what, shown(why))

    def _body(self, missing: MissingMedium) -> bytes:
        with contextlib.suppress(EcdError):
            return EncoderCalls.body_of(missing, self._model, self._client.node)
        return EncoderCalls.body_of(missing, self._model, None)

    def _promise_in(
        self, answer: EncoderAnswer, missing: MissingMedium, encoder: Encoder
    ) -> Promise | None:
        """The promise that an answer makes of the medium. Raises Failed.

        None: it is stored, but the engine can be told of it neither by metadata nor by an outline.
        """
        with contextlib.suppress(*_MALFORMED):
            params, name = json.loads(answer.body)["ec_transfer_params"], missing.name
            said, hints = params[name].get("metadata"), hints_in(params, [name]).get(name, [])
            if not missing.by_outline and (known := self._checked(missing.kind, said)):
                return Promise(known, hints, encoder)
            if missing.by_outline or not said:
                if answer.has_outline and missing.can_outline:
                    return Promise(None, hints, encoder)
                if hints or self._checked(missing.kind, said) or self._is_here(missing):
                    if missing.can_outline:
                        self._say(encoder, "stores no outlines", "has it ReuseMiddleware?")
                    return None
        raise Failed("it has not stored the medium, or does not say its size")

    def _is_here(self, missing: MissingMedium) -> bool:
        with contextlib.suppress(EcdError):
            return self._client.is_shown(missing.stored_name, namespace=missing.namespace)
        return False


def _end(answer: asyncio.Future[EncoderAnswer]) -> None:
    """Cancel what nobody waits for: it may fail all the same, as its time is over, too."""
    answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    answer.cancel()
