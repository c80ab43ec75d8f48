"""Middleware for vLLM's API server: media that ecd has are not decoded or preprocessed again.

    vllm serve MODEL --ec-transfer-config ... --middleware ecd_client.vllm.ReuseMiddleware

Each picture, video and sound of a request with messages gets a name. If ecd has all of them, an
engine that prefills gets the names and the placeholder metadata in place of the media. An engine
that only encodes does nothing: the answer is what it would say. Videos and sounds that ecd lacks go
on with their names, so that they are stored under these. All other requests pass as they are. Where
a model has no placeholder metadata, outlines take their place.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import envs
from vllm.logger import init_logger

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.vllm.base.compat import CAN_LEAVE_OUT_MEDIA
from ecd_client.vllm.base.description import engine_id
from ecd_client.vllm.base.hints import DECODING
from ecd_client.vllm.base.identity.shared_namespace import SeenNamespace
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.base.settings import FAIL, Settings
from ecd_client.vllm.middleware.answers import Answers
from ecd_client.vllm.middleware.asgi import (
    CHAT,
    Attempt,
    Leaving,
    caller_of,
    door_of,
    whole_body,
    with_body,
    with_header,
)
from ecd_client.vllm.middleware.hop.environment import follows, hop_of
from ecd_client.vllm.middleware.hop.protocol import HAS_OUTLINE, UNLIKE, is_call
from ecd_client.vllm.middleware.hop.registered import (
    URL_VARIABLE,
    Registered,
    Registration,
    repeat,
    server_url,
)
from ecd_client.vllm.middleware.kinds import called, kinds_of
from ecd_client.vllm.middleware.media import Look
from ecd_client.vllm.middleware.naming import Names
from ecd_client.vllm.middleware.requests import Requests
from ecd_client.vllm.middleware.rests import Rests

logger = init_logger(f"vllm.{__name__}")

CONNECT_S = 2.0
"""How long the start waits for the daemon."""


class ReuseMiddleware:
    """ASGI middleware without settings: it takes the connector's, and does nothing without one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._reuse: Reuse | None = None
        self._starting: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._starting = asyncio.create_task(self._start(scope["app"].state))
            await self._app(scope, receive, send)
            await self._starting
            if self._reuse is not None:
                await self._reuse.close()
            return
        door = door_of(scope)
        if door is not None and self._starting is not None and not self._starting.done():
            body, receive = await whole_body(receive)
            if body is not None and DECODING.encode() in body:  # which this server has to compare
                await asyncio.wait((self._starting,))
        reuse = self._reuse
        if reuse is None or not reuse.serves(door) or not reuse.lets_in(Headers(scope=scope)):
            await self._app(scope, receive, send)  # vLLM answers those that it does not let in
            return
        body, again = await whole_body(receive)
        if body is None or not reuse.requests.may_have_media(body):
            await self._app(scope, again, send)
            return
        reuse.active += 1
        try:
            may_send = reuse.hop is not None and reuse.hop.may_send() and not is_call(scope, {})
            look = await reuse.requests.look(body, may_send=may_send)
            if look.is_foreign:
                error = {"message": "this encoder decodes otherwise: other versions, or settings"}
                await JSONResponse({"error": error}, UNLIKE)(scope, receive, send)
                return
            if is_call(scope, look.request) and (entries := reuse.requests.entries_of(look)):
                send = with_header(send, HAS_OUTLINE, partial(reuse.requests.are_shown, entries))
            try:
                await self._complete(reuse, look, scope, receive, send)
            finally:
                reuse.requests.release(look)
        finally:
            reuse.active -= 1

    async def _complete(
        self, reuse: Reuse, look: Look, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if reuse.rests.are_resting(look.names, clock.now_s()):
            await self._give_up(look)
        if reuse.hop is None or not look.missing:
            await self._serve(reuse, look, scope, receive, send)
            return
        leaving = Leaving(receive)
        try:
            if not is_call(scope, look.request):
                await leaving.interrupts(reuse.ask_encoders(look, caller_of(scope, reuse.has_keys)))
            look.missing = []
            await self._serve(reuse, look, scope, leaving.receive, send)
        finally:
            leaving.close()
            look.close()

    async def _serve(
        self, reuse: Reuse, look: Look, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if reuse.only_encodes and reuse.answers.knows(look):
            answer = reuse.answers.answer(look, caller_of(scope, reuse.has_keys))
            await JSONResponse(answer)(scope, receive, send)
            return
        if not look.is_whole or reuse.only_encodes:
            await self._give_up(look)
            with reuse.requests.keeping_outlines(look):
                await self._app(*with_body(scope, look.body, receive), send)
            return
        # Metadata may be such that vLLM takes them for the client's mistake.
        attempt = Attempt(send, fails_from=400, begun=lambda: reuse.requests.release(look))
        try:
            with reuse.requests.with_outlines(look):
                await self._try(attempt, scope, look.rewritten(), receive)
        finally:
            look.close()
        if not attempt.has_failed:
            reuse.rests.note_served(look.names)
            return

        def begun() -> None:
            if not second.has_failed:  # the request itself is right
                reuse.note_failed(look, is_refused=400 <= attempt.status < 500)

        await asyncio.to_thread(look.settle)
        second = Attempt(send, begun=begun)
        await self._app(*with_body(scope, look.body, receive), second.send)

    @staticmethod
    async def _give_up(look: Look) -> None:
        """Have the request bring its media."""
        if not look.is_settled and look.media:
            await asyncio.to_thread(look.settle)
        look.close()

    async def _start(self, state: Any) -> None:
        try:
            reuse = await asyncio.to_thread(Reuse, state)
            is_connected = await asyncio.to_thread(reuse.connect)
            self._reuse = reuse
            reuse.start()
            logger.info(
                "ecd: %s that are stored are not preprocessed%s",
                called(reuse.kinds),
                "" if is_connected else ", once the daemon answers",
            )
            for kind, why in reuse.left_out.items():
                logger.info("ecd: %s are preprocessed each time: %s", called([kind]), why)
        except Unsuitable as error:
            logger.warning("ecd: all media are preprocessed each time: %s", error)
        except Exception:
            logger.warning("ecd: all media are preprocessed each time", exc_info=True)

    async def _try(self, attempt: Attempt, scope: Scope, body: bytes, receive: Receive) -> None:
        """Serve the request with another body, unless vLLM fails before it sends anything."""
        try:
            await self._app(*with_body(scope, body, receive), attempt.send)
        except Exception:
            if attempt.has_begun:
                raise
            attempt.has_failed = True


class Unsuitable(Exception):
    """Why this server's media cannot be left out."""


class Reuse:
    """One server's requests and answers, and the media that a failure excludes for a while."""

    def __init__(self, state: Any) -> None:
        """Take the settings of a server by its application's state. Raises Unsuitable."""
        config: Any = getattr(state, "vllm_config", None)
        transfer = None if config is None else config.ec_transfer_config
        if transfer is None or transfer.ec_connector != "EcdConnector":
            raise Unsuitable("the engine has no --ec-transfer-config with EcdConnector")
        if not CAN_LEAVE_OUT_MEDIA:
            raise Unsuitable("this version of vLLM takes no metadata as JSON")
        self.only_encodes = transfer.is_ec_producer and not transfer.is_ec_consumer
        settings = Settings.of(config)
        if why := _why_not(config, settings, self.only_encodes):
            raise Unsuitable(why)
        parallel, is_one_of = config.parallel_config, _is_one_of_several(state.args)
        try:
            # A server that has a rank for itself has its share of the ranks of all.
            is_apart = parallel.local_engines_only
            engines = parallel.data_parallel_size_local if is_apart else parallel.data_parallel_size
            namespace = SeenNamespace(config.instance_id, engines, has_siblings=is_one_of)
        except FileNotFoundError as error:
            raise Unsuitable(f"it finds {error} here that run as its user") from None
        metadata, names = PlaceholderMetadata(config.model_config), Names(config.model_config)
        self.kinds, outlined, self.left_out = kinds_of(
            config.model_config, settings, metadata, names, only_encodes=self.only_encodes
        )
        if not self.kinds:
            said = "; ".join(f"{called([kind])}: {why}" for kind, why in self.left_out.items())
            raise Unsuitable(said or "the model takes no pictures, videos or sounds")
        adapters = [adapter.name for adapter in getattr(state.args, "lora_modules", None) or ()]
        models = [*(state.args.served_model_name or [state.args.model]), *adapters]
        client = Client(
            settings.address,
            name="vllm middleware",
            connect_timeout=0.0,
            call_timeout=settings.call_timeout_s,
        )
        self._client = client
        keys = _keys(state.args)
        key = keys[0] if keys else None
        in_need = settings.on_unavailable == FAIL
        self.hop = None
        sent: list[str] = []
        if not self.only_encodes:
            sent = [kind for kind in self.kinds if kind in outlined or metadata.can_promise(kind)]
            within_s = settings.load_timeout_s
            self.hop = hop_of(client, models[0], metadata, sent, key, in_need, within_s)
        engine = engine_id(namespace.instance_id)
        self.active = 0
        """Requests with media that are being served."""
        self._repeated: list[Callable[[], Awaitable[None]]] = []
        self._tasks: list[asyncio.Task[None]] = []
        if self.hop is not None and follows():
            self._repeated.append(Registered(client, engine, namespace.read, self.hop).ask)
        if transfer.is_ec_producer:
            self._register(engine, state.args)
        self.requests = Requests(
            client,
            settings,
            namespace,
            config.model_config,
            metadata,
            models,
            names,
            self.kinds,
            outlined,
            only_encodes=self.only_encodes,
            has_encoder=not in_need,
            sent=sent if self.hop is not None else (),
        )
        self.answers = Answers(client, models[0], announces_node=settings.announces_node)
        self._lets_in, self.has_keys = _key_check(keys), bool(keys)
        self.rests = Rests()

    def _register(self, engine: str, args: Any) -> None:
        """Register this server as an encoder, if others can reach it."""
        try:
            url = server_url(args, os.environ)
            if url is not None:
                registration = Registration(self._client, engine, url, lambda: self.active)
                self._repeated.append(registration.report)
                logger.info("ecd: this server registers as the encoder %s", url)
        except ValueError as error:  # InvalidArgument, too
            logger.error("ecd: this server is not registered: %s: %s", URL_VARIABLE, error)

    async def ask_encoders(self, look: Look, caller: str) -> None:
        """Have what the request lacks encoded elsewhere, or leave it as it was."""
        assert self.hop is not None
        try:
            await self.hop.complete(look, caller)
            if any(promise.placeholder is None for _, promise in look.promised):
                await self.requests.take_promised(look)
        except Exception:
            logger.warning("ecd: what encoders have stored is not found", exc_info=True)

    def start(self) -> None:
        """Begin to follow encoders that register themselves, and to report as one of them."""
        self._tasks = [asyncio.create_task(repeat(act)) for act in self._repeated]

    def connect(self) -> bool:
        """Wait for the daemon, so that the first requests find media; False: it is away."""
        try:
            self._client.wait_connected(CONNECT_S)
        except EcdError:
            return False
        return True

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.hop is not None:
            await self.hop.close()
        self._client.close()

    def serves(self, door: str | None) -> bool:
        """Whether requests at this path are looked at: an answer of an encoder is a chat's."""
        return door == CHAT or (door is not None and not self.only_encodes)

    def lets_in(self, headers: Headers) -> bool:
        """Whether vLLM will serve a request with these headers."""
        return self._lets_in(headers) and "json" in headers.get("content-type", "")

    def note_failed(self, look: Look, *, is_refused: bool) -> None:
        """Hold it against a request's media that it failed without them, and is right with them.

        Where the engine did not refuse the request, but failed with what encoders had promised,
        these rest instead.
        """
        if self.hop is not None and look.promised and not is_refused:
            self.hop.blame(look)
        else:
            self.rests.note_failed(look.names, clock.now_s())
        logger.warning("ecd: a request without its media failed, and was made with them")


def _why_not(config: Any, settings: Settings, only_encodes: bool) -> str | None:
    """Why the names of this server's media, or its engine, cannot be known. None: they can."""
    multimodal, lora = config.model_config.multimodal_config, config.lora_config
    if multimodal is None:
        return "the model takes text alone"
    if lora is not None and lora.enable_tower_connector_lora:
        return "an adapter of the vision tower changes the names of media"
    if not only_encodes and not multimodal.enable_mm_embeds:
        return "the server does not take embeddings: give --enable-mm-embeds"
    if not settings.trusts_uuids:
        return "ecd_uuids is refuse, so that nothing is shared"
    if envs.VLLM_MEDIA_CONNECTOR != "http":
        return "VLLM_MEDIA_CONNECTOR may load other media than it is asked for"
    if getattr(config.parallel_config, "enable_elastic_ep", False):
        return "the number of its engines changes (--enable-elastic-ep)"
    return None


def _is_one_of_several(args: Any) -> bool:
    """Whether other API servers of the same engines run beside this one."""
    return (getattr(args, "api_server_count", None) or 1) > 1


def _keys(args: Any) -> list[str]:
    """The keys of --api-key or VLLM_API_KEY."""
    return [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]


def _key_check(tokens: list[str]) -> Callable[[Headers], bool]:
    """vLLM's own check of --api-key, which runs after this middleware."""
    if not tokens:
        return lambda _: True
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    check: Callable[[Headers], bool] = AuthenticationMiddleware(nothing, tokens).verify_token
    return check
