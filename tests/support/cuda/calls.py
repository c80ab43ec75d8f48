"""Calls of CUDA's driver, for the scripts that tests run: short, and checked."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any

from cuda.bindings import driver as cu

MIB = 1 << 20
_FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def error(function: Any, *arguments: Any) -> int:
    """The number of the CUresult that a call returns."""
    return int(function(*arguments)[0])


def call(function: Any, *arguments: Any) -> Any:
    """What a call returns beside its CUresult, which must be success."""
    result, *values = function(*arguments)
    assert result == cu.CUresult.CUDA_SUCCESS, f"{function.__name__}: {result!r}"
    return values[0] if values else None


def say(text: object = "") -> None:
    """Tell the test that the script is here, and wait until it writes a line."""
    print(text, flush=True)
    sys.stdin.readline()


def use_device(number: int = 0) -> None:
    """Have a device's primary context current in this thread."""
    call(cu.cuInit, 0)
    call(cu.cuCtxSetCurrent, call(cu.cuDevicePrimaryCtxRetain, call(cu.cuDeviceGet, number)))


def stream(flags: int = cu.CUstream_flags.CU_STREAM_NON_BLOCKING) -> Any:
    return call(cu.cuStreamCreate, flags)


def event(on: Any) -> Any:
    """An event recorded on a stream."""
    made = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    call(cu.cuEventRecord, made, on)
    return made


# -- memory ----------------------------------------------------------------------------------------


def host(nbytes: int, path: str = "", writable: bool = True) -> int:
    """The address of new host memory; with a path, that of a shared mapping of the file."""
    fd = os.open(path, os.O_RDWR) if path else -1
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    kind = mmap.MAP_SHARED if path else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int = _libc.mmap(None, nbytes, access, kind, fd, 0)
    assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    if path:
        os.close(fd)
    return address


def pinned(nbytes: int, path: str = "") -> int:
    """The address of host memory that is registered."""
    address = host(nbytes, path)
    call(cu.cuMemHostRegister, address, nbytes, cu.CU_MEMHOSTREGISTER_PORTABLE)
    return address


def tensor(content: bytes) -> int:
    """The address of device memory with this content."""
    address = int(call(cu.cuMemAlloc, len(content)))
    call(cu.cuMemcpyHtoD, address, content, len(content))
    call(cu.cuCtxSynchronize)
    return address


def read(address: int, nbytes: int) -> bytes:
    """The bytes at a device's address, once all that was asked of the device is done."""
    call(cu.cuCtxSynchronize)
    buffer = ctypes.create_string_buffer(nbytes)
    call(cu.cuMemcpyDtoH, ctypes.addressof(buffer), address, nbytes)
    return buffer.raw


def _properties(device: int) -> Any:
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _FD
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    return properties


def create(nbytes: int, device: int = 0) -> tuple[Any, ...]:
    """cuMemCreate of memory that can be exported: its CUresult, and the handle."""
    return cu.cuMemCreate(nbytes, _properties(device), 0)


def export(handle: Any) -> int:
    return int(call(cu.cuMemExportToShareableHandle, handle, _FD, 0))


def import_fd(fd: int) -> tuple[Any, ...]:
    """cuMemImportFromShareableHandle of a descriptor: its CUresult, and the handle."""
    return cu.cuMemImportFromShareableHandle(fd, _FD)


def map_handle(handle: Any, nbytes: int, writable: bool = True) -> int:
    """The address at which device 0 may read, or also write, a handle's memory."""
    address = int(call(cu.cuMemAddressReserve, nbytes, 0, 0, 0))
    call(cu.cuMemMap, address, nbytes, 0, handle, 0)
    access, flags = cu.CUmemAccessDesc(), cu.CUmemAccess_flags
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = (
        flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if writable
        else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    )
    call(cu.cuMemSetAccess, address, nbytes, [access], 1)
    return address
