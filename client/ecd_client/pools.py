"""The daemon's direct pools in this process's memory, by their numbers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterable

from ecd_client.device import pinned
from ecd_client.device.dma import SessionDma
from ecd_client.errors import EcdError
from ecd_client.files import open_file
from ecd_client.values import Extent, Parts
from ecd_proto.mapped_file import HUGE_SHARE, MappedFile, populate_aside
from ecd_proto.shm.session_page import GRANTED_POOL, Grant
from ecd_proto.v1 import cache_pb2 as pb


class MappedPool:
    """One pool's file, mapped for reading at once and for writing when first written.

    `fd_path` leads to the file for as long as this process keeps it open, also when a restart of
    the daemon has unlinked `path`.
    """

    def __init__(self, file: pb.PoolFile, uid: int, dma: SessionDma | None = None) -> None:
        """Map a file that must be user `uid`'s and the one the daemon meant. Raises OSError.

        Without `dma` no copy of a GPU is pinned.
        """
        self.number, self.path, self.nbytes = file.pool, file.path, file.nbytes
        with contextlib.ExitStack() as opened:
            self._fd = open_file(file.path, os.O_RDWR, uid)
            opened.callback(os.close, self._fd)
            if os.fstat(self._fd).st_ino != file.inode:
                raise FileNotFoundError(f"{file.path} is not the daemon's file")
            self.is_huge = file.huge_bytes >= HUGE_SHARE * file.nbytes
            """Whether the whole pool's page tables are small enough to be filled ahead of need."""
            self._readable = self._map(writable=False)
            self._file = opened.pop_all()
        self.fd_path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._lock = threading.RLock()  # which a garbage-collected item may take within
        self._dma = dma
        self._pinned: pinned.PinnedPool | None = None
        self._is_closed = False
        self._writable: MappedFile | None = None

    def populate_soon(self) -> None:
        """Fill the page tables, on a thread, where huge pages make them few."""
        if self.is_huge:
            self._readable.populate_soon()

    def read_view(self, extent: Extent, keeps: object = None) -> memoryview:
        """The extent's bytes, for reading; every reference to the view keeps `keeps` alive."""
        view = self._readable.view(extent.offset, extent.nbytes, keeps)
        self._readable.populate_once(extent.offset, extent.nbytes)
        return view

    def write_view(self, extent: Extent) -> memoryview:
        """The extent's bytes, for writing."""
        mapping = self._writable or self._map_writable()
        view = mapping.view(extent.offset, extent.nbytes)
        mapping.populate_once(extent.offset, extent.nbytes)
        return view

    def expect_writes(self, pieces: Iterable[Grant]) -> None:
        """Populate memory that will be written, on a thread of its own."""
        mapping = self._writable or self._map_writable()
        unpopulated = [
            piece for piece in pieces if not mapping.is_populated(piece.offset, piece.nbytes)
        ]

        def populate() -> None:
            for piece in unpopulated:
                mapping.populate_once(piece.offset, piece.nbytes)

        if unpopulated:
            populate_aside(populate)

    def _map_writable(self) -> MappedFile:
        with self._lock:
            if self._writable is None:
                self._writable = self._map(writable=True)
            return self._writable

    def _map(self, writable: bool) -> MappedFile:
        return MappedFile(self._fd, self.nbytes, writable, is_huge=self.is_huge)

    # -- copies of GPUs ------------------------------------------------------------------------

    def use_dma(self, device: int) -> None:
        """Begin to pin the pools of this session for a GPU's copies, unless that was done."""
        if self._dma is not None:
            self._dma.begin(device)

    def pin(self, device: int) -> None:
        """Register the pool with CUDA, in the background. Raises OSError."""
        with self._lock:  # for a moment: a collection within it may close another session
            if self._pinned is not None or self._is_closed:
                return
            fd = os.dup(self._fd)
        try:
            pool = pinned.acquire(fd, self.nbytes, device, os.path.dirname(self.path))
        finally:
            os.close(fd)
        with self._lock:
            is_late = self._is_closed
            if not is_late:
                self._pinned = pool
        if is_late:
            pinned.release(pool)

    def wait_pinned(self) -> int:
        """Wait until as much as possible is registered; returns how many bytes."""
        pinned_pool = self._pinned
        return 0 if pinned_pool is None else pinned_pool.wait()

    @property
    def pinning(self) -> pinned.Pinning:
        """The progress of pinning; all zero while it runs, or if it was not begun."""
        pinned_pool = self._pinned
        return pinned.Pinning() if pinned_pool is None else pinned_pool.outcome

    def load_parts(self, extent: Extent) -> Parts:
        """The memory for a GPU to copy the extent from: pinned, or mapped for reading."""
        return self._pinned_parts(extent) or _whole(self.read_view(extent))

    def save_parts(self, extent: Extent) -> Parts:
        """The memory for a GPU to copy the extent to: pinned, or mapped for writing."""
        self.note_device_write()
        is_known = self._dma is not None and self._dma.may_write
        parts = self._pinned_parts(extent) if is_known else []
        return parts or _whole(self.write_view(extent))

    def note_device_write(self) -> None:
        """Say that a device may write to the pool until the session's end (D1).

        It may do so where nothing is pinned, too: GPUs that share the host's page tables, as a
        GH200's do, and runtimes that pin memory for the time of a copy, as AMD's does.
        """
        if self._dma is not None:
            self._dma.note_write()

    def _pinned_parts(self, extent: Extent) -> Parts:
        """The pinned parts; empty if not all of the extent is pinned."""
        pinned_pool = self._pinned
        return [] if pinned_pool is None else pinned_pool.parts(extent.offset, extent.nbytes)

    # -- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file, and unpin the pool. Views keep their memory mapped."""
        with self._lock:
            self._is_closed = True
            unused, self._pinned = self._pinned, None
        if unused is not None:
            pinned.release(unused)
        self._file.close()

    def cut_off(self) -> None:
        """In a forked child: writes here no longer reach the pool."""
        self._lock = threading.RLock()
        if self._writable is not None:
            self._writable.cut_off()
        if self._pinned is not None:
            self._pinned.cut_off()
            self._pinned = None


