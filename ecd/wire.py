"""Messages that both services use, and the one place that validates what arrives in them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from math import isfinite

from ecd.core.types import Content, Extent, Key
from ecd_proto import contract
from ecd_proto.v1 import cache_pb2 as pb


class InvalidRequest(Exception):
    """The client sent something that the contract does not allow; the message says what."""


def check_batch(items: Collection[object]) -> None:
    if len(items) > contract.MAX_BATCH:
        raise InvalidRequest(f"{len(items)} items in one call; at most {contract.MAX_BATCH}")


def key_from(message: pb.Key) -> Key:
    return check_key(message.namespace, message.mm_hash)


def check_key(namespace: str, mm_hash: str) -> Key:
    for field, value, limit in (
        ("namespace", namespace, contract.MAX_NAMESPACE_BYTES),
        ("mm_hash", mm_hash, contract.MAX_MM_HASH_BYTES),
    ):
        if not value:
            raise InvalidRequest(f"an empty {field}")
        if len(value.encode()) > limit:
            raise InvalidRequest(f"a {field} of {len(value.encode())} bytes; at most {limit}")
    return Key(sys.intern(namespace), mm_hash)  # one copy of it for all entries


def content_from(message: pb.Content | Content) -> Content:
    if message.dtype not in contract.DTYPES:
        raise InvalidRequest(
            f"unknown dtype {message.dtype[:32]!r}; known are {', '.join(contract.DTYPES)}"
        )
    if len(message.shape) > contract.MAX_DIMENSIONS:
        raise InvalidRequest(f"{len(message.shape)} dimensions; at most {contract.MAX_DIMENSIONS}")
    dtype, shape, nbytes = _tensor(message.dtype, tuple(message.shape))
    if message.nbytes != nbytes:
        raise InvalidRequest(f"{dtype} of shape {shape} has {nbytes} bytes, not {message.nbytes}")
    if len(message.metadata) > contract.MAX_METADATA_BYTES:
        raise InvalidRequest(
            f"{len(message.metadata)} bytes of metadata; at most {contract.MAX_METADATA_BYTES}"
        )
    if not (isfinite(message.cost_s) and message.cost_s >= 0.0):
        raise InvalidRequest(f"cost_s is {message.cost_s}; it must be 0 or more")
    return Content(dtype, shape, nbytes, message.metadata, message.cost_s)


@lru_cache(maxsize=8192)
def _tensor(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    """One copy for all entries that have it, with its bytes."""
    return dtype, shape, contract.nbytes_of(dtype, shape)


def hints_from(message: pb.Hint) -> list[contract.Hint]:
    nodes = message.nodes[: contract.MAX_HINTS]
    places = places_from(message.extents, len(nodes))
    return [contract.Hint(node, *place) for node, place in zip(nodes, places, strict=True)]


def places_from(extents: Sequence[pb.Extent], count: int) -> list[tuple[int, int]]:
    """Offset and bytes of each of so many; no bytes where nothing is said."""
    said = [(extent.offset, extent.nbytes) for extent in extents[:count]]
    return said + [(0, 0)] * (count - len(said))


def to_extents(places: Iterable[Extent | None]) -> list[pb.Extent]:
    return [
        pb.Extent() if place is None else pb.Extent(offset=place.offset, nbytes=place.nbytes)
        for place in places
    ]


def seconds_from(seconds: float, name: str) -> float:
    if not (isfinite(seconds) and seconds >= 0.0):
        raise InvalidRequest(f"{name} is {seconds}; it must be 0 or more")
    return seconds


def to_key(key: Key) -> pb.Key:
    return pb.Key(namespace=key.namespace, mm_hash=key.mm_hash)


def to_content(content: Content) -> pb.Content:
    return pb.Content(
        dtype=content.dtype,
        shape=content.shape,
        nbytes=content.nbytes,
        metadata=content.metadata,
        cost_s=content.cost_s,
    )
