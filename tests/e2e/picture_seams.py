"""Drives parts of the middleware: names of pictures, limits, what is held. In a vLLM environment.

    python picture_seams.py DIRECTORY

A tiny model without weights is made in the directory. Prints JSON.
"""

import asyncio
import json
import os
import sys
from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import MediaConnector

from e2e.tiny_models import MODELS
from ecd_client.vllm.base.compat import media_budgets
from ecd_client.vllm.middleware import answers
from ecd_client.vllm.middleware.answers import Answers
from ecd_client.vllm.middleware.fetching import MediaFetcher
from ecd_client.vllm.middleware.media import Look, Medium
from support.web import site

SIDE = 500
PIXELS = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def saved(mode: str, form: str = "png", side: int = 56, **how: Any) -> bytes:
    file = BytesIO()
    Image.fromarray(PIXELS[:side, :side]).convert(mode).save(file, form, **how)
    return file.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # its orientation
    return exif


SHOWN = {
    "RGB": saved("RGB"),
    "RGB, a transparent colour": saved("RGB", transparency=tuple(map(int, PIXELS[0, 0]))),
    "RGB, turned": saved("RGB", "jpeg", exif=turned()),
    "RGBA": saved("RGBA"),
    "RGB, as WebP": saved("RGB", "webp"),
    "grey": saved("L"),
    "grey, a transparent level": saved("L", transparency=int(PIXELS[0, 0, 0])),
    "a palette": saved("P"),
    "a palette, a transparent colour": saved("P", transparency=0),
    "a GIF, a transparent colour": saved("P", "gif", transparency=0),
}


def url_of(content: bytes) -> str:
    return f"data:image/png;base64,{b64encode(content).decode()}"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def name(content: Any) -> str:
    return MultiModalHasher.hash_kwargs("blake3", model_id="a model", image=content)


def is_unread(picture: Image.Image) -> bool:
    return picture._im is None


registry._run_in_subprocess = lambda inspect: inspect()  # which imports vLLM anew
loop = asyncio.new_event_loop()
model = Path(sys.argv[1], "model")
model.mkdir()
MODELS["qwen2_5_vl"](model)
config = EngineArgs(model=str(model)).create_engine_config().model_config
fetcher = MediaFetcher(config)


def looked(*urls: str) -> tuple[list[Any], bool]:
    """The contents that are fetched of these pictures, and whether the request is as it came."""
    parts = [part(url) for url in urls]
    media = [Medium(each, "image_url") for each in parts]
    look = Look(b"as it came", {"messages": [{"content": parts}]}, media)
    is_whole = loop.run_until_complete(fetcher.fetch(look))
    contents = [medium.content for medium in media] if is_whole else []
    return contents, look.body == b"as it came"


def vllm_takes(*urls: str) -> bool:
    """Whether vLLM's server takes a request with these pictures."""
    media = MediaConnector(**media_budgets())
    try:
        for url in urls:
            media.fetch_image(url)
    except Exception as error:
        return "MEDIA_REQUEST" not in str(error)  # any other error is the test's own
    return True


def taken(pictures: Callable[[int], list[str]], limit: str, value: int) -> dict[str, Any]:
    """Who takes one picture and two of them, where vLLM has this limit for a request."""
    os.environ[limit] = str(value)
    said = {}
    for count in (1, 2):
        contents, as_it_came = looked(*pictures(count))
        said[str(count)] = [vllm_takes(*pictures(count)), len(contents) == count, as_it_came]
    return said


named, unread = {}, []
for kind, content in SHOWN.items():
    [ours], _ = looked(url_of(content))
    theirs = MediaConnector().fetch_image(url_of(content))
    named[kind] = name(ours) == name(theirs)
    if is_unread(ours.media):
        unread.append(kind)

limits = {}
for mode in ("RGB", "RGBA"):
    one = url_of(saved(mode))
    limits[f"decoded {mode}"] = taken(
        lambda count, one=one: [one] * count, "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES", 4 * 56**2
    )
del os.environ["VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES"]
with site() as (url, page):
    page["content"] = saved("RGB", side=SIDE)
    limits["downloaded"] = taken(
        lambda count: [f"{url}?{at}" for at in range(count)],
        "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB",
        1,
    )

let_go: list[str] = []


def entry(name: str) -> SimpleNamespace:
    item = SimpleNamespace(namespace="n", mm_hash=name, close=lambda: let_go.append(name))
    return SimpleNamespace(item=item)


async def stay() -> None:
    """More entries than are held are named for one caller, and some for another one."""
    held = Answers(None, model.name, announces_node=False)
    for caller, names in (("one", "a"), ("many", "bcdef"), ("one", "g")):
        for each in names:
            held._have_stay([entry(each)], caller)


answers.MAX_STAYING = 4
loop.run_until_complete(stay())
print("RESULT", json.dumps([named, unread, limits, let_go]))
