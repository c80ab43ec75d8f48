"""Messages as JSON types: the documents of `ecd-cli --json` and of the daemon's status page."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from typing import Any

from google.protobuf.message import Message

from ecd_proto.contract import IDLE_BOUNDS_S, SIZE_BOUNDS_BYTES, pool_names
from ecd_proto.v1 import cache_pb2 as pb

STATUS_SCHEMA = "ecd.status/1"
"""The name and version of the document; additions do not raise the version."""


def plain(message: Message) -> dict[str, Any]:
    """The message as JSON types, with every field present: null where the message has none.

    Numbers are numbers, of at least 1 with 3 decimals and below with 6.
    """
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else _value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def status_document(reply: pb.StatusReply, address: str | None = None) -> dict[str, Any]:
    """A daemon's status, with its address where the reader knows one, and histograms' bounds."""
    reached = {} if address is None else {"address": address}
    document = {"schema": STATUS_SCHEMA, **reached, **plain(reply)}
    for name in ("node", "events", "events_replay"):
        document[name] = document[name] or None
    names = pool_names({pool.pool: pool.kind for pool in reply.pools})
    for pool in document["pools"]:
        pool["name"] = names[pool["pool"]]
        pool["problem"] = pool["problem"] or None
    for counted in filter(None, (document["counters"], document["bench"])):
        counted["idle_evictions_bounds_s"] = IDLE_BOUNDS_S
        counted["put_sizes_bounds_bytes"] = SIZE_BOUNDS_BYTES
        counted["hit_sizes_bounds_bytes"] = SIZE_BOUNDS_BYTES
    return document


def _value(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        name: str = field.enum_type.values_by_number[value].name
        return name.partition("_")[2].lower()
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, MutableSequence):
        return [plain(item) if isinstance(item, Message) else item for item in value]
    return value


def _rounded(value: Any) -> Any:
    return round(value, 3 if abs(value) >= 1 else 6) if isinstance(value, float) else value
