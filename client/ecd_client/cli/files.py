"""Entries as safetensors files, without torch."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path

import safetensors

from ecd_client.errors import EcdError
from ecd_client.item import Item

TENSOR = "embedding"
_METADATA, _COST_S = "ecd.metadata", "ecd.cost_s"
_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F64": "float64",
}
"""ecd's names of dtypes by those of safetensors."""


class FileError(EcdError):
    """The file cannot be read or written, or has no tensor that can be stored."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, with the cost and metadata that `write` put beside it."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]
    metadata: bytes
    cost_s: float


def write(path: Path, item: Item) -> None:
    """Write an item to a file. Raises FileError and LeaseExpired, without a file of its own."""
    content = packed(item)
    try:
        with path.open("wb") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                if path.is_file() and not path.is_symlink():  # what is not its own stays
                    path.unlink()
                raise
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from None


def packed(item: Item) -> bytes:
    """The content of a file with an item's bytes, metadata and cost. Raises LeaseExpired.

    The header is written here, as the format describes it: the arguments that safetensors' own
    `serialize` takes without torch or numpy differ between its versions.
    """
    data = bytes(item.view)
    item.check()
    described = {
        "ecd.namespace": item.namespace,
        "ecd.mm_hash": item.mm_hash,
        _METADATA: base64.b64encode(item.metadata).decode(),
        _COST_S: repr(item.cost_s),
    }
    [dtype] = [theirs for theirs, ours in _DTYPES.items() if ours == item.dtype]
    tensor = {"dtype": dtype, "shape": list(item.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": described, TENSOR: tensor}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def read(path: Path, name: str | None) -> StoredTensor:
    """Read the tensor of this name, or the only one. Raises FileError."""
    try:
        content = path.read_bytes()
        tensors = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    except safetensors.SafetensorError as error:
        raise FileError(f"{path} is not a safetensors file: {error}") from None
    if not tensors:
        raise FileError(f"{path} has no tensor")
    if name is None and len(tensors) != 1:
        raise FileError(f"{path} has {len(tensors)} tensors; say which: {', '.join(tensors)}")
    name = name or next(iter(tensors))
    if name not in tensors:
        raise FileError(f"{path} has no tensor {name!r}; it has {', '.join(tensors)}")
    tensor = tensors[name]
    if tensor["dtype"] not in _DTYPES:
        raise FileError(f"{name!r} is of dtype {tensor['dtype']}, which ecd does not store")
    header_bytes = int.from_bytes(content[:8], "little")
    described = json.loads(content[8 : 8 + header_bytes]).get("__metadata__") or {}
    try:
        metadata = base64.b64decode(described.get(_METADATA, ""), validate=True)
        cost_s = float(described.get(_COST_S, 0.0))
    except (binascii.Error, ValueError):
        raise FileError(f"{path}: its {_METADATA} or {_COST_S} is broken") from None
    return StoredTensor(
        bytes(tensor["data"]), _DTYPES[tensor["dtype"]], tuple(tensor["shape"]), metadata, cost_s
    )
