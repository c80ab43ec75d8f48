"""Middleware for vLLM's API server: a picture that ecd has is not decoded or preprocessed again.

    vllm serve MODEL --ec-transfer-config ... --middleware ecd_client.vllm.ReuseMiddleware

vLLM's own hasher names each picture of a chat completion. If ecd has all of them, an engine that
prefills gets the names and the placeholder metadata in place of the pictures. An engine that only
encodes does nothing: the answer is what it would say. All other requests pass as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import uuid4

import pybase64
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import envs
from vllm.logger import init_logger
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.item import Item
from ecd_client.placeholders import unpack
from ecd_client.vllm.compat import (
    CAN_LEAVE_OUT_MEDIA,
    PlaceholderMetadata,
    collect_ec_item_metadata,
    open_image,
)
from ecd_client.vllm.hints import add_hints, consumers_in, hints_in
from ecd_client.vllm.settings import Settings
from ecd_client.vllm.shared_namespace import SeenNamespace

logger = init_logger(f"vllm.{__name__}")

PATH = "/v1/chat/completions"
MAX_BODY_BYTES = 256 << 20
"""Largest body that is looked into."""
MAX_PICTURES = 64
"""Most pictures of a request that are looked for."""
REMOTE_WAIT_S = 0.05
"""How long a picture is waited for that is being written, or that another node may have."""
STAYS_S = 10.0
"""How long what an answer names is held, for its consumer to come."""
MAX_STAYING = 256
"""Entries held so: half of the pins that a session has."""
RESTS_S = (1.0, 60.0)
"""First and longest time for which nothing is rewritten after a rewritten request failed."""
_UNNAMED = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields of a request that change its pictures' names."""
_IMAGE, _EMBEDS = "image_url", "image_embeds"
_PLAIN = frozenset(("text", "input_text", "output_text", "refusal", "thinking", _IMAGE))
"""Types of parts that may stand beside pictures."""
_STREAM, _STREAMED_ERROR = b"text/event-stream", b'data: {"error"'


class Found(NamedTuple):
    """A picture in a request: the part, its name, what ecd has of it, and its metadata."""

    part: dict[str, Any]
    name: str
    item: Item
    fields: dict[str, Any]


@dataclass
class Look:
    """A request's body, fetched pictures in it, and all of its pictures if ecd has all."""

    body: bytes
    request: dict[str, Any] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)

    def rewritten(self) -> bytes:
        """The request with names and metadata in place of its pictures."""
        for picture in self.found:
            del picture.part[_IMAGE]
            said = {"type": _EMBEDS, _EMBEDS: picture.fields, "uuid": picture.name}
            picture.part.update(said)
        return _packed(self.request)

    def close(self) -> None:
        for picture in self.found:
            picture.item.close()
        self.found = []


