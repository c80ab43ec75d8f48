"""Placeholder metadata: the fields that size an item's place in a prompt, and their one door.

An entry's metadata is a byte for the version of this form, then JSON: for the item's modality its
fields by name, such as `{"image": {"image_grid_thw": [1, 54, 72]}}`. Whoever finds the entry can
ask an engine for the item by them and by its name alone, and nobody preprocesses its media. Those
that are too long for a row of the index are there as their digest (SHA-256) after another byte:
who has them from elsewhere can compare them.

Requests, entries, encoders' answers and peers may say anything, and an engine ends over metadata
that its model does not expect. So only a `Placeholder` goes on, and only this module makes one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import islice
from math import prod
from typing import Any

from ecd_proto.contract import MAX_METADATA_BYTES

_VERSION, _DIGEST = b"\x01", b"\x02"
_JSON = json.JSONEncoder(separators=(",", ":"), sort_keys=True)
MAX_STORED_BYTES = 64
"""Longest of an entry. With more its row would be cut short where the name has a salt, and each get
would be a call."""
MAX_FIELDS = 4
MAX_NUMBERS = 1024
"""Most numbers of a field: a video has a timestamp for two of its frames."""
MAX_NAME_LENGTH = 32
MAX_SIDE = 1 << 16
"""Largest side of a picture, in patches or pixels."""
MAX_PRODUCT = 1 << 22
"""Most patches, and most embeddings of audio, of an item and of all items of a request that come
without their media: beyond any model's context."""
MAX_TIME_S = 1e7
MAX_STEP_S = 1e4
"""Longest time between frames of a video."""
MAX_MERGED = 64
"""Most patches that become one embedding, where a model does not say how many do."""


@dataclass(frozen=True)
class Placeholder:
    """Checked metadata of one item; two are equal if they are the same bytes when packed."""

    modality: str = field(compare=False)
    fields: Mapping[str, Any] = field(compare=False)
    packed: bytes

    @classmethod
    def of(cls, modality: object, fields: object) -> Placeholder | None:
        """The metadata, if they are what the modality's fields may be. None: they make no sense.

        A number is an integer above 0, neither a bool nor a float, in a list or in a list's lists.
        Only `timestamps` (0 or more) and `second_per_grid_ts` (one number above 0) are seconds.
        """
        if not (
            _is_name(modality)
            and isinstance(fields, Mapping)
            and 0 < len(fields) <= MAX_FIELDS
            and all(_is_name(name) and _is_value(name, value) for name, value in fields.items())
        ):
            return None
        said = {modality: {name: _as_said(name, value) for name, value in fields.items()}}
        packed = _VERSION + _JSON.encode(said).encode()
        if len(packed) > MAX_METADATA_BYTES:
            return None
        return cls(str(modality), said[modality], packed)

    @classmethod
    def unpack(cls, metadata: bytes) -> Placeholder | None:
        """The metadata that an entry carries. None: it has none of this form, or they are wrong."""
        if not is_claimed(metadata) or len(metadata) > MAX_METADATA_BYTES:
            return None
        try:
            said = json.loads(metadata[len(_VERSION) :])
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or len(said) != 1:
            return None
        return cls.of(*next(iter(said.items())))

    @cached_property
    def stored(self) -> bytes:
        """The bytes that an entry carries: `packed`, or its SHA-256 if it is too long for a row."""
        if len(self.packed) <= MAX_STORED_BYTES:
            return self.packed
        return _DIGEST + sha256(self.packed).digest()

    def is_of(self, metadata: bytes) -> bool:
        """Whether these fields are the ones that an entry's `metadata` bytes stand for."""
        return metadata == self.stored or Placeholder.unpack(metadata) == self

    def fits(self, merge: int | None, embeddings: int | None = None) -> bool:
        """Whether a model can have made this of an item, that has so many embeddings if it is said.

        The model merges `merge` x `merge` patches of a grid to an embedding; None: unknown.
        """
        grids = [
            row
            for name, value in self.fields.items()
            if name.endswith(_GRID)
            for row in _rows(value)
        ]
        if any(side % (merge or 1) for grid in grids for side in grid[1:]):
            return False
        if embeddings is None or not grids:
            return True
        patches = sum(map(prod, grids))
        if merge is None:
            return embeddings <= patches <= embeddings * MAX_MERGED
        return patches == embeddings * merge * merge


