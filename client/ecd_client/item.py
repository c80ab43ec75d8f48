"""What a get gives: the entry's bytes for as long as its lease holds."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ecd_client import forks
from ecd_client.errors import LeaseExpired

if TYPE_CHECKING:
    import torch

    from ecd_client.conversation import Lease
    from ecd_client.index import Pin


class Item:
    """A leased entry: its bytes stay what they are until the item is closed.

    Use it as a context manager, or call `close`. An item that is neither lives as long as it or
    one of its views and tensors is referred to. The lease is renewed in the background.
    """

    def __init__(self, namespace: str, mm_hash: str, lease: Lease | Pin) -> None:
        self.namespace, self.mm_hash = namespace, mm_hash
        self._lease = lease
        self._open = {"lease": lease}

    @property
    def dtype(self) -> str:
        """The dtype's name in torch, such as `bfloat16`."""
        return self._lease.content.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._lease.content.shape)

    @property
    def nbytes(self) -> int:
        return self._lease.content.nbytes

    @property
    def metadata(self) -> bytes:
        """What the writer attached, at most 4 KiB."""
        return self._lease.content.metadata

    @property
    def cost_s(self) -> float:
        """Seconds it took to encode, if the writer said."""
        return self._lease.content.cost_s

    @property
    def lease(self) -> Lease | Pin:
        """For those who hand the extent to another process."""
        return self._lease

    @property
    def view(self) -> memoryview:
        """The bytes in the pool, for reading only. Raises LeaseExpired."""
        self.check()
        return self._lease.conversation.read_view(self._lease.extent, self)

    @property
    def tensor(self) -> torch.Tensor:
        """A CPU tensor of `shape` and `dtype` over the pool's bytes: no copy.

        For reading only: the memory is mapped read-only, and writing to it ends the process.
        Valid until the item is closed, and in this process alone. Raises LeaseExpired.
        """
        from ecd_client.tensors import as_tensor  # torch is imported by those who use it

        return as_tensor(self.view, self.dtype, self.shape)

    def to(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """A private copy on `device`, good for ever. Raises LeaseExpired."""
        from ecd_client.tensors import private_copy

        copy = private_copy(self.view, self.dtype, self.shape, device)
        self.check()  # the lease held until every byte was read
        return copy

    def check(self) -> None:
        """Raise LeaseExpired unless the lease holds now."""
        if not self._open:
            raise LeaseExpired(f"the item {self.mm_hash!r} was closed")
        if self._lease.conversation.is_cut_off:
            raise LeaseExpired(f"{self.mm_hash!r} was leased before a fork: get it in the child")
        if not self._lease.holds:
            raise LeaseExpired(
                f"the lease on {self.mm_hash!r} ran out: the daemon was away, or this process "
                "stood still. Get it again"
            )

    def close(self) -> None:
        """End the lease now. Views of the item may show another entry's bytes from now on."""
        lease = self._open.pop("lease", None)  # None: closed, perhaps by another thread
        if lease is not None:
            lease.end()

    def __del__(self) -> None:
        # The daemon sees the end of the process; in a child that was forked just now the lease is
        # the parent's.
        if self._open and not sys.is_finalizing() and os.getpid() == forks.pid:
            self.close()

    def __enter__(self) -> Item:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