class ReuseMiddleware:
    """ASGI middleware without settings: it takes the connector's, and does nothing without one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._reuse: Reuse | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            starting = asyncio.create_task(self._start(scope["app"].state))
            await self._app(scope, receive, send)
            await starting
            if self._reuse is not None:
                self._reuse.close()
            return
        reuse = self._reuse
        if reuse is None or not _is_chat(scope) or not reuse.lets_in(Headers(scope=scope)):
            await self._app(scope, receive, send)  # vLLM answers those that it does not let in
            return
        body, again = await _whole_body(receive)
        if body is None or _IMAGE.encode() not in body or reuse.is_resting:
            await self._app(scope, again, send)
            return
        look = await reuse.look(body)
        if look.found and reuse.only_encodes:
            await JSONResponse(reuse.answer(look))(scope, receive, send)
            return
        attempt = None
        if look.found:
            try:
                attempt = await self._try(scope, look.rewritten(), receive, send)
            finally:
                look.close()
            if not attempt.has_failed:
                reuse.note_served()
                return
        scope, receive = _with_body(scope, look.body, receive)
        if attempt is None:
            await self._app(scope, receive, send)
            return
        second = _Attempt(send, may_fail=False)
        await self._app(scope, receive, second.send)
        if not second.has_failed:
            reuse.note_failed()  # by the rewriting, as the request itself is right

    async def _start(self, state: Any) -> None:
        try:
            self._reuse = await asyncio.to_thread(Reuse, state)
            logger.info("ecd: pictures that are stored are not preprocessed")
        except Unsuitable as error:
            logger.warning("ecd: pictures are preprocessed as ever: %s", error)
        except Exception:
            logger.warning("ecd: pictures are preprocessed as ever", exc_info=True)

    async def _try(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> _Attempt:
        """Serve the request with another body, unless vLLM fails before it sends anything."""
        attempt = _Attempt(send, may_fail=True)
        try:
            await self._app(*_with_body(scope, body, receive), attempt.send)
        except Exception:
            if attempt.has_begun:
                raise
            attempt.has_failed = True
        return attempt


class _Attempt:
    """One way to serve a request. Where it `may_fail`, a failure is not sent.

    A stream says that it fails in its first chunk with content. What comes before, which is the
    answer's start and a chunk that names the role, is held until then.
    """

    def __init__(self, send: Send, may_fail: bool) -> None:
        self._send, self._may_fail = send, may_fail
        self._held: list[Message] = []
        self.has_failed = self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_failed = message["status"] == 500
            if _is_stream(message):
                self._held = [message]
                return
        elif self._held and not self.has_failed:
            self.has_failed = message.get("body", b"").startswith(_STREAMED_ERROR)
            if len(self._held) == 1 and not self.has_failed and message.get("more_body", False):
                self._held.append(message)
                return
        if not (self.has_failed and self._may_fail):
            self.has_begun = True
            held, self._held = self._held, []
            for each in (*held, message):
                await self._send(each)


class Unsuitable(Exception):
    """Why this server's pictures cannot be left out."""


