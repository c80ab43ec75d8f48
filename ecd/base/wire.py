"""Messages that both services use, and the one place that validates what arrives in them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from math import isfinite

from ecd.core.model.types import Content, Extent, Key
from ecd_proto import contract
from ecd_proto.placeholders import Placeholder, is_claimed
from ecd_proto.v1 import cache_pb2 as pb

MAX_WAIT_S = 60.0
"""Longest wait of one node for an entry that another makes or writes, whatever its client says."""
TOLD_METADATA_BYTES = 128
"""Longest metadata in directories; a picture's has some 40 bytes."""
BYTES_WITH_LEASE = 64 << 10
"""Largest entry that comes with its lease: a read of a larger one takes less than a message."""
SPECULATIVE_BYTES = 8 << 20
"""Entries up to here are read before they are leased: beyond, leasing is a tenth of the time."""


class InvalidRequest(Exception):
    """A message breaks the contract; the text says where."""


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


def content_from(message: pb.Content) -> Content:
    _check_dimensions(message.shape)
    shape = tuple(message.shape)
    return check_content(
        Content(message.dtype, shape, message.nbytes, message.metadata, message.cost_s)
    )


def check_content(content: Content) -> Content:
    """The content as the contract allows it, its dtype and shape shared with other entries'."""
    if content.dtype not in contract.DTYPES:
        raise InvalidRequest(
            f"unknown dtype {content.dtype[:32]!r}; known are {', '.join(contract.DTYPES)}"
        )
    _check_dimensions(content.shape)
    dtype, shape, nbytes = _tensor(content.dtype, content.shape)
    if content.nbytes != nbytes:
        raise InvalidRequest(f"{dtype} of shape {shape} has {nbytes} bytes, not {content.nbytes}")
    if len(content.metadata) > contract.MAX_METADATA_BYTES:
        raise InvalidRequest(
            f"{len(content.metadata)} bytes of metadata; at most {contract.MAX_METADATA_BYTES}"
        )
    if _is_nonsense(content.metadata):
        raise InvalidRequest(
            "metadata that begin with b'\\x01{', as placeholder metadata do, and make no sense"
        )
    if not (isfinite(content.cost_s) and content.cost_s >= 0.0):
        raise InvalidRequest(f"cost_s is {content.cost_s}; it must be 0 or more")
    return Content(dtype, shape, nbytes, content.metadata, content.cost_s)


def _check_dimensions(shape: Sequence[int]) -> None:
    if len(shape) > contract.MAX_DIMENSIONS:
        raise InvalidRequest(f"{len(shape)} dimensions; at most {contract.MAX_DIMENSIONS}")
    if max(shape, default=0) > contract.MAX_LENGTH:
        raise InvalidRequest(f"a dimension of {max(shape)}; at most {contract.MAX_LENGTH}")


@lru_cache(maxsize=8192)
def _tensor(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    """One dtype and shape for all entries that have them, and their bytes."""
    return dtype, shape, contract.nbytes_of(dtype, shape)


def _is_nonsense(metadata: bytes) -> bool:
    """Whether the metadata begins as placeholder metadata does, but is malformed."""
    return is_claimed(metadata) and not _is_placeholder(metadata)


@lru_cache(maxsize=8192)
def _is_placeholder(metadata: bytes) -> bool:
    return Placeholder.unpack(metadata) is not None


def hints_from(message: pb.Hint) -> list[contract.Hint]:
    nodes = message.nodes[: contract.MAX_HINTS]
    places = places_from(message.extents, len(nodes))
    return [contract.Hint(node, *place) for node, place in zip(nodes, places, strict=True)]


def told_metadata(metadata: bytes) -> bytes:
    """An entry's metadata where they are told beside the entry's place.

    There are none if they are long, or make no sense, as a peer or a directory may have told.
    """
    if len(metadata) > TOLD_METADATA_BYTES:
        return b""
    return b"" if _is_nonsense(metadata) else metadata


def places_from(extents: Sequence[pb.Extent], count: int) -> list[Extent]:
    """The first `count` extents; an extent of no bytes stands for one that is unknown."""
    said = [Extent(extent.pool, extent.offset, extent.nbytes) for extent in extents[:count]]
    return said + [Extent(0, 0, 0)] * (count - len(said))


def to_extents(places: Iterable[Extent | None]) -> list[pb.Extent]:
    return [pb.Extent() if place is None else to_extent(place) for place in places]


def to_extent(extent: Extent) -> pb.Extent:
    return pb.Extent(pool=extent.pool, offset=extent.offset, nbytes=extent.nbytes)


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
