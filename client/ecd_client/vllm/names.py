"""The names of items within an engine, where those that vLLM gives would say too little.

vLLM names an item by its content, or by what the client calls it. That is the embedding's name in
the engine's own encoder cache, and its mm_hash in ecd. Two kinds of items get another one, before
they are scheduled: an item of a request with a `cache_salt` is named with its salt, as vLLM does
with prefixes, and embeddings that a client brought are named as this engine's alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

SALTED, ALONE = "salt-", "alone-"
_DIGITS = 32


def stored_name(name: str, salt: str | None) -> str:
    """The mm_hash in ecd of an item that vLLM, or a client, calls by this name."""
    if salt:
        digest = hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]
        return f"{SALTED}{digest}-{name}"
    return f"{ALONE}{name}" if name.startswith(SALTED) else name  # a client guesses another's


def outer_name(identifier: str) -> str:
    """The name that vLLM gave to an item of this identifier."""
    identifier = identifier.removeprefix(ALONE)
    if identifier.startswith(SALTED):
        return identifier[len(SALTED) + _DIGITS + 1 :]
    return identifier


def is_alone(identifier: str) -> bool:
    """Whether an item is never to leave this engine."""
    return identifier.startswith(ALONE)


def name_apart(feature: Any, salt: str | None) -> None:
    """Give a request's item the identifier that it has within the engine.

    Requests that vLLM makes of one (`n` above 1) may share the item, which has its name then.
    """
    identifier: str = feature.identifier
    named = stored_name(identifier, salt)
    if brings_embeddings(feature) and not is_alone(named):
        named = f"{ALONE}{named}"
    if not identifier.startswith(named.removesuffix(identifier)):
        feature.identifier = named


def brings_embeddings(feature: Any) -> bool:
    """Whether a client brought an item's embeddings, so that no encoder makes them."""
    brought = (feature.data or {}).get(f"{feature.modality}_embeds")
    return brought is not None and brought.data is not None
