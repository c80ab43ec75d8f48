"""The stream of stored and removed entries: its messages, in vLLM's framing of KV events.

A message has three frames: the topic, the sequence as 8 bytes big-endian, and a batch in msgpack.
The topic is `ec@<node>@<namespace>`. docs/design-events.md has the protocol. Needs msgspec.
"""

from __future__ import annotations

import msgspec

TOPIC = b"ec@"
"""How every topic begins."""
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence in the last message of an answer, which has no topic and no batch."""
SNAPSHOT = b""
"""The request for a snapshot; one for a replay is the first sequence wanted, as 8 bytes."""
MEDIUM = "CPU"
"""vLLM's word for the host pool."""
SIGN_S = 1.0
"""Interval of a daemon's signs of life: the last sequence again, without events."""


class EncodingStored(msgspec.Struct, tag=True):
    """Entries that are stored now, by mm_hash, and the bytes of each."""

    keys: list[str]
    nbytes: list[int]
    medium: str = MEDIUM


class EncodingRemoved(msgspec.Struct, tag=True):
    """Entries that are not stored any more, by mm_hash."""

    keys: list[str]


class AllCleared(msgspec.Struct, tag=True):
    """The daemon holds nothing: a life of it begins, or a snapshot."""


Event = EncodingStored | EncodingRemoved | AllCleared


class Batch(msgspec.Struct, array_like=True):
    """Events of one namespace, in vLLM's order of fields; `epoch` is the daemon's incarnation."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None
    epoch: str


def topic(node: str, namespace: str = "") -> bytes:
    return TOPIC + f"{node}@{namespace}".encode()


def split_topic(said: bytes) -> tuple[str, str]:
    """Node and namespace of a topic. Raises ValueError for one that is not ours."""
    prefix, node, namespace = said.decode().split("@", 2)
    if prefix.encode() + b"@" != TOPIC:
        raise ValueError(f"no topic of ecd: {said[:64]!r}")
    return node, namespace
