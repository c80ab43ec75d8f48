"""The calls of CUDA's driver that ecd makes, checked.

They come from cuda-bindings, which torch's CUDA builds bring along. Streams are plain numbers, as
torch gives them. `on` makes the primary context of a device, which torch works in, current for a
while: whatever the thread had before is current again after that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from cuda.bindings import driver as cuda

from ecd_client import clock, forks
from ecd_client.errors import RETRY_S, DeviceBusy, DeviceError
from ecd_proto import cuda as memory
from ecd_proto.collected import when_collected
from ecd_proto.cuda import CudaError

T = TypeVar("T")

_OK, _NOT_READY = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_NOT_READY
_CAPTURED = cuda.CUresult.CUDA_ERROR_CAPTURED_EVENT
_UNCAPTURED = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_PORTABLE = cuda.CU_MEMHOSTREGISTER_PORTABLE
_EVENT_FLAGS = (
    cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING | cuda.CUevent_flags.CU_EVENT_BLOCKING_SYNC
)

_RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

MAX_FREE_EVENTS = 64
"""Events of a device that are kept for later: making and destroying one are calls, too."""

_contexts: dict[int, Any] = {}
_free_events: dict[int, list[Any]] = {}


def _checked(function: Callable[..., T]) -> Callable[..., T]:
    """The function, with the driver's errors raised as the client's."""

    def call(*arguments: Any) -> T:
        try:
            return function(*arguments)
        except CudaError as error:
            raise _meaning(error) from None

    return call


class _Captured(DeviceBusy):
    """The event was recorded into a graph, so its work is never reported as over."""


def _meaning(error: CudaError) -> DeviceError:
    if error.name == _CAPTURED.name:
        return _Captured(str(error))
    is_passing = error.name == "CUDA_ERROR_OUT_OF_MEMORY" or "_STREAM_CAPTURE_" in error.name
    return (DeviceBusy if is_passing else DeviceError)(str(error))


_call = _checked(memory.call)
_result_of = _checked(memory.result_of)
uuid_of = _checked(memory.uuid_of)
map_memory = _checked(memory.map_memory)
unmap_memory = _checked(memory.unmap_memory)


class _Current(threading.local):
    """One thread's part of what `on` does."""

    device: int | None = None
    """The device whose context `on` has made current."""


_thread = _Current()


class on:  # noqa: N801  # it is used as a function is
    """Have the device's primary context current in the body. Raises DeviceError.

    The engine may capture a CUDA graph meanwhile, on another thread. The driver forbids most calls
    to all threads then, and the capture breaks, but for threads that say that they do without it.
    Within a body for the same device this makes no call.
    """

    __slots__ = ("_before", "_device", "_mode")

    def __init__(self, device: int) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = _thread.device
        if self._before == self._device:
            return
        context = _contexts.get(self._device)
        if context is None:
            _call(cuda.cuInit, 0)
            context = _call(cuda.cuDevicePrimaryCtxRetain, _call(cuda.cuDeviceGet, self._device))
            context = _contexts.setdefault(self._device, context)
        _call(cuda.cuCtxPushCurrent, context)
        try:
            self._mode = _call(cuda.cuThreadExchangeStreamCaptureMode, _RELAXED)
        except BaseException:
            memory.call_anyway(cuda.cuCtxPopCurrent)
            raise
        _thread.device = self._device

    def __exit__(self, *_: object) -> None:
        if self._before == self._device:
            return
        _thread.device = self._before
        try:
            memory.call_anyway(cuda.cuThreadExchangeStreamCaptureMode, self._mode)
        finally:
            memory.call_anyway(cuda.cuCtxPopCurrent)


def register(address: int, nbytes: int) -> None:
    """Pin host memory, for copies of every device of this process. Raises DeviceError."""
    _call(cuda.cuMemHostRegister, address, nbytes, _PORTABLE)


def unregister(address: int) -> None:
    """Undo `register`; no copy may be under way there. Raises DeviceError."""
    _call(cuda.cuMemHostUnregister, address)


def new_stream(device: int) -> int:
    """A stream that waits for no other. Raises DeviceError."""
    with on(device):
        return int(_call(cuda.cuStreamCreate, cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))


