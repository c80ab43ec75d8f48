"""The GPUs that this process uses through torch, as far as copies beside its own work need them."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ecd_client.errors import DeviceBusy, DeviceError
from ecd_proto.collected import when_collected

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

BINDINGS_SINCE = (12, 9, 1)
"""The version of cuda-bindings that first lets other threads run while a call waits."""


class CudaStream(Protocol):
    @property
    def cuda_stream(self) -> int:
        """The stream's number in CUDA's driver."""


class Accelerator(Protocol):
    """Tensors and streams of the process's GPUs, which are numbered as its driver numbers them."""

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """The GPU that has the tensor; None: it is not on a GPU of this kind."""

    def current_device(self) -> int: ...

    def current_stream(self, device: int) -> int:
        """The number of the stream that is current for this thread."""

    def new_stream(self, device: int) -> CudaStream: ...

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: int, stream: Any = None
    ) -> torch.Tensor:
        """A new tensor for `stream` to fill, or the current one, and the current stream to use.

        Its memory is given to others only after both have done what was queued before its end.
        Raises DeviceError.
        """

    def view(
        self, address: int, nbytes: int, device: int, unused: Callable[[], None]
    ) -> torch.Tensor:
        """A tensor of bytes over memory that is mapped for the device.

        `unused` is called when no tensor refers to the memory any more. Raises DeviceError.
        """


MAX_STREAMS = 64
"""Streams that were current for a load whose objects of torch's are kept: making one takes long."""


class TorchCuda:
    """NVIDIA's GPUs, by torch. Tests without a GPU run only `empty`, on a torch that is none."""

    def __init__(self) -> None:
        from torch import _C, cuda

        self._cuda: Any = cuda
        self._torch: Any = _C
        self._raw_stream: Any = _C._cuda_getCurrentRawStream
        self._stream_of = functools.lru_cache(MAX_STREAMS)(self._new_stream_of)

    def _new_stream_of(self, number: int, device: int, kind: int) -> Any:
        """torch's object of a stream that it names so, as its `current_stream` makes them."""
        return self._cuda.Stream(stream_id=number, device_index=device, device_type=kind)

    def device_of(self, tensor: torch.Tensor) -> int | None:
        return tensor.get_device() if tensor.is_cuda else None

    def current_device(self) -> int:
        device: int = self._cuda.current_device()
        return device

    def current_stream(self, device: int) -> int:
        return int(self._raw_stream(device))

    def new_stream(self, device: int) -> Any:
        """A stream of the driver's, as torch's own are few and shared with graphs' captures."""
        from ecd_client.device import driver

        return self._cuda.ExternalStream(driver.new_stream(device), device=device)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: int, stream: Any = None
    ) -> torch.Tensor:
        import torch

        place = torch.device("cuda", device)
        try:
            if stream is None:
                return torch.empty(shape, dtype=dtype, device=place)
            with self._on(device):
                current = self._torch._cuda_getCurrentStream(device)
                try:
                    self._make_current(stream.stream_id, stream.device_index, stream.device_type)
                    made = torch.empty(shape, dtype=dtype, device=place)
                finally:
                    self._make_current(*current)
        except torch.OutOfMemoryError as error:
            raise DeviceBusy(str(error)) from None
        made.record_stream(self._stream_of(*current))
        return made

    def _on(self, device: int) -> contextlib.AbstractContextManager[Any]:
        """Have torch's current device be this one: its choice of a stream changes the device."""
        is_current = self._torch._cuda_getDevice() == device
        return contextlib.nullcontext() if is_current else self._cuda.device(device)

    def _make_current(self, number: int, device: int, kind: int) -> None:
        """As `torch.cuda.set_stream`, which takes a stream's object."""
        self._torch._cuda_setStream(stream_id=number, device_index=device, device_type=kind)

    def view(
        self, address: int, nbytes: int, device: int, unused: Callable[[], None]
    ) -> torch.Tensor:
        import torch

        memory = _Memory(address, nbytes)
        try:
            tensor = torch.as_tensor(memory, device=torch.device("cuda", device))
        except (RuntimeError, TypeError, ValueError) as error:
            raise DeviceError(f"torch takes no memory of ours: {error}") from None
        when_collected(memory, unused)
        return tensor


class _Memory:
    """Bytes of a GPU by CUDA's array interface, which the tensors over them keep alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),  # torch takes no memory that is marked read-only
            "strides": None,
            "stream": None,
        }


def _check_bindings() -> None:
    """Import the driver's calls. Raises Exception, whose text says what is wrong."""
    import cuda.bindings

    from ecd_client.device import driver

    version = str(cuda.bindings.__version__)
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < BINDINGS_SINCE:
        raise ImportError(f"{version} of it holds up all threads while one waits")
    assert driver


_found: Accelerator | None = None
_is_missing = False


def may_have_context() -> bool:
    """Whether this process may have a context on a GPU, and with it the device's files."""
    torch: Any = sys.modules.get("torch")
    is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", bool)
    return _found is not None or bool(is_initialized())


def find() -> Accelerator | None:
    """The GPUs, once this process has used one; None also where torch is not NVIDIA's.

    A process that has not used its GPU yet is left alone: the driver's context takes 0.5 GiB.
    """
    global _found, _is_missing
    if _found is not None or _is_missing:
        return _found
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "version"):  # half imported
        return None
    if torch.version.cuda is None:
        _is_missing = True
    elif torch.cuda.is_initialized():
        try:
            _check_bindings()
        except Exception as error:  # not installed, or not for this driver
            _is_missing = True
            logger.warning(
                "GPU copies are not pinned and hold up their caller, as cuda-bindings cannot be "
                "used: %s. `pip install 'cuda-bindings>=12.9.1'` mends that; take one below 13 "
                "where the driver is below 580",
                error,
            )
        else:
            _found = TorchCuda()
    return _found
