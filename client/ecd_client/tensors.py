"""Tensors to bytes and back. Only this module and `vllm/` import torch."""

from __future__ import annotations

from typing import Any

import torch

from ecd_client.errors import InvalidArgument
from ecd_proto.contract import DTYPES

_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


def describe(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """The contract's dtype name, and the shape. Raises InvalidArgument."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise InvalidArgument(f"{tensor.dtype} cannot be stored; known are {', '.join(DTYPES)}")
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"a {tensor.layout} tensor cannot be stored: make it dense first")
    return name, tuple(tensor.shape)


def as_tensor(view: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that is the bytes of `view`, which it keeps alive."""
    if not view.nbytes:
        return torch.empty(shape, dtype=_BY_NAME[dtype])
    return torch.frombuffer(view, dtype=torch.uint8).view(_BY_NAME[dtype]).view(shape)


class Source:
    """A tensor on its way into the pool, as it is when this is made.

    A CUDA tensor is read on a side stream that waits for the work already queued, so that the
    model's own stream goes on. The caller must not write to the tensor until it is copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._ready: Any = None
        if tensor.is_cuda:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(tensor.device))

    def copy_to(self, view: memoryview) -> None:
        """The one copy: strides, if any, are undone on the way."""
        dtype, shape = describe(self._tensor)
        target = as_tensor(view, dtype, shape)
        if self._ready is None:
            target.copy_(self._tensor)
            return
        stream = _side_stream(self._tensor.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            target.copy_(self._tensor, non_blocking=True)
            self._tensor.record_stream(stream)
        stream.synchronize()


def private_copy(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy on `device`, complete when this returns."""
    device = torch.device(device)
    if device.type != "cuda":
        return tensor.to(device, copy=True)
    current = torch.cuda.current_stream(device)
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        copy = tensor.to(device, non_blocking=True, copy=True)
    stream.synchronize()
    copy.record_stream(current)
    return copy


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _side_streams[device]
