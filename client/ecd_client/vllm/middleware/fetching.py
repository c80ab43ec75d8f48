"""Fetches the media of requests as vLLM's server would, within its limits, and decodes none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pybase64
from vllm import envs
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaWithBytes
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.base import MediaIO
from vllm.multimodal.media.image import ImageMediaIO

from ecd_client.vllm.base.compat import media_budgets, open_image
from ecd_client.vllm.middleware.media import IMAGE, VIDEO, Look, Medium, Raw

BYTES_OF_A_PIXEL = 4
"""Bytes that vLLM counts for a decoded picture's pixel (`ImageMediaIO.load_bytes`)."""
MAX_FETCHED_BYTES = 256 << 20
"""Most fetched bytes of one request that are held."""
MAX_HELD_BYTES = 1 << 30
"""Fetched bytes of all requests together, beyond which no more are fetched."""


class TooLarge(Exception):
    """The media of one request, or of all, have too many bytes to be held here."""


class MediaFetcher:
    """Fetches media, and counts what was fetched until it is released. Used from one event loop."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._held_bytes = 0

    async def fetch(self, look: Look) -> bool:
        """Fetch all media of a request, but those that a client has named.

        False: one of them cannot be had, which vLLM will say. What was fetched by then goes on with
        the request, and is not fetched again. But where vLLM counts what a request fetches, the
        request goes on as it came: vLLM counts from nothing.
        """
        load = self._loader()
        fetches = [asyncio.ensure_future(self._one(load, look, each)) for each in look.media]
        try:
            done, _ = await asyncio.wait(fetches, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for fetch in fetches:
                fetch.cancel()
        failures = [fetch.exception() for fetch in done]
        if len(done) == len(fetches) and not any(failures):
            return True
        if media_budgets():
            for medium in look.media:
                medium.forget()
            self.release(look)
        await asyncio.to_thread(look.settle)
        return False

    def release(self, look: Look) -> None:
        """Count the request's bytes no longer: it has come to its end."""
        self._held_bytes -= look.fetched_bytes
        look.fetched_bytes = 0

    async def _one(
        self, load: Callable[[Medium], Coroutine[Any, Any, Any]], look: Look, medium: Medium
    ) -> None:
        """Raises what vLLM does for a medium that it cannot load, and TooLarge."""
        if medium.is_chosen:
            return
        if not medium.is_inline and self._held_bytes >= MAX_HELD_BYTES:
            raise TooLarge
        content = await load(medium)
        if not medium.is_inline:
            nbytes = len(content.original_bytes)
            if look.fetched_bytes + nbytes > MAX_FETCHED_BYTES:
                raise TooLarge
            look.fetched_bytes += nbytes
            self._held_bytes += nbytes
        medium.content = content

    def _loader(self) -> Callable[[Medium], Coroutine[Any, Any, Any]]:
        """The loader of one request's media, within the limits that vLLM has for it."""
        budgets = media_budgets()
        media = MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR,
            media_io_kwargs=None,
            allowed_local_media_path=self._model_config.allowed_local_media_path,
            allowed_media_domains=self._model_config.allowed_media_domains,
            **budgets,
        )
        return partial(_load, media, _Unread(budgets.get("decoded_budget")))


async def _load(media: Any, pictures: _Unread, medium: Medium) -> Any:
    if medium.kind == IMAGE:
        form, timeout_s = pictures, envs.VLLM_IMAGE_FETCH_TIMEOUT
    elif medium.kind == VIDEO:
        form, timeout_s = _RawVideo(), envs.VLLM_VIDEO_FETCH_TIMEOUT
    else:
        form, timeout_s = _RawAudio(), envs.VLLM_AUDIO_FETCH_TIMEOUT
    return await media.load_from_url_async(medium.url, form, fetch_timeout=timeout_s)


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


class _RawVideo(MediaIO):
    """Takes the bytes that vLLM's `VideoMediaIO` would decode."""

    def get_max_bytes(self) -> int:
        return MAX_FETCHED_BYTES

    def load_bytes(self, data: bytes) -> Raw:
        return Raw(data)

    def load_base64(self, media_type: str, data: str) -> Raw:
        if media_type.lower() == "video/jpeg":  # frames, with commas between them
            return Raw(data.encode(), is_frames=True)
        return Raw(pybase64.b64decode(data, validate=True))

    def load_file(self, filepath: Path) -> Raw:
        if filepath.stat().st_size > MAX_FETCHED_BYTES:
            raise TooLarge
        return Raw(filepath.read_bytes())


class _RawAudio(AudioMediaIO):
    """Takes the bytes that vLLM would decode, within its limit of a sound's size."""

    def load_bytes(self, data: bytes) -> Raw:
        self._validate_encoded_size(len(data))
        return Raw(data)

    def load_file(self, filepath: Path) -> Raw:
        self._validate_encoded_size(filepath.stat().st_size)
        return Raw(filepath.read_bytes())