class Reuse:
    """Finds the pictures of requests in ecd."""

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
        if why := _why_not(config, settings, state.args, self.only_encodes):
            raise Unsuitable(why)
        model_config = config.model_config
        multimodal = model_config.multimodal_config
        self._settings, self._model_config = settings, model_config
        try:
            self._namespace = SeenNamespace(config.instance_id)
        except FileNotFoundError:
            raise Unsuitable("its engine runs elsewhere, or as another user") from None
        adapters = [adapter.name for adapter in getattr(state.args, "lora_modules", None) or ()]
        self._models = [*(state.args.served_model_name or [state.args.model]), *adapters]
        self._metadata = PlaceholderMetadata(model_config)
        self._wanted = self._metadata.fields_for("image")
        if not self._wanted:
            raise Unsuitable("the model has no placeholder metadata for pictures")
        self._algorithm = multimodal.mm_hasher_algorithm
        self._limit = min(multimodal.get_limit_per_prompt("image") or MAX_PICTURES, MAX_PICTURES)
        self._media = MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR,
            media_io_kwargs=None,
            allowed_local_media_path=model_config.allowed_local_media_path,
            allowed_media_domains=model_config.allowed_media_domains,
        )
        self._client = Client(settings.address, name="vllm middleware", connect_timeout=0.0)
        self._lets_in = _key_check(state.args)
        self._rests_until_s = self._rest_s = 0.0
        self._staying: OrderedDict[tuple[str, str], tuple[Item, float]] = OrderedDict()

    def close(self) -> None:
        self._client.close()

    def lets_in(self, headers: Headers) -> bool:
        """Whether vLLM will serve a request with these headers."""
        return self._lets_in(headers) and "json" in headers.get("content-type", "")

    # -- failures ------------------------------------------------------------------------------

    @property
    def is_resting(self) -> bool:
        return time.monotonic() < self._rests_until_s

    def note_served(self) -> None:
        self._rest_s = 0.0

    def note_failed(self) -> None:
        """Rest for a while after a rewritten request failed, each time for longer."""
        first_s, longest_s = RESTS_S
        self._rest_s = min(max(first_s, 2 * self._rest_s), longest_s)
        self._rests_until_s = time.monotonic() + self._rest_s
        logger.warning("ecd: a request without its pictures failed, and was made with them")

    # -- finding -------------------------------------------------------------------------------

    async def look(self, body: bytes) -> Look:
        """Find all pictures of a request, or none of them; vLLM refuses what is mixed."""
        look = Look(body)
        try:
            await asyncio.to_thread(self._read, look)
            if look.parts:
                contents = await asyncio.gather(*map(self._content, look.parts))
                await asyncio.to_thread(self._find_all, look, contents)
        except Exception:  # vLLM says what is wrong with the request
            logger.debug("ecd: a request passes as it is", exc_info=True)
            look.close()
            return Look(body)
        return look

    def _read(self, look: Look) -> None:
        request = json.loads(look.body)
        if (
            any(request.get(field) for field in _UNNAMED)
            or request.get("model") not in (None, *self._models)
            or (self.only_encodes and request.get("stream"))
        ):
            return
        parts = _pictures(request)
        if len(parts) <= self._limit:
            look.request, look.parts = request, parts

    async def _content(self, part: dict[str, Any]) -> Any:
        """The picture as vLLM's hasher takes it. None: the client has named it.

        Raises what vLLM does for a picture that it cannot load.
        """
        url = _url(part)
        if part.get("uuid") or not isinstance(url, str):
            return None
        timeout_s = envs.VLLM_IMAGE_FETCH_TIMEOUT
        return await self._media.load_from_url_async(url, _Unread(), fetch_timeout=timeout_s)

    def _find_all(self, look: Look, contents: list[Any]) -> None:
        namespace = self._namespace.read()
        hints = hints_in(look.request.get("ec_transfer_params"))
        with contextlib.suppress(EcdError):
            for part, content in zip(look.parts, contents, strict=True):
                name = self._name(part, content)
                if namespace is None or not self._settings.shares(name):
                    break
                picture = self._find(namespace, part, name, hints.get(name, ()))
                if picture is None:
                    break
                look.found.append(picture)
        if len(look.found) < len(look.parts):
            look.close()
            put_in = [_put_in(*each) for each in zip(look.parts, contents, strict=True)]
            if any(put_in):
                look.body = _packed(look.request)

    def _name(self, part: dict[str, Any], content: Any) -> str:
        if content is None:
            uuid = part["uuid"]
            if not isinstance(uuid, str):
                raise TypeError("a uuid is no string")
            return uuid
        name: str = MultiModalHasher.hash_kwargs(
            self._algorithm, model_id=self._model_config.model, image=content
        )
        return name

    def _find(self, namespace: str, part: dict[str, Any], name: str, nodes: Any) -> Found | None:
        item, may_come = self._client.get_now(name, namespace=namespace)
        if item is None and (may_come or nodes):
            item = self._client.get(name, REMOTE_WAIT_S, namespace=namespace, nodes=nodes)
        if item is None:
            return None
        fields = unpack(item.metadata).get("image", {})
        if fields.keys() != self._wanted:
            item.close()
            return None
        return Found(part, name, item, fields)

    # -- answers of an engine that only encodes ------------------------------------------------

    def answer(self, look: Look) -> dict[str, Any]:
        """The answer to a request whose pictures are stored; they stay so for STAYS_S."""
        features = [
            SimpleNamespace(identifier=picture.name, modality="image", data=None, mm_position=None)
            for picture in look.found
        ]
        params: dict[str, Any] = collect_ec_item_metadata(features, self._metadata)
        for picture in look.found:
            params[picture.name]["metadata"] = picture.fields
        namespace = look.found[0].item.namespace
        with contextlib.suppress(EcdError):
            if self._settings.announces_node:
                hints = {name: self._client.hint(name, namespace=namespace) for name in params}
                add_hints(params, {name: hint for name, hint in hints.items() if hint})
            if consumers := consumers_in(look.request.get("ec_transfer_params")):
                self._client.offer(list(params), consumers, namespace=namespace)
        self._have_stay(look.found)
        return {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": look.request.get("model") or self._models[0],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            "ec_transfer_params": params,
        }

    def _have_stay(self, found: list[Found]) -> None:
        """Hold each entry once, until STAYS_S after the last answer that names it."""
        until_s = time.monotonic() + STAYS_S
        for picture in found:
            key = picture.item.namespace, picture.name
            before = self._staying.pop(key, None)
            if before is not None:
                before[0].close()
            self._staying[key] = picture.item, until_s
        while len(self._staying) > MAX_STAYING:
            self._staying.popitem(last=False)[1][0].close()
        asyncio.get_running_loop().call_later(STAYS_S, self._let_go)

    def _let_go(self) -> None:
        now_s = time.monotonic()
        while self._staying and next(iter(self._staying.values()))[1] <= now_s:
            self._staying.popitem(last=False)[1][0].close()


