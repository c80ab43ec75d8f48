"""Tensors to bytes and back. Only this module and `vllm/` import torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ecd_client.device.copies import Copies, for_tensor
from ecd_client.errors import DeviceError, InvalidArgument
from ecd_client.pools import MappedPool, address_of
from ecd_client.values import Extent, Parts
from ecd_proto.contract import DTYPES
from ecd_proto.mapped_file import advise_huge_pages

if TYPE_CHECKING:
    from ecd_client.device.driver import Event
    from ecd_client.device.pool import HeldCopy

_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}
HUGE_PAGES_FROM_BYTES = 4 << 20
"""Size from which on a private copy is worth huge pages: new small ones take most of its time."""


def describe(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the contract's dtype name, and the shape. Raises InvalidArgument."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(
            f"a {type(tensor).__name__} is no tensor: use torch.as_tensor, or put_bytes"
        )
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise InvalidArgument(f"{tensor.dtype} cannot be stored; known are {', '.join(DTYPES)}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise InvalidArgument(f"a {kind} tensor cannot be stored: make it dense first")
    if tensor.is_meta:
        raise InvalidArgument("a tensor on meta has no bytes to store: put it on a device first")
    try:
        shape = tuple(tensor.shape)
        has_bytes = _has_bytes(tensor)
    except RuntimeError as error:  # a parameter that waits for its shape
        raise InvalidArgument(f"the tensor cannot be stored: {error}") from None
    if not has_bytes:
        raise InvalidArgument("the tensor's storage was freed or cut: it has no bytes to store")
    return name, shape


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's storage has all elements: torch does not look, and reads beyond."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return True
    try:
        nbytes = tensor.untyped_storage().nbytes()
    except NotImplementedError:  # within vmap, it is no tensor of its own
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((length - 1) * step for length, step in steps)
    return (last + 1) * tensor.element_size() <= nbytes


def as_tensor(view: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the bytes of `view`, which it keeps alive."""
    if not view.nbytes:
        return torch.empty(shape, dtype=_BY_NAME[dtype], device="cpu")
    return torch.frombuffer(view, dtype=_BY_NAME[dtype]).view(shape)


class TensorSource:
    """A tensor to copy into a pool, with the value it has when this is made.

    A tensor of a GPU is read on a stream beside the model's, after the work that is queued now.
    The caller must not write to the tensor until it is copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Raises DeviceError where there is no memory to make the tensor dense."""
        self._tensor = tensor = tensor.detach()
        self._copies = for_tensor(tensor) if type(tensor) is torch.Tensor else None
        self._ready: Any = None
        if self._copies is not None:
            try:
                self._tensor = tensor.resolve_conj().resolve_neg().contiguous()
            except torch.OutOfMemoryError as error:
                raise DeviceError(str(error)) from None
            self._ready = self._copies.queued()
        elif tensor.is_cuda:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_on_host(self) -> bool:
        """Whether this thread itself copies the tensor, without waiting for a device."""
        return self._copies is None and self._tensor.is_cpu

    @property
    def device(self) -> int | None:
        """The number of its GPU, if copies are made on ecd's own streams."""
        return None if self._copies is None else self._copies.device

    def copy_near(self, address: int) -> None:
        """Copy the tensor to an address on its own GPU, densely. Raises DeviceError."""
        assert self._copies is not None
        tensor = self._tensor
        self._copies.move([(tensor.data_ptr(), tensor.nbytes)], address, self._ready)

    def copy_to(self, pool: MappedPool, extent: Extent) -> None:
        """Copy the tensor into its extent of the pool, densely.

        Raises InvalidArgument for a tensor whose bytes torch does not give, as within vmap, and
        DeviceError.
        """
        try:
            self._copy_to(pool, extent)
        except (RuntimeError, AssertionError, TypeError, LookupError) as error:  # a subclass's
            if self.is_on_host:
                raise InvalidArgument(f"torch does not copy the tensor: {error}") from None
            raise DeviceError(f"torch does not copy the tensor: {error}") from None

    def _copy_to(self, pool: MappedPool, extent: Extent) -> None:
        if self._copies is not None:
            pool.use_dma(self._copies.device)
            self._copies.save(self._tensor, self._ready, pool.save_parts(extent))
            return
        view = pool.write_view(extent)
        tensor = self._tensor
        if _is_its_bytes(tensor, view.nbytes):
            ctypes.memmove(address_of(view), tensor.data_ptr(), view.nbytes)
            return
        dtype, shape = describe(tensor)
        target = as_tensor(view, dtype, shape)
        if not tensor.is_cpu:
            pool.note_device_write()
        if self._ready is None:
            target.copy_(tensor)
            return
        stream = _side_stream(tensor.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            target.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
        stream.synchronize()


def load(
    parts: Parts,
    dtype: str,
    shape: tuple[int, ...],
    copies: Copies,
    note: Callable[[Event], None],
    is_near: bool = False,
) -> torch.Tensor:
    """A tensor of the GPU that a copy on its way fills, as `Copies.load` has it."""
    return copies.load(parts, shape, _BY_NAME[dtype], note, is_near)


def device_view(held: HeldCopy, dtype: str, shape: tuple[int, ...], copies: Copies) -> torch.Tensor:
    """A tensor over a held copy in a device pool, as `Copies.view` has it."""
    return copies.view(held.parts, shape, _BY_NAME[dtype], held.end)


def private_copy(
    view: memoryview, dtype: str, shape: tuple[int, ...], device: torch.device | str
) -> torch.Tensor:
    """A tensor with the bytes of `view` on `device`, complete when this returns.

    Raises torch.OutOfMemoryError where a GPU has no memory left, not even what torch keeps for the
    current stream.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if device.type == "cpu" and view.nbytes:
        copy = torch.empty(shape, dtype=_BY_NAME[dtype], device=device)
        if _is_its_bytes(copy, view.nbytes):
            if view.nbytes >= HUGE_PAGES_FROM_BYTES:
                advise_huge_pages(copy.data_ptr(), view.nbytes)
            ctypes.memmove(copy.data_ptr(), address_of(view), view.nbytes)
            return copy
    tensor = as_tensor(view, dtype, shape)
    if device.type != "cuda":
        return tensor.to(device, copy=True)
    current = torch.cuda.current_stream(device)
    stream = _side_stream(device)
    try:
        with torch.cuda.stream(stream):
            copy = tensor.to(device, non_blocking=True, copy=True)
    except torch.OutOfMemoryError:
        return tensor.to(device, copy=True)
    stream.synchronize()
    copy.record_stream(current)
    return copy


def _is_its_bytes(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether the tensor is one plain, contiguous block of `nbytes` on the CPU."""
    return (
        type(tensor) is torch.Tensor  # a subclass may keep its bytes elsewhere
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.nbytes == nbytes
        and not tensor.is_neg()
        and tensor.data_ptr() != 0  # no element, or no memory at all
    )


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _side_streams[device]
