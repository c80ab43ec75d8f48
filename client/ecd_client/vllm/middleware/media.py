"""Media of a request as the middleware sees them: found, missing, or promised by an encoder."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ecd_client.item import Item
from ecd_client.vllm.base.hints import add_hints
from ecd_client.vllm.base.names import stored_name
from ecd_client.vllm.middleware.hop.encoders import Encoder
from ecd_client.vllm.middleware.outline import Outline
from ecd_proto.contract import Hint
from ecd_proto.placeholders import Placeholder, may_be_together

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
INPUT_AUDIO = "input_audio"
KINDS = {"image_url": IMAGE, "video_url": VIDEO, "audio_url": AUDIO, INPUT_AUDIO: AUDIO}
"""The modality of each type of part that brings a medium; the part has a key of this name, too."""
FORMATS = "wav", "mp3"
"""Formats of INPUT_AUDIO that vLLM takes."""
_PIECE = 3 << 18
"""Bytes that become base64 at a time, so that the event loop may go on; a multiple of three."""
READ_BY_KEY = frozenset(
    (*KINDS, *(f"{kind}_embeds" for kind in KINDS.values()), "image_pil", "prompt_embeds")
)
"""Keys of a part of which vLLM reads the first in its own order, once the part has a `uuid`."""


class Raw(NamedTuple):
    """The bytes of a video or a sound, which nobody has decoded.

    `is_frames`: they are the text of a `video/jpeg` URL, a list of frames in base64.
    """

    original_bytes: bytes
    is_frames: bool = False


@dataclass(eq=False)
class Medium:
    """One medium of a request.

    `content` is what was fetched: a picture as vLLM's hasher takes it, or the `Raw` bytes of other
    media. `uuid` is what the part says of the medium, or can say, and `name` is vLLM's mm_hash of a
    part that says so.
    """

    part: dict[str, Any]
    key: str
    content: Any = None
    uuid: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        self._came = dict(self.part)
        self._data_url: str | None = None

    @property
    def kind(self) -> str:
        """The medium's modality."""
        return KINDS[self.key]

    @property
    def is_chosen(self) -> bool:
        """Whether the client has named the medium."""
        return self._came.get("uuid") is not None

    @property
    def is_named_here(self) -> bool:
        """Whether vLLM gives the medium another name than the middleware."""
        return self.kind != IMAGE and not self.is_chosen

    @property
    def url(self) -> Any:
        """Where vLLM would load the medium from."""
        said = self._came[self.key]
        if self.key != INPUT_AUDIO:
            return said.get("url")
        data = said.get("data")
        return f"data:audio/{said['format']};base64,{data}" if data else None

    @property
    def is_inline(self) -> bool:
        """Whether the request itself has the medium's bytes."""
        if self.key == INPUT_AUDIO:
            return True
        url = self.url
        return isinstance(url, str) and url[:5].lower() == "data:"

    def data_url(self) -> str | None:
        """The medium's bytes as a URL. None: the middleware does not have them."""
        if self.is_inline:
            url: str = self.url
            return url
        if self._data_url is None and self.content is not None:
            original = memoryview(self.content.original_bytes)
            starts = range(0, original.nbytes, _PIECE)
            encoded = "".join(b64encode(original[at : at + _PIECE]).decode() for at in starts)
            self._data_url = f"data:{self.kind}/unknown;base64,{encoded}"
        return self._data_url

    def forget(self) -> None:
        """Drop what was fetched, and what was made of it."""
        self.content = self._data_url = None

    def keep_bytes(self) -> None:
        """Keep of what was fetched what the request does not have: no pixels."""
        if self.is_inline or self.content is None:
            self.content = None
        else:
            self.content = Raw(self.content.original_bytes)

    def put_in(self, *, is_named: bool) -> bool:
        """Bring the medium: its bytes if they were fetched, and its name. False: as it came."""
        self.part.clear()
        self.part.update(self._came)
        is_fetched = self.content is not None and not self.is_inline
        if is_fetched:
            self.part[self.key] = {"url": self.data_url()}
        is_named = is_named and self.is_named_here
        if is_named:
            self.part["uuid"] = self.uuid
        return is_fetched or is_named

    def leave_out(self, said: Placeholder | Outline | None) -> None:
        """Bring the medium's name and metadata alone; with an outline, which vLLM has, its name."""
        self.part.clear()
        self.part.update({k: v for k, v in self._came.items() if k != self.key})
        if isinstance(said, Placeholder):
            key, value = f"{self.kind}_embeds", dict(said.fields)
        else:
            key, value = f"{self.kind}_url", None
        self.part.update({"type": key, key: value, "uuid": self.uuid})


class FoundMedium(NamedTuple):
    """A medium in a request, its entry in ecd, and what stands in its place in a request.

    None: nothing does, and only an engine that encodes can do without the medium.
    """

    medium: Medium
    item: Item
    said: Placeholder | Outline | None

    @property
    def name(self) -> str:
        return self.medium.name

    @property
    def placeholder(self) -> Placeholder | None:
        """The medium's metadata, which its outline may have, too."""
        return self.said.placeholder if isinstance(self.said, Outline) else self.said

    @property
    def fields(self) -> Mapping[str, Any]:
        """The metadata that an engine which encodes says of the medium."""
        return {} if self.placeholder is None else self.placeholder.fields


