"""The stand-in's GPU for ecd's client, in place of torch's CUDA: tensors at device addresses.

A tensor here is one of torch's CPU tensors over memory that no CPU may touch, so its shape, dtype
and address can be used and its content cannot. Memory comes from a caching allocator with torch's
rules: a block goes back to the stream it was made for as soon as its tensor is gone, and is given
to the next one of its size at once; a block that other streams use waits for what they have queued.
"""

from __future__ import annotations

import ctypes
import math
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver as cuda

from ecd_client.device import accelerator, driver
from ecd_client.errors import DeviceBusy
from ecd_proto.collected import when_collected
from ecd_proto.mapped_file import MappedFile

MAX_CONTENT_BYTES = 64 << 20
"""Largest tensor whose content can be read."""


def call(function: Any, *arguments: Any) -> Any:
    result, *values = function(*arguments)
    if result == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryError(function.__name__)
    assert result == cuda.CUresult.CUDA_SUCCESS, f"{function.__name__}: {result.name}"
    return values[0] if values else None


@dataclass(frozen=True)
class Stream:
    cuda_stream: int


class StandinGpu:
    """One GPU, with a stream that is current for all threads but those of `use_stream`."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._free: dict[tuple[int, int], list[int]] = defaultdict(list)  # by stream and size
        self._busy: list[tuple[driver.Event, tuple[int, int], int]] = []
        self._live: dict[int, int] = {}
        self._own = threading.local()
        self._out = MappedFile.of_memory(MAX_CONTENT_BYTES)
        with driver.on(device):
            self.stream = self.new_stream(device)
            driver.register(self._out.address, self._out.nbytes)

    @classmethod
    def use(cls, device: int = 0) -> StandinGpu:
        """Make ecd's client take it for torch's."""
        gpu = cls(device)
        accelerator._found = gpu
        return gpu

    # -- what ecd's client asks ----------------------------------------------------------------

    def device_of(self, tensor: torch.Tensor) -> int | None:
        return self.device if tensor.numel() and tensor.data_ptr() in self._live else None

    def current_device(self) -> int:
        return self.device

    def current_stream(self, device: int) -> int:
        current: Stream = getattr(self._own, "stream", self.stream)
        return current.cuda_stream

    def new_stream(self, device: int) -> Stream:
        flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        with driver.on(device):
            return Stream(int(call(cuda.cuStreamCreate, flags)))

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: int, stream: Any = None
    ) -> torch.Tensor:
        chosen = stream or Stream(self.current_stream(device))
        try:
            return self._tensor(shape, dtype, chosen, also_used_by=self.stream)
        except MemoryError as error:
            raise DeviceBusy(str(error)) from None

    def view(
        self, address: int, nbytes: int, device: int, unused: Callable[[], None]
    ) -> torch.Tensor:
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        when_collected(array, unused)
        return torch.frombuffer(array, dtype=torch.uint8)

    # -- what a model does ---------------------------------------------------------------------

    def encode(self, shape: tuple[int, ...], dtype: torch.dtype, byte: int) -> torch.Tensor:
        """An encoder's output: a tensor that a kernel on its way fills with one byte."""
        tensor = self._tensor(shape, dtype, self.stream)
        self.fill(tensor, byte)
        return tensor

    def use_stream(self, stream: Stream) -> None:
        """Make a stream current for this thread; kernels are queued on the model's all the same."""
        self._own.stream = stream

    def fill(self, tensor: torch.Tensor, byte: int) -> None:
        """Queue a kernel that fills the tensor with one byte."""
        with driver.on(self.device):
            stream = cuda.CUstream(self.stream.cuda_stream)
            call(cuda.cuMemsetD8Async, tensor.data_ptr(), byte, tensor.nbytes, stream)

    def wait(self) -> None:
        """Wait for all that is queued on the model's stream."""
        driver.Event(self.device, self.stream.cuda_stream).wait()

    def content(self, tensor: torch.Tensor) -> bytes:
        """The tensor's bytes, after all that is queued on the model's stream."""
        with driver.on(self.device):
            stream = cuda.CUstream(self.stream.cuda_stream)
            to, nbytes = self._out.address, tensor.nbytes
            call(cuda.cuMemcpyAsync, to, tensor.data_ptr(), nbytes, stream)
            call(cuda.cuStreamSynchronize, stream)
        return self._out.view(0, nbytes).tobytes()

    # -- memory --------------------------------------------------------------------------------

    def _tensor(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        stream: Stream,
        also_used_by: Stream | None = None,
    ) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        kind = stream.cuda_stream, nbytes
        with self._lock:
            self._reap()
            if self._free[kind]:
                address = self._free[kind].pop()
            else:
                with driver.on(self.device):
                    address = int(call(cuda.cuMemAlloc, nbytes))
            self._live[address] = nbytes
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        when_collected(array, self._give_back, address, kind, also_used_by)
        return torch.frombuffer(array, dtype=dtype).view(shape)

    def _give_back(self, address: int, kind: tuple[int, int], also: Stream | None) -> None:
        with self._lock:
            self._live.pop(address, None)
            if also is None:
                self._free[kind].append(address)
            else:
                event = driver.Event(self.device, also.cuda_stream)
                self._busy.append((event, kind, address))

    def _reap(self) -> None:
        over = [each for each in self._busy if each[0].is_over()]
        self._busy = [each for each in self._busy if each not in over]
        for _, kind, address in over:
            self._free[kind].append(address)


class CallsByThread:
    """Counts calls of the driver by their threads' names, but those that make tensors."""

    def __init__(self, gpu: StandinGpu | None = None) -> None:
        """`gpu` makes the tensors, if the driver is the stand-in."""
        self.counts: Counter[str] = Counter()
        self._own = threading.local()
        for name, function in vars(driver.cuda).items():
            if re.match("cu[A-Z]", name) and callable(function) and not isinstance(function, type):
                setattr(driver.cuda, name, self._counted(function))
        if gpu is not None:
            gpu.empty = self._uncounted(gpu.empty)
            gpu._give_back = self._uncounted(gpu._give_back)

    def _counted(self, function: Callable) -> Callable:
        def counted(*arguments: object) -> object:
            if not getattr(self._own, "makes_tensors", False):
                self.counts[threading.current_thread().name] += 1
            return function(*arguments)

        counted.__name__ = function.__name__
        return counted

    def _uncounted(self, function: Callable) -> Callable:
        def uncounted(*arguments: object, **named: object) -> object:
            self._own.makes_tensors = True
            try:
                return function(*arguments, **named)
            finally:
                self._own.makes_tensors = False

        return uncounted

    def since(self, before: Counter[str]) -> dict[str, int]:
        """Calls since the counts were so, by thread; this one is the "caller"."""
        own = threading.current_thread().name
        made = (self.counts.copy() - before).items()
        return {"caller" if name == own else name.partition("_")[0]: n for name, n in made}
