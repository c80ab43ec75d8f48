"""Item: what a get returns, the entry's bytes for as long as they are held."""

from __future__ import annotations

import math
import sys
import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from ecd_client import arguments, forks
from ecd_client.errors import DeviceBusy, DeviceError, LeaseExpired
from ecd_client.session.leases import Hold
from ecd_proto.shm.session_page import MAX_PINS

if TYPE_CHECKING:
    import torch

    from ecd_client.device.copies import Copies
    from ecd_client.device.driver import Event
    from ecd_client.device.pool import HeldCopy


class Handle(NamedTuple):
    """All that another process needs to read an item, for as long as this one keeps it open.

    The pool's file opens as `pool_path`, or, after a restart of the daemon, as `pool_fd_path`.
    `expires_s` is on the node's monotonic clock; infinite for a pin.
    """

    incarnation: str
    pool_path: str
    pool_fd_path: str
    pool_bytes: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    expires_s: float


class Item:
    """A leased or pinned entry: its bytes stay the same until the item is closed.

    Use it as a context manager, or call `close`. Otherwise the item lives as long as it or one of
    its views and tensors is referred to. A lease is renewed in the background.
    """

    _queueing: AbstractContextManager[bool] | None = None
    """Held while a load is queued; made with the first one."""
    was_near = False
    """Whether the last copy or view of the item came from the GPU's device pool."""

    def __init__(self, namespace: str, mm_hash: str, hold: Hold) -> None:
        self.namespace, self.mm_hash = namespace, mm_hash
        self._hold = hold
        self._open = {"hold": hold}
        self._loads: list[Event] = []  # copies to GPUs that may be under way

    @property
    def dtype(self) -> str:
        """The dtype's name in torch, such as `bfloat16`."""
        return self._hold.content.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape; `()` for a scalar."""
        return tuple(self._hold.content.shape)

    @property
    def nbytes(self) -> int:
        """The entry's size in bytes."""
        return self._hold.content.nbytes

    @property
    def metadata(self) -> bytes:
        """The writer's attachment, at most 4 KiB."""
        return self._hold.content.metadata

    @property
    def cost_s(self) -> float:
        """Seconds it took to encode, if the writer said."""
        return self._hold.content.cost_s

    @property
    def view(self) -> memoryview:
        """The bytes in the pool, for reading only. Raises LeaseExpired."""
        self.check()
        return self._hold.pool.read_view(self._hold.extent, self)

    @property
    def tensor(self) -> torch.Tensor:
        """A CPU tensor of `shape` and `dtype` over the pool's bytes: no copy.

        For reading only: the memory is mapped read-only, and writing to it ends the process.
        Valid until the item is closed, and in this process alone. Raises LeaseExpired.
        """
        from ecd_client.tensors import as_tensor  # imports torch, which is optional

        return as_tensor(self.view, self.dtype, self.shape)

    def to(self, device: torch.device | str = "cpu", *, non_blocking: bool = False) -> torch.Tensor:
        """A private copy on `device`, good for ever. Raises LeaseExpired, DeviceError.

        With `non_blocking` a copy to a GPU is queued and not waited for: work that is queued on the
        current stream from now on sees it whole, other streams have to wait for that one. The item
        may be closed at once; the entry is held until the copy is over. An entry that is leased,
        not pinned, is waited for all the same: its lease must hold to the end.
        """
        from ecd_client.device.copies import for_device
        from ecd_client.tensors import private_copy

        device = arguments.device(device)
        copies = for_device(device)
        if copies is None:
            try:
                copy = private_copy(self.view, self.dtype, self.shape, device)
            except (AssertionError, RuntimeError) as error:  # it has no such device, or is full
                raise DeviceError(f"torch does not copy to {device}: {error}") from None
        else:
            from ecd_client.device.completions import under_way

            self.check()
            hold = self._hold
            queueing = self.__dict__.setdefault("_queueing", threading.RLock())
            with queueing:
                self.check()  # a close by another thread sees the load, or is seen
                self._loads = under_way(self._loads)
                copied = self._near_copy(copies)
                try:
                    copy = self._load(copies, copied)
                except DeviceBusy:
                    raise
                except DeviceError as error:
                    if copied is None or hold.session.near is None:
                        raise
                    hold.session.near.fail(error)
                    copied = None
                    copy = self._load(copies, None)
                self.was_near = copied is not None
                over = self._loads[-1]
            if non_blocking and hold.expires_s == math.inf:
                return copy
            over.wait()
            with queueing:
                self._loads = [each for each in self._loads if each is not over]
        self.check()  # the lease held until every byte was read
        return copy

    def _load(self, copies: Copies, copied: HeldCopy | None) -> torch.Tensor:
        """Queue a load of the copy, whose hold ends with it, or of the item. Raises DeviceError."""
        from ecd_client.device.completions import after
        from ecd_client.tensors import load

        hold = self._hold
        try:
            parts = hold.pool.load_parts(hold.extent) if copied is None else copied.parts
            is_near = copied is not None
            return load(parts, self.dtype, self.shape, copies, self._loads.append, is_near)
        finally:
            if copied is not None:
                after(self._loads, copied.end)

    def device_view(self, device: torch.device | str = "cuda") -> torch.Tensor | None:
        """A tensor over the copy in the GPU's device pool. None: there is none by now.

        For reading only: a write ends the process's CUDA context. The item may be closed at once.
        The copy is held until nothing refers to the tensor or its views, and what is queued by then
        is over on the stream that is current now, and on the dropping thread's; work on another
        stream has to be over, or one of these must have waited for it. A session has room for some
        hundred. Raises LeaseExpired, DeviceError.
        """
        from ecd_client.device.copies import for_device
        from ecd_client.tensors import device_view

        copies = for_device(arguments.device(device))
        self.check()
        index = self._hold.session.index
        if copies is None or index is None or index.pins_left < MAX_PINS // 2:
            return None  # the others are for those who only load
        held = self._near_copy(copies)
        if held is None:
            return None
        try:
            view = device_view(held, self.dtype, self.shape, copies)
        except BaseException:
            held.end()
            raise
        self.was_near = True
        return view

    def _near_copy(self, copies: Copies) -> HeldCopy | None:
        """Hold the copy on this GPU; if there is none, request one for the next time."""
        hold = self._hold
        hold.pool.use_dma(copies.device)
        near = hold.session.near
        if near is None or near.device != copies.device or not (hold.entry and self.nbytes):
            return None
        key = self.namespace, self.mm_hash
        copied = near.hold(hold.session, key, hold.entry, self.nbytes)
        if copied is None:
            near.promote_soon(hold.session, key, hold.entry)
        return copied

    def handle(self) -> Handle:
        """The item, for another process of this node to read."""
        hold = self._hold
        session, pool, extent, content = hold.session, hold.pool, hold.extent, hold.content
        return Handle(  # in order, as naming each takes longer than all the rest
            session.incarnation,
            pool.path,
            pool.fd_path,
            pool.nbytes,
            extent.offset,
            extent.nbytes,
            content.dtype,
            tuple(content.shape),
            hold.expires_s,
        )

    def is_of(self, handle: Handle) -> bool:
        """Whether the handle names this entry."""
        own = self.handle()._replace(pool_fd_path=handle.pool_fd_path, expires_s=handle.expires_s)
        return own == handle

    def has_left(self, share: float) -> bool:
        """Whether at least this share of the lease's TTL is left; a pin has no limit."""
        return self._hold.has_left(share)

    def count_use(self, *, for_another: bool = False) -> None:
        """Count the hit of an item that was looked up without (`is_use=False`), while it is open.

        `for_another`: another engine, which reads the entry next, is spared the encode.
        """
        if (hold := self._open.get("hold")) is not None and not hold.session.is_cut_off:
            hold.note_use(self.namespace, self.mm_hash, for_another=for_another)

    def check(self) -> None:
        """Raise LeaseExpired unless the lease holds now."""
        if not self._open:
            raise LeaseExpired(f"the item {self.mm_hash!r} was closed")
        if self._hold.session.is_cut_off:
            raise LeaseExpired(f"{self.mm_hash!r} was leased before a fork: get it in the child")
        if not self._hold.holds:
            raise LeaseExpired(
                f"the lease on {self.mm_hash!r} ran out: the daemon was away, or this process "
                "stood still. Get it again"
            )

    def close(self) -> None:
        """End the lease now. Views of the item may show another entry's bytes from now on."""
        if forks.is_uncut():
            return
        hold = self._open.pop("hold", None)  # None: closed, perhaps by another thread
        if hold is None or hold.session.is_cut_off:
            return
        queueing = self._queueing
        if queueing is None:
            hold.end()
            return
        from ecd_client.device.completions import after

        with queueing:
            loads = self._loads
        after(loads, hold.end)

    def __del__(self) -> None:
        if self._open and not sys.is_finalizing():  # the daemon sees the end of the process
            self.close()

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"<Item {self.mm_hash!r}, {self.dtype} {shape}, {self.nbytes:,} bytes, {state}>"

    def __enter__(self) -> Item:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