def may_be_said(name: str, said: object) -> bool:
    """Whether a field may say this of the items of a request that come without their media.

    That is a list for each of them; or one item's list alone, or numbers where they are lengths.
    """
    if not isinstance(said, list) or not 0 < len(said) <= MAX_NUMBERS:
        return False
    items = said
    if not any(isinstance(each, list) for each in said):
        items = [[each] for each in said] if name in _LENGTHS else [said]
    return all(_is_value(name, item) for item in items) and _is_bounded(name, items)


def may_be_together(placeholders: Collection[Placeholder]) -> bool:
    """Whether one request may have items with these metadata, without their media."""
    said = defaultdict(list)
    for placeholder in placeholders:
        for name, value in placeholder.fields.items():
            said[name].append(value)
    return all(_is_bounded(name, items) for name, items in said.items())


def is_claimed(metadata: bytes) -> bool:
    """Whether an entry's metadata say of themselves that they are of this form."""
    return metadata.startswith(_VERSION + b"{")


_GRID = "_grid_thw"
_IMAGE = f"image{_GRID}"
_LENGTHS = ("audio_num_tokens", "audio_feature_lengths")
_SIZES = ("image_sizes", "video_image_sizes")
_TIMES = "timestamps"
STEP = "second_per_grid_ts"


def _is_name(said: object) -> bool:
    return isinstance(said, str) and said.isidentifier() and len(said) <= MAX_NAME_LENGTH


def _is_value(name: str, value: object) -> bool:
    if not isinstance(value, list):
        return False
    numbers = list(islice(_numbers(value), MAX_NUMBERS + 1))
    is_flat = not any(isinstance(each, list) for each in value)
    is_nested = all(isinstance(each, list) for each in value)
    if not 0 < len(numbers) <= MAX_NUMBERS or not (is_flat or is_nested):
        return False
    if name in (_TIMES, STEP):
        are_seconds = is_flat and all(type(number) in (int, float) for number in numbers)
        if name == _TIMES:
            return are_seconds and all(0 <= number <= MAX_TIME_S for number in numbers)
        return are_seconds and len(numbers) == 1 and 0 < numbers[0] <= MAX_STEP_S
    if not all(type(number) is int and number > 0 for number in numbers):
        return False
    if name in _LENGTHS:
        return is_flat and len(numbers) == 1 and numbers[0] <= MAX_PRODUCT
    if max(numbers) > MAX_SIDE:
        return False
    rows = _rows(value)
    if name in _SIZES:  # width and height in pixels, of a picture or of each frame
        return all(len(row) == 2 for row in rows)
    if name.endswith(_GRID) and any(len(row) != 3 for row in rows):
        return False
    if name == _IMAGE and any(row[0] != 1 for row in rows):
        return False  # an image has one frame
    return sum(map(prod, rows)) <= MAX_PRODUCT


def _is_bounded(name: str, items: list[list[Any]]) -> bool:
    """Whether a field says no more of all items of a request than it may say of one."""
    sized = (row for item in items for row in _rows(item) if name not in (*_SIZES, _TIMES, STEP))
    return sum(map(prod, sized)) <= MAX_PRODUCT


def _as_said(name: str, value: list[Any]) -> list[Any]:
    """The value as a processor says it: some writers of JSON make a 0 of 0.0."""
    return [float(number) for number in value] if name in (_TIMES, STEP) else value


def _rows(value: list[Any]) -> list[Any]:
    """The lists in a list, or the list itself as the only one."""
    return value if isinstance(value[0], list) else [value]


def _numbers(value: list[Any]) -> Iterator[Any]:
    """The numbers of a list, and of the lists in it."""
    for each in value:
        if isinstance(each, list):
            yield from each
        else:
            yield each
