"""The names of items within an engine, where those that vLLM gives would say too little.

vLLM names an item by its content, or by what the client calls it. That is the embedding's name in
the engine's own encoder cache, and its mm_hash in ecd. Some items get another one, before they are
scheduled: an item of a request with a `cache_salt` is named with its salt, as vLLM does with
prefixes; embeddings that a client brought, and media that are not to be shared, are named as this
engine's alone. The outline of an item, which the middleware stores beside it, has a name of its
kind, too. No client can choose a name that another's item gets so: one that begins like that is
named as this engine's, too. Names in hexadecimal digits stay so, and differ in their last ones:
LMCache takes no others, and looks at four digits.
"""

from __future__ import annotations

import hashlib
from typing import Any

SALTED, ALONE = "5a17ed0ecd", "a10e0ecd0d"
OUTLINE = "0071140ecd"
"""Beginnings of names; a digest begins like that only by a chance of 1 in 10^12."""
_GUESSED, _BROUGHT, _PRIVATE = (f"{ALONE}{kind}" for kind in ("00", "b0", "d0"))
PROMPT = "prompt_embeds"
"""Modality of a part of the prompt that comes as embeddings (`--enable-prompt-embeds`)."""
_DIGITS = 32
_NAMED = "ecd_identifier"
"""Attribute of an item that has its name: what a client calls an item may look like one."""


def stored_name(name: str, salt: str | None) -> str:
    """The mm_hash in ecd of an item that vLLM, or a client, calls by this name."""
    if salt:
        return _apart(SALTED, name, salt)
    return _apart(_GUESSED, name) if name.startswith((SALTED, ALONE, OUTLINE)) else name


def outline_name(stored: str, front_end: str) -> str:
    """The mm_hash of the outline that such a front end makes of the item with this stored name."""
    return _apart(OUTLINE, stored, front_end)


def _apart(kind: str, name: str, salt: str = "") -> str:
    """A name that says what it is before the name that it is made of, and its digest behind."""
    said = "\0".join((kind, name, salt)).encode(errors="surrogatepass")
    return f"{kind}{name}{hashlib.sha256(said).hexdigest()[:_DIGITS]}"


def outer_name(identifier: str) -> str:
    """vLLM's name of the item with this identifier."""
    for kind in (_BROUGHT, _PRIVATE):  # which are made of others
        if identifier.startswith(kind):
            identifier = identifier[len(kind) : -_DIGITS]
    for kind in (SALTED, _GUESSED):
        if identifier.startswith(kind):
            return identifier[len(kind) : -_DIGITS]
    return identifier


def is_alone(identifier: str) -> bool:
    """Whether an item must never leave this engine."""
    return identifier.startswith(ALONE)


def name_apart(feature: Any, salt: str | None, *, is_private: bool = False) -> bool:
    """Give a request's item the identifier that it has within the engine. False: it had that.

    No other engine gets a private one. Requests that vLLM makes of one (`n` above 1) may share the
    item, or have copies of it: it has its name then.
    """
    if getattr(feature, _NAMED, None) == feature.identifier:
        return False
    named = stored_name(feature.identifier, salt)
    if brought_with(feature) is not None:
        named = _apart(_BROUGHT, named)
    elif is_private:
        named = _apart(_PRIVATE, named)
    is_renamed = named != feature.identifier
    feature.identifier = named
    setattr(feature, _NAMED, named)
    return bool(is_renamed)


def brought_with(feature: Any) -> Any:
    """The embeddings of an item that a client brought, so that no encoder makes them; or None."""
    modality = feature.modality
    field = "embedding" if modality == PROMPT else f"{modality}_embeds"
    brought = (feature.data or {}).get(field)
    return None if brought is None else brought.data