class MappedPools:
    """Every host pool that the daemon named in its Welcome.

    An extent elsewhere, as in a pool that the daemon added later, cannot be read in place.
    """

    def __init__(
        self, files: Iterable[pb.PoolFile], uid: int, dma: SessionDma | None = None
    ) -> None:
        """Map files that must be user `uid`'s. Raises OSError."""
        with contextlib.ExitStack() as opened:
            self.by_number: dict[int, MappedPool] = {}
            for file in files:
                if file.kind != "host":
                    continue
                self.by_number[file.pool] = MappedPool(file, uid, dma)
                opened.callback(self.by_number[file.pool].close)
            if dma is not None:
                dma.add(self.by_number.values())
            if GRANTED_POOL not in self.by_number:
                raise FileNotFoundError(f"the daemon did not name host pool {GRANTED_POOL}")
            self._files = opened.pop_all()
        self.granted = self.by_number[GRANTED_POOL]

    def of(self, extent: Extent) -> MappedPool:
        """The pool that the extent lies in. Raises EcdError: this process has not mapped it."""
        pool = self.by_number.get(extent.pool)
        if pool is None or extent.offset + extent.nbytes > pool.nbytes:
            raise EcdError(
                f"the entry lies at {extent.offset} of pool {extent.pool}, and this client has "
                f"mapped only {sorted(self.by_number)}: is it older than the daemon?"
            )
        return pool

    def populate_soon(self) -> None:
        for pool in self.by_number.values():
            pool.populate_soon()

    def pin(self, device: int) -> None:
        """Pin all pools for this GPU's copies, in the background, unless that has begun."""
        self.granted.use_dma(device)

    def close(self) -> None:
        self._files.close()

    def cut_off(self) -> None:
        for pool in self.by_number.values():
            pool.cut_off()


def _whole(view: memoryview) -> Parts:
    return [(address_of(view), view.nbytes)] if view.nbytes else []


def address_of(view: memoryview) -> int:
    """The address of a view's first byte in this process; 0 for an empty one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0
