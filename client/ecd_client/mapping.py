"""Files in shared memory, mapped without a copy and unmapped when nothing refers to them."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from typing import Any

MADV_POPULATE_READ = 22  # Linux 5.14; elsewhere the first touch pays
MADV_POPULATE_WRITE = 23
CHUNK_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """A whole file, mapped. Every view of it keeps it mapped.

    Python's own `mmap` gives no buffer of a read-only mapping that torch takes without a copy,
    hence the C library's.
    """

    def __init__(self, fd: int, nbytes: int, writable: bool) -> None:
        """Raises OSError."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "mmap")
        self._unmap = weakref.finalize(self, _libc.munmap, address, nbytes)
        self._unmap.atexit = False
        self._address, self._nbytes, self._writable = address, nbytes, writable

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes at `offset`. Writing to a view of a read-only mapping ends the process."""
        if not 0 <= offset <= offset + nbytes <= self._nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} of a mapping of {self._nbytes}")
        array: Any = (ctypes.c_ubyte * nbytes).from_address(self._address + offset)
        array.mapping = self  # what refers to the view refers to the mapping
        return memoryview(array).cast("B")

    def populate_soon(self) -> None:
        """Fill the page tables on a thread of its own, so that copies do not pay for faults."""
        threading.Thread(target=self._populate, name="ecd-populate", daemon=True).start()

    def _populate(self) -> None:
        advice = MADV_POPULATE_WRITE if self._writable else MADV_POPULATE_READ
        for offset in range(0, self._nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, self._nbytes - offset)
            if _libc.madvise(self._address + offset, nbytes, advice) != 0:
                return
