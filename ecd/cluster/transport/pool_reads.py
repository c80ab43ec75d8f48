"""Brings peers' bytes into this node's pools: reads of their memory, and what came in messages."""

from __future__ import annotations

from collections.abc import Mapping

from ecd.cluster.transport.reads import Reading, Reads
from ecd.cluster.transport.transfers import RemoteExtent
from ecd.core.model.types import Extent
from ecd_proto.mapped_file import MappedFile
from ecd_proto.v1 import peer_pb2 as pb


class PoolReads:
    """An engine's reads, with extents of the pools as their destinations."""

    def __init__(self, reads: Reads, pools: Mapping[int, MappedFile]) -> None:
        """`pools` are the writable memory of each pool, by its number."""
        self._reads, self._pools = reads, pools

    def begin(
        self, described: pb.NodeDescription, address: int, extent: Extent, asked_s: float
    ) -> Reading:
        """Begin to read from the address at the described node; `asked_s` as for `Reads.read`."""
        source = RemoteExtent(
            described.engine,
            address,
            extent.nbytes,
            described.identity_address,
            bytes.fromhex(described.incarnation),
        )
        target = self._pools[extent.pool].address + extent.offset
        return self._reads.read(source, target, asked_s)

    def fill(self, extent: Extent, data: bytes) -> None:
        """Write bytes that came in a message."""
        self._pools[extent.pool].view(extent.offset, extent.nbytes)[:] = data
