"""Pictures of a request as the middleware sees them: found, missing, or promised by an encoder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ecd_client.item import Item
from ecd_client.vllm.base.hints import add_hints
from ecd_client.vllm.base.names import stored_name
from ecd_client.vllm.middleware.encoders import Encoder
from ecd_proto.contract import Hint
from ecd_proto.placeholders import Placeholder

IMAGE, EMBEDS = "image_url", "image_embeds"
"""Types of parts with a picture, and with its name and metadata."""


class Found(NamedTuple):
    """A picture in a request: the part, its name there, its entry in ecd, and its metadata."""

    part: dict[str, Any]
    name: str
    item: Item
    placeholder: Placeholder


class Missing(NamedTuple):
    """A picture in a request that ecd lacks: its bytes as a URL, and its tokens, estimated."""

    part: dict[str, Any]
    url: str
    name: str
    namespace: str
    tokens: int
    salt: str | None = None

    @property
    def stored_name(self) -> str:
        return stored_name(self.name, self.salt)


class Promise(NamedTuple):
    """A stored picture's metadata and place, and the encoder that says so."""

    placeholder: Placeholder
    hints: list[Hint]
    encoder: Encoder


@dataclass
class Look:
    """A request's body, fetched pictures in it, and all of its pictures if ecd has all.

    An encode hop gets those that are `missing`, and has them `promised`, all or none. `pictures`
    are the stored names of all; None: they are not known, or a client has chosen one.
    """

    body: bytes
    request: dict[str, Any] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    promised: list[tuple[Missing, Promise]] = field(default_factory=list)
    pictures: frozenset[str] | None = None

    @property
    def salt(self) -> str | None:
        """The request's `cache_salt`: tenants with different ones share nothing."""
        return self.request.get("cache_salt")

    @property
    def is_whole(self) -> bool:
        """Whether the engine can do without the pictures."""
        return 0 < len(self.parts) == len(self.found) + len(self.promised)

    def rewritten(self) -> bytes:
        """The request with names and metadata in place of its pictures."""
        for picture in self.found:
            _leave_out(picture.part, picture.name, picture.placeholder)
        for missing, promise in self.promised:
            _leave_out(missing.part, missing.name, promise.placeholder)
        hints = {
            missing.name: promise.hints[0] for missing, promise in self.promised if promise.hints
        }
        if hints:
            said = self.request.get("ec_transfer_params")
            params = {**(said if isinstance(said, dict) else {}), **{name: {} for name in hints}}
            add_hints(params, hints)
            self.request["ec_transfer_params"] = params
        return packed(self.request)

    def close(self) -> None:
        for picture in self.found:
            picture.item.close()
        self.found, self.missing = [], []


def packed(request: dict[str, Any]) -> bytes:
    """The request as a body."""
    return json.dumps(request).encode()


def _leave_out(part: dict[str, Any], name: str, placeholder: Placeholder) -> None:
    del part[IMAGE]
    part.update({"type": EMBEDS, EMBEDS: dict(placeholder.fields), "uuid": name})
