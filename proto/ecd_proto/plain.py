"""Messages as JSON types: the documents of `ecd-cli --json` and of the daemon's status page."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """The message as JSON types, with every field present and numbers as numbers."""
    return {
        field.name: _value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _value(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        name: str = field.enum_type.values_by_number[value].name
        return name.partition("_")[2].lower()
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, MutableSequence):
        return [plain(item) if isinstance(item, Message) else item for item in value]
    return value
