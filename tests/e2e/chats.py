"""Chat completions as an attacker writes them, and the ones that a plain engine is asked instead.

A name has one picture for ever. Where a part has nothing but a name, the plain engine gets the
name's picture: its answer is the right one.
"""

from __future__ import annotations

import io
import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import torch

from e2e.servers import picture_url

GRIDS = {(336, 224): (1, 16, 24), (224, 336): (1, 24, 16), (112, 112): (1, 8, 8)}
"""The grids that the model makes of pictures of these sizes."""
LONG = " ".join(["what is in this picture?"] * 20)
"""Text that fills, with a picture, several blocks of the KV cache."""
WIDTH = 128
"""Of an embedding's rows."""


# -- JSON ------------------------------------------------------------------------------------------


class Raw(str):
    """JSON, word for word."""


class Pairs(list[tuple[str, Any]]):
    """An object's members; one name may stand there twice."""


class Kept(dict[str, Any]):
    """A part whose content belongs to its name, so that it is never altered by chance."""

    plainly: Any = None  # the part in its place for a plain engine, if there is one


def written(value: Any, only_ascii: bool = True) -> str:
    """The value as JSON."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict | Pairs):
        pairs = value.items() if isinstance(value, dict) else value
        members = (f"{written(name, only_ascii)}: {written(v, only_ascii)}" for name, v in pairs)
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(written(each, only_ascii) for each in value)}]"
    return json.dumps(value, ensure_ascii=only_ascii)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a tree, as its owner and where it is there, but for those within Kept parts."""
    if isinstance(tree, Kept | Pairs) or not isinstance(tree, dict | list):
        return
    for at, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, at
        yield from places(value)


def without(tree: Any, place: int) -> Any:
    """A copy of the tree without one of its places, by its number. None: it has no such place."""
    copied = deepcopy(tree)
    owner, at = next(islice(places(copied), place, None), (None, None))
    if owner is None:
        return None
    del owner[at]
    return copied


# -- names, and what they stand for ----------------------------------------------------------------


class Content(NamedTuple):
    """A picture or a video, its grid, and the name that it is sent under."""

    name: Any
    url: str
    grid: tuple[int, ...]
    kind: str = "image"


def content_of(name: Any) -> Content:
    """The picture of a name. vLLM takes a name as text, whatever it is in JSON."""
    number = crc32(str(name).encode("utf-8", "surrogatepass"))
    size = [*GRIDS][number % len(GRIDS)]
    return Content(name, picture_url(number, *size), GRIDS[size])


OWN = [content_of(f"mine-{number}") for number in range(6)]
ODD = [
    *map(content_of, ("", " ", "\0", "\ud800", "\u202e\U0001f600", "x" * 5000, "../../etc/passwd")),
    *map(content_of, ("renderer0-mm-1-image-0", "null", "a|b", 5, 5.0, True, ["a"], {"a": 1})),
]


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(value: torch.Tensor) -> str:
    """A tensor as clients upload it."""
    file = io.BytesIO()
    torch.save(value, file)
    return b64encode(file.getvalue()).decode()


# -- bodies and their parts ------------------------------------------------------------------------


def chat(*parts: Any, **options: Any) -> dict[str, Any]:
    """The body of an ordinary chat completion, greedy."""
    ordinary = {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}]}
    ordinary |= {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logprobs": True}
    return {**ordinary, **options}


def text(said: Any = "what is in this picture?") -> dict[str, Any]:
    return {"type": "text", "text": said}


def picture(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def shown(content: Content) -> dict[str, Any]:
    """A picture or a video without its name."""
    key = f"{content.kind}_url"
    return {"type": key, key: {"url": content.url}}


def named(content: Content, **more: Any) -> Kept:
    """The same with its name."""
    return Kept({**shown(content), "uuid": content.name, **more})


def bare(content: Content, *pairs: tuple[str, Any]) -> Kept:
    """A name without its content; `pairs` are what comes in its place."""
    part = Kept({**dict(pairs), "uuid": content.name})
    part.plainly = named(content)
    return part


def described(content: Content, grid: Any = None) -> Kept:
    """A name with its placeholder's metadata, as a proxy sends it."""
    fields = {f"{content.kind}_grid_thw": list(content.grid) if grid is None else grid}
    embeds = f"{content.kind}_embeds"
    return bare(content, ("type", embeds), (embeds, fields))


def uploaded(name: Any, embeds: Any, grid: Any, kind: str = "image") -> Kept:
    """A tensor of the client's own."""
    key = f"{kind}_embeds"
    return Kept({"type": key, key: {key: embeds, f"{kind}_grid_thw": grid}, "uuid": name})


# -- requests --------------------------------------------------------------------------------------

SAME, SAME_OR_FAILS, ANY = "as plain", "as plain, or a failure", "any clean answer"
FAILS = "a failure"
"""What is right of an answer; `as plain` is what a plain engine says, a failure of its included."""


@dataclass
class Request:
    """A request at the engine `at`. `then` is one that comes when all sent with it are answered."""

    tree: Any
    at: str
    right: str = SAME
    classes: set[str] = field(default_factory=set)
    headers: dict[str, str] = field(default_factory=dict)
    spoil: Callable[[bytes], bytes] = bytes
    only_ascii: bool = True
    path: str = "/v1/chat/completions"
    then: Request | None = None

    @property
    def body(self) -> bytes:
        return self._body(self.tree)

    @property
    def plainly(self) -> bytes | None:
        """What a plain engine is asked. None: its answer would not be the right one."""
        return None if self.right in (ANY, FAILS) else self._body(_plain(self.tree))

    def _body(self, tree: Any) -> bytes:
        return self.spoil(written(tree, self.only_ascii).encode("utf-8", "surrogatepass"))

    def __str__(self) -> str:
        said = re.sub(r"[^\s\"]{200,}", _cut, self.body.decode(errors="replace"))
        about = f"{', '.join(sorted(self.classes))}, at {self.at}; right is {self.right}"
        return f"{about}: {self.headers or ''} {said}" + (
            f"\nthen {self.then}" if self.then else ""
        )


def _plain(tree: Any) -> Any:
    """The same for a plain engine: each name has its content."""
    if isinstance(tree, Kept):
        return tree if tree.plainly is None else tree.plainly
    if isinstance(tree, Pairs):
        return Pairs((name, _plain(value)) for name, value in tree)
    if isinstance(tree, dict):
        return {name: _plain(value) for name, value in tree.items()}
    return [_plain(each) for each in tree] if isinstance(tree, list) else tree


def _cut(found: re.Match[str]) -> str:
    """Of a long text its ends, and the name of the picture that it is."""
    whose = [f" of {each.name!r}" for each in (*OWN, *ODD) if each.url.endswith(found[0][-80:])]
    return f"{found[0][:40]}[{len(found[0]) - 60} more{''.join(whose)}]{found[0][-20:]}"


def taken(victim: Content, value: float, grid: Any, at: str) -> Request:
    """A tensor under the name of a picture, which its owner then sends to the engine `at`."""
    rows = victim.grid[1] * victim.grid[2] // 4
    part = uploaded(victim.name, packed(torch.full((rows, WIDTH), value)), grid)
    then = Request(chat(picture(victim.url), text(LONG)), at)
    return Request(chat(part, text(LONG)), "both", ANY, {"taken name"}, then=then)