def _why_not(config: Any, settings: Settings, args: Any, only_encodes: bool) -> str | None:
    """Why the names of this server's pictures, or its engine, cannot be known. None: they can."""
    multimodal, lora = config.model_config.multimodal_config, config.lora_config
    if multimodal is None:
        return "the model takes text alone"
    if multimodal.mm_processor_kwargs or multimodal.media_io_kwargs:
        return "--mm-processor-kwargs and --media-io-kwargs change pictures' names"
    if lora is not None and lora.enable_tower_connector_lora:
        return "an adapter of the vision tower changes pictures' names"
    if not only_encodes and not multimodal.enable_mm_embeds:
        return "the server does not take embeddings: give --enable-mm-embeds"
    if not settings.trusts_uuids:
        return "ecd_uuids is refuse, so that nothing is shared"
    if envs.VLLM_MEDIA_CONNECTOR != "http":
        return "VLLM_MEDIA_CONNECTOR may load other pictures than it is asked for"
    several = (getattr(args, "api_server_count", None) or 1) > 1
    if several or config.parallel_config.data_parallel_size > 1:
        return "it works for one API server and one engine, not for several"
    return None


def _is_chat(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) == PATH


def _is_stream(start: Message) -> bool:
    headers = dict(start.get("headers", ()))
    return bool(headers.get(b"content-type", b"").startswith(_STREAM))


def _key_check(args: Any) -> Callable[[Headers], bool]:
    """What vLLM's own check of --api-key says: it comes after this middleware."""
    tokens = [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]
    if not tokens:
        return lambda _: True
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    check: Callable[[Headers], bool] = AuthenticationMiddleware(nothing, tokens).verify_token
    return check


def _pictures(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts with pictures. Empty where other media stand beside them."""
    found = []
    for message in request["messages"]:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind not in _PLAIN:
                return []
            if kind == _IMAGE:
                found.append(part)
    return found


def _url(part: dict[str, Any]) -> Any:
    said = part[_IMAGE]
    return said.get("url") if isinstance(said, dict) else said


def _put_in(part: dict[str, Any], content: Any) -> bool:
    """Put what was fetched in place of its URL, so that it is not fetched again."""
    if content is None or _url(part)[:5].lower() == "data:":
        return False
    encoded = pybase64.b64encode(content.original_bytes).decode()
    part[_IMAGE] = {"url": f"data:image/unknown;base64,{encoded}"}
    return True


def _packed(request: dict[str, Any]) -> bytes:
    return json.dumps(request).encode()


class _Unread(ImageMediaIO):
    """Loads a picture as vLLM's does, but for the pixels of one that needs no conversion."""

    def load_bytes(self, data: bytes) -> Any:
        image = open_image(BytesIO(data))
        most = envs.VLLM_MAX_IMAGE_PIXELS
        is_small = not most or image.width * image.height <= most
        if is_small and image.mode == self.image_mode:
            return MediaWithBytes(image, data)
        return super().load_bytes(data)


async def _whole_body(receive: Receive) -> tuple[bytes | None, Receive]:
    """The body, and a `receive` that gives it again. None: it is too large, or did not come."""
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


def _with_body(scope: Scope, body: bytes, receive: Receive) -> tuple[Scope, Receive]:
    """The request with this body; `receive` brings what comes after it."""
    scope = {**scope, "headers": list(scope["headers"])}
    MutableHeaders(scope=scope)["content-length"] = str(len(body))
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return scope, again
