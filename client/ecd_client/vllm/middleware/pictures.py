"""Pictures of a chat completion, named by vLLM's own hasher, and their entries in ecd."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import pybase64
from vllm import envs
from vllm.logger import init_logger
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

from ecd_client import clock
from ecd_client.client import Client
from ecd_client.errors import EcdError
from ecd_client.vllm.base.compat import media_budgets, open_image
from ecd_client.vllm.base.hints import hints_in
from ecd_client.vllm.base.identity.identity import PRIVATE
from ecd_client.vllm.base.identity.shared_namespace import SeenNamespace
from ecd_client.vllm.base.metadata import PlaceholderMetadata
from ecd_client.vllm.base.names import stored_name
from ecd_client.vllm.base.settings import Settings
from ecd_client.vllm.middleware.encoders import UNKNOWN_TOKENS, tokens_of
from ecd_client.vllm.middleware.images import IMAGE, Found, Look, Missing, packed
from ecd_proto.placeholders import Placeholder

if TYPE_CHECKING:
    pass

logger = init_logger(f"vllm.{__name__}")

MAX_PICTURES = 64
"""Most pictures that are looked up for one request."""
REMOTE_WAIT_S = 0.05
"""How long a request waits for pictures that are being written, or that other nodes may have."""
_UNNAMED = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields of a request that change its pictures' names."""
BYTES_OF_A_PIXEL = 4
"""Bytes that vLLM counts for a decoded picture's pixel (`ImageMediaIO.load_bytes`)."""
_PLAIN = frozenset(("text", "input_text", "output_text", "refusal", "thinking", IMAGE))
"""Types of parts that may stand beside pictures."""


class Pictures:
    """Finds the pictures of requests in ecd."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        namespace: SeenNamespace,
        model_config: Any,
        metadata: PlaceholderMetadata,
        models: list[str],
        *,
        may_stream: bool,
        has_hop: bool,
    ) -> None:
        """`models` are the names that requests may give, `namespace` is the engine's.

        With `has_hop` a look has what ecd has of a request, and what is missing.
        """
        self._client, self._settings, self._namespace = client, settings, namespace
        self._model_config, self._models, self._may_stream = model_config, models, may_stream
        self._has_hop = has_hop
        multimodal = model_config.multimodal_config
        self._algorithm = multimodal.mm_hasher_algorithm
        self._limit = min(multimodal.get_limit_per_prompt("image") or MAX_PICTURES, MAX_PICTURES)
        self._metadata = metadata

    async def look(self, body: bytes) -> Look:
        """Find all pictures of a request, or none of them; vLLM refuses what is mixed.

        None is found where one is missing that no hop can have encoded.
        """
        look = Look(body)
        try:
            await asyncio.to_thread(self._read, look)
            if look.parts:
                contents = await self._contents(look)
                if len(contents) == len(look.parts):
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
            or (request.get("stream") and not self._may_stream)
            or not isinstance(request.get("cache_salt") or "", str)
        ):
            return
        parts = _pictures(request)
        if len(parts) <= self._limit:
            look.request, look.parts = request, parts

    async def _contents(self, look: Look) -> list[Any]:
        """The contents of all parts; none if one of them cannot be had, which vLLM will say.

        What was fetched by then goes on with the request, and is not fetched again. But where vLLM
        counts what a request fetches, the request goes on as it came: vLLM counts from nothing.
        """
        content = self._fetcher()
        fetches = [asyncio.ensure_future(content(part)) for part in look.parts]
        try:
            done, _ = await asyncio.wait(fetches, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for fetch in fetches:
                fetch.cancel()
        had = [fetch in done and fetch.exception() is None for fetch in fetches]
        contents = [
            fetch.result() if is_had else None for fetch, is_had in zip(fetches, had, strict=True)
        ]
        if all(had):
            return contents
        if not media_budgets():
            await asyncio.to_thread(self._put_in, look, contents)
        return []

    def _fetcher(self) -> Callable[[dict[str, Any]], Coroutine[Any, Any, Any]]:
        """The loader of one request's pictures, within the limits that vLLM has for it."""
        budgets = media_budgets()
        media = MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR,
            media_io_kwargs=None,
            allowed_local_media_path=self._model_config.allowed_local_media_path,
            allowed_media_domains=self._model_config.allowed_media_domains,
            **budgets,
        )
        return partial(_content, media, _Unread(budgets.get("decoded_budget")))

    @staticmethod
    def _put_in(look: Look, contents: list[Any]) -> None:
        put_in = [_put_in(*each) for each in zip(look.parts, contents, strict=True)]
        if any(put_in):
            look.body = packed(look.request)

    def _find_all(self, look: Look, contents: list[Any]) -> None:
        namespace = self._namespace.read()
        hints = hints_in(look.request.get("ec_transfer_params"))
        # No encoder stores in a namespace that this engine alone has.
        is_alone = (namespace or "").rpartition("|")[2].startswith(PRIVATE)
        has_hop = self._has_hop and not is_alone
        until_s = clock.now_s() + REMOTE_WAIT_S
        names = []
        with contextlib.suppress(EcdError):
            for part, content in zip(look.parts, contents, strict=True):
                name = self._name(part, content)
                stored = stored_name(name, look.salt)
                names.append(stored)
                if namespace is None or not self._settings.shares(stored):
                    break
                nodes = hints.get(name, ())
                picture = self._find(namespace, part, name, stored, nodes, until_s)
                if picture is not None:
                    look.found.append(picture)
                elif has_hop and (url := _data_url(part, content)):
                    tokens = _tokens(content)
                    look.missing.append(Missing(part, url, name, namespace, tokens, look.salt))
                else:
                    break
        if len(look.found) + len(look.missing) < len(look.parts):
            look.close()
        elif all(content is not None for content in contents):
            look.pictures = frozenset(names)
        if not look.is_whole:
            self._put_in(look, contents)

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

    def _find(
        self,
        namespace: str,
        part: dict[str, Any],
        name: str,
        stored: str,
        nodes: Any,
        until_s: float,
    ) -> Found | None:
        """The picture that is `stored` under this name, if it is here or comes until then."""
        item, may_come = self._client.get_now(stored, namespace=namespace, is_use=False)
        left_s = until_s - clock.now_s()
        if item is None and (may_come or nodes) and left_s > 0:
            item = self._client.get(stored, left_s, namespace=namespace, nodes=nodes, is_use=False)
        if item is None:
            return None
        said = Placeholder.unpack(item.metadata)
        if said is not None and said.modality == "image" and item.shape:
            placeholder = self._metadata.checked("image", said.fields, item.shape[0])
            if placeholder is not None:
                return Found(part, name, item, placeholder)
        item.close()
        return None