class MissingMedium(NamedTuple):
    """A medium in a request that ecd lacks: its bytes as a URL, and its size, estimated.

    It is waited for `seconds` longer than for a picture. `decoding` is a digest of what its name
    says of decoders; None: its name says nothing of them. `by_outline`: the engine needs its
    outline, as its metadata do not say all; `can_outline`: it takes one, too. `is_safe`: the URL
    needs no escapes in JSON.
    """

    medium: Medium
    url: str
    name: str
    namespace: str
    tokens: int
    salt: str | None = None
    seconds: float = 0.0
    decoding: str | None = None
    by_outline: bool = False
    can_outline: bool = False
    is_safe: bool = False

    @property
    def kind(self) -> str:
        return self.medium.kind

    @property
    def stored_name(self) -> str:
        return stored_name(self.name, self.salt)

    @property
    def part(self) -> dict[str, Any]:
        """The part of a request that brings the medium and its name."""
        key = f"{self.kind}_url"
        return {"type": key, key: {"url": self.url}, "uuid": self.medium.uuid}


class Promise(NamedTuple):
    """A stored medium's metadata, its place, and the encoder that says so.

    Without metadata it comes by its outline.
    """

    placeholder: Placeholder | None
    hints: list[Hint]
    encoder: Encoder


def may_stand_together(found: Iterable[FoundMedium], promises: Iterable[Promise]) -> bool:
    """Whether what is said of all media of a request is within the bound for one."""
    said = [*(each.placeholder for each in found), *(each.placeholder for each in promises)]
    return may_be_together([each for each in said if each is not None])


@dataclass
class Look:
    """A request's body, and all of its media if ecd has all.

    An encode hop gets those that are `missing`, and has them `promised`, all or none. `names` are
    the stored names of all; None: they are not known, or a client has chosen one. `is_named`: where
    vLLM gets media, it gets the middleware's names of videos and sounds, too. `without_outline` has
    the namespace and the stored name, by mm_hash, of each medium whose outline ecd may lack.
    `may_send`: there are encoders for what is missing. `is_foreign`: an engine has it encoded that
    decodes otherwise. `waits_until_s`: what encoders have stored may still come until then.
    """

    body: bytes
    request: dict[str, Any] = field(default_factory=dict)
    media: list[Medium] = field(default_factory=list)
    found: list[FoundMedium] = field(default_factory=list)
    missing: list[MissingMedium] = field(default_factory=list)
    promised: list[tuple[MissingMedium, Promise]] = field(default_factory=list)
    names: frozenset[str] | None = None
    without_outline: dict[str, tuple[str, str]] = field(default_factory=dict)
    is_named: bool = False
    may_send: bool = False
    is_foreign: bool = False
    waits_until_s: float = 0.0
    is_settled: bool = False
    fetched_bytes: int = 0

    @property
    def salt(self) -> str | None:
        """The request's `cache_salt`: tenants with different ones share nothing."""
        return self.request.get("cache_salt")

    @property
    def is_whole(self) -> bool:
        """Whether the engine can do without the media."""
        return 0 < len(self.media) == len(self.found) + len(self.promised)

    @property
    def outlines(self) -> dict[str, Outline]:
        """The outlines by mm_hash, of all media if one needs it: vLLM takes all in one way."""
        said: dict[str, Any] = {found.name: found.said for found in self.found}
        said |= {missing.name: promise.placeholder for missing, promise in self.promised}
        if not any(isinstance(each, Outline) for each in said.values()):
            return {}
        return {
            name: Outline(each.modality, placeholder=each)
            if isinstance(each, Placeholder)
            else each
            for name, each in said.items()
        }

    def rewritten(self) -> bytes:
        """The request with names and metadata, or outlines, in place of its media."""
        outlines = self.outlines
        for found in self.found:
            found.medium.leave_out(outlines.get(found.name, found.said))
        for missing, promise in self.promised:
            missing.medium.leave_out(outlines.get(missing.name, promise.placeholder))
        hints = {
            missing.name: promise.hints[0] for missing, promise in self.promised if promise.hints
        }
        if not hints:
            return packed(self.request)
        said = self.request.get("ec_transfer_params")
        params = {**(said if isinstance(said, dict) else {}), **{name: {} for name in hints}}
        add_hints(params, hints)
        return packed({**self.request, "ec_transfer_params": params})

    def settle(self) -> None:
        """Make the body that brings the media: with what was fetched of them, and their names."""
        if self.is_settled:
            return
        self.is_settled = True
        put_in = [medium.put_in(is_named=self.is_named) for medium in self.media]
        if any(put_in):
            self.body = packed(self.request)
        for medium in self.media:
            medium.forget()

    def close(self) -> None:
        for found in self.found:
            found.item.close()
        self.found, self.missing = [], []


def packed(request: dict[str, Any]) -> bytes:
    """The request as a body."""
    return json.dumps(request).encode()
