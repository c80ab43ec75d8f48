"""The files in shared memory that a client opens at the start of its session."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ecd.core.model.types import Key, SessionId
from ecd.memory.device import DevicePool
from ecd.memory.host import HostPool
from ecd.memory.shared_index import SharedIndex
from ecd_proto.shm.files import elsewhere_offset, key_offset
from ecd_proto.shm.session_page import GRANTED_POOL
from ecd_proto.v1 import cache_pb2 as pb


class SessionFiles:
    """The pools, the index and the paths of sockets, as clients receive them."""

    def __init__(
        self,
        pools: Mapping[int, HostPool],
        index: SharedIndex | None,
        doorbell: Path | None,
        attach: Path | None,
        devices: Mapping[int, DevicePool] = MappingProxyType({}),
    ) -> None:
        """`pools` are by their numbers. The locks of all sessions lie beside pool GRANTED_POOL.

        Without an `index` every get is a call; without a `doorbell` every put is one;
        without an `attach` socket no client copies by DMA.
        """
        self._pools, self._index = pools, index
        self._devices = devices
        self._locks = pools[GRANTED_POOL]
        self._doorbell, self._attach = doorbell, attach

    def pool_files(self) -> list[pb.PoolFile]:
        files = [
            pb.PoolFile(
                pool=number,
                kind="host",
                path=str(pool.path),
                nbytes=pool.nbytes,
                inode=pool.inode,
                huge_bytes=pool.huge_bytes,
            )
            for number, pool in self._pools.items()
        ]
        for number, device in self._devices.items():
            file = pb.PoolFile(pool=number, kind="device", nbytes=device.nbytes, device=device.uuid)
            files.append(file)
        return files

    def index_file(self, session: SessionId) -> pb.IndexFile | None:
        """Open a page for the session. None: it must make a call for everything."""
        offset = None if self._index is None else self._index.open_page(session)
        if self._index is None or offset is None:
            return None
        return pb.IndexFile(
            path=str(self._index.path),
            pins_path=str(self._index.pins_path),
            pins_offset=offset,
            doorbell_path="" if self._doorbell is None else str(self._doorbell),
        )

    def attach_path(self) -> str:
        return "" if self._attach is None else str(self._attach)

    def lock_path(self) -> str:
        return str(self._locks.sessions_path)

    def is_session_locked(self, offset: int) -> bool:
        return self._locks.is_locked(offset)

    def is_key_locked(self, key: Key) -> bool:
        with contextlib.suppress(OSError):
            return self._locks.is_locked(key_offset(*key))
        return False

    def note_elsewhere(self, key: Key, *, is_made: bool) -> None:
        with contextlib.suppress(OSError):  # the kernel has no room for it: nobody knows
            self._locks.lock(elsewhere_offset(*key), is_held=is_made)

    def note_namespace(self, session: SessionId, namespace: str) -> None:
        """Count the session's misses without a call as this namespace's, from now on."""
        if self._index is not None:
            self._index.note_namespace(session, namespace)

    def pinned_bytes(self, session: SessionId) -> int:
        return 0 if self._index is None else self._index.pinned_bytes(session)

    def dma_word(self, session: SessionId) -> int:
        return 0 if self._index is None else self._index.dma_word(session)