def _pictures(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts with pictures. Empty where other media stand beside them."""
    found = []
    for message in request["messages"]:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind not in _PLAIN:
                return []
            if kind == IMAGE:
                if not isinstance(part[IMAGE], dict):  # vLLM refuses what is not
                    return []
                found.append(part)
    return found


async def _content(media: Any, unread: _Unread, part: dict[str, Any]) -> Any:
    """The picture as vLLM's hasher takes it. None: the client has named it.

    Raises what vLLM does for a picture that it cannot load.
    """
    url = _url(part)
    if part.get("uuid") or not isinstance(url, str):
        return None
    timeout_s = envs.VLLM_IMAGE_FETCH_TIMEOUT
    return await media.load_from_url_async(url, unread, fetch_timeout=timeout_s)


def _url(part: dict[str, Any]) -> Any:
    return part[IMAGE].get("url")


def _data_url(part: dict[str, Any], content: Any) -> str | None:
    """The picture's bytes as a URL. None: they are where this server need not fetch them from."""
    url = _url(part)
    if isinstance(url, str) and url[:5].lower() == "data:":
        return url
    if content is None:
        return None
    encoded = pybase64.b64encode(content.original_bytes).decode()
    return f"data:image/unknown;base64,{encoded}"


def _tokens(content: Any) -> int:
    return UNKNOWN_TOKENS if content is None else tokens_of(*content.media.size)


def _put_in(part: dict[str, Any], content: Any) -> bool:
    """Replace a URL by its fetched content, so that it is not fetched again."""
    url = None if content is None else _data_url(part, content)
    if url is None or url == _url(part):
        return False
    part[IMAGE] = {"url": url}
    return True


class _Unread(ImageMediaIO):
    """Loads a picture as vLLM's does, but for the pixels of one that needs no conversion."""

    def __init__(self, budget: Any = None) -> None:
        super().__init__()
        self.decoded_budget = budget  # vLLM's own attribute since 0.33

    def load_bytes(self, data: bytes) -> Any:
        image = open_image(BytesIO(data))
        pixels, most = image.width * image.height, envs.VLLM_MAX_IMAGE_PIXELS
        # Since 0.33 vLLM lays what is transparent on a background, in pictures without alpha, too.
        is_opaque = "transparency" not in image.info
        if image.mode == self.image_mode and is_opaque and (not most or pixels <= most):
            if self.decoded_budget is not None:
                self.decoded_budget.charge(pixels * BYTES_OF_A_PIXEL)
            return MediaWithBytes(image, data)
        return super().load_bytes(data)