def _stream(number: int) -> Any:
    """The driver's handle of a stream.

    torch's number 0 is the legacy default stream. For the driver 0 may be the thread's own:
    CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM says so.
    """
    return cuda.CUstream(number or cuda.CU_STREAM_LEGACY)


def copy(to: int, source: int, nbytes: int, stream: int) -> None:
    """Queue a copy between any two addresses.

    Returns at once where host memory is registered, and may wait where it is not. Raises
    DeviceError.
    """
    _call(cuda.cuMemcpyAsync, to, source, nbytes, _stream(stream))


class Event:
    """The end of all that was queued on a stream of the device when this was recorded."""

    is_open = True
    """Whether `record` has yet to come, so that what is queued now is covered, too."""
    _is_recorded = False

    def __init__(self, device: int, stream: int, is_open: bool = False) -> None:
        """Record it at once, or with `is_open` when it is first asked for. Raises DeviceError."""
        self._device, self._stream = device, stream
        self._recording = threading.RLock()  # which a garbage-collected item may take within
        self._may_reuse: list[bool] = []
        with on(device):
            free = _free_events.setdefault(device, [])
            try:
                self._event = free.pop()
            except IndexError:
                self._event = _call(cuda.cuEventCreate, _EVENT_FLAGS)
            when_collected(self, _give_back, self._event, self._may_reuse, free)
            if not is_open:
                self.record()

    def record(self) -> None:
        """Record the event, unless that was done. Raises DeviceError."""
        if self._is_recorded:
            return
        with self._recording:
            if not self._is_recorded:
                self.is_open = False  # before the record, which covers what found it open
                self._record()
                self._is_recorded = True

    def _record(self) -> None:
        with on(self._device):
            _call(cuda.cuEventRecord, self._event, _stream(self._stream))

    def is_over(self) -> bool:
        """Whether all of the work is done. Raises DeviceError if the device has failed."""
        if self._may_reuse:
            return True
        with on(self._device):
            self.record()
            result = _result_of(cuda.cuEventQuery, self._event)[0]
            if result == _CAPTURED:
                self._record()
                return False
        if result not in (_OK, _NOT_READY):
            raise _meaning(memory.refusal(cuda.cuEventQuery, result))
        if result == _OK:
            self.note_over()
        return bool(result == _OK)

    def stay_on_device(self) -> None:
        """Have its device current in this thread for good, so that `on` makes no calls there.

        For a thread that calls no user's code, unless Python's collector does. Its first device
        stays. Raises DeviceError.
        """
        if _thread.device is None:
            on(self._device).__enter__()

    def wait(self) -> None:
        """Block this thread until `is_over`. Raises DeviceError where the device has failed."""
        while not self._may_reuse:
            try:
                with on(self._device):
                    self.record()
                    try:
                        _call(cuda.cuEventSynchronize, self._event)
                    except _Captured:
                        self._record()
                        raise
                self.note_over()
            except DeviceBusy:
                clock.sleep(RETRY_S)

    def note_over(self) -> None:
        """Note that all of the work is done, so that the driver's event can be used again."""
        self._may_reuse.append(True)

    def precede(self, stream: int) -> None:
        """Make all later work on `stream` wait for this event. Raises DeviceError."""
        with on(self._device):
            self.record()
            _call(cuda.cuStreamWaitEvent, _stream(stream), self._event, 0)


def _give_back(event: Any, may_reuse: list[bool], free: list[Any]) -> None:
    """Keep the driver's event for another one of ours if it was seen to be over."""
    if may_reuse and len(free) < MAX_FREE_EVENTS:
        free.append(event)
    elif not (forks.is_child or forks.is_uncut()):  # where a call of the driver may never return
        memory.call_anyway(cuda.cuEventDestroy, event)


def work_on(device: int, stream: int) -> Event:
    """The end of what an engine has queued on its stream, which it may be capturing into a graph.

    Raises DeviceBusy while it does: an event that is recorded then is of the graph, and asking for
    it breaks the capture. Raises DeviceError.
    """
    with on(device):
        _check_is_uncaptured(stream)
        event = Event(device, stream)
        _check_is_uncaptured(stream)  # another thread may have begun in between
        return event


def _check_is_uncaptured(stream: int) -> None:
    if _call(cuda.cuStreamIsCapturing, _stream(stream)) != _UNCAPTURED:
        raise DeviceBusy("the stream is being captured")
