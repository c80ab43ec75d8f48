"""Copies between a GPU and the pools, on streams of their own beside the engine's work.

The rules that keep every byte right, by the names that docs/gpu-rules.md explains them under:

W1  A save reads its tensor after the work that was queued when the save was asked for.
W2  An entry is committed after this process has seen the end of the copies into its extent.
W3  Until then the tensor stays referred to, and the extent stays the session's.
R1  An entry is held before a load of it is queued.
R2  The hold ends after the load is over.
R3  A load's destination goes to nobody else before the load is over, and the stream that uses it
    waits for the load.
R4  Memory is unregistered and unmapped after all copies from and to it are over: holds and puts
    refer to their session, which lets go of its pools with the last of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ecd_client import forks
from ecd_client.device import accelerator, completions
from ecd_client.errors import DeviceBusy, DeviceError

if TYPE_CHECKING:
    import torch

    from ecd_client.device.driver import Event
    from ecd_client.values import Parts


class _StepOfLoads(threading.local):
    """One thread's part of `Copies.together`."""

    ends: dict[tuple[int, int], Event] | None = None
    """The end of the loads on a stream, by that one and the stream that uses them; None: none."""


class Copies:
    """Loads from and saves to the pools, and copies into a device pool, for one GPU.

    Each of the three has a stream of its own.
    """

    def __init__(self, gpu: accelerator.Accelerator, device: int) -> None:
        """Raises DeviceError, and ImportError where cuda-bindings is missing."""
        from ecd_client.device import driver

        completions.start()  # as a finalizer must not
        self.device = device
        self._gpu, self._driver = gpu, driver
        self._loads, self._saves = gpu.new_stream(device), gpu.new_stream(device)
        self._moves = gpu.new_stream(device)
        self._thread = _StepOfLoads()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Have the loads that this thread queues in the body end as one, for fewer calls.

        The current stream sees their tensors whole from the end of the body on, not before. An
        event of theirs that is asked for in the body is recorded then, and later loads get another.
        Holds that are given up in the body end after it, or once they are many.
        Raises DeviceError at the end of the body: all loads are over, and no tensor may be used.
        """
        with completions.gathering(), self._driver.on(self.device):
            outer = self._thread.ends
            ends: dict[tuple[int, int], Event] = {}
            self._thread.ends = ends
            try:
                yield
            finally:
                self._thread.ends = outer
                came = [self._end_loads(over, *streams) for streams, over in ends.items()]
            for error in filter(None, came):
                raise error

    def _end_loads(self, over: Event, stream: int, current: int) -> BaseException | None:
        """Have the current stream wait for the loads. Returns why it does not, after their end."""
        try:
            over.record()
            if stream != current:
                over.precede(current)  # R3
            return None
        except BaseException as error:
            came = self._outlast(stream)  # without an error all loads are over
            return came if isinstance(error, DeviceError) else error

    def load(
        self,
        source: Parts,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        note: Callable[[Event], None],
        is_near: bool = False,
    ) -> torch.Tensor:
        """Queue copies of memory, given by addresses and sizes, into a new tensor.

        What the current stream does from now on sees the tensor whole; within `together`, what it
        does after that. The memory is to be held until the event that `note` is given is over;
        where this raises, no copy is under way. `is_near`: the memory is the GPU's own, so that a
        copy takes less than one stream's wait for another, and is queued on the current stream
        itself, unless only the loads' stream has memory. Raises DeviceError.
        """
        with self._driver.on(self.device):
            current = self._gpu.current_stream(self.device)
            tensor, stream = self._new(shape, dtype, current, is_near)  # R3
            try:
                for address, to, nbytes in _along(source, tensor.data_ptr()):
                    self._driver.copy(to, address, nbytes, stream)
                note(self._end_of_load(stream, current))
            except BaseException:
                self._outlast(stream)
                raise
            return tensor

    def _end_of_load(self, stream: int, current: int) -> Event:
        """The end of what is queued on the stream, for which the current one waits by then."""
        ends = self._thread.ends
        if ends is None:
            over = self._driver.Event(self.device, stream)
            if stream != current:
                over.precede(current)  # R3
            return over
        shared = ends.get((stream, current))
        if shared is None or not shared.is_open:
            shared = ends[stream, current] = self._driver.Event(self.device, stream, is_open=True)
        return shared

    def _new(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        current: int,
        is_near: bool,
    ) -> tuple[torch.Tensor, int]:
        """A tensor to load into, and the stream for that. Raises DeviceError.

        Without memory for one stream there may be some that torch keeps for the other.
        """
        of_model, own = (None, current), (self._loads, self._loads.cuda_stream)
        first, second = (of_model, own) if is_near else (own, of_model)
        with contextlib.suppress(DeviceBusy):
            return self._gpu.empty(shape, dtype, self.device, first[0]), first[1]
        return self._gpu.empty(shape, dtype, self.device, second[0]), second[1]

    def view(
        self, source: Parts, shape: tuple[int, ...], dtype: torch.dtype, end: Callable[[], None]
    ) -> torch.Tensor:
        """A tensor over the memory of a held copy, which is one part.

        `end` is called after the last reference to the tensor is gone and the work is over that
        was queued by then on the stream that is current now, and on the one that is current where
        the reference goes: any thread may drop it, such as one that collects garbage (R2). Raises
        DeviceError.
        """
        streams = {self._gpu.current_stream(self.device)}

        def unused() -> None:
            if forks.is_uncut():
                return  # the hold is the parent's
            try:
                streams.add(self._gpu.current_stream(self.device))
                completions.after(
                    [self._driver.work_on(self.device, stream) for stream in streams], end
                )
            except DeviceBusy:  # there is no event to be had for now
                completions.aside(lambda: self._end_after(streams, end))
            except Exception:
                completions.after_failure(end)

        [(address, nbytes)] = source
        memory = self._gpu.view(address, nbytes, self.device, unused)
        return memory.view(dtype).view(shape)

    def _end_after(self, streams: Iterable[int], end: Callable[[], None]) -> None:
        completions.outlast(
            lambda: [self._driver.work_on(self.device, on).wait() for on in streams]
        )
        end()

    def queued(self) -> Event:
        """The end of what is queued on the current stream now. Raises DeviceError."""
        return self._driver.Event(self.device, self._gpu.current_stream(self.device))

    def save(self, tensor: torch.Tensor, queued: Event, target: Parts) -> None:
        """Copy a dense tensor, which the work before `queued` makes, to host memory.

        All copies are over when this returns or raises. Raises DeviceError.
        """
        with self._driver.on(self.device):
            stream = self._saves.cuda_stream
            queued.precede(stream)  # W1
            self._copy_all(_along(target, tensor.data_ptr()), stream)
            queued.note_over()

    def move(self, source: Parts, to: int, queued: Event | None = None) -> None:
        """Copy memory, given by addresses and sizes, to an address in a device pool.

        `queued`: after the work before it, if that makes what is copied. All copies are over when
        this returns or raises. Raises DeviceError.
        """
        with self._driver.on(self.device):
            stream = self._moves.cuda_stream
            if queued is not None:
                queued.precede(stream)  # W1
            parts = ((at, address, nbytes) for address, at, nbytes in _along(source, to))
            self._copy_all(parts, stream)

    def _copy_all(self, parts: Iterable[tuple[int, int, int]], stream: int) -> None:
        """Copy each part, given by its target, source and size, and outlast the copies."""
        broken: BaseException | None = None
        try:
            for to, source, nbytes in parts:
                self._driver.copy(to, source, nbytes, stream)
        except BaseException as error:
            broken = error
        came = self._outlast(stream)  # W2, W3
        broken = broken or came  # the first is the cause
        if broken is not None:
            raise broken

    def _outlast(self, stream: int) -> BaseException | None:
        """Wait until all that is queued on the stream is over; return what came in between."""
        return completions.outlast(lambda: self._driver.Event(self.device, stream).wait())


def _along(parts: Parts, start: int) -> Iterator[tuple[int, int, int]]:
    """Each part's address, its place in the one piece of memory from `start` on, and its size."""
    for address, nbytes in parts:
        yield address, start, nbytes
        start += nbytes


_lock = threading.RLock()  # which a garbage-collected item may take within
_copies: dict[int, Copies] = {}


def for_tensor(tensor: torch.Tensor) -> Copies | None:
    """The copies of the tensor's GPU. None: it has none, or torch must copy it."""
    gpu = accelerator.find()
    number = None if gpu is None else gpu.device_of(tensor)
    return None if gpu is None or number is None else _of(gpu, number)


def for_device(device: torch.device) -> Copies | None:
    """The copies of a GPU. None: the device is not one, or torch must copy there."""
    gpu = accelerator.find() if device.type == "cuda" else None
    if gpu is None:
        return None
    return _of(gpu, gpu.current_device() if device.index is None else device.index)


def for_number(number: int) -> Copies | None:
    """The copies of the GPU with this number. None: torch must copy there."""
    gpu = accelerator.find()
    return None if gpu is None else _of(gpu, number)


def _of(gpu: accelerator.Accelerator, number: int) -> Copies:
    with _lock:
        if number not in _copies:
            _copies[number] = Copies(gpu, number)
        return _copies[number]
