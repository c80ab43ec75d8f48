"""Placeholder metadata as an entry carries it: the fields that size an item's place in a prompt.

An entry's metadata is a byte for the version of this form, then JSON: for the item's modality its
fields by name, such as `{"image": {"image_grid_thw": [1, 54, 72]}}`. Whoever finds the entry can
ask an engine for the item by them and by its name alone, and nobody preprocesses its media.
"""

from __future__ import annotations

import json
from typing import Any

_VERSION = b"\x01"


def pack(modality: str, fields: dict[str, Any]) -> bytes:
    """The metadata of an entry. `fields` has JSON's values: numbers, and lists of them."""
    return _VERSION + json.dumps({modality: fields}, separators=(",", ":")).encode()


def unpack(metadata: bytes) -> dict[str, dict[str, Any]]:
    """The fields by modality and name. Empty for an entry that carries none, or another form."""
    if not metadata.startswith(_VERSION):
        return {}
    try:
        said = json.loads(metadata[len(_VERSION) :])
    except ValueError:
        return {}
    if not isinstance(said, dict):
        return {}
    return {modality: fields for modality, fields in said.items() if isinstance(fields, dict)}
