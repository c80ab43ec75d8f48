"""Files in shared memory, mapped without a copy and unmapped when nothing refers to them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

from ecd_proto.collected import when_collected

MADV_POPULATE_READ = 22  # Linux 5.14; elsewhere the first touch pays
MADV_POPULATE_WRITE = 23
_MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25  # Linux 6.1
CHUNK_BYTES = 64 << 20
HUGE_BYTES = 2 << 20
"""A huge page, and the alignment of mappings that can use one."""
HUGE_SHARE = 0.9
"""Share of a pool in huge pages from which on clients fill their page tables at once."""
UNIT_BYTES = 64 << 10
"""The unit in which `populate_once` remembers small pages; a fault fills as much for a reader."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _MFD_NOEXEC_SEAL = 1, 2, 8
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW = 1, 2, 4
"""As in Linux's headers. Some builds of Python have neither these names nor `os.memfd_create`."""
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


def memory_file(name: str, nbytes: int) -> int:
    """The descriptor of new memory, whose size nobody can change. Raises OSError."""
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    # Without this flag a hardened machine makes none (`vm.memfd_noexec` = 2).
    fd: int = _libc.memfd_create(name.encode(), flags | _MFD_NOEXEC_SEAL)
    if fd < 0 and ctypes.get_errno() == errno.EINVAL:  # Linux before 6.3
        fd = _libc.memfd_create(name.encode(), flags)
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL | _SHRINK | _GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def keeps_size(fd: int) -> bool:
    """Whether the file is memory that cannot shrink any more. Raises OSError: it is no memory."""
    return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _SHRINK)


class MappedFile:
    """A file, or a part of it, mapped. Every view of it keeps it mapped.

    Python's own `mmap` gives no buffer of a read-only mapping that torch takes without a copy,
    hence the C library's.
    """

    def __init__(
        self, fd: int, nbytes: int, writable: bool, offset: int = 0, is_huge: bool = False
    ) -> None:
        """`offset` must be a page's; `is_huge`: most pages are. Raises OSError."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        spare = HUGE_BYTES if nbytes >= HUGE_BYTES else 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = _mapped(None, nbytes + spare, _PROT_NONE, flags, -1, 0)
        when_collected(self, _libc.munmap, start, nbytes + spare)
        address = start if not spare else -(-start // HUGE_BYTES) * HUGE_BYTES
        self.address = _mapped(
            address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, offset
        )
        self.nbytes, self._writable = nbytes, writable
        self._unit = HUGE_BYTES if is_huge else UNIT_BYTES
        self._populated = bytearray(-(-nbytes // self._unit))
        self._is_populated = False

    @classmethod
    def of_memory(cls, nbytes: int, content: bytes = b"", writable: bool = True) -> MappedFile:
        """New memory that begins with `content`. Raises OSError."""
        fd = memory_file("ecd", nbytes)
        try:
            os.write(fd, content)
            return cls(fd, nbytes, writable)
        finally:
            os.close(fd)

    def view(self, offset: int, nbytes: int, keeps: object = None) -> memoryview:
        """The bytes at `offset`; what refers to the view refers to `keeps` too.

        Writing to a view of a read-only mapping ends the process.
        """
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} of a mapping of {self.nbytes}")
        array: Any = (ctypes.c_ubyte * nbytes).from_address(self.address + offset)
        array.keeps = self, keeps
        return memoryview(array).cast("B")

    def cut_off(self) -> None:
        """Put private memory, all zero, in its place: nothing written here reaches the file."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = _MAP_FIXED | _MAP_NORESERVE | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        _libc.mmap(self.address, self.nbytes, protection, flags, -1, 0)

    def collapse(self, offset: int, nbytes: int) -> bool:
        """Have the file's pages moved to huge ones, those that it lacks made of zeros.

        At least one page of each huge page must be there. False: some stay small, for lack of
        memory or of a kernel that can do it.
        """
        return bool(_libc.madvise(self.address + offset, nbytes, MADV_COLLAPSE) == 0)

    def is_populated(self, offset: int, nbytes: int) -> bool:
        """Whether `populate_once` and `populate_soon` have seen to all of these page tables."""
        if self._is_populated:
            return True
        last = -(-(offset + nbytes) // self._unit)
        return self._populated.find(0, offset // self._unit, last) < 0

    def populate_once(self, offset: int, nbytes: int) -> None:
        """`populate` page tables that `view` gives, unless this mapping has done so before."""
        if self.is_populated(offset, nbytes):
            return
        first, last = offset // self._unit, -(-(offset + nbytes) // self._unit)
        start, end = first * self._unit, min(last * self._unit, self.nbytes)
        with contextlib.suppress(OSError):
            self.populate(start, end - start)
        self._populated[first:last] = bytes([1]) * (last - first)

    def populate_soon(self) -> None:
        """`populate` all of it on a thread of its own, if one can be had."""
        self._is_populated = True
        populate_aside(self._populate_all)

    def populate(self, offset: int, nbytes: int) -> bool:
        """Fill these page tables, so that copies do not pay for faults.

        False: a kernel before 5.14, where the first touch pays. Raises OSError.
        """
        advice = MADV_POPULATE_WRITE if self._writable else MADV_POPULATE_READ
        if _libc.madvise(self.address + offset, nbytes, advice) == 0:
            return True
        if ctypes.get_errno() == errno.EINVAL:
            return False
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "madvise")

    def _populate_all(self) -> None:
        for offset in range(0, self.nbytes, CHUNK_BYTES):
            with contextlib.suppress(OSError):
                if self.populate(offset, min(CHUNK_BYTES, self.nbytes - offset)):
                    continue
            return


def populate_aside(populate: Callable[[], None]) -> None:
    """Run `populate` on a thread of its own; without one the first touches pay."""
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=populate, name="ecd-populate", daemon=True).start()


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Have this process's own memory, as far as it is new, come in huge pages."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    _libc.madvise(
        start, (address + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE, _MADV_HUGEPAGE
    )


def _mapped(
    address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int
) -> int:
    mapped: int | None = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    if mapped is None or mapped == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "mmap")
    return mapped
