"""Calls of CUDA's driver, checked, and memory of GPUs that processes share by a descriptor.

Needs cuda-bindings, which torch's CUDA builds bring along.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cuda

_OK = cuda.CUresult.CUDA_SUCCESS
_BY_FD = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_READ = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
_WRITE = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class CudaError(Exception):
    """The driver refused a call; `name` is that of its CUresult, "" where there is no driver."""

    def __init__(self, call: str, name: str = "") -> None:
        super().__init__(f"{call}: {name}" if name else call)
        self.name = name


def result_of(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Make a call of the driver, and return its CUresult and its values.

    Raises CudaError where there is no call, or a CUresult that the bindings do not know: a driver
    that is newer than they are has others.
    """
    try:
        return tuple(function(*arguments))
    except RuntimeError as error:  # no driver, or one that is too old to have this function
        raise CudaError(str(error)) from None
    except (KeyError, ValueError) as error:  # which one depends on the bindings' version
        raise CudaError(function.__name__, f"unknown: {error}") from None


def refusal(function: Callable[..., Any], result: Any) -> CudaError:
    """The error for a CUresult of the function."""
    return CudaError(function.__name__, str(getattr(result, "name", result)))


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Make a call of the driver, and return its values but the CUresult. Raises CudaError."""
    result, *values = result_of(function, *arguments)
    if result != _OK:
        raise refusal(function, result)
    return values[0] if values else None


def call_anyway(function: Callable[..., Any], *arguments: Any) -> None:
    """Make a call that undoes something, whose refusal nobody could act on."""
    with contextlib.suppress(CudaError):
        result_of(function, *arguments)


def devices() -> dict[int, str]:
    """The UUIDs of the GPUs that this process sees, by their numbers here. Raises CudaError."""
    call(cuda.cuInit, 0)
    return {number: uuid_of(number) for number in range(call(cuda.cuDeviceGetCount))}


def uuid_of(number: int) -> str:
    """The UUID of a GPU, as nvidia-smi writes it. Raises CudaError."""
    # Of bindings below 13 the other function says the GPU's, also for an instance of it (MIG).
    ask = getattr(cuda, "cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid)
    return f"GPU-{uuid.UUID(bytes=bytes(call(ask, call(cuda.cuDeviceGet, number)).bytes))}"


def total_bytes(number: int) -> int:
    """All memory of a GPU. Raises CudaError."""
    return int(call(cuda.cuDeviceTotalMem, call(cuda.cuDeviceGet, number)))


def create(number: int, nbytes: int) -> int:
    """Memory of a GPU, without a context: a descriptor that keeps it and that processes map.

    `nbytes` is a multiple of `granularity`. Raises CudaError.
    """
    handle = call(cuda.cuMemCreate, nbytes, _properties(number), 0)
    try:
        return int(call(cuda.cuMemExportToShareableHandle, handle, _BY_FD, 0))
    finally:
        call(cuda.cuMemRelease, handle)


def granularity(number: int) -> int:
    """The bytes of which the size of memory for `create` is a multiple. Raises CudaError."""
    option = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call(cuda.cuMemGetAllocationGranularity, _properties(number), option))


def map_memory(fd: int, nbytes: int, number: int, writable: bool) -> int:
    """Map memory of `create` for copies of the GPU: its address here. Raises CudaError.

    No CPU can access it, and the GPU no more than it may.
    """
    handle = call(cuda.cuMemImportFromShareableHandle, fd, _BY_FD)
    try:
        address = int(call(cuda.cuMemAddressReserve, nbytes, 0, 0, 0))
        try:
            call(cuda.cuMemMap, address, nbytes, 0, handle, 0)
            try:
                access = cuda.CUmemAccessDesc()
                access.location.type, access.location.id = _ON_DEVICE, number
                access.flags = _WRITE if writable else _READ
                call(cuda.cuMemSetAccess, address, nbytes, [access], 1)
            except BaseException:
                call(cuda.cuMemUnmap, address, nbytes)
                raise
        except BaseException:
            call(cuda.cuMemAddressFree, address, nbytes)
            raise
        return address
    finally:
        call(cuda.cuMemRelease, handle)  # the mapping keeps the memory


def unmap_memory(address: int, nbytes: int) -> None:
    """Undo `map_memory`; no copy may be under way there. Raises CudaError."""
    call(cuda.cuMemUnmap, address, nbytes)
    call(cuda.cuMemAddressFree, address, nbytes)


def _properties(number: int) -> Any:
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _BY_FD
    properties.location.type, properties.location.id = _ON_DEVICE, number
    return properties
