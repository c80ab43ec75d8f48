"""Messages that both services use, and the one place that validates what arrives in them."""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import lru_cache
from math import isfinite

from ecd.core.types import Content, Key
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
